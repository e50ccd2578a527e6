"""The way to a compressed cache: ``with attach(model, plan) as session``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

from aatc_cli.artifacts.plan import Plan
from aatc_cli.config import Window
from aatc_cli.core import Side
from aatc_cli.core.tiles import TILE
from aatc_cli.errors import AatcError
from aatc_cli.models.adapter import AttentionLayer, attention_layers, geometry_of
from aatc_cli.models.quantized import library_codec
from aatc_cli.models.refusals import check_model
from aatc_cli.runtime.fused.spec import fused_spec
from aatc_cli.runtime.kernels.launch import fused_available
from aatc_cli.runtime.packed.form import packed_spec
from aatc_cli.runtime.session import Session
from aatc_cli.runtime.simulated.form import simulated_spec
from aatc_cli.runtime.spec import CacheSpec
from aatc_cli.runtime.store import Coordinates, Kind
from aatc_cli.runtime.tiles.form import tiles_spec

CacheChoice = Literal["auto", "packed", "fused", "simulated"]


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
    layers, device = attention_layers(model), str(next(model.parameters()).device)
    kind = cache if cache != "auto" else chosen(plan, device)
    if plan.recipe.choices.classes.tiled:
        spec = tiles_spec(model, layers, plan.codecs(device), plan.recipe.window, plan.layout, kind)
    elif kind == "simulated":
        codecs = _simulated_codecs(plan, device)
        spec = simulated_spec(model, layers, codecs, plan.recipe.window, plan.recipe.coordinates, plan.layout)
    else:
        codecs = plan.codecs(device)
        spec = _stored_spec(model, layers, codecs, plan.recipe.window, kind, auto=cache == "auto")
    return Session.of(plan.name, model, layers, spec, plan.digest)


def chosen(plan: Plan, device: str) -> Kind:
    """The cache that "auto" stands for, of a plan on a device."""
    if plan.recipe.choices.classes.tiled:
        return "packed"
    if not plan.recipe.packed or plan.classes.count > 1 or not plan.recipe.window.exact:
        return "simulated"
    alone = plan.groups.k == plan.groups.v == plan.geometry.kv_heads
    if device.startswith("cuda") and fused_available() and alone and plan.recipe.window.flush == TILE:
        return "fused"
    return "packed"


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
    if cache == "simulated":
        spec = simulated_spec(model, layers, codecs, window, coordinates)
    else:
        spec = _stored_spec(model, layers, codecs, window, cache)
    return Session.of("codecs", model, layers, spec)


def plain(model: nn.Module, name: str = "fp16") -> Session:
    """A session of the model's own cache, to compare others with; nothing is attached in its blocks."""
    return Session.of(name, model, attention_layers(model), None)


def _stored_spec(
    model: nn.Module, layers: list[AttentionLayer], codecs: Any, window: Window, kind: Kind, *, auto: bool = False
) -> CacheSpec:
    """The packed or the fused caches of these codecs; with ``auto`` packed ones where tiles cannot hold them."""
    if kind == "packed":
        return packed_spec(model, layers, codecs, window)
    try:
        return fused_spec(model, layers, codecs, window)
    except AatcError:
        if not auto:
            raise
        return packed_spec(model, layers, codecs, window)


def _simulated_codecs(plan: Plan, device: str) -> list[dict[Side, Any]]:
    """Codecs of a plan that a simulated cache reads; raises `AatcError` for what it does not do."""
    if plan.classes.count > 1:
        raise AatcError(
            f"{plan.name} keeps tokens at {plan.classes.count} rates, which no cache holds yet",
            "evaluate it with aatc eval, or plan with --recipe loss-aware",
        )
    return plan.simulated_codecs(device, library=library_codec)


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
