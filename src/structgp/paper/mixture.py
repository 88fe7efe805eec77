"""From one Gaussian to a mixture of K.

Equal components have equal gradients for ever, so they have to be moved apart; and a mixture is best
looked for where one Gaussian has already been found. K equal copies have exactly the bound of the one
they are copies of (with the Bhattacharyya entropy), so that a mixture which gains nothing can always
go back to it: it never ends below.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from structgp.gp import Posterior, root_times
from structgp.inference.adam import Adam, AdamState
from structgp.inference.problem import Optimizer, Problem, StepInfo

JUDGE_DRAWS = 64


@dataclass
class MixtureState:
    """one : the copies, and their bound; seed : of the draws by which both are judged."""

    adam: AdamState
    one: dict[str, Tensor]
    one_elbo: float
    seed: int
    evaluations: int


@dataclass(frozen=True)
class Mixture:
    """Fits one component with ``first``, then K perturbed copies of it with Adam.

    Parameters
    ----------
    first : the optimiser of the one component.
    spread : standard deviations of the posterior by which the copies are moved apart.
    then : Adam for the K components.
    """

    first: Optimizer
    spread: float = 0.1
    then: Adam = field(default_factory=lambda: Adam(learning_rate=0.01))

    @property
    def name(self) -> str:
        return f"{self.first.name}, then adam"

    def start(self, problem: Problem, generator: torch.Generator) -> MixtureState:
        q = problem.posterior
        alone = _alone(q)
        single = Problem(
            alone,
            problem.structure,
            problem.batches,
            problem.estimator,
        )
        state, info, evaluations = self.first.start(single, generator), None, 0
        while info is None or not info.finished:
            state, info = self.first.step(single, state)
            evaluations += info.evaluations
        _copy_into(alone, q)
        problem.conditional.refresh()
        seed = int(torch.randint(2**31, (), generator=generator))
        copies = q.snapshot()
        elbo = _judge(problem, seed)
        separate(problem, generator, self.spread)
        adam = self.then.start(problem, generator)
        return MixtureState(adam, copies, elbo, seed, evaluations + _judging(problem))

    def step(self, problem: Problem, state: MixtureState) -> tuple[MixtureState, StepInfo]:
        state.adam, info = self.then.step(problem, state.adam)
        extra = state.evaluations + (_judging(problem) if info.finished else 0)
        info = replace(info, evaluations=info.evaluations + extra)
        state.evaluations = 0
        if info.finished and _judge(problem, state.seed) < state.one_elbo:
            problem.posterior.load_state_dict(state.one)
            problem.conditional.refresh()
        return state, info


def separate(problem: Problem, generator: torch.Generator, spread: float = 0.1) -> None:
    """Moves the means of a mixture's components apart, at random, by ``spread`` posterior standard
    deviations; does nothing to one component."""
    q = problem.posterior
    if q.n_components == 1:
        return
    with torch.no_grad():
        noise = torch.randn(q.m.shape, generator=generator, dtype=q.m.dtype).to(q.m)
        for k in range(q.n_components):
            q.m[k] += spread * root_times(q.spread[k], noise[k])


def _judge(problem: Problem, seed: int) -> float:
    return problem.fresh_bound(JUDGE_DRAWS, torch.Generator().manual_seed(seed))


def _judging(problem: Problem) -> int:
    """Likelihoods that a judgement takes."""
    return JUDGE_DRAWS * problem.posterior.n_components * problem.n_sequences


def _alone(q: Posterior) -> Posterior:
    """A posterior with one component under the same prior."""
    alone = Posterior(
        q.kernel,
        q.inducing,
        q.n_labels,
        pairwise_sd=float(q.pairwise_sd.detach()),
        covariance=q.form,
        rank=q.rank,
        pairwise_covariance="full" if q.pairs_are_full else "diagonal",
        basis=q.basis,
    )
    alone.to(q.m.device)
    with torch.no_grad():
        alone.log_amplitude.copy_(q.log_amplitude)
    return alone


def _copy_into(alone: Posterior, q: Posterior) -> None:
    """Every component of q as the one of ``alone``, all with equal weights."""
    found: dict[str, Any] = alone.state_dict()
    K = q.n_components
    with torch.no_grad():
        for name, value in q.state_dict().items():
            if name in ("m", "factor", "directions"):
                value.copy_(found[name].expand(K, *found[name].shape[1:]))
            elif name == "weight_logits":
                value.zero_()
            else:
                value.copy_(found[name])
