"""From one Gaussian to a mixture of K.

Equal components have equal gradients for ever, so they have to be moved apart; and a mixture is best looked
for where one Gaussian has already been found. K equal copies have exactly the bound of the one they are
copies of (with the Bhattacharyya entropy), so that a mixture which gains nothing can always go back to it:
it never ends below."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from structgp.gp import Posterior
from structgp.inference.adam import Adam, AdamState
from structgp.inference.problem import Optimizer, Problem, StepInfo

JUDGE_DRAWS = 64

SPREAD = 0.1
"""Posterior standard deviations by which components are moved apart."""


@dataclass
class MixtureState:
    """one : the copies, and their bound; seed : of the draws by which both are judged."""

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
    first : the optimiser of the one component.
    spread : standard deviations of the posterior by which the copies are moved apart.
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
