"""Teacher-forced evaluation of tiles behind a press: what stays of a prompt fills tiles, head by head.

The press acts when the prompt ends. Of every kv head the tokens that stay follow one another in tiles, ranked by what
they received of the whole prompt; the last tile of a head may lack tokens, which count as those that received least. A
press that says the class of every token itself leaves nothing to rank.
What leaves the window later is kept whole, in tiles as without a press.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aatc_cli.core.layout import packed_tokens
from aatc_cli.core.press.seen import Prompt, step_angles
from aatc_cli.core.press.state import PressState
from aatc_cli.core.tile_codec import TileCodec
from aatc_cli.evals.forced.pressed import OnKept, facts_of
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.evals.forced.tiles import OnClasses, Stays, tile_codecs, tiled_attention
from aatc_cli.models.attention import AttentionFunction, LayerInputs, behind_prompt


def pressed_tiles(
    method: Method,
    prompt: int,
    chosen: Sequence[Tensor],
    on_kept: OnKept | None = None,
    on_classes: OnClasses | None = None,
) -> AttentionFunction:
    """The attention of tiles behind a press, as `pressed.pressed_attention` has it for other codes.

    on_classes: told the classes of packed tokens of every layer; those of evicted ones say nothing.
    """
    codecs, window, pressed = tile_codecs(method), method.window, method.press
    assert pressed is not None
    first = codecs[0]["k"]
    assert isinstance(first, TileCodec)

    def attend(inputs: LayerInputs) -> Tensor:
        layer, (batch, heads) = inputs.site.layer, inputs.key.shape[:2]
        state = PressState.empty(pressed, window, (batch, heads), inputs.key.device, layer)
        state.chosen = chosen[layer] if chosen else None
        facts = facts_of(inputs.site, inputs.scaling, pressed)
        query, keys, values = (x[:, :, :prompt] for x in (inputs.query, inputs.key, inputs.value))
        state.see(Prompt(query, keys, facts, step_angles(inputs.cos[0], inputs.sin[0])))
        state.settle(packed_tokens(prompt, window), facts, lambda: values)
        if on_kept is not None:
            on_kept(layer, state.kept, state.packed)
        stays = Stays(state.kept, state.classes)
        out, classes = tiled_attention(inputs, codecs[layer], first.rule, window, prompt, stays)
        if on_classes is not None:
            on_classes(layer, classes)
        return out

    return behind_prompt(prompt, attend)
