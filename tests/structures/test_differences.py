"""Slopes and curvature by differences are those of the function, and what is missing is said."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp import Inducing, Natural, Prior, StructuredGPClassifier
from structgp.errors import LikelihoodError
from structgp.structures import BlackBox, Chain, Differences, Piecewise
from structgp.structures.opaque import differences as module


def latents(V: int = 3, S: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([4, 1, 3])
    f = torch.randn(S, 3, 4, V, generator=generator, dtype=torch.float64)
    g = torch.randn(S, V, V, generator=generator, dtype=torch.float64)
    y = torch.randint(V, (3, 4), generator=generator)
    return f, g, y, torch.arange(4) < lengths[:, None]


def gradients(structure: Chain | Differences) -> tuple[Tensor, Tensor, Tensor]:
    f, g, y, mask = latents()
    f.requires_grad_(), g.requires_grad_()
    values = structure.log_prob(f, g, y, mask)
    weight = torch.linspace(0.5, 2, values.numel(), dtype=f.dtype).view_as(values)
    return (values.detach(), *torch.autograd.grad((weight * values).sum(), (f, g)))


class Labelled(Chain):
    """A chain that does not say that it ignores shifts."""

    @property
    def ignores_shift(self) -> bool:
        return False


@pytest.mark.parametrize("inner", [Chain(), Labelled()])
@pytest.mark.parametrize("at_once", [1 << 21, 100])
def test_gradients_are_those_of_the_function(
    inner: Chain, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VALUES_AT_ONCE", at_once)
    for found, exact in zip(gradients(Differences(inner)), gradients(Chain()), strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("directions", [None, 2])
def test_curvature_is_that_of_the_function(directions: int | None) -> None:
    f, g, y, mask = latents()
    basis = None
    if directions is not None:
        basis = torch.tensor([[1.0, 0.3], [-1.0, 0.2], [0.0, -0.5]], dtype=f.dtype)
    found = Differences(Chain()).local_curvature(f, g, y, mask, basis)
    exact = Chain().curvature(f, g, y, mask, basis)
    diagonal = exact.node.diagonal(dim1=-1, dim2=-2).mT
    torch.testing.assert_close(found.node, diagonal, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found.next, exact.next, rtol=2e-2, atol=2e-3)
    assert (found.node[~mask] == 0).all()


def test_what_bends_up_counts_as_flat() -> None:
    class Up(Piecewise):
        def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            return 0.5 * (f.square() * mask[..., None]).sum((-1, -2)) - g.square().sum((-1, -2))[:, None]

    found = Differences(Up()).local_curvature(*latents())
    assert (found.node == 0).all()
    torch.testing.assert_close(found.next.sum(0), torch.full((3, 3), 6.0, dtype=torch.float64))


def test_a_value_that_is_not_finite_is_named() -> None:
    def cliff(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.full(len(f), -np.inf) if len(y) == 3 else f.sum((1, 2)) + 0 * g.sum((1, 2))

    f, g, y, mask = latents()
    with pytest.raises(LikelihoodError, match="does not exist") as caught:
        Differences(BlackBox(cliff)).log_prob(f, g, y, mask)
    assert caught.value.sequence == 2


# -- in a fit ----------------------------------------------------------------------------------------


def chain_in_numpy(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
    message = f[:, 0]
    score = f[:, 0, y[0]]
    for t in range(1, len(y)):
        score = score + f[:, t, y[t]] + g[:, y[t - 1], y[t]]
        inner = message[:, :, None] + g
        top = inner.max(1)
        message = f[:, t] + top + np.log(np.exp(inner - top[:, None]).sum(1))
    top = message.max(1)
    return score - top - np.log(np.exp(message - top[:, None]).sum(1))


def little_data() -> tuple[list[list[dict[str, str]]], list[list[str]]]:
    rng = np.random.default_rng(0)
    X, y = [], []
    for _ in range(12):
        words = [str(w) for w in rng.integers(0, 6, size=rng.integers(2, 6))]
        X.append([{"w": w, "first": str(t == 0)} for t, w in enumerate(words)])
        y.append(["a" if int(w) < 3 else "b" for w in words])
    return X, y


def test_values_alone_give_the_fit_that_the_chain_gives() -> None:
    X, y = little_data()
    black = StructuredGPClassifier(structure=chain_in_numpy, n_draws=128).fit(X, y)
    white = StructuredGPClassifier(n_draws=128).fit(X, y)  # the same draws for both
    log = black.training_log_
    assert (log["optimizer"], log["gradient"], log["posterior"]) == (
        "second-order",
        "differences",
        "weights",
    )
    assert "values alone" in log["reason"]
    assert log["plan"]["gradient"]["value"] == log["gradient"]
    assert len(log["function_scales"]) == 1  # a shift of both labels was found to say nothing
    assert log["elbo"] == pytest.approx(white.training_log_["elbo"], abs=0.3)
    for p, q in zip(black.predict_marginals(X), white.predict_marginals(X), strict=True):
        for a, b in zip(p, q, strict=True):
            assert a["a"] == pytest.approx(b["a"], abs=0.02)


@pytest.mark.parametrize(
    "asked",
    [
        {"inference": Natural(n_draws=20, learn_scales="auto")},
        {"inference": Natural(gradient="surrogate", learn_scales="auto")},
        {"posterior": Inducing(n_inducing=5)},
        {"prior": Prior(learn_kernel=False)},
        {"kernel": "linear"},
    ],
)
def test_not_where_another_way_is_asked_for(asked: dict[str, object]) -> None:
    X, y = little_data()
    model = StructuredGPClassifier(n_draws=2, structure=chain_in_numpy, **asked)
    log = model.fit(X[:4], y[:4], callback=lambda info: True).training_log_
    assert log["gradient"] != "differences"


def test_not_where_it_takes_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    X, y = little_data()
    monkeypatch.setattr("structgp.plan.choices.CHEAP_DIFFERENCES", 10)
    model = StructuredGPClassifier(n_draws=2, structure=chain_in_numpy)
    log = model.fit(X[:4], y[:4], callback=lambda info: True).training_log_
    assert log["gradient"] == "surrogate"


# -- the probe of shifts -----------------------------------------------------------------------------


def test_shifts_are_told_by_trying() -> None:
    def absolute(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        return -np.square(f).sum((1, 2)) + 0 * g.sum((1, 2))

    def impossible(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.full(len(f), -np.inf)

    expected = {chain_in_numpy: True, absolute: False, impossible: False}
    for function, ignores in expected.items():
        box = BlackBox(function)
        assert not box.ignores_shift  # nobody has tried
        box.probe(3)
        assert box.ignores_shift == ignores


def test_a_failure_far_into_the_fit_names_the_sequence() -> None:
    calls = 0

    def breaks(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls > 1000:
            raise ZeroDivisionError("too often")
        return chain_in_numpy(f, g, y)

    X, y = little_data()
    with pytest.raises(LikelihoodError, match=r"training sequence \d+ .*too often"):
        StructuredGPClassifier(structure=breaks).fit(X, y)
