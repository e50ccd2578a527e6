"""What the decode kernel keeps of one layer besides tokens: widths, key matrix, value matrix, offsets.

Keys of a kv head are k = alpha sum_c unit_c (u_c - offset_c) B_c; `integer_keys` and `planes` have the two forms in
which their matrix is multiplied. Values stay sums of u_c; unit, offset and decode matrix are applied once at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.tiles import BLOCK, MAX_WIDTH, SCALE_BYTES, block_bytes
from aatc_cli.errors import AatcError
from aatc_cli.runtime.kernels.angles import row_angles, span_angles
from aatc_cli.runtime.kernels.integer_keys import IntegerKeys
from aatc_cli.runtime.kernels.planes import KeyPlanes


@dataclass(frozen=True)
class HeadSide:
    """Coded channels of one side of one kv head, by falling width.

    order [A], widths of the blocks, rows [A, D], offset [A]; rows are unit_c B_c: (u - offset) @ rows * alpha is
    the vector. A is a multiple of 16.
    """

    order: Tensor
    widths: tuple[int, ...]
    rows: Tensor
    offset: Tensor

    @classmethod
    def of(cls, codec: TransformCodec, head: int) -> HeadSide:
        """From a codec with one head group per kv head.

        Raises `AatcError` when channels of one width do not fill blocks of 16 or a width has no tile form.
        """
        size = int(codec.encode.shape[1])
        bits = codec.bits[head * size : (head + 1) * size].cpu()
        order = sorted((c for c in range(size) if bits[c] > 0), key=lambda c: (-int(bits[c]), c))
        found = bits[order].tolist()
        blocks = [found[i : i + BLOCK] for i in range(0, len(found), BLOCK)]
        if any(len(set(block)) > 1 or len(block) < BLOCK or block[0] > MAX_WIDTH for block in blocks):
            raise AatcError(
                f"this plan's widths do not fill blocks of {BLOCK} channels with one width of at most {MAX_WIDTH} bits",
                "plan with a recipe that allocates by blocks, such as loss-aware-fused, or run without fused kernels",
            )
        places = torch.tensor(order, dtype=torch.int64, device=codec.bits.device)
        unit, offset = codec.units()
        channels = head * size + places
        rows = unit[channels, None] * codec.decode[head].index_select(0, places)
        return cls(places, tuple(block[0] for block in blocks), rows, offset[channels])


@dataclass(frozen=True)
class LayerTables:
    """Everything static of one layer, in the order the kernel reads it. H kv heads, D head dim, A = D channels.

    Rotary pairs come in J = D / 16 lots of 8: the first F are fast and reconstructed, the others slow and absorbed.
    widths int32 [H, 2, J]; offsets int32 [H + 1], bytes of a tile row before each head; key as the kernel multiplies
    it; decode float16 [H, D, D]; value_offset float32 [H, D]; tile_bytes of all heads.
    """

    keys: tuple[HeadSide, ...]
    values: tuple[HeadSide, ...]
    widths: Tensor
    offsets: Tensor
    key: IntegerKeys | KeyPlanes
    decode: Tensor
    value_offset: Tensor
    fast: int
    tile_bytes: int

    @classmethod
    def of(cls, keys: list[HeadSide], values: list[HeadSide], dim: int, fast: int, hopper: bool = False) -> LayerTables:
        """Tables of one layer from its heads' sides; ``dim`` D is 64, 96, 128 or 256, ``fast`` F as of `fast_pairs`.

        With ``hopper``, keys are for warpgroup products where those have room for them.
        """
        device = keys[0].rows.device
        widths = torch.zeros(len(keys), 2, dim // BLOCK, dtype=torch.int32)
        sizes = []
        for head, pair in enumerate(zip(keys, values, strict=True)):
            for side, part in enumerate(pair):
                widths[head, side, : len(part.widths)] = torch.tensor(part.widths, dtype=torch.int32)
            sizes.append(sum(block_bytes(w) for part in pair for w in part.widths) + SCALE_BYTES)
        offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        key_rows, given = [part.rows for part in keys], [part.offset for part in keys]
        form = KeyPlanes.of(key_rows, given, [part.widths for part in keys], dim, fast) if hopper else None
        key = form or IntegerKeys.of(key_rows, given, dim, fast)
        decode = torch.zeros(len(values), dim, dim, dtype=torch.float32, device=device)
        value_offset = torch.zeros(len(values), dim, dtype=torch.float32, device=device)
        for head, part in enumerate(values):
            # the kernel's sums are of codes over 2^(width - first plane), four times them in the upper half of a block
            below = torch.tensor([max(width - 2, 0) for width in part.widths], device=device).repeat_interleave(BLOCK)
            unit = torch.exp2(below.to(torch.float32))
            rows = (part.rows.to(torch.float32) * unit[:, None]).to(torch.float16)
            decode[head, : rows.shape[0]] = rows.to(torch.float32) * _counted(rows.shape[0], device)[:, None]
            value_offset[head] = (part.offset.to(torch.float32) / unit) @ rows.to(torch.float32)
        half = decode.to(torch.float16)
        return cls(
            tuple(keys), tuple(values), widths.to(device), offsets.to(device), key, half, value_offset, fast, sum(sizes)
        )

    def token_angles(self, frequencies: Tensor) -> Tensor:
        """Angles of tokens from where queries are turned back to, in the order of the kernel for these tables."""
        order = span_angles if isinstance(self.key, KeyPlanes) else row_angles
        return order(frequencies, self.fast)

    def held(self) -> LayerTables:
        """The same for a twin that reads keys' rows as the kernel holds them: rounded."""
        dim = self.decode.shape[-1]
        keys = (replace(part, rows=self.key.rounded(part.rows, part.widths, dim, self.fast)) for part in self.keys)
        return replace(self, keys=tuple(keys))


def _counted(channels: int, device: torch.device) -> Tensor:
    """What the sums of channels [A] are multiplied with: the second eight of a block lie two bits higher up."""
    return torch.where(torch.arange(channels, device=device) % BLOCK < BLOCK // 2, 1.0, 0.25)


def fast_pairs(frequencies: Tensor) -> int:
    """How many lots of 8 rotary pairs turn too far in 64 tokens to be absorbed with a slope: more than 0.1 rad.

    What is left out beyond the slope is half the square of that angle, so less than half a percent of a pair's part.
    """
    lots = (frequencies.to(torch.float64) * 64).view(-1, 8).amax(1)
    return max(1, int((lots > 0.1).sum()))
