"""Tiny problems, and a likelihood under which the answer is known: Gaussian regression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from benchmarks.generate import generate
from torch import Tensor

from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder
from structgp.gp import (
    CovarianceForm,
    Entropy,
    FullTable,
    Inducing,
    Mixture,
    Posterior,
    Table,
    choose_inducing,
)
from structgp.gp.kernels.build import build_kernel
from structgp.gp.mean_search import MeanSearch
from structgp.inference import Problem, StepInfo
from structgp.inference.estimators import Estimate, Estimator, Moments, Pathwise, Target
from structgp.inference.estimators.moments import path_moments
from structgp.inference.loop import make_batches
from structgp.inference.second_order import Draws
from structgp.structures import Chain, Structure
from structgp.structures.base import Curvature

LABEL_NOISE = 0.3
AMPLITUDE = 2.0


class Regression(Structure):
    """log p = -sum_tv (f_tv - target_tv)^2 / (2 noise) - sum_ij (g_ij - aim_ij)^2 / 2.

    Quadratic, so one Gaussian is the exact posterior: GP regression of the targets, which a label picks
    from a table."""

    def __init__(self, n_labels: int, noise: float = LABEL_NOISE) -> None:
        generator = torch.Generator().manual_seed(17)
        self.noise = noise
        shape = n_labels, n_labels
        self.table = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.aim = torch.randn(shape, generator=generator, dtype=torch.float64)

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        away = torch.where(mask[..., None], f - self.table[y], 0)
        nodes = -0.5 * away.square().sum((-1, -2)) / self.noise
        return nodes - 0.5 * (g - self.aim).square().sum((-1, -2))[:, None]

    def curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Curvature:
        nodes = torch.diag_embed(mask.double() / self.noise)
        V = f.shape[-1]
        return Curvature(
            nodes[:, None].expand(-1, V, -1, -1), torch.ones_like(self.aim).expand(len(mask), -1, -1)
        )


class RegressionOfTransitions(Structure):
    """log p = -sum_t |g_t - aims[y_t, y_t+1]|^2 / (2 noise) - sum_t |f_t|^2 / 2 over a table (V, V) for
    each transition: GP regression of the tables on the features of the transitions."""

    def __init__(self, n_labels: int) -> None:
        generator = torch.Generator().manual_seed(18)
        self.aims = torch.randn([n_labels] * 4, generator=generator, dtype=torch.float64)

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        away = (g - self.aims[y[:, :-1], y[:, 1:]]) * mask[:, 1:, None, None]
        nodes = (f * mask[..., None]).square().sum((-1, -2))
        return -0.5 * (away.square().sum((-1, -2, -3)) / LABEL_NOISE + nodes)

    def curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Any:
        V = f.shape[-1]
        nodes = torch.diag_embed(mask.double())[:, None].expand(-1, V, -1, -1)
        after = mask[:, 1:, None, None].expand(-1, -1, V, V) / LABEL_NOISE
        return SimpleNamespace(node=nodes, next=after)

    def local_curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Any:
        return _local(self.curvature(f, g, y, mask))


class Enumerated(Structure):
    """The chain by enumeration (``oracles``), with one table or one for each transition."""

    def __init__(self, oracles: Any) -> None:
        self.oracles = oracles

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.oracles.enumerated_log_prob(f, g, y, mask)
        return found

    def curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Any:
        return SimpleNamespace(**self.oracles.enumerated_curvature(f, g, mask))

    def local_curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Any:
        return _local(self.curvature(f, g, y, mask))


def _local(whole: Any) -> Any:
    return SimpleNamespace(node=whole.node.diagonal(dim1=-1, dim2=-2).mT, next=whole.next)


class ValueOnly(Structure):
    """The chain with nothing but what a structure must have; counts what it was asked for."""

    def __init__(self) -> None:
        self.evaluated = 0

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        self.evaluated += f.shape[0] * f.shape[1]
        return Chain().log_prob(f, g, y, mask)


class Counted(ValueOnly):
    """The same with the chain's curvature."""

    def curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Curvature:
        return Chain().curvature(f, g, y, mask)


class Opaque(ValueOnly):
    """The chain as a likelihood that cannot be differentiated."""

    @property
    def has_gradient(self) -> bool:
        return False

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return super().log_prob(f.detach(), g.detach(), y, mask).detach()


@dataclass(frozen=True)
class Exact:
    """No estimate: mean, slope and bend of a likelihood that is quadratic in (f, g).

    Points at +-sqrt(n) along each of the n axes have the first and second moments of a standard normal, and
    of a quadratic nothing else counts."""

    name: str = "exact"
    n_draws: int = 0
    needs_gradient = True
    parts = None
    uses_memory = False

    def with_draws(self, n_draws: int) -> Exact:
        return self

    def __call__(
        self, target: Target, generator: torch.Generator, memory: Moments | None = None
    ) -> Estimate:
        # Examples do not see each other: they may share their points.
        B = len(target.weight)
        counts = [math.prod(g.shape(1)) // (1 if g.mask is None else B) for g in target.groups]
        eye = sum(counts) ** 0.5 * torch.eye(sum(counts), dtype=torch.float64)
        parts = torch.cat([eye, -eye]).split(counts, 1)
        noise = tuple(
            part if g.mask is None else part.view(-1, 1, *g.shape(1)[2:]).repeat(1, B, 1, 1)
            for g, part in zip(target.groups, parts, strict=True)
        )
        moments, values = path_moments(target, noise, target.log_prob)
        none = moments * 0.0
        return Estimate(moments, none, values.numel())


def make_problem(
    structure: Structure | None = None,
    *,
    estimator: Estimator | None = None,
    entropy: Entropy = "bhattacharyya",
    n_components: int = 1,
    covariance: CovarianceForm = "full",
    rank: int = 2,
    full_table: bool = False,
    n_sequences: int = 4,
    n_labels: int = 3,
    mean_length: float = 3,
    n_inducing: int = 6,
    transition_sd: float = 1.0,
    batch_tokens: int = 1000,
    seed: int = 0,
) -> Problem:
    """Sequences of a true chain, tokens of two features with three values each. full_table : whether q of
    the transition scores has a full covariance."""
    data = generate(
        n_sequences,
        n_labels=n_labels,
        mean_length=mean_length,
        n_templates=2,
        n_values=3,
        strength=2.0,
        seed=seed,
    )
    encoder = FeatureEncoder().fit(data.X)
    rows = encoder.transform(data.X)
    labels = LabelEncoder(list(data.chain.labels)).transform(data.y)
    tokens = torch.from_numpy(np.concatenate(rows))
    kernel = build_kernel("template", encoder.blocks, tokens, AMPLITUDE).requires_grad_(False)
    chosen = choose_inducing(kernel, tokens, n_inducing)
    options: dict[str, Any] = {"covariance": covariance, "rank": rank}
    family: Any = Inducing
    if n_components > 1:
        family, options["n_components"] = Mixture, n_components
    node = family(kernel, tokens[chosen.index], (n_labels,), **options)
    table = (FullTable if full_table else Table)((n_labels, n_labels), transition_sd)
    posterior = Posterior({"node": node, "next": table})
    batches = make_batches(rows, labels, encoder.pad_row, batch_tokens)
    return Problem(posterior, structure or Chain(), batches, estimator or Pathwise(), entropy)


def disturb(posterior: Posterior, seed: int = 5) -> None:
    """Moves the posterior somewhere nobody would start from."""
    generator = torch.Generator().manual_seed(seed)

    def noise(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=like.dtype)

    node, table = posterior.node, posterior["next"]
    with torch.no_grad():
        node.m += 0.7 * noise(node.m)
        spread = 0.3 * noise(node.factor)
        form = getattr(node, "form", "diagonal")  # weights have standard deviations
        node.factor += spread.tril() if form == "full" else spread
        if form == "low-rank":
            node.directions += 0.5 * noise(node.directions)
        if not table.is_silent:
            table.m += 0.5 * noise(table.m)
            spread = 0.3 * noise(table.factor)
            table.factor.copy_(
                table.factor + spread.tril() if isinstance(table, FullTable) else spread.exp()
            )
        node.log_amplitude += 0.4
        if node.n_components > 1:
            node.weight_logits += 0.5 * noise(node.weight_logits)


def finish(optimizer: Any, problem: Problem, seed: int = 1, most: int | None = None) -> list[StepInfo]:
    """All steps until the optimiser says that it has finished, or the first so many of them."""
    state = optimizer.start(problem, torch.Generator().manual_seed(seed))
    steps: list[StepInfo] = []
    while not (steps and steps[-1].finished) and len(steps) != most:
        state, info = optimizer.step(problem, state)
        steps.append(info)
    return steps


@torch.no_grad()
def value_and_gradients(draws: Draws) -> tuple[Tensor, list[Tensor]]:
    """The expected log-likelihood at the means as they are, and its gradients in the means."""
    blocks, factors = draws.problem.posterior.blocks, draws.problem.prior_factors
    searches = [MeanSearch(block) for block in blocks]
    for search, factor in zip(searches, factors, strict=True):
        search.move(torch.zeros(search.begin(factor), dtype=search.block.m.dtype))
    return draws.value(searches), [search.gradient for search in searches]


def many_draw_bound(problem: Problem, n_draws: int = 20_000, seed: int = 99) -> float:
    """The bound up to the noise of very many draws, the same ones for every posterior."""
    generator = torch.Generator().manual_seed(seed)
    return problem.fresh_bound(n_draws, generator)


def numbers(posterior: Posterior) -> dict[str, Tensor]:
    """Copies of everything an optimiser may move, or must not, by template: 'node.m', 'next.factor'."""
    return posterior.snapshot()


@dataclass(frozen=True)
class Answer:
    """The Gaussian posterior of ``Regression``: mean and covariance at the N tokens (the same for all
    labels), of the transition scores, and the log-evidence."""

    mean: np.ndarray  # (N, V)
    covariance: np.ndarray  # (N, N)
    transition_mean: np.ndarray  # (V, V)
    transition_sd: float
    log_evidence: float


def exact_regression(problem: Problem) -> Answer:
    """Gaussian process regression from the textbook, on plain arrays."""
    x = np.concatenate([b.x[b.mask].numpy() for b in problem.batches])
    y = np.concatenate([b.y[b.mask].numpy() for b in problem.batches])
    targets = problem.structure.table.numpy()[y]
    N, V = targets.shape
    noise = problem.structure.noise
    K = AMPLITUDE * (x[:, None] == x[None]).mean(-1)
    noisy = K + noise * np.eye(N)
    solved = np.linalg.solve(noisy, targets)
    prior = problem.posterior["next"].prior_sd ** 2
    n = problem.n_sequences
    aim = problem.structure.aim.numpy()
    # exp(log_prob) is a Gaussian density in the targets but for its constant; the n equal targets of a
    # transition score are one target of variance 1 / n.
    nodes = -0.5 * (targets * solved).sum() - 0.5 * V * (np.linalg.slogdet(noisy)[1] - N * np.log(noise))
    transitions = -0.5 * (aim**2 / (prior + 1 / n) + np.log1p(n * prior)).sum()
    return Answer(
        K @ solved,
        K - K @ np.linalg.solve(noisy, K),
        aim * n / (n + 1 / prior),
        (n + 1 / prior) ** -0.5,
        float(nodes + transitions),
    )


def at_tokens(problem: Problem) -> tuple[np.ndarray, list[np.ndarray]]:
    """Means (N, V) at all tokens, and the covariance (V, T, T) of each sequence, in their order."""
    means, covariances = [], []
    with torch.no_grad():
        for i, batch in enumerate(problem.batches):
            mean, covariances_here = problem.posterior.node.gaussian(problem.conditional(i)[0])
            means.append(mean[0][batch.mask].numpy())
            covariance = covariances_here[0].numpy()
            for b, T in enumerate(batch.mask.sum(-1).tolist()):
                covariances.append(covariance[b, :, :T, :T])
    return np.concatenate(means), covariances
