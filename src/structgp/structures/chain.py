"""The linear chain: structured softmax over label sequences (``eq:struct-softmax``).

p(y | f, g) = exp(sum_t f[t, y_t] + sum_t g[y_t-1, y_t]) / Z(f, g).

One recursion, two ways of carrying its numbers:

* probability space, rescaled at each step: a step is one matrix product. Exact to rounding
  as long as no number under- or overflows, which the spread of the potentials bounds:
  a forward message at t spans at most exp(range f_t + range g).
* log space: slower, and right for any potentials, infinite ones included.

``log_partition`` picks the first where that bound allows it. Neither builds a graph of T steps: the
gradient of log Z is the marginals, so the backward pass IS forward-backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from structgp.structures import fused
from structgp.structures.base import Curvature, LocalCurvature, Structure
from structgp.structures.masks import Rules, keep_known, some_missing, steps_to_anywhere
from structgp.structures.moments import chain_curvature
from structgp.structures.n_best import n_best_viterbi

# Largest log-ratio between numbers of one message that probability space is trusted with: about two
# thirds of what the type can span, so that a product of two messages does not underflow either.
_SAFE_SPREAD = {torch.float64: 450.0, torch.float32: 55.0}


TRANSITIONS_AT_ONCE = 1 << 23


class Chain(Structure):
    """Linear-chain structured softmax, of the labellings that ``rules`` allow. Labels y that are missing
    (negative) are summed out. Cost of each method, but where it says so: O(S B T V^2)."""

    rules: Rules | None = None

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = None if rules is None or rules.is_free else rules

    def _restricted(self, f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return (f, g) if self.rules is None else self.rules.restrict(f, g, mask)

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        f, g = self._restricted(f, g, mask)
        if some_missing(y, mask):
            score = log_partition(keep_known(f, y, mask), g, mask)
        else:
            score = labelling_score(f, g, y, mask)
        return _normalised(score, log_partition(f, g, mask))

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            _, messages = _forward(*self._restricted(f, g, mask), mask)
            return messages.node_marginals()

    def walk(self, f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            _, messages = _forward(*self._restricted(f, g, mask), mask)
            return messages.walk()

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """Viterbi."""
        with torch.no_grad():
            return _viterbi(*self._restricted(f, g, mask), mask)

    def n_best(self, f: Tensor, g: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Cost O(S B T V^2 n)."""
        with torch.no_grad():
            f, g = self._restricted(f, g, mask)
            labels, scores = n_best_viterbi(f, g, mask, n)
            return labels, _normalised(scores, _forward(f, g, mask)[0][..., None])

    def curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        """Exact chain second moments, the same for every y that is known throughout; cost O(S B T^2 V^3).
        Positions whose label is missing count as flat, so that what they leave is concave; pairs of
        their sequences bend as ``local_curvature`` has it."""
        with torch.no_grad():
            _, messages = _forward(*self._restricted(f, g, mask), mask)
            found = chain_curvature(*messages.walk(), mask, basis)
            if not some_missing(y, mask):
                return found
            known = (y >= 0) & mask
            part = (known != mask).any(-1)[:, None, None]
            left = self.local_curvature(f, g, y, mask, basis).pairwise
            both = known[:, None, :, None] & known[:, None, None]
            return Curvature(found.unary * both, torch.where(part, left, found.pairwise))

    def local_curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> LocalCurvature:
        """Variances of each label, and of each pair of neighbours; cost O(S B T V^2). With labels missing,
        what those variances lose by the labels that are known; what they gain counts as flat."""
        with torch.no_grad():
            f, g = self._restricted(f, g, mask)
            found = _variances(f, g, mask, basis)
            if some_missing(y, mask):
                left = _variances(keep_known(f, y, mask), g, mask, basis)
                found = LocalCurvature(
                    (found.unary - left.unary).clamp(min=0),
                    (found.pairwise - left.pairwise).clamp(min=0),
                )
            return found

    @property
    def handles_missing(self) -> bool:
        return True

    @property
    def ignores_shift(self) -> bool:
        return True


def _variances(f: Tensor, g: Tensor, mask: Tensor, basis: Tensor | None) -> LocalCurvature:
    # Some draws at a time: there is a transition matrix for each position of each.
    at_once = max(1, TRANSITIONS_AT_ONCE // max(1, f[0].numel() * f.shape[-1]))
    unary, pairwise = f.new_zeros(()), f.new_zeros(())
    for some, scores in zip(f.split(at_once), g.split(at_once), strict=True):
        _, messages = _forward(some, scores, mask)
        node, pairs = messages.pair_variances()
        first = node if basis is None else node @ basis
        second = node if basis is None else node @ basis.square()
        unary = unary + (second - first.square()).clamp(min=0).sum(0)
        pairwise = pairwise + pairs.sum(0)
    return LocalCurvature(unary / len(f), pairwise / len(f))


def _normalised(score: Tensor, log_z: Tensor) -> Tensor:
    """Log-probabilities; -inf of all where there is no labelling at all."""
    return torch.where(log_z > -torch.inf, score - log_z, -torch.inf)


def labelling_score(f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """(S, B) unnormalised log-score of the labelling y (the numerator of the softmax)."""
    y = torch.where(mask, y, 0)
    unary = f.gather(-1, y.expand(f.shape[0], -1, -1).unsqueeze(-1)).squeeze(-1)
    score = torch.where(mask, unary, 0).sum(-1)
    pairs = g[:, y[:, :-1], y[:, 1:]]  # (S, B, T-1)
    return score + torch.where(mask[:, 1:], pairs, 0).sum(-1)


def log_partition(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """(S, B) log Z, differentiable once in f and g."""
    return _LogPartition.apply(f, g, mask)


class _LogPartition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        ctx.fused = fused.supports(f, g, mask)
        log_z, ctx.messages = (fused.forward if ctx.fused else _forward)(f, g, mask)
        return log_z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.fused:
            return *fused.backward(ctx.messages, grad), None
        nodes, pairs = ctx.messages.marginals(grad)
        return grad[..., None, None] * nodes, pairs, None


def _forward(f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, _Scaled | _Logs]:
    # Whatever stands at padding, infinite or nan, has no part in any of it.
    f = f.masked_fill(~mask[..., None], 0)
    spread = (f.amax(-1) - f.amin(-1)).amax() if f.numel() else f.new_zeros(())
    spread = spread + (g.amax((-1, -2)) - g.amin((-1, -2))).amax()
    restricted = bool(spread == torch.inf)
    if restricted:
        spread = _restricted_spread(f, g, mask)
    # `not <=` so that inf - inf = nan takes the careful path as well.
    if not bool(spread <= _SAFE_SPREAD[f.dtype]):
        logs = _Logs(f, g, mask)
        return logs.log_partition(), logs
    scaled = _Scaled(f, g, mask, restricted)
    if restricted and scaled.ends_nowhere:
        logs = _Logs(f, g, mask)
        return logs.log_partition(), logs
    return scaled.log_partition(), scaled


def _restricted_spread(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    """() largest log-ratio between numbers of one message where some scores are -inf, but not all of a
    position: an upper bound.

    A label that not every label can precede is reached on a detour, and each step of it may cost the
    spread of the scores that are left. Bans in the midst of a sequence may make it as long as the sequence.
    """
    spread = sum(
        (x.amax(dims) - x.masked_fill(x == -torch.inf, torch.inf).amin(dims)).amax()
        for x, dims in ((f, (-1,)), (g, (-1, -2)))
    )
    assert isinstance(spread, Tensor)
    banned = (g == -torch.inf).any(0)
    if not bool(banned.any()):
        return spread  # from any label to any in one step
    inner = mask.clone()
    inner[:, 0] = False
    inner[:, :-1] &= mask[:, 1:]
    inner[:, -1] = False
    within = (f == -torch.inf).any(-1).any(0) & inner
    detour = f.shape[2] if bool(within.any()) else steps_to_anywhere(~banned)
    return spread * (f.shape[2] if detour is None else min(detour, f.shape[2]))


class _Scaled:
    """Forward-backward in probability space, every forward message scaled to sum to 1. ``restricted`` :
    some scores are -inf, and a message may be empty."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor, restricted: bool = False) -> None:
        self.mask = mask
        self.f_max = f.amax(-1)  # (S, B, T)
        self.g_max = g.amax((-1, -2))  # (S,)
        # Time first: each step then reads one contiguous (S, B, V) slab.
        self.node = torch.exp(f - self.f_max[..., None]).permute(2, 0, 1, 3).contiguous()
        self.edge = torch.exp(g - self.g_max[:, None, None])  # (S, V, V)
        self.alpha = torch.empty_like(self.node)
        self.scale = self.node.new_empty((*self.node.shape[:-1], 1))
        alpha = self.node
        for t in range(self.node.shape[0]):
            alpha = self.node[0] if t == 0 else torch.bmm(alpha, self.edge).mul_(self.node[t])
            torch.sum(alpha, -1, keepdim=True, out=self.scale[t])
            if restricted:
                self.scale[t].clamp_(min=torch.finfo(f.dtype).tiny)
            alpha = torch.div(alpha, self.scale[t], out=self.alpha[t])

    @property
    def ends_nowhere(self) -> bool:
        """Whether a sequence has no labelling at all."""
        empty = self.scale.squeeze(-1) <= torch.finfo(self.scale.dtype).tiny  # (T, S, B)
        return bool((empty & self.mask.T[:, None]).any())

    def log_partition(self) -> Tensor:
        # Padding comes last, so the recursion may run into it: its terms are left out here.
        terms = self.scale.squeeze(-1).log().permute(1, 2, 0) + self.f_max
        steps = (self.mask.sum(-1) - 1).clamp(min=0)
        return torch.where(self.mask, terms, 0).sum(-1) + steps * self.g_max[:, None]

    def _incoming(self) -> Tensor:
        """(T, S, B, V) node * beta / scale: what a position passes back to the one before it."""
        passed = torch.empty_like(self.node)
        n_steps = self.node.shape[0]
        edge_t = self.edge.transpose(-1, -2)
        here = (self.node / self.scale) * self.mask.T[:, None, :, None]
        follows = torch.zeros_like(self.mask)
        follows[:, :-1] = self.mask[:, 1:]
        beta = torch.ones_like(self.node[0])
        for t in reversed(range(n_steps)):
            if t < n_steps - 1:
                # The last real position has nothing after it: its beta is 1.
                beta = torch.bmm(passed[t + 1], edge_t)
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
        if n_steps > 1:
            S, B, V = self.alpha.shape[1:]
            before = self.alpha[:-1].transpose(0, 1).reshape(S, -1, V)
            moved = torch.bmm(before, self.edge).reshape(S, n_steps - 1, B, V).transpose(0, 1)
            prior[1:] = moved
        return (prior * passed).permute(1, 2, 0, 3)

    def walk(self) -> tuple[Tensor, Tensor]:
        """The posterior as a Markov chain: node marginals (S, B, T, V), and transition matrices
        (S, B, T-1, V, V) from each position to the next; both 0 at padding."""
        passed = self._incoming()
        weight = self.edge[:, None, None] * passed[1:].permute(1, 2, 0, 3)[..., None, :]
        total = weight.sum(-1, keepdim=True)
        return self._nodes(passed), weight / torch.where(total > 0, total, 1)

    def pair_variances(self) -> tuple[Tensor, Tensor]:
        """Node marginals (S, B, T, V), and p (1 - p) of pair marginals summed over positions,
        (S, B, V, V): both sums are matrix products, and no position has a matrix of its own."""
        passed = self._incoming()
        before, after = self.alpha[:-1].permute(1, 2, 3, 0), passed[1:].permute(1, 2, 0, 3)
        edge = self.edge[:, None]
        first = edge * (before @ after)
        second = edge.square() * (before.square() @ after.square())
        return self._nodes(passed), (first - second).clamp(min=0)

    def marginals(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Node marginals (S, B, T, V), and pair marginals (S, V, V) summed with weight (S, B)."""
        passed = self._incoming()
        S, _, V = self.alpha.shape[1:]
        before = (self.alpha[:-1] * weight[..., None]).transpose(0, 1).reshape(S, -1, V)
        after = passed[1:].transpose(0, 1).reshape(S, -1, V)
        pairs = self.edge * torch.bmm(before.transpose(-1, -2), after)
        return self._nodes(passed), pairs


class _Logs:
    """Forward-backward in log space: any potentials, -inf included."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor) -> None:
        self.f, self.g, self.mask = f, g, mask
        self.alpha = torch.empty_like(f)
        alpha = f[:, :, 0]
        for t in range(f.shape[2]):
            if t > 0:
                moved = torch.logsumexp(alpha[..., :, None] + g[:, None], -2) + f[:, :, t]
                alpha = torch.where(mask[:, t, None], moved, alpha)
            self.alpha[:, :, t] = alpha
        self.last = alpha

    def log_partition(self) -> Tensor:
        log_z = torch.logsumexp(self.last, -1)
        return torch.where(self.mask.any(-1), log_z, 0)

    def _beta(self) -> Tensor:
        beta = torch.zeros_like(self.f)
        for t in reversed(range(self.f.shape[2] - 1)):
            ahead = self.f[:, :, t + 1] + beta[:, :, t + 1]
            moved = torch.logsumexp(self.g[:, None] + ahead[..., None, :], -1)
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
        weight = self.g[:, None, None] + (self.f + beta)[:, :, 1:, None, :]
        # A label that nothing can follow is never visited: its row may be anything finite.
        step = torch.softmax(weight, -1).nan_to_num(0)
        return self._nodes(beta), torch.where(self.mask[:, 1:, None, None], step, 0)

    def pair_variances(self) -> tuple[Tensor, Tensor]:
        node, step = self.walk()
        pair = node[:, :, :-1, :, None] * step
        return node, (pair - pair.square()).sum(2)

    def marginals(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        beta, log_z = self._beta(), self._total()
        pairs = torch.zeros_like(self.g)
        for t in range(1, self.f.shape[2]):
            ahead = (self.f + beta)[:, :, t, None, :] + self.g[:, None]
            pair = torch.exp(self.alpha[:, :, t - 1, :, None] + ahead - log_z)
            pair = torch.where(self.mask[:, t, None, None], pair * weight[..., None, None], 0)
            pairs += pair.sum(1)
        return self._nodes(beta), pairs


def _viterbi(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
    T = f.shape[2]
    best = f[:, :, 0]
    stay = torch.arange(f.shape[-1], device=f.device)
    came_from = []
    for t in range(1, T):
        score, origin = (best[..., :, None] + g[:, None]).max(-2)
        best = torch.where(mask[:, t, None], score + f[:, :, t], best)
        came_from.append(torch.where(mask[:, t, None], origin, stay))
    labels = [best.argmax(-1)]
    for origin in reversed(came_from):
        labels.append(origin.gather(-1, labels[-1][..., None]).squeeze(-1))
    return torch.where(mask, torch.stack(labels[::-1], -1), 0)
