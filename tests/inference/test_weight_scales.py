"""Scales of weights, learned on the bound in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from torch import Tensor

from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.gp import Posterior, Table, Weights, contrasts
from structgp.gp.block import AXIS_PRIOR_COUNT, LARGEST_FACTOR
from structgp.gp.families.weights import PRIOR_COUNT
from structgp.gp.kernels import RelevanceKernel, weight_variances
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.build import build_kernel
from structgp.gp.kernels.sparse import pack
from structgp.inference import Problem, SecondOrder
from structgp.inference.loop import make_batches
from structgp.structures import Chain

V = 3


@torch.no_grad()
def weighted(contrast: bool, kernel: str = "both", seed: int = 1) -> Problem:
    """Sequences of random tokens, templates beside attributes; nothing is where it started."""
    rng = np.random.default_rng(seed)
    parts = [RelevanceKernel([3, 2], rare=True), RelevanceKernel([4], sparse=True)]
    parts[0].seldom[1] = True
    rows = []
    for T in (4, 3, 1):
        ids = rng.integers(0, 4, size=(T, 2))
        packed = pack(torch.from_numpy(ids), torch.from_numpy(rng.normal(1, 0.5, ids.shape)))
        values = np.stack([rng.integers(-1, n + 1, T) for n in (3, 2)], -1)
        rows.append(np.concatenate([values, packed.numpy()], 1))
    made: Any = BlockSumKernel(parts, [(0, 2), (2, None)])
    if kernel == "columns":
        made, rows = parts[0], [r[:, :2] for r in rows]
    made = made.double().requires_grad_(False)
    for p in made.parameters():
        p += 0.4 * torch.from_numpy(rng.normal(size=p.shape))
    basis = contrasts(torch.tensor([3.0, 2.0, 1.0])) if contrast else None
    q = Weights(made, (V,), basis)
    q.m += 0.8 * torch.from_numpy(rng.normal(size=q.m.shape))
    sign = torch.from_numpy(rng.choice([-1.0, 1.0], q.factor.shape))
    q.factor.copy_(sign * torch.from_numpy(rng.uniform(0.3, 0.95, q.factor.shape)))
    labels = [rng.integers(0, V, len(r)) for r in rows]
    posterior = Posterior({"node": q, "next": Table((V, V))})
    batches = make_batches(rows, labels, np.full(2, -1.0), 1000)
    return Problem(posterior, Chain(), batches)


def learn(problem: Problem) -> None:
    problem.learn_prior("all")


Move = Callable[[float], None]


def hyper_parameters(q: Weights) -> Iterator[tuple[str, int, Move]]:
    """Every logarithm that may be moved: which, its part, and a function that adds to it. ``axis`` is that
    of the variance of a function."""
    parts = q.kernel.kernels if isinstance(q.kernel, BlockSumKernel) else [q.kernel]
    for i, part in enumerate(parts):
        for name in ("log_scale", "log_relevance"):
            p = getattr(part, name)
            for place in range(len(p)):

                def move(by: float, p: Tensor = p, place: int = place) -> None:
                    p[place] += by

                yield name, i, move
    if not q.has_own_functions:
        for r in range(q.n_functions):

            def grow(by: float, r: int = r) -> None:
                q.basis[:, r] *= np.exp(0.5 * by)

            yield "axis", 0, grow


def prior_variances(q: Weights) -> Tensor:
    """(R, M) of the weights, as the labels see them."""
    return q.basis.square().sum(0)[:, None] * weight_variances(q.kernel)


def slope_and_share(q: Weights, move: Move, h: float = 1e-5) -> tuple[float, Tensor]:
    """Derivative of -KL with the law of the weights held, which is that of the bound since the likelihood
    sees nothing else; and which (R, M) of the weights have their variance from there."""
    before, m, factor = prior_variances(q), q.m.clone(), q.factor.clone()
    ends, share = [], None
    for sign in (1, -1):
        move(sign * h)
        grown = prior_variances(q) / before
        share = grown.log() / (sign * h)
        q.m.copy_(m / grown.sqrt())
        q.factor.copy_(factor / grown.sqrt())
        ends.append(-float(q.kl()))
        move(-sign * h)
        q.m.copy_(m)
        q.factor.copy_(factor)
    assert share is not None
    return (ends[0] - ends[1]) / (2 * h), share.round()


def ratio(energy: Any, determined: Any, prior: float) -> np.ndarray:
    found = (np.asarray(energy) + prior) / (np.asarray(determined) + prior)
    return found.clip(1 / LARGEST_FACTOR, LARGEST_FACTOR)


each_kernel = pytest.mark.parametrize("kernel", ["columns", "both"])
each_basis = pytest.mark.parametrize("contrast", [False, True], ids=["labels", "contrasts"])


@each_basis
@torch.no_grad()
def test_derivatives_are_half_of_what_is_spent_less_what_is_determined(contrast: bool) -> None:
    q = weighted(contrast).posterior.node
    largest = 0.0
    for name, _, move in hyper_parameters(q):
        slope, share = slope_and_share(q, move)
        assert share.sum() > 0, name
        energy = float((share * q.m.square()).sum())
        determined = float((share * (1 - q.factor.square())).sum())
        assert slope == pytest.approx((energy - determined) / 2, abs=1e-7), name
        largest = max(largest, abs(slope))
    assert largest > 1


@each_kernel
@each_basis
@torch.no_grad()
def test_a_step_is_the_ratio_of_energy_to_what_is_determined(contrast: bool, kernel: str) -> None:
    """Functions, then groups, then features; each finds spent what the ones before have left."""
    problem = weighted(contrast, kernel)
    q = problem.posterior.node
    parts = q.kernel.kernels if kernel == "both" else [q.kernel]
    old = [(p.log_scale.clone(), p.log_relevance.clone()) for p in parts]
    basis, left = q.basis.clone(), q.m.square().clone()
    found = [(name, i, *slope_and_share(q, move)) for name, i, move in hyper_parameters(q)]

    def determined(slope: float, share: Tensor) -> float:
        """E - 2 dF."""
        return float((share * q.m.square()).sum()) - 2 * slope

    expected: dict[tuple[str, int], list[float]] = {}
    steps = {"axis": AXIS_PRIOR_COUNT, "log_scale": PRIOR_COUNT}
    for kind, prior in steps.items():
        for name, i, slope, share in found:
            if name == kind:
                growth = float(ratio((share * left).sum(), determined(slope, share), prior))
                expected.setdefault((name, i), []).append(growth)
                left = left / torch.where(share > 0, growth, 1)
    relevances: list[list[float]] = [[] for _ in parts]
    for name, i, slope, share in found:
        if name == "log_relevance":
            before = float(old[i][1][len(relevances[i])].exp())
            nu = parts[i].tails
            new = nu + before * float((share * left).sum())
            new = new / (nu + determined(slope, share))
            new = float(np.clip(new, before / LARGEST_FACTOR, before * LARGEST_FACTOR))
            relevances[i].append(new)
    learn(problem)

    for i, (part, (scale, _)) in enumerate(zip(parts, old, strict=True)):
        change = (part.log_scale - scale).exp()
        np.testing.assert_allclose(change, expected["log_scale", i], rtol=1e-6)
        np.testing.assert_allclose(part.log_relevance.exp(), relevances[i], rtol=1e-6)
    largest = max(abs(g - 1) for (name, _), all_ in expected.items() for g in all_)
    assert largest > 0.1
    grown = q.basis / basis
    if contrast:
        axes = np.sqrt(expected["axis", 0])
        np.testing.assert_allclose(grown, np.broadcast_to(axes, grown.shape), rtol=1e-6)
        assert np.abs(axes - 1).max() > 0.05
    else:
        assert torch.equal(q.basis, basis)


@each_kernel
@each_basis
@torch.no_grad()
def test_a_step_keeps_the_weights_and_what_the_data_says(contrast: bool, kernel: str) -> None:
    """Means stay to the last digit; precisions change by what the prior's do."""
    problem = weighted(contrast, kernel)
    q = problem.posterior.node
    before, mean = prior_variances(q), q.gaussian(problem.conditional(0)[0])[0][0] @ q.basis.T
    beta = q.basis[:, :, None] * weight_variances(q.kernel).sqrt() * q.m
    precision = 1 / (before * q.factor.square())
    learn(problem)
    after = prior_variances(q)
    assert (after / before).log().abs().max() > 0.1
    found = q.basis[:, :, None] * weight_variances(q.kernel).sqrt() * q.m
    torch.testing.assert_close(found, beta)
    told = 1 / (after * q.factor.square()) - 1 / after
    torch.testing.assert_close(told, precision - 1 / before)
    # What is kept of each batch is under the new kernel.
    here = problem.conditional(0)[0]
    torch.testing.assert_close(here.prior_sd, weight_variances(q.kernel).sqrt())
    found = q.gaussian(here)[0][0] @ q.basis.T
    torch.testing.assert_close(found, mean)


@each_basis
@torch.no_grad()
def test_what_nothing_determines_stays(contrast: bool) -> None:
    """Scales where they are; a relevance is as its prior has it, or as near as one step takes it."""
    problem = weighted(contrast)
    q = problem.posterior.node
    q.m.zero_()
    q.factor.fill_(1.0)
    first, second = q.kernel.kernels
    second.log_relevance[0] = np.log(3 * LARGEST_FACTOR)
    second.log_relevance[1] = -np.log(3 * LARGEST_FACTOR)
    scales, basis = [p.log_scale.clone() for p in (first, second)], q.basis.clone()
    learn(problem)
    for part, scale in zip((first, second), scales, strict=True):
        torch.testing.assert_close(part.log_scale, scale)
    torch.testing.assert_close(q.basis, basis)
    expected = torch.tensor([3.0, 1 / 3, 1, 1], dtype=torch.float64)
    torch.testing.assert_close(second.log_relevance.exp(), expected)
    torch.testing.assert_close(first.log_relevance, torch.zeros_like(first.log_relevance))
    assert not q.m.any()
    torch.testing.assert_close(q.factor, torch.ones_like(q.factor))


@torch.no_grad()
def test_what_is_spent_as_it_is_determined_stays() -> None:
    problem = weighted(True)
    q = problem.posterior.node
    q.m[:] = (1 - q.factor.square()).sqrt()
    for part in q.kernel.kernels:
        part.log_relevance.zero_()
    before = {name: p.clone() for name, p in q.state_dict().items()}
    learn(problem)
    for name, p in q.state_dict().items():
        expected = before[name].abs() if name == "factor" else before[name]
        torch.testing.assert_close(p, expected, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_no_step_is_longer_than_the_longest(size: float) -> None:
    problem = weighted(False)
    q = problem.posterior.node
    q.m *= size
    q.factor.mul_(0.01)
    before = [p.clone() for p in q.kernel.parameters()]
    learn(problem)
    moved = [(p - b).exp() for p, b in zip(q.kernel.parameters(), before, strict=True)]
    assert max(float(p.max()) for p in moved) <= LARGEST_FACTOR * (1 + 1e-9)
    assert min(float(p.min()) for p in moved) >= (1 - 1e-9) / LARGEST_FACTOR
    assert q.m.isfinite().all()
    assert (q.factor > 0).all()
    # A thousand times the prior is more than a step's worth everywhere.
    if size > 1:
        for part in q.kernel.kernels:
            assert part.log_scale.isfinite().all()
        torch.testing.assert_close(moved[0], torch.full_like(moved[0], LARGEST_FACTOR))


def long_problem() -> Problem:
    data = generate(30, n_labels=V, mean_length=5, n_templates=2, n_values=8, strength=2.0, seed=0)
    encoder = FeatureEncoder().fit(data.X)
    rows = encoder.transform(data.X)
    labels = LabelEncoder(list(data.chain.labels)).transform(data.y)
    kernel = build_kernel("relevance", encoder.blocks, torch.from_numpy(np.concatenate(rows)))
    counts = torch.from_numpy(np.bincount(np.concatenate(labels), minlength=V))
    node = Weights(kernel.requires_grad_(False), (V,), contrasts(counts))
    q = Posterior({"node": node, "next": Table((V, V))})
    return Problem(q, Chain(), make_batches(rows, labels, encoder.pad_row, 1000))


def test_learning_raises_the_bound(cases: ModuleType) -> None:
    """Round after round on its own draws, and in the end on draws that nothing was fitted to, which say
    nearly the same."""
    fixed, learned = long_problem(), long_problem()
    cases.finish(SecondOrder(learn_scales="transitions"), fixed)
    optimizer = SecondOrder(learning_tolerance=0.0, learning_rounds=5, tolerance=1e-3)
    steps = cases.finish(optimizer, learned)
    bounds = [step.elbo for step in steps]
    assert len(bounds) > 5
    assert all(b > a - 0.05 for a, b in pairwise(bounds))
    assert bounds[4] > bounds[0] + 1.5
    found, other = (cases.many_draw_bound(problem, 400) for problem in (learned, fixed))
    assert found > other + 1.5
    assert abs(found - bounds[-1]) / learned.n_sequences < 0.04
