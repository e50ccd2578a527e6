"""Published methods on heads of 64, 128 and 256 channels with grouped queries, and beside sliding layers."""

from __future__ import annotations

import pytest
import torch

from aatc_cli.artifacts.plan import Plan
from aatc_cli.artifacts.run import Run
from aatc_cli.config import make_budget
from aatc_cli.errors import AatcError
from aatc_cli.evals.subjects import Subject, subject_codecs
from aatc_cli.profiles import load_recipe
from aatc_cli.stages.allocate import allocate, check
from aatc_cli.stages.export import export
from aatc_cli.stages.whiten import Wanted, whiten

RECIPES = {
    "kvarn": 2,
    "kvarn-k4v2": 3,
    "block-gtq": 2,
    "mixkvq": 2.5,
    "eoptshrinkq": 2,
    "a2ats": 2,
    "commvq": 1,
    "eigen-attention": 8,
    "eigen-attention-4bit": 2,
    "xkv": 8,
    "xkv-4bit": 2,
    "minicache": 4,
}
OVER_LAYERS = {name for name in RECIPES if load_recipe(name).choices.transform.over_layers}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24, "num_key_value_heads": 1}
_MODELS = {
    "64": ("llama", {"head_dim": 64, "num_hidden_layers": 2}),
    "128": ("llama", {"head_dim": 128, "num_hidden_layers": 2}),
    "256": ("llama", {"head_dim": 256, "num_hidden_layers": 2}),
    "sliding": ("gemma3_text", MIXED),
}


@pytest.fixture(scope="module", params=_MODELS)
def made(request, new_model, with_gradients, tmp_path_factory):
    """A model and its run: two kv heads that two query heads each read, or one that four do."""
    family, changes = _MODELS[request.param]
    folder = tmp_path_factory.mktemp(f"geometry-{request.param}")
    model = new_model(folder / "model", family=family, **changes)
    return request.param, model, with_gradients(folder, model)


@pytest.mark.parametrize("name", RECIPES)
def test_from_plan_to_export(measured, made, name, corpus, tmp_path):
    kind, model, run = made
    if kind == "sliding" and load_recipe(name).coding.group == 32:
        with pytest.raises(AatcError, match="32 channels of a token at a time, which do not divide the 16 of a site"):
            planned(run, name)
        return
    plan = planned(run, name)
    assert check(plan) == []
    layout = plan.layout
    assert sum(layout.breakdown(700).values()) == layout.bytes(700)
    assert 0 < layout.bits_packed < 16
    exported = export(plan.path, str(tmp_path / "shipped"))
    assert exported.digest == plan.digest
    assert Plan.open(Run(tmp_path / "shipped").plan(name, plan.budget)).bits == plan.bits
    subject = Subject(plan.recipe, plan)
    if kind == "sliding" and name in OVER_LAYERS:
        with pytest.raises(AatcError, match="codes all layers together, and this model keeps some of them exact"):
            measured("kl", run, model, [subject], text=[corpus], length=224, limit=1, first=160)
        return
    [found] = measured("kl", run, model, [subject], text=[corpus], length=224, limit=1, first=160)
    assert 0 < found.kl_mean < 5
    assert found.bits_at_context == layout.bits_at(224)


def planned(run: Run, name: str) -> Plan:
    recipe = load_recipe(name)
    if not run.transform(recipe.transform_name).exists():
        whiten(run, transform_stats=run.stats(), rate_stats=run.stats(), wanted=Wanted.by(recipe))
    return allocate(run, recipe, [make_budget(bits=float(RECIPES[name]))])[0]


@pytest.mark.parametrize("name", sorted(set(RECIPES) - OVER_LAYERS))
def test_batches_are_coded_row_by_row(made, name):
    """What a cache of several sequences gives back is what those of one each would."""
    kind, _, run = made
    if kind == "sliding" and load_recipe(name).coding.group == 32:
        pytest.skip("groups of 32 do not fit")
    plan = planned(run, name)
    channels = plan.geometry.channels
    x = torch.randn(3, 128, channels, generator=torch.Generator().manual_seed(0))
    for codec in subject_codecs(Subject(plan.recipe, plan), plan.geometry.layers, "cpu")[0].values():
        together = codec.reconstruct(x)
        assert together.shape == x.shape
        alone = torch.cat([codec.reconstruct(row[None]) for row in x])
        assert torch.allclose(together, alone, atol=1e-4)
        # tokens that come later change nothing before them, block by block
        assert torch.allclose(codec.reconstruct(torch.cat((x, x), 1))[:, :128], together, atol=1e-4)
