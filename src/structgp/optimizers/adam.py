"""Adam on the bound: stochastic in draws and sequences, for any structure with a gradient.

Nothing is asked of the likelihood but that it can be differentiated. The learning rate falls when
the bound stops rising, and the third time the optimiser stops by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from structgp.optimizers.base import Problem, StepInfo
from structgp.optimizers.scales import LearnScales, fit_pairwise_sd, moves_amplitude


@dataclass
class AdamState:
    """One batch a step in shuffled order; ``recent`` holds the bounds since the last look."""

    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    queue: list[int] = field(default_factory=list)
    recent: list[float] = field(default_factory=list)
    previous: float = -float("inf")
    reductions: int = 0
    iteration: int = 0

    @property
    def recent_mean(self) -> float:
        return sum(self.recent) / len(self.recent) if self.recent else self.previous


@dataclass(frozen=True)
class Adam:
    """Adam with a schedule that stops by itself.

    Parameters
    ----------
    learning_rate : of the means; factors and scales move at a third of it.
    n_draws : S per step.
    window : at least this many steps, and whole passes over the data, between two looks at the
        mean bound.
    tolerance : a look must find the mean bound risen by this much, in nats per sequence.
    max_steps : stop here at the latest.
    learn_scales : False, 'pairwise' (the pairwise scale moves, at each look), or True (the
        amplitude too, at each step).
    """

    learning_rate: float = 0.05
    n_draws: int = 8
    window: int = 30
    tolerance: float = 0.05
    max_steps: int = 3000
    reductions: int = 3
    learn_scales: LearnScales = "pairwise"
    name = "adam"

    def start(self, problem: Problem, generator: torch.Generator) -> AdamState:
        q, rate = problem.posterior, self.learning_rate
        groups = [
            {"params": [q.m, q.pair_mean], "lr": rate},
            {"params": [q.factor, q.pair_log_sd], "lr": rate / 3},
            {
                "params": [q.log_amplitude] if moves_amplitude(self.learn_scales) else [],
                "lr": rate / 3,
            },
        ]
        return AdamState(torch.optim.Adam(groups, betas=(0.9, 0.99)), generator)

    def step(self, problem: Problem, state: AdamState) -> tuple[AdamState, StepInfo]:
        """One gradient step on one batch. Cost O(S B (V M^2 + T V M)) plus S B likelihoods."""
        if not state.queue:
            order = torch.randperm(len(problem.batches), generator=state.generator)
            state.queue = order.tolist()
        i = state.queue.pop()
        state.optimizer.zero_grad()
        bound = problem.bound(i, self.n_draws, state.generator)
        (-bound.elbo).backward()
        state.optimizer.step()
        state.recent.append(float(bound.elbo.detach()))
        state.iteration += 1
        if not state.queue and len(state.recent) >= self.window:
            self._look(problem, state)
        converged = state.reductions >= self.reductions
        finished = converged or state.iteration >= self.max_steps
        evaluations = self.n_draws * len(problem.batches[i])
        info = StepInfo(state.iteration - 1, state.recent_mean, evaluations, finished, converged)
        return state, info

    def _look(self, problem: Problem, state: AdamState) -> None:
        mean = state.recent_mean
        if mean - state.previous < self.tolerance * problem.n_sequences:
            state.reductions += 1
            for group in state.optimizer.param_groups:
                group["lr"] *= 0.3
        if self.learn_scales:
            fit_pairwise_sd(problem.posterior)
        state.previous = max(mean, state.previous)
        state.recent = []
