"""The axis of prediction: what its choices say and do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from aatc_cli.methods.axes import Choice

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups, Settings
    from aatc_cli.core import Side
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.prediction_fields import PredictedCoding
    from aatc_cli.methods.sites import Tensors


class Prediction(Choice):
    """What of a layer's vectors is known before they are coded.

    predicts: anything; then a cache is decoded layer by layer, which a stored one can be and a live one cannot.
    """

    predicts: ClassVar[bool] = False

    def reads_below(self, recipe: RecipeFields) -> bool:
        """Whether keys without a bit are known from other layers."""
        return False

    def told_by(self) -> type[Settings] | None:
        """The model of its table ``[prediction]`` in a recipe, or None."""
        return None

    def coding(self, recipe: RecipeFields) -> PredictedCoding | None:
        """What maps in a Transform are fitted for; None without any."""
        return None

    def map_bytes(self, recipe: RecipeFields, geometry: Geometry, groups: HeadGroups) -> int:
        """Bytes of the maps, which do not grow with tokens."""
        return 0

    def layers(
        self, recipe: RecipeFields, tensors: Tensors, geometry: Geometry, codecs: Sequence[Mapping[Side, Any]]
    ) -> list[dict[Side, Any]]:
        """Codecs by layer and side around those of what is left; raises `ArtifactError` on maps that cannot be."""
        return [dict(layer) for layer in codecs]
