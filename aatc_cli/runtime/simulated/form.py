"""The simulated form: any codecs on a model, as stores of full vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aatc_cli.artifacts.tensor_file import tensor_digest
from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.codec import Codec
from aatc_cli.core.joint import LayersCodec
from aatc_cli.core.layout import CacheLayout
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, geometry_of
from aatc_cli.runtime.simulated.store import SimulatedLayer, SimulatedStore
from aatc_cli.runtime.spec import CacheSpec, check_layers
from aatc_cli.runtime.store import Coordinates, Kind, Store

AnyCodecs = Sequence[Mapping[Side, Codec | LayersCodec]]


@dataclass(frozen=True)
class SimulatedForm:
    """Stores of full vectors; keys in the coordinates that the codecs were made for. ``empty`` [0, C] of the model."""

    layers: tuple[SimulatedLayer, ...]
    window: Window
    coordinates: Coordinates
    empty: Tensor

    kind: Kind = "simulated"

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every compressed layer."""
        if room is not None:
            raise AatcError("a simulated cache has no spare room", "leave out the number of tokens it is for")
        empty = self.empty.expand(batch, *self.empty.shape)
        return [SimulatedStore(layer, self.window, self.coordinates, empty) for layer in self.layers]

    def facts(self) -> list[Any]:
        """Everything that the codecs hold."""
        codecs = [codec for layer in self.layers for codec in layer.codecs.values()]
        # one codec over all layers is there once for each of them
        found = {id(codec): _facts(codec) for codec in {id(codec): codec for codec in codecs}.values()}
        return ["simulated", self.coordinates, [found[id(codec)] for codec in codecs]]


def simulated_spec(
    model: nn.Module,
    layers: list[AttentionLayer],
    codecs: AnyCodecs,
    window: Window,
    coordinates: Coordinates,
    layout: CacheLayout | None = None,
) -> CacheSpec:
    """Simulated caches of ``codecs``, which are on the model's device. ``layout``: the byte law of their plan.

    Raises `AatcError` when the number of codecs does not fit the model, or for a window that is not exact.
    """
    if not window.exact:
        raise AatcError("a simulated cache holds no window of 8 bits", "use a window of 16 bits")
    made = []
    for site, pair in zip(check_layers(layers, len(codecs)), codecs, strict=True):
        before = coordinates == "pre-rope"
        biases: dict[Side, Tensor | None] = {"k": site.k_bias if before else None, "v": site.v_bias if before else None}
        made.append(SimulatedLayer(pair, biases))
    parameter = next(model.parameters())
    empty = torch.empty(0, geometry_of(model.config).channels, dtype=parameter.dtype, device=parameter.device)
    form = SimulatedForm(tuple(made), window, coordinates, empty)
    return CacheSpec.of(model, layers, form, window, layout)


def _facts(thing: Any) -> Any:
    """What ``thing`` holds, as JSON with digests of tensors."""
    if isinstance(thing, Tensor):
        return tensor_digest(thing)
    if isinstance(thing, Mapping):
        return {str(name): _facts(part) for name, part in thing.items()}
    if isinstance(thing, list | tuple):
        return [_facts(part) for part in thing]
    if hasattr(thing, "__dict__"):
        return [type(thing).__name__, _facts(vars(thing))]
    return thing if isinstance(thing, str | int | float | bool) or thing is None else repr(thing)
