"""Fits a mixture of K Gaussians, starting from copies of a single fitted one.

Components that are equal have equal gradients for ever, so they have to be moved apart. The best place to
start is where a single Gaussian has already been fitted. K equal copies have exactly its bound (with the
Bhattacharyya entropy), so that a mixture which gains nothing can always go back to the copies: it never
ends below the single Gaussian."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from structgp.gp import Posterior
from structgp.inference.adam import Adam, AdamState
from structgp.inference.problem import Optimizer, Problem, StepInfo

JUDGE_DRAWS = 64

SPREAD = 0.1
"""Number of posterior standard deviations by which components are moved apart."""


@dataclass
class MixtureState:
    """one, one_elbo : the equal copies, and their bound. seed : that of the draws by which the copies and
    the mixture are compared."""

    adam: AdamState
    one: dict[str, Tensor]
    one_elbo: float
    seed: int
    evaluations: int


@dataclass(frozen=True)
class MixtureFit:
    """Fits one component with ``first``, then K perturbed copies of it with Adam.

    Parameters
    ----------
    first : the optimiser of the single component.
    spread : number of posterior standard deviations by which the copies are moved apart.
    then : Adam for the K components."""

    first: Optimizer
    spread: float = SPREAD
    then: Adam = field(default_factory=lambda: Adam(learning_rate=0.01))

    @property
    def name(self) -> str:
        return f"{self.first.name}, then adam"

    def start(self, problem: Problem, generator: torch.Generator) -> MixtureState:
        q, mixture = problem.posterior, problem.posterior.node
        alone = mixture.alone()
        one = Posterior(dict(q.items()) | {"node": alone})
        single = Problem(one, problem.structure, problem.batches, problem.estimator)
        state, info, evaluations = self.first.start(single, generator), None, 0
        while info is None or not info.finished:
            state, info = self.first.step(single, state)
            evaluations += info.evaluations
        mixture.copy_from(alone)
        problem.refresh()
        seed = int(torch.randint(2**31, (), generator=generator))
        copies, elbo = q.snapshot(), _judge(problem, seed)
        mixture.separate(generator, self.spread)
        adam = self.then.start(problem, generator)
        judged = JUDGE_DRAWS * q.n_components * problem.n_sequences
        return MixtureState(adam, copies, elbo, seed, evaluations + judged)

    def step(self, problem: Problem, state: MixtureState) -> tuple[MixtureState, StepInfo]:
        state.adam, info = self.then.step(problem, state.adam)
        extra, state.evaluations = state.evaluations, 0
        if info.finished:
            extra += JUDGE_DRAWS * problem.posterior.n_components * problem.n_sequences
            if _judge(problem, state.seed) < state.one_elbo:
                problem.posterior.load_state_dict(state.one)
                problem.refresh()
        return state, replace(info, evaluations=info.evaluations + extra)


def _judge(problem: Problem, seed: int) -> float:
    return problem.fresh_bound(JUDGE_DRAWS, torch.Generator().manual_seed(seed))
