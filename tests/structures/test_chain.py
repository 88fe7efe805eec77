"""The chain against the enumeration of all labellings."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from structgp.structures import Chain, Curvature
from structgp.structures.linear_chain import messages
from structgp.structures.linear_chain.messages import Logs, Scaled, log_partition, pass_messages

pytestmark = pytest.mark.usefixtures("loops")

TOLERANCE = 1e-10

generated = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    """f (S, B, T, V), g (S, V, V) and the number of real positions of each sequence. What stands
    at padding is arbitrary."""

    f: np.ndarray
    g: np.ndarray
    lengths: tuple[int, ...]

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        mask = np.arange(self.f.shape[2]) < np.array(self.lengths)[:, None]
        return (torch.tensor(self.f, dtype=dtype), torch.tensor(self.g, dtype=dtype), torch.tensor(mask))

    def tables(self, oracles: ModuleType) -> list[list[Any]]:
        """One enumeration for each draw and sequence."""
        return [
            [oracles.chain_table(f[:n], g) for f, n in zip(draw, self.lengths, strict=True)]
            for draw, g in zip(self.f, self.g, strict=True)
        ]

    def log_z(self, oracles: ModuleType) -> np.ndarray:
        return np.array([[float(t.log_z) for t in row] for row in self.tables(oracles)])

    def nodes(self, oracles: ModuleType) -> np.ndarray:
        """(S, B, T, V), 0 at padding."""
        nodes = np.zeros_like(self.f)
        for s, row in enumerate(self.tables(oracles)):
            for b, table in enumerate(row):
                nodes[s, b, : self.lengths[b]] = table.nodes
        return nodes

    def pairs(self, oracles: ModuleType, weight: np.ndarray) -> np.ndarray:
        """(S, V, V) expected transition counts, summed over sequences with weight (S, B)."""
        return np.array(
            [
                sum(w * table.pairs for w, table in zip(ws, row, strict=True))
                for ws, row in zip(weight, self.tables(oracles), strict=True)
            ],
            dtype=float,
        )


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
    return Case(f, g, tuple(draw(st.lists(st.integers(0, T), min_size=B, max_size=B))))


def random_case(
    seed: int, lengths: tuple[int, ...], V: int, *, S: int = 2, size: float = 1.0, T: int = 0
) -> Case:
    rng = np.random.default_rng(seed)
    f = size * rng.normal(size=(S, len(lengths), T or max(lengths), V))
    return Case(f, size * rng.normal(size=(S, V, V)), lengths)


# In probability space the message of label 0 swamps label 1 at the first position, and then every
# way on from label 0 costs as much as it had gained.
UNDERFLOW = Case(
    np.array([[[[500.0, -500.0], [0.3, -0.2]], [[500.0, -500.0], [400.0, -400.0]]]]),
    np.array([[[-500.0, -500.0], [500.0, 500.0]]]),
    (2, 2),
)
# All of the second sequence is padding.
NOTHING = Case(np.full((1, 2, 2, 2), 7.0), np.full((1, 2, 2), 3.0), (2, 0))


def assert_matches_enumeration(case: Case, oracles: ModuleType, tolerance: float = TOLERANCE) -> None:
    f, g, mask = case.tensors()
    f.requires_grad_()
    g.requires_grad_()
    expected = case.log_z(oracles)

    log_z = log_partition(f, g, mask)
    close = tolerance * np.maximum(1, np.abs(expected))
    assert (np.abs(log_z.detach().numpy() - expected) <= close).all()

    nodes = case.nodes(oracles)
    marginals = Chain().marginals(f, g, mask).numpy()
    np.testing.assert_allclose(marginals, nodes, rtol=0, atol=tolerance)

    weight = np.random.default_rng(0).uniform(-1, 1, size=expected.shape)
    grad_f, grad_g = torch.autograd.grad((log_z * torch.tensor(weight)).sum(), (f, g))
    np.testing.assert_allclose(grad_f, weight[..., None, None] * nodes, rtol=0, atol=tolerance)
    np.testing.assert_allclose(grad_g, case.pairs(oracles, weight), rtol=0, atol=tolerance)


@generated
@given(cases())
@example(UNDERFLOW)
@example(NOTHING)
def test_any_potentials_match_enumeration(oracles: ModuleType, case: Case) -> None:
    assert_matches_enumeration(case, oracles)


@generated
@given(cases(size=10.0))
@example(NOTHING)
def test_moderate_potentials_match_enumeration(oracles: ModuleType, case: Case) -> None:
    assert_matches_enumeration(case, oracles)


@settings(generated, max_examples=30)
@given(cases(size=112.0))
def test_widest_potentials_of_probability_space(oracles: ModuleType, case: Case) -> None:
    """Spreads of 224 in f and in g: as much as the fast path is trusted with."""
    f, g, mask = case.tensors()
    assert not isinstance(pass_messages(f, g, mask), Logs)
    assert_matches_enumeration(case, oracles)


@generated
@given(cases(forbid=True))
def test_forbidden_labels_and_transitions(oracles: ModuleType, case: Case) -> None:
    with np.errstate(invalid="ignore", divide="ignore"):
        assume(np.isfinite(case.log_z(oracles)).all())
    assert_matches_enumeration(case, oracles)


def test_a_forbidden_transition(oracles: ModuleType) -> None:
    case = random_case(0, (4, 3), 3)
    case.g[:, 0, 1] = -np.inf
    case.g[0, 2, :2] = -np.inf
    assert_matches_enumeration(case, oracles)
    f, g, mask = case.tensors()
    y = torch.tensor([[0, 1, 2, 2], [0, 0, 0, 0]])
    value = Chain().log_prob(f, g, y, mask)
    assert (value[:, 0] == -torch.inf).all()
    assert value[:, 1].isfinite().all()


@generated
@given(cases(size=20.0))
@example(NOTHING)
def test_two_ways_to_carry_the_numbers(oracles: ModuleType, case: Case) -> None:
    f, g, mask = case.tensors()
    weight = torch.linspace(-1, 2, mask.shape[0], dtype=f.dtype).expand(f.shape[0], -1)
    scaled, logs = Scaled(f, g, mask), Logs(f, g, mask)
    for way in (scaled, logs):
        log_z = case.log_z(oracles)
        np.testing.assert_allclose(way.log_z, log_z, rtol=TOLERANCE, atol=TOLERANCE)
        nodes, pairs = way.gradients(weight)
        expected = case.nodes(oracles)
        np.testing.assert_allclose(way.node_marginals(), expected, rtol=0, atol=TOLERANCE)
        expected = weight.numpy()[..., None, None] * expected
        np.testing.assert_allclose(nodes, expected, rtol=0, atol=TOLERANCE)
        expected = case.pairs(oracles, weight.numpy())
        np.testing.assert_allclose(pairs, expected, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(scaled.log_z, logs.log_z, rtol=1e-11, atol=1e-11)
    for one, other in zip(scaled.gradients(weight), logs.gradients(weight), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
    for one, other in zip(scaled.walk(), logs.walk(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_wide_potentials_take_the_careful_way() -> None:
    f, g, mask = random_case(1, (3,), 2).tensors()
    assert not isinstance(pass_messages(f, g, mask), Logs)
    assert isinstance(pass_messages(1000 * f, g, mask), Logs)
    assert isinstance(pass_messages(f, 1000 * g, mask), Logs)
    wide = (50 * f).float(), (50 * g).float(), mask
    assert not isinstance(pass_messages(*wide), Logs)
    assert isinstance(pass_messages((1000 * f).float(), g.float(), mask), Logs)
    g[0, 0, 0] = -torch.inf
    assert not isinstance(pass_messages(f, g, mask), Logs)
    # From label 1 to label 0 there is no way back: what is lost on it stays lost.
    g[0, 0, 1] = -torch.inf
    assert isinstance(pass_messages(100 * f, g, mask), Logs)
    g[0, 1] = -torch.inf
    assert isinstance(pass_messages(f, g, mask), Logs)


def test_single_precision_that_is_too_narrow_is_left_for_a_while() -> None:
    """All that messages are asked for, in single precision and as log space in double has it."""
    generator = torch.Generator().manual_seed(3)
    f, g = (30 * torch.randn(shape, generator=generator) for shape in ((3, 4, 6, 5), (3, 5, 5)))
    mask = torch.arange(6) < torch.tensor([[6], [4], [1], [5]])
    narrowed, logs = pass_messages(f, g, mask), pass_messages(f.double(), 1.0 * g.double(), mask)
    assert not isinstance(narrowed, Logs)
    weight = torch.rand(3, 4, generator=generator)
    asked = [
        lambda m, w: (m.log_z,),
        lambda m, w: m.gradients(w),
        lambda m, w: (m.node_marginals(),),
        lambda m, w: m.walk(),
        lambda m, w: m.next_variances(),
    ]
    for ask in asked:
        for here, there in zip(ask(narrowed, weight), ask(logs, weight.double()), strict=True):
            assert here.dtype == torch.float32
            torch.testing.assert_close(here.double(), there, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 400.0])
def test_batch_is_its_sequences_one_by_one(size: float) -> None:
    lengths = (5, 1, 3, 5, 0)
    f, g, mask = random_case(2, lengths, 3, size=size).tensors()
    y = torch.randint(3, mask.shape, generator=torch.Generator().manual_seed(0))
    together = Chain().log_prob(f, g, y, mask)
    marginals = Chain().marginals(f, g, mask)
    decoded = Chain().decode(f, g, mask)
    for b, n in enumerate(lengths):
        n = max(n, 1)
        one = f[:, b : b + 1, :n], g, mask[b : b + 1, :n]
        alone = Chain().log_prob(one[0], g, y[b : b + 1, :n], one[2])
        torch.testing.assert_close(together[:, b : b + 1], alone, rtol=1e-12, atol=1e-10)
        alone = Chain().marginals(*one)
        torch.testing.assert_close(marginals[:, b : b + 1, :n], alone, rtol=0, atol=1e-11)
        assert (decoded[:, b : b + 1, :n] == Chain().decode(*one)).all()


@generated
@given(cases(), st.integers(1, 3), st.integers(0, 2**31))
def test_padding_changes_nothing(case: Case, extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    S, B, T, V = case.f.shape
    junk = rng.uniform(-500, 500, size=(S, B, T + extra, V))
    labels = rng.integers(-1000, 1000, size=(B, T + extra))
    for b, n in enumerate(case.lengths):
        junk[:, b, :n] = case.f[:, b, :n]
        labels[b, :n] %= V
    wide = Case(junk, case.g, case.lengths)

    results = []
    for each, y in ((case, labels[:, :T]), (wide, labels)):
        f, g, mask = each.tensors()
        f.requires_grad_()
        g.requires_grad_()
        value = Chain().log_prob(f, g, torch.tensor(y), mask)
        grad_f, grad_g = torch.autograd.grad(value.sum(), (f, g))
        assert (grad_f[:, ~mask] == 0).all()
        moments = Chain().curvature(f, g, torch.tensor(y), mask)
        results.append(
            [
                value.detach(),
                grad_f[:, :, :T],
                grad_g,
                Chain().marginals(f, g, mask)[:, :, :T],
                Chain().decode(f, g, mask)[:, :, :T],
                moments.node[:, :, :T, :T],
                moments.next,
            ]
        )
        assert (Chain().marginals(f, g, mask)[:, ~mask] == 0).all()
        assert (Chain().decode(f, g, mask)[:, ~mask] == 0).all()
    for narrow, padded in zip(*results, strict=True):
        torch.testing.assert_close(narrow, padded, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_whatever_stands_at_padding_is_ignored(junk: float) -> None:
    f, g, mask = random_case(8, (3, 1, 0), 2).tensors()
    y = torch.zeros_like(mask, dtype=torch.int64)
    results = []
    for at_padding in (0.0, junk):
        f = torch.where(mask[..., None], f, at_padding).requires_grad_()
        g.requires_grad_()
        value = Chain().log_prob(f, g, y, mask)
        grads = torch.autograd.grad(value.sum(), (f, g))
        moments = Chain().curvature(f, g, y, mask)
        parts = [value, *grads, Chain().marginals(f, g, mask), Chain().decode(f, g, mask)]
        results.append([*parts, moments.node, moments.next])
    for clean, junky in zip(*results, strict=True):
        torch.testing.assert_close(junky, clean, rtol=0, atol=0)


def test_a_sequence_of_nothing_but_padding() -> None:
    f, g, mask = random_case(3, (0, 0), 3, T=2).tensors()
    f.requires_grad_()
    g.requires_grad_()
    value = log_partition(f, g, mask)
    assert (value == 0).all()
    for grad in torch.autograd.grad(value.sum(), (f, g)):
        assert (grad == 0).all()
    assert (Chain().marginals(f, g, mask) == 0).all()
    assert (Chain().log_prob(f, g, torch.zeros(2, 2, dtype=torch.int64), mask) == 0).all()


@pytest.mark.parametrize("way", ["scaled", "logs"])
def test_gradients_against_finite_differences(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "logs":
        monkeypatch.setitem(messages.SAFE_SPREAD, torch.float64, -1.0)
    f, g, mask = random_case(4, (3, 1, 4), 3).tensors()
    assert isinstance(pass_messages(f, g, mask), Logs) == (way == "logs")
    f.requires_grad_()
    g.requires_grad_()
    y = torch.tensor([[0, 2, 1, 0], [1, 0, 0, 0], [2, 2, 0, 1]])
    assert torch.autograd.gradcheck(lambda f, g: log_partition(f, g, mask), (f, g))
    assert torch.autograd.gradcheck(lambda f, g: Chain().log_prob(f, g, y, mask), (f, g))


@settings(generated, max_examples=30)
@given(cases(size=30.0))
def test_probabilities_of_all_labellings_sum_to_one(oracles: ModuleType, case: Case) -> None:
    f, g, _ = case.tensors()
    y = torch.tensor(oracles.labellings(*f.shape[2:]))
    every = f[:, :1].expand(-1, len(y), -1, -1)
    log_prob = Chain().log_prob(every, g, y, torch.ones_like(y, dtype=torch.bool))
    assert (log_prob <= 1e-12).all()
    torch.testing.assert_close(log_prob.exp().sum(-1), torch.ones_like(log_prob[:, 0]))
    for s, g_s in enumerate(case.g):
        table = oracles.chain_table(case.f[s, 0], g_s)
        expected = (table.score - table.log_z).astype(float)
        np.testing.assert_allclose(log_prob[s], expected, rtol=TOLERANCE, atol=TOLERANCE)


@generated
@given(cases())
@example(UNDERFLOW)
def test_viterbi_is_the_best_of_all_labellings(oracles: ModuleType, case: Case) -> None:
    f, g, mask = case.tensors()
    decoded = Chain().decode(f, g, mask).numpy()
    assert decoded.dtype == np.int64
    for s, row in enumerate(case.tables(oracles)):
        for b, table in enumerate(row):
            n = case.lengths[b]
            assert (decoded[s, b, n:] == 0).all()
            (here,) = np.flatnonzero((table.labels == decoded[s, b, :n]).all(-1))
            assert table.score[here] == pytest.approx(table.score.max(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("size", "close"), [(1.0, 1e-4), (40.0, 1e-2)])
def test_single_precision_is_close_to_double(size: float, close: float) -> None:
    """size 40 is past what single precision can carry in probability space; its log-scores of about
    5,000 leave three digits, and transition counts sum a hundred of them."""
    case = random_case(5, (50, 31, 50), 17, size=size)
    y = torch.randint(17, (3, 50), generator=torch.Generator().manual_seed(0))
    results = []
    for dtype in (torch.float32, torch.float64):
        f, g, mask = (x.requires_grad_(x.is_floating_point()) for x in case.tensors(dtype))
        value = Chain().log_prob(f, g, y, mask)
        assert value.dtype == dtype
        grads = torch.autograd.grad(value.sum(), (f, g))
        results.append([x.double() for x in (value.detach(), *grads, Chain().marginals(f, g, mask))])
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=close, atol=close)


def curvature_of(case: Case) -> Curvature:
    f, g, mask = case.tensors()
    return Chain().curvature(f, g, torch.zeros_like(mask, dtype=torch.int64), mask)


@generated
@given(st.one_of(cases(size=3.0), cases()))
@example(UNDERFLOW)
@example(NOTHING)
def test_curvature_is_the_covariance_of_labels(oracles: ModuleType, case: Case) -> None:
    curvature = curvature_of(case)
    S, B, T, V = case.f.shape
    unary, pairwise = np.zeros((B, V, T, T)), np.zeros((V, V))
    for row in case.tables(oracles):
        for b, table in enumerate(row):
            n = case.lengths[b]
            unary[b, :, :n, :n] += table.node_covariance / S
            pairwise += table.count_variance / S
    np.testing.assert_allclose(curvature.node, unary, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(curvature.next.sum(0), pairwise, rtol=0, atol=TOLERANCE)


def test_curvature_of_forbidden_transitions(oracles: ModuleType) -> None:
    case = random_case(6, (4, 2), 3, S=1)
    case.g[:, 0, :2] = -np.inf
    case.g[:, 2, 1] = -np.inf
    curvature = curvature_of(case)
    ((long, short),) = case.tables(oracles)
    np.testing.assert_allclose(curvature.node[0], long.node_covariance, rtol=0, atol=TOLERANCE)
    expected = (long.count_variance + short.count_variance).astype(float)
    np.testing.assert_allclose(curvature.next.sum(0), expected, rtol=0, atol=TOLERANCE)


def test_curvature_where_a_label_ends_the_sequence(oracles: ModuleType) -> None:
    """Nothing may follow label 1."""
    case = random_case(9, (4,), 3, S=1)
    case.g[:, 1] = -np.inf
    curvature = curvature_of(case)
    ((table,),) = case.tables(oracles)
    np.testing.assert_allclose(curvature.node[0], table.node_covariance, rtol=0, atol=TOLERANCE)
    expected = table.count_variance.astype(float)
    np.testing.assert_allclose(curvature.next.sum(0), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_curvature_is_minus_the_hessian(size: float) -> None:
    case = random_case(7, (6, 4, 1), 3, size=size)
    f, g, mask = case.tensors()
    _, B, T, V = f.shape
    y = torch.zeros(B, T, dtype=torch.int64)
    curvature = Chain().curvature(f, g, y, mask)
    assert torch.linalg.eigvalsh(curvature.node).min() > -1e-12
    assert (curvature.next > -1e-12).all()

    def gradients(f: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        f, g = f.clone().requires_grad_(), g.clone().requires_grad_()
        return torch.autograd.grad(Chain().log_prob(f, g, y, mask).sum(), (f, g))

    h = 1e-5
    for t in range(T):
        for j in range(V):
            step = torch.zeros_like(f)
            step[:, :, t, j] = h
            change = (gradients(f + step, g)[0] - gradients(f - step, g)[0]) / (2 * h)
            torch.testing.assert_close(
                curvature.node[:, j, t], -change[..., j].mean(0), rtol=1e-5, atol=1e-6
            )
    for i in range(V):
        for j in range(V):
            step = torch.zeros_like(g)
            step[:, i, j] = h
            change = (gradients(f, g + step)[1] - gradients(f, g - step)[1]) / (2 * h)
            torch.testing.assert_close(
                curvature.next.sum(0)[i, j], -change[:, i, j].mean(), rtol=1e-5, atol=1e-6
            )


def test_no_positions_at_all() -> None:
    f, g = torch.zeros(2, 3, 0, 4, dtype=torch.float64), torch.zeros(2, 4, 4, dtype=torch.float64)
    assert (log_partition(f, g, torch.zeros(3, 0, dtype=torch.bool)) == 0).all()
