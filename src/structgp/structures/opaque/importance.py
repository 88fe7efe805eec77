"""A weighted sample of labellings, where there are too many to enumerate: adaptive importance sampling.

Labellings are proposed by chains, one per draw, and evaluated by the user's function under all draws at
once, so that every value serves every draw. With n_k labellings proposed by mixture q_k, a labelling y that
was drawn m times stands for

    w(y) = m / sum_k n_k q_k(y)

labellings (the balance heuristic), and sum_y w(y) p_s(y) estimates the sum over all labellings without
bias. Where the weights are uneven, the node scores of all chains are tilted by a common amount per position
and label, so that the marginals of the chains move towards those of the sample so far; labellings drawn
before still count.

The spread of averaged marginals between 4 seeds was measured on generated scores with 4 labels, 20 and 40
tokens, 32 draws and 2,000 values per sequence. It was 2 to 17 times smaller than that of Gibbs sampling on
the values (8 chains from the chain's labellings, one sweep dropped, the average over draws as their
target), which has only 2 to 4 sweeps for so many values; and, where the chain is far from the function, 1.6
to 4 times smaller than without tilting. With a Markov chain fitted to the sample as the next proposal, the
spread was about the same at 20 tokens and up to 1.4 times as large at 40.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from structgp.structures.opaque.pools import Pool, Values
from structgp.structures.program import Layout, compile
from structgp.structures.spec import Spec

ROUND = 256
"""Number of labellings proposed at a time."""

MOST_VALUES = 2048
"""Largest number of labellings of a sequence for which all are evaluated; where there are more, sampling
ends with the round that reaches this number. A NumPy function takes some tenths of a second for so many,
with 20 tokens and 128 draws. Not chosen on data."""

MOST_ROUNDS = 16
"""Largest number of rounds. Where few labellings are probable, the same ones are drawn again and cost no
values."""

ENOUGH = 1000
"""Effective number of labellings at which sampling ends: standard errors are then at most .016."""

EVEN = 0.5
"""Proposals are tilted if the effective number of labellings is below this share of those drawn."""

LEAST_EFFECTIVE = 50
"""Smallest effective number of labellings: weights that a tilt is learned from are flattened until they are
worth so many."""


def sampled(values: Values, f: Tensor, g: Tensor, spec: Spec, generator: torch.Generator) -> Pool:
    """A sampled pool for one sequence. values : the function, from labellings (C, T) to values (S, C). f :
    (S, 1, T, V), -inf at labels that are not possible; g : (S, V, V) or (S, 1, T-1, V, V). Cost of the
    chains O(S C T) per tilt."""
    proposals, seen = Proposals(f, g, spec, generator), Seen(values)
    for _ in range(MOST_ROUNDS):
        seen.add(proposals.draw(ROUND))
        pool = seen.pool(proposals.log_expected(seen.labels), f.shape[-1])
        if pool.effective() >= ENOUGH or len(seen.labels) >= MOST_VALUES:
            break
        if pool.effective() < EVEN * int(seen.drawn.sum()):
            proposals.tilt(_flattened(pool))
    return pool


def _flattened(pool: Pool) -> Tensor:
    """(T, V) marginals of the sample, averaged over draws, with weights flattened until they are not too
    uneven."""
    assert pool.drawn is not None
    log_p = (pool.values + pool.log_weight).log_softmax(1).nan_to_num(-torch.inf).logsumexp(0)
    # The weight of one draw of each labelling; any power of it is positive, unless it is impossible.
    each, power = log_p - pool.drawn.log(), 1.0
    while True:
        p = (power * each + pool.drawn.log()).masked_fill(each == -torch.inf, -torch.inf).softmax(0)
        if not bool(p.isfinite().all()):  # nothing possible was found yet
            p = pool.drawn / pool.drawn.sum()
        effective = 1 / float((p**2 / pool.drawn).sum())
        if effective >= LEAST_EFFECTIVE or power < 1e-3:
            return torch.tensordot(p, pool.hot, 1)
        power *= 0.7


class Seen:
    """Labellings drawn so far. labels : (C, T), without repeats. drawn : (C,) how often each was drawn."""

    def __init__(self, values: Values) -> None:
        self._of, self._places, self._values = values, dict[bytes, int](), list[Tensor]()
        self.labels, self.drawn = torch.zeros((0, 0), dtype=torch.long), torch.zeros(0, dtype=torch.float64)

    def add(self, labels: Tensor) -> None:
        keys = [row.tobytes() for row in labels.numpy()]
        new = []
        for i, key in enumerate(keys):
            if key not in self._places:
                self._places[key] = len(self._places)
                new.append(i)
        if new:
            self.labels = torch.cat([self.labels.view(-1, labels.shape[1]), labels[new]])
            self._values.append(self._of(labels[new]))
        counts = torch.zeros(len(self.labels), dtype=torch.float64)
        counts[: len(self.drawn)] = self.drawn
        places = torch.tensor([self._places[key] for key in keys])
        self.drawn = counts.index_add(0, places, torch.ones(len(places), dtype=torch.float64))

    def pool(self, log_expected: Tensor, n_labels: int) -> Pool:
        values = torch.cat(self._values, 1)
        return Pool(self.labels, values, self.drawn.log() - log_expected, self.drawn, n_labels)


class Proposals:
    """Mixtures of chains, one chain per draw; each mixture has its tilt (T, V) of the node scores."""

    def __init__(self, f: Tensor, g: Tensor, spec: Spec, generator: torch.Generator) -> None:
        self.f, self.g, self.generator = f, g, generator
        self._program = compile(spec, Layout(torch.ones(f.shape[1:3], dtype=torch.bool)))
        self._n_scores = len(spec.templates)
        self._tilts, self._n = [f.new_zeros(f.shape[2:])], [0]
        self._log_q: list[Tensor] = []

    def _scores(self, tilt: Tensor, draws: Tensor | slice = slice(None)) -> tuple[Tensor, ...]:
        return (self.f[draws] + tilt, self.g[draws])[: self._n_scores]

    def draw(self, n: int) -> Tensor:
        """(n, T) labellings from the latest mixture, about equally many from each draw."""
        S = len(self.f)
        order = torch.randperm(-(-n // S) * S, generator=self.generator)[:n] % S
        self._n[-1] += n
        return self._program.sample(self._scores(self._tilts[-1], order), self.generator)[:, 0]

    def log_expected(self, labels: Tensor) -> Tensor:
        """(C,) log of the expected number of times that each labelling occurs among all that were drawn."""
        for k, tilt in enumerate(self._tilts):
            if k == len(self._log_q):
                self._log_q.append(self.f.new_zeros(0))
            known = self._log_q[k]
            if len(known) < len(labels):
                self._log_q[k] = torch.cat([known, self._log_mixture(tilt, labels[len(known) :])])
        counted = [q + math.log(n) for q, n in zip(self._log_q, self._n, strict=True)]
        return torch.stack(counted).logsumexp(0)

    def _log_mixture(self, tilt: Tensor, labels: Tensor) -> Tensor:
        scores = self._scores(tilt)
        total = self.f.new_zeros((len(self.f), len(labels)))
        for t, here in enumerate(labels.T):
            total += scores[0][:, 0, t, here]
            if t and len(scores) > 1:
                table = scores[1] if scores[1].dim() == 3 else scores[1][:, 0, t - 1]
                total += table[:, labels[:, t - 1], here]
        log_z = self._program.log_partition(scores)  # (S, 1)
        return torch.logsumexp(total - log_z, 0) - math.log(len(self.f))

    def tilt(self, wanted: Tensor) -> None:
        """Moves the marginals of the next proposals, averaged over draws, towards ``wanted`` (T, V)."""
        now = self._program.node_marginals(self._scores(self._tilts[-1])).mean(0)[0]
        little = 1 / (LEAST_EFFECTIVE * wanted.shape[1])
        self._tilts.append(self._tilts[-1] + torch.log((wanted + little) / (now + little)))
        self._n.append(0)
