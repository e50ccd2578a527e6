"""A stream of packed tokens under one pair of codecs: key rows, value blocks, token scales."""

from __future__ import annotations

import torch
from torch import Tensor

from aatc_cli.core.scales import pack_scales, unpack_scales
from aatc_cli.runtime.packed.site import SiteCodec

# rows encoded at once when a long prompt is packed, which bounds the float latents alive
_ENCODE_ROWS = 1024


class PackedStream:
    """Tokens ``first`` .. ``first + tokens - 1`` of b sequences in packed form under one pair of codecs.

    keys uint8 [b, P, row_bytes], values uint8 [b, P / f, block_bytes], key_scales and value_scales [b, groups, P] in
    float16, or as codes uint8 of `core.scales`.
    """

    NAMES = ("keys", "values", "key_scales", "value_scales")

    def __init__(self, key_site: SiteCodec, value_site: SiteCodec, first: int, batch: int) -> None:
        self.key_site, self.value_site, self.first = key_site, value_site, first
        device = key_site.plan.order.device
        self.keys = torch.empty(batch, 0, key_site.plan.row_bytes, dtype=torch.uint8, device=device)
        self.values = torch.empty(batch, 0, value_site.plan.block_bytes, dtype=torch.uint8, device=device)
        scales = torch.uint8 if key_site.codec.scale_bits == 8 else torch.float16
        self.key_scales = torch.empty(batch, key_site.groups, 0, dtype=scales, device=device)
        self.value_scales = torch.empty(batch, value_site.groups, 0, dtype=scales, device=device)

    @property
    def tokens(self) -> int:
        """Packed tokens per sequence."""
        return int(self.keys.shape[1])

    @property
    def flush(self) -> int:
        """Tokens per value block."""
        return self.key_site.plan.flush

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Encode exact rows [b, n, C] (n whole flush blocks) and append them."""
        rows = max(self.flush, _ENCODE_ROWS // self.flush * self.flush)
        coded = [self.key_site.encode(part) for part in torch.split(keys, rows, 1)]
        valued = [self.value_site.encode(part) for part in torch.split(values, rows, 1)]
        self.keys = torch.cat([self.keys, *(data for data, _ in coded)], 1)
        self.key_scales = torch.cat([self.key_scales, *(self._held(alpha) for _, alpha in coded)], 2)
        self.values = torch.cat([self.values, *(data for data, _ in valued)], 1)
        self.value_scales = torch.cat([self.value_scales, *(self._held(alpha) for _, alpha in valued)], 2)

    def tile(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Packed keys, key scales, packed values, value scales of tokens start .. stop - 1, at block boundaries.

        The scales are float16, however they are held.
        """
        blocks = slice(start // self.flush, stop // self.flush)
        tokens = slice(start, stop)
        return (
            self.keys[:, tokens],
            self._read(self.key_scales[..., tokens]),
            self.values[:, blocks],
            self._read(self.value_scales[..., tokens]),
        )

    def _held(self, alpha: Tensor) -> Tensor:
        return pack_scales(alpha) if self.key_scales.dtype == torch.uint8 else alpha

    def _read(self, scales: Tensor) -> Tensor:
        return unpack_scales(scales) if scales.dtype == torch.uint8 else scales
