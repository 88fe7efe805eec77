"""Sampling as a reference: its target, the sampler, and what is compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from experiments.data import problem_of

from experiments import sampling
from structgp import StructuredGPClassifier


def small(n: int, dense: bool = False) -> tuple[list[Any], list[list[str]]]:
    made = generate(n, n_labels=3, mean_length=4, n_templates=2, n_values=4, seed=0)
    if not dense:
        return made.X, made.y
    rng = np.random.default_rng(0)
    centres = {label: rng.normal(size=3) for y in made.y for label in y}
    return [np.array([centres[label] + rng.normal(size=3) for label in y]) for y in made.y], made.y


@pytest.mark.parametrize("dense", [False, True])
def test_the_target_is_prior_and_likelihood_and_its_slope_is_right(dense: bool) -> None:
    X, y = small(5, dense)
    fitted = StructuredGPClassifier().fit(X, y)
    target = sampling.Target(problem_of(fitted, fitted.model_.structure, X, y))
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, sum(target.sizes), generator=generator, dtype=torch.float64)
    step = torch.randn(z.shape, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        value, slope, likelihood = target(z)
        ahead, behind = (target(z + h * step)[0] for h in (1e-5, -1e-5))
        prior = [-0.5 * sum(float(v.square().sum()) for v in of_chain) for of_chain in target.values(z)]
    torch.testing.assert_close((slope * step).sum(1), (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(value - likelihood, torch.tensor(prior, dtype=torch.float64))
    # At the mean of q the likelihood is that of the plug-in answers.
    with torch.no_grad():
        at_mean = float(target(torch.zeros_like(z[:1]))[2])
    plugged = fitted.set_params(n_draws=0)
    object.__setattr__(plugged.model_, "n_draws", 0)
    assert at_mean == pytest.approx(sum(plugged.sequence_log_probs(X, y)), rel=1e-6)


def test_chains_have_the_moments_of_a_gaussian() -> None:
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    sd = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)

    def target(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        away = (z - mean) / sd
        value = -0.5 * away.square().sum(1)
        return value, -away / sd, value

    generator = torch.Generator().manual_seed(0)
    chains = sampling.hamiltonian(target, torch.zeros(16, 3, dtype=torch.float64), 450, generator)
    assert 0.6 < chains.accepted < 0.95
    assert float(sampling.split_rhat(chains.kept).max()) < 1.05
    flat = chains.kept.flatten(0, 1)
    assert flat.mean(0).numpy() == pytest.approx(mean.numpy(), abs=0.1)
    assert flat.std(0).numpy() == pytest.approx(sd.numpy(), rel=0.08)


@pytest.mark.parametrize("dense", [False, True])
def test_samples_draws_and_mean_are_compared_and_the_model_stays(
    dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    X, y = small(9, dense)
    kept: list[Any] = []
    monkeypatch.setattr(sampling, "CHAINS", 2)
    monkeypatch.setattr(sampling, "PER_CHAIN", 4)
    real = sampling.sampled_marginals

    def watched(model: Any, *rest: Any) -> Any:
        before = model.posterior.snapshot()
        found = real(model, *rest)
        kept.append([torch.equal(v, before[k]) for k, v in model.posterior.snapshot().items()])
        return found

    monkeypatch.setattr(sampling, "sampled_marginals", watched)
    row = sampling.compare(X[:6], y[:6], X[6:], y[6:], 24)
    assert all(kept[0])
    assert {"samples", "draws", "mean", "rhat", "rhat_likelihood"} <= set(row)
    # One posterior, two ways to average over it.
    assert row["samples"]["nll"] == pytest.approx(row["draws"]["nll"], abs=0.25)
    assert row["samples"]["nll"] != row["mean"]["nll"]
