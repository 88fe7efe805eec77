"""Loopy belief propagation: the Bethe approximation of log Z, for graphs too wide to sum over.

Messages pass between variables and factors, all at once and damped, until they hardly change. Beliefs are
then often close to the marginals, closer than tree-reweighted ones where couplings are weak; but the
approximation is not a bound and not convex in the scores, and messages may not settle. On forests
everything is exact.

log Z ~ sum_n log sum b_n + sum_e log sum b_e - sum_(e, n in e) log sum_y m_en m_ne, which is stationary in
the messages once they have settled: with the messages held fixed, its gradient in the scores is the
beliefs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from structgp.data.layout import Tuples
from structgp.errors import InputError, StructgpWarning
from structgp.structures.graph.cover import Solution, is_shared, with_slopes, within_span
from structgp.structures.graph.factor_graph import GraphProgram, by_tuple
from structgp.structures.graph.local_moves import blocks_of, improved
from structgp.structures.program import Scores
from structgp.structures.semirings import LOG, Semiring

Sent = list[list[Tensor]]  # for each template and place, (S, B, E, size)


@dataclass(frozen=True)
class Loopy(GraphProgram):
    """sweeps : largest number of sweeps. tolerance : largest change of a node's beliefs in a sweep at which
    messages count as settled. damping : share of the old message that a new one keeps."""

    sweeps: int = 200
    tolerance: float = 1e-6
    damping: float = 0.3

    exact = False

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        """(S, B) the Bethe approximation of log Z."""
        if semiring is not LOG:
            self._refuse(f"no sum under {semiring}", "ask for log Z or marginals")
        return with_slopes(self, scores)

    def solve(self, scores: Scores) -> Solution:
        f, *tables = (x.detach() for x in scores)
        f = torch.where(self.layout.mask[..., None], within_span(self.layout, f), 0)
        given = [
            torch.where(t.mask.view(*t.mask.shape, *[1] * t.arity), by_tuple(g, t), 0)
            for g, t in zip(tables, self.layout.tuples, strict=True)
        ]
        told: Sent = [
            [f.new_zeros((*g.shape[:3], size)) for size in t.sizes]
            for g, t in zip(given, self.layout.tuples, strict=True)
        ]
        belief, change, done = self._beliefs(f, told), torch.inf, 0
        last = belief.softmax(-1).nan_to_num(0)
        while done < self.sweeps and change > self.tolerance:
            told = self._pass(belief, given, told)
            belief = self._beliefs(f, told)
            p = belief.softmax(-1).nan_to_num(0)
            change, last, done = float((p - last).abs().amax()), p, done + 1
        if change > self.tolerance:
            warnings.warn(
                f"loopy belief propagation did not settle in {done} sweeps: "
                f"beliefs still change by {change:.2g}",
                StructgpWarning,
                stacklevel=2,
            )
        return self._solution(belief, given, told, tables, done, change)

    def _beliefs(self, f: Tensor, told: Sent) -> Tensor:
        """(S, B, N, V) scores of nodes plus all messages that they get from factors."""
        belief = f.clone()
        for t, messages in zip(self.layout.tuples, told, strict=True):
            for j, message in enumerate(messages):
                found = torch.where(t.mask[..., None], message, 0)
                at = t.index[None, ..., j, None].expand_as(found)
                belief[..., t.first[j] : t.first[j] + t.sizes[j]].scatter_add_(2, at, found)
        return belief

    def _pass(self, belief: Tensor, given: list[Tensor], told: Sent) -> Sent:
        passed = []
        for g, t, messages in zip(given, self.layout.tuples, told, strict=True):
            heard = _heard(belief, t, messages)
            new = []
            for j, old in enumerate(messages):
                x = g
                for i, message in enumerate(heard):
                    x = x if i == j else x + _at_place(message, i, t.arity)
                x = x.movedim(3 + j, 3).flatten(4).logsumexp(-1) if t.arity > 1 else x
                x = x - _finite(x.amax(-1, keepdim=True))
                # -inf takes effect at once, whatever the damping.
                mixed = torch.where(old > -torch.inf, self.damping * old + (1 - self.damping) * x, x)
                new.append(mixed)
            passed.append(new)
        return passed

    def _solution(
        self, belief: Tensor, given: list[Tensor], told: Sent, tables: Scores, done: int, change: float
    ) -> Solution:
        mask = self.layout.mask
        total = torch.where(mask, belief.logsumexp(-1), 0).sum(-1)
        node = torch.where(mask[..., None], belief.softmax(-1).nan_to_num(0), 0)
        slopes = []
        for g, t, messages, given_g in zip(given, self.layout.tuples, told, tables, strict=True):
            heard = _heard(belief, t, messages)
            x = g
            for i, message in enumerate(heard):
                x = x + _at_place(message, i, t.arity)
                both = (message + messages[i]).logsumexp(-1)
                total = total - torch.where(t.mask, both, 0).sum(-1)
            flat = x.flatten(3)
            total = total + torch.where(t.mask, flat.logsumexp(-1), 0).sum(-1)
            p = torch.where(t.mask[..., None], flat.softmax(-1).nan_to_num(0), 0).view_as(x)
            slopes.append(p.sum(2) if is_shared(given_g, t) else p)
        total = total.nan_to_num(nan=-torch.inf)
        gap = torch.full_like(total, change)
        return Solution(total, node, tuple(slopes), belief.new_zeros(0), done, gap)

    def decode(self, scores: Scores) -> Tensor:
        """(S, B, N) the most probable label of each node by itself, improved by changes of one label at a
        time; 0 at padding."""
        scores = [x.detach() for x in self.restrict(scores)]
        start = torch.where(self.layout.mask, self.solve(scores).node.argmax(-1), 0)
        return improved(self.layout, scores, start, blocks_of(self.layout, "colour"), 20)

    def sample(self, scores: Scores, generator: torch.Generator) -> Tensor:
        self._refuse("no labellings to draw", "use the tree-reweighted program, or Gibbs sampling")

    def best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        self._refuse("no n best labellings", "use a graph narrow enough for exact sums, or draw samples")

    def n_best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        return self.best(scores, n)

    def entropy(self, scores: Scores) -> Tensor:
        """(S, B) the Bethe entropy, in nats; 0 where no labelling is allowed."""
        return self._entropy(self.restrict(scores))

    def _refuse(self, problem: str, remedy: str) -> NoReturn:
        raise InputError("structure", f"loopy belief propagation has {problem}", remedy)


def _heard(belief: Tensor, t: Tuples, messages: list[Tensor]) -> list[Tensor]:
    """For each place, (S, B, E, size) the message from the variable there to the factor: the belief of the
    variable, less the factor's message to it. 0 at padding."""
    heard = []
    for j, message in enumerate(messages):
        at = t.index[None, ..., j, None].expand(*message.shape[:3], belief.shape[-1])
        x = belief.gather(2, at)[..., t.first[j] : t.first[j] + t.sizes[j]] - message
        # Instead of -inf less -inf: the factor itself rules the label out.
        x = torch.where(message > -torch.inf, x, -torch.inf)
        x = x - _finite(x.amax(-1, keepdim=True))
        heard.append(torch.where(t.mask[..., None], x, 0))
    return heard


def _at_place(message: Tensor, place: int, arity: int) -> Tensor:
    """A message (S, B, E, size), shaped to be added to tables (S, B, E, *sizes)."""
    return message.reshape(*message.shape[:3], *[1] * place, -1, *[1] * (arity - 1 - place))


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top == -torch.inf, 0)
