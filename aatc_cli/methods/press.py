"""Press: which tokens stay, per kv head. What a choice on this axis says and does.

A press is one file in `presses/` and a line of the registry. It scores the tokens that have left the window; what
stays of them is coded as the recipe says, and nobody sees the others again. Sinks and recent tokens are the recipe's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from aatc_cli.methods.axes import Choice

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.layout import CacheLayout
    from aatc_cli.core.press.priced import Levels
    from aatc_cli.core.press.reading import Reading
    from aatc_cli.core.press.seen import Seen
    from aatc_cli.core.press.state import Pressed
    from aatc_cli.methods.sites import PlannedWidths


class Press(Choice):
    """What decides which tokens stay.

    acts: once at the end of a prompt, whose queries and keys it is then shown, or whenever a block leaves the window.
    sums: it asks for the attention that tokens received so far, a number of 32 bits for every token and kv head held.
    rereads: it asks for a second pass over the prompt. says_classes: it also says of which class of tiles every token
    is, eviction being one. output: it asks for the output projection. spread: what shares
    places, tokens of a head, of a layer's heads, or of all. floor: of an even share, what each head keeps all the same.
    """

    acts: ClassVar[Literal["prompt", "flush"]] = "prompt"
    sums: ClassVar[bool] = False
    rereads: ClassVar[bool] = False
    says_classes: ClassVar[bool] = False
    output: ClassVar[bool] = False
    spread: ClassVar[Literal["head", "layer", "model"]] = "head"
    floor: ClassVar[float] = 0.0

    @property
    def nothing(self) -> bool:
        """Whether all tokens stay."""
        return False

    def of_plan(self, layout: CacheLayout, losses: Callable[[], Any]) -> Pressed | None:
        """The press at the share of a plan with this byte law; None where all tokens stay.

        losses: gives those of every class, [L, H, n + 1], for a press that says classes.
        """
        from aatc_cli.core.press.layout import PressLayout
        from aatc_cli.core.press.state import Pressed
        from aatc_cli.core.press.tile_layout import PressTileLayout

        if isinstance(layout, PressLayout | PressTileLayout):
            levels = self.levels(layout, losses()) if self.says_classes else None
            return Pressed(self, layout.keep, layout.token_bytes(), levels)
        return None

    def levels(self, layout: CacheLayout, losses: Any) -> Levels:
        """What classes cost, for a press that says them."""
        raise NotImplementedError

    def over_readings(self, readings: Sequence[Reading], among: Tensor, packed: int, pressed: Pressed) -> list[Tensor]:
        """What a press that asks for a second pass leaves of the ``packed`` tokens ``among`` [P] those of a prompt.

        Classes [1, H, P] by layer, 0 where there are none; -1 where a token is evicted.
        """
        import torch

        from aatc_cli.core.press.choice import kept_count, share_over_layers

        scores = [reading.largest for reading in readings]
        candidates = among.expand(1, scores[0].shape[1], -1)
        count, costs = kept_count(packed, pressed.share), pressed.costs_of_all()
        masks = share_over_layers(scores, candidates, count, costs)
        return [torch.where(mask, 0, -1) for mask in masks]

    def score(self, seen: Seen) -> Tensor:
        """What a token is worth, [B, H, T]; of those that are no candidates it may be anything but NaN."""
        raise NotImplementedError

    def keep(self, seen: Seen, count: int) -> Tensor:
        """The candidates that stay, ``count`` of every head or as many on average: mask [B, H, T]."""
        import torch

        from aatc_cli.core.press.choice import best, share_out

        scores = self.score(seen)
        if self.spread == "layer":
            return best(scores, seen.candidates, share_out(scores, seen.candidates, count, self.floor, seen.costs))
        counts = torch.full(scores.shape[:2], count, device=scores.device)
        return best(scores, seen.candidates, counts)

    def layout(self, law: CacheLayout, plan: PlannedWidths) -> CacheLayout:
        """The byte law of the kept tokens, from that of all of them; without widths all heads are taken for alike."""
        from aatc_cli.core.press.layout import PressLayout
        from aatc_cli.core.press.tile_layout import PressTileLayout
        from aatc_cli.core.tile_layout import TileLayout

        if isinstance(law, TileLayout):
            return PressTileLayout.of(law, plan.bits, plan.keep)
        widths = plan.bits[0] if plan.bits else None
        return PressLayout.of(law, widths, plan.keep, sums=self.sums, at_end=self.acts == "prompt")


class NoPress(Press):
    """Of recipes that keep all tokens."""

    name = "none"
    meaning = "all tokens stay"

    @property
    def nothing(self) -> bool:
        """Yes."""
        return True

    def layout(self, law: CacheLayout, plan: PlannedWidths) -> CacheLayout:
        """As it is."""
        return law


def over(seen: Seen, scores: Tensor, first: int) -> Tensor:
    """The scores with those of the ``first`` tokens above all others."""
    import torch

    return torch.where(seen.places < first, torch.full_like(scores, torch.inf), scores)


def narrowed(seen: Seen, taken: Tensor) -> Seen:
    """What is seen without the candidates that are taken already."""
    return replace(seen, candidates=seen.candidates & ~taken)
