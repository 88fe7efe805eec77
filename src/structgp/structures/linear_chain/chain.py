"""The linear chain: structured softmax over label sequences (``eq:struct-softmax``).

p(y | f, g) = exp(sum_t f[t, y_t] + sum_t g[y_t-1, y_t]) / Z(f, g).

Sums over labellings are the recursions of ``messages``; here are what they are asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.structures.base import Curvature, LocalCurvature, Structure
from structgp.structures.linear_chain.messages import log_partition, node_marginals, pass_messages
from structgp.structures.linear_chain.n_best import n_best_viterbi
from structgp.structures.linear_chain.second_moments import chain_curvature
from structgp.structures.masks import Rules, keep_known, some_missing

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
            return node_marginals(*self._restricted(f, g, mask), mask)

    def walk(self, f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return pass_messages(*self._restricted(f, g, mask), mask).walk()

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """Viterbi."""
        with torch.no_grad():
            return _viterbi(*self._restricted(f, g, mask), mask)

    def n_best(self, f: Tensor, g: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Cost O(S B T V^2 n)."""
        with torch.no_grad():
            f, g = self._restricted(f, g, mask)
            labels, scores = n_best_viterbi(f, g, mask, n)
            return labels, _normalised(scores, log_partition(f, g, mask)[..., None])

    def curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        """Exact chain second moments, the same for every y that is known throughout; cost O(S B T^2 V^3).
        Positions whose label is missing count as flat, so that what they leave is concave; pairs of
        their sequences bend as ``local_curvature`` has it."""
        with torch.no_grad():
            walk = pass_messages(*self._restricted(f, g, mask), mask).walk()
            found = chain_curvature(*walk, mask, basis)
            if not some_missing(y, mask):
                return found
            known = (y >= 0) & mask
            part = (known != mask).any(-1)[:, None, None]
            left = self.local_curvature(f, g, y, mask, basis).next
            both = known[:, None, :, None] & known[:, None, None]
            return Curvature(found.node * both, torch.where(part, left, found.next))

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
                    (found.node - left.node).clamp(min=0),
                    (found.next - left.next).clamp(min=0),
                )
            return found

    @property
    def takes_single(self) -> bool:
        return type(self) is Chain

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
        node, pair = pass_messages(some, scores, mask).pair_variances()
        first = node if basis is None else node @ basis
        second = node if basis is None else node @ basis.square()
        unary = unary + (second - first.square()).clamp(min=0).sum(0)
        pairwise = pairwise + pair.sum(0)
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
