"""The transform from second moments against the paper's Cholesky-whitened SVD of the weights, also on a real model.

Both are exact up to rounding, which moves a singular vector by about 1e-14 / gap, the gap being the distance to the
nearest eigenvalue of K^T K / N relative to the largest. Vectors with a gap of at least 1e-7 must agree to 1e-6 up to
sign; closer ones are compared as the space they span.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.linalg import solve_triangular

from aatc_cli.core.codec import TransformCodec
from aatc_cli.core.transform import canonical_signs, decode, encode, group_moments, identity, loss_metric, whitening
from aatc_cli.core.weights import channel_scales, latent_variance

GAP, TOLERANCE = 1e-7, 1e-6


def cholesky_svd(X: np.ndarray, W: np.ndarray):
    """Section "Whitening-Based Feature Decorrelation": A = L^-T U sqrt(S), B = sqrt(S) P^T, and S."""
    L = np.linalg.cholesky(X.T @ X / len(X))
    U, S, Pt = np.linalg.svd(L.T @ W, full_matrices=False)
    return solve_triangular(L.T, U * np.sqrt(S), lower=False), np.sqrt(S)[:, None] * Pt, S


def clusters(S: np.ndarray) -> list[slice]:
    """Runs of singular values whose squares are closer than GAP of the largest square."""
    cuts = np.flatnonzero(S[:-1] ** 2 - S[1:] ** 2 >= GAP * S[0] ** 2) + 1
    return [slice(a, b) for a, b in pairwise([0, *cuts.tolist(), S.size])]


def compare(X: np.ndarray, W: np.ndarray, moment: torch.Tensor) -> tuple[int, int]:
    """Hold `whitening` of the moment to the oracle on X and W. -> vectors compared singly, spaces compared."""
    found = whitening(moment)
    A, B, S = cholesky_svd(X, W)
    np.testing.assert_allclose(found.singular.numpy(), S, rtol=TOLERANCE)
    # production encodes keys: h = x W @ encode, so the paper's A is W @ encode
    A_found, B_found = W @ found.encode.numpy(), found.decode.numpy()
    single = spaces = 0
    for run in clusters(S):
        if run.stop - run.start == 1:
            a, b, one_a, one_b = A_found[:, run], B_found[run], A[:, run], B[run]
            sign = np.sign(np.sum(b * one_b))
            assert np.linalg.norm(sign * a - one_a) <= TOLERANCE * np.linalg.norm(one_a)
            assert np.linalg.norm(sign * b - one_b) <= TOLERANCE * np.linalg.norm(one_b)
            single += 1
        else:
            vectors, one_vectors = (rows[run] / np.sqrt(S[run])[:, None] for rows in (B_found, B))
            assert np.linalg.norm(vectors.T @ vectors - one_vectors.T @ one_vectors, 2) <= TOLERANCE
            spaces += 1
    np.testing.assert_allclose(A_found @ B_found, W, atol=1e-9 * np.abs(W).max())
    H = X @ A_found
    np.testing.assert_allclose(H.T @ H / len(X), np.diag(S), atol=TOLERANCE * S[0])
    correlation = H.T @ H / len(X) / np.sqrt(np.outer(S, S))
    np.testing.assert_allclose(correlation, np.eye(S.size), atol=TOLERANCE)
    return single, spaces


def synthetic(seed: int, d_model: int = 40, channels: int = 12) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(400, d_model)) @ rng.normal(size=(d_model, d_model)) + rng.normal(size=d_model)
    return X, rng.normal(size=(d_model, channels)) * np.exp2(rng.normal(0, 2, channels))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_same_as_the_papers_factorisation(seed, groups):
    """A group's transform is that of its own columns of W; side by side the columns of A make the global A."""
    X, W = synthetic(seed)
    K = torch.from_numpy(X @ W)
    for columns, moment in zip(np.split(W, groups, axis=1), group_moments(K.T @ K / len(X), groups), strict=True):
        assert compare(X, columns, moment) == (columns.shape[1], 0)


def test_repeated_singular_values_span_the_same_space():
    X, W = synthetic(3)
    L = np.linalg.cholesky(X.T @ X / len(X))
    U, _, Pt = np.linalg.svd(L.T @ W, full_matrices=False)
    S = np.array([9.0, 5.0, 5.0, 5.0, 4.0, 3.0, 2.0, 2.0, 1.0, 0.5, 0.25, 0.1])
    W = np.linalg.solve(L.T, U * S @ Pt)
    K = torch.from_numpy(X @ W)
    assert compare(X, W, K.T @ K / len(X)) == (7, 2)


def test_the_comparison_notices_another_basis():
    X, W = synthetic(4)
    K = torch.from_numpy(X @ W)
    moment = K.T @ K / len(X)
    with pytest.raises(AssertionError):
        compare(X, W, torch.cov(K.T))
    with pytest.raises(AssertionError):
        compare(X * np.linspace(1, 1.01, len(X))[:, None], W, moment)


@pytest.fixture(scope="module")
def real_inputs(real_model_path):
    """Inputs X [N, d_model] and weights of layers 0, 14 and 29 of SmolLM2, and how many first rows are plain text."""
    from aatc_cli.models.adapter import attention_sites
    from aatc_cli.models.loading import find_model, load_model, load_tokenizer
    from aatc_cli.text.builtin import builtin_documents

    source = find_model(str(real_model_path))
    tokenizer, model = load_tokenizer(source), load_model(source)
    sites, seen = attention_sites(model), {}
    text = [token for document in builtin_documents("python-docs") for token in tokenizer.encode(document)[:100]][:900]
    # layer 0 sees embeddings alone: its inputs span d_model only with as many different tokens
    tokens = text + np.linspace(20, model.config.vocab_size - 1, 800).astype(int).tolist()
    hooks = []
    for layer in (0, 14, 29):
        for side, module in (("k", sites[layer].k.module), ("v", sites[layer].v.module)):

            def keep(module, inputs, key=(layer, side)):
                W = module.weight.detach().to(torch.float64).T.numpy()
                seen[key] = inputs[0][0].to(torch.float64).numpy(), W

            hooks.append(module.register_forward_pre_hook(keep))
    try:
        with torch.no_grad():
            model.get_decoder()(input_ids=torch.tensor([tokens]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return seen, len(text)


@pytest.mark.real
@pytest.mark.parametrize("groups", [1, 3])
def test_same_as_the_papers_factorisation_on_real_weights(real_inputs, groups):
    seen, _ = real_inputs
    singles = 0
    for X, W in seen.values():
        assert (X.shape[0] > X.shape[1], X.shape[1], W.shape[1]) == (True, 576, 192)
        K = torch.from_numpy(X @ W)
        for columns, moment in zip(np.split(W, groups, axis=1), group_moments(K.T @ K / len(X), groups), strict=True):
            singles += compare(X, columns, moment)[0]
    # the keys of layer 0 span seven decades, so the gaps of their smallest third are below the threshold
    assert singles > 0.9 * 192 * len(seen)
    print(f"{groups} groups: {singles} of {192 * len(seen)} vectors compared singly")


@pytest.mark.real
def test_real_text_leaves_cholesky_nothing_to_stand_on_at_layer_0(real_inputs):
    """Fewer distinct tokens than d_model: Sigma_X is singular, while K^T K still gives the whole transform."""
    seen, text = real_inputs
    X, W = seen[0, "k"]
    X = X[:text]
    assert np.linalg.matrix_rank(X) < 576
    K = torch.from_numpy(X @ W)
    found = whitening(K.T @ K / text)
    torch.testing.assert_close(K @ found.encode @ found.decode, K, rtol=0, atol=1e-10 * float(K.abs().max()))


def random_moment(size: int, rank: int, seed: int = 0) -> torch.Tensor:
    rows = torch.randn(rank, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.T @ rows


@pytest.mark.parametrize("rank", [0, 1, 5, 8], ids=lambda rank: f"rank{rank}")
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e12])
def test_any_rank_and_size_is_invertible(rank, size):
    found = whitening(random_moment(8, rank) * size)
    assert torch.isfinite(found.encode).all()
    assert torch.isfinite(found.decode).all()
    # unit scale beside a tiny one costs digits: as many as the condition number has
    slack = 1e-14 * float(torch.linalg.matrix_norm(found.encode, 2) * torch.linalg.matrix_norm(found.decode, 2))
    for product in (found.encode @ found.decode, found.decode @ found.encode):
        torch.testing.assert_close(product, torch.eye(8, dtype=torch.float64), rtol=0, atol=slack)
    assert int((found.singular > 0).sum()) == rank
    assert torch.equal(found.singular, found.singular.sort(descending=True).values)


def test_dead_channels_keep_a_unit_scale_and_disturb_no_other():
    moment = torch.zeros(6, 6, dtype=torch.float64)
    moment[:4, :4] = random_moment(4, 9)
    found, alone = whitening(moment), whitening(moment[:4, :4])
    torch.testing.assert_close(found.singular[:4], alone.singular, rtol=1e-12, atol=0)
    torch.testing.assert_close(found.encode[:4, :4], alone.encode, rtol=1e-10, atol=1e-12)
    assert found.singular[4:].tolist() == [0.0, 0.0]
    assert found.encode[4:, 4:].norm(dim=0).tolist() == pytest.approx([1.0, 1.0])
    torch.testing.assert_close(whitening(torch.zeros(3, 3)).encode.abs().sum(0), torch.ones(3, dtype=torch.float64))


def test_negative_eigenvalues_of_rounding_are_dead():
    basis = torch.linalg.qr(random_moment(5, 5, seed=1)).Q
    values = torch.tensor([4.0, 1.0, 1e-4, -1e-16, -3e-16], dtype=torch.float64)
    found = whitening(basis * values @ basis.T)
    assert found.singular[:3].tolist() == pytest.approx([2.0, 1.0, 1e-2], rel=1e-9)
    assert found.singular[3:].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found.encode @ found.decode, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-12)
    negative = whitening(-torch.eye(3, dtype=torch.float64) * 1e-18)
    assert negative.singular.tolist() == [0.0] * 3


def test_what_counts_as_rounding():
    """Twelve decades below the largest is signal, fourteen is what float64 sums leave behind."""
    found = whitening(torch.diag(torch.tensor([1.0, 1e-12, 1e-14], dtype=torch.float64)))
    assert found.singular.tolist() == pytest.approx([1.0, 1e-6, 0.0], rel=1e-9)
    assert found.encode.diagonal().tolist() == pytest.approx([1.0, 1e3, 1.0], rel=1e-9)


def test_a_constant_channel_comes_back():
    """The moment is about zero, so a constant is signal of rank one: kept to half a step of its 12 bits."""
    x = torch.randn(500, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x[:, 2] = 7.0
    found = whitening(x.T @ x / 500)
    matrices = found.encode[None], found.decode[None]
    variance = latent_variance(matrices[0], x.T @ x / 500)
    scale = channel_scales(matrices[0], x, variance)
    back = TransformCodec(*matrices, scale, torch.full((4,), 12), variance).reconstruct(x)
    assert 1e-5 < (back[:, 2] - 7.0).abs().max() < 0.01
    constant = torch.full((50, 1), 3.0, dtype=torch.float64)
    alone = whitening(constant.T @ constant / 50)
    # the only channel sets alpha = 1: it is the lowest code when negative, one step of 16 bits off when positive
    codec = TransformCodec(
        alone.encode[None], alone.decode[None], alone.singular.sqrt(), torch.tensor([16]), alone.singular
    )
    torch.testing.assert_close(codec.reconstruct(-constant), -constant, rtol=1e-14, atol=0)
    assert (codec.reconstruct(constant) - constant).abs().max().item() == pytest.approx(3.0 / 2**15, rel=1e-6)


def test_signs_are_canonical():
    vectors = torch.tensor([[0.1, 3.0, -2.0], [-0.5, -1.0, 2.0], [0.2, 2.9, 1.0]], dtype=torch.float64)
    fixed = canonical_signs(vectors)
    assert fixed[:, 0].tolist() == [-0.1, 0.5, -0.2]
    assert torch.equal(fixed[:, 1], vectors[:, 1])
    assert torch.equal(fixed[:, 2], -vectors[:, 2])  # of equal magnitudes the first decides
    assert torch.equal(canonical_signs(-vectors), fixed)
    assert fixed.dtype == torch.float64
    found = whitening(random_moment(10, 30, seed=3))
    assert (found.encode.gather(0, found.encode.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("made", [whitening, lambda moment: loss_metric(moment, moment.flip(-1, -2))])
def test_groups_at_once_are_what_each_is_alone(made):
    """Among them one with repeated eigenvalues, one that is empty and one of low rank, at scales far apart."""
    repeated = torch.linalg.qr(random_moment(6, 6, seed=4)).Q
    repeated = repeated * torch.tensor([4.0, 4.0, 4.0, 2.0, 1.0, 1.0]) @ repeated.T
    moments = torch.stack(
        [random_moment(6, 9), 1e-9 * repeated, torch.zeros(6, 6), 1e9 * random_moment(6, 2), torch.eye(6)]
    )
    together = made(moments)
    for index, moment in enumerate(moments):
        alone = made(moment)
        for name in ("encode", "decode", "singular"):
            one, other = getattr(together, name)[index], getattr(alone, name)
            # products of several matrices at once are summed in another order
            torch.testing.assert_close(one, other, rtol=0, atol=1e-9 * float(other.abs().max()), msg=f"{index} {name}")


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_encode_and_decode_work_group_by_group(groups):
    gen, size = torch.Generator().manual_seed(4), 8 // groups
    x = torch.randn(2, 3, 8, generator=gen, dtype=torch.float64)
    matrices = torch.randn(groups, size, size, generator=gen, dtype=torch.float64)
    expected = x @ torch.block_diag(*matrices)
    torch.testing.assert_close(encode(x, matrices), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(decode(expected, torch.linalg.inv(matrices)), x, rtol=1e-9, atol=1e-9)
    moment = random_moment(8, 20)
    blocks = group_moments(moment, groups)
    assert torch.equal(torch.block_diag(*blocks) != 0, torch.block_diag(*[torch.ones(size, size)] * groups) != 0)
    assert torch.equal(blocks[-1], moment[-size:, -size:])


def test_identity_changes_nothing():
    made = identity(5)
    x = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(x @ made.encode, x)
    assert torch.equal(x @ made.decode, x)
    assert made.singular.tolist() == [1.0] * 5
