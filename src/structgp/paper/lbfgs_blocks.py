"""The paper's batch schedule: L-BFGS over blocks of parameters, one block after the other.

A global iteration gives the node block (inducing means and covariances, mixture weights) 50 steps of
L-BFGS, the transition block 10, the hyper-parameters 5. Every evaluation uses the same draws, so that
L-BFGS sees a function and not noise. The schedule ends when two global iterations in a row have the same
objective, when the parameters of the nodes stop moving, or when the time is up; the best parameters seen at
the end of a block are kept.

With score estimates, the gradient is not exactly that of the value on the same draws, and a line search may
find no step that improves. That ends a block, and if it ends all of them, the objective no longer changes.
Convergence then means only that L-BFGS can get no further with that many draws."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structgp.gp import Posterior
from structgp.inference.lbfgs import minimize
from structgp.inference.problem import LearnScales, Problem, StepInfo, hyper_parameters, open_low_rank
from structgp.paper.mixture_fit import SPREAD


@dataclass
class LbfgsBlocksState:
    """seed : that of the draws. best, best_elbo : the parameters with the highest objective, and this
    objective. elbo : the objective after the last global iteration."""

    seed: int
    best: dict[str, Tensor]
    began: float = field(metadata={"clock": True})
    best_elbo: float = -math.inf
    elbo: float = -math.inf
    iteration: int = 0


@dataclass(frozen=True)
class LbfgsBlocks:
    """L-BFGS over blocks; the defaults are the paper's.

    Parameters
    ----------
    node_steps, transition_steps, hyper_steps : L-BFGS iterations of each block per global iteration.
    objective_tolerance : stop when the objective changes by less between two global iterations.
    parameter_tolerance : stop when the parameters of the nodes change by less on average, both the means
        and the diagonals of the covariance factors. Off-diagonal entries hardly move, and there are so many
        of them that an average over all entries would always be small.
    max_seconds, max_iterations : stop here at the latest; the time is checked between blocks, and between
        the evaluations within a block.
    learn_scales : which hyper-parameters form the last block; 'all' is the paper's choice.
    gradient, n_draws : name and draws of the gradient estimator, which ``structgp.plan`` chooses."""

    node_steps: int = 50
    transition_steps: int = 10
    hyper_steps: int = 5
    objective_tolerance: float = 1e-5
    parameter_tolerance: float = 1e-3
    max_seconds: float = 5.5 * 3600
    max_iterations: int = 1000
    learn_scales: LearnScales = "all"
    gradient: str = "auto"
    n_draws: int | None = None
    name: str = "lbfgs"

    def start(self, problem: Problem, generator: torch.Generator) -> LbfgsBlocksState:
        seed = int(torch.randint(2**31, (), generator=generator))
        open_low_rank(problem)
        if problem.posterior.n_components > 1:
            problem.posterior.node.separate(generator, SPREAD)
        return LbfgsBlocksState(seed, problem.posterior.snapshot(), time.monotonic())

    def step(self, problem: Problem, state: LbfgsBlocksState) -> tuple[LbfgsBlocksState, StepInfo]:
        """One global iteration: 65 L-BFGS steps, each with one or more evaluations of the bound."""
        q, evaluations = problem.posterior, 0
        before = _places(q)
        for parameters, steps, moves in self._blocks(problem):
            if not parameters or self._is_late(state):
                continue
            elbo, count = self._climb(problem, state, parameters, steps, moves)
            evaluations += count
            if elbo > state.best_elbo:
                state.best, state.best_elbo = q.snapshot(), elbo
        changed = max(float((a - b).abs().mean()) for a, b in zip(before, _places(q), strict=True))
        settled = abs(state.best_elbo - state.elbo) < self.objective_tolerance
        state.elbo, state.iteration = state.best_elbo, state.iteration + 1
        late = self._is_late(state)
        converged = (settled or changed < self.parameter_tolerance) and not late
        finished = converged or late or state.iteration >= self.max_iterations
        if finished:
            q.load_state_dict(state.best)
            problem.refresh()
        return state, StepInfo(state.iteration - 1, state.elbo, evaluations, finished, converged)

    def _is_late(self, state: LbfgsBlocksState) -> bool:
        return time.monotonic() - state.began > self.max_seconds

    def _blocks(self, problem: Problem) -> list[tuple[list[torch.nn.Parameter], int, bool]]:
        """For each block, its parameters, its number of steps, and whether the kernel moves with it."""
        q = problem.posterior
        node, *tables = ([*block.mean_parameters(), *block.spread_parameters()] for block in q.blocks)
        return [
            (node, self.node_steps, False),
            ([p for table in tables for p in table], self.transition_steps, False),
            (hyper_parameters(q, self.learn_scales), self.hyper_steps, self.learn_scales == "all"),
        ]

    def _climb(
        self,
        problem: Problem,
        state: LbfgsBlocksState,
        parameters: list[torch.nn.Parameter],
        steps: int,
        move_kernel: bool,
    ) -> tuple[float, int]:
        """Runs L-BFGS on one block with the others held fixed. Returns the bound reached and the number of
        likelihoods computed."""
        count, node = 0, problem.posterior.node
        lower = [p is node.factor and node.form == "full" for p in parameters]
        start = _flatten([p.detach() for p in parameters], lower)
        best_value, best_flat = math.inf, start

        def negative(flat: Tensor) -> tuple[float, Tensor]:
            nonlocal count, best_value, best_flat
            _unflatten(flat, parameters, lower)
            try:
                found = _value_and_gradients(problem, parameters, state.seed, move_kernel)
            except torch.linalg.LinAlgError:
                # The step was so long that the bound cannot be computed there.
                return 1e300, torch.zeros_like(flat)
            value, grads, evaluations = found
            count += evaluations
            if not math.isfinite(value):
                return 1e300, torch.zeros_like(flat)
            if -value < best_value:
                best_value, best_flat = -value, flat.clone()
            if self._is_late(state):
                raise _OutOfTimeError
            return -value, -_flatten(grads, lower)

        with contextlib.suppress(_OutOfTimeError):
            minimize(negative, start, steps=steps, memory=10)
        _unflatten(best_flat, parameters, lower)
        if move_kernel:
            problem.refresh()
        return -best_value, count


def _places(q: Posterior) -> list[Tensor]:
    """Copies of the means and of the diagonals of the factors."""
    factor = q.node.factor.detach()
    diagonal = factor.diagonal(dim1=-1, dim2=-2) if q.node.form == "full" else factor
    return [q.node.m.detach().clone(), diagonal.clone()]


class _OutOfTimeError(Exception):
    """The time limit was reached within a block."""


def _value_and_gradients(
    problem: Problem, parameters: Sequence[torch.nn.Parameter], seed: int, move_kernel: bool
) -> tuple[float, list[Tensor], int]:
    """The bound on the draws of ``seed``, its gradients, and the number of likelihoods computed."""
    generator = torch.Generator().manual_seed(seed)
    total, grads, evaluations = 0.0, [torch.zeros_like(p) for p in parameters], 0
    n = len(problem.batches)
    for i in range(n):
        bound = problem.bound(i, generator, move_kernel=move_kernel)
        # Each batch stands for all of them: the mean over batches is the bound.
        found = torch.autograd.grad(bound.elbo / n, list(parameters), allow_unused=True)
        grads = [a if b is None else a + b for a, b in zip(grads, found, strict=True)]
        total += float(bound.elbo.detach()) / n
        evaluations += bound.estimate.evaluations
    return total, grads, evaluations


def _flatten(tensors: Sequence[Tensor], lower: Sequence[bool]) -> Tensor:
    """One float64 vector of all tensors. Of those marked in ``lower``, only the lower triangle."""
    return torch.cat([t[_kept(t, low)].double() for t, low in zip(tensors, lower, strict=True)])


def _unflatten(flat: Tensor, parameters: Sequence[torch.nn.Parameter], lower: Sequence[bool]) -> None:
    kept = [_kept(p, low) for p, low in zip(parameters, lower, strict=True)]
    with torch.no_grad():
        for p, mask, part in zip(parameters, kept, flat.split([int(m.sum()) for m in kept]), strict=True):
            p[mask] = part.to(p)


def _kept(tensor: Tensor, lower: bool) -> Tensor:
    """Mask of the entries that are part of the vector."""
    every = torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
    return every.tril() if lower else every
