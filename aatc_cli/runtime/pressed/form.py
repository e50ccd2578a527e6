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
class ModelPress:
    """A press over all layers of a model. outputs: weights of the output projections, of presses that read them."""

    pressed: Pressed
    heads: int
    outputs: tuple[Tensor | None, ...] = field(repr=False)

    def places(self, room: int | None) -> list[PressPlace]:
        """What a store has to know of every compressed layer; raises `AatcError` for ``room``, which none has."""
        if room is not None:
            raise AatcError("a simulated cache has no spare room", "leave out the number of tokens it is for")
        return [PressPlace(self.pressed, place, self.heads, output) for place, output in enumerate(self.outputs)]

    def facts(self) -> list[Any]:
        """The press, the share it leaves, and what its codes cost."""
        return [str(self.pressed.rule.name), self.pressed.share, self.pressed.costs]


@dataclass(frozen=True)
class PressedForm(SimulatedForm):
    """Stores of full vectors with a mask."""

    press: ModelPress = field(kw_only=True)

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every compressed layer."""
        empty = self.empty.expand(batch, *self.empty.shape)
        return [
            PressedStore(layer, self.window, self.coordinates, empty, place)
            for layer, place in zip(self.layers, self.press.places(room), strict=True)
        ]

    def facts(self) -> list[Any]:
        """Everything that the codecs hold, and the press."""
        return [*super().facts(), *self.press.facts()]


@dataclass(frozen=True)
class PressedTilesForm(TilesForm):
    """Stores of simulated tiles with a mask."""

    press: ModelPress = field(kw_only=True)

    def stores(self, batch: int, room: int | None = None) -> list[Store]:
        """Empty stores of every compressed layer."""
        return [
            PressedTileStore(layer, self.window, batch, self.dtype, place)
            for layer, place in zip(self.layers, self.press.places(room), strict=True)
        ]

    def facts(self) -> list[Any]:
        """Everything that the codecs hold, and the press."""
        return [*super().facts(), *self.press.facts()]


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
    press = ModelPress(pressed, geometry.kv_heads, outputs)
    made: PressedForm | PressedTilesForm
    if isinstance(form, TilesForm):
        made = PressedTilesForm(form.layers, form.window, form.dtype, "simulated", form.coordinates, press=press)
    else:
        assert isinstance(form, SimulatedForm)
        made = PressedForm(form.layers, form.window, form.coordinates, form.empty, "simulated", press=press)
    # how much a press leaves depends on where a prompt ended, if it acts then: no number of tokens says the bytes
    layout = None if pressed.acts == "prompt" else simulated.layout
    return CacheSpec.of(model, layers, made, made.window, layout)


def pressed_of(spec: CacheSpec) -> Pressed | None:
    """The press of these caches; None where all tokens stay."""
    return spec.form.press.pressed if isinstance(spec.form, PressedForm | PressedTilesForm) else None
