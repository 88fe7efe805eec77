"""Predictions are averages over draws: checked against enumeration, draw by draw."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from structgp import answers as predict
from structgp.answers import FunctionDraws as Draws
from structgp.data.batch import Batch, pad
from structgp.gp import Posterior
from structgp.gp.kernels import TemplateKernel
from structgp.structures import Chain


def marginals(posterior, structure, draws, batch):
    unknown = replace(batch, y=torch.full_like(batch.y, -1))
    return predict.marginals(predict.potentials(posterior, structure, draws, unknown))


def viterbi(posterior, structure, draws, batch):
    unknown = replace(batch, y=torch.full_like(batch.y, -1))
    return predict.viterbi(predict.potentials(posterior, structure, draws, unknown))


LENGTHS = (3, 1, 4, 2)
V, M, W = 3, 4, 2


@pytest.fixture(scope="module")
def posterior() -> Posterior:
    """Nothing in it is at its starting value."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.7, 0.8
    q = Posterior(kernel, normal(M, W), V, pairwise_sd=0.9)
    with torch.no_grad():
        q.m.copy_(normal(V, M))
        q.factor.copy_(torch.eye(M) + 0.3 * normal(V, M, M))
        q.pair_mean.copy_(normal(V, V))
        q.pair_log_sd.copy_(0.3 * normal(V, V) - 0.5)
        q.log_amplitude.fill_(0.4)
    return q.requires_grad_(False)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return batch_of(range(len(LENGTHS)))


def batch_of(index, extra: int = 0) -> Batch:
    """Sequences ``index``; with ``extra``, beside one that is longer than all by so many."""
    rng = np.random.default_rng(8)
    lengths = [*LENGTHS, max(LENGTHS) + extra]
    rows, labels = [], []
    for n in lengths:
        rows.append(rng.standard_normal((n, W)))
        labels.append(rng.integers(0, V, n))
    chosen = [*index, len(LENGTHS)] if extra else list(index)
    return pad(rows, labels, lambda width: np.zeros(width), chosen)


def gaussian_by_hand(q: Posterior, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (T, V) and covariance (V, T, T) of q(f) at rows x, from the textbook."""

    def k(a, b):
        square = ((a[:, None] - b[None]) ** 2).sum(-1)
        return 1.7 * np.exp(-0.5 * square / 0.8**2)

    z = q.inducing.numpy()
    to_white = np.linalg.inv(np.linalg.cholesky(k(z, z)))
    A = k(x, z) @ to_white.T
    amplitude = np.exp(0.4)
    mean = np.sqrt(amplitude) * A @ q.m[0].numpy().T
    factor = np.tril(q.factor[0].numpy())
    S = factor @ factor.transpose(0, 2, 1)
    return mean, amplitude * (k(x, x) - A @ A.T + A @ S @ A.T)


def sequence(batch: Batch, b: int) -> tuple[np.ndarray, np.ndarray]:
    n = int(batch.mask[b].sum())
    return batch.x[b, :n].numpy(), batch.y[b, :n].numpy()


def test_draws_have_the_moments_of_the_posterior(posterior, batch):
    draws = Draws.sample(posterior, 40_000, seed=0)
    f = draws.unary(posterior, batch).numpy()
    for b, n in enumerate(LENGTHS):
        mean, covariance = gaussian_by_hand(posterior, sequence(batch, b)[0])
        # In pairs: the mean is exact.
        np.testing.assert_allclose(f[:, b, :n].mean(0), mean, atol=1e-6)
        away = f[:, b, :n] - mean
        found = np.einsum("stv,suv->vtu", away, away) / len(f)
        np.testing.assert_allclose(found, covariance, atol=0.06 * covariance.max())
    np.testing.assert_allclose(draws.pairwise.mean(0), posterior.pair_mean, atol=1e-6)
    np.testing.assert_allclose(
        draws.pairwise.std(0), posterior.pair_log_sd.exp(), rtol=0.03, atol=0
    )


def test_marginals_are_the_average_of_the_draws_marginals(posterior, batch, oracles):
    draws = Draws.sample(posterior, 6, seed=4)
    f = draws.unary(posterior, batch).numpy()
    p = marginals(posterior, Chain(), draws, batch).numpy()
    assert p.shape == (len(LENGTHS), max(LENGTHS), V)
    for b, n in enumerate(LENGTHS):
        tables = [oracles.chain_table(f[s, b, :n], draws.pairwise[s]) for s in range(6)]
        by_hand = np.mean([table.nodes for table in tables], 0).astype(float)
        np.testing.assert_allclose(p[b, :n], by_hand, atol=1e-12)
        assert not p[b, n:].any()
        # Averaging matters: one draw says something else.
        assert np.abs(by_hand - tables[0].nodes.astype(float)).max() > 0.01


def test_log_prob_is_the_log_of_the_average_probability(posterior, batch, oracles):
    draws = Draws.sample(posterior, 6, seed=4)
    f = draws.unary(posterior, batch).numpy()
    values = predict.log_prob(posterior, Chain(), draws, batch).numpy()
    for b, n in enumerate(LENGTHS):
        y = sequence(batch, b)[1]
        probabilities = []
        for s in range(6):
            table = oracles.chain_table(f[s, b, :n], draws.pairwise[s])
            probabilities.append(float(table.prob[(table.labels == y).all(1)].sum()))
        assert values[b] == pytest.approx(np.log(np.mean(probabilities)), abs=1e-12)
        assert values[b] != pytest.approx(np.mean(np.log(probabilities)), abs=1e-3)


def test_labelling_probabilities_sum_to_one(posterior, batch, oracles):
    draws = Draws.sample(posterior, 4, seed=1)
    only = batch_of([0])
    total = 0.0
    for y in oracles.labellings(LENGTHS[0], V):
        labelled = replace(only, y=torch.from_numpy(y)[None])
        total += float(predict.log_prob(posterior, Chain(), draws, labelled).exp())
    assert total == pytest.approx(1, abs=1e-12)


def test_plug_in_mean(posterior, batch, oracles):
    draws = Draws.mean(posterior)
    assert draws.plug_in
    assert draws.inducing.shape == (1, V, M)
    p = marginals(posterior, Chain(), draws, batch).numpy()
    log_prob = predict.log_prob(posterior, Chain(), draws, batch).numpy()
    best = viterbi(posterior, Chain(), Draws.mean(posterior), batch).numpy()
    for b, n in enumerate(LENGTHS):
        x, y = sequence(batch, b)
        mean, _ = gaussian_by_hand(posterior, x)
        table = oracles.chain_table(mean, posterior.pair_mean.numpy())
        np.testing.assert_allclose(p[b, :n], table.nodes.astype(float), atol=1e-6)
        of_y = table.prob[(table.labels == y).all(1)].sum()
        assert log_prob[b] == pytest.approx(float(np.log(of_y)), abs=1e-6)
        assert best[b, :n].tolist() == table.labels[table.score.argmax()].tolist()


def test_the_mean_is_a_copy(posterior):
    draws = Draws.mean(posterior)
    draws.inducing.zero_()
    draws.pairwise.zero_()
    assert posterior.m.abs().min() > 0
    assert posterior.pair_mean.abs().min() > 0


@pytest.mark.parametrize("make", [lambda q: Draws.sample(q, 6, seed=4), Draws.mean])
@pytest.mark.parametrize("extra", [1, 6])
def test_padding_changes_nothing(posterior, batch, make, extra):
    draws = make(posterior)
    wider = batch_of(range(len(LENGTHS)), extra)
    T = max(LENGTHS)
    assert wider.mask.shape == (len(LENGTHS) + 1, T + extra)
    p = marginals(posterior, Chain(), draws, batch)
    q = marginals(posterior, Chain(), draws, wider)[:-1]
    torch.testing.assert_close(q[:, :T], p, rtol=0, atol=1e-14)
    assert not q[:, T:].any()
    torch.testing.assert_close(
        predict.log_prob(posterior, Chain(), draws, wider)[:-1],
        predict.log_prob(posterior, Chain(), draws, batch),
        rtol=1e-14,
        atol=1e-14,
    )


def test_what_stands_in_the_padding_changes_nothing(posterior, batch):
    draws = Draws.sample(posterior, 6, seed=4)
    x = torch.where(batch.mask[..., None], batch.x, 12.5)
    y = torch.where(batch.mask, batch.y, 2)
    other = replace(batch, x=x, y=y)
    for ask in (marginals, predict.log_prob):
        # To rounding: GPyTorch's RBF centres all rows it is given before it takes distances.
        torch.testing.assert_close(
            ask(posterior, Chain(), draws, other),
            ask(posterior, Chain(), draws, batch),
            rtol=1e-12,
            atol=1e-13,
        )
    assert torch.equal(
        viterbi(posterior, Chain(), Draws.mean(posterior), batch),
        viterbi(posterior, Chain(), Draws.mean(posterior), other),
    )


def test_with_a_kernel_of_ours_padding_changes_not_one_bit(posterior, batch):
    ids = torch.tensor([[0, 0], [1, -2], [2, 1], [-2, 2]], dtype=torch.float64)
    q = Posterior(TemplateKernel(W).double(), ids, V)
    with torch.no_grad():
        for name in ("m", "factor", "pair_mean", "pair_log_sd", "log_amplitude"):
            getattr(q, name).copy_(getattr(posterior, name))
    draws = Draws.sample(q, 6, seed=4)

    def rounded(batch: Batch) -> Batch:
        return replace(batch, x=torch.where(batch.mask[..., None], batch.x.round(), -1))

    short, wide = rounded(batch), rounded(batch_of(range(len(LENGTHS)), 5))
    T = max(LENGTHS)
    p = marginals(q, Chain(), draws, short)
    assert torch.equal(marginals(q, Chain(), draws, wide)[:-1, :T], p)
    log_prob = predict.log_prob(q, Chain(), draws, short)
    assert torch.equal(predict.log_prob(q, Chain(), draws, wide)[:-1], log_prob)


def test_neighbours_in_the_batch_and_their_order_change_nothing(posterior, batch):
    draws = Draws.sample(posterior, 6, seed=4)
    p = marginals(posterior, Chain(), draws, batch)
    backwards = marginals(posterior, Chain(), draws, batch_of([3, 2, 1, 0]))
    for b, n in enumerate(LENGTHS):
        alone = marginals(posterior, Chain(), draws, batch_of([b]))[0]
        torch.testing.assert_close(alone, p[b, :n], rtol=0, atol=1e-14)
        torch.testing.assert_close(backwards[3 - b], p[b], rtol=0, atol=1e-14)


def test_no_pairwise_scores(posterior, batch, oracles):
    q = Posterior(posterior.kernel, posterior.inducing, V, pairwise_sd=0.0)
    q.load_state_dict(
        posterior.state_dict()
        | {
            "log_pairwise_sd": torch.tensor(-torch.inf, dtype=torch.float64),
            "pair_mean": torch.zeros(V, V, dtype=torch.float64),
            "pair_log_sd": torch.full((V, V), -torch.inf, dtype=torch.float64),
        }
    )
    draws = Draws.sample(q, 6, seed=4)
    assert not draws.pairwise.any()
    f = draws.unary(q, batch)
    p = marginals(q, Chain(), draws, batch)
    by_hand = f.softmax(-1).mean(0)
    torch.testing.assert_close(p[batch.mask], by_hand[batch.mask], rtol=0, atol=1e-12)


def test_seed_and_number(posterior):
    draws = Draws.sample(posterior, 5, seed=2)
    assert draws.inducing.shape == (6, V, M)
    assert draws.pairwise.shape == (6, V, V)
    again, other = Draws.sample(posterior, 5, seed=2), Draws.sample(posterior, 5, seed=3)
    assert torch.equal(draws.inducing, again.inducing)
    assert torch.equal(draws.pairwise, again.pairwise)
    assert not torch.equal(draws.inducing, other.inducing)
    assert not torch.equal(draws.pairwise, other.pairwise)


def test_seed_decides_what_the_inducing_values_leave_open(posterior, batch):
    draws = Draws.sample(posterior, 4, seed=2)
    other = replace(draws, seed=3)
    f, g = draws.unary(posterior, batch), other.unary(posterior, batch)
    assert (f - g).abs().max() > 0.01
    assert torch.equal(f, draws.unary(posterior, batch))


# -- mixtures and other covariances --------------------------------------------------------------


def mixture(**given) -> Posterior:
    """Two components apart, the second of weight 0.3; nothing is at its starting value."""
    generator = torch.Generator().manual_seed(6)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.7, 0.8
    q = Posterior(kernel, normal(M, W), V, pairwise_sd=0.9, n_components=2, **given)
    with torch.no_grad():
        q.m.copy_(1.5 * normal(*q.m.shape))
        q.factor += 0.4 * normal(*q.factor.shape)
        q.weight_logits.copy_(torch.tensor([0.7, 0.3], dtype=torch.float64).log())
        q.pair_mean.copy_(normal(V, V))
        if q.pairs_are_full:
            q.pair_factor.copy_(0.5 * normal(V * V, V * V))
    return q.requires_grad_(False)


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("pairwise_covariance", ["full", "diagonal"])
def test_draws_from_a_mixture_have_its_moments(covariance, pairwise_covariance):
    """40,000 draws in pairs, 0.7 and 0.3 of them from each component: the mean is exact."""
    n = 40_000
    q = mixture(covariance=covariance, pairwise_covariance=pairwise_covariance)
    draws = Draws.sample(q, n, seed=0)
    assert draws.inducing.shape == (n, V, M)
    weights = q.weights.numpy()
    flat = q.m.reshape(2, -1).numpy()
    lower = torch.diag_embed(q.factor) if q.is_diagonal else q.factor.tril()
    inside = (lower @ lower.mT).numpy()
    mean = weights @ flat
    expected = np.einsum("k,ki,kj->ij", weights, flat - mean, flat - mean)
    for j in range(V):
        here = slice(j * M, (j + 1) * M)
        expected[here, here] += np.tensordot(weights, inside[:, j], 1)
    v = draws.inducing.reshape(n, -1).numpy()
    np.testing.assert_allclose(v.mean(0), mean, atol=1e-9)
    products = (v - mean)[:, :, None] * (v - mean)[:, None]
    # Both of a pair count as one; the choice of component has no spread of its own here.
    error = products.std(0) / np.sqrt(n / 2)
    assert (np.abs(products.mean(0) - expected) <= 4 * error).all()

    pairs = q.pairwise()
    g = (draws.pairwise - pairs.mean).reshape(n, -1).numpy()
    expected = pairs.covariance.numpy()
    expected = expected if pairs.is_full else np.diag(expected.ravel())
    sd = np.sqrt(expected.diagonal())
    error = np.sqrt((np.outer(sd, sd) ** 2 + expected**2) / (n / 2))
    assert (np.abs(g.T @ g / n - expected) <= 4 * error).all()


def components_of(draws: Draws, q: Posterior) -> np.ndarray:
    """(S / 2,) which component's mean is the middle of each pair."""
    half = len(draws.inducing) // 2
    middle = 0.5 * (draws.inducing[:half] + draws.inducing[half:])
    away = (middle[:, None] - q.m).abs().amax((-1, -2))
    assert (away.amin(1) < 1e-12).all()
    return away.argmin(1).numpy()


def test_pairs_are_of_one_component_and_components_unbiased():
    """Ten draws are five pairs: 3.5 and 1.5 of them in expectation, so 3 or 4 and 1 or 2. Over 400
    seeds the mean has a standard error of 0.5 / sqrt 400."""
    q = mixture()
    counts = [int((components_of(Draws.sample(q, 10, s), q) == 1).sum()) for s in range(400)]
    assert set(counts) == {1, 2}
    assert np.mean(counts) == pytest.approx(1.5, abs=4 * 0.5 / 20)


def test_the_seed_decides_the_components_too():
    q = mixture()
    drawn = [components_of(Draws.sample(q, 10, seed), q).tolist() for seed in range(8)]
    assert len({tuple(d) for d in drawn}) > 1
    assert drawn == [components_of(Draws.sample(q, 10, seed), q).tolist() for seed in range(8)]
    one, again = Draws.sample(q, 10, 3), Draws.sample(q, 10, 3)
    assert torch.equal(one.inducing, again.inducing)


def test_a_component_of_no_weight_is_never_drawn():
    q = mixture()
    with torch.no_grad():
        q.weight_logits.copy_(torch.tensor([-1000.0, 0.0]))
    assert (components_of(Draws.sample(q, 200, 0), q) == 1).all()


def test_equal_components_are_one():
    """The same numbers too, since the choice of component comes after the noise."""
    q = mixture()
    one = Posterior(q.kernel, q.inducing, V, pairwise_sd=0.9).requires_grad_(False)
    one.m.copy_(q.m[:1])
    one.factor.copy_(q.factor[:1])
    one.pair_mean.copy_(q.pair_mean)
    q.m.copy_(q.m[:1].clone().expand_as(q.m))
    q.factor.copy_(q.factor[:1].clone().expand_as(q.factor))
    draws, others = Draws.sample(q, 6, 1), Draws.sample(one, 6, 1)
    torch.testing.assert_close(draws.inducing, others.inducing, rtol=0, atol=1e-14)
    assert torch.equal(draws.pairwise, others.pairwise)


def test_the_mean_of_a_mixture(batch):
    q = mixture()
    draws = Draws.mean(q)
    torch.testing.assert_close(draws.inducing[0], 0.7 * q.m[0] + 0.3 * q.m[1])
    mean = q.at(q.conditional(batch.x, batch.mask)).mean
    expected = torch.tensordot(q.weights, mean, 1)
    torch.testing.assert_close(draws.unary(q, batch)[0], expected)


def test_marginals_of_a_mixture_are_the_mixture_of_marginals(batch):
    """40,000 draws a side, so four standard errors of a probability are at most 0.015."""
    q = mixture()
    found = marginals(q, Chain(), Draws.sample(q, 40_000, 0), batch)
    expected = torch.zeros_like(found)
    for k, weight in enumerate(q.weights):
        part = Posterior(q.kernel, q.inducing, V, pairwise_sd=0.9).requires_grad_(False)
        part.m.copy_(q.m[k : k + 1])
        part.factor.copy_(q.factor[k : k + 1])
        part.pair_mean.copy_(q.pair_mean)
        expected += weight * marginals(part, Chain(), Draws.sample(part, 40_000, k), batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.015)
