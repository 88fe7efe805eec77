"""The piecewise pseudo-likelihood against its definition, written out factor by factor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from structgp.structures import Chain, Piecewise

TOLERANCE = 1e-10

generated = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    """f (S, B, T, V), g (S, V, V), y (B, T) and the number of real positions of each sequence."""

    f: np.ndarray
    g: np.ndarray
    y: np.ndarray
    lengths: tuple[int, ...]

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mask = np.arange(self.f.shape[2]) < np.array(self.lengths)[:, None]
        f, g = torch.tensor(self.f, dtype=dtype), torch.tensor(self.g, dtype=dtype)
        return f, g, torch.tensor(self.y), torch.tensor(mask)

    def expected(self) -> np.ndarray:
        """(S, B) values, in extended precision where the machine has it."""
        return np.array(
            [
                [reference(f[:n], g, y[:n]) for f, y, n in zip(draw, self.y, self.lengths, strict=True)]
                for draw, g in zip(self.f, self.g, strict=True)
            ],
            dtype=float,
        )


def conditional(scores: np.ndarray, label: int) -> np.longdouble:
    """log p(label) under a softmax of scores; -inf if its score is."""
    scores = scores.astype(np.longdouble)
    if scores[label] == -np.inf:
        return np.longdouble(-np.inf)
    return scores[label] - scores.max() - np.log(np.exp(scores - scores.max()).sum())


def reference(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> np.longdouble:
    total = np.longdouble(0)
    for t, label in enumerate(y):
        total += conditional(f[t], label)
        if t > 0:
            total += conditional(g[y[t - 1]], label)
            total += conditional(g[:, label], y[t - 1])
    return total


@st.composite
def cases(draw: st.DrawFn, size: float = 500.0, *, forbid: bool = False) -> Case:
    S, B = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    T, V = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    number = st.one_of(st.floats(-size, size), st.sampled_from([-size, 0.0, size]))
    f = draw(arrays(float, (S, B, T, V), elements=number))
    g = draw(arrays(float, (S, V, V), elements=number))
    if forbid:
        f[draw(arrays(bool, f.shape))] = -np.inf
        g[draw(arrays(bool, g.shape))] = -np.inf
    y = draw(arrays(np.int64, (B, T), elements=st.integers(0, V - 1)))
    return Case(f, g, y, tuple(draw(st.lists(st.integers(0, T), min_size=B, max_size=B))))


def random_case(seed: int, lengths: tuple[int, ...], V: int, *, S: int = 2) -> Case:
    rng = np.random.default_rng(seed)
    B, T = len(lengths), max(lengths)
    f, g = rng.normal(size=(S, B, T, V)), rng.normal(size=(S, V, V))
    return Case(f, g, rng.integers(V, size=(B, T)), lengths)


def gradients(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    f, g, y, mask = case.tensors()
    f.requires_grad_()
    g.requires_grad_()
    value = Piecewise().log_prob(f, g, y, mask)
    return value.detach(), *torch.autograd.grad(value.sum(), (f, g))


NOTHING = Case(np.full((1, 2, 2, 2), 7.0), np.full((1, 2, 2), 3.0), np.ones((2, 2), int), (2, 0))
# Label 1 ends a sequence, and label 0 begins it.
ONE_WAY = Case(
    np.zeros((1, 2, 2, 2)),
    np.array([[[-np.inf, 0.5], [-np.inf, -np.inf]]]),
    np.array([[0, 1], [1, 0]]),
    (2, 2),
)


@generated
@given(st.one_of(cases(size=5.0), cases()))
@example(NOTHING)
def test_any_potentials_match_the_definition(case: Case) -> None:
    value = Piecewise().log_prob(*case.tensors())
    np.testing.assert_allclose(value, case.expected(), rtol=TOLERANCE, atol=TOLERANCE)
    assert (value <= 0).all()


@generated
@given(cases(forbid=True))
@example(ONE_WAY)
def test_forbidden_labels_and_transitions(case: Case) -> None:
    """-inf scores make values -inf, and no gradient nan."""
    value, *grads = gradients(case)
    np.testing.assert_allclose(value, case.expected(), rtol=TOLERANCE, atol=TOLERANCE)
    for grad in grads:
        assert grad.isfinite().all()


def test_what_a_label_that_ends_sequences_leaves_to_the_others() -> None:
    value, grad_f, grad_g = gradients(ONE_WAY)
    # The pair 0 -> 1 is the only one possible, so its conditionals are 1.
    torch.testing.assert_close(value, torch.tensor([[-2 * np.log(2), -np.inf]]).double())
    torch.testing.assert_close(grad_f[0, 0], torch.tensor([[0.5, -0.5], [-0.5, 0.5]]).double())
    assert (grad_g[0, 0] == 0).all()


@pytest.mark.parametrize("way", ["rows", "columns"])
def test_conditionals_of_a_pair_sum_to_one(way: str) -> None:
    """With f = 0 and T = 2, what is left after one conditional is the other."""
    case = random_case(0, (2,), 3)
    g = torch.tensor(case.g)
    f = torch.zeros(2, 9, 2, 3, dtype=g.dtype)
    y = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    value = Piecewise().log_prob(f, g, y, torch.ones_like(y, dtype=torch.bool)).reshape(2, 3, 3)
    value = value + 2 * np.log(3)
    dim, other = (-1, -2) if way == "rows" else (-2, -1)
    left = (value - g.log_softmax(other)).exp().sum(dim)
    torch.testing.assert_close(left, torch.ones_like(left))


def test_one_position_is_the_chain() -> None:
    f, g, y, mask = random_case(1, (1, 1, 1), 4).tensors()
    expected = Chain().log_prob(f, g, y, mask)
    torch.testing.assert_close(Piecewise().log_prob(f, g, y, mask), expected)
    one = Piecewise().curvature(f, g, y, mask)
    other = Chain().curvature(f, g, y, mask)
    torch.testing.assert_close(one.node, other.node)
    assert (one.next == 0).all()


def test_without_pairwise_scores_it_is_the_chain_less_a_constant() -> None:
    case = random_case(2, (4, 2, 3), 3)
    f, g, y, mask = case.tensors()
    g = torch.zeros_like(g)
    constant = 2 * (torch.tensor(case.lengths) - 1) * np.log(3)
    expected = Chain().log_prob(f, g, y, mask) - constant
    torch.testing.assert_close(Piecewise().log_prob(f, g, y, mask), expected)


def test_a_constant_added_to_scores_changes_nothing() -> None:
    f, g, y, mask = random_case(3, (4, 2), 3).tensors()
    value = Piecewise().log_prob(f, g, y, mask)
    moved = f + torch.randn(2, 2, 4, 1, dtype=f.dtype), g + torch.randn(2, 1, 1, dtype=f.dtype)
    torch.testing.assert_close(Piecewise().log_prob(*moved, y, mask), value)


def test_one_label_is_certain() -> None:
    assert (Piecewise().log_prob(*random_case(4, (4, 1), 1).tensors()) == 0).all()


def test_gradients_against_finite_differences() -> None:
    f, g, y, mask = random_case(5, (3, 1, 4, 0), 3).tensors()
    f.requires_grad_()
    g.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, g: Piecewise().log_prob(f, g, y, mask), (f, g))


@generated
@given(cases(), st.integers(1, 3), st.integers(0, 2**31))
def test_padding_changes_nothing(case: Case, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    S, B, T, V = case.f.shape
    f = rng.uniform(-500, 500, size=(S, B, T + extra, V))
    y = rng.integers(-1000, 1000, size=(B, T + extra))
    for b, n in enumerate(case.lengths):
        f[:, b, :n], y[b, :n] = case.f[:, b, :n], case.y[b, :n]
    wide = Case(f, case.g, y, case.lengths)
    results = []
    for each in (case, wide):
        value, grad_f, grad_g = gradients(each)
        assert (grad_f[:, ~each.tensors()[3]] == 0).all()
        bend = Piecewise().curvature(*each.tensors())
        unary = bend.node[:, :, :T, :T]
        assert (bend.node[:, :, T:] == 0).all()
        results.append([value, grad_f[:, :, :T], grad_g, unary, bend.next.sum(0)])
    for narrow, padded in zip(*results, strict=True):
        torch.testing.assert_close(narrow, padded, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_whatever_stands_at_padding_is_ignored(junk: float) -> None:
    f, g, y, mask = random_case(6, (3, 1, 0), 2).tensors()
    results = []
    for at_padding in (0.0, junk):
        f = torch.where(mask[..., None], f, at_padding).requires_grad_()
        g.requires_grad_()
        value = Piecewise().log_prob(f, g, y, mask)
        grads = torch.autograd.grad(value.sum(), (f, g))
        bend = Piecewise().curvature(f, g, y, mask)
        results.append([value, *grads, bend.node, bend.next.sum(0)])
    for clean, junky in zip(*results, strict=True):
        torch.testing.assert_close(junky, clean, rtol=0, atol=0)


@pytest.mark.parametrize("letter", ["f", "g"])
def test_nan_at_a_real_position_is_not_hidden(letter: str) -> None:
    f, g, y, mask = random_case(7, (3, 2), 2).tensors()
    (f if letter == "f" else g)[0, 0, 0] = torch.nan
    y[0] = 0
    assert Piecewise().log_prob(f, g, y, mask)[0, 0].isnan()


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_curvature_is_minus_the_hessian(size: float) -> None:
    case = random_case(8, (5, 4, 1, 0), 3)
    case = Case(size * case.f, size * case.g, case.y, case.lengths)
    f, g, y, mask = case.tensors()
    _, _, T, V = f.shape
    bend = Piecewise().curvature(f, g, y, mask)
    assert torch.linalg.eigvalsh(bend.node).min() > -1e-12
    assert (bend.next > -1e-12).all()
    h = 1e-5

    def change(step: Tensor, letter: str) -> Tensor:
        ahead, behind = (
            gradients(
                Case(case.f + a * step.numpy(), case.g, case.y, case.lengths)
                if letter == "f"
                else Case(case.f, case.g + a * step.numpy(), case.y, case.lengths)
            )["fg".index(letter) + 1]
            for a in (1, -1)
        )
        return (ahead - behind) / (2 * h)

    for t in range(T):
        for j in range(V):
            step = torch.zeros_like(f)
            step[:, :, t, j] = h
            expected = -change(step, "f")[..., j].mean(0)
            torch.testing.assert_close(bend.node[:, j, t], expected, rtol=1e-5, atol=1e-6)
    for i in range(V):
        for j in range(V):
            step = torch.zeros_like(g)
            step[:, i, j] = h
            expected = -change(step, "g")[:, i, j].mean()
            torch.testing.assert_close(bend.next.sum(0)[i, j], expected, rtol=1e-5, atol=1e-6)


def test_curvature_of_forbidden_transitions() -> None:
    bend = Piecewise().curvature(*ONE_WAY.tensors())
    assert (bend.next == 0).all()
    expected = torch.full((2, 2, 2), 0.25, dtype=torch.float64).diag_embed()
    torch.testing.assert_close(bend.node, expected)


def test_it_is_concave() -> None:
    f, g, y, mask = random_case(9, (4, 3), 3, S=50).tensors()
    other_f, other_g, *_ = random_case(10, (4, 3), 3, S=50).tensors()
    middle = Piecewise().log_prob((f + other_f) / 2, (g + other_g) / 2, y, mask)
    ends = [Piecewise().log_prob(*each, y, mask) for each in ((f, g), (other_f, other_g))]
    assert (middle >= (ends[0] + ends[1]) / 2 - 1e-12).all()


def test_single_precision_is_close_to_double() -> None:
    case = random_case(11, (50, 31, 50), 17)
    results = []
    for dtype in (torch.float32, torch.float64):
        f, g, y, mask = case.tensors(dtype)
        value = Piecewise().log_prob(f.requires_grad_(), g.requires_grad_(), y, mask)
        assert value.dtype == dtype
        grads = torch.autograd.grad(value.sum(), (f, g))
        results.append([x.detach().double() for x in (value, *grads)])
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-4, atol=1e-4)


def test_no_positions_at_all() -> None:
    f, g = torch.zeros(2, 3, 0, 4, dtype=torch.float64), torch.zeros(2, 4, 4, dtype=torch.float64)
    y, mask = torch.zeros(3, 0, dtype=torch.int64), torch.zeros(3, 0, dtype=torch.bool)
    assert (Piecewise().log_prob(f, g, y, mask) == 0).all()
    assert (Piecewise().curvature(f, g, y, mask).next == 0).all()
