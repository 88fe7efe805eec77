"""Every estimator against quadrature: unbiased in every parameter, honest about its variance, and in the
order of variance that each was made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from structgp.data.batch import Batch
from structgp.gp import FullTable, Inducing, Mixture, Posterior, Table
from structgp.inference import Problem
from structgp.inference.estimators import (
    Estimate,
    Estimator,
    Moments,
    Noise,
    Pathwise,
    PathwiseSurrogate,
    Surrogate,
    Target,
)
from structgp.inference.estimators.moments import Group, combine
from structgp.inference.latents import Latents
from structgp.paper import Score
from structgp.structures import Chain, Structure

ESTIMATORS: dict[str, Estimator] = {
    made.name: made
    for made in (
        Pathwise(),
        PathwiseSurrogate(more=256),
        Score("score", "iid", "none"),
        Score("control-variate", "iid", "control-variate"),
        Score("leave-one-out", "iid", "mean"),
        Score("antithetic-orthogonal", "orthogonal", "mean"),
        Score("sobol", "sobol", "mean"),
        Surrogate("surrogate-piecewise", "piecewise", uses_memory=False),
        Surrogate("surrogate-quadratic", None, uses_memory=True),
        Surrogate("surrogate", "composite", uses_memory=True),
    )
}

FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "one full": ({}, False),
    "one diagonal": ({"covariance": "diagonal"}, True),
    "two full": ({"n_components": 2}, True),
    "two diagonal": ({"n_components": 2, "covariance": "diagonal"}, False),
}
"""Options of the node block, and whether the table has a full covariance."""

MEMORIES = ("nothing", "near", "wrong")

KINDS = [
    (name, memory)
    for name, estimator in ESTIMATORS.items()
    for memory in (MEMORIES if estimator.uses_memory else MEMORIES[:1])
]
"""Every estimator; those with a memory without one, with a good one and with nonsense."""

every_kind = pytest.mark.parametrize(("name", "memory"), KINDS)


class Doubtful(Structure):
    """The chain, but one labelling in five comes from nowhere: neither concave nor composed of parts."""

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        count = float(f.shape[-1]) ** mask.sum(-1)
        return doubt(Chain().log_prob(f, g, y, mask), count)


def doubt(log_p: Tensor, count: Tensor | int) -> Tensor:
    return torch.log(0.8 * log_p.exp() + 0.2 / count)


STRUCTURES: dict[str, tuple[Structure, dict[str, Any]]] = {
    "chain": (Chain(), {}),
    "doubtful": (Doubtful(), {"of": doubt}),
}
"""Likelihoods, and how quadrature gets theirs from the chain's."""


@dataclass(frozen=True)
class Case:
    problem: Problem
    latent: Latents
    target: Target

    @property
    def parameters(self) -> dict[str, Tensor]:
        """All that the expected log-likelihood has a gradient in."""
        return dict(self.problem.posterior.named_parameters())


@cache
def make_case(form: str, structure: str = "chain", parts: str | None = None) -> Case:
    """Two sequences, of 3 and of 2 positions, two labels, somewhere away from the prior."""
    generator = torch.Generator().manual_seed(3)
    x = 1.5 * torch.randn(2, 3, 1, generator=generator, dtype=torch.float64)
    y, mask = torch.tensor([[1, 0, 0], [1, 1, 0]]), torch.arange(3) < torch.tensor([[3], [2]])
    inducing = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    options, full = FORMS[form]
    family: Any = Mixture if "n_components" in options else Inducing
    node = family(RBFKernel().double(), inducing, (2,), **options)
    posterior = Posterior({"node": node, "next": (FullTable if full else Table)((2, 2), 0.8)})
    with torch.no_grad():
        for name, p in posterior.named_parameters():
            if "next.log_amplitude" not in name:
                p += 0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    estimator = next(e for e in ESTIMATORS.values() if e.parts == parts)
    batch = Batch(x, y, mask, torch.arange(2))
    problem = Problem(posterior, STRUCTURES[structure][0], [batch], estimator)
    latent = problem.latents(0, move_kernel=True)
    return Case(problem, latent, problem.target(0, latent))


def case_for(name: str, form: str, structure: str = "chain") -> Case:
    return make_case(form, structure, ESTIMATORS[name].parts)


MADE: dict[tuple[int, str], tuple[Target, Moments]] = {}
"""Memories by the target they are of, which is kept so that its id stays its own."""


def memory_of(target: Target, kind: str) -> Moments | None:
    """'near': as good as 4,000 pathwise draws know. 'wrong': large numbers of no meaning."""
    if kind == "nothing":
        return None
    if (id(target), "near") not in MADE:
        near = ESTIMATORS["pathwise"].with_draws(4000)(target, torch.Generator().manual_seed(5)).moments
        generator = torch.Generator().manual_seed(6)
        noise = near.map(lambda a: 5 * torch.randn(a.shape, generator=generator, dtype=a.dtype))
        bends = tuple(bend if bend.dim() == 1 else bend + bend.mT for bend in noise.bends)
        MADE[id(target), "near"] = target, near
        MADE[id(target), "wrong"] = target, Moments(noise.value, noise.slopes, bends)
    return MADE[id(target), kind][1]


def mask_of(target: Target) -> Tensor:
    """(K B, T)."""
    mask = target.groups[0].mask
    assert mask is not None
    return mask


def repeat(
    estimator: Estimator, case: Case, memory: Moments | None, times: int, seed: int = 0
) -> Iterator[Estimate]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(times):
        yield estimator(case.target, generator, memory)


def flat(moments: Moments) -> Tensor:
    """All entries but those of padding, which are 0 and have no variance."""
    return torch.cat([a.flatten() for a in moments.entries])


def make(name: str) -> Estimator:
    return ESTIMATORS[name].with_draws(DRAWS.get(name, 256))


DRAWS = {"pathwise": 16, "surrogate": 64, "surrogate-piecewise": 128}
"""An estimate has so many draws in these tests; 256 unless told."""


# -- expectation -----------------------------------------------------------------------------------


@cache
def quadrature(oracles: ModuleType, form: str, structure: str) -> tuple[Tensor, list[Tensor]]:
    """(K, B) expectations, and the gradient of their sum in every parameter."""
    case = make_case(form, structure)
    posterior, batch = case.problem.posterior, case.problem.batches[0]
    exact = oracles.expected_log_prob(posterior, batch.x, batch.y, batch.mask, **STRUCTURES[structure][1])
    total = (posterior.mixing @ exact).sum()
    return exact.detach(), list(torch.autograd.grad(total, list(case.parameters.values())))


PARTLY = [name for name in ESTIMATORS if name.startswith(("pathwise", "surrogate"))]
"""Those that ask a likelihood for more than values, or put something in its place."""

UNBIASED = [
    *((name, memory, "two full", "chain") for name, memory in KINDS),
    *((name, "nothing", "one diagonal", "doubtful") for name in [*PARTLY, "score"]),
    ("pathwise", "nothing", "two diagonal", "chain"),
    ("score", "nothing", "one full", "chain"),
]
"""Every kind on a mixture; on one Gaussian and a likelihood that is not concave, scores once: their points
and what is subtracted from them do not depend on it."""


@pytest.mark.parametrize(("name", "memory", "form", "structure"), UNBIASED)
def test_gradients_are_unbiased_in_every_parameter(
    name: str, memory: str, form: str, structure: str, oracles: ModuleType
) -> None:
    """Independent estimates, carried to the parameters: each entry of their mean is within four standard
    errors of what quadrature says. By chance an entry is not once in 8,000; seeds are fixed.

    The standard errors are small enough for that to mean something: all together, a third of the gradient's
    length with raw scores, a fifth with other values, a tenth where there are derivatives or stand-ins."""
    case = case_for(name, form, structure)
    posterior = case.problem.posterior
    about, parameters = memory_of(case.target, memory), list(case.parameters.values())
    exact, wanted = quadrature(oracles, form, structure)
    found, values = [], []
    made = make(name)
    if name == "pathwise" and posterior.n_components > 1:
        made = made.with_draws(40)  # whose points are at right angles
    times = 40 if name == "pathwise-surrogate" else 30 if "surrogate" in name else 50
    for estimate in repeat(made, case, about, times):
        total = case.latent.expand(estimate.moments, posterior.mixing)
        found.append(torch.autograd.grad(total, parameters, retain_graph=True))
        values.append(estimate.moments.value.reshape(exact.shape))
    close = name == "pathwise" or ESTIMATORS[name].parts is not None
    share = 0.1 if close else 0.35 if name == "score" else 0.2
    errors = []
    for parameter, expected, *samples in zip(case.parameters, wanted, *found, strict=True):
        errors.append(standard_error(samples))
        away = torch.stack(samples).mean(0) - expected
        assert (away.abs() <= 4 * errors[-1] + 1e-9).all(), parameter
    if structure == "chain":
        assert length(errors) < share * length(wanted)
    away = torch.stack(values).mean(0) - exact
    assert (away.abs() <= 4 * standard_error(values) + 1e-4).all()


def length(parts: Sequence[Tensor]) -> float:
    return float(torch.cat([p.flatten() for p in parts]).norm())


def standard_error(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples).std(0) / len(samples) ** 0.5


def test_quadrature_has_converged(oracles: ModuleType) -> None:
    """To a hundredth of the standard errors above."""
    case = make_case("two full")
    posterior, batch = case.problem.posterior, case.problem.batches[0]
    answers = []
    for nodes in (18, 22):
        value = oracles.expected_log_prob(posterior, batch.x, batch.y, batch.mask, nodes=nodes)
        total = (posterior.mixing @ value).sum()
        answers.append([total, *torch.autograd.grad(total, list(case.parameters.values()))])
    for one, other in zip(*answers, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("name", "memory"), [k for k in KINDS if k[1] != "near"])
def test_a_silent_table_has_no_gradient(name: str, memory: str, oracles: ModuleType) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 2, 1, generator=generator, dtype=torch.float64)
    batch = Batch(x, torch.tensor([[1, 0]]), torch.ones(1, 2, dtype=torch.bool), torch.arange(1))
    node, table = Inducing(RBFKernel().double(), x[0] + 0.3, (2,)), Table((2, 2), sd=0.0)
    posterior = Posterior({"node": node, "next": table})
    with torch.no_grad():
        node.m += torch.tensor([[0.5, -0.2], [0.1, 0.4]])
    problem = Problem(posterior, Chain(), [batch], ESTIMATORS[name].with_draws(256))
    latent = problem.latents(0)
    target = problem.target(0, latent)
    case = Case(problem, latent, target)
    samples = []
    for estimate in repeat(problem.estimator, case, memory_of(case.target, memory), 12):
        total = latent.expand(estimate.moments, posterior.mixing)
        of = node.m, node.factor, table.m, table.factor
        found = torch.autograd.grad(total, of, retain_graph=True, allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in found)
        assert all(g is None or (g == 0).all() for g in found[2:])
        samples.append(found[0])
    exact = oracles.expected_log_prob(posterior, batch.x, batch.y, batch.mask)
    (wanted,) = torch.autograd.grad(exact.sum(), node.m)
    away = torch.stack(samples).mean(0) - wanted
    assert (away.abs() <= 4 * standard_error(samples) + 1e-7).all()


# -- variance --------------------------------------------------------------------------------------


def toy() -> Target:
    """Cheap: three sequences of at most two positions, weighed unequally, and two stand-ins of which one is
    good."""
    generator = torch.Generator().manual_seed(8)
    a, b = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((3, 2, 2), (4,)))
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    a = a * mask[..., None]

    def along(noise: Noise) -> Tensor:
        own, shared = noise
        return (own * a).sum((-1, -2)) + (shared * b).sum(-1)[:, None]

    def log_prob(noise: Noise) -> Tensor:
        own, shared = noise
        products = shared.unflatten(-1, (2, 2)).prod(-1).sum(-1)
        bent = (own.square() * mask[..., None]).sum((-1, -2)) + products[:, None]
        return -3 - torch.nn.functional.softplus(along(noise) + 0.7) - 0.1 * bent

    def parts(noise: Noise) -> Tensor:
        z = along(noise)
        return torch.stack([torch.sigmoid(z) - 0.3 * z, noise[0].sum((-1, -2)).sin()], -1)

    weight = torch.tensor([0.5, 1.0, 0.2], dtype=torch.float64)
    return Target(log_prob, (Group(mask, 2), Group(None, 4, True)), weight, parts)


@pytest.mark.slow
@every_kind
def test_the_reported_variance_is_honest(name: str, memory: str) -> None:
    """Over 120 estimates of 130 draws, the variance that was seen over the mean of those that were reported
    is between 0.7 and 1.4, summed over the entries of each kind."""
    target = toy()
    made, generator = ESTIMATORS[name].with_draws(130), torch.Generator().manual_seed(2)
    about = memory_of(target, memory)
    estimates = [made(target, generator, about) for _ in range(120)]
    every = zip(
        *(e.moments.entries for e in estimates), *(e.variance.entries for e in estimates), strict=True
    )
    for kind, entries in enumerate(every):
        seen = torch.stack(entries[: len(estimates)]).var(0).sum()
        told = torch.stack(entries[len(estimates) :]).mean(0).sum()
        assert 0.7 < float(seen / told) < 1.4, kind


@cache
def total_variance(name: str, memory: str = "nothing", draws: int = 256) -> dict[str, float]:
    """Of each kind of entry, summed, seen over 60 estimates, or 30 of the most expensive."""
    case = case_for(name, "one full")
    made = ESTIMATORS[name].with_draws(draws)
    times = 30 if name == "surrogate" else 60
    estimates = list(repeat(made, case, memory_of(case.target, memory), times))
    kinds = "value", "slope", "table slope", "bend", "table bend"
    columns = zip(*(e.moments.entries for e in estimates), strict=True)
    found = {k: float(torch.stack(c).var(0).sum()) for k, c in zip(kinds, columns, strict=True)}
    return {kind: variance for kind, variance in found.items() if kind != "value"}


@pytest.mark.slow
def test_the_order_of_variances() -> None:
    """At 256 draws each: raw scores are worst; the paper's control variate and leave-one-out do the same,
    but for the tenth of the draws that the first spends and the noise of what it learns from them;
    stand-ins leave a tenth of that, and pathwise a tenth or less again of the slope."""
    raw = total_variance("score")
    control, loo = total_variance("control-variate"), total_variance("leave-one-out")
    parts, path = total_variance("surrogate"), total_variance("pathwise")
    for kind in raw:
        assert raw[kind] > 1.4 * control[kind], kind
        assert 0.9 < control[kind] / loo[kind] < 1.7, kind
        assert parts[kind] < 0.1 * loo[kind], kind
        assert path[kind] < parts[kind], kind
    assert path["slope"] < 0.02 * loo["slope"]


@pytest.mark.slow
def test_better_points_have_less_variance() -> None:
    """Mirror images take the odd part of l out of the bend, right angles its mean; Sobol points help a
    little with everything."""
    loo, sobol = total_variance("leave-one-out"), total_variance("sobol")
    assert total_variance("antithetic-orthogonal")["bend"] < 0.5 * loo["bend"]
    assert sobol["slope"] < 0.9 * loo["slope"]
    assert sobol["bend"] < loo["bend"]


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if e.uses_memory])
def test_a_good_memory_helps_and_a_wrong_one_does_little_harm(name: str) -> None:
    """Beside good stand-ins there is little left for a memory to do."""
    none, near, wrong = (total_variance(name, memory) for memory in MEMORIES)
    for kind in ("slope", "bend"):
        assert near[kind] < (0.4 if name == "surrogate-quadratic" else 1.05) * none[kind], kind
        assert wrong[kind] < 1.2 * none[kind], kind


# -- what else an estimate says ----------------------------------------------------------------------


@every_kind
def test_every_likelihood_counts(name: str, memory: str) -> None:
    case = case_for(name, "two full")
    seen: list[Tensor] = []
    target = counting(case.target, seen)
    estimate = make(name)(target, torch.Generator().manual_seed(0), memory_of(case.target, memory))
    every = torch.cat(seen)
    assert estimate.evaluations == every.numel() == 4 * DRAWS.get(name, 256)
    torch.testing.assert_close(estimate.moments.value, every.mean(0))
    everything = (estimate.moments, estimate.variance)
    assert not any(a.requires_grad for m in everything for a in m.entries)


def counting(target: Target, seen: list[Tensor]) -> Target:
    def log_prob(noise: Noise) -> Tensor:
        values = target.log_prob(noise)
        seen.append(values.detach())
        return values

    return replace(target, log_prob=log_prob)


@every_kind
def test_same_seed_same_estimate(name: str, memory: str) -> None:
    case = case_for(name, "one diagonal")
    about = memory_of(case.target, memory)
    one, other = (next(repeat(make(name), case, about, 1, seed=4)) for _ in range(2))
    third = next(repeat(make(name), case, about, 1, seed=5))
    assert torch.equal(flat(one.moments), flat(other.moments))
    assert not torch.equal(flat(one.moments), flat(third.moments))


@pytest.mark.parametrize("n_draws", [1, 3, 11])
@every_kind
def test_few_draws(name: str, memory: str, n_draws: int) -> None:
    """The estimate is finite however few there are; one replicate has no variance to report."""
    case = case_for(name, "two full")
    made = ESTIMATORS[name].with_draws(n_draws)
    assert made.n_draws == n_draws
    assert made.name == name
    (estimate,) = repeat(made, case, memory_of(case.target, memory), 1)
    assert flat(estimate.moments).isfinite().all()
    slope = estimate.variance.slopes[0][mask_of(case.target)]
    if n_draws == 1:
        assert slope.isnan().all()
    elif n_draws >= 5:
        assert (slope > 0).all()


@every_kind
def test_a_component_without_weight_is_no_harm(name: str, memory: str) -> None:
    """Weights underflow before a component is gone."""
    whole = case_for(name, "two full")
    about, target = memory_of(whole.target, memory), whole.target
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    target = replace(target, weight=weight)
    estimate = make(name)(target, torch.Generator().manual_seed(0), about)
    assert flat(estimate.moments).isfinite().all()
    posterior = whole.problem.posterior
    total = whole.latent.expand(estimate.moments, weight[::2])
    found = torch.autograd.grad(total, posterior.node.m, retain_graph=True)[0]
    assert found.isfinite().all()
    assert (found[1] == 0).all()


@every_kind
def test_padding_counts_for_nothing(name: str, memory: str) -> None:
    case = case_for(name, "two full")
    (estimate,) = repeat(make(name), case, memory_of(case.target, memory), 1)
    off = ~mask_of(case.target)
    for m in (estimate.moments, estimate.variance):
        assert (m.slopes[0][off] == 0).all()
        assert (m.bends[0].transpose(1, 2)[off] == 0).all()
        assert (m.bends[0].permute(0, 3, 1, 2)[off] == 0).all()


@every_kind
def test_float32(name: str, memory: str) -> None:
    """A target of single precision gets single precision numbers."""
    case = case_for(name, "one full")
    t = case.target

    def narrow(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(noise: Noise) -> Tensor:
            assert {eps.dtype for eps in noise} == {torch.float32}
            return function(noise)

        return call

    parts = None if t.parts is None else narrow(t.parts)
    target = replace(t, log_prob=narrow(t.log_prob), parts=parts, dtype=torch.float32)
    about = memory_of(case.target, memory)
    estimate = make(name)(target, torch.Generator().manual_seed(0), about)
    assert estimate.moments.slopes[0].dtype == torch.float32
    assert flat(estimate.moments).isfinite().all()


# -- gradients, and parts of an estimate -----------------------------------------------------------


def test_only_pathwise_needs_a_gradient() -> None:
    """The others work where autograd finds nothing."""
    t = make_case("one full", parts="composite").target
    target = replace(t, log_prob=lambda noise: t.log_prob(noise).detach())
    for name, estimator in ESTIMATORS.items():
        assert estimator.needs_gradient == (name.startswith("pathwise"))
        if not estimator.needs_gradient:
            estimate = estimator.with_draws(64)(target, torch.Generator().manual_seed(0))
            assert (estimate.moments.slopes[0][mask_of(t)] != 0).all(), name


def test_combine_weighs_by_size() -> None:
    """And the variance of the mean of n equal ones is the textbook's s^2 / n."""
    generator = torch.Generator().manual_seed(0)
    case = make_case("one full")
    like = next(repeat(make("score"), case, None, 1)).moments
    parts = [like.map(lambda a: torch.randn(a.shape, generator=generator, dtype=a.dtype)) for _ in range(5)]
    mean, variance = combine(parts, [4] * 5)
    stacked = torch.stack([flat(p) for p in parts])
    torch.testing.assert_close(flat(mean), stacked.mean(0))
    torch.testing.assert_close(flat(variance), stacked.var(0) / 5)
    mean, _ = combine(parts[:2], [1, 3])
    torch.testing.assert_close(flat(mean), 0.25 * stacked[0] + 0.75 * stacked[1])
    mean, variance = combine(parts[:1], [7])
    assert torch.equal(flat(mean), stacked[0])
    assert flat(variance).isnan().all()


def test_combine_is_unbiased_about_unequal_sizes() -> None:
    """20,000 times three replicates of 1, 2 and 3 draws: the mean of the reported variances is the variance
    of the mean of all six, to 3 %."""
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(6, 20_000, generator=generator, dtype=torch.float64)
    groups = [g.mean(0) for g in draws.split([1, 2, 3])]
    parts = [Moments(g, (), ()) for g in groups]
    mean, variance = combine(parts, [1, 2, 3])
    torch.testing.assert_close(mean.value, draws.mean(0))
    assert float(variance.value.mean()) == pytest.approx(1 / 6, rel=0.03)
