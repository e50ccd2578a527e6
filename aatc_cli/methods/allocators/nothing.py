"""None: nothing is allocated; the cache stays as it is."""

from __future__ import annotations

from aatc_cli.methods.axes import together
from aatc_cli.methods.choices import Allocator


class Nothing(Allocator):
    """Of the uncompressed reference."""

    name = "none"
    meaning = "nothing is allocated"
    goes_with = together(quantizer=("float16",))
    nothing = True
    fractional = False
