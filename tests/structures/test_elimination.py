"""Sums over the labellings of any factor graph: equal to enumeration, and to the chain's own program."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.data.layout import GraphLayout, Tuples
from structgp.errors import InputError
from structgp.structures.graph import (
    elimination,
    elimination_levels,
    elimination_schedule,
    elimination_steps,
)
from structgp.structures.graph.elimination import Elimination, cost, entries_of
from structgp.structures.graph.factor_graph import Enumeration
from structgp.structures.linear_chain.chain import ChainProgram
from structgp.structures.program import Layout, Scores
from structgp.structures.semirings import LOG, MAX, Semiring

few = settings(max_examples=40, deadline=None)
DOMAINS = ((0, 2), (2, 5))  # first label and one past the last
S, N, V = 2, 4, 5


@pytest.fixture(autouse=True, params=["torch", "compiled"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """All in torch operations, and all that can be in compiled loops, however small it is."""
    if request.param == "compiled" and elimination.compiled_loops() is None:
        pytest.skip("numba is not installed")
    monkeypatch.setattr(elimination, "WORTH_COMPILING", 0 if request.param == "compiled" else float("inf"))
    return str(request.param)


class Reference(Enumeration):
    """Enumeration that depends, by 0 times each, on scores that no labelling has."""

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        unused = sum((0 * x.nan_to_num(0, 0, 0)).sum() for x in scores)
        return super().log_total(scores, semiring) + unused


@st.composite
def graphs(draw: st.DrawFn) -> tuple[GraphLayout, list[Tensor]]:
    """Up to three examples of up to four variables, some without any, with 0 to 4 templates of 1 to 3
    places; padding holds nan."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    B, with_domains = draw(st.integers(1, 3)), draw(st.booleans())
    n_labels = V if with_domains else 3
    n = rng.integers(0, N + 1, B)
    mask = np.arange(N) < n[:, None]
    kind = rng.integers(0, 2, (B, N))
    span = np.array(DOMAINS)[kind]
    if draw(st.booleans()):  # some variables lose a label
        span[..., 1] -= (span[..., 1] - span[..., 0] > 1) & (rng.random((B, N)) < 0.3)
    templates = []
    tables: list[np.ndarray] = []
    for k in range(draw(st.integers(0, 4))):
        a, E = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        wanted = rng.integers(0, 2, a)
        index, there = np.zeros((B, E, a), np.int64), np.zeros((B, E), bool)
        for b, e in np.ndindex(B, E):
            found = rng.permutation(n[b])[:a]
            fits = not with_domains or (kind[b, found] == wanted[: len(found)]).all()
            if len(found) == a and fits and rng.random() < 0.8:
                index[b, e], there[b, e] = found, True
        first = tuple(int(DOMAINS[w][0]) if with_domains else 0 for w in wanted)
        sizes = tuple(DOMAINS[w][1] - DOMAINS[w][0] if with_domains else n_labels for w in wanted)
        templates.append(Tuples(f"t{k}", torch.from_numpy(index), torch.from_numpy(there), first, sizes))
        table = rng.normal(size=(S, *sizes) if draw(st.booleans()) else (S, B, E, *sizes)) * 2
        if draw(st.booleans()):
            table[rng.random(table.shape) < 0.2] = -np.inf
        if table.ndim > a + 1:
            table[:, ~there] = np.nan
        tables.append(table)
    f = rng.normal(size=(S, B, N, n_labels))
    if draw(st.booleans()):
        f[rng.random(f.shape) < 0.15] = -np.inf
    f[:, ~mask] = np.nan
    layout = GraphLayout(
        torch.from_numpy(mask), tuple(templates), torch.from_numpy(span) if with_domains else None
    )
    return layout, [torch.from_numpy(x) for x in (f, *tables)]


def same(found: Tensor, wanted: Tensor, **given: float) -> None:
    torch.testing.assert_close(found, wanted, **({"rtol": 1e-8, "atol": 1e-8} | given))


@few
@given(graphs())
def test_totals_and_marginals_are_those_of_enumeration(case: tuple[GraphLayout, list[Tensor]]) -> None:
    layout, scores = case
    ours, wanted = Elimination(layout), Reference(layout)
    same(ours.log_partition(scores), wanted.log_partition(scores))
    same(ours.log_total(scores, MAX), wanted.log_total(scores, MAX))
    # What stands at padding is nan, and 0 times nan has no place in the reference.
    clean = [x.nan_to_num(0, 0, -torch.inf) for x in scores]
    for p, q in zip(ours.marginals(scores), wanted.marginals(clean), strict=True):
        same(p, q)
    same(ours.entropy(clean), wanted.entropy(clean))


@few
@given(graphs())
def test_best_labellings_are_those_of_enumeration(case: tuple[GraphLayout, list[Tensor]]) -> None:
    layout, scores = case
    labels, values = Elimination(layout).n_best(scores, 4)
    wanted_labels, wanted_values = Reference(layout).n_best(scores, 4)
    same(values, wanted_values)
    there = wanted_values > -torch.inf
    assert (labels[there] == wanted_labels[there]).all()
    assert (
        Elimination(layout).decode(scores)[there[..., 0]] == wanted_labels[:, :, 0][there[..., 0]]
    ).all()


@few
@given(graphs(), st.integers(0, 2**20))
def test_gradients_are_those_of_enumeration(case: tuple[GraphLayout, list[Tensor]], seed: int) -> None:
    """Of log p of labels of which some are missing, weighted by example."""
    layout, scores = case
    scores = [x.nan_to_num(0, 0, -torch.inf) for x in scores]
    generator = torch.Generator().manual_seed(seed)
    y = Elimination(layout).sample(scores, generator)[0]
    y = y.masked_fill(torch.rand(y.shape, generator=generator) < 0.3, -1)
    weight = torch.randn((S, len(layout)), generator=generator, dtype=torch.float64)

    def slopes(program: Enumeration | Elimination) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in scores]
        found = program.log_prob(leaves, y)
        finite = torch.where(found.isfinite(), found, 0)
        unused = sum((0 * x.nan_to_num(0, 0, 0)).sum() for x in leaves)
        return torch.autograd.grad((finite * weight).sum() + unused, leaves)

    same(Elimination(layout).log_prob(scores, y), Reference(layout).log_prob(scores, y))
    for p, q in zip(slopes(Elimination(layout)), slopes(Reference(layout)), strict=True):
        same(p, q)


@few
@given(graphs(), st.randoms(use_true_random=False))
def test_order_of_examples_and_padding_change_nothing(
    case: tuple[GraphLayout, list[Tensor]], random: object
) -> None:
    layout, (f, *tables) = case
    B = len(layout)
    turn = torch.from_numpy(np.random.default_rng(random.randint(0, 99)).permutation(B))  # type: ignore[attr-defined]
    wide = torch.cat([f, torch.full_like(f, torch.nan)], 2)[:, turn]
    moved = [g[:, turn] if g.dim() > 1 + t.arity else g for g, t in zip(tables, layout.tuples, strict=True)]
    rows = layout.rows(turn)
    span = None if rows.span is None else torch.cat([rows.span] * 2, 1)
    mask = torch.cat([rows.mask, torch.zeros_like(rows.mask)], 1)
    wider = GraphLayout(mask, rows.tuples, span)
    wanted = Elimination(layout).log_partition([f, *tables])[:, turn]
    same(Elimination(wider).log_partition([wide, *moved]), wanted, rtol=0, atol=1e-12)
    marginals = Elimination(wider).node_marginals([wide, *moved])
    same(marginals[:, :, :N], Elimination(layout).node_marginals([f, *tables])[:, turn])
    assert not marginals[:, :, N:].any()


def skip_chain(n: int, n_labels: int = 3) -> tuple[GraphLayout, list[Tensor]]:
    """Two examples: a chain with a link from each variable to the third after it, and one without links."""
    generator = torch.Generator().manual_seed(1)
    pairs = torch.tensor([(i, i + d) for d in (1, 3) for i in range(n - d)])
    index = torch.stack([pairs, torch.zeros_like(pairs)])
    there = torch.tensor([True, False])[:, None].expand(2, len(pairs))
    layout = GraphLayout(
        torch.ones(2, n, dtype=torch.bool), (Tuples("near", index, there, (0, 0), (n_labels,) * 2),)
    )
    shapes = (3, 2, n, n_labels), (3, n_labels, n_labels)
    return layout, [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]


def test_frequencies_of_draws_are_the_marginals() -> None:
    layout, scores = skip_chain(6)
    many = [x[:1].expand(20_000, *x.shape[1:]) for x in scores]
    y = Elimination(layout).sample(many, torch.Generator().manual_seed(0))
    marginals = Elimination(layout).marginals([x[:1] for x in scores])
    found = torch.nn.functional.one_hot(y, 3).double().mean(0)
    same(found, marginals[0][0], rtol=0, atol=0.02)
    first, second = y[:, 0, 0], y[:, 0, 3]  # a pair with a link
    both = torch.bincount(first * 3 + second, minlength=9).double() / len(y)
    e = layout.tuples[0].index[0].tolist().index([0, 3])
    same(both, marginals[1][0, 0, e].flatten(), rtol=0, atol=0.02)


@pytest.mark.parametrize("scale", [30, 60, 100, 150, 400])
def test_scores_of_any_spread(scale: float) -> None:
    layout, scores = skip_chain(6)
    wide = [scale * x for x in scores]
    same(Elimination(layout).log_partition(wide), Enumeration(layout).log_partition(wide))
    for p, q in zip(Elimination(layout).marginals(wide), Reference(layout).marginals(wide), strict=True):
        same(p, q)


def test_single_precision() -> None:
    layout, scores = skip_chain(6)
    single = [x.float() for x in scores]
    found = Elimination(layout).log_partition(single)
    assert found.dtype == torch.float32
    same(found.double(), Elimination(layout).log_partition(scores), rtol=1e-6, atol=1e-5)
    p = Elimination(layout).marginals(single)[1]
    same(p.double(), Elimination(layout).marginals(scores)[1], rtol=1e-4, atol=1e-6)


def test_draws_in_parts_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, scores = skip_chain(8)
    wanted = Elimination(layout).marginals(scores), Elimination(layout).n_best(scores, 3)
    monkeypatch.setattr(elimination_steps, "NUMBERS_AT_ONCE", 1)
    monkeypatch.setattr(elimination_levels, "ENTRIES_AT_ONCE", 1)
    monkeypatch.setattr(elimination_schedule, "_schedules", type(elimination_schedule._schedules)())
    found = Elimination(layout).marginals(scores), Elimination(layout).n_best(scores, 3)
    for x, y in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        same(x, y, rtol=1e-12, atol=1e-12)


def pairs_layout(pairs: dict[str, list[tuple[int, int]]], spans: list[tuple[int, int]]) -> GraphLayout:
    """One example whose variables have these labels; each name has one table for all its pairs."""
    span, found = torch.tensor(spans), []
    for name, index in pairs.items():
        a, b = (spans[i] for i in index[0])
        there = torch.ones(1, len(index), dtype=torch.bool)
        sizes = (a[1] - a[0], b[1] - b[0])
        found.append(Tuples(name, torch.tensor(index)[None], there, (a[0], b[0]), sizes))
    return GraphLayout(torch.ones(1, len(spans), dtype=torch.bool), tuple(found), span[None])


def layered(T: int, one: int, other: int) -> GraphLayout:
    """Two chains, tied token by token."""
    steps = range(T - 1)
    pairs = {"one": [(t, t + 1) for t in steps], "other": [(T + t, T + t + 1) for t in steps]}
    pairs["tie"] = [(t, T + t) for t in range(T)]
    return pairs_layout(pairs, [(0, one)] * T + [(one, one + other)] * T)


def all_with_all(n_variables: int, n_labels: int) -> GraphLayout:
    pairs = [(i, j) for j in range(n_variables) for i in range(j)]
    return pairs_layout({"pair": pairs}, [(0, n_labels)] * n_variables)


@pytest.mark.parametrize("layout", [layered(5, 9, 6), layered(3, 4, 1), all_with_all(4, 13)])
def test_products_of_groups_are_sums_of_tables(
    layout: GraphLayout, loops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than are multiplied at once, and more groups of them than have room: as in torch."""
    generator = torch.Generator().manual_seed(0)
    V = int(layout.span.max())  # type: ignore[union-attr]
    sizes = [(11, *layout.mask.shape, V), *((11, *t.sizes) for t in layout.tuples)]
    scores = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    scores[0][0, 0, 1, 0] = scores[1][0, 1, 2] = -torch.inf
    schedule = elimination_schedule.schedule_of(layout, V, [True] * len(layout.tuples))
    assert (schedule.groups[:, 0] >= 0).any()

    def found() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in scores]
        total = Elimination(layout).log_total(leaves, LOG)
        weight = torch.arange(1.0, total.numel() + 1, dtype=torch.float64).view_as(total)
        return [total.detach(), *torch.autograd.grad((weight * total).sum(), leaves)]

    mine = found()
    monkeypatch.setattr(elimination, "WORTH_COMPILING", float("inf") if loops == "compiled" else 0)
    for x, y in zip(mine, found(), strict=True):
        same(x, y, rtol=1e-10, atol=1e-10)


def test_second_backward_pass_gives_the_same() -> None:
    layout, scores = skip_chain(5)
    leaves = [x.clone().requires_grad_() for x in scores]
    total = Elimination(layout).log_total(leaves, LOG).sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    for x, y in zip(first, torch.autograd.grad(total, leaves), strict=True):
        assert torch.equal(x, y)


def test_changing_a_gradient_leaves_the_next_one_as_it_is() -> None:
    """Of one draw and example, where gradients are views of what the compiled loops wrote."""
    layout, scores = skip_chain(5)
    leaves = [x[:1].clone().requires_grad_() for x in scores]
    total = Elimination(layout).log_total(leaves, LOG).sum()
    first = torch.autograd.grad(total, leaves, retain_graph=True)
    wanted = [x.clone() for x in first]
    for x in first:
        x.zero_()
    for found, x in zip(torch.autograd.grad(total, leaves, retain_graph=True), wanted, strict=True):
        torch.testing.assert_close(found, x)
    total.backward(retain_graph=True)
    total.backward()
    for leaf, x in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(leaf.grad, 2 * x)


def test_impossible_examples_have_gradient_0() -> None:
    layout, (f, *tables) = skip_chain(5)
    leaf = f.clone()
    leaf[0, 0, 2] = -torch.inf
    leaf.requires_grad_()
    total = Elimination(layout).log_total((leaf, *tables), LOG)
    assert total[0, 0] == -torch.inf
    value = total.sum(1)
    (found,) = torch.autograd.grad(value, leaf, torch.tensor([torch.inf, *[0.5] * (len(f) - 1)]).to(value))
    assert not found[0].any()
    assert float(found[1:].sum()) == pytest.approx(0.5 * float(layout.mask.sum()) * (len(f) - 1))


def chain_layout(mask: Tensor, n_labels: int) -> GraphLayout:
    B, T = mask.shape
    index = torch.stack([torch.arange(T - 1), torch.arange(1, T)], -1).expand(B, -1, -1)
    there = mask[:, 1:] & mask[:, :-1]
    tuples = Tuples("next", index * there[..., None], there, (0, 0), (n_labels, n_labels))
    return GraphLayout(mask, (tuples,))


@pytest.mark.parametrize("by_position", [False, True])
def test_chain_as_a_graph(by_position: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(7) < torch.tensor([7, 1, 4])[:, None]
    f = torch.randn((2, 3, 7, 4), generator=generator, dtype=torch.float64)
    g = torch.randn((2, 3, 6, 4, 4) if by_position else (2, 4, 4), generator=generator, dtype=torch.float64)
    ours, chain = Elimination(chain_layout(mask, 4)), ChainProgram(Layout(mask))
    same(ours.log_partition((f, g)), chain.log_partition((f, g)))
    for p, q in zip(ours.marginals((f, g)), chain.marginals((f, g)), strict=True):
        same(p, q)
    same(ours.entropy((f, g)), chain.entropy((f, g)))
    for p, q in zip(ours.n_best((f, g), 3), chain.n_best((f, g), 3), strict=True):
        same(p.double(), q.double())


def test_chain_of_order_two_is_a_chain_over_pairs() -> None:
    """Label (i, j) of the chain over pairs at t: label i at t, and j at t + 1."""
    T, W = 7, 3
    generator = torch.Generator().manual_seed(0)
    f, g = (torch.randn(x, generator=generator, dtype=torch.float64) for x in ((2, 1, T, W), (2, W, W, W)))
    index = torch.stack([torch.arange(T - 2) + j for j in range(3)], -1)[None]
    there = torch.ones(1, T - 2, dtype=torch.bool)
    mask = torch.ones(1, T, dtype=torch.bool)
    ours = Elimination(GraphLayout(mask, (Tuples("three", index, there, (0,) * 3, (W,) * 3),)))
    pairs = f[:, :, :-1, :, None].expand(-1, -1, -1, -1, W).clone()
    pairs[:, :, -1] += f[:, :, -1, None, :]
    steps = torch.full((2, W, W, W, W), -torch.inf, dtype=torch.float64)
    for j in range(W):
        steps[:, :, j, j] = g[:, :, j]
    chain, over = ChainProgram(Layout(mask[:, 1:])), (pairs.flatten(3), steps.reshape(2, W * W, W * W))
    same(ours.log_partition((f, g)), chain.log_partition(over))
    same(ours.node_marginals((f, g))[:, :, :-1], chain.node_marginals(over).unflatten(-1, (W, W)).sum(-1))
    labels, values = ours.n_best((f, g), 5)
    pair_labels, pair_values = chain.n_best(over, 5)
    same(values, pair_values)
    assert torch.equal(labels[..., :-1], pair_labels // W)


def tree(n: int) -> GraphLayout:
    parent = (np.random.default_rng(0).random(n - 1) * np.arange(1, n)).astype(int)
    index = torch.from_numpy(np.stack([parent, np.arange(1, n)], -1))[None]
    there = torch.ones(1, n - 1, dtype=torch.bool)
    return GraphLayout(
        torch.ones(1, n, dtype=torch.bool), (Tuples("parent", index, there, (0, 0), (3, 3)),)
    )


def test_large_tree_in_linear_time() -> None:
    """Every variable is as likely to have any label; the cost is that of one table per variable."""
    layout, n = tree(40_000), 40_000
    begun = time.perf_counter()
    f = torch.zeros((2, 1, n, 3), dtype=torch.float64)
    g = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]], dtype=torch.float64).expand(2, 3, 3)
    p = Elimination(layout).node_marginals((f, g))
    same(p, torch.full_like(p, 1 / 3))
    log_z = np.log(3) + (n - 1) * np.log(np.exp(2) + 2)
    same(Elimination(layout).log_partition((f, g)), torch.full((2, 1), log_z, dtype=torch.float64))
    assert entries_of(layout).tolist() == [9 * (n - 1) + 3]
    assert time.perf_counter() - begun < 20  # a second or two; quadratic time would be an hour


def grid(height: int, n_labels: int) -> GraphLayout:
    i = torch.arange(height * height).view(height, height)
    across, down = torch.stack([i[:, :-1], i[:, 1:]], -1), torch.stack([i[:-1], i[1:]], -1)
    index = torch.cat([across.flatten(0, 1), down.flatten(0, 1)])[None]
    there = torch.ones(index.shape[:2], dtype=torch.bool)
    mask = torch.ones(1, height * height, dtype=torch.bool)
    return GraphLayout(mask, (Tuples("beside", index, there, (0, 0), (n_labels,) * 2),))


def test_cost_is_known_before_any_table() -> None:
    layout = skip_chain(6)[0]
    # Six variables alone; and a chain with links, whose cliques have up to four variables.
    found = cost(layout)
    assert found.entries[1] == 18
    assert found.largest[1] == 3
    assert 3**3 < found.largest[0] <= 3**4
    assert found.entries[0] < 6 * 3**4
    assert cost(grid(4, 2)).largest.item() == 2**5


def test_wide_graph_is_never_expanded() -> None:
    begun = time.perf_counter()
    assert entries_of(grid(64, 2)).isinf().all()
    f, g = torch.zeros(1, 1, 4096, 2), torch.zeros(1, 2, 2)
    with pytest.raises(InputError, match="example 0"):
        Elimination(grid(64, 2)).log_partition((f, g))
    assert time.perf_counter() - begun < 20


def test_labels_outside_a_table_are_refused() -> None:
    layout = skip_chain(4, 2)[0]
    with pytest.raises(InputError, match="near"):
        Elimination(layout).log_partition((torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 2)))
