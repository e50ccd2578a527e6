"""One side of one layer between model vectors and packed bytes: static matrices, no state per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aatc_cli.core import Side
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.lloyd_levels import LLOYD_BITS, levels, uniform_step
from aatc_cli.core.pack_plan import PackPlan, pack_plan
from aatc_cli.core.packing import pack_keys, pack_values, unpack_aligned
from aatc_cli.models.adapter import debias


@dataclass(frozen=True)
class _Levels:
    """What the bytes of a run of channels of one width stand for: a table of 256 numbers, or an added constant."""

    start: int
    stop: int
    table: Tensor | None
    constant: float


class SiteCodec:
    """A codec with its packing. Decode rows hold the quantizer's channel unit, so a code times its row is a vector.

    Channels are in the packing's sorted order ([A], those with bits). ``columns[g]`` are the places of head group g in
    it and ``rows[g]`` [A_g, E] their decode rows; ``bias`` [C] is the projection's, or None.
    """

    def __init__(self, side: Side, codec: TransformCodec, bias: Tensor | None, flush: int) -> None:
        self.side = side
        self.codec = codec
        self.bias = None if bias is None else bias.detach()
        self.channels = codec.groups * int(codec.encode.shape[1])
        self.plan: PackPlan = pack_plan(codec.bits.tolist(), flush, codec.encode.device)
        order, size = self.plan.order, int(codec.encode.shape[1])
        if codec.quantizer == "uniform-token-max":
            unit = codec.scale * torch.exp2(1.0 - codec.bits.to(codec.scale.dtype))
        else:
            unit = codec.variance.sqrt()
        by_channel = (unit[:, None] * codec.decode.flatten(0, 1))[order]
        self.columns = [(order // size == group).nonzero().flatten() for group in range(codec.groups)]
        self.rows = [by_channel[columns] for columns in self.columns]
        self._levels = [self._levels_of(columns) for columns in self.columns]
        self._gains = [self._gain(columns) for columns in self.columns]
        # aligned codes are turned into keys by one product with the tokens last: [E, A_g]
        self._matrices = [
            (gain[:, None] * rows).T.contiguous() if side == "k" else None
            for gain, rows in zip(self._gains, self.rows, strict=True)
        ]

    @property
    def groups(self) -> int:
        """Head groups, each with a token scale of its own."""
        return self.codec.groups

    @property
    def dtype(self) -> torch.dtype:
        """Of the codec's arithmetic."""
        return self.codec.encode.dtype

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Pack rows ``x`` [b, n, C], bias included. -> uint8 [b, n, row_bytes] or [b, n / f, block_bytes], alpha.

        alpha is float16 [b, groups, n]. Values need whole flush blocks: n must be a multiple of f.
        """
        codes, alpha = self.codec.quantize(self.codec.latents(debias(x, self.bias)))
        if self.side == "k":
            data = pack_keys(codes, self.plan)
        else:
            blocks = torch.unflatten(codes, 1, (codes.shape[1] // self.plan.flush, self.plan.flush))
            data = pack_values(blocks, self.plan)
        return data, alpha.transpose(1, 2).contiguous()

    def keys(self, data: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys before RoPE of packed rows [b, n, row_bytes], bias included, in ``dtype``. -> [b, n, C].

        In memory the tokens lie side by side.
        """
        batch, count = data.shape[:2]
        parts = []
        for group, latents in enumerate(self._latents(data)):
            matrix = self._matrices[group]
            assert matrix is not None
            part = torch.bmm(matrix.expand(batch, -1, -1), latents[:, :, 0])[..., :count]
            parts.append(part.mul_(alpha[:, group, None]))
        out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        if self.bias is not None:
            out += self.bias.to(out.dtype)[:, None]
        return out.transpose(1, 2).to(dtype)

    def value_latents(self, data: Tensor) -> list[Tensor]:
        """Unscaled latents of packed blocks [b, blocks, block_bytes], one tensor [b, n, A_g] per head group."""
        return [
            latents[..., : data.shape[1]].permute(0, 3, 2, 1).flatten(1, 2) * gain
            for latents, gain in zip(self._latents(data), self._gains, strict=True)
        ]

    def value_sums(self, data: Tensor, weights: Tensor) -> list[Tensor]:
        """Sums over tokens of weight times latent, one tensor [b, H_g, M, A_g] per head group.

        The latents are those of `value_latents`; weights [b, H, M, n], one for each of their tokens.
        """
        blocks, flush = data.shape[1], self.plan.flush
        # tokens of a block lie apart in the unpacked bytes; turning the weights is less work than turning those
        turned = torch.unflatten(weights, -1, (blocks, flush)).transpose(-1, -2)
        sums = []
        for latents, gain, mine in zip(self._latents(data), self._gains, turned.chunk(self.groups, 1), strict=True):
            padded = torch.nn.functional.pad(mine, (0, latents.shape[-1] - blocks))
            flat = padded.reshape(mine.shape[0], -1, flush * latents.shape[-1]).to(latents.dtype)
            total = torch.bmm(flat, latents.flatten(2).transpose(1, 2)) * gain
            sums.append(total.view(*mine.shape[:3], -1))
        return sums

    def values(self, weighted: list[Tensor], weights: Tensor) -> Tensor:
        """Values of weighted sums of latents, decoded once. -> [b, H, M, D].

        weighted: per head group [b, H_g, M, A_g], sums over tokens of weight * alpha * latent; weights [b, H, M, 1]:
        the sums of the weights themselves, which carry the bias.
        """
        heads = weights.shape[1]
        dim, share = self.channels // heads, heads // self.groups
        parts = [
            total @ rows.view(-1, share, dim).transpose(0, 1) for total, rows in zip(weighted, self.rows, strict=True)
        ]
        out = torch.cat(parts, 1)
        return out if self.bias is None else out + weights * self.bias.to(out.dtype).view(heads, 1, dim)

    def _latents(self, data: Tensor) -> list[Tensor]:
        """Latents over their gains of packed tokens, per head group [b, A_g, f', m] as `unpack_aligned` has them."""
        high, low = unpack_aligned(data, self.plan, self.side)
        found = []
        for columns, runs in zip(self.columns, self._levels, strict=True):
            mine, wide = (high, low) if self.groups == 1 else _of_group(high, low, columns)
            latents = mine.to(self.dtype)
            if wide.shape[1]:
                latents[:, : wide.shape[1]].add_(wide.to(self.dtype), alpha=1 / 256)
            for run in runs:
                part = latents[:, run.start : run.stop]
                if run.table is None:
                    part += run.constant
                else:
                    index = mine[:, run.start : run.stop].reshape(-1).view(torch.uint8).to(torch.int32)
                    part.copy_(run.table.index_select(0, index).view(part.shape))
            found.append(latents)
        return found

    def _levels_of(self, columns: Tensor) -> list[_Levels]:
        """The runs of a head group whose aligned codes are not latents over gains already: all but the paper's."""
        if self.codec.quantizer == "uniform-token-max":
            return []
        widths: list[int] = self.plan.widths[columns].tolist()
        found = []
        for width in sorted(set(widths), reverse=True):
            start = widths.index(width)
            table, constant = None, 2.0 ** (7 - width)
            if self._tabled(width):
                code = ((torch.arange(256) + 128) % 256 - 128) >> (8 - width)
                table = levels(width)[code + 2 ** (width - 1)].to(self.codec.variance)
            found.append(_Levels(start, start + widths.count(width), table, constant))
        return found

    def _gain(self, columns: Tensor) -> Tensor:
        """Latents over what `_latents` gives, [A_g]: a power of two, the step of uniform levels, or one."""
        widths: list[int] = self.plan.widths[columns].tolist()
        gains = []
        for width in widths:
            step = 1.0 if self.codec.quantizer == "uniform-token-max" else uniform_step(width)
            gains.append(1.0 if self._tabled(width) else step * 2.0 ** (width - 8))
        return torch.tensor(gains, dtype=torch.float64).to(self.codec.scale)

    def _tabled(self, width: int) -> bool:
        """Whether the levels of a width are not evenly spaced."""
        return self.codec.quantizer == "lloyd" and 1 < width <= LLOYD_BITS


def _of_group(high: Tensor, low: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The channels of one head group, of all and of the wide ones."""
    return high.index_select(1, columns), low.index_select(1, columns[columns < low.shape[1]])
