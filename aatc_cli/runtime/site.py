"""One side of one layer between model vectors and packed bytes: static matrices, no state per token."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core import Side, lloyd
from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.packing import PackPlan, pack_keys, pack_plan, pack_values, unpack_keys, unpack_values
from aatc_cli.models.adapter import debias, rebias


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
        self.tables: lloyd.Tables | None = None
        if codec.quantizer == "lloyd":
            self.tables, unit = lloyd.Tables.of(codec.bits[order], codec.variance), codec.variance.sqrt()
        else:
            unit = codec.scale * torch.exp2(1.0 - codec.bits.to(codec.scale.dtype))
        by_channel = (unit[:, None] * codec.decode.flatten(0, 1))[order]
        self.columns = [(order // size == group).nonzero().flatten() for group in range(codec.groups)]
        self.rows = [by_channel[columns] for columns in self.columns]

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
        """Keys before RoPE of packed rows [b, n, row_bytes], bias included, in ``dtype``. -> [b, n, C]."""
        units = self._units(unpack_keys(data, self.plan, self.dtype))
        parts = [
            (units.index_select(-1, columns) if self.groups > 1 else units) @ rows * alpha[:, group, :, None]
            for group, (columns, rows) in enumerate(zip(self.columns, self.rows, strict=True))
        ]
        return rebias(torch.cat(parts, -1).to(dtype), self.bias)

    def value_latents(self, data: Tensor) -> list[Tensor]:
        """Unscaled latents of packed blocks [b, blocks, block_bytes], one tensor [b, n, A_g] per head group."""
        codes = unpack_values(data, self.plan, self.dtype).transpose(-1, -2)
        by_token = self._units(codes.flatten(1, 2))
        return [by_token.index_select(-1, columns) if self.groups > 1 else by_token for columns in self.columns]

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

    def _units(self, codes: Tensor) -> Tensor:
        """Codes [b, n, A] as multiples of the channel's unit: themselves, or the levels of a unit normal."""
        if self.tables is None:
            return codes
        return self.tables.values((codes + self.tables.half).flatten(0, 1)).view(codes.shape)
