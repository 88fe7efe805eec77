"""Generated sequences, labelled by a chain whose parameters are known.

Letters: N sequences, T tokens in a sequence, P templates (columns), K values of each template, V labels.

    p(y | x)  is proportional to  exp( sum_t sum_p W[p, x_tp, y_t]  +  sum_{t>0} G[y_{t-1}, y_t] )

The values x are drawn first, independently, from a Zipf-like distribution (value k has weight
1 / (k + 1)); then y is drawn exactly from p(y | x) by forward filtering, backward sampling. The best
possible marginals are therefore known: :meth:`TrueChain.true_marginals`.

Sequences are drawn in blocks, each with its own random stream, so that memory does not grow with their
number, and a longer run with the same seed starts with the same sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from structgp.errors import InputError

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Token = tuple[str, ...]

_BLOCK_TOKENS = 12_000


@dataclass(frozen=True)
class TrueChain:
    """The chain that labels the data.

    emission : (P, K, V), W above; transition : (V, V), G above, from row to column.
    labels : the V labels ``L0``, ``L1``, ...; values : the K values ``v0``, ``v1``, ... of every
    template.
    """

    emission: Floats
    transition: Floats
    labels: tuple[str, ...]
    values: tuple[str, ...]

    def scores(self, x: Sequence[Token]) -> Floats:
        """The unary scores sum_p W[p, x_tp, :] of one sequence, (T, V)."""
        number = {value: k for k, value in enumerate(self.values)}
        try:
            ids = np.array([[number[value] for value in token] for token in x], dtype=np.int64)
        except KeyError as err:
            raise InputError(
                "x", f"value {err.args[0]!r} is not one of the chain's", "use v0, v1, ..."
            ) from None
        n_templates = len(self.emission)
        if ids.ndim != 2 or ids.shape[1] != n_templates:
            raise InputError(
                "x", "tokens need one value per template", f"give {n_templates} values per token"
            )
        return self._scores(ids)

    def _scores(self, ids: Integers) -> Floats:
        """Value numbers (..., P) -> unary scores (..., V)."""
        return self.emission[np.arange(ids.shape[-1]), ids].sum(axis=-2)

    def true_marginals(self, x: Sequence[Token]) -> Floats:
        """p(y_t = v | x) by forward-backward in log space, (T, V); O(T V^2)."""
        f = self.scores(x)
        ahead = self._forward(f[None])[0]
        behind = np.zeros_like(f)
        for t in range(len(f) - 2, -1, -1):
            behind[t] = logsumexp(self.transition + f[t + 1] + behind[t + 1], axis=1)
        joint = ahead + behind
        return np.exp(joint - logsumexp(joint, axis=1, keepdims=True))

    def log_prob(self, x: Sequence[Token], y: Sequence[str]) -> float:
        """log p(y | x) of one sequence."""
        f = self.scores(x)
        number = {label: v for v, label in enumerate(self.labels)}
        if len(y) != len(f) or not set(y) <= number.keys():
            raise InputError(
                "y",
                f"must be {len(f)} labels between {self.labels[0]} and {self.labels[-1]}",
                "give one of the chain's labels for each token of x",
            )
        path = np.array([number[label] for label in y])
        score = f[np.arange(len(f)), path].sum() + self.transition[path[:-1], path[1:]].sum()
        return float(score - logsumexp(self._forward(f[None])[0, -1]))

    def _forward(self, f: Floats) -> Floats:
        """Scores (B, T, V) -> a[b, t, v], the log-sum-exp of all paths to label v at token t."""
        ahead = np.empty_like(f)
        ahead[:, 0] = f[:, 0]
        for t in range(1, f.shape[1]):
            into = ahead[:, t - 1, :, None] + self.transition
            ahead[:, t] = f[:, t] + logsumexp(into, axis=1)
        return ahead

    def _sample(self, ids: Integers, lengths: Integers, rng: np.random.Generator) -> Integers:
        """Labels (B, T) drawn from p(y | x). ids : (B, T, P) value numbers, padded beyond ``lengths``."""
        ahead = self._forward(self._scores(ids))
        n, width, _ = ahead.shape
        y = np.zeros((n, width), dtype=np.int64)
        into_next = np.zeros((n, len(self.labels)))
        for t in range(width - 1, -1, -1):
            # There is nothing to condition on after the end of a sequence, so sampling starts at each
            # sequence's own last token, whatever was drawn in the padding.
            if t + 1 < width:
                into_next = np.where((t + 1 < lengths)[:, None], self.transition.T[y[:, t + 1]], 0)
            weight = ahead[:, t] + into_next
            weight = np.exp(weight - weight.max(axis=1, keepdims=True)).cumsum(axis=1)
            u = rng.random(n) * weight[:, -1]
            y[:, t] = (weight[:, :-1] <= u[:, None]).sum(axis=1)
        return y


@dataclass(frozen=True)
class Generated:
    """X, y and the chain they come from: X[i][t] is a tuple of P strings, y[i][t] a label."""

    X: list[list[Token]]
    y: list[list[str]]
    chain: TrueChain


def true_chain(
    *, n_labels: int = 5, n_templates: int = 6, n_values: int = 200, strength: float = 3.0, seed: int
) -> TrueChain:
    """The chain that :func:`generate` and :func:`generate_stream` use for these arguments.

    Parameters
    ----------
    n_labels : V, number of labels ``L0``, ``L1``, ...
    n_templates : P, number of columns of strings in each token.
    n_values : K, number of different strings in each column; ``v0`` is the most frequent.
    strength : standard deviation of a token's unary score; that of a transition score is half of it.
        0 gives labels that are uniform noise; large values give labels that are almost determined by x.
    seed : whole number of 0 or more.
    """
    counts = {"n_labels": n_labels, "n_templates": n_templates, "n_values": n_values}
    for name, number in counts.items():
        if number < 1:
            raise InputError(name, f"must be at least 1, got {number}", "give a larger number")
    if not 0 <= strength < np.inf:
        raise InputError("strength", f"must not be negative, got {strength}", "give 0 or more")
    if seed < 0:
        raise InputError("seed", f"must not be negative, got {seed}", "give a whole number, 0 or more")
    rng = np.random.default_rng([seed, 0])
    # The variances of the P terms of a token's score sum to strength^2, however many terms there are.
    emission = rng.normal(size=(n_templates, n_values, n_labels)) * strength / np.sqrt(n_templates)
    return TrueChain(
        emission=emission,
        transition=rng.normal(size=(n_labels, n_labels)) * strength / 2,
        labels=tuple(f"L{v}" for v in range(n_labels)),
        values=tuple(f"v{k}" for k in range(n_values)),
    )


def _block(
    chain: TrueChain, lengths: Integers, rng: np.random.Generator, sweep: int = 0, begin: int = 0
) -> Iterator[tuple[list[Token], list[str]]]:
    """Sequences of these lengths, drawn together. begin : number of tokens in earlier blocks."""
    n_templates, n_values, _ = chain.emission.shape
    zipf = np.cumsum(1 / np.arange(1, n_values + 1))
    u = rng.random((len(lengths), int(lengths.max()), n_templates)) * zipf[-1]
    ids = np.searchsorted(zipf[:-1], u, side="right")
    if sweep:
        number = begin + np.arange(int(lengths.sum()))
        turn = number % sweep == 0
        row, place = np.nonzero(np.arange(int(lengths.max())) < lengths[:, None])
        ids[row[turn], place[turn]] = (number[turn] // sweep % n_values)[:, None]
    y = chain._sample(ids, lengths, rng)
    values, labels = np.array(chain.values, dtype=object), np.array(chain.labels, dtype=object)
    for i, length in enumerate(lengths):
        yield [tuple(row) for row in values[ids[i, :length]]], labels[y[i, :length]].tolist()


def generate_stream(
    n_sequences: int, *, mean_length: float = 12, sweep: int = 0, seed: int, **chain: Any
) -> Iterator[tuple[list[Token], list[str]]]:
    """Yield (x, y) one sequence at a time: the data of :func:`generate` in constant memory.

    x is a list of T tuples of P strings, y a list of T labels. Arguments as in :func:`generate`. With
    ``sweep``, one token in every ``sweep`` takes its values in turn, so that the first
    ``sweep * n_values`` tokens have all of them.
    """
    for name, number in (("n_sequences", n_sequences), ("sweep", sweep)):
        if number < 0:
            raise InputError(name, f"must not be negative, got {number}", "give 0 or more")
    if not 1 <= mean_length < np.inf:
        raise InputError("mean_length", f"must be at least 1, got {mean_length}", "give 1 or more")
    return _stream(true_chain(seed=seed, **chain), n_sequences, mean_length, seed, sweep)


def _stream(
    chain: TrueChain, n_sequences: int, mean_length: float, seed: int, sweep: int
) -> Iterator[tuple[list[Token], list[str]]]:
    # Separate from generate_stream, so that wrong arguments are reported at the call.
    size, tokens = math.ceil(_BLOCK_TOKENS / mean_length), 0
    for start in range(0, n_sequences, size):
        rng = np.random.default_rng([seed, 1 + start // size])
        lengths = 1 + rng.poisson(mean_length - 1, size=size)
        block = _block(chain, lengths, rng, sweep, tokens)
        yield from islice(block, n_sequences - start)
        tokens += int(lengths.sum())


def generate(n_sequences: int, *, mean_length: float = 12, seed: int, **chain: Any) -> Generated:
    """Draw labelled sequences from a known linear chain.

    Parameters
    ----------
    n_sequences : N.
    mean_length : mean number of tokens; a length is 1 + Poisson(mean_length - 1).
    seed : whole number of 0 or more; the same arguments and seed give the same data and chain.
    chain : n_labels, n_templates, n_values and strength, as in :func:`true_chain`.

    Cost: O(N T (P V + V^2)), about ten seconds for 100,000 sequences of 12 tokens.
    """
    X: list[list[Token]] = []
    y: list[list[str]] = []
    for x, labels in generate_stream(n_sequences, mean_length=mean_length, seed=seed, **chain):
        X.append(x)
        y.append(labels)
    return Generated(X, y, true_chain(seed=seed, **chain))
