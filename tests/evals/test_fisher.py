"""Loss gradients at the cache: against finite differences through another attention, and against the exact Fisher."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aatc_cli.artifacts.run import Run
from aatc_cli.artifacts.stats import CollectSettings
from aatc_cli.config import Window
from aatc_cli.models.adapter import attention_sites
from aatc_cli.models.attention import attention_override
from aatc_cli.models.loading import find_model, load_model
from aatc_cli.profiles import TextMixture
from aatc_cli.stages import collect as collect_stage
from aatc_cli.stages.collecting import fisher
from aatc_cli.stages.collecting import passes as collect_passes
from aatc_cli.stages.collecting.fisher import fisher_pass, sample_labels

WINDOW = Window(sinks=1, recent=4, flush=2)
LENGTH, FIRST_READER = 40, 5  # query 5 is the first whose cache of 6 is more than sinks and window hold
PACKED = range(1, 37)  # 35 tokens beyond sinks and window, in blocks of two


def double(path):
    """The model in float64 throughout: its own norms compute in float32, too coarse for finite differences."""
    model = load_model(find_model(str(path))).double()

    def normalise(module, inputs, output):
        [x] = inputs
        return module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()

    norms = [module for module in model.modules() if hasattr(module, "variance_epsilon")]
    assert len(norms) >= 2 * model.config.num_hidden_layers + 1
    for module in norms:
        module.register_forward_hook(normalise)
    return model, attention_sites(model)


def some_tokens(model, length=LENGTH, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, min(model.config.vocab_size, 250), (1, length), generator=generator)


def packed_count(cached: int) -> int:
    """The window rule, as the paper tells it: blocks leave while more than the window is left."""
    packed = 0
    while cached - WINDOW.sinks - packed > WINDOW.recent:
        packed += WINDOW.flush
    return packed


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE by complex numbers: dimension d and d + D/2 are one of them. x [B, H, T, D], tables [B, T, D]."""
    half = x.shape[-1] // 2
    turn = torch.complex(cos, sin)[:, None, :, :half]
    z = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((z.real, z.imag), -1)


def read_with(shifts):
    """Attention whose far tokens are read as cached vector + shifts[layer, side] [T, C]; one softmax, no tiles."""

    def attend(inputs):
        length, dim = inputs.query.shape[2:]
        layer = inputs.site.layer
        far = torch.tensor(
            [[0 <= i - WINDOW.sinks < packed_count(t + 1) for i in range(length)] for t in range(length)]
        )

        def copy(exact, side, table):
            shift = shifts.get((layer, side))
            if shift is None:
                return exact
            by_head = shift.reshape(1, length, -1, dim).transpose(1, 2)
            return exact + (rotated(by_head, inputs.cos, inputs.sin) if side == "k" else by_head)

        repeats = inputs.query.shape[1] // inputs.key.shape[1]
        key, k_copy, value, v_copy = (
            x.repeat_interleave(repeats, 1)
            for x in (inputs.key, copy(inputs.key, "k", inputs), inputs.value, copy(inputs.value, "v", inputs))
        )
        scores = torch.where(far, inputs.query @ k_copy.mT, inputs.query @ key.mT) * inputs.scaling
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        a = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        return (a * far) @ v_copy + (a * ~far) @ value

    return attend


def logits_with(model, sites, tokens, shifts) -> torch.Tensor:
    """Logits [P, V] of the positions that read packed tokens."""
    with attention_override(model, sites, read_with(shifts)):
        return model(input_ids=tokens, use_cache=False).logits[0, FIRST_READER:]


def detached(inputs, side, on_gradient) -> torch.Tensor:
    """A copy outside of the graph, as a watcher that answers for the attention of its own layer alone."""
    raw = inputs.k_raw if side == "k" else inputs.v_raw
    copy, layer = raw.detach().requires_grad_(), inputs.site.layer
    copy.register_hook(lambda gradient: on_gradient(layer, side, gradient.flatten(0, 1)))
    return copy


def generators(seeds) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def gradients(model, sites, tokens, *seeds, **options) -> dict:
    """Gradients [B * T, C] by site; row b of the batch draws with seed b, all with 0 when none is given."""
    found = {}
    fisher_pass(
        model,
        sites,
        tokens,
        WINDOW,
        generators(seeds or [0] * len(tokens)),
        lambda layer, side, g: found.update({(layer, side): g}),
        **options,
    )
    return found


def labels_of(model, tokens, seed=0) -> torch.Tensor:
    """What the pass samples with this seed: where cumulated probabilities pass a uniform number, by counting."""
    with torch.no_grad():
        p = model(input_ids=tokens, use_cache=False).logits[0, FIRST_READER:].softmax(-1).numpy()
    uniform = torch.rand(len(p), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).numpy()
    return torch.tensor([int((np.cumsum(row) <= u).sum()) for row, u in zip(p, uniform, strict=True)])


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_same_as_finite_differences(family, request):
    """One token's packed copy moves, later layers' caches with it; q, k and v biases and key norms included."""
    model, sites = double(request.getfixturevalue(family))
    tokens = some_tokens(model)
    found, labels = gradients(model, sites, tokens, 3), labels_of(model, tokens, 3)
    assert set(found) == {(layer, side) for layer in range(4) for side in "kv"}
    channels, size = found[0, "k"].shape[1], 1e-5
    directions = torch.Generator().manual_seed(1)

    def log_likelihood(layer, side, shift) -> float:
        with torch.no_grad():
            logits = logits_with(model, sites, tokens, {(layer, side): shift})
        return float(logits.log_softmax(-1).gather(1, labels[:, None]).sum())

    for layer in (0, 2, 3):
        for side in "kv":
            for token in (1, 2, 17, 36):
                shift = torch.zeros(LENGTH, channels, dtype=torch.float64)
                shift[token] = torch.randn(channels, generator=directions, dtype=torch.float64)
                up, down = (log_likelihood(layer, side, sign * size * shift) for sign in (1, -1))
                # the pass minimises the negative log-likelihood, in float32 logits
                expected, scale = -(up - down) / (2 * size), float(found[layer, side][token].norm())
                assert scale > 1e-6
                actual = float((found[layer, side] * shift).sum())
                assert actual == pytest.approx(expected, rel=1e-4, abs=1e-4 * scale), (layer, side, token)


def test_copies_in_the_graph_answer_for_later_layers_too(tiny_llama, monkeypatch):
    """Cut off, a copy misses what it does to packed caches of later layers: nothing in the last one, much before it."""
    model, sites = double(tiny_llama)
    attached = gradients(model, sites, some_tokens(model))
    monkeypatch.setattr(fisher, "_watched", detached)
    cut = gradients(model, sites, some_tokens(model))
    for (layer, side), gradient in attached.items():
        missed = float((cut[layer, side] - gradient).norm() / gradient.norm())
        assert missed < 1e-12 if layer == 3 else 0.05 < missed < 2, (layer, side, missed)


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2"])
def test_tokens_that_are_never_read_packed_have_no_gradient(family, request):
    model, sites = double(request.getfixturevalue(family))
    for gradient in gradients(model, sites, some_tokens(model)).values():
        read = gradient.abs().sum(1) > 0
        assert read.nonzero()[:, 0].tolist() == list(PACKED)


def test_short_windows_have_no_gradient_at_all(tiny_llama):
    model, sites = double(tiny_llama)
    found = gradients(model, sites, some_tokens(model, length=FIRST_READER))
    assert len(found) == 8
    assert all(float(gradient.abs().max()) == 0 for gradient in found.values())


@pytest.fixture(scope="module")
def small(new_model, tmp_path_factory):
    """Two layers and a vocabulary of 12, so that the Jacobian of all logits is small."""
    path = tmp_path_factory.mktemp("models") / "small"
    model, sites = double(new_model(path, num_hidden_layers=2, vocab_size=12, eos_token_id=1))
    return model, sites, some_tokens(model, length=24, seed=5)


def exact_fisher(model, sites, tokens, site) -> torch.Tensor:
    """sum_i sum_t J_ti^T (diag p_t - p_t p_t^T) J_ti, from the Jacobian of the logits at a packed copy. -> [C, C]."""
    shift = torch.zeros(tokens.shape[1], 32, dtype=torch.float64, requires_grad=True)
    logits = logits_with(model, sites, tokens, {site: shift})
    positions, vocabulary = logits.shape
    eye = torch.eye(positions * vocabulary, dtype=torch.float64).reshape(-1, positions, vocabulary)
    [jacobian] = torch.autograd.grad(logits, shift, eye, is_grads_batched=True)
    jacobian = jacobian.reshape(positions, vocabulary, tokens.shape[1], 32)
    p = logits.detach().softmax(-1)
    spread = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return torch.einsum("tvic,tvw,twid->cd", jacobian, spread, jacobian)


@pytest.mark.parametrize("site", [(0, "k"), (0, "v"), (1, "k"), (1, "v")], ids=lambda site: f"{site[1]}{site[0]}")
def test_mean_over_labels_is_the_exact_fisher(small, site):
    """Draws of labels as rows of a batch; errors are held to the spread of the draws themselves.

    The mean of n draws differs from its expectation by sqrt(V / n) in Frobenius norm, V the summed variance of the
    entries; the seeds are fixed, and twice that is far outside of what they leave.
    """
    model, sites, tokens = small
    draws, found = 400, []
    for first in range(0, 3 * draws, draws):
        batch = gradients(model, sites, tokens.expand(draws, -1), *range(first, first + draws))[site].reshape(
            draws, -1, 32
        )
        found.append(torch.einsum("nic,nid->ncd", batch, batch))
    samples = torch.cat(found)
    exact, mean = exact_fisher(model, sites, tokens, site), samples.mean(0)
    traces = samples.diagonal(dim1=1, dim2=2).sum(-1)
    error = float(traces.std() / len(samples) ** 0.5)
    assert abs(float(traces.mean() - exact.trace())) < 4 * error
    noise = float((samples.var(0).sum() / len(samples)).sqrt())
    assert float((mean - exact).norm()) < 2 * noise
    # the bounds mean something: a factor, or labels that are not the model's own, would be seen
    assert error < 0.05 * float(exact.trace())
    assert noise < 0.2 * float(exact.norm())


def test_half_of_noise_times_metric_is_the_divergence_in_nats(small):
    """Noise in every packed copy of all sites at once, against the KL it makes; both per scored position."""
    model, sites, tokens = small
    length, draws, generator = tokens.shape[1], 400, torch.Generator().manual_seed(0)
    with torch.no_grad():
        exact = logits_with(model, sites, tokens, {}).log_softmax(-1)
    rows, predicted = gradients(model, sites, tokens.expand(draws, -1), *range(draws)), 0.0
    sizes = {site: 2e-3 * (1 + index) for index, site in enumerate(rows)}
    for site, found in rows.items():
        metric = found.mT @ found / (draws * len(exact))
        predicted += 0.5 * sizes[site] ** 2 * float(metric.trace())
    divergences = []
    for _ in range(200):
        shifts = {
            site: size * torch.randn(length, 32, generator=generator, dtype=torch.float64)
            for site, size in sizes.items()
        }
        with torch.no_grad():
            noisy = logits_with(model, sites, tokens, shifts).log_softmax(-1)
        divergences.append(float((exact.exp() * (exact - noisy)).sum(-1).mean()))
    measured = torch.tensor(divergences)
    assert float(measured.std()) / 200**0.5 < 0.03 * float(measured.mean())
    assert predicted == pytest.approx(float(measured.mean()), rel=0.1)


def test_a_batch_is_its_rows(small):
    """Rows of a batch do not see each other and draw by themselves: a row's gradient is that of the row alone."""
    model, sites, tokens = small
    rows = [tokens, some_tokens(model, length=24, seed=6), tokens]
    batch = gradients(model, sites, torch.cat(rows), 7, 8, 9)
    for index, (row, seed) in enumerate(zip(rows, (7, 8, 9), strict=True)):
        for site, gradient in gradients(model, sites, row, seed).items():
            part = batch[site][24 * index : 24 * (index + 1)]
            torch.testing.assert_close(part, gradient, rtol=1e-10, atol=1e-12)
    assert batch[0, "k"].shape == (72, 32)
    assert not torch.allclose(batch[0, "k"][:24], batch[0, "k"][48:], rtol=0.1)  # other labels


@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_recomputing_the_layers_changes_nothing(family, request):
    """The same operations in the same order, twice: equal to the last bit, and every site reported once."""
    model, sites = double(request.getfixturevalue(family))
    tokens = torch.cat((some_tokens(model), some_tokens(model, seed=1)))
    plain, calls = gradients(model, sites, tokens, 1, 2), []
    forwards = [layer.forward for layer in model.model.layers]
    fisher_pass(
        model,
        sites,
        tokens,
        WINDOW,
        generators((1, 2)),
        lambda layer, side, g: calls.append(((layer, side), g)),
        recompute=True,
    )
    assert sorted(site for site, _ in calls) == sorted(plain)
    for site, gradient in calls:
        assert torch.equal(gradient, plain[site]), site
    assert [layer.forward for layer in model.model.layers] == forwards
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)


def test_recomputing_holds_one_layer_at_a_time(tiny_llama):
    """What autograd keeps between the passes: everything inside the layers, or their inputs alone."""
    model, sites = double(tiny_llama)
    kept = {}
    for recompute in (False, True):
        saved = []

        def pack(tensor, saved=saved):
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gradients(model, sites, some_tokens(model), recompute=recompute)
        kept[recompute] = len(saved)
    assert kept[False] > 4 * 20
    assert kept[True] < 25


def test_bfloat16_gradients_are_the_same_up_to_rounding(tiny_llama, monkeypatch):
    """With the labels of float32: which token a draw falls on may change with the rounding of its probabilities."""
    model = load_model(find_model(str(tiny_llama)))
    tokens, labels, found = some_tokens(model), labels_of(model, some_tokens(model), 4), {}
    monkeypatch.setattr(fisher, "sample_labels", lambda p, uniform: labels)
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        for recompute in (False, True):
            found[dtype, recompute] = gradients(model, attention_sites(model), tokens, 4, recompute=recompute)
    for site, exact in found[torch.float32, False].items():
        rounded = found[torch.bfloat16, False][site]
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, found[torch.bfloat16, True][site])
        # eight bits of mantissa through four layers, there and back
        error = float((rounded.float() - exact).norm() / exact.norm())
        assert 1e-4 < error < 0.1, (site, error)


def test_the_model_is_left_as_it_was(tiny_llama):
    model, sites = double(tiny_llama)
    parameters = list(model.parameters())
    parameters[1].requires_grad_(False)
    before = [(parameter.requires_grad, parameter.detach().clone()) for parameter in parameters]
    implementation = model.config._attn_implementation
    gradients(model, sites, some_tokens(model))

    def stop(layer, side, gradient):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        fisher_pass(model, sites, some_tokens(model), WINDOW, generators([0]), stop)
    for parameter, (required, value) in zip(parameters, before, strict=True):
        assert parameter.requires_grad == required
        assert parameter.grad is None
        assert torch.equal(parameter, value)
    assert model.config._attn_implementation == implementation


def test_labels_follow_the_seed(tiny_llama):
    model, sites = double(tiny_llama)
    one, again, other = (gradients(model, sites, some_tokens(model), seed) for seed in (1, 1, 2))
    assert torch.equal(one[1, "k"], again[1, "k"])
    assert not torch.allclose(one[1, "k"], other[1, "k"], rtol=0.1)


def collected_seeds(monkeypatch, path, corpus, folder, seed, batch) -> list[int]:
    seeds = []

    def record(model, sites, tokens, window, drawing, on_gradient, **options):
        assert len(drawing) == len(tokens)
        seeds.extend(generator.initial_seed() for generator in drawing)
        return fisher_pass(model, sites, tokens, window, drawing, on_gradient, **options)

    monkeypatch.setattr(collect_passes, "fisher_pass", record)
    settings = CollectSettings(samples=3, length=48, rows=32, seed=seed, fisher=3, window=WINDOW)
    mixture = TextMixture(sources=[str(corpus)], samples=3, length=48)
    collect_stage.collect(
        Run(folder), "stats", find_model(str(path)), mixture, settings, collect_stage.CollectOptions(fisher_batch=batch)
    )
    return seeds


def test_every_window_of_a_calibration_samples_its_own_labels(monkeypatch, tiny_llama, corpus, tmp_path):
    """Window w of seed s draws from a generator of its own, whatever other windows or seeds there are."""
    first = collected_seeds(monkeypatch, tiny_llama, corpus, tmp_path / "a", 0, 1)
    second = collected_seeds(monkeypatch, tiny_llama, corpus, tmp_path / "b", 1, 2)
    assert len(first) == len(second) == 3
    assert len({*first, *second}) == 6
    assert first == [0, 1, 2]
    assert second == [1_000_003, 1_000_004, 1_000_005]
    draws = {tuple(torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()) for seed in first}
    assert len(draws) == 3


def test_draws_follow_the_probabilities():
    """Inverse of the distribution function: exact on a grid of uniform numbers, impossible tokens never drawn."""
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    labels = sample_labels(p.expand(4000, -1), grid)
    assert torch.bincount(labels, minlength=6).tolist() == [0, 1000, 0, 2000, 1000, 0]
    edge = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample_labels(p.expand(2, -1), edge).tolist() == [1, 4]
    many = torch.softmax(torch.randn(50_000, generator=torch.Generator().manual_seed(0)), -1)
    many[40_000:] = 0
    assert int(sample_labels(many[None], edge[1:])) == 39_999


@pytest.mark.parametrize("vocabulary", [1, 5, 255, 256, 257, 512, 3000])
def test_draws_by_blocks_are_those_of_one_long_sum(vocabulary):
    """Probabilities over many decades, some of them zero, against the distribution function as a whole."""
    generator = torch.Generator().manual_seed(vocabulary)
    p = (4 * torch.randn(500, vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)
    p[:, ::3] = 0
    p[:, -1] += 1e-3
    uniform = torch.rand(500, generator=generator, dtype=torch.float64)
    cumulated = np.cumsum(p.numpy(), axis=1)
    expected = [
        int(np.searchsorted(row, u * row[-1], side="right")) for row, u in zip(cumulated, uniform.numpy(), strict=True)
    ]
    assert sample_labels(p, uniform).tolist() == expected
