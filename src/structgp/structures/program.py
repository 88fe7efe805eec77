"""Every answer of a structure, derived from its sum over labellings.

A program defines how scores are summed over labellings under any semiring (``semirings``). Here the score
of a labelling, marginals, the best labellings, draws and entropies are derived from that, once for all
programs.

Letters: S draws, B examples in a batch, T positions (padded), V labels. ``scores`` has one tensor per
template of the spec: node (S, B, T, V); next (S, V, V) if one table serves all positions, or (S, B, T-1, V,
V), row = from, column = to. -inf is allowed everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structgp.structures.masks import Rules, keep_known, leaves_open
from structgp.structures.semirings import LOG, MAX, KMax, Sampling, Semiring
from structgp.structures.spec import Spec

Scores = Sequence[Tensor]

TRANSITIONS_AT_ONCE = 1 << 23
"""Largest number of entries of tables by position that are held at once: beyond it, some draws at a
time."""

BITS = 23
"""Number of labellings that one backward pass can tell apart: single precision holds integers of that many
bits exactly."""


@dataclass(frozen=True)
class Layout:
    """The tuples of each template in a padded batch. mask : (B, T), true at real positions, which come
    first in each row."""

    mask: Tensor

    def tuples(self, template: str) -> Tensor:
        """True where a tuple of the template exists: (B, T) for 'node'; (B, T-1) for 'next', where both
        ends exist."""
        return self.mask if template == "node" else self.mask[:, 1:] & self.mask[:, :-1]


def compile(spec: Spec, layout: Layout, rules: Rules | None = None) -> Program:
    """The program of a spec for examples of that layout, over the labellings that ``rules`` allow."""
    from structgp.structures.linear_chain.chain import ChainProgram, TokenProgram

    together = spec.next is not None or (rules is not None and not rules.follows.all())
    return (ChainProgram if together else TokenProgram)(layout, rules)


@dataclass(frozen=True)
class Program(ABC):
    """A program only has to define ``log_total``."""

    layout: Layout
    rules: Rules | None = None

    @abstractmethod
    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        """(S, B) elements of the semiring: the sum over all labellings, of scores that have -inf at what
        the rules forbid. Differentiable in the scores, by autograd; never nan."""

    def restrict(self, scores: Scores) -> Scores:
        """Scores with -inf at what the rules forbid."""
        return scores if self.rules is None else self.rules.restrict(scores, self.layout.mask)

    def log_partition(self, scores: Scores, semiring: Semiring = LOG) -> Tensor:
        """(S, B) log Z, or the same sum under another semiring; -inf where no labelling is allowed."""
        return self.log_total(self.restrict(scores), semiring)

    def log_prob(self, scores: Scores, y: Tensor) -> Tensor:
        """(S, B) log p(y); labels that are missing (negative) are summed out. For evidence y (B, T, V), see
        ``masks.keep_known``, the log of its expected likelihood, log Z(f + y) - log Z(f)."""
        scores, mask = self.restrict(scores), self.layout.mask
        if leaves_open(y, mask):
            told = self.log_total((keep_known(scores[0], y, mask), *scores[1:]), LOG)
        else:
            told = self.score(scores, torch.where(mask, y, 0))
        log_z = self.log_total(scores, LOG)
        # log Z is -inf where there is no labelling at all.
        return torch.where(log_z > -torch.inf, told - log_z, -torch.inf)

    def score(self, scores: Scores, y: Tensor) -> Tensor:
        """(S, B) score of labelling y (B, T), which has no missing label and is 0 at padding."""
        f, *tables = scores
        told = self.node_score(f, y)
        for g in tables:
            told = told + torch.where(self.layout.mask[:, 1:], transition_scores(g, y), 0).sum(-1)
        return told

    def node_score(self, f: Tensor, y: Tensor) -> Tensor:
        """(S, B) the part of ``score`` that comes from the nodes."""
        picked = f.gather(-1, y.expand(len(f), -1, -1).unsqueeze(-1)).squeeze(-1)
        return torch.where(self.layout.mask, picked, 0).sum(-1)

    def marginals(self, scores: Scores) -> tuple[Tensor, ...]:
        """For each template, the probabilities of the label, or labels, of each of its tuples: (S, B, T, V)
        and (S, B, T-1, V, V), 0 at padding."""
        return self.slopes(self.restrict(scores))

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        """Marginals from scores that are already restricted: the gradient of log Z, tuple by tuple."""
        tuples = [x if x.dim() > 3 else by_position(x, self.layout.mask) for x in scores]
        return self._gradients(tuples, LOG)

    def node_marginals(self, scores: Scores) -> Tensor:
        """(S, B, T, V) the first of ``marginals``."""
        return self.marginals(scores)[0]

    def walk(self, scores: Scores) -> tuple[Tensor, Tensor]:
        """The labelling of a sequence as a Markov chain: node marginals (S, B, T, V) and transition
        matrices (S, B, T-1, V, V) from each position to the next; both 0 at padding."""
        node, *rest = self.marginals(scores)
        # Without transitions, the next label does not depend on this one.
        both = rest[0] if rest else node[:, :, :-1, :, None] * node[:, :, 1:, None]
        before = node[:, :, :-1, :, None]
        return node, both / torch.where(before > 0, before, 1)

    def variances(self, scores: Scores, basis: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Means over draws of p (1 - p), from scores that are already restricted. For nodes: (B, T, V), or
        (B, T, R) along ``basis`` (V, R). For transitions: (B, V, V), summed over positions, with a shared
        table, else (B, T-1, V, V); without transitions, zeros (B, 1, 1)."""
        node, *rest = self.slopes(scores)
        bend = variance(rest[0]).mean(0) if rest else node.new_zeros((node.shape[1], 1, 1, 1))
        apart = bool(rest) and scores[1].dim() > 3
        return variance(node, basis).mean(0), bend if apart else bend.sum(1)

    def decode(self, scores: Scores) -> Tensor:
        """(S, B, T) the best labelling; 0 at padding."""
        return self._one_labelling(scores, MAX)

    def sample(self, scores: Scores, generator: torch.Generator) -> Tensor:
        """(S, B, T) one labelling per draw and example, drawn from its distribution; 0 at padding."""
        return self._one_labelling(scores, Sampling(generator))

    def _one_labelling(self, scores: Scores, semiring: Semiring) -> Tensor:
        hot = self._gradients(self.restrict(scores), semiring)[0]
        return torch.where(self.layout.mask, hot.argmax(-1), 0)

    def _gradients(self, scores: Scores, semiring: Semiring) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in scores]
        with torch.enable_grad():
            total = self.log_total(leaves, semiring).sum()
        return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)

    def n_best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        """The n best labellings: labels (S, B, n, T), 0 at padding, and log-probabilities (S, B, n), best
        first; -inf where there are fewer."""
        scores = [x.detach() for x in self.restrict(scores)]
        labels, best = self.best(scores, n)
        log_z = self.log_total(scores, LOG)[..., None]
        return labels, torch.where(log_z > -torch.inf, best - log_z, -torch.inf)

    def best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        """Labels (S, B, n, T) and scores (S, B, n) of the n best labellings, from scores that are already
        restricted.

        Each of the n largest totals sends a power of 2 of its own back to its labels: the sum that arrives
        at a label tells, bit by bit, which labellings have it. One backward pass serves up to ``BITS``
        labellings."""
        leaf, found = scores[0].detach().requires_grad_(), []
        with torch.enable_grad():
            values = self.log_total((leaf, *scores[1:]), KMax(n))  # (n, S, B)
        for some in values.split(BITS):
            bit = torch.arange(len(some), device=leaf.device).view(-1, 1, 1)
            sent = (2.0**bit).to(some).expand_as(some)
            (sums,) = torch.autograd.grad(some, leaf, sent, retain_graph=True)
            found.append((sums.long() >> bit[..., None, None] & 1).argmax(-1))
        labels = torch.where(self.layout.mask, torch.cat(found), 0)
        return labels.movedim(0, 2), values.detach().movedim(0, -1)

    def entropy(self, scores: Scores) -> Tensor:
        """(S, B) entropy of the distribution over labellings, in nats: log Z minus the expected score. 0
        where no labelling is allowed."""
        parts = zip(*(x.split(draws_at_once(scores[0])) for x in scores), strict=True)
        return torch.cat([self._entropy(self.restrict(part)) for part in parts])

    def _entropy(self, scores: Scores) -> Tensor:
        # Taking off a constant per tuple changes nothing, and leaves more digits to the difference.
        scores = [_below_zero(x, n_labels) for n_labels, x in enumerate(scores, 1)]
        total = self.log_total(scores, LOG)
        for x, p in zip(scores, self.slopes(scores), strict=True):
            x = x if x.dim() > 3 else x[:, None, None]
            total = total - torch.where(p > 0, x * p, 0).flatten(2).sum(-1)
        return total.clamp(min=0)


def draws_at_once(f: Tensor) -> int:
    """Number of draws of f (S, B, T, V) whose tables by position may be in memory together."""
    return max(1, TRANSITIONS_AT_ONCE // max(1, f[0].numel() * f.shape[-1]))


def by_position(g: Tensor, mask: Tensor) -> Tensor:
    """(S, B, T-1, V, V), a view of the shared table g (S, V, V) for each transition."""
    B, T = mask.shape
    return g[:, None, None].expand(-1, B, max(T - 1, 0), -1, -1)


def transition_scores(g: Tensor, y: Tensor) -> Tensor:
    """(S, B, T-1) entry [y_t-1, y_t] of g (S, V, V) or (S, B, T-1, V, V)."""
    # One gather per draw from a flat table: indexing by two arrays is far slower backwards.
    places = y[:, :-1] * g.shape[-1] + y[:, 1:]
    if g.dim() > 3:
        places = places[None, ..., None].expand(len(g), -1, -1, -1)
        return g.flatten(-2).gather(-1, places).squeeze(-1)
    flat = places.reshape(1, -1).expand(len(g), -1)
    return g.flatten(1).gather(-1, flat).reshape(len(g), *places.shape)


def variance(p: Tensor, basis: Tensor | None = None) -> Tensor:
    """p (1 - p) of each entry, or the variance of each column of ``basis`` (V, R) under p (..., V)."""
    first = p if basis is None else p @ basis
    second = p if basis is None else p @ basis.square()
    return (second - first.square()).clamp(min=0)


def _below_zero(x: Tensor, n_labels: int) -> Tensor:
    """x minus its largest entry over the last ``n_labels`` dimensions; unchanged where all are -inf."""
    top = x.amax(tuple(range(-n_labels, 0)), keepdim=True)
    return x - top.masked_fill(top == -torch.inf, 0)
