"""Labellings of one sequence with their probabilities under every draw: all of them, or a weighted sample.

Letters: S draws, C labellings, T positions, V labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

Values = Callable[[Tensor], Tensor]
"""Labellings (C, T) -> (S, C) log-probabilities, up to a constant per draw."""


@dataclass(frozen=True)
class Pool:
    """labels : (C, T), all different. values : (S, C) values of the function. log_weight : (C,) log of how
    many labellings each one stands for, 0 if the pool has all labellings. drawn : (C,) how often each was
    drawn, None if the pool has all. n_labels : V. sums_to_1 : whether the function's probabilities are
    known to sum to 1."""

    labels: Tensor
    values: Tensor
    log_weight: Tensor
    drawn: Tensor | None
    n_labels: int
    sums_to_1: bool = False

    @cached_property
    def log_z(self) -> Tensor:
        """(S,) log of the sum over all labellings: 0 if the sum is known to be 1; if labellings were drawn,
        the log of an unbiased estimate of the sum."""
        if self.sums_to_1:
            return self.values.new_zeros(len(self.values))
        return torch.logsumexp(self.values + self.log_weight, 1)

    @cached_property
    def p(self) -> Tensor:
        """(S, C) the share of each labelling under each draw: its probability if the pool has all
        labellings. Sums to 1 over labellings; 0 where none is possible."""
        return (self.values + self.log_weight).softmax(1).nan_to_num(0)

    @cached_property
    def hot(self) -> Tensor:
        """(C, T, V) one-hot rows of the labels."""
        return torch.nn.functional.one_hot(self.labels, self.n_labels).to(self.values)

    @property
    def is_possible(self) -> bool:
        """True if every draw has a labelling that is possible."""
        return bool((self.values > -torch.inf).any(1).all())

    @property
    def numbers(self) -> int:
        """How many numbers the pool holds."""
        return 2 * self.values.numel() + self.hot.numel()

    def marginals(self) -> Tensor:
        """(S, T, V) probabilities of labels."""
        return torch.tensordot(self.p, self.hot, 1)

    def entropy(self) -> Tensor:
        """(S,) entropy over labellings, in nats."""
        surprise = self.log_z[:, None] - self.values
        return torch.where(self.p > 0, self.p * surprise, 0).sum(1)

    def best(self, n: int) -> tuple[Tensor, Tensor]:
        """Labels (S, n, T) and log-probabilities (S, n) of the n best of each draw; -inf where there are
        fewer."""
        S, k = len(self.values), min(n, len(self.labels))
        top, index = self.values.topk(k, 1)
        labels = self.labels.new_zeros((S, n, self.labels.shape[1]))
        found = top.new_full((S, n), -torch.inf)
        labels[:, :k] = self.labels[index]
        found[:, :k] = torch.where(top > -torch.inf, top - self.log_z[:, None], -torch.inf)
        return labels, found

    def sample(self, generator: torch.Generator) -> Tensor:
        """(S, T) one labelling per draw."""
        return self.labels[torch.multinomial(self.p, 1, generator=generator)[:, 0]]

    def effective(self) -> float:
        """Effective number of labellings of a sample, for the average over draws: that many independent
        labellings would be as good. Infinite if the pool has all labellings."""
        if self.drawn is None:
            return torch.inf
        p = self.p.mean(0)
        return float(p.sum() ** 2 / (p**2 / self.drawn).sum().clamp(min=1e-300))

    def errors(self, share: Tensor) -> Tensor:
        """(T, V) standard errors of the marginals averaged over draws with shares (S,), by the delta method
        for ratios of weighted sums; 0 if the pool has all labellings."""
        T, V = self.hot.shape[1:]
        if self.drawn is None:
            return self.values.new_zeros((T, V))
        weighted = share[:, None] * self.p  # (S, C)
        middle = torch.tensordot(weighted.T, self.marginals(), 1)  # (C, T, V)
        apart = weighted.sum(0)[:, None, None] * self.hot - middle
        return torch.einsum("ctv,c->tv", apart**2, 1 / self.drawn).sqrt()


def all_labellings(possible: Tensor) -> Tensor:
    """(C, T) every labelling made of possible labels. possible : (T, V) bool."""
    each = [row.nonzero()[:, 0] for row in possible]
    if not each:
        return torch.zeros((1, 0), dtype=torch.long)
    grid = torch.cartesian_prod(*each)
    return grid.view(-1, len(each))


def enumerated(values: Values, possible: Tensor) -> Pool:
    """The pool of all labellings made of possible labels. possible : (T, V) bool."""
    labels = all_labellings(possible)
    found = values(labels)
    return Pool(labels, found, found.new_zeros(len(labels)), None, possible.shape[1])
