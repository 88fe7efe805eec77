"""The tree-reweighted bound (Wainwright, Jaakkola and Willsky, 2005): log Z from above, for graphs too wide
to sum over.

log Z(f, g) <= sum_k w_k log Z_k(f + d_k, g_k). The bound is a weighted mean over forests that together have
every factor. It is convex in the scores, and the split d of node scores is chosen to make it small. At the
best split, its gradient is the marginals of every node and tuple, on which the forests then agree. If the
graph is a forest, everything is exact.

Examples whose factors all have two variables are covered by paths (``path_sweeps``); others, and graphs for
which paths need many more forests, by trees (``tree_steps``). On a CPU both are compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.structures.graph.cover import (
    Cover,
    Solution,
    factors_of,
    join_draws,
    solve_all,
    with_slopes,
    within_span,
)
from structgp.structures.graph.factor_graph import GraphProgram, by_tuple
from structgp.structures.graph.forests import cover_by_paths, cover_by_trees
from structgp.structures.graph.local_moves import Block, blocks_of, gibbs_sweep, improved, total_score
from structgp.structures.graph.mean_field import MeanField
from structgp.structures.graph.path_sweeps import PathCover
from structgp.structures.graph.tree_steps import TreeCover
from structgp.structures.program import Scores
from structgp.structures.semirings import LOG, Semiring

ENTRIES_AT_ONCE = 1 << 26
"""Largest count of numbers in tables of tuples that are held at once; beyond it, some draws at a time."""

SHARPER = (4.0,)
"""Factors by which scores are multiplied for further solutions in the search for a good labelling: the
marginals then point to the best ones."""

CLIMBING_SWEEPS, CLIMBING_ERROR = 5, 0.004
"""For calls by an optimiser, the largest number of sweeps, and about by how many nats the bound of an
example may be off: the next call comes with scores that hardly differ, and any split gives a bound and its
gradient. On TRAINING pictures of snakes (60 to fit, 50 held out) a likelihood took 48 microseconds on one
core, 76 with 100 sweeps to a tolerance of 1e-3, and 375 with 100 sweeps to 1e-4 without a warm start; the
NLL of held-out pictures was .2992, .3008 and .2990, with a standard error of .026. The time of a whole fit
differs by a factor of two either way, depending on when draws are doubled."""

DECODE_SWEEPS = 20
GIBBS_SWEEPS = 30


@dataclass(frozen=True)
class Reweighted(GraphProgram):
    """sweeps : largest number of sweeps. tolerance : largest difference between a forest's node marginals
    and their mean at which the split counts as best; the bound is then usually off by about the tolerance
    squared per node. warm : True to start from the split of the last call with as many draws and as many
    impossible labels, for optimisers, whose scores hardly change between calls; if False, a call depends on
    its scores alone. forests : 'paths' where factors have two variables, such as rows and columns of a
    grid; or 'trees', as large as possible, for a bound about a quarter closer to log Z at three times the
    time on a CPU, and more on a GPU."""

    sweeps: int = 100
    tolerance: float = 1e-4
    warm: bool = False
    forests: str = "paths"
    _kept: dict[Any, list[Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)

    exact = False

    def __post_init__(self) -> None:
        if self.forests not in ("paths", "trees"):
            raise InputError(
                "forests", f"must be 'paths' or 'trees', got {self.forests!r}", "pass one of them"
            )

    def climbing(self) -> Reweighted:
        """This program, but starting from the split of the last call, and ending sooner."""
        tolerance = (CLIMBING_ERROR / max(1, self.layout.mask.shape[1])) ** 0.5
        tolerance, sweeps = max(self.tolerance, tolerance), min(self.sweeps, CLIMBING_SWEEPS)
        found = replace(self, warm=True, tolerance=tolerance, sweeps=sweeps)
        vars(found)["covers"] = self.covers  # found once for both
        return found

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        """(S, B) an upper bound of log Z, convex in the scores."""
        if semiring is not LOG:
            self._refuse(f"no sum under {semiring}", "ask for log Z or marginals")
        return with_slopes(self, scores)

    def solve(self, scores: Scores) -> Solution:
        """The bound and its gradients, some draws at a time."""
        given = self._given(scores)
        entries = sum(t.mask.numel() * prod(t.sizes) for t in self.layout.tuples)
        at_once = max(1, ENTRIES_AT_ONCE // max(1, entries))
        parts = zip(*(x.split(at_once) for x in given), strict=True)
        return join_draws([self._solve(part, n) for n, part in enumerate(parts)])

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        parts = zip(scores[1:], self.layout.tuples, strict=True)
        found = self.solve([scores[0], *(by_tuple(g, t) for g, t in parts)])
        return found.node, *found.tables

    def node_marginals(self, scores: Scores) -> Tensor:
        return self.solve(self.restrict(scores)).node

    def _solve(self, scores: Scores, part: int) -> Solution:
        f = scores[0]
        key = (part, len(f), f.dtype, int((f == -torch.inf).sum())) if self.warm else None
        splits = self._kept.get(key, [None] * len(self.covers))
        found, splits = solve_all(self.covers, self.layout, scores, self.sweeps, self.tolerance, splits)
        if self.warm:
            self._kept[key] = splits
        return found

    @cached_property
    def covers(self) -> list[Cover]:
        """Covers by paths where these need at most twice as many forests as trees do, else by trees."""
        by_paths: dict[int, list[list[int]]] = {}
        by_trees: dict[int, list[list[int]]] = {}
        for b, found in enumerate(factors_of(self.layout)):
            factors = [factor for _, _, factor in found]
            trees = cover_by_trees(factors)
            edges_only = self.forests == "paths" and all(len(factor) == 2 for factor in factors)
            paths = cover_by_paths(factors) if edges_only else None
            if paths is not None and len(paths) <= (2 * len(trees) if len(trees) > 1 else 1):
                by_paths[b] = paths
            else:
                by_trees[b] = trees
        made: list[Cover] = []
        device = self.layout.mask.device
        if by_paths:
            rows = torch.tensor(list(by_paths), device=device)
            made.append(PathCover(self.layout, rows, [*by_paths.values()]))
        if by_trees:
            rows = torch.tensor(list(by_trees), device=device)
            made.append(TreeCover(self.layout, rows, [*by_trees.values()]))
        return made

    def bracket(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """(S, B) twice: bounds of log Z from below, by structured mean field or the best labelling found,
        and from above."""
        scores = self._given(self.restrict(scores))
        high = self.solve(scores)
        low = self._mean_field.lower_bound(scores, high.node)
        best = total_score(self.layout, scores, self._best_found(scores, high.node))
        return torch.maximum(low, best), high.log_z

    def decode(self, scores: Scores) -> Tensor:
        """(S, B, N) a labelling that no change of a block of variables improves, not always the best; 0 at
        padding. The best found from the marginals of the scores, and of the scores times ``SHARPER``."""
        scores = self._given(self.restrict(scores))
        return self._best_found(scores, self.solve(scores).node)

    def sample(self, scores: Scores, generator: torch.Generator) -> Tensor:
        """(S, B, N) one labelling per draw and example, by ``GIBBS_SWEEPS`` sweeps of Gibbs sampling over
        blocks that are forests, starting from the most probable label of each node; 0 at padding."""
        scores = self._given(self.restrict(scores))
        y = self.solve(scores).node.argmax(-1)
        for _ in range(GIBBS_SWEEPS):
            y = gibbs_sweep(self.layout, scores, y, self._blocks, generator)
        return torch.where(self.layout.mask, y, 0)

    def best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        self._refuse("no n best labellings", "use a graph narrow enough for exact sums, or draw samples")

    def n_best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        return self.best(scores, n)

    def entropy(self, scores: Scores) -> Tensor:
        """(S, B) the mean entropy of the forests, in nats. It is the entropy that belongs to the
        tree-reweighted bound, and close to the distribution's own where the bound is close to log Z. 0
        where no labelling is allowed."""
        return self._entropy(self.restrict(scores))

    def _best_found(self, scores: Scores, node: Tensor) -> Tensor:
        found = []
        for p in (node, *(self.solve([x * by for x in scores]).node for by in SHARPER)):
            start = torch.where(self.layout.mask, p.argmax(-1), 0)
            y = improved(self.layout, scores, start, self._blocks, DECODE_SWEEPS)
            found.append((torch.where(self.layout.mask, y, 0), total_score(self.layout, scores, y)))
        labels, values = (torch.stack(x) for x in zip(*found, strict=True))
        return labels.gather(0, values.argmax(0)[None, ..., None].expand(1, *labels.shape[1:]))[0]

    def _given(self, scores: Scores) -> list[Tensor]:
        f, *tables = (x.detach() for x in scores)
        return [within_span(self.layout, f), *tables]

    @cached_property
    def _blocks(self) -> list[Block]:
        return blocks_of(self.layout, "forest")

    @cached_property
    def _mean_field(self) -> MeanField:
        return MeanField(self.layout)

    def _refuse(self, problem: str, remedy: str) -> NoReturn:
        raise InputError("structure", f"the tree-reweighted program has {problem}", remedy)
