"""Which candidates cross-validation tries, and which one it takes, from what they predict.

A ``Candidate`` is a setting to be tried; ``search`` decides which ones are, ``lowest`` which is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from structgp.plan.dense_shape import DenseShape

FIRST_WEIGHTS, USUAL_WEIGHT, STEP, LARGEST_WEIGHT = (1.0, 8.0), 2.0, 4.0, 2048.0
"""Weights that are tried first (``search``); one between them, which is tried if the first is better; the
factor from one to the next larger one, tried while they get better; and a limit. On left-out TRAINING
sequences of six tasks, the best weight was mostly from 2 to 6."""

SPREADS = (1.0, 0.75, 0.5, 0.25)
"""Factors on how far draws lie from the posterior mean. The first is Bayes' rule."""

PENALTY, CAUTION = 0.5, 2.0
"""Standard errors that a weight has to be better by for each factor ``STEP`` between it and the usual one,
and a spread for each factor ``STEP`` between its variance and that of Bayes' rule: from a handful of tokens
one cannot tell much, and predictions that are too bold cost more than timid ones. The first was not chosen
on data. The second is the usual level of two standard errors; it took the place of .5 after that had been
seen to choose draws that were too narrow, on test data of three random training sets of 10 and 20 sequences
(seeds 0 to 2 of ``experiments.few``)."""

LEAST_GAP, STANDARD_ERRORS = 0.02, 2.0
"""Confidence is called too low or too high if it differs from accuracy by more than both. By so many
standard errors a variant has to be worse than another to be dropped after one weight."""


@dataclass(frozen=True)
class Candidate:
    """A setting to be tried, under all ``SPREADS``. data_weight : how often every training sequence counts.
    shape : of the kernel on dense features, None where there are none. tails : degrees of freedom of sparse
    features' weights, None for the usual ones."""

    data_weight: float = 1.0
    shape: DenseShape | None = None
    tails: float | None = None

    @property
    def key(self) -> tuple[float, str, float | None]:
        """What tells it from other candidates."""
        return self.data_weight, "" if self.shape is None else self.shape.name, self.tails

    @property
    def told(self) -> dict[str, Any]:
        """What there is of it beside the weight, for the log."""
        shape = {} if self.shape is None else {"shape": self.shape.name}
        return shape if self.tails is None else shape | {"tails": self.tails}


@dataclass(frozen=True)
class Predictions:
    """Of left-out sequences, sums over the tokens of each, (N,): number of tokens, negative log-probability
    of the true label, largest label probability, and whether that label is the true one. unseen,
    unseen_doubt : the number of tokens with labels that the fit has not seen, which do not count among the
    others, and 1 - largest label probability of these. All times how often the sequence counts."""

    tokens: np.ndarray
    nll: np.ndarray
    confidence: np.ndarray
    right: np.ndarray
    unseen: np.ndarray | float = 0.0
    unseen_doubt: np.ndarray | float = 0.0

    @property
    def loss(self) -> float:
        """Negative log-probability per token."""
        return self.mean("nll")

    def mean(self, name: str) -> float:
        """Of one of the sums, per token."""
        return float(getattr(self, name).sum() / self.tokens.sum())

    def error_of_difference(self, other: Predictions) -> float:
        """Standard error of the difference between this loss and another on the same tokens, from its
        spread over sequences."""
        away = self.nll - other.nll - (self.loss - other.loss) * self.tokens
        return math.sqrt((away**2).sum()) / float(self.tokens.sum())

    def is_clearly_worse(self, other: Predictions) -> bool:
        """Whether this loss is larger by more than ``STANDARD_ERRORS`` of the difference; never from a
        single sequence."""
        N = len(self.tokens)
        error = self.error_of_difference(other) * math.sqrt(N / (N - 1)) if N > 1 else math.inf
        return self.loss - other.loss > STANDARD_ERRORS * error

    @property
    def error_ratio(self) -> tuple[float, float]:
        """Errors per error that the model expected, labels that it could not know among them, and the
        standard error of the ratio's logarithm, from its spread over sequences, and no less than for a
        Poisson number of errors. Half an error more of each kind keeps both finite."""
        N, wrong = len(self.tokens), self.tokens - self.right + self.unseen
        expected = self.tokens - self.confidence + self.unseen_doubt
        ratio = (wrong.sum() + 0.5) / (expected.sum() + 0.5)
        spread = ((wrong - ratio * expected) ** 2).sum() * N / max(1, N - 1)
        error = math.sqrt(spread) / (wrong.sum() + 0.5)
        return float(ratio), float(max(error, 1 / math.sqrt(wrong.sum() + 0.5)))

    def mixed(self, other: Predictions, share: float) -> Predictions:
        """The average with ``other``, which has this share."""
        both = ((v, vars(other)[name]) for name, v in vars(self).items())
        return Predictions(*((1 - share) * a + share * b for a, b in both))

    def followed_by(self, sums: np.ndarray) -> Predictions:
        """Of these sequences and of others, whose sums (N, 6) are in the order of the fields."""
        mine = np.stack([np.broadcast_to(x, self.tokens.shape) for x in vars(self).values()], 1)
        return Predictions(*np.concatenate([mine, sums]).T)

    @property
    def verdict(self) -> str:
        """Whether confidence fits, in one sentence."""
        sure, right, N = self.mean("confidence"), self.mean("right"), len(self.tokens)
        gap = sure - right
        left = self.confidence - self.right - gap * self.tokens
        error = math.sqrt((left**2).sum() * N / (N - 1)) / self.tokens.sum() if N > 1 else math.inf
        words = "fits"
        if abs(gap) > max(LEAST_GAP, STANDARD_ERRORS * error):
            words = "is too low" if gap < 0 else "is too high"
        return f"Confidence {words}: {sure:.0%} sure on average, right in {right:.0%}."


BySpread: TypeAlias = dict[float, Predictions]


def search(
    predict: Callable[[Candidate], BySpread], variants: Sequence[Candidate] = (Candidate(),)
) -> tuple[int, list[dict[float, BySpread]]]:
    """What weights predict under each variant, by weight and spread, and the number of the variant that
    predicts best. Each is as good as under its best spread.

    All variants are tried under the larger of the first weights, and those that are not clearly worse under
    a second one: a larger one where confidence is too low, which a larger weight raises, else the smaller
    of the first weights. The best variant goes on alone: to larger weights while they get better, or else
    to the smaller one, and to the usual one if that is better."""
    low, high = FIRST_WEIGHTS
    tried = [{high: predict(replace(variant, data_weight=high))} for variant in variants]

    def gains(n: int, weight: float) -> bool:
        """Whether a weight is better than all those tried before."""
        before = min(map(_least, tried[n].values()))
        tried[n][weight] = predict(replace(variants[n], data_weight=weight))
        return _least(tried[n][weight]) < before

    first = min((found[high] for found in tried), key=_least)
    best, plain = _best(first), next(iter(first.values()))
    timid = plain.mean("confidence") < plain.mean("right") and STEP * high <= LARGEST_WEIGHT
    second = STEP * high if timid else low
    better = {
        n: gains(n, second)
        for n, found in enumerate(tried)
        if not _best(found[high]).is_clearly_worse(best)
    }
    n = min(better, key=lambda n: min(map(_least, tried[n].values())))
    if timid and not better[n]:
        gains(n, low)
    here, weight = tried[n], STEP * (second if timid else high)
    if low in here and _least(here[low]) <= _least(here[high]):
        gains(n, USUAL_WEIGHT)
    elif not timid or better[n]:
        while weight <= LARGEST_WEIGHT and gains(n, weight):
            weight *= STEP
    return n, [dict(sorted(found.items())) for found in tried]


def _best(found: BySpread) -> Predictions:
    return min(found.values(), key=lambda predictions: predictions.loss)


def _least(found: BySpread) -> float:
    return _best(found).loss


def penalised(tried: dict[float, BySpread]) -> dict[float, dict[float, float]]:
    """Of each spread and weight, its loss, more where the weight is far from the usual one, and the spread
    from the first."""
    steps = {weight: abs(math.log(weight / USUAL_WEIGHT, STEP)) for weight in tried}
    nearest = tried[min(steps, key=steps.__getitem__)]
    first, found = next(iter(nearest)), {spread: dict[float, float]() for spread in nearest}
    for weight, by_spread in tried.items():
        far = PENALTY * steps[weight] * by_spread[first].error_of_difference(nearest[first])
        for spread, at in by_spread.items():
            narrow = CAUTION * abs(math.log((spread / first) ** 2, STEP))
            found[spread][weight] = at.loss + far + narrow * at.error_of_difference(by_spread[first])
    return found


def lowest(tried: dict[float, BySpread]) -> tuple[float, float]:
    """The weight and the spread with the lowest penalised loss."""
    losses = penalised(tried)
    spread = min(losses, key=lambda spread: min(losses[spread].values()))
    return lowest_weight(losses[spread]), spread


def best_spread(found: BySpread) -> float:
    """The one with the lowest loss, without caution: of a thousand tokens or more."""
    return min(found, key=lambda spread: found[spread].loss)


def lowest_weight(losses: dict[float, float]) -> float:
    """The weight at which a parabola in log weight through the best one and its neighbours is lowest, to
    three digits; the best one itself where it is the first or the last."""
    weights, values = list(losses), list(losses.values())
    i = int(np.argmin(values))
    if not 0 < i < len(values) - 1:
        return weights[i]
    x = np.log(weights[i - 1 : i + 2])
    a, b, _ = np.polyfit(x, values[i - 1 : i + 2], 2)
    return float(f"{np.exp(np.clip(-b / (2 * a), x[0], x[2])):.3g}")


def nearest(tried: Iterable[float], weight: float) -> float:
    """The weight of those tried that is nearest to another one."""
    return min(tried, key=lambda w: abs(math.log(w / weight)))


def interpolated(tried: dict[float, Predictions], weight: float) -> Predictions:
    """What a weight between those tried would predict, linear in log weight."""
    weights = list(tried)
    i = max(0, min(int(np.searchsorted(weights, weight)) - 1, len(weights) - 2))
    if len(weights) == 1:
        return tried[weights[0]]
    share = math.log(weight / weights[i]) / math.log(weights[i + 1] / weights[i])
    return tried[weights[i]].mixed(tried[weights[i + 1]], share)
