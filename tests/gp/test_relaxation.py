"""The relaxation's evidence against the textbook's density, and the shapes it finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel, RBFKernel, ScaleKernel
from scipy.stats import multivariate_normal
from torch import Tensor

from structgp.gp import learn_shape, relaxation, shape_parameters
from structgp.gp.kernels import SparseLinearKernel, SparseRBFKernel, TemplateKernel, covariance
from structgp.gp.kernels.block_sum import BlockSumKernel

P, K, V = 6, 5, 3
SIGNAL = 3


def template_kernel(n_templates: int = P, mode: str = "additive") -> ScaleKernel:
    return ScaleKernel(TemplateKernel(n_templates, mode)).double()


def one_template_data(
    n_sequences: int = 30, noise: float = 0.1, seed: int = 0
) -> tuple[list[Tensor], list[Tensor]]:
    """Six templates of uniform values, and labels that only template 3 has a say in."""
    rng = np.random.default_rng(seed)
    rows, labels = [], []
    for _ in range(n_sequences):
        x = rng.integers(K, size=(rng.integers(3, 9), P))
        y = np.where(rng.random(len(x)) < noise, rng.integers(V, size=len(x)), x[:, SIGNAL] % V)
        rows.append(torch.from_numpy(x.astype(float)))
        labels.append(torch.from_numpy(y))
    return rows, labels


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Recorder:
    """Stands in for the evidence, and keeps what it was asked and what it answered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        self.original = relaxation._log_evidence
        monkeypatch.setattr(relaxation, "_log_evidence", self)

    def __call__(self, kernel: Kernel, x: Tensor, targets: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        value = self.original(kernel, x, targets, scale, noise)
        with torch.no_grad():
            K = covariance(kernel, x, x).numpy().copy()
        call = {"K": K, "x": x, "targets": targets.numpy(), "value": float(value.detach())}
        self.calls.append(call | {"scale": float(scale.detach()), "noise": float(noise.detach())})
        return value


def density(call: dict[str, Any]) -> float:
    """log N(Y; 0, scale K + noise I), column by column, from SciPy."""
    cov = call["scale"] * call["K"] + call["noise"] * np.eye(len(call["K"]))
    return sum(multivariate_normal(np.zeros(len(cov)), cov).logpdf(column) for column in call["targets"].T)


def test_evidence_is_the_normal_density(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    rows, labels = one_template_data(12)
    result = learn_shape(template_kernel(), rows, labels, seeded())
    for call in (recorder.calls[0], recorder.calls[-1]):
        assert call["value"] == pytest.approx(density(call), rel=1e-6)
    assert result.evidence[0] == recorder.calls[0]["value"]
    # The weak prior is no part of what is reported: the evidence at the place that was kept.
    values = [call["value"] for call in recorder.calls]
    assert result.evidence[1] == pytest.approx(max(values), abs=5)
    assert min(abs(result.evidence[1] - value) for value in values) < 1e-6
    assert result.steps == len(recorder.calls) - 1  # the first is the look before
    assert result.steps <= 2 * relaxation.MAX_STEPS


def test_targets_are_centred_one_hot_labels_of_unit_size(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    rows, labels = one_template_data(12)
    learn_shape(template_kernel(), rows, labels, seeded())
    call = recorder.calls[0]
    y = torch.cat(labels).numpy()
    assert torch.equal(call["x"], torch.cat(rows))  # all of it, in order
    one_hot = np.eye(V)[y]
    centred = one_hot - one_hot.mean(0)
    np.testing.assert_allclose(call["targets"], centred / np.sqrt((centred**2).mean()), rtol=1e-12)
    # To begin with, half of the variance is the kernel's.
    assert call["scale"] * np.diag(call["K"]).mean() == pytest.approx(0.5)


@pytest.mark.parametrize("mode", ["additive", "product"])
def test_gradient_of_the_evidence(mode: str) -> None:
    rows, labels = one_template_data(6)
    x, y = torch.cat(rows), torch.cat(labels)
    kernel = template_kernel(mode=mode)
    raw = kernel.base_kernel.raw_weights
    with torch.no_grad():
        raw += torch.linspace(-0.5, 0.5, P, dtype=torch.float64)
    scale = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    noise = torch.tensor(0.6, dtype=torch.float64, requires_grad=True)
    targets = torch.nn.functional.one_hot(y).double()

    def value() -> Tensor:
        return relaxation._log_evidence(kernel, x, targets, scale, noise)

    parameters = [raw, scale, noise]
    analytic = torch.autograd.grad(value(), parameters)
    h = 1e-5
    with torch.no_grad():
        for parameter, found in zip(parameters, analytic, strict=True):
            numeric = torch.zeros_like(parameter)
            for place in np.ndindex(*parameter.shape):
                for sign in (1, -1):
                    parameter[place] += sign * h
                    numeric[place] += sign * value() / (2 * h)
                    parameter[place] -= sign * h
            assert found.abs().max() > 1e-2
            torch.testing.assert_close(found, numeric, rtol=1e-6, atol=1e-7)


def test_the_optimiser_is_given_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the floor's and the logarithm's detours too: finite differences of what it minimises."""
    asked: list[Any] = []
    minimize = relaxation.scipy.optimize.minimize

    def watched(function: Any, start: np.ndarray, **kwargs: Any) -> Any:
        asked.append((function, start.copy()))
        return minimize(function, start, **kwargs)

    monkeypatch.setattr(relaxation.scipy.optimize, "minimize", watched)
    rows, labels = one_template_data(6)
    learn_shape(template_kernel(), rows, labels, seeded())
    ((function, start),) = asked
    assert len(start) == P + 2
    # The parameters' flags were given back; the function needs them once more.
    point = start + 0.3 * np.cos(np.arange(P + 2))
    for parameter in _closure_parameters(function):
        parameter.requires_grad_(True)
    _, gradient = function(point)
    for k in range(P + 2):
        step = np.zeros(P + 2)
        step[k] = 1e-5
        numeric = (function(point + step)[0] - function(point - step)[0]) / 2e-5
        assert gradient[k] == pytest.approx(numeric, rel=1e-5, abs=1e-6)


def _closure_parameters(function: Any) -> list[Tensor]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
    return cells["parameters"].cell_contents


def test_the_kernel_ends_at_the_best_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the optimiser looked elsewhere afterwards."""
    minimize = relaxation.scipy.optimize.minimize
    found: list[np.ndarray] = []

    def restless(function: Any, start: np.ndarray, **kwargs: Any) -> Any:
        result = minimize(function, start, **kwargs)
        found.append(result.x)
        function(start)
        return result

    monkeypatch.setattr(relaxation.scipy.optimize, "minimize", restless)
    kernel = template_kernel()
    learn_shape(kernel, *one_template_data(8), seeded())
    np.testing.assert_array_equal(kernel.base_kernel.raw_weights.detach(), found[0][:P])


@pytest.mark.parametrize("mode", ["additive", "product"])
def test_the_one_template_that_matters_is_found(mode: str) -> None:
    rows, labels = one_template_data()
    kernel = template_kernel(mode=mode)
    result = learn_shape(kernel, rows, labels, seeded())
    assert result.evidence[1] > result.evidence[0] + 10
    weights = kernel.base_kernel.weights.detach().numpy()
    others = np.delete(weights, SIGNAL)
    assert weights[SIGNAL] > 5 * others.max(), weights


def test_the_length_scale_that_matters_is_found() -> None:
    """Two dense blocks of which the first tells the labels: its factor grows over the other's."""
    generator = seeded(1)
    rows, labels = [], []
    for _ in range(20):
        x = torch.randn(6, 2, generator=generator, dtype=torch.float64)
        rows.append(x)
        labels.append((x[:, 0] > 0).long())
    parts = [ScaleKernel(RBFKernel()).double() for _ in range(2)]
    kernel = BlockSumKernel(parts, [(0, 1), (1, 2)])
    result = learn_shape(kernel, rows, labels, seeded())
    assert result.evidence[1] > result.evidence[0] + 5
    assert float(parts[0].outputscale.detach()) > 5 * float(parts[1].outputscale.detach())


def test_the_noise_has_a_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that the features explain fully would like none."""
    recorder = Recorder(monkeypatch)
    rows, labels = one_template_data(noise=0.0)
    learn_shape(template_kernel(), rows, labels, seeded())
    noises = [call["noise"] for call in recorder.calls]
    assert min(noises) >= relaxation.NOISE_FLOOR
    assert min(noises) < relaxation.NOISE_FLOOR + 0.02
    assert max(noises) <= 1


def test_noise_is_all_where_labels_mean_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    rows, labels = one_template_data(noise=1.0)
    learn_shape(template_kernel(), rows, labels, seeded())
    best = max(recorder.calls, key=lambda call: call["value"])
    assert best["noise"] > 0.75


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (SparseLinearKernel, False),
        (lambda: ScaleKernel(SparseLinearKernel()), False),
        (SparseRBFKernel, True),
        (lambda: ScaleKernel(RBFKernel()), True),
        (lambda: ScaleKernel(TemplateKernel(3)), True),
        (lambda: BlockSumKernel([SparseLinearKernel()], [(0, None)]), False),
        (
            lambda: BlockSumKernel(
                [ScaleKernel(SparseLinearKernel()), ScaleKernel(SparseLinearKernel())], [(0, 2), (2, None)]
            ),
            True,
        ),
        (lambda: ScaleKernel(ScaleKernel(SparseLinearKernel())), True),
    ],
    ids=[
        "linear",
        "scaled linear",
        "rbf",
        "scaled rbf",
        "templates",
        "sum of one without scale",
        "sum of two scaled",
        "scaled twice",
    ],
)
def test_has_shape(make: Any, expected: bool) -> None:
    assert bool(shape_parameters(make())) is expected


def test_the_outermost_factor_stays() -> None:
    """The size of a regression function says nothing about the size of a log-potential."""
    kernel = template_kernel()
    kernel.outputscale = 7.0
    before = kernel.raw_outputscale.detach().clone()
    learn_shape(kernel, *one_template_data(8), seeded())
    assert torch.equal(kernel.raw_outputscale, before)


def test_the_answer_does_not_depend_on_the_outermost_factor() -> None:
    found = []
    for size in (0.1, 10.0):
        kernel = template_kernel()
        kernel.outputscale = size
        result = learn_shape(kernel, *one_template_data(8), seeded())
        found.append((*result.evidence, *kernel.base_kernel.weights.tolist()))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


@pytest.mark.parametrize("flag", [True, False])
def test_frozen_parameters_stay(flag: bool) -> None:
    kernel = template_kernel().requires_grad_(flag)
    kernel.raw_outputscale.requires_grad_(not flag)
    before = kernel.base_kernel.raw_weights.detach().clone()
    learn_shape(kernel, *one_template_data(8), seeded())
    assert kernel.base_kernel.raw_weights.requires_grad is flag
    assert kernel.raw_outputscale.requires_grad is not flag
    assert torch.equal(kernel.base_kernel.raw_weights, before) is not flag
    assert kernel.base_kernel.raw_weights.grad is None


def test_a_seeded_subset_of_whole_sequences() -> None:
    rows, labels = one_template_data(30)
    for i, row in enumerate(rows):
        row[:, 0] = i  # which sequence a token is from
    subsets = []
    for seed in (0, 0, 1):
        x, y = relaxation._some_tokens(rows, labels, seeded(seed), 40)
        assert 40 - 9 < len(x) <= 40
        assert len(x) == len(y)
        chosen = sorted({int(i) for i in x[:, 0]})
        assert torch.equal(x, torch.cat([rows[i] for i in chosen]))
        assert torch.equal(y, torch.cat([labels[i] for i in chosen]))
        subsets.append(chosen)
    assert subsets[0] == subsets[1]
    assert subsets[0] != subsets[2]
    result = learn_shape(template_kernel(), rows, labels, seeded(), 40)
    assert result.tokens <= 40


def test_one_sequence_longer_than_the_limit() -> None:
    rows, labels = one_template_data(8)
    result = learn_shape(template_kernel(), [torch.cat(rows)], [torch.cat(labels)], seeded(), 20)
    assert result.tokens == 20


def test_deterministic() -> None:
    answers = []
    for _ in range(2):
        kernel = template_kernel()
        result = learn_shape(kernel, *one_template_data(10), seeded())
        answers.append((result, kernel.base_kernel.weights.tolist()))
    assert answers[0] == answers[1]


def test_one_label_only_is_no_mistake() -> None:
    rows, labels = one_template_data(5)
    result = learn_shape(template_kernel(), rows, [torch.zeros_like(y) for y in labels], seeded())
    assert np.isfinite(result.evidence).all()


def test_the_prior_holds_what_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tight prior keeps the weights where they start; the weak one lets them go."""

    def moved() -> float:
        kernel = template_kernel()
        before = kernel.base_kernel.raw_weights.detach().clone()
        learn_shape(kernel, *one_template_data(12), seeded())
        return float((kernel.base_kernel.raw_weights.detach() - before).abs().max())

    free = moved()
    monkeypatch.setattr(relaxation, "PRIOR_SD", 1e-3)
    assert moved() < 1e-2 < free
