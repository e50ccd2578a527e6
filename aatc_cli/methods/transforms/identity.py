"""Identity: the cached vector as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import Transform

if TYPE_CHECKING:
    from torch import Tensor

    from aatc_cli.core.transform import GroupTransform
    from aatc_cli.methods.sites import Site


class Identity(Transform):
    """The transform that changes nothing."""

    name = "identity"
    meaning = "the vector as it is"
    kinds = ("linear", "uncalibrated")
    stored = False
    mixes = False

    def matrices(self, moments: Tensor, metrics: Tensor) -> GroupTransform:
        """Identity matrices."""
        from aatc_cli.core.transform import identity, rotation

        return rotation(identity(int(moments.shape[-1])).encode.to(moments).expand_as(moments))

    def around(self, site: Site, inner: Any) -> Any:
        """The codec of the vectors themselves: there is nothing to multiply by."""
        return inner
