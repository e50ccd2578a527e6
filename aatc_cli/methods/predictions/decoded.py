"""Decoded: linear maps from what a decoder holds already, fitted closed-loop; of stored caches only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aatc_cli.methods.axes import together
from aatc_cli.methods.prediction import Prediction

if TYPE_CHECKING:
    from aatc_cli.config import Geometry, HeadGroups, Settings
    from aatc_cli.core import Side
    from aatc_cli.methods.fields import RecipeFields
    from aatc_cli.methods.prediction_fields import PredictedCoding, PredictionFields
    from aatc_cli.methods.sites import Tensors

_HALF_BYTES = 2


class Decoded(Prediction):
    """Keys and values from decoded layers below, and head groups from those coded before them in the layer."""

    name = "decoded"
    meaning = "linear maps from decoded layers below, and from head groups of the layer coded before"
    goes_with = together(transform=("metric", "metric-centred"), quantizer=("tiled",), press=("none",))
    predicts = True

    def told_by(self) -> type[Settings]:
        """The table ``[prediction]``."""
        from aatc_cli.methods.prediction_fields import PredictionFields

        return PredictionFields

    def reads_below(self, recipe: RecipeFields) -> bool:
        """As the table says."""
        return _form(recipe).layers > 0

    def check(self, recipe: RecipeFields) -> None:
        """A stored cache lies in tiles."""
        if getattr(recipe.tokens, "quotas", None) is None:
            raise ValueError("prediction goes with tokens in tiles: add [tokens] with quotas")

    def coding(self, recipe: RecipeFields) -> PredictedCoding:
        """What `whiten` needs to know beyond the form."""
        from aatc_cli.methods.classes.tiles import rule_of
        from aatc_cli.methods.prediction_fields import PredictedCoding

        rule = rule_of(recipe)
        return PredictedCoding(
            form=_form(recipe),
            quantizer=recipe.quantizer,
            quotas=rule.quotas,
            order=rule.order,
            floor=getattr(recipe.tokens, "floor", 0.0),
            max_bits=recipe.max_bits,
            scale_bits=recipe.scale_bits,
        )

    def map_bytes(self, recipe: RecipeFields, geometry: Geometry, groups: HeadGroups) -> int:
        """In half precision, without what is zero by construction."""
        form, width = _form(recipe), 2 * geometry.channels
        numbers = 0
        for layer in range(geometry.layers):
            read = min(layer, form.layers) * width
            if form.alone:
                numbers += sum(read // groups.of(side) * geometry.channels for side in ("k", "v"))
            else:
                numbers += form.rank * (read + width) if form.rank and read else read * width
            numbers += _within(form, geometry.channels, groups)
        return numbers * _HALF_BYTES

    def layers(
        self, recipe: RecipeFields, tensors: Tensors, geometry: Geometry, codecs: Sequence[Mapping[Side, Any]]
    ) -> list[dict[Side, Any]]:
        """The same `core.stored_layer.StoredLayer` for both sides of a layer, over the codecs of its residuals."""
        import torch

        from aatc_cli.core import SIDES
        from aatc_cli.core.predictive import LayerMaps
        from aatc_cli.core.stored_layer import StoredLayer

        form, width = _form(recipe), 2 * geometry.channels
        found = []
        for layer, pair in enumerate(codecs):
            read = min(layer, form.layers) * width
            taken = form.rank if form.rank and read else read
            shapes = {"below": (taken, width), "within": (0 if form.within == "none" else width, width)}
            if form.rank and read:
                shapes["squeeze"] = (read, form.rank)
            parts = {
                part: torch.from_numpy(tensors.floats(f"layers.{layer}.maps.{part}", shape)).float()
                for part, shape in shapes.items()
            }
            device = pair["k"].codec.encode.device
            maps = LayerMaps(parts["below"], parts["within"], parts.get("squeeze")).to(device)
            # what layers below tell of a token is enough to be read
            about, mean = _without_mean(pair)
            stored = StoredLayer(about, maps, pair["k"].rule, hides=not form.layers, mean=mean)
            found.append(dict.fromkeys(SIDES, stored))
        return found


def _without_mean(pair: Mapping[Side, Any]) -> tuple[dict[Side, Any], Any]:
    """Codecs about zero, and the mean of keys and values side by side that they were about; None without one.

    What is predicted has no mean, so it is taken off before.
    """
    import torch

    means = [pair[side].codec.offset(None) for side in ("k", "v")]
    if means[0] is None:
        return dict(pair), None
    about = {side: replace(codec, codec=replace(codec.codec, centre=None)) for side, codec in pair.items()}
    return about, torch.cat(means)


def _form(recipe: RecipeFields) -> PredictionFields:
    from aatc_cli.methods.prediction_fields import PredictionFields

    assert isinstance(recipe.prediction, PredictionFields)
    return recipe.prediction


def _within(form: PredictionFields, channels: int, groups: HeadGroups) -> int:
    """Numbers of the maps inside of a layer."""
    if form.within == "none":
        return 0
    values = channels * channels
    if form.within == "values":
        return values
    before = sum(place * (channels // count) ** 2 for count in (groups.k, groups.v) for place in range(count))
    return values + before
