"""The quantizer of transformers' HQQ cache."""

from __future__ import annotations

from aatc_cli.methods.quantizers.packages import LibraryQuantizer


class Hqq(LibraryQuantizer):
    """Half-quadratic quantization: zero points are optimised."""

    name = "hqq"
    meaning = "that of transformers' HQQ cache"
    package = "hqq"
    widths = (1, 2, 3, 4, 8)
    layer = "HQQQuantizedLayer"
