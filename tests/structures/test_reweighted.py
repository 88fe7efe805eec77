"""The tree-reweighted bound: above log Z, convex, exact on forests, with its own gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.structures.graphs import batch_of, grid, grid_edges, random_graph, random_scores
from torch import Tensor

from structgp.errors import InputError
from structgp.structures.graph import path_sweeps, tree_steps
from structgp.structures.graph.cover import Solution
from structgp.structures.graph.forests import cover_by_paths, cover_by_trees, induced_forests, induced_trees
from structgp.structures.graph.layout import GraphLayout
from structgp.structures.graph.path_sweeps import PathCover
from structgp.structures.graph.program import Enumeration
from structgp.structures.graph.reweighted import Reweighted
from structgp.structures.graph.tree_steps import TreeCover
from structgp.structures.semirings import LOG, MAX

FEW = settings(max_examples=8, deadline=None)
CLOSE = {"atol": 1e-8, "rtol": 1e-8}


@pytest.fixture(scope="module", params=["torch", "compiled"])
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled" and path_sweeps.compiled_loops() is None:
        pytest.skip("numba is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for module in (path_sweeps, tree_steps):
            patch.setattr(module, "WORTH_COMPILING", 0 if request.param == "compiled" else float("inf"))
        yield request.param


def a_graph(seed: int, triples: int) -> tuple[GraphLayout, list[Tensor]]:
    """Two examples of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    graphs = [(n, random_graph(generator, n, 7, triples)[: 1 + (triples > 0)]) for n in (5, 4)]
    layout = batch_of(graphs, [(2, 2), (2, 2, 2)][: 1 + (triples > 0)])
    return layout, random_scores(layout, 2, generator, shared=seed % 2 == 0, size=1 + seed % 3)


@FEW
@given(seed=st.integers(0, 10_000), triples=st.integers(0, 2))
def test_it_is_above_log_z(loops: str, seed: int, triples: int) -> None:
    layout, scores = a_graph(seed, triples)
    exact = Enumeration(layout).log_partition(scores)
    for program in (Reweighted(layout, sweeps=20), Reweighted(layout, sweeps=20, forests="trees")):
        low, high = program.bracket(scores)
        assert bool((high > exact - 1e-8).all())
        assert bool((low < exact + 1e-8).all())
        torch.testing.assert_close(program.log_partition(scores), high, **CLOSE)


@FEW
@given(seed=st.integers(0, 10_000), arity=st.integers(2, 3))
def test_forests_are_exact(loops: str, seed: int, arity: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(6, generator=generator).tolist()
    factors: list[tuple[int, ...]] = []
    for n in range(1, 6, arity - 1):
        if n + arity - 1 <= 6:
            before = order[int(torch.randint(n, (), generator=generator))]
            factors.append((*order[n : n + arity - 1], before))
    layout = batch_of([(6, [factors])], [(2,) * arity])
    scores = random_scores(layout, 2, generator)
    program, exact = Reweighted(layout), Enumeration(layout)
    torch.testing.assert_close(program.log_partition(scores), exact.log_partition(scores), **CLOSE)
    torch.testing.assert_close(program.marginals(scores), exact.marginals(scores), **CLOSE)
    torch.testing.assert_close(program.entropy(scores), exact.entropy(scores), **CLOSE)


@pytest.mark.parametrize("triples", [0, 2])
def test_it_is_convex_along_lines(loops: str, triples: int) -> None:
    layout, start = a_graph(5, triples)
    generator = torch.Generator().manual_seed(1)
    end = [torch.randn(x.shape, generator=generator, dtype=x.dtype) * 2 for x in start]
    program = Reweighted(layout, sweeps=500, tolerance=1e-5)
    line = [
        program.log_partition([a + t * b for a, b in zip(start, end, strict=True)]) for t in (0, 0.5, 1)
    ]
    assert bool((line[1] <= (line[0] + line[2]) / 2 + 1e-6).all())


@pytest.mark.parametrize(("triples", "forests"), [(0, "paths"), (0, "trees"), (2, "trees")])
def test_gradient(loops: str, triples: int, forests: str) -> None:
    """With the split held the gradient is that of the value, to rounding; with a new split nearly so."""
    layout, scores = a_graph(4 + triples, triples)
    generator = torch.Generator().manual_seed(0)
    along = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in scores]
    leaves = [x.clone().requires_grad_() for x in scores]
    tight = Reweighted(layout, sweeps=2000, tolerance=1e-7, forests=forests)
    weight = torch.tensor([[1.0, 2.0], [0.5, 0.0]])
    slopes = torch.autograd.grad((tight.log_total(leaves, LOG) * weight).sum(), leaves)
    told = sum((a * b).sum() for a, b in zip(slopes, along, strict=True))

    def value(step: float) -> Tensor:
        return (
            tight.log_partition([a + step * b for a, b in zip(scores, along, strict=True)]) * weight
        ).sum()

    assert float(told) == pytest.approx(float((value(1e-4) - value(-1e-4)) / 2e-4), abs=1e-5)

    # One sweep leaves the forests apart; the split stays where it is if none follows.
    cover = tight.covers[0]
    rough = cover.solve([_rows(x, cover, layout, n) for n, x in enumerate(scores)], 1, 0.0, None)

    def held(step: float) -> Tensor:
        moved = [a + step * b for a, b in zip(scores, along, strict=True)]
        return cover.solve(
            [_rows(x, cover, layout, n) for n, x in enumerate(moved)], 0, 0.0, rough.split
        ).log_z.sum()

    at_rest = cover.solve([_rows(x, cover, layout, n) for n, x in enumerate(scores)], 0, 0.0, rough.split)
    told = torch.zeros(())
    for n, (p, x) in enumerate(zip((at_rest.node, *at_rest.tables), along, strict=True)):
        x = _rows(x, cover, layout, n)
        told = told + ((p * x[:, None]) if x.dim() < p.dim() else p * x).sum()
    assert float(told) == pytest.approx(float((held(1e-4) - held(-1e-4)) / 2e-4), abs=1e-6)
    torch.testing.assert_close(at_rest.log_z, rough.log_z, **CLOSE)


def _rows(x: Tensor, cover: PathCover | TreeCover, layout: GraphLayout, n: int) -> Tensor:
    shared = n > 0 and x.dim() == 1 + layout.tuples[n - 1].arity
    return x if shared else x[:, cover.rows]


@pytest.mark.parametrize(("triples", "forests"), [(0, "paths"), (0, "trees"), (2, "trees")])
def test_the_bound_never_rises(loops: str, triples: int, forests: str) -> None:
    layout, scores = a_graph(11 + triples, triples)
    programs = [Reweighted(layout, sweeps=n, tolerance=0, forests=forests) for n in range(12)]
    values = torch.stack([program.solve(scores).log_z for program in programs])
    assert bool((values.diff(dim=0) < 1e-9).all())
    assert bool((values[-1] < values[0] - 1e-3).any())


def test_marginals_agree_with_one_another(loops: str) -> None:
    layout = grid(3, 4, 3, B=2)
    scores = random_scores(layout, 3, torch.Generator().manual_seed(3))
    node, pair = Reweighted(layout, sweeps=1000, tolerance=1e-8).marginals(scores)
    index = layout.tuples[0].index
    for place, dim in ((0, -1), (1, -2)):
        at = index[None, ..., place, None].expand(2, -1, -1, 3)
        torch.testing.assert_close(pair.sum(dim), node.gather(2, at), atol=1e-6, rtol=0)
    torch.testing.assert_close(node.sum(-1), torch.ones_like(node[..., 0]))


def both_loops(program: Reweighted, scores: list[Tensor]) -> list[Solution]:
    found = []
    for worth in (0, float("inf")):
        with pytest.MonkeyPatch.context() as patch:
            for module in (path_sweeps, tree_steps):
                patch.setattr(module, "WORTH_COMPILING", worth)
            found.append(program.solve(scores))
    return found


@pytest.mark.parametrize("shared", [False, True])
def test_loops_agree(shared: bool) -> None:
    if path_sweeps.compiled_loops() is None:
        pytest.skip("numba is not installed")
    layout = batch_of([(12, [grid_edges(3, 4)]), (6, [[(5, 0), *grid_edges(2, 3, True)]])], [(3, 3)])
    scores = random_scores(layout, 3, torch.Generator().manual_seed(8), shared=shared, size=0.5)
    # Sweeps over paths are the same steps; over trees they lead to the same end.
    for program in (
        Reweighted(layout, sweeps=4, tolerance=0),
        Reweighted(layout, forests="trees", sweeps=500, tolerance=1e-6),
    ):
        one, other = both_loops(program, scores)
        torch.testing.assert_close(one.log_z, other.log_z, **CLOSE)
        for a, b in zip((one.node, *one.tables), (other.node, *other.tables), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=0)


def test_trees_are_closer_than_paths(loops: str) -> None:
    layout = grid(3, 4, 2, B=3)
    scores = random_scores(layout, 2, torch.Generator().manual_seed(0))
    exact = Enumeration(layout).log_partition(scores)
    by_paths = Reweighted(layout).log_partition(scores) - exact
    by_trees = Reweighted(layout, forests="trees").log_partition(scores) - exact
    assert bool((by_trees > -1e-8).all())
    assert float(by_trees.mean()) < 0.95 * float(by_paths.mean())
    with pytest.raises(InputError, match="forests"):
        Reweighted(layout, forests="stars")


def test_padding_and_order_change_nothing(loops: str) -> None:
    small, large = grid_edges(2, 3), grid_edges(3, 3)
    layout = batch_of([(6, [small]), (9, [large])], [(2, 2)])
    generator = torch.Generator().manual_seed(0)
    f, g = random_scores(layout, 2, generator)
    f[:, 0, 6:], g[:, 0, len(small) :] = torch.nan, torch.inf
    tight = {"sweeps": 2000, "tolerance": 1e-9}
    both = Reweighted(layout, **tight).log_partition((f, g))
    alone = Reweighted(layout.rows([0]), **tight).log_partition((f[:, :1], g[:, :1]))
    torch.testing.assert_close(both[:, :1], alone)
    cut = Reweighted(batch_of([(6, [small])], [(2, 2)]), **tight)
    torch.testing.assert_close(both[:, :1], cut.log_partition((f[:, :1, :6], g[:, :1, : len(small)])))
    order = torch.randperm(len(large), generator=generator)
    turned = batch_of([(6, [small]), (9, [[large[e] for e in order.tolist()]])], [(2, 2)])
    moved = g.clone()
    moved[:, 1] = g[:, 1, order]
    torch.testing.assert_close(both, Reweighted(turned, **tight).log_partition((f, moved)))
    flipped = batch_of([(6, [[(v, u) for u, v in small]]), (9, [large])], [(2, 2)])
    moved = g.clone()
    moved[:, 0] = g[:, 0].mT
    torch.testing.assert_close(both, Reweighted(flipped, **tight).log_partition((f, moved)))
    for x in Reweighted(layout).marginals((f, g)):
        assert bool(x.isfinite().all())


@pytest.mark.parametrize(("triples", "forests"), [(0, "paths"), (0, "trees"), (1, "trees")])
def test_impossible_labels_never_give_nan(loops: str, triples: int, forests: str) -> None:
    layout, scores = a_graph(21, triples)
    f = scores[0].clone()
    f[:, :, 1, 0] = -torch.inf
    tables = [g.clone() for g in scores[1:]]
    tables[0][:, :, :, 0, 1] = -torch.inf
    program, exact = Reweighted(layout, forests=forests), Enumeration(layout)
    bound, truth = program.log_partition((f, *tables)), exact.log_partition((f, *tables))
    assert not bool(bound.isnan().any())
    assert bool((bound >= truth - 1e-8).all())
    for x in program.marginals((f, *tables)):
        assert not bool(x.isnan().any())
    assert float(program.marginals((f, *tables))[0][:, :, 1, 0].abs().max()) == 0
    f[:, 0, 1] = -torch.inf
    assert bool((program.log_partition((f, *tables))[:, 0] == -torch.inf).all())
    assert not any(bool(x.isnan().any()) for x in program.marginals((f, *tables)))


def test_missing_and_known_labels(loops: str) -> None:
    layout = grid(2, 3, 2)
    scores = random_scores(layout, 2, torch.Generator().manual_seed(2))
    y = torch.tensor([[0, 1, -1, 0, 1, -1]])
    whole = Reweighted(layout).log_prob(scores, y)
    assert bool((whole <= Enumeration(layout).log_prob(scores, y) + 0.5).all())
    known = y.clamp(min=0)
    assert bool(
        (Reweighted(layout).log_prob(scores, known) <= Enumeration(layout).log_prob(scores, known)).all()
    )


def test_labels_of_their_own(loops: str) -> None:
    """Variables with 2 and with 3 labels, of 5, as two layers of a sequence in a loop."""
    layout = batch_of([(4, [[(0, 2), (1, 3)], [(0, 1)], [(2, 3)]])], [(2, 3), (2, 2), (3, 3)])
    tuples = [layout.tuples[0], layout.tuples[1], layout.tuples[2]]
    firsts = [(0, 2), (0, 0), (2, 2)]
    span = torch.tensor([[[0, 2], [0, 2], [2, 5], [2, 5]]])
    layout = replace(
        layout, span=span, tuples=tuple(replace(t, first=x) for t, x in zip(tuples, firsts, strict=True))
    )
    scores = random_scores(layout, 5, torch.Generator().manual_seed(4))
    program, exact = Reweighted(layout), Enumeration(layout)
    gap = program.log_partition(scores) - exact.log_partition(scores)
    assert bool((gap > -1e-8).all())
    assert bool((gap < 0.5).all())
    node = program.marginals(scores)[0]
    assert float(node[:, 0, :2, 2:].abs().max()) == 0
    assert bool(((program.decode(scores) >= span[..., 0]) & (program.decode(scores) < span[..., 1])).all())


def test_single_precision(loops: str) -> None:
    layout = grid(3, 3, 3)
    scores = random_scores(layout, 3, torch.Generator().manual_seed(0))
    wide = Reweighted(layout).log_partition(scores)
    narrow = Reweighted(layout).log_partition([x.float() for x in scores])
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, atol=1e-4, rtol=0)


@pytest.mark.parametrize("forests", ["paths", "trees"])
def test_a_warm_start_changes_nothing_but_the_sweeps(loops: str, forests: str) -> None:
    layout = grid(4, 4, 3)
    scores = random_scores(layout, 3, torch.Generator().manual_seed(0), size=2)
    cold, warm = Reweighted(layout, forests=forests), Reweighted(layout, forests=forests, warm=True)
    first, second = warm.solve(scores), warm.solve([1.01 * x for x in scores])
    again = cold.solve([1.01 * x for x in scores])
    assert second.sweeps < again.sweeps
    torch.testing.assert_close(second.log_z, again.log_z, atol=1e-5, rtol=0)
    torch.testing.assert_close(first.log_z, cold.solve(scores).log_z)


def test_decoding_finds_the_best_of_easy_graphs(loops: str) -> None:
    layout = grid(3, 3, 2, B=4)
    scores = random_scores(layout, 2, torch.Generator().manual_seed(0))
    found, best = Reweighted(layout).decode(scores), Enumeration(layout).decode(scores)
    assert float((found == best).double().mean()) > 0.95


@pytest.mark.parametrize("triples", [0, 2])
def test_samples_have_the_frequencies_of_the_distribution(triples: int) -> None:
    layout, scores = a_graph(3, triples)
    scores = [x[:1] for x in scores]
    exact = Enumeration(layout).marginals(scores)[0][0]
    n = 2000
    many = [x.expand(n, *x.shape[1:]) for x in scores]
    y = Reweighted(layout).sample(many, torch.Generator().manual_seed(0))
    share = (y == 1).double().mean(0)
    sd = (exact[..., 1] * (1 - exact[..., 1]) / n).sqrt()
    assert bool(((share - exact[..., 1]).abs() <= 4.5 * sd + 1e-9).all())


def test_what_it_cannot_give_is_refused_by_name() -> None:
    layout = grid(2, 2, 2)
    scores = random_scores(layout, 2, torch.Generator().manual_seed(0))
    program = Reweighted(layout)
    with pytest.raises(InputError, match="tree-reweighted program has no n best"):
        program.n_best(scores, 2)
    with pytest.raises(InputError, match="tree-reweighted program has no"):
        program.log_total(scores, MAX)
    assert not program.exact


def test_covers() -> None:
    assert [len(x) for x in cover_by_paths(grid_edges(4, 5))] == [16, 15]
    rows = [grid_edges(4, 5)[e] for e in cover_by_paths(grid_edges(4, 5))[0]]
    assert all(v == u + 1 for u, v in rows)
    assert len(cover_by_paths(grid_edges(4, 5, True))) == 4
    ring = [(n, (n + 1) % 6) for n in range(6)]
    assert sorted(e for forest in cover_by_trees(ring) for e in set(forest)) != list(
        range(6)
    )  # some in both
    assert {e for forest in cover_by_trees(ring) for e in forest} == set(range(6))
    assert len(cover_by_trees([(0, 1, 2), (2, 3, 4), (4, 5)])) == 1
    assert max(induced_forests(grid_edges(5, 5), 25)) == 1
    assert len(induced_trees(grid_edges(4, 5))) == 16
    assert [type(x) for x in Reweighted(grid(3, 3, 2)).covers] == [PathCover]
    star = batch_of([(6, [[(0, n) for n in range(1, 6)]])], [(2, 2)])
    assert [type(x) for x in Reweighted(star).covers] == [TreeCover]
