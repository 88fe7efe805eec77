"""Predictions are averages over draws: checked against enumeration, draw by draw."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel

from structgp.answers import labellings, potentials
from structgp.data.batch import Batch, pad
from structgp.gp import FullTable, Inducing, Mixture, Posterior, Table
from structgp.gp.kernels import TemplateKernel
from structgp.structures import Chain


def marginals(posterior, structure, draws, batch):
    unknown = replace(batch, y=torch.full_like(batch.y, -1))
    return draws.potentials(structure, unknown).marginals()


def viterbi(posterior, structure, draws, batch):
    at = draws.potentials(structure, batch)
    return structure.decode(at.f, at.g, at.mask)[0]


def log_prob_of(posterior, structure, draws, batch):
    return labellings.log_prob(draws.potentials(structure, batch), batch.y)


def scores(draws, batch):
    """(S, B, T, V) of nodes and (S, V, V) of transitions."""
    at = draws.potentials(Chain(), batch)
    return at.f, at.g


def nodes(draws, posterior, batch):
    """(S, B, T, V)."""
    return draws.potentials(Chain(), batch).f


def values(draws):
    """(S, V, M) drawn whitened inducing values."""
    return draws.parts[0].values


def transitions(draws, posterior):
    """(S, V, V)."""
    return draws.parts[1].at(posterior["next"], None, None)


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
    q = Posterior({"node": Inducing(kernel, normal(M, W), (V,)), "next": Table((V, V), 0.9)})
    with torch.no_grad():
        q.node.m.copy_(normal(V, M))
        q.node.factor.copy_(torch.eye(M) + 0.3 * normal(V, M, M))
        q.node.log_amplitude.fill_(0.4)
        q["next"].m.copy_(normal(V * V, 1) / 0.9)
        q["next"].factor.copy_((0.3 * normal(V * V, 1) - 0.5).exp() / 0.9)
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
    return pad(rows, labels, np.zeros(W), chosen)


def gaussian_by_hand(q: Posterior, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean (T, V) and covariance (V, T, T) of q(f) at rows x, from the textbook."""

    def k(a, b):
        square = ((a[:, None] - b[None]) ** 2).sum(-1)
        return 1.7 * np.exp(-0.5 * square / 0.8**2)

    z = q.node.inducing.numpy()
    to_white = np.linalg.inv(np.linalg.cholesky(k(z, z)))
    A = k(x, z) @ to_white.T
    amplitude = np.exp(0.4)
    mean = np.sqrt(amplitude) * A @ q.node.m.numpy().T
    factor = np.tril(q.node.factor.numpy())
    S = factor @ factor.transpose(0, 2, 1)
    return mean, amplitude * (k(x, x) - A @ A.T + A @ S @ A.T)


def sequence(batch: Batch, b: int) -> tuple[np.ndarray, np.ndarray]:
    n = int(batch.mask[b].sum())
    return batch.x[b, :n].numpy(), batch.y[b, :n].numpy()


def test_draws_have_the_moments_of_the_posterior(posterior, batch):
    draws = potentials.sample(posterior, 40_000, seed=0)
    f = nodes(draws, posterior, batch).numpy()
    for b, n in enumerate(LENGTHS):
        mean, covariance = gaussian_by_hand(posterior, sequence(batch, b)[0])
        # In pairs: the mean is exact.
        np.testing.assert_allclose(f[:, b, :n].mean(0), mean, atol=1e-6)
        away = f[:, b, :n] - mean
        found = np.einsum("stv,suv->vtu", away, away) / len(f)
        np.testing.assert_allclose(found, covariance, atol=0.06 * covariance.max())
    table = posterior["next"]
    table_mean, table_sd = table.constant_scores()
    np.testing.assert_allclose(transitions(draws, posterior).mean(0), table_mean, atol=1e-6)
    np.testing.assert_allclose(transitions(draws, posterior).std(0), table_sd, rtol=0.03, atol=0)


def test_marginals_are_the_average_of_the_draws_marginals(posterior, batch, oracles):
    draws = potentials.sample(posterior, 6, seed=4)
    f, g = (part.numpy() for part in scores(draws, batch))
    p = marginals(posterior, Chain(), draws, batch).numpy()
    assert p.shape == (len(LENGTHS), max(LENGTHS), V)
    for b, n in enumerate(LENGTHS):
        tables = [oracles.chain_table(f[s, b, :n], g[s]) for s in range(6)]
        by_hand = np.mean([table.nodes for table in tables], 0).astype(float)
        np.testing.assert_allclose(p[b, :n], by_hand, atol=1e-12)
        assert not p[b, n:].any()
        # Averaging matters: one draw says something else.
        assert np.abs(by_hand - tables[0].nodes.astype(float)).max() > 0.01


def test_log_prob_is_the_log_of_the_average_probability(posterior, batch, oracles):
    draws = potentials.sample(posterior, 6, seed=4)
    f, g = (part.numpy() for part in scores(draws, batch))
    found = log_prob_of(posterior, Chain(), draws, batch).numpy()
    for b, n in enumerate(LENGTHS):
        y = sequence(batch, b)[1]
        probabilities = []
        for s in range(6):
            table = oracles.chain_table(f[s, b, :n], g[s])
            probabilities.append(float(table.prob[(table.labels == y).all(1)].sum()))
        assert found[b] == pytest.approx(np.log(np.mean(probabilities)), abs=1e-12)
        assert found[b] != pytest.approx(np.mean(np.log(probabilities)), abs=1e-3)


def test_labelling_probabilities_sum_to_one(posterior, batch, oracles):
    draws = potentials.sample(posterior, 4, seed=1)
    only = batch_of([0])
    total = 0.0
    for y in oracles.labellings(LENGTHS[0], V):
        labelled = replace(only, y=torch.from_numpy(y)[None])
        total += float(log_prob_of(posterior, Chain(), draws, labelled).exp())
    assert total == pytest.approx(1, abs=1e-12)


def test_plug_in_mean(posterior, batch, oracles):
    draws = potentials.mean(posterior)
    assert values(draws).shape == (1, V, M)
    p = marginals(posterior, Chain(), draws, batch).numpy()
    log_prob = log_prob_of(posterior, Chain(), draws, batch).numpy()
    best = viterbi(posterior, Chain(), draws, batch).numpy()
    for b, n in enumerate(LENGTHS):
        x, y = sequence(batch, b)
        mean, _ = gaussian_by_hand(posterior, x)
        table = oracles.chain_table(mean, posterior["next"].constant_scores()[0].numpy())
        np.testing.assert_allclose(p[b, :n], table.nodes.astype(float), atol=1e-6)
        of_y = table.prob[(table.labels == y).all(1)].sum()
        assert log_prob[b] == pytest.approx(float(np.log(of_y)), abs=1e-6)
        assert best[b, :n].tolist() == table.labels[table.score.argmax()].tolist()


def test_the_mean_is_a_copy(posterior):
    draws = potentials.mean(posterior)
    values(draws).zero_()
    transitions(draws, posterior).zero_()
    assert posterior.node.m.abs().min() > 0
    assert posterior["next"].m.abs().min() > 0


@pytest.mark.parametrize("make", [lambda q: potentials.sample(q, 6, seed=4), potentials.mean])
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
        log_prob_of(posterior, Chain(), draws, wider)[:-1],
        log_prob_of(posterior, Chain(), draws, batch),
        rtol=1e-14,
        atol=1e-14,
    )


def test_what_stands_in_the_padding_changes_nothing(posterior, batch):
    draws = potentials.sample(posterior, 6, seed=4)
    x = torch.where(batch.mask[..., None], batch.x, 12.5)
    y = torch.where(batch.mask, batch.y, 2)
    other = replace(batch, x=x, y=y)
    for ask in (marginals, log_prob_of):
        # To rounding: GPyTorch's RBF centres all rows it is given before it takes distances.
        torch.testing.assert_close(
            ask(posterior, Chain(), draws, other),
            ask(posterior, Chain(), draws, batch),
            rtol=1e-12,
            atol=1e-13,
        )
    assert torch.equal(
        viterbi(posterior, Chain(), potentials.mean(posterior), batch),
        viterbi(posterior, Chain(), potentials.mean(posterior), other),
    )


def test_with_a_kernel_of_ours_padding_changes_nothing_but_rounding(posterior, batch):
    # Products of matrices round differently with other numbers of rows, on some processors.
    ids = torch.tensor([[0, 0], [1, -2], [2, 1], [-2, 2]], dtype=torch.float64)
    node = Inducing(TemplateKernel(W).double(), ids, (V,))
    with torch.no_grad():
        for name in ("m", "factor", "log_amplitude"):
            getattr(node, name).copy_(getattr(posterior.node, name))
    q = Posterior({"node": node, "next": posterior["next"]})
    draws = potentials.sample(q, 6, seed=4)

    def rounded(batch: Batch) -> Batch:
        return replace(batch, x=torch.where(batch.mask[..., None], batch.x.round(), -1))

    short, wide = rounded(batch), rounded(batch_of(range(len(LENGTHS)), 5))
    T = max(LENGTHS)
    p = marginals(q, Chain(), draws, short)
    close = partial(torch.testing.assert_close, rtol=1e-14, atol=1e-15)
    close(marginals(q, Chain(), draws, wide)[:-1, :T], p)
    log_prob = log_prob_of(q, Chain(), draws, short)
    close(log_prob_of(q, Chain(), draws, wide)[:-1], log_prob)


def test_neighbours_in_the_batch_and_their_order_change_nothing(posterior, batch):
    draws = potentials.sample(posterior, 6, seed=4)
    p = marginals(posterior, Chain(), draws, batch)
    backwards = marginals(posterior, Chain(), draws, batch_of([3, 2, 1, 0]))
    for b, n in enumerate(LENGTHS):
        alone = marginals(posterior, Chain(), draws, batch_of([b]))[0]
        torch.testing.assert_close(alone, p[b, :n], rtol=0, atol=1e-14)
        torch.testing.assert_close(backwards[3 - b], p[b], rtol=0, atol=1e-14)


def test_no_transition_scores(posterior, batch):
    q = Posterior({"node": posterior.node, "next": Table((V, V), 0.0)}).requires_grad_(False)
    draws = potentials.sample(q, 6, seed=4)
    f, g = scores(draws, batch)
    assert not g.any()
    p = marginals(q, Chain(), draws, batch)
    by_hand = f.softmax(-1).mean(0)
    torch.testing.assert_close(p[batch.mask], by_hand[batch.mask], rtol=0, atol=1e-12)


def test_seed_and_number(posterior):
    draws = potentials.sample(posterior, 5, seed=2)
    assert values(draws).shape == (6, V, M)
    assert transitions(draws, posterior).shape == (6, V, V)
    again, other = potentials.sample(posterior, 5, seed=2), potentials.sample(posterior, 5, seed=3)
    for part in (values, lambda draws: transitions(draws, posterior)):
        assert torch.equal(part(draws), part(again))
        assert not torch.equal(part(draws), part(other))


def test_blocks_are_drawn_independently(posterior):
    """What nodes and transitions are drawn from has nothing in common: correlations over 4,000 draws are
    within five standard errors of 0, between all of their numbers."""
    draws = potentials.sample(posterior, 4000, seed=0)
    half = 2000
    v = values(draws)[:half].flatten(1)
    g = transitions(draws, posterior)[:half].flatten(1)
    found = torch.corrcoef(torch.cat([v, g], 1).T)[: v.shape[1], v.shape[1] :]
    assert found.abs().max() < 5 / half**0.5


def test_more_inducing_values_leave_the_drawn_transitions_alone(posterior):
    """What all examples share is drawn first."""
    node = posterior.node
    more = torch.cat([node.inducing, node.inducing + 0.5])
    wider = Posterior({"node": Inducing(node.kernel, more, (V,)), "next": posterior["next"]})
    one, other = (potentials.sample(q, 6, seed=1) for q in (posterior, wider))
    assert torch.equal(transitions(one, posterior), transitions(other, wider))


def test_seed_decides_what_the_inducing_values_leave_open(posterior, batch):
    draws = potentials.sample(posterior, 4, seed=2)
    node, table = draws.parts
    other = replace(draws, parts=(replace(node, seed=3), table))
    f, g = nodes(draws, posterior, batch), nodes(other, posterior, batch)
    assert (f - g).abs().max() > 0.01
    assert torch.equal(f, nodes(draws, posterior, batch))


# -- mixtures and other covariances --------------------------------------------------------------


def mixture(covariance="full", full=False) -> Posterior:
    """Two components apart, the second of weight 0.3; nothing is at its starting value."""
    generator = torch.Generator().manual_seed(6)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kernel = ScaleKernel(RBFKernel()).double()
    kernel.outputscale, kernel.base_kernel.lengthscale = 1.7, 0.8
    node = Mixture(kernel, normal(M, W), (V,), n_components=2, covariance=covariance)
    table = (FullTable if full else Table)((V, V), 0.9)
    with torch.no_grad():
        node.m.copy_(1.5 * normal(*node.m.shape))
        node.factor += 0.4 * normal(*node.factor.shape)
        node.weight_logits.copy_(torch.tensor([0.7, 0.3], dtype=torch.float64).log())
        table.m.copy_(normal(V * V, 1))
        if full:
            table.factor.copy_(0.5 * normal(V * V, V * V))
    return Posterior({"node": node, "next": table}).requires_grad_(False)


def component(q: Posterior, k: int) -> Posterior:
    """One Gaussian as component k of the nodes, with the same transitions."""
    one = q.node.alone().requires_grad_(False)
    one.m.copy_(q.node.m[k])
    one.factor.copy_(q.node.factor[k])
    return Posterior({"node": one, "next": q["next"]})


@pytest.mark.parametrize(("covariance", "full"), [("full", False), ("diagonal", True)])
def test_draws_from_a_mixture_have_its_moments(covariance, full):
    """10,000 draws with their mirror images, 0.7 and 0.3 of them from each component: the mean is exact."""
    n = 10_000
    q = mixture(covariance, full)
    draws = potentials.sample(q, n, seed=0)
    assert values(draws).shape == (n, V, M)
    weights = q.mixing.numpy()
    flat = q.node.m.reshape(2, -1).numpy()
    lower = torch.diag_embed(q.node.factor) if covariance == "diagonal" else q.node.factor.tril()
    inside = (lower @ lower.mT).numpy()
    mean = weights @ flat
    expected = np.einsum("k,ki,kj->ij", weights, flat - mean, flat - mean)
    for j in range(V):
        here = slice(j * M, (j + 1) * M)
        expected[here, here] += np.tensordot(weights, inside[:, j], 1)
    v = values(draws).reshape(n, -1).numpy()
    np.testing.assert_allclose(v.mean(0), mean, atol=1e-9)
    products = (v - mean)[:, :, None] * (v - mean)[:, None]
    # A draw and its mirror image count as one; the choice of component has no spread of its own here.
    error = products.std(0) / np.sqrt(n / 2)
    assert (np.abs(products.mean(0) - expected) <= 4 * error).all()

    table = q["next"]
    g = (transitions(draws, q) - table.constant_scores()[0]).reshape(n, -1).numpy()
    root = 0.9 * (table.factor.tril() if full else table.factor[:, 0].diag()).numpy()
    expected = root @ root.T
    sd = np.sqrt(expected.diagonal())
    error = np.sqrt((np.outer(sd, sd) ** 2 + expected**2) / (n / 2))
    assert (np.abs(g.T @ g / n - expected) <= 4 * error).all()


def components_of(draws, q: Posterior) -> np.ndarray:
    """(S / 2,) which component's mean is the middle of a draw and its mirror image."""
    half = len(values(draws)) // 2
    middle = 0.5 * (values(draws)[:half] + values(draws)[half:])
    away = (middle[:, None] - q.node.m).abs().amax((-1, -2))
    assert (away.amin(1) < 1e-12).all()
    return away.argmin(1).numpy()


def test_mirror_images_are_of_one_component_and_components_unbiased():
    """Ten draws are five with mirror images: 3.5 and 1.5 of them in expectation, so 3 or 4 and 1 or 2.
    Over 400 seeds the mean has a standard error of 0.5 / sqrt 400."""
    q = mixture()
    counts = [int((components_of(potentials.sample(q, 10, s), q) == 1).sum()) for s in range(400)]
    assert set(counts) == {1, 2}
    assert np.mean(counts) == pytest.approx(1.5, abs=4 * 0.5 / 20)


def test_the_seed_decides_the_components_too():
    q = mixture()
    drawn = [components_of(potentials.sample(q, 10, seed), q).tolist() for seed in range(8)]
    assert len({tuple(d) for d in drawn}) > 1
    assert drawn == [components_of(potentials.sample(q, 10, seed), q).tolist() for seed in range(8)]
    one, again = potentials.sample(q, 10, 3), potentials.sample(q, 10, 3)
    assert torch.equal(values(one), values(again))


def test_a_component_of_no_weight_is_never_drawn():
    q = mixture()
    with torch.no_grad():
        q.node.weight_logits.copy_(torch.tensor([-1000.0, 0.0]))
    assert (components_of(potentials.sample(q, 200, 0), q) == 1).all()


def test_equal_components_are_one():
    """The same numbers too, since the choice of component comes from a generator of its own."""
    q = mixture()
    one = component(q, 0)
    q.node.copy_from(one.node)
    draws, others = potentials.sample(q, 6, 1), potentials.sample(one, 6, 1)
    torch.testing.assert_close(values(draws), values(others), rtol=0, atol=1e-14)
    assert torch.equal(transitions(draws, q), transitions(others, one))


def test_the_mean_of_a_mixture(batch):
    q = mixture()
    draws = potentials.mean(q)
    torch.testing.assert_close(values(draws)[0], 0.7 * q.node.m[0] + 0.3 * q.node.m[1])
    conditional = q.node.conditional(batch.x, batch.mask, q.node.prior_factor())
    expected = torch.tensordot(q.mixing, q.node.gaussian(conditional)[0], 1)
    torch.testing.assert_close(nodes(draws, q, batch)[0], expected)


def test_marginals_of_a_mixture_are_the_mixture_of_marginals(batch):
    """10,000 draws on each side, so four standard errors of a probability are at most 0.03."""
    q = mixture()
    found = marginals(q, Chain(), potentials.sample(q, 10_000, 0), batch)
    parts = [component(q, k) for k in range(2)]
    each = [marginals(part, Chain(), potentials.sample(part, 10_000, 1), batch) for part in parts]
    expected = 0.7 * each[0] + 0.3 * each[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.03)
    assert (each[0] - each[1]).abs().max() > 0.3


def test_spread_moves_draws_towards_the_mean(posterior, batch):
    wide, narrow = (potentials.sample(posterior, 6, seed=3, spread=spread) for spread in (1.0, 0.25))
    for at, middle, closer in zip(
        scores(wide, batch), scores(potentials.mean(posterior), batch), scores(narrow, batch), strict=True
    ):
        torch.testing.assert_close(closer, middle + 0.25 * (at - middle))
        assert not torch.allclose(closer, at)
