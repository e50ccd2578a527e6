"""Every choice on the axes of a recipe goes with every other: planned, packed and read back on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from aatc_cli.artifacts.artifact import Artifact
from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.plan_classes import PlanClasses
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.artifacts.transform import Transform
from aatc_cli.config import Window, make_budget
from aatc_cli.core import SIDES
from aatc_cli.errors import AatcError
from aatc_cli.evals.forced.teacher_forced import Method, method_logits
from aatc_cli.methods.recipe import Recipe
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.runtime.packed.site import SiteCodec
from aatc_cli.stages.allocate import allocate, check, derive
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten

KINDS = ("identity", "whiten", "metric")
GROUPS = (("profile", "profile"), ("per-head", "all"), ("all", "per-head"))
WEIGHTS = tuple(product(("none", "query", "fisher"), ("none", "output", "fisher")))
MODELS = (*product(("exponential", "lloyd"), ("uniform-token-max", "lloyd")), ("uniform", "uniform"))
WINDOW = Window(sinks=2, recent=8, flush=4)


class Held(Artifact):
    """An artifact whose tensors are read once."""

    @cache  # noqa: B019
    def array(self, name: str) -> np.ndarray:
        return super().array(name)


@pytest.fixture(scope="module")
def run(tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with loss gradients and a Transform of every kind and grouping."""
    run = Run(tmp_path_factory.mktemp("composition") / "run")
    settings = CollectSettings(samples=8, length=64, rows=256, fisher=8, window=WINDOW)
    mixture = TextMixture(sources=[str(corpus)], samples=8, length=64)
    collect(run, "stats", find_model(str(tiny_llama)), mixture, settings, CollectOptions())
    for kind, (keys, values) in product(KINDS, GROUPS):
        whiten(
            run,
            transform_stats=run.stats(),
            rate_stats=run.stats(),
            wanted=Wanted(transform=kind, key_groups=keys, value_groups=values),
        )
    return run


@pytest.fixture(scope="module")
def transforms(run: Run) -> dict[str, Transform]:
    found = [Transform.open(path) for path in run.transforms()]
    return {each.path.name: replace(each, artifact=Held(each.path, each.manifest)) for each in found}


def planned(recipe: Recipe, transform: Transform, bits: float) -> Plan:
    """The plan that allocate would write."""
    budget = make_budget(bits=bits)
    allocation, layout, _ = derive(transform, transform.energies(), recipe, budget)
    widths = [{side: layer[side].tolist() for side in SIDES} for layer in allocation.bits]
    one = PlanClasses()
    predicted, level = allocation.predicted, allocation.water_level
    return Plan(transform.artifact, recipe, budget, widths, layout.groups, one, predicted, level, bits)


def read_back(site: SiteCodec, x: torch.Tensor) -> torch.Tensor:
    """Rows [1, n, C] through the packed bytes of a site."""
    data, alpha = site.encode(x)
    if site.side == "k":
        return site.keys(data, alpha, x.dtype)
    latents = site.value_latents(data)
    tokens = [part.transpose(0, 1)[:, None] * alpha[0, g, :, None, None, None] for g, part in enumerate(latents)]
    heads = 2
    spread = [part.expand(-1, heads // site.groups, 1, -1) for part in tokens]
    return site.values(spread, torch.ones(x.shape[1], heads, 1, 1)).flatten(1)[None]


@pytest.mark.parametrize(("curve", "quantizer"), MODELS, ids=["-".join(pair) for pair in MODELS])
@pytest.mark.parametrize("pool", ["separate", "joint"])
@pytest.mark.parametrize("groups", GROUPS, ids=["-".join(pair) for pair in GROUPS])
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination_plans_packs_and_reads_back(
    run: Run,
    transforms: dict[str, Transform],
    kind: str,
    groups: tuple[str, str],
    pool: str,
    curve: str,
    quantizer: str,
) -> None:
    generator = torch.Generator().manual_seed(1)
    for key_weight, value_weight in WEIGHTS:
        if pool == "joint" and (key_weight == "fisher") != (value_weight == "fisher"):
            continue  # refused: see below
        recipe = Recipe.model_validate(
            {
                "name": "any",
                "summary": "s",
                "transform": kind,
                "key_weight": key_weight,
                "value_weight": value_weight,
                "key_groups": groups[0],
                "value_groups": groups[1],
                "pool": pool,
                "curve": curve,
                "quantizer": quantizer,
            }
        )
        transform = transforms[recipe.transform_name]
        errors = {}
        for bits in (2.0, 5.0):
            plan = planned(recipe, transform, bits)
            assert plan.mean_bits == bits
            codecs = plan.codecs("cpu", transform)
            for side in SIDES:
                codec = codecs[1][side].to("cpu", torch.float64)
                # rows with the second moment that the transform was made for
                h = torch.randn(1, 24, 32, generator=generator, dtype=torch.float64) * codec.variance.sqrt()
                x = (torch.unflatten(h, -1, (codec.groups, -1)).unsqueeze(-2) @ codec.decode).flatten(-3)
                given = codec.reconstruct(x)
                site = SiteCodec(side, codec, None, WINDOW.flush)
                torch.testing.assert_close(read_back(site, x), given, rtol=1e-9, atol=1e-9)
                errors[side, bits] = float((given - x).square().mean() / x.square().mean())
        for side in SIDES:
            # weights that are no common measure may starve one side of a joint pool at two bits
            assert errors[side, 5.0] < 0.3 * errors[side, 2.0], (recipe, errors)
            assert errors[side, 2.0] < 1.0 or pool == "joint", (recipe, errors)
        assert sum(errors[side, 2.0] for side in SIDES) < 1.2


def test_gradients_and_other_weights_share_no_pool() -> None:
    for weights in (("fisher", "output"), ("none", "fisher")):
        changes = {"key_weight": weights[0], "value_weight": weights[1]}
        with pytest.raises(ValidationError, match='pool "joint" weighs both sides by "fisher" or neither'):
            Recipe.model_validate({"name": "any", "summary": "s", "pool": "joint", **changes})
        assert Recipe.model_validate({"name": "any", "summary": "s", **changes}).pool == "separate"


@pytest.mark.parametrize("widths", [(0, 1, 2, 3, 4, 6, 8), (0, 1, 2, 4, 8), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("allocator", ["waterfill", "per-layer", "global", "uniform"])
def test_plans_use_the_widths_of_the_recipe_alone(run: Run, widths: tuple[int, ...], allocator: str) -> None:
    recipe = Recipe.model_validate(
        {
            "name": f"some-{allocator}-{len(widths)}",
            "summary": "s",
            "transform": "metric",
            "key_weight": "fisher",
            "value_weight": "fisher",
            "curve": "lloyd",
            "quantizer": "lloyd",
            "allocator": allocator,
            "widths": widths,
            "min_bits": widths[0],
            "max_bits": widths[-1],
        }
    )
    plan = allocate(run, recipe, [make_budget(bits=2.5)])[0]
    used = {width for layer in plan.bits for side in SIDES for width in layer[side]}
    assert used <= set(widths)
    assert len(used) > 1
    assert 2.3 < plan.mean_bits <= 2.5
    free = recipe.model_copy(update={"name": f"free-{allocator}", "widths": None, "min_bits": 0, "max_bits": 16})
    whole = allocate(run, free, [make_budget(bits=2.5)])[0]
    results = [p.manifest.results["predicted"] for p in (whole, plan)]
    if allocator != "uniform":
        assert sum(results[0].values()) <= sum(results[1].values())


@pytest.mark.parametrize("name", ["loss-aware-fused", "paper-fused"])
@pytest.mark.parametrize("block", [4, 16])
def test_plans_by_blocks_are_reproduced_and_pack(run: Run, name: str, block: int) -> None:
    recipe = load_recipe(name)
    protect = recipe.protect.model_copy(update={"layers": min(recipe.protect.layers, 1)})
    changes = {"name": f"{name}-{block}", "block": block, "window": WINDOW, "protect": protect}
    recipe = recipe.model_copy(update=changes)
    whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    plans = allocate(run, recipe, [make_budget(bits=2.5), make_budget(ratio=3.0, context=8192)])
    generator = torch.Generator().manual_seed(3)
    for plan in plans:
        assert check(plan) == []
        for layer, codecs in zip(plan.bits, plan.codecs("cpu"), strict=True):
            for side in SIDES:
                for head in torch.tensor(layer[side]).split(16):
                    assert (head.bincount() % block == 0).all()
                codec = codecs[side].to("cpu", torch.float64)
                x = torch.randn(1, 24, 32, generator=generator, dtype=torch.float64) @ torch.block_diag(*codec.decode)
                given = codec.reconstruct(x)
                read = read_back(SiteCodec(side, codec, None, WINDOW.flush), x)
                torch.testing.assert_close(read, given, rtol=1e-9, atol=1e-9)
                codes, alpha = codec.quantize(codec.latents(x))
                unit, offset = codec.units()
                half = torch.where(codec.bits > 0, torch.exp2(codec.bits - 1.0), 0.0)
                latents = alpha.double().repeat_interleave(16, -1) * unit * (codes + half - offset)
                torch.testing.assert_close(latents @ torch.block_diag(*codec.decode), given, rtol=1e-9, atol=1e-9)
    other = recipe.model_copy(update={"name": "unfit", "block": 5})
    for budget in (make_budget(bits=2.5), make_budget(ratio=3.0, context=8192)):
        with pytest.raises(AatcError, match="5 channels at a time, which do not divide the 16 of a head group"):
            allocate(run, other, [budget])


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "scale_bits"), [("loss-aware", 16), ("keys-alone", 16), ("keys-alone", 8), ("var-only", 8)]
)
def test_a_recipe_runs_live_as_it_is_scored(run: Run, tiny_llama: Path, name: str, scale_bits: int) -> None:
    changes = {"window": WINDOW, "name": f"{name}-{scale_bits}", "scale_bits": scale_bits}
    alone = name == "keys-alone"
    groups = {"key_groups": "per-head", "value_groups": "all"} if alone else {}
    recipe = load_recipe("loss-aware" if alone else name).model_copy(update=changes | groups)
    plan = allocate(run, recipe, [make_budget(bits=3.5)])[0]
    codecs = [{side: codec.to("cpu", torch.float64) for side, codec in layer.items()} for layer in plan.codecs("cpu")]
    assert {tuple(layer["k"].encode.shape) for layer in codecs} == {(2, 16, 16) if alone else (1, 32, 32)}
    assert {tuple(layer["v"].encode.shape) for layer in codecs} == {(1, 32, 32)}
    # float64: in float32 a code on a rounding tie may fall either way, which is a step and not rounding
    model = load_model(find_model(str(tiny_llama))).double()
    ids = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(2))
    scored = method_logits(model, attention_sites(model), Method(name, codecs, WINDOW, "pre-rope"), ids, 0)
    with attach_codecs(model, codecs, WINDOW) as session:
        live = session.new_cache()
        rows = [model(ids[:, t : t + 1], **{session.keyword: live}).logits[0, -1] for t in range(ids.shape[1])]
        assert session.spec.layout == plan.layout
        scales = [
            tensor
            for group in live.state.groups
            for store in group.stores
            for name_, tensor in store.tensors().items()
            if name_.endswith("_scales")
        ]
    assert {tensor.dtype for tensor in scales} == {torch.uint8 if scale_bits == 8 else torch.float16}
    assert sum(tensor.nbytes for tensor in scales) == plan.layout.breakdown(40)["token_scales"]
    scale = scored.abs().max()
    assert (torch.stack(rows)[:-1] - scored).abs().max() < 1e-9 * scale
    exact = model(ids, use_cache=False).logits[0, :-1]
    assert (exact - scored).abs().max() > 1e-3 * scale
