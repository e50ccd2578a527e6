"""The way to a compressed cache: ``with attach(model, plan) as session``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from aatc_cli.artifacts.plan import Plan
from aatc_cli.config import Window
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import attention_layers, geometry_of
from aatc_cli.models.refusals import check_model
from aatc_cli.runtime.forms import codecs_spec, plan_spec
from aatc_cli.runtime.session import CacheChoice, Session
from aatc_cli.runtime.store import Coordinates, Kind


@contextmanager
def attach(model: nn.Module, plan: Plan, cache: CacheChoice = "auto") -> Iterator[Session]:
    """Attach the caches of ``plan`` to ``model`` while the block lasts.

    cache: "packed" stores codes that torch unpacks on any device, "fused" stores them in tiles for the CUDA kernels (on
    a CPU for their slow twins), "simulated" keeps full vectors and reads what the codec gives back. "auto" is fused
    where the plan has tiles and the model is on a GPU that has the kernels, else packed where the plan has codes, else
    simulated. Raises `AatcError` for a cache that cannot be, or a plan that is not the model's, and
    `UnsupportedModelError` for a model whose attention cannot be read.
    """
    with prepare(model, plan, cache).attached() as session:
        yield session


def prepare(model: nn.Module, plan: Plan, cache: CacheChoice = "auto") -> Session:
    """The session of `attach` without its block, for callers that enter blocks of several sessions in turn."""
    check_model(model)
    _check_plan(model, plan)
    layers = attention_layers(model)
    spec = plan_spec(model, layers, plan, cache)
    return Session.of(plan.name, model, layers, spec, plan.digest)


@contextmanager
def attach_codecs(
    model: nn.Module, codecs: Any, window: Window, cache: Kind = "packed", coordinates: Coordinates = "pre-rope"
) -> Iterator[Session]:
    """As `attach`, from bare codecs: per compressed layer that of "k" and "v". ``coordinates``: of simulated keys."""
    with prepare_codecs(model, codecs, window, cache, coordinates).attached() as session:
        yield session


def prepare_codecs(
    model: nn.Module, codecs: Any, window: Window, cache: Kind = "packed", coordinates: Coordinates = "pre-rope"
) -> Session:
    """The session of `attach_codecs` without its block."""
    check_model(model)
    layers = attention_layers(model)
    spec = codecs_spec(model, layers, codecs, window, cache, coordinates)
    return Session.of("codecs", model, layers, spec)


def plain(model: nn.Module, name: str = "fp16") -> Session:
    """A session of the model's own cache, to compare others with; nothing is attached in its blocks."""
    return Session.of(name, model, attention_layers(model), None)


def _check_plan(model: nn.Module, plan: Plan) -> None:
    """Raise `AatcError` for a plan of another geometry. Whether it is of these weights, `require_model` tells."""
    config: Any = model.config
    mine = geometry_of(config)
    if mine != plan.geometry:
        raise AatcError(
            f"{plan.name} is of a model with {plan.geometry.layers} layers of {plan.geometry.kv_heads} kv heads of "
            f"{plan.geometry.head_dim}, this one has {mine.layers} layers of {mine.kv_heads} of {mine.head_dim}",
            "use a plan of this model",
        )
