"""A lower bound of log Z by structured mean field, over trees that share at most one variable with any
other factor.

For a distribution q under which the trees are independent, log Z >= E_q[score] + H(q). If q is the forest
with the trees' own tables and node scores h, this bound is log Z_forest(h) - E_q[h - f] + E_q[scores of the
other factors], whose last term needs node marginals only. The best h is, at each node, f plus the scores
that the other factors are expected to add; each round takes these from the marginals of the round before.

Letters as in ``layout``; S draws.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from structgp.data.layout import GraphLayout, Tuples
from structgp.structures.graph.cover import factors_of
from structgp.structures.graph.elimination import Elimination
from structgp.structures.graph.factor_graph import by_tuple
from structgp.structures.graph.forests import induced_trees
from structgp.structures.program import Scores
from structgp.structures.semirings import LOG

ROUNDS = 10
"""Number of rounds; on Potts grids of 6 x 6 with three labels the bound stops rising after about five."""


class MeanField:
    def __init__(self, layout: GraphLayout) -> None:
        kept = [torch.zeros(t.mask.shape, dtype=torch.bool) for t in layout.tuples]
        for b, found in enumerate(factors_of(layout)):
            for e in induced_trees([factor for _, _, factor in found]):
                kept[found[e][0]][b, found[e][1]] = True
        inside = [x.to(layout.mask.device) for x in kept]
        matched = list(zip(layout.tuples, inside, strict=True))
        self.trees = Elimination(replace(layout, tuples=tuple(replace(t, mask=x) for t, x in matched)))
        self.others = [replace(t, mask=t.mask & ~x) for t, x in matched]

    def lower_bound(self, scores: Scores, node: Tensor, rounds: int = ROUNDS) -> Tensor:
        """(S, B) the bound, starting from node marginals (S, B, N, V)."""
        f, *tables = scores
        best = f.new_full(f.shape[:2], -torch.inf)
        for _ in range(rounds):
            h = f + self._expected(tables, node)[0]
            leaf = h.detach().requires_grad_()
            with torch.enable_grad():
                total = self.trees.log_total((leaf, *tables), LOG)
                (node,) = torch.autograd.grad(total.sum(), leaf)
            others = self._expected(tables, node)[1]
            moved = torch.where(node > 0, node * torch.where(f > -torch.inf, h - f, 0), 0)
            value = total.detach() - moved.flatten(2).sum(-1) + others
            best = torch.fmax(best, value)  # nan, from -inf, is no bound
        return best

    def _expected(self, tables: Scores, node: Tensor) -> tuple[Tensor, Tensor]:
        """(S, B, N, V) the score that factors outside the trees add to each label, in expectation over
        their other variables, and (S, B) the expected total of these factors."""
        added = torch.zeros_like(node)
        total = node.new_zeros(node.shape[:2])
        for g, t in zip(tables, self.others, strict=True):
            for j in range(t.arity):
                found = torch.where(t.mask[..., None], _over_others(g, t, node, j), 0)  # (S, B, E, size)
                labels = slice(t.first[j], t.first[j] + t.sizes[j])
                at = t.index[..., j, None].expand(found.shape)
                added[..., labels].scatter_add_(2, at, found)
                if j == 0:
                    p = node.gather(
                        2, t.index[None, ..., 0, None].expand(*found.shape[:-1], node.shape[-1])
                    )
                    p = p[..., labels]
                    total = total + torch.where(p > 0, p * found, 0).flatten(2).sum(-1)
        return added, total


def _over_others(g: Tensor, t: Tuples, node: Tensor, j: int) -> Tensor:
    """(S, B, E, sizes[j]) the expectation of g over all places but j."""
    x = by_tuple(g, t)
    S, (B, E), V = len(g), t.mask.shape, node.shape[-1]
    for i in reversed(range(t.arity)):
        if i == j:
            continue
        at = t.index[None, ..., i, None].expand(S, B, E, V)
        p = node.gather(2, at)[..., t.first[i] : t.first[i] + t.sizes[i]]
        p = p.reshape(S, B, E, *[1] * i, -1, *[1] * (x.dim() - 4 - i))
        x = torch.where(p > 0, x * p, 0).sum(3 + i, keepdim=True)
    return x.reshape(S, B, E, t.sizes[j])
