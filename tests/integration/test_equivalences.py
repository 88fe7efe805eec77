"""Different ways to the same answer: limits, permutations, batchings, and nested inducing inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from scipy.special import softmax
from torch import Tensor

from structgp.answers import potentials
from structgp.data.batch import Batch, pad
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.gp import Inducing, Posterior, Table, choose_inducing
from structgp.gp.kernels.build import build_kernel
from structgp.inference import Problem, SecondOrder
from structgp.inference.loop import make_batches
from structgp.inference.second_order import MOST_DRAWS
from structgp.structures import Chain

V = 3
AMPLITUDE = 2.0


@dataclass(frozen=True)
class Data:
    """rows : one (T, 2) array a sequence; labels : one (T,); encoder : gives the padding."""

    rows: list[np.ndarray]
    labels: list[np.ndarray]
    encoder: FeatureEncoder

    @property
    def tokens(self) -> Tensor:
        return torch.from_numpy(np.concatenate(self.rows))


def make_data(n_sequences: int = 6, seed: int = 0) -> Data:
    made = generate(
        n_sequences, n_labels=V, mean_length=3.5, n_templates=2, n_values=4, strength=2.0, seed=seed
    )
    encoder = FeatureEncoder().fit(made.X)
    labels = LabelEncoder(list(made.chain.labels)).transform(made.y)
    return Data(encoder.transform(made.X), labels, encoder)


def make_posterior(data: Data, *, most: int = 99, transition_sd: float = 1.0) -> Posterior:
    """With the default, inducing inputs that leave nothing open: the full GP."""
    tokens = data.tokens
    kernel = build_kernel("linear", data.encoder.blocks, tokens, AMPLITUDE).requires_grad_(False)
    chosen = choose_inducing(kernel, tokens, most)
    node = Inducing(kernel, tokens[chosen.index], (V,))
    return Posterior({"node": node, "next": Table((V, V), transition_sd)})


@dataclass(frozen=True)
class Dice:
    """The draws of every sequence, by its number, whatever batch it is in."""

    nodes: list[np.ndarray]  # (S, T, V) per sequence
    transitions: Tensor  # (S, V, V)

    @staticmethod
    def roll(data: Data, n_draws: int, seed: int = 0) -> Dice:
        rng = np.random.default_rng(seed)

        def mirrored(*shape: int) -> np.ndarray:
            noise = rng.standard_normal((n_draws // 2, *shape))
            return np.concatenate([noise, -noise])

        transitions = torch.from_numpy(mirrored(V, V))
        return Dice([mirrored(len(r), V) for r in data.rows], transitions)

    def of(self, batch: Batch) -> Tensor:
        """(S, B, T, V), with junk at padding."""
        B, T = batch.mask.shape
        noise = torch.full((len(self.transitions), B, T, V), 3.0, dtype=torch.float64)
        for b, i in enumerate(batch.index.tolist()):
            noise[:, b, : self.nodes[i].shape[1]] = torch.from_numpy(self.nodes[i])
        return noise


def fit(
    posterior: Posterior,
    batches: Sequence[Batch],
    dice: Dice,
    *,
    tolerance: float = 1e-8,
    learn_scales: bool = True,
    max_rounds: int = 30,
) -> Problem:
    """Second-order inference with draws that belong to sequences rather than places in batches."""
    problem = Problem(posterior, Chain(), batches)
    optimizer = SecondOrder(
        n_draws=len(dice.transitions), tolerance=tolerance, learn_scales=learn_scales, max_rounds=max_rounds
    )
    state = optimizer.start(problem, torch.Generator().manual_seed(0))
    # With as many draws as it may have, it keeps those that it is given.
    noise = [[dice.of(b) for b in batches], dice.transitions.flatten(1)]
    state = replace(state, noise=noise, n_draws=MOST_DRAWS)
    finished = False
    while not finished:
        state, info = optimizer.step(problem, state)
        finished = info.finished
    return problem


def batches_of(data: Data, batch_tokens: int = 1000) -> list[Batch]:
    return make_batches(data.rows, data.labels, data.encoder.pad_row, batch_tokens)


def at_sequences(posterior: Posterior, data: Data) -> list[tuple[np.ndarray, np.ndarray]]:
    """Mean (T, V) and covariance (V, T, T) of every sequence, one at a time."""
    answer = []
    with torch.no_grad():
        for i in range(len(data.rows)):
            batch = pad(data.rows, data.labels, data.encoder.pad_row, [i])
            node = posterior.node
            mean, spread = node.gaussian(node.conditional(batch.x, batch.mask, node.prior_factor()))
            answer.append((mean[0, 0].numpy(), spread[0, 0].numpy()))
    return answer


def assert_same(
    first: Sequence[tuple[np.ndarray, np.ndarray]],
    second: Sequence[tuple[np.ndarray, np.ndarray]],
    atol: float,
) -> None:
    assert len(first) == len(second)
    for (mean, covariance), (other_mean, other_covariance) in zip(first, second, strict=True):
        np.testing.assert_allclose(mean, other_mean, rtol=0, atol=atol)
        np.testing.assert_allclose(covariance, other_covariance, rtol=0, atol=atol)


def answers(posterior: Posterior, draws: potentials.Draws, batch: Batch) -> torch.Tensor:
    unknown = replace(batch, y=torch.full_like(batch.y, -1))
    return draws.potentials(Chain(), unknown).marginals()


def marginals(posterior: Posterior, data: Data, batch_tokens: int = 1000) -> list[np.ndarray]:
    draws = potentials.sample(posterior, 64, 0)
    answer: list[np.ndarray] = [np.empty(0)] * len(data.rows)
    for batch in batches_of(data, batch_tokens):
        p = answers(posterior, draws, batch).numpy()
        for b, i in enumerate(batch.index.tolist()):
            answer[i] = p[b, : len(data.rows[i])]
    return answer


# -- no transition scores: a softmax for every token ----------------------------------------------


def test_without_transition_scores_marginals_are_softmax() -> None:
    """Draw by draw; and on average the integral of the softmax over a token's own Gaussian."""
    data = make_data()
    posterior = make_posterior(data, most=3, transition_sd=0.0)
    fit(posterior, batches_of(data), Dice.roll(data, 32), learn_scales=False)
    with torch.no_grad():
        posterior.node.m *= 4  # six sequences teach little
    draws = potentials.sample(posterior, 20_000, 0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(16)
    grid = np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij"), -1).reshape(-1, V)
    weight = np.einsum("i,j,k->ijk", weights, weights, weights).ravel() / weights.sum() ** 3
    spread = []
    for i, (mean, covariance) in enumerate(at_sequences(posterior, data)):
        batch = pad(data.rows, data.labels, data.encoder.pad_row, [i])
        found = answers(posterior, draws, batch)[0].numpy()
        f = draws.potentials(Chain(), batch).f[:, 0].numpy()
        np.testing.assert_allclose(found, softmax(f, -1).mean(0), rtol=0, atol=1e-10)
        sd = np.sqrt(np.diagonal(covariance, axis1=1, axis2=2)).T  # (T, V)
        exact = np.einsum("n,ntv->tv", weight, softmax(mean + sd * grid[:, None], -1))
        np.testing.assert_allclose(found, exact, rtol=0, atol=0.01)
        spread.append(softmax(mean, -1) - exact)
    assert np.abs(np.concatenate(spread)).max() > 0.02  # the Gaussian's width matters


def test_without_transition_scores_tokens_may_as_well_be_sequences() -> None:
    """The same posterior when every token is a sequence of its own, up to the draws."""
    data = make_data()
    together = make_posterior(data, transition_sd=0.0)
    fit(together, batches_of(data), Dice.roll(data, 2000), learn_scales=False, tolerance=1e-4)
    single = Data(
        [row[None] for rows in data.rows for row in rows],
        [label[None] for labels in data.labels for label in labels],
        data.encoder,
    )
    apart = make_posterior(data, transition_sd=0.0)
    fit(apart, batches_of(single), Dice.roll(single, 2000, 1), learn_scales=False, tolerance=1e-4)
    assert_same(at_sequences(together, data), at_sequences(apart, data), atol=0.05)


# -- inducing inputs that span the data: the full GP -------------------------------------------


def test_the_order_of_inducing_inputs_does_not_matter() -> None:
    data = make_data()
    dice = Dice.roll(data, 16)
    first, second = make_posterior(data), make_posterior(data)
    order = torch.randperm(first.node.n_values, generator=torch.Generator().manual_seed(3))
    assert not torch.equal(order, torch.arange(len(order)))
    second.node.inducing.copy_(first.node.inducing[order])
    fit(first, batches_of(data), dice)
    fit(second, batches_of(data), dice)
    assert not torch.allclose(first.node.m, second.node.m)  # in coordinates of their own
    assert_same(at_sequences(first, data), at_sequences(second, data), atol=2e-4)
    assert first["next"].prior_sd == pytest.approx(second["next"].prior_sd, rel=1e-3)


def test_spanning_inducing_inputs_are_the_full_gaussian_process(oracles: ModuleType) -> None:
    """At the optimum of section 3's bound over N(b_j, Sigma_j) at all N tokens,

        b_j = K E[d log p / df_j]   and   Sigma_j^-1 = K^-1 + E[-d^2 log p / df_j^2],

    with both expectations by enumeration, on the draws that were fitted."""
    data = make_data(4)
    posterior = make_posterior(data)
    dice = Dice.roll(data, 64)
    (batch,) = batches_of(data)
    fit(posterior, [batch], dice, learn_scales=False)
    fitted = at_sequences(posterior, data)

    x = data.tokens.numpy()
    K = AMPLITUDE * (x[:, None] == x[None]).mean(-1)
    N = len(x)
    gradient, curvature = np.zeros((N, V)), np.zeros((V, N, N))
    table_mean, table_sd = (x.numpy() for x in posterior["next"].constant_scores())
    S = len(dice.transitions)
    start = 0
    for (mean, covariance), labels, noise in zip(fitted, data.labels, dice.nodes, strict=True):
        T = len(labels)
        here = slice(start, start + T)
        jitter = 1e-8 * np.trace(covariance, axis1=1, axis2=2)[:, None, None] / T * np.eye(T)
        roots = np.linalg.cholesky(covariance + jitter)
        for s in range(S):
            off = np.stack([roots[j] @ noise[s, :, j] for j in range(V)], -1)
            table = oracles.chain_table(mean + off, table_mean + table_sd * dice.transitions[s].numpy())
            gradient[here] += (np.eye(V)[labels] - table.nodes.astype(float)) / S
            curvature[:, here, here] += table.node_covariance.astype(float) / S
        start += T
    b = K @ gradient
    means = np.concatenate([mean for mean, _ in fitted])
    np.testing.assert_allclose(means, b, rtol=0, atol=5e-3)
    start = 0
    # K may be singular (tokens repeat): Sigma = K - K (K + C^-1)^-1 K = (I + K C)^-1 K.
    sigma = [np.linalg.solve(np.eye(N) + K @ C, K) for C in curvature]
    for _, covariance in fitted:
        T = covariance.shape[-1]
        for j in range(V):
            block = sigma[j][start : start + T, start : start + T]
            np.testing.assert_allclose(covariance[j], block, rtol=0, atol=2e-3)
        start += T


# -- permutations ---------------------------------------------------------------------------------


def test_permuting_sequences_permutes_the_answer() -> None:
    data = make_data()
    order = [3, 0, 5, 1, 4, 2]
    moved = Data([data.rows[i] for i in order], [data.labels[i] for i in order], data.encoder)
    dice = Dice.roll(data, 16)
    moved_dice = Dice([dice.nodes[i] for i in order], dice.transitions)
    first = make_posterior(data, most=5)
    second = make_posterior(data, most=5)
    fit(first, batches_of(data, 12), dice)
    fit(second, batches_of(moved, 12), moved_dice)
    answer, moved_answer = at_sequences(first, data), at_sequences(second, moved)
    assert_same([answer[i] for i in order], moved_answer, atol=2e-4)
    found, moved_found = marginals(first, data), marginals(second, moved)
    for k, i in enumerate(order):
        np.testing.assert_allclose(moved_found[k], found[i], rtol=0, atol=2e-4)


def test_permuting_labels_permutes_the_answer() -> None:
    data = make_data()
    new = np.array([2, 0, 1])  # label j becomes new[j]
    old = np.argsort(new)
    moved = Data(data.rows, [new[y] for y in data.labels], data.encoder)
    dice = Dice.roll(data, 16)
    moved_dice = Dice([n[..., old] for n in dice.nodes], dice.transitions[:, old][:, :, old])
    first, second = make_posterior(data, most=5), make_posterior(data, most=5)
    fit(first, batches_of(data), dice)
    fit(second, batches_of(moved), moved_dice)
    answer = [(m[:, old], c[old]) for m, c in at_sequences(first, data)]
    assert_same(answer, at_sequences(second, moved), atol=2e-4)
    for one, other in zip(first["next"].constant_scores(), second["next"].constant_scores(), strict=True):
        torch.testing.assert_close(one[old][:, old], other, rtol=0, atol=2e-4)
    mean, _ = first["next"].constant_scores()
    assert (mean - mean.T).abs().max() > 0.05  # direction matters


# -- batches and padding --------------------------------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [1, 10])
def test_batching_changes_nothing(batch_tokens: int) -> None:
    data = make_data()
    dice = Dice.roll(data, 16)
    whole, parts = make_posterior(data, most=5), make_posterior(data, most=5)
    assert len(batches_of(data, batch_tokens)) > 2
    fit(whole, batches_of(data), dice)
    fit(parts, batches_of(data, batch_tokens), dice)
    assert_same(at_sequences(whole, data), at_sequences(parts, data), atol=2e-4)
    one, other = (q["next"].constant_scores()[0] for q in (whole, parts))
    torch.testing.assert_close(one, other, rtol=0, atol=2e-4)


def test_more_padding_changes_nothing() -> None:
    data = make_data()
    dice = Dice.roll(data, 16)
    (batch,) = batches_of(data)
    extra = torch.nn.functional.pad
    wide = Batch(
        extra(batch.x, (0, 0, 0, 4), value=1.0),
        extra(batch.y, (0, 4), value=V - 1),
        extra(batch.mask, (0, 4)),
        batch.index,
    )
    tight, loose = make_posterior(data, most=5), make_posterior(data, most=5)
    fit(tight, [batch], dice)
    fit(loose, [wide], dice)
    assert_same(at_sequences(tight, data), at_sequences(loose, data), atol=2e-4)


def test_marginals_do_not_depend_on_batching() -> None:
    data = make_data()
    posterior = make_posterior(data, most=5)
    fit(posterior, batches_of(data), Dice.roll(data, 16))
    for one, other in zip(marginals(posterior, data), marginals(posterior, data, 1), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7)
        np.testing.assert_allclose(one.sum(-1), 1, rtol=1e-12)


# -- more inducing inputs -------------------------------------------------------------------------


def test_more_inducing_inputs_do_not_lower_the_bound() -> None:
    """Nested sets: whatever the smaller one expresses, the larger one does."""
    data = make_data(8)
    bounds = []
    tokens = data.tokens
    spanning = make_posterior(data).node.n_values
    for most in (1, 2, 3, 5, spanning):
        posterior = make_posterior(data, most=most)
        assert torch.equal(posterior.node.inducing, make_posterior(data).node.inducing[:most])
        problem = fit(posterior, batches_of(data), Dice.roll(data, 256), learn_scales=False, tolerance=1e-4)
        generator = torch.Generator().manual_seed(1)
        bounds.append(problem.fresh_bound(20_000, generator))
    assert spanning > 5
    assert len(tokens) >= spanning
    assert (np.diff(bounds) > -0.03).all(), bounds
    assert bounds[-1] > bounds[0] + 0.3


def test_inducing_inputs_beyond_the_span_change_nothing() -> None:
    data = make_data()
    spanning = make_posterior(data)
    more = torch.cat([spanning.node.inducing, torch.tensor([[90.0, 91.0], [92.0, 93.0]]).double()])
    node = Inducing(spanning.node.kernel, more, (V,))
    double = Posterior({"node": node, "next": Table((V, V))})
    dice = Dice.roll(data, 16)
    fit(spanning, batches_of(data), dice)
    fit(double, batches_of(data), dice)
    assert_same(at_sequences(spanning, data), at_sequences(double, data), atol=2e-4)
    # Nobody saw those values: their part of q is the prior.
    assert double.node.m[..., -2:].abs().max() < 1e-6
