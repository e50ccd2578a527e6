"""The quantizer of transformers' quanto cache."""

from __future__ import annotations

from aatc_cli.methods.quantizers.packages import LibraryQuantizer


class Quanto(LibraryQuantizer):
    """optimum-quanto."""

    name = "quanto"
    meaning = "that of transformers' quanto cache"
    package = "optimum-quanto"
    widths = (2, 4)
    layer = "QuantoQuantizedLayer"
