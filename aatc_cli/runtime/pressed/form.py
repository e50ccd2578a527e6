"""The pressed forms: simulated caches of a plan with a press, of any codes and of tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from aatc_cli.core.press.state import Pressed
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, AttentionSite, geometry_of
from aatc_cli.runtime.pressed.store import PressedStore, PressPlace
from aatc_cli.runtime.pressed.tiles import PressedTileStore
from aatc_cli.runtime.simulated.form import SimulatedForm
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.store import Kind, Store
from aatc_cli.runtime.tiles.form import TilesForm


@dataclass(frozen=True)
class PressedForm(SimulatedForm):
    """Stores of full vectors with a mask. outputs: weights of the output projections, of presses that read them."""

    pressed: Pressed | None = None
    heads: int = 1
    outputs: tuple[Tensor | None, ...] = field(default=(), repr=False)

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every compressed layer."""
        assert self.pressed is not None
        if room is not None:
            raise AatcError("a simulated cache has no spare room", "leave out the number of tokens it is for")
        empty = self.empty.expand(batch, *self.empty.shape)
        return [
            PressedStore(
                layer, self.window, self.coordinates, empty, PressPlace(self.pressed, place, self.heads, output)
            )
            for place, (layer, output) in enumerate(zip(self.layers, self.outputs, strict=True))
        ]

    def facts(self) -> list[Any]:
        """Everything that the codecs hold, and the press."""
        assert self.pressed is not None
        return [*super().facts(), str(self.pressed.rule.name), self.pressed.share, self.pressed.costs]


@dataclass(frozen=True)
class PressedTilesForm(TilesForm):
    """Stores of simulated tiles with a mask; fields as of `PressedForm`."""

    pressed: Pressed | None = None
    heads: int = 1
    outputs: tuple[Tensor | None, ...] = field(default=(), repr=False)

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every compressed layer."""
        assert self.pressed is not None
        if room is not None:
            raise AatcError("a simulated cache has no spare room", "leave out the number of tokens it is for")
        return [
            PressedTileStore(layer, self.window, batch, self.dtype, PressPlace(self.pressed, place, self.heads, output))
            for place, (layer, output) in enumerate(zip(self.layers, self.outputs, strict=True))
        ]

    def facts(self) -> list[Any]:
        """Everything that the codecs hold, and the press."""
        assert self.pressed is not None
        return [*super().facts(), str(self.pressed.rule.name), self.pressed.share, self.pressed.costs]


def pressed_spec(
    model: nn.Module, layers: list[AttentionLayer], simulated: CacheSpec, pressed: Pressed, kind: Kind
) -> CacheSpec:
    """The caches of ``simulated`` with a press; raises `AatcError` for another ``kind`` of cache."""
    if kind != "simulated":
        raise AatcError(
            f"press {pressed.rule.name} leaves other tokens in every kv head, which the {kind} cache does not hold",
            "use --cache simulated, which answers as a cache of the tokens that are left",
        )
    form, geometry = simulated.form, geometry_of(model.config)
    sites = [layer for layer in layers if isinstance(layer, AttentionSite)]
    outputs = tuple(site.o.weight.detach() if pressed.rule.output else None for site in sites)
    made: PressedForm | PressedTilesForm
    if isinstance(form, TilesForm):
        made = PressedTilesForm(
            form.layers, form.window, form.dtype, "simulated", form.coordinates, pressed, geometry.kv_heads, outputs
        )
    else:
        assert isinstance(form, SimulatedForm)
        made = PressedForm(
            form.layers, form.window, form.coordinates, form.empty, "simulated", pressed, geometry.kv_heads, outputs
        )
    # how much a press leaves depends on where a prompt ended, if it acts then: no number of tokens says the bytes
    layout = None if pressed.acts == "prompt" else simulated.layout
    return CacheSpec.of(model, layers, made, made.window, layout)


def pressed_of(spec: CacheSpec) -> Pressed | None:
    """The press of these caches; None where all tokens stay."""
    return spec.form.pressed if isinstance(spec.form, PressedForm | PressedTilesForm) else None
