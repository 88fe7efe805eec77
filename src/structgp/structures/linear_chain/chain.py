"""The linear chain: structured softmax over label sequences (``eq:struct-softmax``).

p(y | f, g) = exp(sum_t f[t, y_t] + sum_t g[y_t-1, y_t]) / Z(f, g),

with one table g for all positions or one per position. ``ChainProgram`` sums over labellings,
``TokenProgram`` does so without transitions, and ``Chain`` is the likelihood that uses them.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from structgp.errors import InputError
from structgp.structures.base import Curvature, Structure
from structgp.structures.linear_chain.fixed_draws import FixedDraws, fixed_draws
from structgp.structures.linear_chain.fused_draws import FusedDraws
from structgp.structures.linear_chain.messages import (
    likely_spans,
    log_partition,
    next_variances,
    node_marginals,
    pass_messages,
)
from structgp.structures.linear_chain.second_moments import chain_curvature
from structgp.structures.masks import Rules, keep_known, leaves_open, shrunk
from structgp.structures.program import Layout, Program, Scores, compile, draws_at_once, variance
from structgp.structures.semirings import LOG, Semiring, draw
from structgp.structures.spec import Spec


class Chain(Structure):
    """Linear-chain structured softmax over the labellings that ``rules`` allow, with the templates that
    ``spec`` declares. Labels y that are missing (negative) are summed out. With ``chain(order=0)`` tokens
    are independent and g is not read. Cost O(S B T V^2) unless a method says otherwise."""

    ignores_shift = handles_missing = takes_evidence = takes_single = True
    rules: Rules | None = None
    _n_scores = 2  # templates of the spec

    def __init__(self, rules: Rules | None = None, spec: Spec | None = None) -> None:
        self.rules = None if rules is None or rules.is_free else rules
        if spec is not None:
            self.spec = spec
        self._n_scores = len(self.spec.templates)
        if self.spec.likelihood != "exact":
            raise InputError("spec", f"{self.spec} is not a chain", "pass chain(), or use Piecewise")

    def __repr__(self) -> str:
        return f"Chain({'' if self.rules is None else 'rules, '}spec={self.spec})"

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        value = compile(self.spec, Layout(mask), self.rules).log_prob((f, g)[: self._n_scores], y)
        # The engine asks for a gradient in g, which is 0 without transitions.
        return value + 0 * g.sum() if self.spec.next is None and g.requires_grad else value

    def fixed_draws(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, weight: Tensor
    ) -> FixedDraws | FusedDraws | None:
        """For draws that differ from their mean by fixed scores f and g: an object that computes the
        expected log-likelihood and its slopes at any mean, several times as fast as ``log_prob`` and
        autograd. None where that is not possible."""
        if self.spec.next is None or type(self).log_prob is not Chain.log_prob:
            return None
        return fixed_draws(compile(self.spec, Layout(mask), self.rules), f, g, y, weight)

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return compile(self.spec, Layout(mask), self.rules).node_marginals((f, g)[: self._n_scores])

    def walk(self, f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return compile(self.spec, Layout(mask), self.rules).walk((f, g)[: self._n_scores])

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return compile(self.spec, Layout(mask), self.rules).decode((f, g)[: self._n_scores])

    def n_best(self, f: Tensor, g: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Cost O(S B T V n (V + n))."""
        return compile(self.spec, Layout(mask), self.rules).n_best((f, g)[: self._n_scores], n)

    def sample(self, f: Tensor, g: Tensor, mask: Tensor, generator: Generator) -> Tensor:
        return compile(self.spec, Layout(mask), self.rules).sample((f, g)[: self._n_scores], generator)

    def likely_spans(
        self, f: Tensor, g: Tensor, mask: Tensor, share: Tensor, inside: Tensor, parts: Tensor, least: float
    ) -> list[list[tuple[int, int, int, float]]] | None:
        """The result of ``answers.spans.likely_spans``, by compiled loops; None where these are not
        available."""
        tables, edges = (f, g)[1 : self._n_scores], [torch.ones(f.shape[-1], dtype=torch.bool)] * 2
        if self.rules is not None:  # node scores are many: their rules are passed separately
            tables = self.rules.restrict((f[:, :1, :1], *tables), mask[:1, :1])[1:]
            edges = [self.rules.starts, self.rules.ends]
        table = tables[0] if tables else f.new_zeros((len(f), *parts.shape))
        return likely_spans(f, table, mask, share, inside, parts, (edges[0], edges[1]), least)

    def entropy(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return compile(self.spec, Layout(mask), self.rules).entropy((f, g)[: self._n_scores])

    def curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        """Exact second moments of nodes, the same for every y without a missing label, and of a shared
        table; cost O(S B T^2 V^3). Tables by position, and transitions of sequences with a missing label,
        have those of ``local_curvature``. Positions whose label is missing have curvature 0, so that the
        result is that of a concave function. With evidence, the moments are scaled down to the part of each
        position's variance that it removes (``masks.shrunk``)."""
        with torch.no_grad():
            found = chain_curvature(*self.walk(f, g, mask), mask, basis)
            if y.is_floating_point():
                left = self.local_curvature(f, g, y, mask, basis)
                return Curvature(shrunk(found.node, left.node), left.next)
            known = (y >= 0) & mask
            part = (known != mask).any(-1)  # (B,) some label is missing
            exact = g.dim() == 3 and self.spec.next is not None
            if exact and not bool(part.any()):
                return found
            local = self.local_curvature(f, g, y, mask, basis).next
            if exact:
                local = torch.where(part[:, None, None], local, found.next)
            both = known[:, None, :, None] & known[:, None, None]
            return Curvature(found.node * both, local)

    def local_curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        """Variances of each label, and of each label with the next one. With labels missing, or evidence in
        their place, the decrease of these variances by what is known; an increase counts as 0."""
        with torch.no_grad():
            program = compile(self.spec, Layout(mask), self.rules)
            scores = program.restrict((f, g)[: self._n_scores])
            node, transition = program.variances(scores, basis)
            if leaves_open(y, mask):
                told = keep_known(scores[0], y, mask), *scores[1:]
                node_left, left = program.variances(told, basis)
                node, transition = node - node_left, transition - left
            if self.spec.next is None:
                transition = g.new_zeros((len(mask), *g.shape[1:]))
            return Curvature(node.clamp(min=0), transition.clamp(min=0))


class ChainProgram(Program):
    """Linear chain. The log semiring uses the compiled loops, torch recursions and kernels of ``messages``;
    the others use one loop over positions. Every answer costs O(S B T V^2), times n for the n best."""

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        f, g = scores
        return log_partition(f, g, self.layout.mask) if semiring is LOG else self.recursion(f, g, semiring)

    def recursion(self, f: Tensor, g: Tensor, semiring: Semiring) -> Tensor:
        """The sum over labellings, position by position, under any semiring."""
        mask, steps = self.layout.mask, f.unbind(2)
        # An empty sequence has one labelling, of score 0.
        alone = f.new_full((f.shape[-1],), -torch.inf)
        alone[0] = 0
        first = steps[0] if steps else alone.expand(len(f), len(mask), -1)
        message = semiring.lift(torch.where(mask[:, :1].any(-1, keepdim=True), first, alone))
        if g.dim() > 3:
            tables = g.masked_fill(~self.layout.tuples("next")[..., None, None], 0).unbind(2)
        else:
            tables = (g[:, None],) * (len(steps) - 1)
        for t, table in enumerate(tables, 1):
            moved = semiring.sum(message[..., :, None] + table, -2) + steps[t]
            message = torch.where(mask[:, t, None], moved, message)
        return semiring.sum(message, -1)

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        f, g = scores
        node, step = pass_messages(f, g, self.layout.mask).walk()
        return node, node[:, :, :-1, :, None] * step

    def node_marginals(self, scores: Scores) -> Tensor:
        f, g = self.restrict(scores)
        return node_marginals(f, g, self.layout.mask)

    def walk(self, scores: Scores) -> tuple[Tensor, Tensor]:
        f, g = self.restrict(scores)
        return pass_messages(f, g, self.layout.mask).walk()

    def decode(self, scores: Scores) -> Tensor:
        return self.best(self.restrict(scores), 1)[0].squeeze(2)

    def best(self, scores: Scores, n: int) -> tuple[Tensor, Tensor]:
        """Viterbi's recursion: every label keeps the n best paths that lead to it. Several times as fast as
        ``Program.best``, which needs an autograd graph of all positions."""
        f, g, mask, V = *(x.detach() for x in scores), self.layout.mask, scores[0].shape[-1]
        score = f.new_full((*f.shape[:2], V, n), -torch.inf)
        score[..., 0, 0] = 0  # an empty sequence has one labelling
        if f.shape[2]:
            score[..., 0] = torch.where(mask[:, :1], f[:, :, 0], score[..., 0])
        origins, stay = [], torch.arange(V * n, device=f.device).view(V, n)
        for t in range(1, f.shape[2]):
            table = g[:, None] if g.dim() == 3 else g[:, :, t - 1]
            if n == 1:
                best, origin = (x[..., None] for x in (score + table).max(-2))
            else:
                ways = score.flatten(-2)[:, :, None] + table.mT.repeat_interleave(n, -1)  # (S, B, V, V n)
                best, origin = ways.topk(n, -1)
            here = mask[:, t, None, None]
            score = torch.where(here, best + f[:, :, t, :, None], score)
            origins.append(torch.where(here, origin, stay))  # entry i n + k: path k to label i
        total = score.flatten(-2)
        found, entry = total.max(-1, keepdim=True) if n == 1 else total.topk(n, -1)
        labels = [entry // n]
        for origin in reversed(origins):
            entry = origin.flatten(-2).gather(-1, entry)
            labels.append(entry // n)
        return torch.where(mask[:, None], torch.stack(labels[::-1], -1)[..., : f.shape[2]], 0), found

    def sample(self, scores: Scores, generator: Generator) -> Tensor:
        # From first to last along the walk: a third of the time of ``Program.sample``.
        mask, at_once, found = self.layout.mask, draws_at_once(scores[0]), []
        for f, g in zip(*(x.split(at_once) for x in self.restrict(scores)), strict=True):
            node, step = pass_messages(f, g, mask).walk()
            labels = [draw(node[:, :, 0], generator)]
            for here in step.unbind(2):
                row = here.take_along_dim(labels[-1][..., None, None], -2).squeeze(-2)
                labels.append(draw(row, generator))
            found.append(torch.stack(labels, -1))
        return torch.where(mask, torch.cat(found), 0)

    def variances(self, scores: Scores, basis: Tensor | None = None) -> tuple[Tensor, Tensor]:
        S, at_once = len(scores[0]), draws_at_once(scores[0])
        at_node, at_next = scores[0].new_zeros(()), scores[0].new_zeros(())
        for f, g in zip(*(x.split(at_once) for x in scores), strict=True):
            node, bend = next_variances(f, g, self.layout.mask)
            at_node = at_node + variance(node, basis).sum(0)
            at_next = at_next + bend.sum(0)
        return at_node / S, at_next / S


class TokenProgram(Program):
    """Independent tokens. Every answer costs O(S B T V), times n for the n best."""

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        (f,), mask = scores, self.layout.mask
        if semiring is LOG:
            f = f.masked_fill(~mask[..., None], 0)
            log_z = torch.where(mask, LOG.sum(f, -1), 0).sum(-1)
            return log_z.masked_fill(log_z == -torch.inf, -torch.inf)  # with gradient 0 throughout
        total = semiring.lift(f.new_zeros(f.shape[:2]))
        for t, here in enumerate(f.unbind(2)):
            moved = semiring.sum(total[..., None] + here, -1)
            total = torch.where(mask[:, t], moved, total)
        return total

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        (f,), mask = scores, self.layout.mask
        f = f.detach()
        possible = ((f > -torch.inf).any(-1) | ~mask).all(-1)  # (S, B) whether there is a labelling
        return (torch.where(possible[..., None, None] & mask[..., None], f.softmax(-1), 0),)
