"""What a cache gives back for tokens it holds in its sinks and window: as they are, or in 8 bits."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from aatc_cli.config import Window
from aatc_cli.core.plain import eight_bit
from aatc_cli.models.adapter import debias, rebias
from aatc_cli.models.attention import LayerInputs


def as_held(inputs: LayerInputs, window: Window) -> LayerInputs:
    """The inputs as a cache with ``window`` holds them when they enter it; with 16 bits on both sides, themselves.

    Rows are held as the projection gives them, with bias and before RoPE, so all that is read later, packed tokens
    included, comes from the rounded ones.
    """
    if window.exact:
        return inputs
    site, (heads, dim) = inputs.site, inputs.key.shape[1::2]

    def by_head(x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:-1], heads, dim).transpose(1, 2)

    # what is computed of rounded rows is not what is computed of exact ones
    inputs = replace(inputs, memo=inputs.memo.setdefault(("held", window.key_bits, window.value_bits), {}))
    if window.key_bits == 8:
        keys = eight_bit(rebias(inputs.k_raw, site.k_bias), dim)
        inputs = replace(inputs, key=inputs.rotate(by_head(keys)), k_raw=debias(keys, site.k_bias))
    if window.value_bits == 8:
        values = eight_bit(rebias(inputs.v_raw, site.v_bias), dim)
        inputs = replace(inputs, value=by_head(values), v_raw=debias(values, site.v_bias))
    return inputs
