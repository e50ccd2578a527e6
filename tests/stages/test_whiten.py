from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.artifact import Artifact, ArtifactWriter, open_artifact
from aatc_cli.artifacts.manifest import TENSORS
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings, Stats
from aatc_cli.config import Geometry
from aatc_cli.errors import AatcError, ArtifactError, SettingsMismatchError, UsageError
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.profiles import TextMixture
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten

HEADS, DIM, CHANNELS = 2, 16, 32


@pytest.fixture(scope="module")
def two_stats(tiny_llama: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two Stats of one model: "stats" and, from other windows, "stats-transform"."""
    run = Run(tmp_path_factory.mktemp("two"))
    for name, seed in (("stats", 0), ("stats-transform", 1)):
        settings = CollectSettings(samples=6, length=64, rows=300, seed=seed)
        mixture = TextMixture(sources=[str(corpus)], samples=6, length=64)
        collect(run, name, find_model(str(tiny_llama)), mixture, settings, CollectOptions())
    return run.root


def make(tmp_path: Path, rates: Path, basis: Path | None = None, force: bool = False, **changes: Any) -> Artifact:
    run = Run(tmp_path / "run")
    whiten(run, transform_stats=basis or rates, rate_stats=rates, wanted=Wanted(**changes), force=force)
    return open_artifact(run.transform(changes.get("transform", "whiten")), "transform")


def site(transform: Artifact, layer: int, side: str) -> dict[str, torch.Tensor]:
    names = ("encode", "decode", "scale", "variance", "weight")
    return {name: transform.tensor(f"layers.{layer}.{side}.{name}") for name in names}


def dense(matrices: torch.Tensor) -> torch.Tensor:
    """[groups, E, E] as one block-diagonal [C, C] matrix."""
    return torch.block_diag(*matrices.double())


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return float((a.double() - b.double()).abs().max()) <= tolerance * float(b.double().abs().max())


@pytest.mark.parametrize("groups", [1, 2])
def test_the_transform_whitens(base_run: Path, tmp_path: Path, groups: int) -> None:
    transform = make(tmp_path, base_run / "stats", head_groups=groups)
    stats = Stats.open(base_run / "stats")
    size = CHANNELS // groups
    for layer in range(4):
        sums = stats.layer(layer)
        for side, outer, rows in (("k", sums.k_outer, sums.k_rows), ("v", sums.v_outer, sums.v_rows)):
            parts = site(transform, layer, side)
            assert tuple(parts["encode"].shape) == tuple(parts["decode"].shape) == (groups, size, size)
            encode, decode = dense(parts["encode"]), dense(parts["decode"])
            assert close(encode @ decode, torch.eye(CHANNELS), 1e-4)
            moment = encode.T @ (outer / sums.count) @ encode
            assert close(torch.diagonal(moment), parts["variance"], 1e-5)
            for group in torch.diagonal(moment).split(size):
                assert bool((group[:-1] >= group[1:] * (1 - 1e-5)).all())
            # decorrelated inside a group, and inside a group alone
            blocks = torch.block_diag(*[torch.ones(size, size)] * groups).bool()
            off = moment - torch.diag(torch.diagonal(moment))
            assert float(off[blocks].abs().max()) < 1e-4 * float(moment.max())
            assert groups == 1 or float(off[~blocks].abs().max()) > 1e-3 * float(moment.max())
            # H^T H / N = S: the squared variances are the eigenvalues of the group's moment
            for index in range(groups):
                block = slice(index * size, (index + 1) * size)
                eigenvalues = torch.linalg.eigvalsh(outer[block, block] / sums.count).flip(0)
                assert close(parts["variance"][block].square(), eigenvalues, 1e-4)
            latents = (rows.double() @ encode).abs()
            assert close(parts["scale"], torch.quantile(latents, 0.99, dim=0), 1e-5)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", ["whiten", "identity"])
def test_value_weights_are_norms_of_rows_of_b_times_w_o(
    tiny_llama: Path, base_run: Path, tmp_path: Path, groups: int, kind: str
) -> None:
    transform = make(tmp_path, base_run / "stats", head_groups=groups, transform=kind)
    model = load_model(find_model(str(tiny_llama)))
    for layer in range(4):
        decode = dense(site(transform, layer, "v")["decode"])
        output = model.model.layers[layer].self_attn.o_proj.weight.detach().double().T  # [heads * D, M]
        # with grouped queries a value row meets the two rows of W_O of its query heads; their energies add
        weights = sum(
            (decode[:, h * DIM : (h + 1) * DIM] @ output[q * DIM : (q + 1) * DIM]).square().sum(1)
            for h in range(HEADS)
            for q in (2 * h, 2 * h + 1)
        )
        assert close(site(transform, layer, "v")["weight"], weights, 1e-5)
        # in two groups a latent channel reaches one kv head alone
        assert (float(decode[:DIM, DIM:].abs().max()) == 0) == (groups == 2 or kind == "identity")


def test_key_weights_are_energies_of_queries(base_run: Path, tmp_path: Path) -> None:
    transform = make(tmp_path, base_run / "stats")
    stats = Stats.open(base_run / "stats")
    for layer in range(4):
        sums, decode = stats.layer(layer), dense(site(transform, layer, "k")["decode"])
        weights = torch.zeros(CHANNELS, dtype=torch.float64)
        for head in range(HEADS):
            rows = decode[:, head * DIM : (head + 1) * DIM]
            weights += torch.diagonal(rows @ (sums.q_outer[head] / sums.count) @ rows.T)
        assert close(site(transform, layer, "k")["weight"], weights, 1e-5)


def test_identity_changes_nothing(base_run: Path, tmp_path: Path) -> None:
    transform = make(tmp_path, base_run / "stats", transform="identity")
    stats = Stats.open(base_run / "stats")
    for layer in range(4):
        sums = stats.layer(layer)
        for side, outer in (("k", sums.k_outer), ("v", sums.v_outer)):
            parts = site(transform, layer, side)
            assert torch.equal(parts["encode"], torch.eye(CHANNELS)[None])
            assert torch.equal(parts["decode"], torch.eye(CHANNELS)[None])
            assert close(parts["variance"], torch.diagonal(outer) / sums.count, 1e-9)


def test_matrices_from_one_collection_and_rates_from_the_other(two_stats: Path, tmp_path: Path) -> None:
    a, b = two_stats / "stats", two_stats / "stats-transform"
    both, only_a, only_b = (
        make(tmp_path / name, rates, basis) for name, rates, basis in (("ab", a, b), ("a", a, a), ("b", b, b))
    )
    rates = Stats.open(a).layer(1)
    for side in ("k", "v"):
        mixed, own, other = (site(transform, 1, side) for transform in (both, only_a, only_b))
        assert torch.equal(mixed["encode"], other["encode"])
        assert not close(mixed["encode"], own["encode"], 1e-3)
        outer = rates.k_outer if side == "k" else rates.v_outer
        encode = dense(mixed["encode"])
        assert close(torch.diagonal(encode.T @ outer @ encode) / rates.count, mixed["variance"], 1e-5)
        assert not close(mixed["variance"], other["variance"], 1e-3)
    assert both.manifest.inputs == {
        "transform_stats": Stats.open(b).manifest.digest,
        "rate_stats": Stats.open(a).manifest.digest,
    }


def test_the_same_stats_give_the_same_digest(base_run: Path, tmp_path: Path) -> None:
    digests = {make(tmp_path / name, base_run / "stats").manifest.digest for name in "ab"}
    assert len(digests) == 1


def test_head_groups_of_the_stats_are_the_default(tiny_llama: Path, corpus: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    settings = CollectSettings(samples=6, length=64, head_groups=2)
    collect(
        run,
        "stats",
        find_model(str(tiny_llama)),
        TextMixture(sources=[str(corpus)], samples=6, length=64),
        settings,
        CollectOptions(),
    )
    assert make(tmp_path, run.stats()).manifest.settings["head_groups"] == {"k": 2, "v": 2}
    assert make(tmp_path / "b", run.stats(), head_groups=1).manifest.settings["head_groups"] == {"k": 1, "v": 1}


def test_keys_and_values_have_groups_of_their_own(base_run: Path, tmp_path: Path) -> None:
    run, stats = Run(tmp_path / "run"), base_run / "stats"
    for keys, values, folder, groups in (
        ("per-head", "all", "whiten-keys-per-head-values-all", {"k": 2, "v": 1}),
        ("profile", "per-head", "whiten-values-per-head", {"k": 1, "v": 2}),
    ):
        whiten(run, transform_stats=stats, rate_stats=stats, wanted=Wanted(key_groups=keys, value_groups=values))
        made = open_artifact(run.transform(folder), "transform")
        assert made.manifest.settings["head_groups"] == groups
        for side, count in groups.items():
            alike = open_artifact(
                make(tmp_path / f"{folder}{side}", stats, head_groups=count).path, "transform"
            )  # each side is what it is where both have its groups
            for name, tensor in site(made, 1, side).items():
                assert torch.equal(tensor, alike.tensor(f"layers.1.{side}.{name}")), (folder, side, name)
    # a number stands in for the profile's, and a choice goes before it
    whiten(run, transform_stats=stats, rate_stats=stats, wanted=Wanted(head_groups=2, value_groups="all"))
    assert open_artifact(run.transform("whiten-values-all"), "transform").manifest.settings["head_groups"] == {
        "k": 2,
        "v": 1,
    }


@pytest.mark.parametrize("groups", [0, -1, 3, 4])
def test_head_groups_that_do_not_divide(base_run: Path, tmp_path: Path, groups: int) -> None:
    with pytest.raises(UsageError, match=f"--head-groups {groups} does not divide the model's 2 kv heads") as caught:
        make(tmp_path, base_run / "stats", head_groups=groups)
    assert "[1, 2]" in str(caught.value.hint)
    assert list(tmp_path.iterdir()) == []


def test_unchanged_changed_and_forced(base_run: Path, tmp_path: Path, snapshot: Any, capsys: Any) -> None:
    first = make(tmp_path, base_run / "stats")
    before = snapshot(tmp_path)
    capsys.readouterr()
    assert make(tmp_path, base_run / "stats").manifest == first.manifest
    assert "whiten: inputs unchanged, nothing to do" in capsys.readouterr().err
    for changes, says in (
        ({"head_groups": 2}, "settings.head_groups.k was 1, now 2; settings.head_groups.v was 1, now 2"),
        ({"percentile": 98.0}, "settings.percentile was 99.0, now 98.0"),
        ({"shrinkage": 0.3}, "settings.shrinkage was 0.1, now 0.3"),
    ):
        with pytest.raises(SettingsMismatchError) as caught:
            make(tmp_path, base_run / "stats", **changes)
        assert says in caught.value.message
        assert "--force" in str(caught.value.hint)
    assert snapshot(tmp_path) == before
    changed = make(tmp_path, base_run / "stats", head_groups=2, force=True)
    assert tuple(changed.tensor("layers.0.k.encode").shape) == (2, 16, 16)


def test_other_stats_under_the_same_name_are_noticed(two_stats: Path, tmp_path: Path) -> None:
    make(tmp_path, two_stats / "stats")
    with pytest.raises(SettingsMismatchError, match=r"inputs.rate_stats was .*; inputs.transform_stats was "):
        make(tmp_path, two_stats / "stats-transform")


def forged(source: Path, target: Path, changes: dict[str, torch.Tensor], **fields: Any) -> Path:
    """A copy of Stats with other tensors and results, and a digest that fits them."""
    artifact = open_artifact(source, "stats")
    manifest = artifact.manifest
    with ArtifactWriter(target, "stats") as writer:
        for name, tensor in (dict(artifact.tensors()) | changes).items():
            writer.add(name, tensor)
        writer.commit(
            settings=fields.get("settings", manifest.settings),
            model=fields.get("model", manifest.model),
            texts=manifest.texts,
            results=fields.get("results", manifest.results),
        )
    return target


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layers.1.k_outer": torch.full((32, 32), float("nan"), dtype=torch.float64)}, "'layers.1.k_outer' does not"),
        ({"layers.0.o_gram": torch.full((2, 16, 16), float("inf"), dtype=torch.float64)}, "'layers.0.o_gram'"),
        ({"layers.3.v_outer": torch.zeros(16, 16, dtype=torch.float64)}, "of shape [32, 32]"),
        ({"layers.2.q_outer": torch.zeros(32, 16, dtype=torch.float64)}, "of shape [2, 16, 16]"),
        ({"layers.2.k_rows": torch.zeros(3, 31)}, "of shape [-1, 32]"),
        ({"layers.2.k_outer": torch.zeros(32, 32, dtype=torch.int64)}, "'layers.2.k_outer'"),
    ],
)
def test_stats_with_values_they_cannot_have(
    base_run: Path, tmp_path: Path, changes: dict[str, torch.Tensor], says: str
) -> None:
    bad = forged(base_run / "stats", tmp_path / "bad", changes)
    with pytest.raises(ArtifactError) as caught:
        make(tmp_path, bad)
    assert says in caught.value.message
    assert "aatc collect --force" in str(caught.value.hint)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.parametrize("count", [0, -5, None, "many", True])
def test_stats_without_a_token_count(base_run: Path, tmp_path: Path, count: object) -> None:
    bad = forged(base_run / "stats", tmp_path / "bad", {}, results={"windows": 8, "tokens": count, "fisher_windows": 0})
    with pytest.raises(ArtifactError, match="settings are not those of Stats: tokens"):
        make(tmp_path, bad)


def test_stats_of_two_models(base_run: Path, tmp_path: Path) -> None:
    model = Stats.open(base_run / "stats").manifest.model
    other = forged(
        base_run / "stats", tmp_path / "other", {}, model=model.model_copy(update={"weights_fingerprint": "0" * 64})
    )
    with pytest.raises(ArtifactError, match=r"the model is not the one .* was made for: weights_fingerprint was"):
        make(tmp_path, base_run / "stats", other)
    assert not (tmp_path / "run").exists()


def test_an_unfinished_collect_is_no_input(base_run: Path, tmp_path: Path) -> None:
    partial = forged(
        base_run / "stats", tmp_path / "partial", {}, results={"windows": 3, "tokens": 180, "fisher_windows": 0}
    )
    for rates, basis in ((partial, base_run / "stats"), (base_run / "stats", partial)):
        with pytest.raises(ArtifactError, match="checkpoint of collect after 3 of 8 windows"):
            make(tmp_path, rates, basis)


def test_the_metric_transform_needs_gradients(base_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no loss gradients") as caught:
        make(tmp_path, base_run / "stats", transform="metric")
    assert "--fisher" in str(caught.value.hint)
    assert not (tmp_path / "run").exists()


def test_missing_and_damaged_stats(base_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="there is no stats at") as caught:
        make(tmp_path, tmp_path / "none")
    assert "aatc collect" in str(caught.value.hint)
    shutil.copytree(base_run / "stats", tmp_path / "bad")
    content = bytearray((tmp_path / "bad" / TENSORS).read_bytes())
    content[-1] ^= 1
    (tmp_path / "bad" / TENSORS).write_bytes(content)
    with pytest.raises(AatcError, match="does not match its recorded hash"):
        make(tmp_path, tmp_path / "bad")
    assert not (tmp_path / "run" / "transforms").exists()
    with pytest.raises(ArtifactError, match="holds a transform, not a stats"):
        make(tmp_path, base_run / "transforms" / "whiten")


@pytest.mark.parametrize("kind", ["whiten", "identity"])
def test_dead_and_constant_channels(base_run: Path, tmp_path: Path, kind: str) -> None:
    """A site that never varies, and one of zeros: finite matrices that are inverse of each other, positive scales."""
    geometry: Geometry = Stats.open(base_run / "stats").manifest.model.geometry
    count = Stats.open(base_run / "stats").manifest.results["tokens"]
    constant = torch.zeros(geometry.channels, dtype=torch.float64)
    constant[3] = 2.0
    changes = {
        "layers.0.k_outer": count * torch.outer(constant, constant),
        "layers.0.k_rows": constant.float().repeat(9, 1),
        "layers.1.v_outer": torch.zeros(32, 32, dtype=torch.float64),
        "layers.1.v_rows": torch.zeros(9, 32),
    }
    transform = make(tmp_path, forged(base_run / "stats", tmp_path / "dead", changes), transform=kind)
    for layer, side in ((0, "k"), (1, "v")):
        parts = site(transform, layer, side)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in parts.values())
        assert bool((parts["scale"] > 0).all())
        assert close(dense(parts["encode"]) @ dense(parts["decode"]), torch.eye(CHANNELS), 1e-5)
    constant_site = site(transform, 0, "k")
    back = constant @ dense(constant_site["encode"]) @ dense(constant_site["decode"])
    assert close(back, constant, 1e-6)
    assert int((constant_site["variance"] > 1e-9).sum()) == 1


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("groups", [1, 2])
def test_the_loss_metric_is_shrunk_towards_its_diagonal(
    base_run: Path, tmp_path: Path, share: float, groups: int
) -> None:
    """The transform and its Fisher weights are those of Stats that hold the shrunk sums, with no shrinkage."""
    generator = torch.Generator().manual_seed(3)
    roots = {
        f"layers.{layer}.{side}_fisher": torch.randn(32, 32, generator=generator, dtype=torch.float64)
        for layer in range(4)
        for side in "kv"
    }
    metrics = {name: root @ root.T for name, root in roots.items()}
    kept = 1 - share
    shrunk = {name: kept * m + share * torch.diag(m.diagonal()) for name, m in metrics.items()}
    source = base_run / "stats"
    settings = Stats.open(source).manifest.settings | {"fisher": 4, "window": {"sinks": 2, "recent": 8, "flush": 4}}
    fields = {"results": {"windows": 8, "tokens": 480, "fisher_windows": 4}, "settings": settings}
    made = [
        make(
            tmp_path / name,
            forged(source, tmp_path / name / "stats", changes, **fields),
            transform="metric",
            head_groups=groups,
            shrinkage=shrinkage,
        )
        for name, changes, shrinkage in (("plain", metrics, share), ("prepared", shrunk, 0.0))
    ]
    for layer in range(4):
        for side in "kv":
            for part in ("encode", "decode", "variance", "fisher"):
                name = f"layers.{layer}.{side}.{part}"
                assert close(made[0].tensor(name), made[1].tensor(name), 1e-4), name
    if share == 1.0:
        # without correlations in the metric and one head to a group the transform is of scaled channels alone
        encode = made[0].tensor("layers.0.k.encode").double()
        metric = metrics["layers.0.k_fisher"].diagonal().reshape(groups, -1)
        scaled = encode / metric.sqrt()[:, :, None]
        gram = scaled @ scaled.mT
        off = gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))
        assert float(off.abs().max()) < 1e-3 * float(gram.max())


def test_what_a_recipe_needs(aatc: Any, refuses: Any, with_gradients: Any, tiny_llama: Path, tmp_path: Path) -> None:
    """Kind, head groups and tables of a quantizer by its name, and the command that `allocate` names."""
    run = with_gradients(tmp_path, tiny_llama)
    command = ("allocate", "--run", run.root, "--recipe", "kvquant", "--budget", 2)
    missing = refuses(*command, says=("there is no transform at",), folder=run.root)
    assert "aatc whiten --recipe kvquant" in missing.err
    folders = {"kvquant": "identity-nonuniform-outlier", "ratequant": "hadamard-keys-per-head-values-per-head"}
    for recipe, folder in folders.items():
        assert aatc("whiten", "--run", run.root, "--recipe", recipe).code == 0
        settings = open_artifact(run.root / "transforms" / folder, "transform").manifest.settings
        assert settings.get("tables") == (["nonuniform-outlier"] if recipe == "kvquant" else None)
        assert aatc("allocate", "--run", run.root, "--recipe", recipe, "--budget", 2).code == 0
    assert aatc("whiten", "--run", run.root, "--transform", "identity").code == 0
    plain = run.root / "transforms" / "identity"
    command = ("allocate", "--run", run.root, "--recipe", "kvquant", "--budget", 3, "--transform", plain)
    refuses(*command, says=("needs the tables of nonuniform-outlier",), folder=run.root, code=2)
    command = ("whiten", "--run", run.root, "--recipe", "kvquant", "--transform", "metric")
    refuses(*command, says=("--recipe says which transform",), folder=run.root, code=2)


def test_nothing_to_do_loads_no_torch(base_run: Path, tmp_path: Path) -> None:
    """A second's work at most: the artifacts are looked at, and nothing that computes is imported."""
    shutil.copytree(base_run, tmp_path / "run")
    code = (
        "import sys; from pathlib import Path\n"
        "from aatc_cli.artifacts.run import Run\n"
        "from aatc_cli.config import make_budget\n"
        "from aatc_cli.profiles import load_recipe\n"
        "from aatc_cli.stages.allocate import allocate, check\n"
        "from aatc_cli.stages.whiten import whiten\n"
        f"run = Run(Path({str(tmp_path / 'run')!r}))\n"
        "whiten(run, transform_stats=run.stats(), rate_stats=run.stats())\n"
        "plan = allocate(run, load_recipe('paper'), [make_budget(bits=3.0)])[0]\n"
        "assert check(plan) == []\n"
        "allocate(run, load_recipe('var-only'), [make_budget(bits=3.0)])\n"
        "print('loaded:', sorted({'torch', 'transformers', 'scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("nothing to do") == 2
    assert done.stdout == "loaded: []\n"
