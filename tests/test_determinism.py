"""The same inputs give the same artifacts: threads, repetitions, solvers, deterministic algorithms, torch versions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from aatc_cli.artifacts.artifact import open_artifact
from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Window, make_budget
from aatc_cli.core import allocate as allocation
from aatc_cli.core import transform
from aatc_cli.core.stats import LayerStats
from aatc_cli.core.transform import canonical_basis, loss_metric, whitening
from aatc_cli.core.weights import latent_variance, quadratic_weights
from aatc_cli.evals.subjects import Subject
from aatc_cli.models.adapter import attention_sites, geometry_of
from aatc_cli.models.capture import capture
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.profiles import TextMixture, load_recipe
from aatc_cli.runtime.attach import attach_codecs
from aatc_cli.stages.allocate import allocate
from aatc_cli.stages.collect import CollectOptions, collect
from aatc_cli.stages.whiten import Wanted, whiten

# recipes whose allocators, weights, curves and transforms differ, and a budget of each
BUDGETS = {
    "paper": 3.0,
    "var-only": 3.0,
    "no-query": 3.5,
    "per-layer": 3.0,
    "uniform": 3.0,
    "global": 3.0,
    "loss-aware": 1.5,
    "kvtc": 2.0,
    "palu": 3.0,
    "ratequant": 2.5,
    "oscar": 2.0,
    "turboquant": 3.0,
}
WINDOW = Window(sinks=2, recent=8, flush=4)
THREADS = (1, 2, 4)
ROOT = Path(__file__).parent.parent


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    """Operations without a deterministic form raise, and memory that was never written reads as NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def collected(run: Run, model: Path, corpus: Path, fisher: int = 4) -> Run:
    settings = CollectSettings(samples=8, length=96, rows=384, fisher=fisher, window=WINDOW)
    mixture = TextMixture(sources=[str(corpus)], samples=8, length=96)
    collect(run, "stats", find_model(str(model)), mixture, settings, CollectOptions())
    return run


def whitened(run: Run, stats: Path) -> Run:
    """Every transform that the recipes ask for."""
    for name in BUDGETS:
        recipe = load_recipe(name)
        if not run.transform(recipe.transform_name).exists():
            whiten(run, transform_stats=stats, rate_stats=stats, wanted=Wanted.by(recipe))
    return run


def digests(run: Run, force: bool = False) -> dict[str, str]:
    """Digest of the plan of every recipe."""
    found = {}
    for name, bits in BUDGETS.items():
        (plan,) = allocate(run, load_recipe(name), [make_budget(bits=bits)], force=force)
        found[name] = plan.digest
    return found


@pytest.fixture(scope="module")
def run(tiny_llama: Path, corpus: Path, tmp_path_factory: Any) -> Run:
    found = collected(Run(tmp_path_factory.mktemp("determinism") / "run"), tiny_llama, corpus)
    return whitened(found, found.stats())


def test_plans_are_the_same_bits_whatever_the_threads(run: Run) -> None:
    """Each made twice under 1, 2 and 4 threads, the second time over the first."""
    found = []
    for count in THREADS:
        with threads(count):
            found += [digests(run, force=True) for _ in range(2)]
    assert all(one == found[0] for one in found)
    assert len(set(found[0].values())) == len(BUDGETS)


def largest_difference(one: Path, other: Path, kind: str) -> dict[str, float]:
    """Per kind of tensor the largest difference between two artifacts over the tensor's largest number."""
    left, right = open_artifact(one, kind), open_artifact(other, kind)
    assert left.manifest.tensors.keys() == right.manifest.tensors.keys()
    worst: dict[str, float] = {}
    for name in left.manifest.tensors:
        a, b = left.tensor(name), right.tensor(name)
        if a.is_floating_point() and a.numel():
            scale = float(a.abs().max()) or 1.0
            last = name.rpartition(".")[2]
            worst[last] = max(worst.get(last, 0.0), float((a - b).abs().max()) / scale)
    return worst


@pytest.mark.parametrize("head_dim", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_stats_and_transforms_of_other_threads_agree(
    new_model: Any, corpus: Path, tmp_path: Path, head_dim: int
) -> None:
    """Moments and rows to 1e-6: sums in float64 of float32 activations. Gradients, in float32 throughout, to 1e-4.

    Transforms of one Stats to 1e-6, in float64: rounding turns an eigenvector by 1e-16 over the gap to its neighbour.
    """
    model = new_model(tmp_path / "model", hidden_size=4 * head_dim, head_dim=head_dim, num_hidden_layers=2)
    runs = []
    for count in (*THREADS, 1):
        with threads(count):
            runs.append(collected(Run(tmp_path / str(len(runs))), model, corpus))
            whitened(runs[-1], runs[0].stats())
    stats: dict[str, float] = {}
    made: dict[str, float] = {}
    for other in runs[1:]:
        found = largest_difference(runs[0].stats(), other.stats(), "stats")
        stats |= {key: max(value, stats.get(key, 0.0)) for key, value in found.items()}
        for name in BUDGETS:
            folder = load_recipe(name).transform_name
            found = largest_difference(runs[0].transform(folder), other.transform(folder), "transform")
            made |= {key: max(value, made.get(key, 0.0)) for key, value in found.items()}
    print("threads 1, 2, 4, 1:", {key: f"{value:.1e}" for key, value in (stats | made).items()})
    gradients = {key for key in stats if key.endswith(("fisher", "ranks"))}
    assert len(gradients) >= 2
    assert max(stats[key] for key in gradients) < 1e-4
    assert max(value for key, value in stats.items() if key not in gradients) < 1e-6
    assert max(made.values()) < 1e-6
    # once more with one thread: the same bits
    first, last = (open_artifact(one.stats(), "stats").manifest for one in (runs[0], runs[3]))
    assert first.digest == last.digest


def test_the_pipeline_has_no_operation_without_a_deterministic_form(
    measured: Any, run: Run, tiny_llama: Path, corpus: Path, tmp_path: Path
) -> None:
    """Collect with gradients, every transform, plans, three tasks and a packed cache; the same digests as without."""
    with deterministic():
        strict = collected(Run(tmp_path / "strict"), tiny_llama, corpus)
        whitened(strict, strict.stats())
        assert digests(strict) == digests(run)
        for task in ("kl", "perplexity", "distortion"):
            subjects = [
                Subject(load_recipe(name), allocate(strict, load_recipe(name), [make_budget(bits=BUDGETS[name])])[0])
                for name in (("paper", "loss-aware", "kvtc", "turboquant") if task == "kl" else ("paper",))
            ]
            measured(task, strict, tiny_llama, subjects, text=[corpus], length=224, limit=1, first=160)
        (plan,) = allocate(strict, load_recipe("paper"), [make_budget(bits=3.0)])
        model = load_model(find_model(str(tiny_llama)))
        ids = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
        tokens = []
        for _ in range(2):
            with attach_codecs(model, plan.codecs("cpu"), WINDOW) as session:
                kwargs = {session.keyword: session.new_cache(), "do_sample": False, "max_new_tokens": 20}
                tokens.append(model.generate(ids, **kwargs))
        assert torch.equal(*tokens)


# eigenvalues that are equal


def repeated(seed: int) -> torch.Tensor:
    """A second moment [12, 12] with eigenvalues of multiplicity three, two and, at zero, two."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))[0]
    values = torch.tensor([9.0, 5.0, 5.0, 5.0, 4.0, 3.0, 2.0, 2.0, 1.0, 0.5, 0.0, 0.0], dtype=torch.float64)
    return basis * values @ basis.T


SPACES = [slice(0, 1), slice(1, 4), slice(4, 5), slice(5, 6), slice(6, 8), slice(8, 9), slice(9, 10), slice(10, 12)]


def other_solver(seed: int) -> Callable[..., Any]:
    """An eigensolver that is as right as torch's: with other signs, and in equal eigenvalues with another basis."""
    genuine, generator = torch.linalg.eigh, torch.Generator().manual_seed(seed)

    def solve(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = genuine(matrix)
        vectors = vectors * torch.where(torch.rand(len(values), generator=generator) < 0.5, -1.0, 1.0)
        start = 0
        for stop in range(1, len(values) + 1):
            if stop == len(values) or values[stop] - values[stop - 1] > 1e-12 * values[-1]:
                turn = torch.linalg.qr(torch.randn(stop - start, stop - start, generator=generator).double())[0]
                vectors[:, start:stop] = vectors[:, start:stop] @ turn
                start = stop
        return values, vectors

    return solve


def plan_of(found: transform.GroupTransform, moment: torch.Tensor, form: torch.Tensor) -> list[int]:
    """Widths at 2.5 bits per channel of variances times quadratic weights."""
    variance = latent_variance(found.encode[None], moment)
    weight = quadratic_weights(found.decode[None], form[None])
    curves = allocation.exponential_curves((variance * weight).numpy(), 16)
    return [int(width) for width in allocation.waterfill(curves, 30)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["whiten", "metric"])
def test_equal_eigenvalues_have_one_basis_and_one_plan(monkeypatch: Any, kind: str, seed: int) -> None:
    """Whatever basis of an eigenspace a solver returns, and with sums rounded otherwise."""
    moment, form = repeated(seed), repeated(100 + seed) + torch.eye(12, dtype=torch.float64)
    made = whitening if kind == "whiten" else lambda moment: loss_metric(moment, torch.eye(12))
    noise = torch.randn(12, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    reference, plain = made(moment), torch.linalg.eigh(moment)
    turned = 0.0
    for trial in range(8):
        solver = other_solver(trial)
        other = solver(moment)[1]
        with monkeypatch.context() as patch:
            patch.setattr(transform.torch.linalg, "eigh", solver)
            found = made(moment + 2e-16 * trial * (noise + noise.T))
        assert torch.allclose(found.encode, reference.encode, rtol=0, atol=1e-9)
        assert torch.allclose(found.decode, reference.decode, rtol=0, atol=1e-9)
        assert plan_of(found, moment, form) == plan_of(reference, moment, form)
        turned = max(turned, float((other.abs() - plain[1].abs()).abs().max()))
        # the space is the solver's own
        for space in SPACES:
            mine = torch.linalg.qr(found.encode[:, space])[0]
            theirs = other.flip(1)[:, space]
            assert torch.allclose(mine @ mine.T, theirs @ theirs.T, atol=1e-9)
    assert turned > 0.1  # the solvers really differ


def test_a_solver_s_own_basis_would_change_the_plan(monkeypatch: Any) -> None:
    """Signs alone are not enough: with them fixed and no more, plans of equal solvers differ."""
    moment, form = repeated(0), repeated(100) + torch.eye(12, dtype=torch.float64)
    monkeypatch.setattr(transform, "canonical_basis", lambda values, vectors: transform.canonical_signs(vectors))
    plans = set()
    for trial in range(8):
        with monkeypatch.context() as patch:
            patch.setattr(transform.torch.linalg, "eigh", other_solver(trial))
            plans.add(tuple(plan_of(whitening(moment), moment, form)))
    assert len(plans) > 1


def test_a_space_of_everything_is_the_axes() -> None:
    """A multiple of the identity, and nothing at all."""
    for moment in (torch.eye(7), 3 * torch.eye(7), torch.zeros(7, 7)):
        values, vectors = other_solver(1)(moment.double())
        assert torch.allclose(canonical_basis(values.flip(0), vectors.flip(1)), torch.eye(7).double(), atol=1e-12)


def test_eigenvalues_that_differ_keep_their_own_vectors() -> None:
    """A gap of 1e-12 of the largest eigenvalue is one: nothing is mixed across it."""
    basis = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double())[0]
    values = torch.tensor([1.0, 0.5, 0.5 - 1e-12, 0.25, 1e-12], dtype=torch.float64)
    assert torch.equal(canonical_basis(values, basis), transform.canonical_signs(basis))


def test_plans_are_the_same_in_another_torch(run: Run) -> None:
    """``allocate --check`` of every plan by another interpreter, named by AATC_OTHER_PYTHON, with another torch."""
    other = os.environ.get("AATC_OTHER_PYTHON")
    if not other:
        pytest.skip("AATC_OTHER_PYTHON names no interpreter with another torch")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    version = subprocess.run(
        [other, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    ).stdout.strip()
    assert version != torch.__version__
    digests(run)
    plans = sorted((run.root / "plans").iterdir())
    command = [other, "-m", "aatc_cli", "allocate", "--check", str(plans[0])]
    assert subprocess.run(command, env=environment, cwd=ROOT).returncode == 0
    code = (
        "import sys; from pathlib import Path\n"
        "from aatc_cli.stages.allocate import check; from aatc_cli.artifacts.plan import Plan\n"
        "print(sum(len(check(Plan.open(Path(place)))) for place in sys.argv[1:]))"
    )
    command = [other, "-c", code, *map(str, plans)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert result.stdout.strip() == "0"
    assert len(plans) >= len(BUDGETS)


@pytest.mark.slow
def test_processes_of_other_thread_counts_make_the_same_plans(run: Run, tmp_path: Path) -> None:
    """Whole processes, so that every library below has the count from its start."""
    found = set()
    for count in THREADS:
        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment = os.environ | dict.fromkeys(names, str(count)) | {"AATC_RUN": str(run.root)}
        for _ in range(2):
            command = [sys.executable, "-m", "aatc_cli", "allocate", "--force", "--budget", "3"]
            for name in ("paper", "loss-aware", "var-only"):
                command += ["--recipe", name]
            subprocess.run(command, check=True, capture_output=True, env=environment, cwd=ROOT)
            found.add(
                tuple(
                    open_artifact(run.root / "plans" / f"{name}-3", "plan").manifest.digest
                    for name in ("paper", "loss-aware", "var-only")
                )
            )
    assert len(found) == 1


@torch.no_grad()
@pytest.mark.parametrize("offset", [1, 3, 10])
def test_where_tensors_lie_in_memory_does_not_count(tiny_llama: Path, offset: int) -> None:
    """A file puts weights at any multiple of 8 bytes, an allocator at multiples of 64: the same keys, the same sums."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(tensor.numel() + 64, dtype=tensor.dtype)
        place = buffer[offset : offset + tensor.numel()].view(tensor.shape)
        return place.copy_(tensor)

    def found(model: Any, place: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        layer = LayerStats.empty(geometry_of(model.config), 16, torch.zeros(2, 16, 16))
        seen: list[torch.Tensor] = []

        def take(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            rows = [place(part) for part in (torch.unflatten(q, -1, (4, 16)), k, v)]
            seen.extend(rows)
            if index == 3:
                layer.update(*rows, torch.arange(16))

        with capture(attention_sites(model), take):
            model(input_ids=torch.arange(200)[None] % 250, use_cache=False)
        return [*seen, *layer.tensors().values()]

    model = load_model(find_model(str(tiny_llama)))
    before = found(model, lambda tensor: tensor)
    for parameter in model.parameters():
        parameter.data = moved(parameter)
        assert parameter.data_ptr() % 64
    after = found(model, moved)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
