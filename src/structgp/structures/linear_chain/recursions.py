"""Forward-backward as torch operations, a position at a time: in probability space, and in log space.

Both are ``Messages``: they hold what the forward pass found. Transition scores are one shared table,
(S, V, V), or a table per position, (S, B, T-1, V, V).
"""

from __future__ import annotations

import torch
from torch import Tensor


class _Walked:
    """What is read off the posterior as a Markov chain."""

    shared: bool

    def walk(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def next_variances(self) -> tuple[Tensor, Tensor]:
        node, step = self.walk()
        both = node[:, :, :-1, :, None] * step
        bend = both - both.square()
        return node, bend.sum(2) if self.shared else bend


class Scaled(_Walked):
    """Forward-backward in probability space, every forward message scaled to sum to 1. ``restricted`` :
    some scores are -inf, and a message may be empty."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor, restricted: bool = False) -> None:
        self.mask, self.shared = mask, g.dim() == 3
        self.f_max = f.amax(-1)  # (S, B, T)
        self.g_max = g.amax((-1, -2))  # (S,) or (S, B, T-1)
        # Time first: each step then reads one contiguous (S, B, V) slab.
        self.node = torch.exp(f - self.f_max[..., None]).permute(2, 0, 1, 3).contiguous()
        self.edge = torch.exp(g - self.g_max[..., None, None])  # as g
        self.alpha = torch.empty_like(self.node)
        self.scale = self.node.new_empty((*self.node.shape[:-1], 1))
        alpha = self.node
        for t in range(self.node.shape[0]):
            alpha = self.node[0] if t == 0 else self._ahead(alpha, t - 1).mul_(self.node[t])
            torch.sum(alpha, -1, keepdim=True, out=self.scale[t])
            if restricted:
                self.scale[t].clamp_(min=torch.finfo(f.dtype).tiny)
            alpha = torch.div(alpha, self.scale[t], out=self.alpha[t])

    def _ahead(self, alpha: Tensor, t: int) -> Tensor:
        """(S, B, V) a message at t times the transitions to t + 1."""
        if self.shared:
            return torch.bmm(alpha, self.edge)
        return (alpha[..., None, :] @ self.edge[:, :, t]).squeeze(-2)

    def _back(self, passed: Tensor, t: int) -> Tensor:
        """(S, B, V) the transitions from t to t + 1 times what t + 1 passes back."""
        if self.shared:
            return torch.bmm(passed, self.edge.mT)
        return (self.edge[:, :, t] @ passed[..., None]).squeeze(-1)

    @property
    def ends_nowhere(self) -> bool:
        """Whether a sequence has no labelling at all."""
        empty = self.scale.squeeze(-1) <= torch.finfo(self.scale.dtype).tiny  # (T, S, B)
        return bool((empty & self.mask.T[:, None]).any())

    def log_partition(self) -> Tensor:
        # Padding comes last, so the recursion may run into it: its terms are left out here.
        terms = self.scale.squeeze(-1).log().permute(1, 2, 0) + self.f_max
        total = torch.where(self.mask, terms, 0).sum(-1)
        if self.shared:
            return total + (self.mask.sum(-1) - 1).clamp(min=0) * self.g_max[:, None]
        return total + torch.where(self.mask[:, 1:], self.g_max, 0).sum(-1)

    def _incoming(self) -> Tensor:
        """(T, S, B, V) node * beta / scale: what a position passes back to the one before it."""
        passed = torch.empty_like(self.node)
        n_steps = self.node.shape[0]
        here = (self.node / self.scale) * self.mask.T[:, None, :, None]
        follows = torch.zeros_like(self.mask)
        follows[:, :-1] = self.mask[:, 1:]
        beta = torch.ones_like(self.node[0])
        for t in reversed(range(n_steps)):
            if t < n_steps - 1:
                # The last real position has nothing after it: its beta is 1.
                beta = self._back(passed[t + 1], t)
                beta.masked_fill_(~follows[:, t, None], 1.0)
            torch.mul(here[t], beta, out=passed[t])
        return passed

    def node_marginals(self) -> Tensor:
        return self._nodes(self._incoming())

    def _nodes(self, passed: Tensor) -> Tensor:
        # alpha * beta, with beta = passed * scale / node; at t the prediction alpha_{t-1} edge
        # times passed_t gives the same product without dividing by a node that may be tiny.
        prior = torch.ones_like(self.alpha)
        n_steps = self.alpha.shape[0]
        if n_steps > 1 and self.shared:
            S, B, V = self.alpha.shape[1:]
            before = self.alpha[:-1].transpose(0, 1).reshape(S, -1, V)
            moved = torch.bmm(before, self.edge).reshape(S, n_steps - 1, B, V).transpose(0, 1)
            prior[1:] = moved
        elif n_steps > 1:
            before = self.alpha[:-1].permute(1, 2, 0, 3)[..., None, :]
            prior[1:] = (before @ self.edge).squeeze(-2).permute(2, 0, 1, 3)
        return (prior * passed).permute(1, 2, 0, 3)

    def walk(self) -> tuple[Tensor, Tensor]:
        passed = self._incoming()
        edge = self.edge[:, None, None] if self.shared else self.edge
        weight = edge * passed[1:].permute(1, 2, 0, 3)[..., None, :]
        total = weight.sum(-1, keepdim=True)
        return self._nodes(passed), weight / torch.where(total > 0, total, 1)

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        passed = self._incoming()
        before = self.alpha[:-1] * weight[..., None]
        if self.shared:
            S, _, V = self.alpha.shape[1:]
            flat = before.transpose(0, 1).reshape(S, -1, V)
            after = passed[1:].transpose(0, 1).reshape(S, -1, V)
            tables = self.edge * torch.bmm(flat.transpose(-1, -2), after)
        else:
            tables = self.edge * before.permute(1, 2, 0, 3)[..., None]
            tables *= passed[1:].permute(1, 2, 0, 3)[..., None, :]
        return weight[..., None, None] * self._nodes(passed), tables


class Logs(_Walked):
    """Forward-backward in log space: any potentials, -inf included."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor) -> None:
        self.f, self.mask, self.shared = f, mask, g.dim() == 3
        self.g = g[:, None, None] if self.shared else g  # (S, B or 1, T-1 or 1, V, V)
        self.alpha = torch.empty_like(f)
        alpha = f[:, :, 0]
        for t in range(f.shape[2]):
            if t > 0:
                moved = torch.logsumexp(alpha[..., :, None] + self._table(t), -2) + f[:, :, t]
                alpha = torch.where(mask[:, t, None], moved, alpha)
            self.alpha[:, :, t] = alpha
        self.last = alpha

    def _table(self, t: int) -> Tensor:
        """(S, B or 1, V, V) scores of the transitions into t."""
        return self.g[:, :, 0 if self.shared else t - 1]

    def log_partition(self) -> Tensor:
        log_z = torch.logsumexp(self.last, -1)
        return torch.where(self.mask.any(-1), log_z, 0)

    def _beta(self) -> Tensor:
        beta = torch.zeros_like(self.f)
        for t in reversed(range(self.f.shape[2] - 1)):
            ahead = self.f[:, :, t + 1] + beta[:, :, t + 1]
            moved = torch.logsumexp(self._table(t + 1) + ahead[..., None, :], -1)
            beta[:, :, t] = torch.where(self.mask[:, t + 1, None], moved, 0)
        return beta

    def node_marginals(self) -> Tensor:
        return self._nodes(self._beta())

    def _nodes(self, beta: Tensor) -> Tensor:
        log_p = self.alpha + beta - self._total()
        return torch.where(self.mask[..., None], torch.exp(log_p), 0)

    def _total(self) -> Tensor:
        """(S, B, 1, 1) log Z; 0 where nothing is possible, so that all there has probability 0."""
        log_z = self.log_partition()
        return log_z.masked_fill(log_z == -torch.inf, 0)[..., None, None]

    def walk(self) -> tuple[Tensor, Tensor]:
        beta = self._beta()
        weight = self.g + (self.f + beta)[:, :, 1:, None, :]
        # A label that nothing can follow is never visited: its row may be anything finite.
        step = torch.softmax(weight, -1).nan_to_num(0)
        return self._nodes(beta), torch.where(self.mask[:, 1:, None, None], step, 0)

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        beta, log_z = self._beta(), self._total()
        tables = torch.zeros_like(self.g)
        for t in range(1, self.f.shape[2]):
            ahead = (self.f + beta)[:, :, t, None, :] + self._table(t)
            p = torch.exp(self.alpha[:, :, t - 1, :, None] + ahead - log_z)
            p = torch.where(self.mask[:, t, None, None], p * weight[..., None, None], 0)
            if self.shared:
                tables[:, 0, 0] += p.sum(1)
            else:
                tables[:, :, t - 1] = p
        nodes = weight[..., None, None] * self._nodes(beta)
        return nodes, tables[:, 0, 0] if self.shared else tables
