"""What a recipe says of prediction: the table ``[prediction]``, and what its maps are fitted for."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from aatc_cli.config import Settings


class PredictionFields(Settings):
    """Keys and values predicted by linear maps from decoded layers below, and from head groups coded before."""

    layers: int = Field(2, ge=0, le=4, description="layers below that each layer is predicted from")
    within: Literal["none", "values", "units"] = Field(
        "units", description="what of the layer itself is read: nothing, its values by its keys, every earlier unit"
    )
    rank: int = Field(0, ge=0, description="numbers taken of the layers below; 0: all of them")
    alone: bool = Field(False, description="of the layers below a head group reads its own alone")
    rate: float = Field(1.0, gt=0, le=8, description="bits a number at which the decoded vectors are that maps fit")

    @model_validator(mode="after")
    def _reads_something(self) -> Self:
        if not self.layers and self.within == "none":
            raise ValueError("a prediction reads layers below, or the layer itself")
        if self.rank and self.alone:
            raise ValueError("numbers taken of all head groups are not those of one alone")
        return self

    @property
    def label(self) -> str:
        """For names of folders: ``below2-units``."""
        parts = [f"below{self.layers}"] if self.layers else []
        parts += [self.within] if self.within != "none" else []
        return "-".join([*parts, *([f"rank{self.rank}"] if self.rank else []), *(["alone"] if self.alone else [])])


class PredictedCoding(Settings):
    """What the maps of a Transform are fitted for: their form, and how residuals will be coded."""

    form: PredictionFields
    quantizer: str
    quotas: tuple[int, ...] = Field(strict=False)
    order: Literal["head", "layer"]
    floor: float
    max_bits: int
    scale_bits: int
