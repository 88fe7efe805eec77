"""Fits where transitions have features: weights for pairs of neighbouring labels beside the nodes' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import Posterior, Table, Weights
from structgp.gp.kernels import RelevanceKernel
from structgp.inference import Minibatch, Problem, SecondOrder
from structgp.inference.estimators import Estimator, Pathwise
from structgp.paper import Score
from structgp.structures import Structure

V = 2


class Apart(Structure):
    """Every token and every transition is labelled by itself: log p is a sum of log-softmaxes, concave and
    known in closed form, with one table for all transitions or one per transition."""

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        tokens = f.log_softmax(-1).gather(-1, y.expand(len(f), -1, -1)[..., None])[..., 0]
        pairs = (V * y[:, :-1] + y[:, 1:]).expand(len(f), -1, -1)
        each = self._tables(g, mask).log_softmax(-1).gather(-1, pairs[..., None])[..., 0]
        return (tokens * mask).sum(-1) + (each * mask[:, 1:]).sum(-1)

    def _tables(self, g: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T - 1, V^2)."""
        flat = g.flatten(-2)
        if g.dim() == 3:
            flat = flat[:, None, None].expand(-1, len(mask), mask.shape[1] - 1, -1)
        return flat

    def local_curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, *_: Any) -> Any:
        p, r = f.softmax(-1), self._tables(g, mask).softmax(-1)
        node = (p * (1 - p)).mean(0) * mask[..., None]
        each = ((r * (1 - r)).mean(0) * mask[:, 1:, None]).unflatten(-1, (V, V))
        return SimpleNamespace(node=node, next=each.sum(1) if g.dim() == 3 else each)


def make_batches() -> list[Batch]:
    """12 sequences of four tokens, 4 of one. The feature of a transition says how the label moves: on 0 it
    stays, on 1 it changes, nine times in ten."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for k, (B, T) in enumerate([(12, 4), (4, 1)]):
        moves = torch.randint(0, 2, (B, T - 1), generator=generator)
        flips = moves ^ (torch.rand(B, T - 1, generator=generator) < 0.1).long()
        first = torch.randint(0, 2, (B, 1), generator=generator)
        y = torch.cat([first, (first + flips.cumsum(1)) % 2], 1)
        words = torch.randint(0, 3, (B, T, 1), generator=generator).double()
        mask = torch.ones(B, T, dtype=torch.bool)
        index = torch.arange(B) + 12 * k
        made.append(Batch(words, y, mask, index, edges=moves[..., None].double()))
    return made


def problem_with(block: Any, batches: list[Batch], estimator: Estimator | None = None) -> Problem:
    node = Weights(RelevanceKernel([3]).double().requires_grad_(False), (V,))
    q = Posterior({"node": node, "next": block})
    return Problem(q, Apart(), batches, estimator or Pathwise())


def weights(*sizes: int) -> Weights:
    return Weights(RelevanceKernel(sizes).double().requires_grad_(False), (V, V))


def without_features(batch: Batch) -> Batch:
    assert batch.edges is not None
    return Batch(batch.x, batch.y, batch.mask, batch.index, edges=batch.edges[..., :0])


def fit(problem: Problem, optimizer: Any) -> float:
    """To the end. Returns the bound on many draws that nothing was fitted to."""
    state, finished = optimizer.start(problem, torch.Generator().manual_seed(1)), False
    while not finished:
        state, info = optimizer.step(problem, state)
        finished = info.finished
    return problem.fresh_bound(1000, torch.Generator().manual_seed(9))


SECOND_ORDER = SecondOrder(32, tolerance=5e-3, learn_scales=False)


@pytest.fixture(scope="module")
def fitted() -> tuple[Problem, float]:
    """With the feature of each transition, by second-order inference."""
    problem = problem_with(weights(2), make_batches())
    return problem, fit(problem, SECOND_ORDER)


def test_features_of_transitions_are_learned(fitted: tuple[Problem, float]) -> None:
    """The bound is far above that without them, and the scores say what the data do."""
    problem, bound = fitted
    plain = problem_with(Table((V, V)), make_batches())
    assert bound > fit(plain, SECOND_ORDER) + 3
    stay, change = problem.posterior["next"].m.detach().view(V, V, 3)[..., :2].unbind(-1)
    assert stay.diagonal().min() > stay.fliplr().diagonal().max()
    assert change.fliplr().diagonal().min() > change.diagonal().max()


def test_a_table_is_fitted_as_weights_of_the_constant() -> None:
    """The same bound and the same scores, up to the noise of different draws."""
    batches = [without_features(batch) for batch in make_batches()]
    one, other = (problem_with(block, batches) for block in (Table((V, V)), weights()))
    bounds = [fit(problem, SECOND_ORDER) for problem in (one, other)]
    assert bounds[0] == pytest.approx(bounds[1], abs=0.1)
    table, constant = one.posterior["next"], other.posterior["next"]
    torch.testing.assert_close(table.m, constant.m, rtol=0, atol=0.05)
    torch.testing.assert_close(table.factor, constant.factor, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "optimizer",
    [
        Minibatch(n_draws=32, steps=6, tolerance=0.01, learn_scales=False),
        Minibatch(n_draws=32, steps=6, tolerance=0.01, learn_scales=False, sites_folder="sites"),
    ],
    ids=["memory", "disk"],
)
def test_minibatches_reach_the_bound_of_second_order(
    optimizer: Minibatch, fitted: tuple[Problem, float], tmp_path: Any, monkeypatch: Any
) -> None:
    """Sites of a batch without any transition included."""
    monkeypatch.chdir(tmp_path)
    problem = problem_with(weights(2), make_batches())
    assert fit(problem, optimizer) == pytest.approx(fitted[1], abs=0.15)
    expected, found = fitted[0].posterior, problem.posterior
    for name in ("node", "next"):
        torch.testing.assert_close(found[name].m, expected[name].m, rtol=0, atol=0.15)
        torch.testing.assert_close(found[name].factor, expected[name].factor, rtol=0, atol=0.05)


def gradients(problem: Problem) -> list[Tensor]:
    """Of the bound, in means and standard deviations of both blocks, from 512 draws."""
    q = problem.posterior
    moved = [p for block in q.blocks for p in (block.m, block.factor)]
    generator, n = torch.Generator().manual_seed(0), len(problem.batches)
    total = torch.stack([problem.bound(i, generator).elbo / n for i in range(n)]).sum()
    return list(torch.autograd.grad(total, moved))


def test_pathwise_gradients_are_zero_where_second_order_ends(fitted: tuple[Problem, float]) -> None:
    """Up to noise, in the means and standard deviations of both blocks; not so at the prior. Weights take
    curvature transition by transition, which leaves something to gain in the standard deviations."""
    start = problem_with(weights(2), make_batches(), Pathwise(512))
    end = problem_with(weights(2), make_batches(), Pathwise(512))
    end.posterior.load_state_dict(fitted[0].posterior.state_dict())
    for before, after, share in zip(gradients(start), gradients(end), (0.1, 0.3, 0.1, 0.3), strict=True):
        assert float(after.norm()) < share * float(before.norm())


@pytest.mark.parametrize("design", ["iid", "orthogonal", "sobol"])
def test_score_gradients_where_no_example_has_a_transition(design: Any) -> None:
    problem = problem_with(weights(2), make_batches()[1:], Score("x", design, "mean", 64))
    bound = problem.bound(0, torch.Generator().manual_seed(0))
    assert bound.elbo.isfinite()
    moments = bound.estimate.moments
    assert moments.slopes[1].shape == (4, 0, V * V)
    assert moments.slopes[0].any()


def test_what_is_known_before_stays(fitted: tuple[Problem, float]) -> None:
    """The fitted posterior as the prior of the same data again: more is known of every weight that
    occurs."""
    again = problem_with(weights(2), make_batches())
    again.posterior.load_state_dict(fitted[0].posterior.state_dict())
    optimizer = Minibatch(n_draws=16, steps=6, learn_scales=False, goes_on=True, max_passes=2)
    fit(again, optimizer)
    for name in ("node", "next"):
        before, after = fitted[0].posterior[name].factor, again.posterior[name].factor
        assert (after < before).all()
