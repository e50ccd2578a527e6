"""The Recipe: one method as data, a choice on every axis with what it is told beside them."""

from __future__ import annotations

import hashlib
from typing import Any, Self

from pydantic import ValidationInfo, field_validator, model_validator

from aatc_cli.config import HeadGroups
from aatc_cli.methods.choices import Choices
from aatc_cli.methods.fields import GroupChoice, RecipeFields, chosen_groups
from aatc_cli.methods.prediction_fields import PredictedCoding
from aatc_cli.methods.registry import (
    ALLOCATORS,
    AXES,
    CLASSES,
    PREDICTIONS,
    allocator_of,
    classes_told_by,
    curve_of,
    names,
    prediction_told_by,
    press_of,
    quantizer_of,
    transform_of,
    weight_of,
)


class Recipe(RecipeFields):
    """One method as a choice on the axes of the design: transform, weights, allocator, quantizer, classes, window."""

    @field_validator("transform", "key_weight", "value_weight", "allocator", "quantizer", "curve", "press")
    @classmethod
    def _known(cls, value: str, info: ValidationInfo) -> str:
        known = names(info.field_name)  # type: ignore[arg-type]
        if value not in known:
            raise ValueError(f"{value!r} is none of {', '.join(known)}")
        return value

    @field_validator("tokens", mode="before")
    @classmethod
    def _told_classes(cls, value: Any) -> Any:
        """The table of the kind of classes whose fields it has."""
        if not isinstance(value, dict):
            return value
        models = [model for choice in CLASSES if (model := choice.told_by()) is not None]
        fitting = [model for model in models if set(value) <= set(model.model_fields)]
        return (fitting or models)[0].model_validate(value)

    @field_validator("prediction", mode="before")
    @classmethod
    def _told_prediction(cls, value: Any) -> Any:
        """The table of the prediction, of which there is one kind."""
        model = next(told for choice in PREDICTIONS if (told := choice.told_by()) is not None)
        return model.model_validate(value) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _widths_fit(self) -> Self:
        if self.min_bits > self.max_bits:
            raise ValueError(f"min_bits ({self.min_bits}) exceeds max_bits ({self.max_bits})")
        if self.widths is not None and (
            sorted(set(self.widths)) != list(self.widths)
            or not self.widths
            or self.widths[0] != self.min_bits
            or self.widths[-1] != self.max_bits
        ):
            raise ValueError("widths must rise from min_bits to max_bits")
        along_tokens = "channel" in (self.coding.key_axis, self.coding.value_axis)
        if along_tokens and (self.coding.group is None or self.window.flush % self.coding.group):
            raise ValueError("groups along a channel need a coding.group that divides window.flush")
        return self

    @model_validator(mode="after")
    def _choices_fit(self) -> Self:
        for axis, choice in self.choices.by_axis:
            for other, wanted in choice.goes_with.items():
                allowed = _expanded(other, wanted)
                if getattr(self, other) not in allowed:
                    listed = " or ".join(f'"{name}"' for name in allowed)
                    raise ValueError(f'{axis} "{choice.name}" goes with {other} {listed}')
            choice.check(self)
        return self

    @model_validator(mode="after")
    def _rest_fits(self) -> Self:
        choices = self.choices
        if not self.window.exact and not self.packed:
            raise ValueError("a window of 8 bits needs a packed quantizer")
        if self.pool == "joint" and (not choices.allocator.pools or self.protect.layers):
            listed = " or ".join(f'"{one.name}"' for one in ALLOCATORS if one.pools)
            raise ValueError(f'pool "joint" needs allocator {listed} and no protected layers')
        if self.pool == "joint" and choices.key_weight.in_nats != choices.value_weight.in_nats:
            raise ValueError('pool "joint" weighs both sides by "fisher" or neither: nothing else is in nats')
        uncalibrated = _expanded("transform", ("uncalibrated",))
        if self.coordinates == "post-rope" and (choices.quantizer.packed or self.transform not in uncalibrated):
            listed = " or ".join(f'"{name}"' for name in uncalibrated)
            raise ValueError(
                f'coordinates "post-rope" go with what is not calibrated before RoPE: transform {listed}, '
                "and no packed quantizer"
            )
        return self

    @model_validator(mode="after")
    def _press_fits(self) -> Self:
        choices, name = self.choices, self.press
        if choices.press.nothing:
            if self.keep is not None:
                raise ValueError('keep is the share that a press leaves: press "none" leaves all tokens')
            return self
        if self.keep is not None and self.keep > 1 and not self.keep.is_integer():
            raise ValueError(f"keep is a share up to 1 or a whole number of tokens, not {self.keep:g}")
        if choices.allocator.nothing:
            raise ValueError(
                f'press "{name}" needs a plan, and this recipe allocates nothing: there is one of its name'
            )
        if self.tokens is not None and choices.press.acts != "prompt":
            raise ValueError(f'press "{name}" would take tokens out of tiles again: tiles go with one that acts once')
        if self.tokens is not None and choices.classes.shared(self):
            raise ValueError(f'press "{name}" keeps other tokens in every head, so each must rank them: order "head"')
        if self.keep is None and not (choices.allocator.one_width and self.min_bits == self.max_bits):
            raise ValueError(
                f'press "{name}" needs keep, the share of the tokens it leaves, with a code of many widths'
            )
        if choices.transform.over_layers or choices.quantizer.along_tokens(self):
            raise ValueError(f'press "{name}" goes with codes of one token of a layer: this one codes several together')
        alone = self.key_groups == self.value_groups == "per-head"
        if not alone and (choices.transform.mixes or choices.quantizer.packed):
            raise ValueError(f'press "{name}" keeps other tokens in every head: key_groups and value_groups "per-head"')
        return self

    @property
    def choices(self) -> Choices:
        """The objects of its choices: what it decides is asked of them."""
        return Choices(
            self,
            transform_of(self.transform),
            weight_of(self.key_weight),
            weight_of(self.value_weight),
            allocator_of(self.allocator),
            quantizer_of(self.quantizer),
            classes_told_by(None if self.tokens is None else type(self.tokens)),
            curve_of(self.curve),
            prediction_told_by(None if self.prediction is None else type(self.prediction)),
            press_of(self.press),
        )

    @property
    def packed(self) -> bool:
        """Whether the packed cache can hold its codes and all tokens; other methods are simulated."""
        return self.choices.quantizer.packed and self.choices.press.nothing

    @property
    def pressed(self) -> bool:
        """Whether some of the tokens do not stay."""
        return not self.choices.press.nothing

    def with_press(self, press: str, keep: float | None) -> Self:
        """This code behind a press, each kv head alone where channels of several would be mixed.

        keep: a share, or above 1 a number of tokens.
        Raises pydantic's `ValidationError` where the two do not go together.
        """
        share = "" if keep is None else f"-{keep:g}" if keep <= 1 else f"-{keep:.0f}t"
        added: dict[str, Any] = {"name": f"{self.name}+{press}{share}", "press": press, "keep": keep}
        if self.choices.transform.mixes or self.choices.quantizer.packed:
            added |= {"key_groups": "per-head", "value_groups": "per-head"}
        return type(self).model_validate(self.model_dump(mode="json") | added)

    def head_groups(self, kv_heads: int, profile: HeadGroups) -> HeadGroups:
        """The recipe's head groups on a model of ``kv_heads`` with the groups of its ``profile``."""
        return chosen_groups(self.key_groups, self.value_groups, kv_heads, profile)

    @property
    def transform_name(self) -> str:
        """Folder of the recipe's Transform: ``metric``, ``metric-keys-per-head-values-all``."""
        choices = self.choices
        coding = choices.prediction.coding(self)
        return transform_name(self.transform, self.key_groups, self.value_groups, choices.tables, coding)


def transform_name(
    kind: str,
    keys: GroupChoice,
    values: GroupChoice,
    tables: tuple[str, ...] = (),
    coding: PredictedCoding | None = None,
) -> str:
    """Folder name of a Transform: its kind, tables made for a quantizer, head groups that are not the profile's.

    One with maps is named after them too, and by a few digits of all that they are fitted for.
    """
    groups = (("keys", keys), ("values", values))
    maps = []
    if coding is not None:
        maps = [coding.form.label, hashlib.sha256(coding.model_dump_json().encode()).hexdigest()[:8]]
    return "-".join([kind, *tables, *maps, *(f"{side}-{choice}" for side, choice in groups if choice != "profile")])


def _expanded(field: str, wanted: tuple[str, ...]) -> list[str]:
    """Names and kinds as names; of a field that is no axis they are its values already."""
    if field not in AXES:
        return list(wanted)
    return [c.name for c in AXES[field] if c.name in wanted or set(c.kinds) & set(wanted)]  # type: ignore[index]
