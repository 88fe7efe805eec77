"""The conformance suite: right likelihoods pass it, and each check catches a broken one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp.structures import BlackBox, Chain, Curvature, Piecewise, Structure
from structgp.testing import Check, check_likelihood, likelihood_checks

ALWAYS = {"shape", "deterministic", "draws", "inputs", "finite", "large", "gradient"}


def torch_softmax(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """A softmax at each position and, after the first, another of the pairwise values."""
    moved = torch.cat([f[:, :1], f[:, 1:] + g[:, y[:-1]]], 1)
    return moved.log_softmax(-1)[:, torch.arange(len(y)), y].sum(-1)


def numpy_softmax(f: Any, g: Any, y: Any) -> Any:
    moved = np.concatenate([f[:, :1], f[:, 1:] + g[:, y[:-1]]], 1)
    log_p = moved - np.logaddexp.reduce(moved, axis=-1, keepdims=True)
    return log_p[:, np.arange(len(y)), y].sum(-1)


def constrained(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """Label 2 may not follow label 0."""
    scores = g.clone()
    scores[:, 0, 2] = -torch.inf
    return torch_softmax(f, scores, y)


def batched_chain(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return Chain().log_prob(f, g, y, mask)


RIGHT: dict[str, Any] = {
    "Chain": Chain(),
    "name": "chain",
    "torch": torch_softmax,
    "numpy": numpy_softmax,
    "torch, values only": lambda f, g, y: torch_softmax(f, g, y).detach(),
    "list": lambda f, g, y: numpy_softmax(f, g, y).tolist(),
    "single precision": lambda f, g, y: torch_softmax(f.float(), g.float(), y),
    "batched": BlackBox(batched_chain, batched=True),
    "constrained": constrained,
}


@pytest.mark.parametrize("likelihood", RIGHT.values(), ids=RIGHT.keys())
@pytest.mark.parametrize("n_labels", [2, 3, 4])
def test_right_likelihoods_pass(likelihood: Any, n_labels: int) -> None:
    if likelihood is constrained and n_labels < 3:
        pytest.skip("knows three labels")
    check_likelihood(likelihood, n_labels, seed=n_labels)


def test_a_pseudo_likelihood_passes() -> None:
    check_likelihood(Piecewise(), normalised=False)


@pytest.mark.parametrize("check", likelihood_checks(Chain()), ids=str)
def test_checks_can_be_run_one_by_one(check: Check) -> None:
    check()


def names(likelihood: Any, **options: Any) -> set[str]:
    return {str(check) for check in likelihood_checks(likelihood, **options)}


def test_the_checks_that_apply() -> None:
    assert names(numpy_softmax) == ALWAYS | {"normalised"}
    assert names(numpy_softmax, normalised=False) == ALWAYS
    assert names(numpy_softmax, n_jobs=2) == ALWAYS | {"normalised", "pickle"}
    assert names(BlackBox(batched_chain, batched=True)) == ALWAYS | {"normalised", "padding"}
    assert names(Chain()) == ALWAYS | {"normalised", "padding"} | {
        "curvature",
        "shift",
        "marginals",
        "decode",
    }
    assert names(Piecewise(), normalised=False) == ALWAYS | {"padding", "curvature", "shift"}


class Changed(Chain):
    """A chain with one thing changed."""

    def __init__(self, **changes: Callable[..., Any]) -> None:
        self.changes = changes

    def _changed(self, name: str, value: Any, *arguments: Any) -> Any:
        return self.changes[name](value, *arguments) if name in self.changes else value

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        value = super().log_prob(f, g, y, mask)
        return self._changed("log_prob", value, f, g, y, mask)

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self._changed("marginals", super().marginals(f, g, mask), mask)

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self._changed("decode", super().decode(f, g, mask), mask)

    def curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        return self._changed("curvature", super().curvature(f, g, y, mask, basis))


class NotConcave(Structure):
    """Convex in one unary value, with a curvature that says so."""

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (f[..., 0].square() * mask).sum(-1) + 0 * g.sum((1, 2))[:, None]

    def curvature(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Curvature:
        unary = f.new_zeros((*mask.shape, f.shape[-1]))
        unary[..., 0] = -2.0 * mask
        return Curvature(unary.mT.diag_embed(), g.new_zeros((len(mask), *g.shape[1:])))


def shifting(f: Any, g: Any, y: Any) -> Any:
    """Adds to f in place."""
    f += 1.0
    return torch_softmax(f, g, y)


class Unsteady:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, f: Any, g: Any, y: Any) -> Any:
        self.calls += 1
        return numpy_softmax(f, g, y) - 1e-3 * self.calls


def with_a_lock() -> Callable[..., Any]:
    lock = threading.Lock()

    def locked(f: Any, g: Any, y: Any) -> Any:
        with lock:
            return numpy_softmax(f, g, y)

    return locked


def remembers_its_process() -> Callable[..., Any]:
    class Remembers:
        offset = 0.0

        def __call__(self, f: Any, g: Any, y: Any) -> Any:
            return np.zeros(len(f)) + self.offset

        def __setstate__(self, state: dict[str, Any]) -> None:
            self.offset = 1.0

        def __getstate__(self) -> dict[str, Any]:
            return {"offset": 0.0}

    return Remembers()


def naive(f: Any, g: Any, y: Any) -> Any:
    """Overflows: no logsumexp."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        weight = np.exp(20 * f)
        p = weight / weight.sum(-1, keepdims=True)
        return np.log(p[:, np.arange(len(y)), y]).sum(-1)


def underflows(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """-inf where a probability is less than single precision can hold."""
    p = (40 * f).float().softmax(-1)
    return p[:, torch.arange(len(y)), y].log().sum(-1).detach()


def squared_at(value: Tensor, *_: Any) -> Tensor:
    return value.detach() + (value - value.detach()) * 2


# For each check, likelihoods that it must catch and what it must say.
BROKEN: dict[str, tuple[str, Any, str]] = {
    "shape of a function": ("shape", lambda f, g, y: f.sum((1, 2))[:, None], "returned a torch"),
    "one draw too few": (
        "shape",
        lambda f, g, y: np.zeros(max(1, min(4, len(f)))),
        r"where \(S,\) = \(7,\)",
    ),
    "shape of a structure": ("shape", Changed(log_prob=lambda v, *_: v[0]), "one number for each"),
    "array of a structure": ("shape", Changed(log_prob=lambda v, *_: v.numpy()), "ndarray where"),
    "type of a structure": ("shape", Changed(log_prob=lambda v, *_: v.double()), "type of f"),
    "raises": ("shape", lambda f, g, y: np.zeros(len(f)) / f[:, 3, 0], "raised IndexError"),
    "random": ("deterministic", Unsteady(), "two values"),
    "mean over draws": ("draws", lambda f, g, y: torch_softmax(f - f.mean(0), g, y), "other draws"),
    "cumulative": ("draws", Changed(log_prob=lambda v, *_: v.cumsum(0)), "alone"),
    "f in place": ("inputs", shifting, "f was changed in place"),
    "g in place": (
        "inputs",
        Changed(log_prob=lambda v, f, g, *_: [v, g.zero_()][0]),
        "g was changed in place",
    ),
    "y in place": (
        "inputs",
        BlackBox(lambda f, g, y, mask: [batched_chain(f, g, y, mask), y.zero_()][0], batched=True),
        "y was changed in place",
    ),
    "impossible": ("finite", lambda f, g, y: np.full(len(f), -np.inf), "every labelling"),
    "underflow": ("finite", underflows, "possible in other draws"),
    "overflow": ("large", naive, "nan"),
    "overflow of a structure": (
        "large",
        Changed(log_prob=lambda v, f, *_: v + 0 * (f.abs().sum((2, 3)) ** 120)),
        "nan or",
    ),
    "padding counted": (
        "padding",
        BlackBox(lambda f, g, y, mask: batched_chain(f, g, y, torch.ones_like(mask)), batched=True),
        "alone than in a padded batch",
    ),
    "padding read": (
        "padding",
        Changed(log_prob=lambda v, f, g, y, m: v + 1e-3 * (f[..., 0] > 500).sum(-1)),
        "stands at padding",
    ),
    "batch mixed": (
        "padding",
        Changed(log_prob=lambda v, *_: v + torch.arange(v.shape[1]) * (v.shape[1] > 1) * 1e-3),
        "in a padded batch",
    ),
    "half a gradient": (
        "gradient",
        lambda f, g, y: torch_softmax(f, g.detach(), y),
        "not used: along a direction of g",
    ),
    "gradient doubled": ("gradient", Changed(log_prob=squared_at), "in f is not the slope"),
    "gradient in g": (
        "gradient",
        Changed(log_prob=lambda v, f, g, *_: v + (g - g.detach()).sum((1, 2))[:, None]),
        "in g is not the slope",
    ),
    "no gradient": ("gradient", Changed(log_prob=lambda v, *_: v.detach()), "carries no gradient"),
    "not normalised": ("normalised", Piecewise(), "of T = 2 sum to"),
    "normalised for one position": (
        "normalised",
        lambda f, g, y: numpy_softmax(f, g, y) - 0.1 * (len(y) == 4),
        "of T = 4 sum to 0.9",
    ),
    "shift": (
        "shift",
        Changed(log_prob=lambda v, f, g, y, mask: v + 0.1 * (f[..., 0] * mask).sum(-1)),
        "leave it False",
    ),
    "curvature halved": (
        "curvature",
        Changed(curvature=lambda c: Curvature(c.node / 2, c.next)),
        "curvature.node is not minus",
    ),
    "curvature of transitions": (
        "curvature",
        Changed(curvature=lambda c: Curvature(c.node, 0 * c.next)),
        "curvature.next is not minus",
    ),
    "curvature's shape": (
        "curvature",
        Changed(curvature=lambda c: Curvature(c.node, c.next[0])),
        r"curvature.next is \(3, 3\); return \(3, 3, 3\)",
    ),
    "not concave": ("curvature", NotConcave(), "not concave"),
    "marginals shifted": (
        "marginals",
        Changed(marginals=lambda m, mask: m.roll(1, -1)),
        "not the sums of exp",
    ),
    "marginals doubled": ("marginals", Changed(marginals=lambda m, mask: 2 * m), "sum to 2"),
    "marginals at padding": (
        "marginals",
        Changed(marginals=lambda m, mask: torch.where(mask[..., None], m, 0.5)),
        "at padding",
    ),
    "marginals of no draw": ("marginals", Changed(marginals=lambda m, mask: m[0]), "marginals are"),
    "decode another": (
        "decode",
        Changed(decode=lambda d, mask: torch.where(mask, (d + 1) % 3, 0)),
        "greatest log_prob",
    ),
    "decode outside": (
        "decode",
        Changed(decode=lambda d, mask: torch.where(mask, d + 3, 0)),
        "labels outside 0 to 2",
    ),
    "decode at padding": ("decode", Changed(decode=lambda d, mask: torch.where(mask, d, 1)), "at padding"),
    "decode of no draw": ("decode", Changed(decode=lambda d, mask: d[0]), "decode returned"),
    "lock": ("pickle", BlackBox(with_a_lock(), n_jobs=2), "n_jobs=1"),
    "changed by pickling": ("pickle", BlackBox(remembers_its_process(), n_jobs=2), "^a pickled copy"),
}


@pytest.mark.parametrize(("name", "likelihood", "says"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_likelihood_is_caught(name: str, likelihood: Any, says: str) -> None:
    (check,) = [check for check in likelihood_checks(likelihood) if check.name == name]
    with pytest.raises(AssertionError, match=says):
        check()


def test_every_check_has_a_likelihood_that_it_catches() -> None:
    every = names(Chain()) | names(numpy_softmax, n_jobs=2)
    assert {name for name, _, _ in BROKEN.values()} == every


def test_all_failures_in_one_error() -> None:
    wrong = Changed(log_prob=lambda v, *_: v.detach() - 1, decode=lambda d, mask: torch.where(mask, d, 1))
    with pytest.raises(AssertionError) as caught:
        check_likelihood(wrong)
    head, *failures = str(caught.value).split("\n")
    assert head == "3 of 13 checks of the likelihood failed"
    failed = [line.removeprefix("- ").partition(":")[0] for line in failures]
    assert failed == ["gradient", "normalised", "decode"]


def test_one_cause_is_told_once() -> None:
    def fails(f: Any, g: Any, y: Any) -> Any:
        raise ValueError("boom")

    with pytest.raises(AssertionError) as caught:
        check_likelihood(fails)
    assert len(str(caught.value).split("\n")) == 2
    assert "8 of 8 checks" in str(caught.value)


def test_a_bare_assertion_of_the_likelihood_is_a_failure_too() -> None:
    def asserts(value: Tensor, f: Tensor, *_: Any) -> Tensor:
        assert len(f) > 1
        return value

    with pytest.raises(AssertionError, match="- shape"):
        check_likelihood(Changed(log_prob=asserts))
