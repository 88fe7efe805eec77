"""Adam on the bound: stochastic in draws and sequences, for any structure and posterior.

The learning rate falls each time the bound stops rising; the third time, the optimiser stops."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from structgp.inference.bound import Plateau
from structgp.inference.problem import LearnScales, Problem, StepInfo, hyper_parameters, open_low_rank


@dataclass
class AdamState:
    """queue : batches still to come in this pass, in shuffled order, one per step."""

    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    plateau: Plateau
    queue: list[int] = field(default_factory=list)
    reductions: int = 0
    iteration: int = 0


@dataclass(frozen=True)
class Adam:
    """Adam with a schedule that stops by itself.

    Parameters
    ----------
    learning_rate : for the means; covariance factors, mixture weights and scales move at a third of it.
    window : least number of steps between two looks at the mean bound; looks follow whole passes over the
        data.
    tolerance : nats per sequence by which the mean bound must have risen at a look.
    max_steps : largest number of steps.
    reductions : number of looks without such a rise after which the fit stops; each also cuts the learning
        rate.
    learn_scales : False, 'transitions' (the scale of tables moves, at each look), True (the amplitude too,
        at each step) or 'all' (the kernel's own parameters too, which costs one kernel matrix per step).
    gradient, n_draws : name and number of draws of the gradient estimator, which ``structgp.plan``
        chooses."""

    learning_rate: float = 0.05
    window: int = 30
    tolerance: float = 0.05
    max_steps: int = 3000
    reductions: int = 3
    learn_scales: LearnScales = "transitions"
    gradient: str = "auto"
    n_draws: int | None = None
    name = "adam"

    def start(self, problem: Problem, generator: torch.Generator) -> AdamState:
        q, rate = problem.posterior, self.learning_rate
        open_low_rank(problem)
        means = [p for block in q.blocks for p in block.mean_parameters()]
        spreads = [p for block in q.blocks for p in block.spread_parameters()]
        # The scale of tables moves in closed form, at each look.
        tables = {id(block.log_amplitude) for block in q.blocks if block.shared}
        scales = [p for p in hyper_parameters(q, self.learn_scales) if id(p) not in tables]
        groups = [{"params": means, "lr": rate}, {"params": [*spreads, *scales], "lr": rate / 3}]
        plateau = Plateau(self.window, self.tolerance * problem.n_counted)
        return AdamState(torch.optim.Adam(groups, betas=(0.9, 0.99)), generator, plateau)

    def step(self, problem: Problem, state: AdamState) -> tuple[AdamState, StepInfo]:
        """One gradient step on one batch. Cost O(B T V M^2 + K^2 V M^3 if K > 1), with r and r^2 in place
        of M and M^2 if low-rank, plus that of the estimator."""
        if not state.queue:
            order = torch.randperm(len(problem.batches), generator=state.generator)
            state.queue = order.tolist()
        i, moves = state.queue.pop(), self.learn_scales == "all"
        state.optimizer.zero_grad()
        bound = problem.bound(i, state.generator, move_kernel=moves)
        (-bound.elbo).backward()
        state.optimizer.step()
        state.plateau.add(float(bound.elbo.detach()))
        elbo = state.plateau.mean
        state.iteration += 1
        if moves and not state.queue:
            problem.refresh()
        if not state.queue and state.plateau.is_full:
            self._look(problem, state)
        converged = state.reductions >= self.reductions
        finished = converged or state.iteration >= self.max_steps
        if finished and moves:
            problem.refresh()
        evaluations = bound.estimate.evaluations
        return state, StepInfo(state.iteration - 1, elbo, evaluations, finished, converged)

    def _look(self, problem: Problem, state: AdamState) -> None:
        if state.plateau.look():
            state.reductions += 1
            for group in state.optimizer.param_groups:
                group["lr"] *= 0.3
        if self.learn_scales:
            problem.posterior.fit_tables()
