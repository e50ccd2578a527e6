"""Whether a model is the one of a profile: the same geometry, field by field."""

from __future__ import annotations

from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError
from aatc_cli.profiles import ModelProfile


def check_profile(profile: ModelProfile | None, geometry: Geometry) -> None:
    """Raise `AatcError` naming the first field in which the model differs from its profile."""
    if profile is None:
        return
    for field in Geometry.model_fields:
        expected, actual = getattr(profile.geometry, field), getattr(geometry, field)
        if expected != actual:
            raise AatcError(
                f"profile {profile.name} expects {field} = {expected}, but the model has {actual}",
                "use the profile of this model, or --model alone",
            )
