"""Whether the spread of the posterior is right, compared with long-run sampling of the same model.

    python -m experiments.sampling [--data DIR] [--task TASK ...] [--seeds N ...] [--iterations N]

The default classifier is fitted, and the scales that it has learned are kept fixed. Hamiltonian Monte Carlo
then samples the posterior that the fit approximates by q: that of the whitened weights (or, for dense
features, of function values at all distinct training tokens) and of the transition scores, under their
prior and the exact likelihood. It moves in coordinates in which q is standard normal, in eight chains that
start at draws of q. Test figures are printed for the average over samples, the average over draws of q, and
the plug-in mean of q: NLL per token, mean confidence minus accuracy (gap), calibration error (ECE), error.
R-hat compares halves of the chains: it is 1 if they agree; above 1.1 the chains have not mixed, and the row
is of no use. Rows go to results/sampling.jsonl.

Results (seed 0, 300 iterations, largest R-hat 1.06, 1.08 and 1.01; NLL and gap):

    task               samples        draws of q     mean of q
    titles, 20         .946, -.147    .929, -.130    .981, +.085
    chunking, 10       .555, -.086    .533, -.085    .608, +.089
    digit strings, 60  .210, -.142    .202, -.134    .064, -.015

Samples are as underconfident as draws of q, for words and for dense features alike. So the cause is not the
family of q, and a better approximation of the same posterior would not help: it is the scales learned with
the bound that make predictions underconfident.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import few
from experiments.data import keep, problem_of, run_command
from experiments.digits import digit_strings
from experiments.methods.slices import split_rhat
from structgp import Inducing, StructuredGPClassifier, metrics
from structgp.answers.ask import Model, Question
from structgp.inference import Problem

TASKS = {"titles": 20, "chunking": 10, "digits": 60}
"""Tasks with their number of training sequences."""

N_TEST = 100
CHAINS = 8
LEAPS = (6, 14)
"""Smallest and largest number of steps in a trajectory."""

ACCEPTED = 0.8
"""Target share of accepted proposals, to which the step size is adapted during burn-in."""

PER_CHAIN = 16
"""Number of samples from each chain that predictions average over."""


class Target:
    """The target of sampling: the log joint density of z, (S, P) for S chains, where v = m + C z are the
    whitened values of all blocks, and m and C C^T are the mean and covariance of q."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.blocks = problem, problem.posterior.blocks
        self.centres = [block.m.detach().clone() for block in self.blocks]
        self.sizes = [m.numel() for m in self.centres]

    def values(self, z: Tensor) -> list[list[Tensor]]:
        """The values v of every block, for each chain."""
        found = []
        for one in z:
            parts = zip(self.blocks, self.centres, one.split(self.sizes), strict=True)
            found.append([m + block.root_times(part.view_as(m)) for block, m, part in parts])
        return found

    def __call__(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(S,) log joint, its gradient (S, P), and (S,) the log-likelihood."""
        v = self.values(z)
        likelihood = z.new_zeros(len(z))
        grads = [[-part for part in of_chain] for of_chain in v]
        for i in range(len(self.problem.batches)):
            here = self.problem.conditional(i)
            scores = []
            for k, block in enumerate(self.blocks):
                functions = torch.stack([here[k].times(of_chain[k]) for of_chain in v])
                scores.append(block.scores(block.scale * functions).requires_grad_())
            with torch.enable_grad():
                value = self.problem.log_prob(i, scores).sum(1)
                slopes = torch.autograd.grad(value.sum(), scores)
            likelihood = likelihood + value.detach()
            for k, block in enumerate(self.blocks):
                pulled = block.scale * block.pull_back(slopes[k])
                for s, slope in enumerate(pulled):
                    grads[s][k] = grads[s][k] + here[k].transposed_times(slope)
        prior = torch.stack([-0.5 * sum(part.square().sum() for part in of_chain) for of_chain in v])
        flat = [
            torch.cat(
                [b.root_transposed_times(g).reshape(-1) for b, g in zip(self.blocks, of, strict=True)]
            )
            for of in grads
        ]
        return prior + likelihood, torch.stack(flat), likelihood


@dataclass(frozen=True)
class Chains:
    """The result of sampling. kept : (S, K, P) states after burn-in. likelihood : (S, K) log-likelihood of
    the data at these states. accepted : share of accepted proposals. step : the step size after burn-in."""

    kept: Tensor
    likelihood: Tensor
    accepted: float
    step: float


def hamiltonian(target: Any, start: Tensor, n_iterations: int, generator: torch.Generator) -> Chains:
    """Hamiltonian Monte Carlo from ``start`` (S, P); the first third of the iterations is burn-in. In each
    iteration, all chains have the same step size and length of trajectory."""
    z, step, kept, likelihoods, rates = start.clone(), 0.2, [], [], []
    value, slope, likelihood = target(z)
    burn_in = n_iterations // 3
    for n in range(n_iterations):
        momentum = torch.randn(z.shape, generator=generator, dtype=z.dtype)
        new, pushed, there = z.clone(), momentum, (value, slope, likelihood)
        for _ in range(int(torch.randint(LEAPS[0], LEAPS[1] + 1, (), generator=generator))):
            pushed = pushed + 0.5 * step * there[1]
            new = new + step * pushed
            there = target(new)
            pushed = pushed + 0.5 * step * there[1]
        gain = there[0] - value - 0.5 * (pushed.square().sum(1) - momentum.square().sum(1))
        accept = gain.nan_to_num(-torch.inf) > torch.rand(len(z), generator=generator, dtype=z.dtype).log()
        rate = float(gain.exp().clamp(max=1).nan_to_num(0).mean())
        z, slope = (torch.where(accept[:, None], b, a) for a, b in ((z, new), (slope, there[1])))
        value, likelihood = (
            torch.where(accept, b, a) for a, b in ((value, there[0]), (likelihood, there[2]))
        )
        if n < burn_in:
            step *= float(np.exp((rate - ACCEPTED) / (1 + n) ** 0.5))
            continue
        kept.append(z)
        likelihoods.append(likelihood)
        rates.append(rate)
    return Chains(torch.stack(kept, 1), torch.stack(likelihoods, 1), float(np.mean(rates)), step)


def sampled_marginals(model: Model, target: Target, chains: Chains, X: list[Any]) -> list[np.ndarray]:
    """(T, V) probabilities for each sequence, averaged over samples. Values that a sample does not
    determine, such as weights of unseen features, are drawn for each sample as they are for draws of q."""
    thin = max(1, chains.kept.shape[1] // PER_CHAIN)
    states = chains.kept[:, thin - 1 :: thin].flatten(0, 1)
    posterior, before = model.posterior, model.posterior.snapshot()
    total: list[np.ndarray] = []
    try:
        for block in posterior.blocks:
            block.factor.zero_()
        for n, v in enumerate(all_values(target, states, before)):
            for block, part in zip(posterior.blocks, v, strict=True):
                block.m.copy_(part)
            found = replace(model, seed=n).ask(X, Question(2)).marginals()
            total = [a + b for a, b in zip(total, found, strict=True)] if total else found
    finally:
        posterior.load_state_dict(before)
    return [p / len(states) for p in total]


def all_values(target: Target, states: Tensor, before: dict[str, Tensor]) -> list[list[Tensor]]:
    """Values of every block at each state, under the covariance that the posterior had ``before``."""
    q = target.problem.posterior
    now = q.snapshot()
    q.load_state_dict(before)
    found = target.values(states)
    q.load_state_dict(now)
    return found


def figures(marginals: list[np.ndarray], y: list[list[str]], classes: Sequence[str]) -> dict[str, float]:
    named = [[dict(zip(classes, map(float, row), strict=True)) for row in p] for p in marginals]
    flat, truth = np.concatenate(marginals), [label for labels in y for label in labels]
    right = np.mean([classes[k] == label for k, label in zip(flat.argmax(1), truth, strict=True)])
    return {
        "nll": metrics.token_nll(y, named),
        "gap": float(flat.max(1).mean() - right),
        "ece": metrics.calibration(y, named).ece,
        "error": 100 * (1 - float(right)),
    }


def load(task: str, data: str | None, seed: int) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """X, y, X_test, y_test of one random split, in which all test labels occur in training."""
    size = TASKS[task]
    if task == "digits":
        fold = digit_strings(seed)
        return fold.X[:size], fold.y[:size], fold.X_test[:N_TEST], fold.y_test[:N_TEST]
    X, y = few.load(task, data)
    order = np.random.default_rng([seed, size]).permutation([i for i, labels in enumerate(y) if labels])
    train, known = order[:size], {label for i in order[:size] for label in y[i]}
    test = [i for i in order[size:] if set(y[i]) <= known][:N_TEST]
    return *([items[i] for i in train] for items in (X, y)), *([items[i] for i in test] for items in (X, y))


def compare(X: Any, y: Any, X_test: Any, y_test: Any, n_iterations: int, seed: int = 0) -> dict[str, Any]:
    """Scores with samples, draws and mean, and how well the chains have mixed."""
    is_dense = isinstance(X[0], np.ndarray)
    # With all distinct tokens as inducing inputs, the training scores are fully determined.
    full = {"posterior": Inducing(n_inducing=sum(map(len, X)))} if is_dense else {}
    fitted = StructuredGPClassifier(random_state=seed, **full).fit(X, y)
    model, classes = fitted.model_, list(fitted.model_.labels.classes)
    target = Target(problem_of(fitted, model.structure, X, y))
    generator = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    with torch.no_grad():
        start = torch.randn(CHAINS, sum(target.sizes), generator=generator, dtype=torch.float64)
        chains = hamiltonian(target, start, n_iterations, generator)
        marginals = {"samples": sampled_marginals(model, target, chains, X_test)}
    marginals["draws"] = model.ask(X_test, Question(CHAINS * PER_CHAIN)).marginals()
    marginals["mean"] = model.ask(X_test, Question(0)).marginals()
    rhat = split_rhat(chains.kept)
    row: dict[str, Any] = {name: figures(p, y_test, classes) for name, p in marginals.items()}
    return row | {
        "rhat": float(rhat.max()),
        "rhat_median": float(rhat.median()),
        "rhat_likelihood": float(split_rhat(chains.likelihood[..., None])),
        "accepted": chains.accepted,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.sampling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--iterations", type=int, default=300)
    options = parser.parse_args(words)
    print(f"{'task':<10}{'seed':>5}  {'':<9}{'NLL':>7}{'gap':>8}{'ECE':>7}{'error %':>9}")
    for task in options.task:
        for seed in options.seeds:
            row = compare(*load(task, options.data, seed), options.iterations, seed)
            keep("sampling", {"task": task, "size": TASKS[task], "seed": seed} | row)
            for name in ("samples", "draws", "mean"):
                nll, gap, ece, error = row[name].values()
                print(f"{task:<10}{seed:>5}  {name:<9}{nll:>7.3f}{gap:>+8.3f}{ece:>7.3f}{error:>9.2f}")
            mixed = f"R-hat {row['rhat']:.2f}, median {row['rhat_median']:.2f}"
            print(f"  {mixed}, likelihood {row['rhat_likelihood']:.2f}; {row['seconds']} s", flush=True)


if __name__ == "__main__":
    run_command(main)
