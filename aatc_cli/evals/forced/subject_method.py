"""A subject as the method that a teacher-forced pass evaluates: codecs, window, and which tokens stay."""

from __future__ import annotations

from collections.abc import Sequence

from aatc_cli.artifacts.plan_press import press_of_plan
from aatc_cli.evals.forced.teacher_forced import Method
from aatc_cli.evals.subjects import EvalOptions, Subject, placed_codecs
from aatc_cli.models.adapter import AttentionSite
from aatc_cli.runtime.second_pass import Reader


def method_of(subject: Subject, sites: Sequence[AttentionSite], options: EvalOptions, reader: Reader) -> Method:
    """The method of a subject on a model of these ``sites``; raises as `placed_codecs`.

    reader: reads prompts a second time, for a press that asks for it; shared, it reads each of them once.
    """
    recipe, plan = subject.recipe, subject.plan
    codecs = placed_codecs(subject, sites, options)
    pressed = press_of_plan(plan) if plan else None
    return Method(subject.name, codecs, recipe.window, recipe.coordinates, pressed, reader)
