"""Covers of a factor graph by forests: every factor is in at least one, and in as many as have room for it.

There are two kinds. Trees: a factor may join a forest if its variables are in different components of it.
Monotone paths, for factors of two variables: an edge runs from its earlier to its later variable, and may
join a forest if the earlier one has no edge out of it there and the later one no edge into it. Such a
forest cannot have a cycle. A grid numbered row by row is covered by its rows and its columns; diagonals
need two more forests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

Factor = tuple[int, ...]


def cover_by_trees(factors: Sequence[Factor]) -> list[list[int]]:
    """Forests, each a list of positions in ``factors``. Cost O(forests * factors).

    Factors with the most frequent difference between their ends go first, so that rows of a grid stay
    together."""
    order = _by_gap(factors)
    forests: list[list[int]] = []
    parents: list[dict[int, int]] = []
    left = order
    while left:
        forest: list[int] = []
        parent: dict[int, int] = {}
        later: list[int] = []
        for e in left:
            (forest if _join(parent, factors[e]) else later).append(e)
        forests.append(forest)
        parents.append(parent)
        left = later
    for forest, parent in zip(forests, parents, strict=True):
        inside = set(forest)
        forest += [e for e in order if e not in inside and _join(parent, factors[e])]
    return forests


def cover_by_paths(edges: Sequence[Factor]) -> list[list[int]]:
    """The same with monotone paths: at least as many forests as a variable has edges into it, or out of
    it."""
    order = _by_gap(edges)
    forests: list[list[int]] = []
    taken: list[tuple[set[int], set[int]]] = []
    for e in order:
        u, v = sorted(edges[e])
        k = next((k for k, (out, into) in enumerate(taken) if u not in out and v not in into), len(taken))
        if k == len(taken):
            taken.append((set(), set()))
            forests.append([])
        taken[k][0].add(u)
        taken[k][1].add(v)
        forests[k].append(e)
    for forest, (out, into) in zip(forests, taken, strict=True):
        for e in order:
            u, v = sorted(edges[e])
            if u not in out and v not in into:
                out.add(u)
                into.add(v)
                forest.append(e)
    return forests


def levels(factors: Sequence[Factor], n: int) -> list[int]:
    """For each of n variables, the length of the longest chain of earlier variables that leads to it along
    factors; the variables of a factor have different levels."""
    after: list[set[int]] = [set() for _ in range(n)]
    for factor in factors:
        ordered = sorted(factor)
        for u, v in pairwise(ordered):
            after[u].add(v)
    level = [0] * n
    for u in range(n):
        for v in after[u]:
            level[v] = max(level[v], level[u] + 1)
    return level


def colours(factors: Sequence[Factor], n: int) -> list[int]:
    """For each of n variables, the first colour that no earlier variable of its factors has."""
    beside: list[set[int]] = [set() for _ in range(n)]
    for factor in factors:
        for u in factor:
            beside[u].update(v for v in factor if v < u)
    found: list[int] = []
    for u in range(n):
        used = {found[v] for v in beside[u]}
        found.append(next(c for c in range(len(used) + 1) if c not in used))
    return found


def induced_forests(factors: Sequence[Factor], n: int) -> list[int]:
    """For each of n variables, the number of its block, such that the factors within a block make it a
    forest, and no factor has several, but not all, of its variables in one block. Each block takes all it
    can, in order."""
    of: list[list[int]] = [[] for _ in range(n)]
    for e, factor in enumerate(factors):
        for u in factor:
            of[u].append(e)
    block, left, number = [0] * n, list(range(n)), 0
    while left:
        parent: dict[int, int] = {}
        inside, later = set[int](), []
        for u in left:
            joined = [[v for v in factors[e] if v in inside] for e in of[u]]
            others = [v for found in joined for v in found]
            roots = {_root(parent, v) for v in others}
            whole = all(len(factors[e]) == 2 or not found for e, found in zip(of[u], joined, strict=True))
            if len(roots) < len(others) or not whole:
                later.append(u)
                continue
            inside.add(u)
            block[u] = number
            for v in others:
                _join(parent, (u, v))
        left, number = later, number + 1
    return block


def induced_trees(factors: Sequence[Factor]) -> list[int]:
    """Positions of factors that make a forest, such that no other factor has two variables in one of its
    trees. Factors with the most frequent difference between their ends go first."""
    parent: dict[int, int] = {}
    beside: dict[int, Counter[int]] = {}  # for each component, how many factors it shares with others
    for factor in factors:
        for u in factor:
            beside.setdefault(u, Counter()).update(v for v in factor if v != u)
    kept = []
    for e in _by_gap(factors):
        roots = [_root(parent, u) for u in factors[e]]
        if len(set(roots)) < len(roots) or any(beside[a][b] > 1 for a in roots for b in roots if a != b):
            continue
        kept.append(e)
        _join(parent, factors[e])
        first, *others = roots
        for other in others:
            _merge(beside, first, other)
    return kept


def _merge(beside: dict[int, Counter[int]], first: int, other: int) -> None:
    """Component ``other`` becomes part of ``first``."""
    found = beside.pop(other)
    for v, count in found.items():
        if v == first:
            continue
        beside[first][v] += count
        del beside[v][other]
        beside[v][first] += count
    del beside[first][other]


def _by_gap(factors: Sequence[Factor]) -> list[int]:
    """Positions of factors, those with the most frequent difference between their ends first."""
    common = Counter(map(_gap, factors))
    return sorted(range(len(factors)), key=lambda e: (-common[_gap(factors[e])], _gap(factors[e])))


def _gap(edge: Factor) -> int:
    return max(edge) - min(edge)


def _root(parent: dict[int, int], u: int) -> int:
    while parent.setdefault(u, u) != u:
        parent[u] = parent[parent[u]]
        u = parent[u]
    return u


def _join(parent: dict[int, int], factor: Factor) -> bool:
    """Joins the components of the variables of a factor, if they are all different."""
    roots = [_root(parent, u) for u in factor]
    if len(set(roots)) < len(roots):
        return False
    for other in roots[1:]:
        parent[other] = roots[0]
    return True
