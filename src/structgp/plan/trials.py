"""Chooses which candidates cross-validation tries, and which one it takes, by what they predict.

A ``Candidate`` is a setting to be tried; ``search`` decides which ones are, ``lowest`` which is taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import scipy  # its parts are imported when they are used

from structgp.plan.dense_shape import DenseShape

FIRST_WEIGHTS, USUAL_WEIGHT, STEP, LARGEST_WEIGHT = (1.0, 8.0), 2.0, 4.0, 2048.0
"""Data weights: two that are tried first (``search``); one between them, which is tried if the smaller one
is better; the factor from one to the next larger one, tried while they get better; and a limit. On left-out
TRAINING sequences of six tasks, the best weight was mostly from 2 to 6."""

SPREADS = (1.0, 0.75, 0.5, 0.25, 0.1)
"""Factors on how far draws lie from the posterior mean. The first is Bayes' rule; the last leaves little
but the mean."""

PENALTY, CAUTION = 0.1, 1.0
"""Two penalties in standard errors. A data weight has to be better by the first for each factor ``STEP``
between it and the usual one. A spread has to be better by the second for each factor ``STEP`` between its
variance and that of the narrowest one that is not overconfident (``narrowest_timid``): a handful of tokens
cannot tell much, and overconfident predictions cost more than underconfident ones. The first settles little
more than ties: with .5, weights were too small on dense features and on the smallest training sets. The
second is the usual one-standard-error rule of cross-validation. Both were chosen on training sets of 10 to
80 sequences, drawn from the TRAINING parts of six tasks, and on generated dense features and digit strings
(seeds 100 and 101): NLL of other sequences was lower or the same within .01 than with .5 and two standard
errors from Bayes' rule, and confidence came nearer to accuracy."""

ONE_IN = 10.0
"""Number of cases: a candidate is dropped if it is worse than the best by more than chance explains in one
of so many. On left-out thirds of the TRAINING data of four tasks, encoded and raw, ten splits each, loss
and error were the same as with 40 to within chance."""

HALF_AN_ERROR = 0.5
"""Expected errors up to which left-out tokens that are all predicted right cannot tell whether more
confident predictions would be overconfident: larger weights are not tried then, and narrower draws have to
be clearly better. Not chosen on data."""

LEAST_GAP, STANDARD_ERRORS = 0.02, 2.0
"""Confidence is called too low or too high if it differs from accuracy by more than both."""


@dataclass(frozen=True)
class Candidate:
    """A setting to be tried, under all ``SPREADS``. data_weight : how often every training sequence counts.
    shape : that of the kernel on dense features, None where there are none. tails : degrees of freedom of
    the prior of sparse features' relevances, None for the usual ones."""

    data_weight: float = 1.0
    shape: DenseShape | None = None
    tails: float | None = None

    @property
    def key(self) -> tuple[float, str, float | None]:
        """Identifies this candidate among those that are tried."""
        return self.data_weight, "" if self.shape is None else self.shape.name, self.tails

    @property
    def told(self) -> dict[str, Any]:
        """Its settings beside the data weight, for the log."""
        shape = {} if self.shape is None else {"shape": self.shape.name}
        return shape if self.tails is None else shape | {"tails": self.tails}


@dataclass(frozen=True)
class Predictions:
    """Sums over the tokens of each left-out sequence, (N,): number of tokens, negative log-probability of
    the true label, largest label probability, and whether that label is the true one. unseen,
    unseen_doubt : the number of tokens with labels that the fit has not seen, which do not count among the
    others, and the sum of 1 - largest label probability over these. All are multiplied by how often the
    sequence counts."""

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

    @property
    def doubt(self) -> float:
        """Expected number of errors."""
        return float((self.tokens - self.confidence).sum())

    def mean(self, name: str) -> float:
        """The named sum, divided by the number of tokens."""
        return float(np.sum(getattr(self, name)) / self.tokens.sum())

    def error_of_difference(self, other: Predictions) -> float:
        """Standard error of the difference between this loss and another on the same tokens, from how it
        varies over sequences."""
        away = self.nll - other.nll - (self.loss - other.loss) * self.tokens
        return math.sqrt((away**2).sum()) / float(self.tokens.sum())

    def is_clearly_worse(self, other: Predictions) -> bool:
        """True if this loss is larger by more than chance explains in one of ``ONE_IN`` cases, by Student's
        t over sequences: about 1.3 standard errors of the difference, more where few sequences have tokens.
        Never true if only one has."""
        N = int(np.count_nonzero(self.tokens))
        if N < 2:
            return False
        error = self.error_of_difference(other) * math.sqrt(N / (N - 1))
        return self.loss - other.loss > float(scipy.special.stdtrit(N - 1, 1 - 1 / ONE_IN)) * error

    @property
    def error_ratio(self) -> tuple[float, float]:
        """The number of errors per error that the model expected, where tokens with labels that it could
        not know count as errors; and the standard error of the logarithm of this ratio, from how it varies
        over sequences, but no less than for a Poisson number of errors. Half an error more of each kind
        keeps both finite."""
        N, wrong = len(self.tokens), self.tokens - self.right + self.unseen
        expected = self.tokens - self.confidence + self.unseen_doubt
        ratio = (wrong.sum() + 0.5) / (expected.sum() + 0.5)
        spread = ((wrong - ratio * expected) ** 2).sum() * N / max(1, N - 1)
        error = math.sqrt(spread) / (wrong.sum() + 0.5)
        return float(ratio), float(max(error, 1 / math.sqrt(wrong.sum() + 0.5)))

    def moved(self, mine: Predictions, theirs: Predictions) -> Predictions:
        """A copy in which every sum per token is larger by the difference between those of ``mine`` and
        ``theirs``, within what sums can be: no more tokens are right than there are."""
        tokens, found = self.tokens, {}
        most = {"confidence": tokens, "right": tokens, "unseen_doubt": self.unseen}
        for name, x in vars(self).items():
            larger = x + (mine.mean(name) - theirs.mean(name)) * tokens
            found[name] = np.clip(larger, 0, most.get(name, np.inf))
        return Predictions(**found)

    def mixed(self, other: Predictions, share: float) -> Predictions:
        """The weighted average with ``other``, whose weight is ``share``."""
        both = ((v, vars(other)[name]) for name, v in vars(self).items())
        return Predictions(*((1 - share) * a + share * b for a, b in both))

    @property
    def verdict(self) -> str:
        """One sentence that says whether confidence fits accuracy."""
        sure, right, N = self.mean("confidence"), self.mean("right"), int(np.count_nonzero(self.tokens))
        gap = sure - right
        left = self.confidence - self.right - gap * self.tokens
        error = math.sqrt((left**2).sum() * N / (N - 1)) / self.tokens.sum() if N > 1 else math.inf
        words = "fits"
        if abs(gap) > max(LEAST_GAP, STANDARD_ERRORS * error):
            words = "is too low" if gap < 0 else "is too high"
        return f"Confidence {words}: {sure:.0%} sure on average, right in {right:.0%}."


def joined(parts: Sequence[Predictions]) -> Predictions:
    """The predictions for all sequences of several parts."""
    if len(parts) == 1:
        return parts[0]
    sums = ([np.broadcast_to(x, p.tokens.shape) for x in vars(p).values()] for p in parts)
    return Predictions(*map(np.concatenate, zip(*sums, strict=True)))


BySpread: TypeAlias = dict[float, Predictions]
Predict: TypeAlias = Callable[[Candidate, int], BySpread]
"""What a fold, by its number, predicts under a candidate."""


class Trial:
    """A candidate on its way through the folds. parts : predictions of the folds so far. is_out : whether
    it was clearly worse than another candidate and goes no further."""

    def __init__(self, candidate: Candidate, predict: Predict) -> None:
        self.candidate, self._predict = candidate, predict
        self.parts: list[BySpread] = []
        self.is_out = False
        self._after: dict[int, BySpread] = {}

    def go_on(self, n: int) -> None:
        """Predicts with the first n folds, as far as that has not been done."""
        while len(self.parts) < n:
            self.parts.append(self._predict(self.candidate, len(self.parts)))

    def after(self, n: int) -> BySpread:
        """What the first n folds predict together, by spread."""
        if n not in self._after:
            parts = self.parts[:n]
            self._after[n] = {spread: joined([part[spread] for part in parts]) for spread in parts[0]}
        return self._after[n]

    def best(self, n: int | None = None) -> Predictions:
        """What the first n folds, by default all so far, predict under the spread with the lowest loss."""
        found = self.after(len(self.parts) if n is None else n)
        return min(found.values(), key=lambda predictions: predictions.loss)

    @property
    def loss(self) -> float:
        return self.best().loss

    def is_clearly_worse(self, other: Trial, n: int) -> bool:
        """True if it is clearly worse than ``other`` after n folds."""
        return self.best(n).is_clearly_worse(other.best(n))

    def complete(self, other: Trial) -> None:
        """Fills in the folds that it has not been through: with those of another trial, changed by the
        difference per token between the two on the folds that both have been through."""
        n = len(self.parts)
        mine, theirs = self.after(n), other.after(n)
        for part in other.parts[n:]:
            self.parts.append({v: part[v].moved(mine[v], theirs[v]) for v in part})


def race(trials: Sequence[Trial], n_folds: int) -> None:
    """Sends trials through all folds, but drops those that are clearly worse than the best after one of
    them. The folds that these have missed are filled in from the best."""
    for n in range(1, n_folds + 1):
        going = [trial for trial in trials if not trial.is_out]
        for trial in going:
            trial.go_on(n)
        best = min(going, key=lambda trial: trial.best(n).loss)
        for trial in going:
            if len(trial.parts) == n < n_folds:
                trial.is_out = trial.is_clearly_worse(best, n)
    for trial in trials:
        if len(trial.parts) < n_folds:
            trial.complete(best)


def search(
    predict: Predict, variants: Sequence[Candidate] = (Candidate(),), n_folds: int = 1
) -> tuple[int, list[dict[float, BySpread]]]:
    """Searches for the best variant and data weight. Returns the number of the variant that predicts best,
    and for each variant what the weights tried with it predict, by weight and spread. A weight is judged by
    its best spread.

    All variants are tried on the first fold under the larger of the first weights. Those that are not
    clearly worse are tried under a second weight: a larger one where confidence is too low, which a larger
    weight raises, else the smaller of the first weights. All of these go on through the folds (``race``).
    The best variant goes on alone: to larger weights while they get better, or else to the smaller one, and
    to the usual one if that is better."""
    low, high = FIRST_WEIGHTS
    tried = [{high: Trial(replace(variant, data_weight=high), predict)} for variant in variants]
    for found in tried:
        found[high].go_on(1)
    first = min((found[high] for found in tried), key=lambda trial: trial.loss)
    plain = next(iter(first.parts[0].values()))
    timid = plain.mean("confidence") < plain.mean("right") and STEP * high <= LARGEST_WEIGHT
    second = STEP * high if timid else low
    for found, variant in zip(tried, variants, strict=True):
        if not found[high].is_clearly_worse(first, 1):
            found[second] = Trial(replace(variant, data_weight=second), predict)
    race([trial for found in tried for trial in found.values()], n_folds)

    best = min((trial.loss, n, w) for n, found in enumerate(tried) for w, trial in found.items())
    n, here = best[1], tried[best[1]]

    def gains(weight: float) -> bool:
        """Tries a weight; True if it is better than all those tried before."""
        before = min(here.values(), key=lambda trial: trial.loss)
        here[weight] = Trial(replace(variants[n], data_weight=weight), predict)
        race([before, here[weight]], n_folds)
        return here[weight].loss < before.loss

    better = second in here and here[second].loss < here[high].loss
    if timid and not better:
        gains(low)
    weight = STEP * (second if timid else high)
    if low in here and here[low].loss <= here[high].loss:
        gains(USUAL_WEIGHT)
    elif not timid or better:
        while weight <= LARGEST_WEIGHT and min_doubt(here) >= HALF_AN_ERROR and gains(weight):
            weight *= STEP
    return n, [{w: found[w].after(n_folds) for w in sorted(found)} for found in tried]


def min_doubt(trials: dict[float, Trial]) -> float:
    """Number of errors that the best of some trials expects."""
    return min(trials.values(), key=lambda trial: trial.loss).best().doubt


def penalised(tried: dict[float, BySpread]) -> dict[float, dict[float, float]]:
    """The loss of each spread and weight, increased where the weight is far from the usual one, or the
    spread is narrower than the folds can vouch for."""
    steps = {weight: abs(math.log(weight / USUAL_WEIGHT, STEP)) for weight in tried}
    nearest = tried[min(steps, key=steps.__getitem__)]
    found = {spread: dict[float, float]() for spread in nearest}
    for weight, by_spread in tried.items():
        safe = narrowest_timid(by_spread)
        for spread, at in by_spread.items():
            far = PENALTY * steps[weight] * at.error_of_difference(nearest[spread])
            narrow = CAUTION * max(0.0, math.log((safe / spread) ** 2, STEP))
            found[spread][weight] = at.loss + far + narrow * at.error_of_difference(by_spread[safe])
    return found


def narrowest_timid(by_spread: BySpread) -> float:
    """The narrowest spread under which predictions expect more errors than they make, by half an error or
    more; the widest where there is none."""
    timid = [v for v, at in by_spread.items() if at.doubt >= (at.tokens - at.right).sum() + HALF_AN_ERROR]
    return min(timid, default=max(by_spread))


def lowest(tried: dict[float, BySpread]) -> tuple[float, float]:
    """The weight and the spread with the lowest penalised loss."""
    losses = penalised(tried)
    spread = min(losses, key=lambda spread: min(losses[spread].values()))
    return lowest_weight(losses[spread]), spread


def best_spread(found: BySpread) -> float:
    """The spread with the lowest loss, without caution: for predictions of a thousand tokens or more."""
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
    """The weight among those tried that is nearest to ``weight``."""
    return min(tried, key=lambda w: abs(math.log(w / weight)))


def interpolated(tried: dict[float, Predictions], weight: float) -> Predictions:
    """What a weight between those tried would predict, linear in log weight."""
    weights = list(tried)
    i = max(0, min(int(np.searchsorted(weights, weight)) - 1, len(weights) - 2))
    if len(weights) == 1:
        return tried[weights[0]]
    share = math.log(weight / weights[i]) / math.log(weights[i + 1] / weights[i])
    return tried[weights[i]].mixed(tried[weights[i + 1]], share)
