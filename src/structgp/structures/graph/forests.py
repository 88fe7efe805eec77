"""Covers of a factor graph by forests: every factor is in at least one, and in as many as have room for it.

Two kinds. Trees: a factor may join a forest if its variables are in different components of it. Monotone
paths, for factors of two variables: an edge runs from its earlier to its later variable, and may join a
forest if the earlier one has no edge out of it there and the later one no edge into it. Such a forest cannot
have a cycle. A grid numbered row by row becomes its rows and its columns, with diagonals two more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

Factor = tuple[int, ...]


def cover_by_trees(factors: Sequence[Factor]) -> list[list[int]]:
    """Forests, each a list of positions in ``factors``. Cost O(forests * factors)."""
    forests: list[list[int]] = []
    parents: list[dict[int, int]] = []
    left = list(range(len(factors)))
    while left:
        forest, parent, later = [], {}, []
        for e in left:
            (forest if _join(parent, factors[e]) else later).append(e)
        forests.append(forest)
        parents.append(parent)
        left = later
    for forest, parent in zip(forests, parents, strict=True):
        inside = set(forest)
        forest += [e for e in range(len(factors)) if e not in inside and _join(parent, factors[e])]
    return forests


def cover_by_paths(edges: Sequence[Factor]) -> list[list[int]]:
    """The same of monotone paths, at least as many as a variable has edges into it, or out of it.

    Edges with the most frequent difference between their ends go first: the rows of a grid stay together."""
    common = Counter(map(_gap, edges))
    order = sorted(range(len(edges)), key=lambda e: (-common[_gap(edges[e])], _gap(edges[e])))
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
    """For each of n variables how many variables, at most, follow one another along factors before it; the
    variables of a factor have different levels."""
    after: list[set[int]] = [set() for _ in range(n)]
    for factor in factors:
        ordered = sorted(factor)
        for u, v in zip(ordered, ordered[1:], strict=False):
            after[u].add(v)
    level = [0] * n
    for u in range(n):
        for v in after[u]:
            level[v] = max(level[v], level[u] + 1)
    return level


def colours(factors: Sequence[Factor], n: int) -> list[int]:
    """For each of n variables the first colour that no earlier variable of its factors has."""
    beside: list[set[int]] = [set() for _ in range(n)]
    for factor in factors:
        for u in factor:
            beside[u].update(v for v in factor if v < u)
    found: list[int] = []
    for u in range(n):
        used = {found[v] for v in beside[u]}
        found.append(next(c for c in range(len(used) + 1) if c not in used))
    return found


def _gap(edge: Factor) -> int:
    return abs(edge[0] - edge[1])


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
