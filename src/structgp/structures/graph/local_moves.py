"""Labellings that change block by block: iterated conditional modes, and Gibbs sampling.

A block is a set of variables that the factors between them join to a forest; given the labels of all other
variables, the whole block is drawn or improved at once. Each variable of an example is in exactly one
block. Large blocks, such as trees, mix fast; blocks of one colour, without factors between their variables,
cost least.

Letters: as in ``layout``; S draws. A variable is known by its place b N + n, a tuple by b E + e.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from structgp.data.layout import GraphLayout, Tuples
from structgp.structures.graph.cover import factors_of, is_shared
from structgp.structures.graph.elimination import Elimination
from structgp.structures.graph.factor_graph import GraphProgram
from structgp.structures.graph.forests import colours, induced_forests
from structgp.structures.program import Scores
from structgp.structures.semirings import draw

IMPOSSIBLE = -1e30
"""Score in place of -inf while labels change, so that moves lead out of a labelling with impossible
parts."""


@dataclass(frozen=True)
class Edge:
    """Tuples of one template that have one variable in a block, the one at ``place``. at : (Q,) the tuples.
    variables : (Q, a) the variables of each. to : (Q,) the position of that variable in the block."""

    template: int
    place: int
    at: Tensor
    variables: Tensor
    to: Tensor


@dataclass(frozen=True)
class Block:
    """variables : (L,) its variables, of all examples. edges : tuples with one variable in the block.
    inside : the layout with only those tuples that lie within the block, None if there are none."""

    variables: Tensor
    edges: tuple[Edge, ...]
    inside: GraphLayout | None


def blocks_of(layout: GraphLayout, by: str) -> list[Block]:
    """The blocks of a batch. by : 'colour' or 'forest'."""
    B, N = layout.mask.shape
    number = torch.full((B, N), -1)
    find = colours if by == "colour" else induced_forests
    for b, found in enumerate(factors_of(layout)):
        number[b] = torch.tensor(find([factor for _, _, factor in found], N), dtype=torch.long)
    number = torch.where(layout.mask, number.to(layout.mask.device), -1)
    return [_block(layout, number == k) for k in range(int(number.max()) + 1)]


def _block(layout: GraphLayout, member: Tensor) -> Block:
    B, N = member.shape
    variables = member.flatten().nonzero()[:, 0]
    where = torch.zeros(B * N, dtype=torch.long, device=member.device)
    where[variables] = torch.arange(len(variables), device=member.device)
    edges, inside = [], []
    first = torch.arange(B, device=member.device)[:, None, None] * N
    for t, tuples in enumerate(layout.tuples):
        place = (tuples.index + first).flatten(0, 1)  # (B E, a)
        has = member.flatten()[place] & tuples.mask.flatten()[:, None]
        count = has.sum(1)
        inside.append(replace(tuples, mask=((count == tuples.arity) & (count > 1)).view_as(tuples.mask)))
        for j in range(tuples.arity):
            at = (has[:, j] & ((count < tuples.arity) | (count == 1))).nonzero()[:, 0]
            if len(at):
                edges.append(Edge(t, j, at, place[at], where[place[at, j]]))
    is_joint = any(bool(t.mask.any()) for t in inside)
    return Block(variables, tuple(edges), replace(layout, tuples=tuple(inside)) if is_joint else None)


def conditional_scores(block: Block, layout: GraphLayout, scores: Scores, y: Tensor) -> Tensor:
    """(S, L, V) scores of the labels of a block, given the labels y (S, B N) of the others; without tuples
    within the block."""
    f, *tables = scores
    total = f.flatten(1, 2)[:, block.variables].clamp(min=IMPOSSIBLE)
    draws = torch.arange(len(f), device=f.device)[:, None, None]
    for edge in block.edges:
        g, t, j = tables[edge.template], layout.tuples[edge.template], edge.place
        place, stride, own = torch.zeros((len(f), len(edge.at)), dtype=torch.long, device=f.device), 1, 1
        for i in reversed(range(t.arity)):
            if i == j:
                own = stride
            else:
                place = place + (y[:, edge.variables[:, i]] - t.first[i]) * stride
            stride *= t.sizes[i]
        entry = place[..., None] + own * torch.arange(t.sizes[j], device=f.device)  # (S, Q, size)
        if is_shared(g, t):
            found = g.flatten(1)[draws, entry]
        else:
            found = g.flatten(3).flatten(1, 2)[draws, edge.at[:, None], entry]
        labels = slice(t.first[j], t.first[j] + t.sizes[j])
        total[..., labels].index_add_(1, edge.to, found.clamp(min=IMPOSSIBLE))
    return total


def improved(
    layout: GraphLayout, scores: Scores, y: Tensor, blocks: Sequence[Block], sweeps: int
) -> Tensor:
    """y (S, B, N) after each block in turn has taken its best labels given the others, until nothing
    changes, at most ``sweeps`` times."""
    shape, y = y.shape, y.flatten(1).clone()
    for _ in range(sweeps):
        before = y.clone()
        for block in blocks:
            h = conditional_scores(block, layout, scores, y)
            if block.inside is None:
                y[:, block.variables] = h.argmax(-1)
            else:
                program, given = _joint(block, scores, h)
                y[:, block.variables] = program.decode(given).flatten(1)[:, block.variables]
        if torch.equal(y, before):
            break
    return y.view(shape)


def gibbs_sweep(
    layout: GraphLayout,
    scores: Scores,
    y: Tensor,
    blocks: Sequence[Block],
    generator: torch.Generator,
    chance: Tensor | None = None,
) -> Tensor:
    """y (S, B, N) after each block in turn has been drawn given the others; ``chance`` (S, B, N, V) is set
    to the probabilities that each label had."""
    shape, y = y.shape, y.flatten(1).clone()
    p = None if chance is None else chance.view(len(y), -1, chance.shape[-1])
    for block in blocks:
        h = conditional_scores(block, layout, scores, y)
        if block.inside is None:
            share = h.softmax(-1)
            y[:, block.variables] = draw(share, generator)
            if p is not None:
                p[:, block.variables] = share
        else:
            program, given = _joint(block, scores, h)
            if p is not None:
                p[:, block.variables] = program.node_marginals(given).flatten(1, 2)[:, block.variables]
            y[:, block.variables] = program.sample(given, generator).flatten(1)[:, block.variables]
    return y.view(shape)


def _joint(block: Block, scores: Scores, h: Tensor) -> tuple[GraphProgram, list[Tensor]]:
    """An exact program, and its scores, for the labels of a block; the other variables have scores of 0."""
    assert block.inside is not None
    f, *tables = scores
    nodes = torch.zeros_like(f).flatten(1, 2)
    nodes[:, block.variables] = h
    given = [nodes.view_as(f), *(g.clamp(min=IMPOSSIBLE) for g in tables)]
    return Elimination(block.inside), given


def total_score(layout: GraphLayout, scores: Scores, y: Tensor) -> Tensor:
    """(S, B) scores of labellings y (S, B, N), one per draw."""
    f, *tables = scores
    total = torch.where(layout.mask, f.gather(-1, y[..., None]).squeeze(-1), 0).sum(-1)
    for g, t in zip(tables, layout.tuples, strict=True):
        place = entries(t, y)
        if is_shared(g, t):
            found = g.flatten(1).gather(1, place.flatten(1)).view_as(place)
        else:
            found = g.flatten(3).gather(3, place[..., None]).squeeze(-1)
        total = total + torch.where(t.mask, found, 0).sum(-1)
    return total


def entries(t: Tuples, y: Tensor) -> Tensor:
    """(S, B, E) the entry of a flat table that labellings y (S, B, N) pick at each tuple; 0 at padding."""
    place = torch.zeros((len(y), *t.mask.shape), dtype=torch.long, device=y.device)
    for j, (first, size) in enumerate(zip(t.first, t.sizes, strict=True)):
        place = place * size + y.gather(2, t.index[None, ..., j].expand_as(place)) - first
    return torch.where(t.mask, place, 0)
