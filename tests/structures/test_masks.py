"""Rules, known and missing labels: the chain against the enumeration of what they leave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.structures import BlackBox, Chain, Differences, Piecewise, Rules, composite, keep_known
from structgp.structures.linear_chain.messages import (
    SAFE_SPREAD,
    Logs,
    Scaled,
    pass_messages,
    restricted_spread,
)
from structgp.structures.masks import steps_to_anywhere

pytestmark = pytest.mark.usefixtures("loops")

TOLERANCE = 1e-8

generated = settings(max_examples=50, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    """f (S, B, T, V), g (S, V, V), labels y (B, T) with -1 where one is missing, numbers of real positions,
    and what is allowed. Junk at padding."""

    f: np.ndarray
    g: np.ndarray
    y: np.ndarray
    lengths: tuple[int, ...]
    follows: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mask = np.arange(self.f.shape[2]) < np.array(self.lengths)[:, None]
        f, g = (torch.tensor(x, dtype=dtype) for x in (self.f, self.g))
        return f, g, torch.tensor(self.y), torch.tensor(mask)

    @property
    def chain(self) -> Chain:
        return Chain(Rules(*map(torch.tensor, (self.follows, self.starts, self.ends))))


def some_missing(y: Tensor, mask: Tensor) -> bool:
    return bool(((y < 0) & mask).any())


def restricted(case: Case, f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    rules = case.chain.rules
    return (f, g) if rules is None else rules.restrict((f, g), mask)


class Tables:
    """For each draw and sequence: the labellings that are allowed, and those that agree with y."""

    def __init__(self, case: Case, oracles: ModuleType) -> None:
        self.case = case
        rules = case.follows, case.starts, case.ends
        self.free: list[list[Any]] = []
        self.given: list[list[Any]] = []
        for f, g in zip(case.f, case.g, strict=True):
            self.free.append([])
            self.given.append([])
            for f_b, y, n in zip(f, case.y, case.lengths, strict=True):
                table = oracles.chain_table(f_b[:n], g)
                allowed = np.array([oracles.obeys(z, *rules) for z in table.labels])
                agreeing = np.array([oracles.agrees(z, y[:n]) for z in table.labels])
                self.free[-1].append(oracles.among(table, allowed))
                self.given[-1].append(oracles.among(table, allowed & agreeing))

    def __iter__(self) -> Any:
        """Draw, sequence, its length and its two tables."""
        S, B = self.case.f.shape[:2]
        for s, b in product(range(S), range(B)):
            yield s, b, self.case.lengths[b], self.free[s][b], self.given[s][b]

    @cached_property
    def feasible(self) -> bool:
        """Whether each sequence has a labelling that agrees."""
        return all(told.log_z > -np.inf for *_, told in self)


@st.composite
def cases(
    draw: st.DrawFn,
    sizes: tuple[float, ...] = (1.0, 30.0, 300.0),
    missing: float | None = None,
    bans: float | None = None,
    n_labels: int = 3,
) -> Case:
    """``missing``, ``bans`` : shares of the labels and of the rules."""
    S, B, T = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    V, size = draw(st.integers(2, n_labels)), draw(st.sampled_from(sizes))
    lengths = draw(st.lists(st.integers(0, T), min_size=B, max_size=B))
    missing = draw(st.sampled_from([0.0, 0.4, 1.0])) if missing is None else missing
    bans = draw(st.sampled_from([0.0, 0.2, 0.5])) if bans is None else bans
    return random_case(draw(st.integers(0, 2**16)), lengths, V, S, size, missing, bans, T)


def random_case(
    seed: int,
    lengths: Any,
    V: int = 3,
    S: int = 2,
    size: float = 1.0,
    missing: float = 0.4,
    bans: float = 0.2,
    T: int = 0,
) -> Case:
    rng = np.random.default_rng(seed)
    B, T = len(lengths), T or max(lengths)
    f, g = size * rng.normal(size=(S, B, T, V)), size * rng.normal(size=(S, V, V))
    y = np.where(rng.random((B, T)) < missing, -1, rng.integers(0, V, (B, T)))
    rules = (rng.random(shape) >= bans for shape in ((V, V), V, V))
    return Case(f, g, y, tuple(lengths), *rules)


def obeyed(seed: int, lengths: Any, oracles: ModuleType, **options: Any) -> Case:
    """A random case whose labels the rules allow."""
    for attempt in range(200):
        case = random_case(1000 * seed + attempt, lengths, **options)
        if Tables(case, oracles).feasible:
            return case
    raise AssertionError("no such case")


# -- the chain ------------------------------------------------------------------------------------


def expected_log_prob(tables: Tables) -> np.ndarray:
    """-inf where the rules leave nothing."""
    value = np.full(tables.case.f.shape[:2], -np.inf)
    for s, b, _, free, told in tables:
        if told.log_z > -np.inf:
            value[s, b] = told.log_z - free.log_z
    return value


@generated
@given(cases())
def test_log_prob_and_its_gradient(oracles: ModuleType, case: Case) -> None:
    """The gradient is what is expected given the labels less what is expected without them."""
    f, g, y, mask = case.tensors()
    f.requires_grad_()
    g.requires_grad_()
    tables = Tables(case, oracles)
    expected = expected_log_prob(tables)
    value = case.chain.log_prob(f, g, y, mask)
    np.testing.assert_allclose(value.detach(), expected, rtol=TOLERANCE, atol=TOLERANCE)

    possible = torch.tensor(expected > -np.inf)
    weight = torch.linspace(0.5, 2, expected.size, dtype=f.dtype).view(expected.shape)
    grads = torch.autograd.grad((weight * value)[possible].sum(), (f, g), allow_unused=True)
    grad_f, grad_g = np.zeros(f.shape), np.zeros(g.shape)
    for s, b, n, free, told in tables:
        if possible[s, b]:
            grad_f[s, b, :n] += float(weight[s, b]) * (told.nodes - free.nodes).astype(float)
            grad_g[s] += float(weight[s, b]) * (told.pairs - free.pairs).astype(float)
    for found, by_hand in zip(grads, (grad_f, grad_g), strict=True):
        np.testing.assert_allclose(found, by_hand, rtol=0, atol=TOLERANCE)


def test_gradient_against_finite_differences(oracles: ModuleType) -> None:
    case = obeyed(1, (4, 1, 3), oracles)
    f, g, y, mask = case.tensors()
    assert some_missing(y, mask)
    f.requires_grad_()
    g.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, g: case.chain.log_prob(f, g, y, mask), (f, g))


@generated
@given(cases())
def test_marginals_walk_and_decoding(oracles: ModuleType, case: Case) -> None:
    """Of the labellings that are allowed; the labels known are passed in as banned others."""
    f, g, y, mask = case.tensors()
    structure = case.chain
    for known in (False, True):
        f_ = keep_known(f, y, mask) if known else f
        marginals = structure.marginals(f_, g, mask).numpy()
        node, step = (x.numpy() for x in structure.walk(f_, g, mask))
        decoded = structure.decode(f_, g, mask).numpy()
        for s, b, n, free, told in Tables(case, oracles):
            table = told if known else free
            for found in (marginals, node):
                np.testing.assert_allclose(found[s, b, :n], table.nodes, rtol=0, atol=TOLERANCE)
                assert not found[s, b, n:].any()
            pairs = node[s, b, : max(n - 1, 0), :, None] * step[s, b, : max(n - 1, 0)]
            for t, pair in enumerate(pairs):
                there = np.einsum("n,ni,nj->ij", table.prob, table.on[:, t], table.on[:, t + 1])
                np.testing.assert_allclose(pair, there.astype(float), rtol=0, atol=TOLERANCE)
            assert not step[s, b, max(n - 1, 0) :].any()
            assert not decoded[s, b, n:].any()
            if table.log_z > -np.inf:
                (here,) = np.flatnonzero((table.labels == decoded[s, b, :n]).all(-1))
                best = float(table.score.max())
                assert float(table.score[here]) == pytest.approx(best, rel=1e-12, abs=1e-12)


@generated
@given(cases(sizes=(1.0, 30.0), missing=0.0))
def test_curvature_under_rules(oracles: ModuleType, case: Case) -> None:
    f, g, y, mask = case.tensors()
    found = case.chain.curvature(f, g, y, mask)
    local = case.chain.local_curvature(f, g, y, mask)
    S, B, T, V = f.shape
    unary, pairwise, apart = np.zeros((B, V, T, T)), np.zeros((B, V, V)), np.zeros((B, V, V))
    for _, b, n, free, _ in Tables(case, oracles):
        unary[b, :, :n, :n] += (free.node_covariance / S).astype(float)
        pairwise[b] += (free.count_variance / S).astype(float)
        apart[b] += pair_variances(free) / S
    np.testing.assert_allclose(found.node, unary, rtol=0, atol=1e-7)
    np.testing.assert_allclose(found.next, pairwise, rtol=0, atol=1e-6)
    on_place = unary.diagonal(axis1=-1, axis2=-2).swapaxes(-1, -2)
    np.testing.assert_allclose(local.node, on_place, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(local.next, apart, rtol=0, atol=TOLERANCE)


def pair_variances(table: Any) -> np.ndarray:
    """(V, V) sum over places of the variance of whether i is followed by j there."""
    V, total = table.on.shape[-1], 0.0
    for t in range(table.on.shape[1] - 1):
        p = np.einsum("n,ni,nj->ij", table.prob, table.on[:, t], table.on[:, t + 1])
        total = total + (p - p**2)
    return np.broadcast_to(np.asarray(total, dtype=float), (V, V))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("bans", [0.0, 0.2])
def test_curvature_where_labels_are_missing(seed: int, bans: float, oracles: ModuleType) -> None:
    """Exact at the positions whose label is known, flat at the others, and nowhere negative."""
    case = obeyed(seed, (4, 1, 3), oracles, bans=bans)
    case.y[2, :3] = np.where(case.y[2, :3] < 0, case_labels(case, oracles), case.y[2, :3])
    f, g, y, mask = case.tensors()
    S, B, T, V = f.shape
    tables = Tables(case, oracles)
    assert tables.feasible
    if not some_missing(y, mask):
        case.y[0, 1] = -1
        f, g, y, mask = case.tensors()
        tables = Tables(case, oracles)
    found = case.chain.curvature(f, g, y, mask)
    local = case.chain.local_curvature(f, g, y, mask)
    known = ((y >= 0) & mask).numpy()
    unary, lost = np.zeros((B, V, T, T)), np.zeros((B, V, T, T))
    pairwise, less = np.zeros((B, V, V)), np.zeros((B, V, V))
    for _, b, n, free, told in tables:
        unary[b, :, :n, :n] += free.node_covariance.astype(float) / S
        lost[b, :, :n, :n] += (free.node_covariance - told.node_covariance).astype(float) / S
        pairwise[b] += free.count_variance.astype(float) / S
        less[b] += (pair_variances(free) - pair_variances(told)) / S
    both = known[:, None, :, None] & known[:, None, None]
    np.testing.assert_allclose(found.node, unary * both, rtol=0, atol=1e-7)
    # Minus the second derivatives, there: a label that is known has no variance.
    np.testing.assert_allclose(found.node.numpy() * both, lost * both, rtol=0, atol=1e-7)
    assert torch.linalg.eigvalsh(found.node).min() > -1e-12

    on_place = lost.diagonal(axis1=-1, axis2=-2).swapaxes(-1, -2).clip(min=0)
    np.testing.assert_allclose(local.node, on_place, rtol=0, atol=TOLERANCE)
    assert local.next.shape == found.next.shape == (B, V, V)
    np.testing.assert_allclose(local.next, less.clip(min=0), rtol=0, atol=TOLERANCE)
    whole = (known == mask.numpy()).all(-1)
    assert whole[2]
    expected = np.where(whole[:, None, None], pairwise, less.clip(min=0))
    np.testing.assert_allclose(found.next, expected, rtol=0, atol=1e-6)


def case_labels(case: Case, oracles: ModuleType) -> np.ndarray:
    """Labels of the third sequence that agree with those that it has."""
    table = Tables(case, oracles).given[0][2]
    labels: np.ndarray = table.labels[table.prob.argmax()]
    return labels


@pytest.mark.parametrize("basis", [None, "contrasts"])
def test_curvature_along_a_basis_where_labels_are_missing(basis: str | None, oracles: ModuleType) -> None:
    """The bend of log_prob along a direction, from differences of its values."""
    case = obeyed(3, (4,), oracles, S=1, bans=0.1)
    f, g, y, mask = case.tensors()
    y[0] = torch.tensor(oracles_labels(case, oracles))
    y[0, 2] = -1
    directions = torch.eye(3) if basis is None else torch.tensor([[1, 1], [-1, 1], [0, -2]])
    directions = directions.to(f)
    found = case.chain.curvature(f, g, y, mask, None if basis is None else directions)
    local = case.chain.local_curvature(f, g, y, mask, None if basis is None else directions)
    h = 1e-3
    for t, r in product((0, 1, 3), range(directions.shape[1])):
        step = torch.zeros_like(f)
        step[:, :, t] = h * directions[:, r]
        values = [case.chain.log_prob(f + k * step, g, y, mask) for k in (-1, 0, 1)]
        bend = -float(values[0] - 2 * values[1] + values[2]) / h**2
        assert float(found.node[0, r, t, t]) == pytest.approx(bend, abs=1e-5)
        assert float(local.node[0, t, r]) == pytest.approx(bend, abs=1e-5)


def oracles_labels(case: Case, oracles: ModuleType) -> np.ndarray:
    table = Tables(case, oracles).free[0][0]
    labels: np.ndarray = table.labels[table.prob.argmax()]
    return labels


# -- invariance and edges ---------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 400.0])
@pytest.mark.parametrize("seed", range(3))
def test_batch_is_its_sequences_one_by_one(seed: int, size: float, oracles: ModuleType) -> None:
    """Whatever the others know or do not, and however far they are padded."""
    lengths = (4, 1, 3, 4, 0)
    case = obeyed(seed, lengths, oracles, size=size, T=6)
    case.y[3] = oracles_known(case, oracles)
    f, g, y, mask = case.tensors()
    assert some_missing(y, mask)
    assert not some_missing(y[3:4], mask[3:4])
    structure = case.chain

    def everything(f: Tensor, y: Tensor, mask: Tensor) -> list[Tensor]:
        """Batch second."""
        curved, local = structure.curvature(f, g, y, mask), structure.local_curvature(f, g, y, mask)
        labels, values = structure.n_best(f, g, mask, 3)
        return [
            structure.log_prob(f, g, y, mask),
            structure.marginals(f, g, mask).flatten(2),
            structure.decode(f, g, mask),
            torch.where(values[..., None] > -torch.inf, labels, 0).flatten(2),
            values,
            curved.node[None].flatten(2),
            curved.next[None],
            local.node[None].flatten(2),
            local.next[None],
        ]

    together = everything(f, y, mask)
    for b, n in enumerate(lengths):
        one, T = slice(b, b + 1), f.shape[2]
        for found, alone in zip(together, everything(f[:, one], y[one], mask[one]), strict=True):
            torch.testing.assert_close(found[:, one], alone, rtol=1e-10, atol=1e-7)
        if not n:
            continue
        # Junk at padding, labels among it.
        junk = torch.where(mask[..., None], f, torch.nan)[:, one]
        labels = torch.where(mask, y, 2)[one]
        for found, alone in zip(together, everything(junk, labels, mask[one]), strict=True):
            torch.testing.assert_close(found[:, one], alone, rtol=1e-10, atol=1e-7)
        short = structure.log_prob(f[:, one, :n], g, y[one, :n], mask[one, :n])
        torch.testing.assert_close(together[0][:, one], short, rtol=1e-10, atol=1e-8)
        short = structure.marginals(f[:, one, :n], g, mask[one, :n])
        padded = together[1][:, one].unflatten(2, (T, -1))[:, :, :n]
        torch.testing.assert_close(padded, short, rtol=0, atol=1e-8)


def oracles_known(case: Case, oracles: ModuleType) -> np.ndarray:
    """(T,) a labelling of the fourth sequence that is allowed."""
    table = Tables(case, oracles).given[0][3]
    y = np.zeros(case.f.shape[2], dtype=int)
    y[: case.lengths[3]] = table.labels[table.prob.argmax()]
    return y


@pytest.mark.parametrize("bans", [0.0, 0.2])
def test_all_labels_missing_say_nothing(bans: float, oracles: ModuleType) -> None:
    case = obeyed(0, (4, 1, 2, 0), oracles, missing=1.0, bans=bans)
    f, g, y, mask = case.tensors()
    f.requires_grad_()
    g.requires_grad_()
    value = case.chain.log_prob(f, g, y, mask)
    assert value.abs().max() < 1e-12
    for grad in torch.autograd.grad(value.sum(), (f, g)):
        assert grad.abs().max() < 1e-12
    assert not case.chain.curvature(f, g, y, mask).node.any()
    assert case.chain.local_curvature(f, g, y, mask).node.abs().max() < 1e-12


@pytest.mark.parametrize("size", [1.0, 400.0])
def test_nothing_possible_is_minus_infinity_and_never_nan(size: float) -> None:
    """The first sequence has no labelling of its length, the others have."""
    V = 3
    follows = np.array([[0, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=bool)  # at most three tokens
    free = np.ones(V, dtype=bool)
    case = random_case(0, (4, 3, 1), V, size=size, missing=1.0)
    case = replace(case, follows=follows, starts=free, ends=free)
    f, g, y, mask = case.tensors()
    f.requires_grad_()
    g.requires_grad_()
    for labels in (y, torch.zeros_like(y), torch.tensor([[0, -1, 2, 0], [0, 1, 2, 0], [-1] * 4])):
        value = case.chain.log_prob(f, g, labels, mask)
        assert (value[:, 0] == -torch.inf).all()
        assert not value.isnan().any()
        for grad in torch.autograd.grad(value[value > -torch.inf].sum(), (f, g)):
            assert grad.isfinite().all()
        for grad in torch.autograd.grad(case.chain.log_prob(f, g, labels, mask).sum(), (f, g)):
            assert grad.isfinite().all()
    marginals = case.chain.marginals(f, g, mask)
    assert not marginals[:, 0].any()
    sums = marginals[:, 1:].sum(-1)
    torch.testing.assert_close(sums, mask[1:].to(sums).expand_as(sums))
    node, step = case.chain.walk(f, g, mask)
    assert torch.equal(node, marginals)
    assert step.isfinite().all()
    labels, values = case.chain.n_best(f, g, mask, 2)
    assert (values[:, 0] == -torch.inf).all()
    # 0, 1, 2 is all there is for three tokens.
    assert torch.equal(values[:, 1] > -torch.inf, torch.tensor([[True, False]]).expand(2, -1))
    assert torch.equal(labels[:, 1, 0, :3], torch.tensor([[0, 1, 2]]).expand(2, -1))
    assert values[:, 1, 0].abs().max() < 1e-9
    assert case.chain.curvature(f, g, y, mask).node.isfinite().all()
    assert case.chain.local_curvature(f, g, y, mask).next.isfinite().all()


def test_labels_that_the_rules_forbid(oracles: ModuleType) -> None:
    """0 may not follow 1, nothing begins with 2 or ends with 1."""
    V = 3
    follows, starts, ends = np.ones((V, V), bool), np.ones(V, bool), np.ones(V, bool)
    follows[1, 0] = starts[2] = ends[1] = False
    case = replace(
        random_case(2, (3,) * 6, V),
        follows=follows,
        starts=starts,
        ends=ends,
        y=np.array([[1, 0, 0], [2, 0, 0], [0, 0, 1], [0, 0, 0], [-1, 1, 0], [-1, 1, -1]]),
    )
    f, g, y, mask = case.tensors()
    value = case.chain.log_prob(f, g, y, mask)
    assert (value > -torch.inf).tolist() == [[False, False, False, True, False, True]] * 2
    whole = case.chain.log_prob(f[:, :4], g, y[:4], mask[:4])
    torch.testing.assert_close(whole, value[:, :4])


def test_a_single_position(oracles: ModuleType) -> None:
    """Both the beginning and the end: a softmax over the labels that may be both."""
    starts, ends = np.array([1, 1, 0, 1], bool), np.array([1, 0, 1, 1], bool)
    case = replace(
        random_case(0, (1, 1), 4),
        follows=np.zeros((4, 4), bool),
        starts=starts,
        ends=ends,
        y=np.array([[3], [-1]]),
    )
    f, g, y, mask = case.tensors()
    kept = f[:, :, 0, [0, 3]].log_softmax(-1)
    value = case.chain.log_prob(f, g, y, mask)
    torch.testing.assert_close(value[:, 0], kept[:, 0, 1])
    assert value[:, 1].abs().max() < 1e-12
    marginals = case.chain.marginals(f, g, mask)[:, :, 0]
    torch.testing.assert_close(marginals[..., [0, 3]], kept.exp())
    assert not marginals[..., [1, 2]].any()
    assert case.chain.walk(f, g, mask)[1].shape == (2, 2, 0, 4, 4)


def test_rules_that_forbid_nothing_are_none() -> None:
    free = Rules(torch.ones(2, 2, dtype=torch.bool), *torch.ones(2, 2, dtype=torch.bool))
    assert free.is_free
    assert Chain(free).rules is None
    for name in ("follows", "starts", "ends"):
        changed = getattr(free, name).clone()
        changed.view(-1)[1] = False
        some = replace(free, **{name: changed})
        assert not some.is_free
        assert Chain(some).rules is some


def test_beginnings_and_ends_of_what_is_not_padding() -> None:
    """Lengths 3, 1 and 0; nothing begins with 0 or ends with 1."""
    f, mask = torch.zeros(1, 3, 3, 2), torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    follows = torch.tensor([[True, False], [True, True]])
    rules = Rules(follows, torch.tensor([False, True]), torch.tensor([True, False]))
    f_, g_ = rules.restrict((f, torch.zeros(1, 2, 2)), mask)
    banned = [[[1, 0], [0, 0], [0, 1]], [[1, 1], [0, 0], [0, 0]], [[0, 0]] * 3]
    assert (f_ == -torch.inf).int().tolist() == [banned]
    assert (g_ == -torch.inf).int().tolist() == [[[0, 1], [0, 0]]]
    assert not f.any()


def test_what_is_known_stays_and_what_is_padding_too() -> None:
    f = torch.arange(12.0).view(1, 2, 2, 3)
    y, mask = torch.tensor([[1, -1], [2, 0]]), torch.tensor([[True, True], [True, False]])
    kept = keep_known(f, y, mask)
    inf = torch.inf
    expected = [[[-inf, 1, -inf], [3, 4, 5]], [[-inf, -inf, 8], [9, 10, 11]]]
    assert kept.tolist() == [expected]


def test_single_precision_is_close_to_double(oracles: ModuleType) -> None:
    for size in (1.0, 30.0):
        case = obeyed(7, (4, 2, 3), oracles, size=size)
        single, double = case.tensors(torch.float32), case.tensors()
        for method in ("log_prob", "local_curvature"):
            one = getattr(case.chain, method)(*single)
            other = getattr(case.chain, method)(*double)
            if method == "local_curvature":
                one, other = one.node, other.node
            assert one.dtype == torch.float32
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


# -- the two ways to carry the numbers ----------------------------------------------------------------


def reaches(follows: np.ndarray, n: int) -> np.ndarray:
    """(V, V) whether there is a way of n steps, by trying all of them."""
    V = len(follows)
    found = np.zeros((V, V), bool)
    for way in product(range(V), repeat=n + 1):
        if all(follows[i, j] for i, j in pairwise(way)):
            found[way[0], way[-1]] = True
    return found


@settings(generated, max_examples=80)
@given(st.integers(1, 3), st.integers(0, 2**9 - 1))
def test_steps_to_anywhere(V: int, bits: int) -> None:
    follows = np.array([bits >> k & 1 for k in range(V * V)], bool).reshape(V, V)
    ways = [n for n in range(1, V * V - 2 * V + 3) if reaches(follows, n).all()]
    assert steps_to_anywhere(torch.tensor(follows)) == (ways[0] if ways else None)


@pytest.mark.parametrize("V", [2, 3, 4, 6])
def test_the_longest_way_to_anywhere(V: int) -> None:
    """A ring with one short cut takes as long as any (Wielandt)."""
    follows = torch.zeros(V, V, dtype=torch.bool)
    follows[range(V), [(i + 1) % V for i in range(V)]] = True
    assert steps_to_anywhere(follows) is None  # goes round in step
    follows[V - 1, 1 % V] = True
    assert steps_to_anywhere(follows) == V * V - 2 * V + 2


def crossing(size: float) -> Case:
    """Labels stand in a row and only neighbours follow. The first three positions want label 0, the last
    three label 3. The two steps between cost ``size`` each wherever they are, so ways across count alike;
    the message of label 2 at the third position is exp(-2 size) of that of label 0."""
    V, T = 4, 6
    f = np.full((1, 1, T, V), -size)
    f[..., :3, 0] = f[..., 3:, 3] = 0
    i = np.arange(V)
    follows, free = np.abs(i[:, None] - i) <= 1, np.ones(V, bool)
    return Case(f, np.zeros((1, V, V)), np.full((1, T), -1), (T,), follows, free, free)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 400.0), (torch.float32, 52.0)])
def test_a_detour_that_costs_more_than_a_message_can_hold(
    dtype: torch.dtype, size: float, oracles: ModuleType
) -> None:
    case = crossing(size)
    f, g, _, mask = case.tensors(dtype)
    f_, g_ = restricted(case, f, g, mask)
    assert size < SAFE_SPREAD[dtype]
    assert not isinstance(pass_messages(f_, g_, mask), Scaled)
    ((table,),) = Tables(case, oracles).free
    marginals = case.chain.marginals(f, g, mask)
    np.testing.assert_allclose(marginals[0, 0], table.nodes.astype(float), atol=1e-6)
    assert float(marginals[0, 0, 2, 2]) == pytest.approx(1 / 3, abs=1e-6)
    # What the bound keeps away from: two of the three ways are lost.
    careless = float(Scaled(f_, g_, mask, True).log_z)
    assert float(table.log_z) == pytest.approx(np.log(3) - 2 * size, rel=1e-9)
    assert careless == pytest.approx(-2 * size)


def test_a_detour_that_a_label_known_makes(oracles: ModuleType) -> None:
    """Every label follows every label in two steps, but not where one of them is ruled out."""
    follows = np.array([[1, 1, 0], [0, 0, 1], [1, 1, 1]], bool)
    assert steps_to_anywhere(torch.tensor(follows)) == 2
    case = replace(random_case(0, (6,), 3, S=1, missing=1.0, bans=0.0, size=20.0), follows=follows)
    f, g, y, mask = case.tensors()
    f_, g_ = restricted(case, f, g, mask)
    finite = g_[g_ > -torch.inf]
    each = float((f.amax(-1) - f.amin(-1)).max() + finite.max() - finite.min())
    assert float(restricted_spread(f_, g_, mask)) == pytest.approx(2 * each)
    for t, steps in ((0, 2), (5, 2), (2, 6)):
        labels = y.clone()
        labels[0, t] = 2
        banned = keep_known(f_, labels, mask)
        assert float(restricted_spread(banned, g_, mask)) == pytest.approx(steps * each, rel=0.5)
        spread = (banned.amax(-1) - f.masked_fill(banned == -torch.inf, torch.inf).amin(-1)).max()
        expected = steps * float(spread + finite.max() - finite.min())
        assert float(restricted_spread(banned, g_, mask)) == pytest.approx(expected)


@settings(generated, max_examples=150)
@given(cases(sizes=(1.0, 10.0), n_labels=4), st.booleans())
@example(crossing(3.0), True)
def test_no_message_is_wider_than_the_bound(case: Case, known: bool) -> None:
    """Up to the number of ways, at most V a step."""
    f, g, y, mask = case.tensors()
    f, g = restricted(case, f, g, mask)
    if known:
        f = keep_known(f, y, mask)
    f = f.masked_fill(~mask[..., None], 0)
    assume((f > -torch.inf).any(-1).all())
    bound = float(restricted_spread(f, g, mask)) + f.shape[2] * np.log(f.shape[-1])
    logs = Logs(f, g, mask)
    for message in (logs.alpha, logs._backward()[1]):
        real = message[:, mask]
        real = real[(real > -torch.inf).any(-1)]
        if len(real):
            low = real.masked_fill(real == -torch.inf, torch.inf).amin(-1)
            assert float((real.amax(-1) - low).max()) <= bound + 1e-9


def test_rules_keep_to_probability_space_where_that_is_safe(oracles: ModuleType) -> None:
    case = obeyed(4, (4, 3), oracles, missing=0.0, bans=0.2)
    f, g, y, mask = case.tensors()
    f_, g_ = restricted(case, f, g, mask)
    assert (g_ == -torch.inf).any()
    assert not isinstance(pass_messages(f_, g_, mask), Logs)
    assert not isinstance(pass_messages(keep_known(f_, y, mask), g_, mask), Logs)
    assert isinstance(pass_messages(100 * f_, g_, mask), Logs)
    f_[:, 0, 1] = -torch.inf  # no label at all
    assert isinstance(pass_messages(f_, g_, mask), Logs)


@settings(generated, max_examples=40)
@given(cases(sizes=(1.0, 10.0)))
def test_both_ways_agree_under_rules(case: Case) -> None:
    f, g, y, mask = case.tensors()
    f, g = restricted(case, f, g, mask)
    f = keep_known(f, y, mask).masked_fill(~mask[..., None], 0)
    scaled, logs = Scaled(f, g, mask, True), Logs(f, g, mask)
    if not (logs.log_z > -torch.inf).all() or (g == -torch.inf).flatten(1).all(1).any():
        return
    assert not scaled.ends_nowhere
    weight = torch.linspace(-1, 2, len(mask), dtype=f.dtype).expand(len(f), -1)
    torch.testing.assert_close(scaled.log_z, logs.log_z, rtol=0, atol=1e-9)
    for one, other in zip(scaled.gradients(weight), logs.gradients(weight), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    (node, step), (node_, step_) = scaled.walk(), logs.walk()
    torch.testing.assert_close(node, node_, rtol=0, atol=1e-9)
    pairs = [n[:, :, :-1, :, None] * p for n, p in ((node, step), (node_, step_))]
    torch.testing.assert_close(*pairs, rtol=0, atol=1e-9)


# -- other structures ---------------------------------------------------------------------------------


def piecewise_by_hand(f: np.ndarray, g: np.ndarray, y: np.ndarray) -> float:
    """Of one draw and sequence: the factors whose labels are all known."""
    total = 0.0
    for t, label in enumerate(y):
        if label >= 0:
            total += f[t, label] - np.log(np.exp(f[t]).sum())
        if t and label >= 0 and y[t - 1] >= 0:
            before = y[t - 1]
            total += 2 * g[before, label]
            total -= np.log(np.exp(g[before]).sum()) + np.log(np.exp(g[:, label]).sum())
    return total


@settings(generated, max_examples=30)
@given(cases(sizes=(1.0,), bans=0.0))
def test_piecewise_leaves_out_what_is_missing(case: Case) -> None:
    f, g, y, mask = case.tensors()
    value = Piecewise().log_prob(f, g, y, mask)
    for s, b in product(range(f.shape[0]), range(f.shape[1])):
        n = case.lengths[b]
        by_hand = piecewise_by_hand(case.f[s, b, :n], case.g[s], case.y[b, :n])
        assert float(value[s, b]) == pytest.approx(by_hand, abs=TOLERANCE)


def test_piecewise_slopes_and_bends_where_labels_are_missing() -> None:
    case = random_case(5, (4, 3), S=1)
    case.y[:] = [[0, -1, 2, 1], [1, 1, -1, 0]]
    f, g, y, mask = case.tensors()
    f.requires_grad_()
    g.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, g: Piecewise().log_prob(f, g, y, mask), (f, g))
    found = Piecewise().curvature(f, g, y, mask)
    assert found.next.shape == (2, 3, 3)

    def slopes(f: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        f, g = f.detach().requires_grad_(), g.detach().requires_grad_()
        value = Piecewise().log_prob(f, g, y, mask)
        unary = torch.autograd.grad(value.sum(), f, retain_graph=True)[0]
        return unary, torch.stack([torch.autograd.grad(v, g, retain_graph=True)[0][0] for v in value[0]])

    h = 1e-5
    for t, j in product(range(4), range(3)):
        step = torch.zeros_like(f)
        step[:, :, t, j] = h
        bend = -(slopes(f + step, g)[0] - slopes(f - step, g)[0])[0, ..., j] / (2 * h)
        torch.testing.assert_close(found.node[:, j, t], bend, rtol=0, atol=1e-8)
    for i, j in product(range(3), range(3)):
        step = torch.zeros_like(g)
        step[:, i, j] = h
        bend = -(slopes(f, g + step)[1] - slopes(f, g - step)[1])[:, i, j] / (2 * h)
        torch.testing.assert_close(found.next[:, i, j], bend, rtol=0, atol=1e-8)


def test_stand_ins_stay_finite_where_labels_are_missing() -> None:
    case = random_case(6, (4, 2, 3))
    case.y[0] = -1
    f, g, y, mask = case.tensors()
    f.requires_grad_()
    g.requires_grad_()
    for parts in composite.PARTS.values():
        values = parts(f, g, y, mask)
        assert values.isfinite().all()
        for grad in torch.autograd.grad(values.sum(), (f, g)):
            assert grad.isfinite().all()


def test_a_function_says_whether_it_handles_missing_labels() -> None:
    seen = []

    def function(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
        seen.append(y.tolist())
        return Chain().log_prob(f[:, None], g, y[None], torch.ones_like(y[None], dtype=torch.bool))[:, 0]

    assert not BlackBox(function).handles_missing
    function.handles_missing = True  # type: ignore[attr-defined]
    case = random_case(3, (4, 2), bans=0.0)
    case.y[:] = [[0, -1, 2, 1], [-1, 1, -1, -1]]
    f, g, y, mask = case.tensors()
    for structure in (BlackBox(function), Differences(BlackBox(function))):
        assert structure.handles_missing
        seen.clear()
        torch.testing.assert_close(structure.log_prob(f, g, y, mask), Chain().log_prob(f, g, y, mask))
        assert [0, -1, 2, 1] in seen
        assert [-1, 1] in seen
    assert Chain().handles_missing
    assert Piecewise().handles_missing
    assert Differences(Chain()).handles_missing


def test_differences_of_a_chain_with_missing_labels(oracles: ModuleType) -> None:
    """Its curvature: the chain's own at the labels known, to a step's error."""
    case = obeyed(2, (3, 2), oracles, bans=0.0)
    f, g, y, mask = case.tensors()
    y[0] = torch.tensor([0, -1, 1])
    found = Differences(Chain()).local_curvature(f, g, y, mask)
    exact = Chain().local_curvature(f, g, y, mask)
    known = (y >= 0) & mask
    torch.testing.assert_close(found.node[known], exact.node[known], rtol=0, atol=2e-3)
    assert found.next.shape == exact.next.shape
    assert (found.node >= 0).all()
