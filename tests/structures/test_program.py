"""Programs against the enumeration of all labellings: every answer, from the derived and the fast ways."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.structures import Chain, Layout, Rules, chain, compile
from structgp.structures.linear_chain.chain import ChainProgram, TokenProgram
from structgp.structures.program import Program, by_position
from structgp.structures.semirings import LOG, MAX, KMax, Sampling, invert

pytestmark = pytest.mark.usefixtures("loops")

CLOSE = 1e-8
KINDS = ("shared", "by position", "tokens")

generated = settings(max_examples=60, deadline=None, derandomize=True)


@dataclass(frozen=True)
class Case:
    """f (S, B, T, V), nan at padding; g (S, V, V), (S, B, T-1, V, V) with nan at padding, or none."""

    f: Tensor
    g: Tensor | None
    lengths: tuple[int, ...]
    rules: Rules | None

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.f.shape[2]) < torch.tensor(self.lengths)[:, None]

    @property
    def scores(self) -> tuple[Tensor, ...]:
        return (self.f,) if self.g is None else (self.f, self.g)

    @property
    def program(self) -> Program:
        return compile(chain(order=0 if self.g is None else 1), Layout(self.mask), self.rules)

    def tables(self, oracles: ModuleType) -> Any:
        """Draw, example, its length and its table of labellings."""
        S, B, _, V = self.f.shape
        for s, b in product(range(S), range(B)):
            n = self.lengths[b]
            if self.g is None:
                g = np.zeros((V, V))
            else:
                g = (self.g[s] if self.g.dim() == 3 else self.g[s, b, : max(n - 1, 0)]).numpy()
            with np.errstate(invalid="ignore", divide="ignore"):
                table = oracles.chain_table(self.f[s, b, :n].numpy(), g)
            keep = table.score > -np.inf
            if self.rules is not None:
                rules = self.rules.follows, self.rules.starts, self.rules.ends
                keep &= np.array([oracles.obeys(z, *rules) for z in table.labels])
            yield s, b, n, oracles.among(table, keep), keep


def make(
    seed: int, lengths: tuple[int, ...], kind: str, V: int = 3, size: float = 1.0, bans: float = 0.0
) -> Case:
    """``bans`` : share of the scores that are -inf, and of what rules forbid."""
    rng = np.random.default_rng(seed)
    S, B, T = 2, len(lengths), max(1, *lengths)
    mask = np.arange(T) < np.array(lengths)[:, None]

    def scores(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < bans / 2, -np.inf, size * rng.normal(size=shape))

    f = np.where(mask[..., None], scores(S, B, T, V), np.nan)
    g = scores(S, V, V)
    if kind == "by position":
        g = np.where(mask[:, 1:, None, None], scores(S, B, T - 1, V, V), np.nan)
    rules = None
    if bans:
        rules = Rules(*(torch.tensor(rng.random(shape) >= bans) for shape in ((V, V), V, V)))
    return Case(torch.tensor(f), None if kind == "tokens" else torch.tensor(g), lengths, rules)


cases = st.builds(
    make,
    st.integers(0, 2**16),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.sampled_from([1.0, 40.0, 300.0]),
    st.sampled_from([0.0, 0.3]),
)

# Whatever the rules, only ends and beginnings are forbidden: tokens stay independent.
ENDS = Case(
    torch.tensor([[[[0.3, -1.0], [2.0, 0.5]]]], dtype=torch.float64),
    None,
    (2,),
    Rules(torch.ones(2, 2, dtype=torch.bool), torch.tensor([True, False]), torch.ones(2) > 0),
)


def test_which_program() -> None:
    layout = Layout(torch.ones(1, 2, dtype=torch.bool))
    assert type(compile(chain(), layout)) is ChainProgram
    assert type(compile(chain(order=0), layout)) is TokenProgram
    assert type(compile(chain(order=0), layout, ENDS.rules)) is TokenProgram
    free = torch.ones(2, dtype=torch.bool)
    bound = Rules(torch.eye(2) > 0, free, free)
    assert type(compile(chain(order=0), layout, bound)) is ChainProgram


@generated
@given(cases)
@example(ENDS)
def test_totals_under_every_semiring(oracles: ModuleType, case: Case) -> None:
    program, scores = case.program, case.scores
    log_z, best = program.log_partition(scores), program.log_partition(scores, MAX)
    three = program.log_partition(scores, KMax(3))
    drawn = program.log_partition(scores, Sampling(torch.Generator()))
    totals = [log_z, drawn]
    if isinstance(program, ChainProgram):
        f, g = program.restrict(scores)
        totals.append(program.recursion(f, g, LOG))
    for s, b, _, table, _ in case.tables(oracles):
        for found in totals:
            assert float(found[s, b]) == pytest.approx(float(table.log_z), rel=1e-10, abs=CLOSE)
        largest = np.sort(table.score.astype(float))[::-1]
        largest = np.append(largest, [-np.inf] * 3)[:3]
        assert float(best[s, b]) == pytest.approx(largest[0], rel=1e-12, abs=CLOSE)
        np.testing.assert_allclose(three[:, s, b], largest, rtol=1e-12, atol=CLOSE)


@generated
@given(cases)
@example(ENDS)
def test_marginals_of_all_tuples(oracles: ModuleType, case: Case) -> None:
    """The derived ones and the fast ones; 0 where nothing is allowed."""
    program = case.program
    for found in (program.marginals(case.scores), Program.slopes(program, program.restrict(case.scores))):
        node, *rest = found
        torch.testing.assert_close(program.node_marginals(case.scores), node, rtol=0, atol=CLOSE)
        for s, b, n, table, _ in case.tables(oracles):
            np.testing.assert_allclose(node[s, b, :n], table.nodes, rtol=0, atol=CLOSE)
            assert not node[s, b, n:].any()
            for both in rest:
                on = table.on
                there = np.einsum("n,nti,ntj->tij", table.prob, on[:, :-1], on[:, 1:])
                m = max(n - 1, 0)
                np.testing.assert_allclose(both[s, b, :m], there[:m].astype(float), atol=CLOSE)
                assert not both[s, b, m:].any()


@generated
@given(cases)
@example(ENDS)
def test_the_walk_leads_to_the_marginals(oracles: ModuleType, case: Case) -> None:
    program = case.program
    for node, step in (program.walk(case.scores), Program.walk(program, case.scores)):
        for s, b, n, table, _ in case.tables(oracles):
            np.testing.assert_allclose(node[s, b, :n], table.nodes, rtol=0, atol=CLOSE)
            assert not step[s, b, max(n - 1, 0) :].any()
            for t in range(n - 1):
                np.testing.assert_allclose(
                    node[s, b, t] @ step[s, b, t], node[s, b, t + 1], rtol=0, atol=CLOSE
                )


@generated
@given(cases, st.sampled_from([1, 2, 30, 100]))
@example(ENDS, 4)
def test_best_labellings(oracles: ModuleType, case: Case, n_best: int) -> None:
    program = case.program
    decoded = program.decode(case.scores)
    labels, log_probs = program.n_best(case.scores, n_best)
    for s, b, n, table, keep in case.tables(oracles):
        there = int(min(n_best, keep.sum()))
        assert (log_probs[s, b, there:] == -torch.inf).all()
        assert not decoded[s, b, n:].any()
        if not there:
            continue
        own = (table.score - table.log_z).astype(float)
        expected = np.sort(own[keep])[::-1][:there]
        np.testing.assert_allclose(log_probs[s, b, :there], expected, rtol=1e-10, atol=CLOSE)
        found = [tuple(y) for y in labels[s, b, :there].tolist()]
        assert len(set(found)) == there
        where = {(*y, *[0] * (case.f.shape[2] - n)): i for i, y in enumerate(table.labels.tolist())}
        values = [own[where[y]] for y in found]
        np.testing.assert_allclose(values, expected, rtol=1e-10, atol=CLOSE)
        assert own[where[tuple(decoded[s, b].tolist())]] == pytest.approx(expected[0], abs=CLOSE)


def test_more_labellings_than_one_backward_pass_tells_apart(oracles: ModuleType) -> None:
    case = make(0, (5, 4), "by position")
    labels, log_probs = case.program.n_best(case.scores, 243)
    assert len(torch.unique(labels[0, 0], dim=0)) == 243
    np.testing.assert_allclose(log_probs[:, 0].exp().sum(-1), 1, rtol=0, atol=1e-10)
    single, values = case.program.n_best([x.float() for x in case.scores], 60)
    assert len(torch.unique(single[1, 0], dim=0)) == 60
    torch.testing.assert_close(values.double(), log_probs[..., :60], rtol=0, atol=1e-4)


@generated
@given(cases)
@example(ENDS)
def test_entropy(oracles: ModuleType, case: Case) -> None:
    found = case.program.entropy(case.scores)
    for s, b, _, table, _ in case.tables(oracles):
        p = table.prob.astype(float)
        expected = -(p[p > 0] * np.log(p[p > 0])).sum()
        assert float(found[s, b]) == pytest.approx(expected, abs=CLOSE)


def test_entropy_keeps_its_digits_far_from_zero() -> None:
    case = make(1, (4, 3), "shared")
    f, g = case.scores
    expected = case.program.entropy(case.scores)
    moved = case.program.entropy((f + 1e9, g - 1e9))
    torch.testing.assert_close(moved, expected, rtol=0, atol=1e-5)
    single = case.program.entropy((f.float() + 512, g.float()))
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bans", [0.0, 0.25])
def test_labellings_are_drawn_as_often_as_they_are_probable(
    kind: str, bans: float, oracles: ModuleType
) -> None:
    """12,000 of each draw, within four standard errors."""
    for seed in range(3, 100):
        case = make(seed, (3, 1, 2), kind, bans=bans)
        if all(keep.any() for *_, keep in case.tables(oracles)):
            break
    n, program = 12_000, case.program
    scores = [x.repeat_interleave(n, 0) for x in case.scores]
    for sample in (program.sample, partial(Program.sample, program)):  # as it is, and derived
        drawn = sample(scores, torch.Generator().manual_seed(0)).view(2, n, 3, 3).numpy()
        for s, b, length, table, _ in case.tables(oracles):
            assert not drawn[s, :, b, length:].any()
            index = drawn[s, :, b, :length] @ 3 ** np.arange(length)[::-1]
            p = table.prob.astype(float)
            share = np.bincount(index, minlength=len(p)) / n
            assert (np.abs(share - p) <= 4 * np.sqrt(p * (1 - p) / n) + 1e-12).all()


def test_labels_of_no_probability_are_never_drawn() -> None:
    """Even by the numbers at the ends of [0, 1)."""
    p = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]] * 3, dtype=torch.float64)
    uniform = torch.tensor([0.0, 0.3 - 1e-12, 1 - 2**-53], dtype=torch.float64)
    assert invert(p, uniform).tolist() == [1, 1, 3]


def test_the_generator_decides() -> None:
    case = make(5, (4, 4, 4), "shared", size=0.1)
    one, again, other = (
        case.program.sample(case.scores, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@generated
@given(cases)
@example(ENDS)
def test_log_prob_and_its_gradient_are_never_nan(oracles: ModuleType, case: Case) -> None:
    """Under every semiring; log_prob of each labelling, which the rules may forbid."""
    program = case.program
    leaves = [x.clone().requires_grad_() for x in case.scores]
    mask = case.mask
    for s, b, n, table, keep in case.tables(oracles):
        log_z = table.log_z if keep.any() else 0.0
        for y, score in zip(table.labels[:3], (table.score - log_z)[:3], strict=False):
            labels = torch.zeros_like(mask, dtype=torch.int64)
            labels[b, :n] = torch.tensor(y)
            value = program.log_prob(leaves, labels)
            assert value[s, b].item() == pytest.approx(float(score), rel=1e-10, abs=CLOSE)
            for grad in torch.autograd.grad(value.sum(), leaves, allow_unused=True):
                assert grad is None or not grad.isnan().any()
        break
    for semiring in (LOG, MAX, KMax(2)):
        total = program.log_partition(leaves, semiring)
        for grad in torch.autograd.grad(total.sum(), leaves, allow_unused=True):
            assert grad is None or not grad.isnan().any()
    if isinstance(program, ChainProgram):
        f, g = program.restrict(leaves)
        total = program.recursion(f, g, LOG)
        for grad in torch.autograd.grad(total.sum(), leaves, allow_unused=True):
            assert grad is None or not grad.isnan().any()


def test_the_best_score_has_a_gradient_in_the_tables() -> None:
    """The one-hot transitions of the best labelling."""
    case = make(7, (4, 2), "by position")
    g = case.g.clone().requires_grad_()
    total = case.program.log_partition((case.f, g), MAX)
    (hot,) = torch.autograd.grad(total.sum(), g)
    best = case.program.decode(case.scores)
    for s, b in product(range(2), range(2)):
        for t in range(case.lengths[b] - 1):
            expected = torch.zeros(3, 3, dtype=torch.float64)
            expected[best[s, b, t], best[s, b, t + 1]] = 1
            assert torch.equal(hot[s, b, t], expected)


def test_variances_are_those_of_the_marginals() -> None:
    """The derived ones and the fast ones."""
    basis = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for kind, along in product(KINDS, (None, basis)):
        case = make(8, (4, 1, 3), kind)
        program, scores = case.program, case.program.restrict(case.scores)
        for one, other in zip(
            program.variances(scores, along), Program.variances(program, scores, along), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


# -- the chain over them --------------------------------------------------------------------------------


def test_independent_tokens_do_not_read_g() -> None:
    f, _ = make(9, (4, 1, 3), "shared").scores
    mask = torch.arange(4) < torch.tensor([[4], [1], [3]])
    y = torch.zeros_like(mask, dtype=torch.int64)
    tokens, whole = Chain(spec=chain(order=0)), Chain()
    zeros = torch.zeros(2, 3, 3, dtype=torch.float64, requires_grad=True)
    leaf = f.nan_to_num(0).requires_grad_()
    value = tokens.log_prob(leaf, zeros, y, mask)
    torch.testing.assert_close(value, whole.log_prob(leaf, zeros, y, mask))
    grads = torch.autograd.grad(value.sum(), (leaf, zeros))
    assert not grads[1].any()
    found, expected = (c.curvature(f, zeros, y, mask) for c in (tokens, whole))
    torch.testing.assert_close(found.node, expected.node, rtol=0, atol=1e-10)
    assert not found.next.any()
    y[0, 1] = -1
    local = tokens.local_curvature(f, zeros, y, mask)
    expected = whole.local_curvature(f, zeros, y, mask)
    torch.testing.assert_close(local.node, expected.node, rtol=0, atol=1e-10)
    assert not local.next.any()
    assert local.next.shape == (3, 3, 3)
    for method in ("marginals", "walk", "decode", "entropy"):
        ours, theirs = (getattr(c, method)(f, zeros, mask) for c in (tokens, whole))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("what", ["marginals", "decode", "n_best", "entropy", "walk"])
def test_a_shared_table_is_the_same_table_everywhere(what: str) -> None:
    case = make(10, (4, 1, 3), "shared", bans=0.2)
    f, g = case.scores
    more = (3,) if what == "n_best" else ()
    structure = Chain(case.rules)
    one = getattr(structure, what)(f, g, case.mask, *more)
    other = getattr(structure, what)(f, by_position(g, case.mask), case.mask, *more)
    for ours, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (one, other)), strict=True):
        if what == "walk" and ours.dim() == 5:  # rows of labels that never occur may differ
            ours, theirs = (one[0][:, :, :-1, :, None] * x for x in (ours, theirs))
        if what == "n_best" and ours.dim() == 4:  # labellings of probability 0 may differ
            ours, theirs = (torch.where(one[1][..., None] > -torch.inf, x, 0) for x in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
