"""The programs of a sequence: with transitions between neighbours, and without."""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.structures.linear_chain.messages import Messages, log_partition, node_marginals, pass_messages
from structgp.structures.program import Program, Scores, draws_at_once, variance
from structgp.structures.semirings import LOG, Semiring, draw


class ChainProgram(Program):
    """Linear chain. Under the log semiring the compiled loops, torch recursions and kernels of
    ``messages``; under the others one loop over positions. Cost O(S B T V^2) of every answer, times n for
    the n best. Scores without a table have one of zeros."""

    def restrict(self, scores: Scores) -> Scores:
        f = scores[0]
        g = scores[1] if len(scores) > 1 else f.new_zeros((len(f), f.shape[-1], f.shape[-1]))
        return super().restrict((f, g))

    def _messages(self, scores: Scores) -> Messages:
        f, g = scores
        return pass_messages(f.detach(), g.detach(), self.mask)

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        f, g = scores
        return log_partition(f, g, self.mask) if semiring is LOG else self.recursion(f, g, semiring)

    def recursion(self, f: Tensor, g: Tensor, semiring: Semiring) -> Tensor:
        """The sum over labellings, position by position, under any semiring."""
        mask, steps = self.mask, f.unbind(2)
        # A sequence of nothing has one labelling, of score 0.
        alone = f.new_full((f.shape[-1],), -torch.inf)
        alone[0] = 0
        first = steps[0] if steps else alone.expand(len(f), len(mask), -1)
        message = semiring.lift(torch.where(mask[:, :1].any(-1, keepdim=True), first, alone))
        if g.dim() > 3:
            tables = g.masked_fill(~self.layout.tuples("next")[..., None, None], 0).unbind(2)
        else:
            tables = (g[:, None],) * (len(steps) - 1)
        for t, table in enumerate(tables, 1):
            moved = semiring.step(message, table) + steps[t]
            message = torch.where(mask[:, t, None], moved, message)
        return semiring.sum(message, -1)

    def slopes(self, scores: Scores) -> tuple[Tensor, ...]:
        node, step = self._messages(scores).walk()
        return node, node[:, :, :-1, :, None] * step

    def node_marginals(self, scores: Scores) -> Tensor:
        f, g = self.restrict(scores)
        return node_marginals(f.detach(), g.detach(), self.mask)

    def walk(self, scores: Scores) -> tuple[Tensor, Tensor]:
        return self._messages(self.restrict(scores)).walk()

    def sample(self, scores: Scores, generator: torch.Generator) -> Tensor:
        # From first to last along the walk: a third of the time of the derived way.
        at_once, found = draws_at_once(scores[0]), []
        for part in zip(*(x.split(at_once) for x in self.restrict(scores)), strict=True):
            node, step = self._messages(part).walk()
            labels = [draw(node[:, :, 0], generator)]
            for here in step.unbind(2):
                row = here.take_along_dim(labels[-1][..., None, None], -2).squeeze(-2)
                labels.append(draw(row, generator))
            found.append(torch.stack(labels, -1))
        return torch.where(self.mask, torch.cat(found), 0)

    def variances(self, scores: Scores, basis: Tensor | None = None) -> tuple[Tensor, Tensor]:
        f, g = scores
        at_once = draws_at_once(f)
        at_node, at_next = f.new_zeros(()), f.new_zeros(())
        for part in zip(f.split(at_once), g.split(at_once), strict=True):
            node, bend = self._messages(part).next_variances()
            at_node = at_node + variance(node, basis).sum(0)
            at_next = at_next + bend.sum(0)
        return at_node / len(f), at_next / len(f)


class TokenProgram(Program):
    """Independent tokens. Cost O(S B T V) of every answer, times n for the n best."""

    def log_total(self, scores: Scores, semiring: Semiring) -> Tensor:
        (f,) = scores
        mask = self.mask
        if semiring is LOG:
            f = f.masked_fill(~mask[..., None], 0)
            log_z = torch.where(mask, LOG.sum(f, -1), 0).sum(-1)
            return log_z.masked_fill(log_z == -torch.inf, -torch.inf)  # with gradient 0 throughout
        total = semiring.lift(f.new_zeros(f.shape[:2]))
        for t, here in enumerate(f.unbind(2)):
            moved = semiring.sum(total[..., None] + here, -1)
            total = torch.where(mask[:, t], moved, total)
        return total
