"""The uncompressed reference: half floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Quantizer

if TYPE_CHECKING:
    from aatc_cli.methods.choices import Choices
    from aatc_cli.methods.sites import Site


class Float16(Quantizer):
    """Goes with the allocator that allocates nothing, so there is never a plan of it."""

    name = "float16"
    meaning = "none: the uncompressed reference"
    goes_with = together(allocator=("none",))

    def codec(self, choices: Choices, site: Site) -> Any:
        """A cast."""
        import torch

        from aatc_cli.core.codec import CastCodec

        return CastCodec(torch.float16)
