"""Small random factor graphs for tests of graph programs."""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.structures.graph.layout import GraphLayout, Tuples


def batch_of(
    graphs: list[tuple[int, list[list[tuple[int, ...]]]]], sizes: list[tuple[int, ...]]
) -> GraphLayout:
    """graphs : for each example its number of variables and, for each template, its tuples. sizes : of each
    template, labels counted from 0."""
    N = max(n for n, _ in graphs)
    mask = torch.tensor([[i < n for i in range(N)] for n, _ in graphs])
    tuples = []
    for t, size in enumerate(sizes):
        E = max(1, *(len(parts[t]) for _, parts in graphs))
        index = torch.zeros((len(graphs), E, len(size)), dtype=torch.long)
        there = torch.zeros((len(graphs), E), dtype=torch.bool)
        for b, (_, parts) in enumerate(graphs):
            for e, variables in enumerate(parts[t]):
                index[b, e], there[b, e] = torch.tensor(variables), True
        tuples.append(Tuples(f"t{t}", index, there, (0,) * len(size), size))
    return GraphLayout(mask, tuple(tuples))


def grid_edges(H: int, W: int, diagonals: bool = False) -> list[tuple[int, ...]]:
    """Row by row, each pixel with the next one and the one below."""
    steps = [(0, 1), (1, 0)] + ([(1, 1), (1, -1)] if diagonals else [])
    return [
        (i * W + j, (i + a) * W + j + b)
        for i in range(H)
        for j in range(W)
        for a, b in steps
        if i + a < H and 0 <= j + b < W
    ]


def grid(H: int, W: int, V: int, B: int = 1, diagonals: bool = False) -> GraphLayout:
    return batch_of([(H * W, [grid_edges(H, W, diagonals)])] * B, [(V, V)])


def random_graph(
    generator: torch.Generator, n: int, edges: int, triples: int = 0
) -> list[list[tuple[int, ...]]]:
    """Tuples of two and of three variables, in any order; no pair twice."""
    pairs, found = set(), []
    for _ in range(edges):
        u, v = torch.randperm(n, generator=generator)[:2].tolist()
        if (min(u, v), max(u, v)) not in pairs:
            pairs.add((min(u, v), max(u, v)))
            found.append((u, v))
    three = [tuple(torch.randperm(n, generator=generator)[:3].tolist()) for _ in range(triples)]
    return [found, three]


def random_scores(
    layout: GraphLayout,
    V: int,
    generator: torch.Generator,
    S: int = 2,
    shared: bool = False,
    size: float = 1.0,
) -> list[Tensor]:
    B, N = layout.mask.shape
    scores = [size * torch.randn((S, B, N, V), generator=generator, dtype=torch.float64)]
    for t in layout.tuples:
        shape = (S, *t.sizes) if shared else (S, B, t.index.shape[1], *t.sizes)
        scores.append(size * torch.randn(shape, generator=generator, dtype=torch.float64))
    return scores
