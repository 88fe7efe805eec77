"""How often the training data should count, chosen by predicting left-out training sequences.

Scales that are learned on the bound are too small where sequences are few, and predictions then too timid.
Counting every sequence eta times, p(w) prod_n p(y_n | x_n, w)^eta, outweighs the prior and lets larger
scales be learned. eta is chosen by cross-validation within the training set, with all scales learned anew
in each fold. The same folds tell how confident and how often right the model is on tokens that it has not
seen.

A ``Candidate`` is a setting to be tried, ``Folds`` predict what they leave out under it, and ``search``
decides which candidates to try and which one to take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from structgp.answers.ask import Asked, Question
from structgp.data.examples import Examples
from structgp.gp.kernels.relevance import HEAVY_TAILS, LIGHT_TAILS
from structgp.inference import SecondOrder
from structgp.inference.distributed import ALONE, Processes
from structgp.plan.choices import Choice
from structgp.plan.dense_shape import DenseShape, by_bound, by_regression
from structgp.plan.options import Options
from structgp.plan.resolve import Plan
from structgp.plan.run import Fit
from structgp.plan.start import start_of

FIRST_WEIGHTS, USUAL_WEIGHT, STEP, LARGEST_WEIGHT = (1.0, 8.0), 2.0, 4.0, 2048.0
"""Weights that are tried first; one between them, which is tried if the first is better; the factor from
one to the next larger one, tried while they get better; and a limit. On left-out TRAINING sequences of six
tasks, the best weight was mostly from 2 to 6."""

PENALTY = 0.5
"""Standard errors that a weight has to be better by for each factor ``STEP`` between it and the usual one:
from a handful of tokens one cannot tell much. Not chosen on data."""

N_FOLDS = 3
"""At most; fewer where there are fewer sequences."""

CHEAP, COSTLY = (1_000, 20_000), (500, 2_000)
"""Folds are fitted until they have left out so many tokens, and to so many tokens each, about: for weights
of sparse features, and for the posteriors that cost more. The error of a mean loss over a thousand tokens
is a few hundredths, and the same tokens are used for every weight."""

ANSWER_DRAWS = 32
"""Draws of the predictions, a quarter of the default's: their error is the same for all weights, and small
beside that of so few tokens. The fits have as many draws as the real one: under a large weight, fewer are
overfitted, and large weights would look worse than they are."""

LEAST_GAP, STANDARD_ERRORS = 0.02, 2.0
"""Confidence is called too low or too high if it differs from accuracy by more than both."""


@dataclass(frozen=True)
class Candidate:
    """A setting to be tried. data_weight : how often every training sequence counts. shape : of the kernel
    on dense features, None where there are none. tails : degrees of freedom of sparse features' weights,
    None for the usual ones."""

    data_weight: float = 1.0
    shape: DenseShape | None = None
    tails: float | None = None

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


def choose(
    options: Options, plan: Plan, examples: Examples, together: Processes = ALONE
) -> tuple[Plan, dict[str, Any] | None]:
    """The plan with its data weight chosen, and what was found, for the log; the plan as it is and None
    where it leaves nothing open. The same for the same data and ``random_state``. Several processes all
    choose, and all take what the first one has chosen."""
    if plan.data_weight.value is not None:
        return plan, None
    began = time.monotonic()
    folds = Folds(options, plan, examples)
    if not folds.n_judged:
        nothing = "no label occurs in two parts of the training data"
        return replace(plan, data_weight=Choice(1.0, nothing)), None
    variants = _variants(options, plan, examples)
    n, searches = search(folds.predict, variants)
    mine = torch.tensor([lowest(penalised(searches[n])), float(n)], dtype=torch.float64)
    (agreed,) = together.sum(mine * together.is_first)
    weight, n = float(agreed[0]), int(agreed[1])
    best, tried = variants[n], searches[n]
    at = interpolated(tried, weight)
    found = {
        "token_nll": at.loss,
        "token_error": 1 - at.mean("right"),
        "confidence": at.mean("confidence"),
        "accuracy": at.mean("right"),
        "verdict": at.verdict,
        "error_ratio": list(at.error_ratio),
        "n_tokens": folds.n_judged,
        "n_folds": len(folds.folds),
        "tried": [
            {"data_weight": weight, "token_nll": p.loss} | variant.told
            for variant, tried in zip(variants, searches, strict=True)
            for weight, p in tried.items()
        ],
        "seconds": time.monotonic() - began,
    }
    reason = f"predicts left-out training data best: {folds.n_judged} tokens in {len(folds.folds)} folds"
    chosen = Choice[float | None](weight, reason)
    return replace(plan, data_weight=chosen, shape=best.shape, tails=best.tails), found


def _variants(options: Options, plan: Plan, examples: Examples) -> list[Candidate]:
    """The settings beside the weight that are compared: both ways to the shape of a kernel on dense
    features; heavy and light tails where all features are one group, and nothing else tells good ones from
    bad ones."""
    if not plan.has_weights:
        return [Candidate()]
    if plan.has_dense:
        # Learned once, on all sequences: a handful of numbers says nothing of single ones.
        seed = torch.Generator().manual_seed(int(options.random_state))
        return [Candidate(shape=way(options, plan, examples, seed)) for way in (by_bound, by_regression)]
    if all(block.kind == "sparse" for block in plan.split.node.blocks):
        return [Candidate(tails=tails) for tails in (HEAVY_TAILS, LIGHT_TAILS)]
    return [Candidate()]


def search(
    predict: Callable[[Candidate], Predictions], variants: Sequence[Candidate] = (Candidate(),)
) -> tuple[int, list[dict[float, Predictions]]]:
    """What weights predict under each variant, by weight, and the number of the variant that predicts best:
    all of them under the first weights, then the best one under the usual weight, or under larger ones
    while they get better."""
    tried = [{w: predict(replace(variant, data_weight=w)) for w in FIRST_WEIGHTS} for variant in variants]
    n = int(np.argmin([min(p.loss for p in found.values()) for found in tried]))
    here, (low, high) = tried[n], FIRST_WEIGHTS
    best, weight = here[high].loss, STEP * high
    if here[low].loss <= best:
        here[USUAL_WEIGHT] = predict(replace(variants[n], data_weight=USUAL_WEIGHT))
        weight = math.inf
    while weight <= LARGEST_WEIGHT:
        here[weight] = found = predict(replace(variants[n], data_weight=weight))
        if not found.loss < best:
            break
        best, weight = found.loss, STEP * weight
    tried[n] = dict(sorted(here.items()))
    return n, tried


def penalised(tried: dict[float, Predictions]) -> dict[float, float]:
    """Of each weight, its loss, more where it is far from the usual one."""
    steps = {weight: abs(math.log(weight / USUAL_WEIGHT, STEP)) for weight in tried}
    nearest = tried[min(steps, key=steps.__getitem__)]
    errors = {weight: at.error_of_difference(nearest) for weight, at in tried.items()}
    return {weight: at.loss + PENALTY * steps[weight] * errors[weight] for weight, at in tried.items()}


def lowest(losses: dict[float, float]) -> float:
    """The weight at which a parabola in log weight through the best one and its neighbours is lowest, to
    three digits; the best one itself where it is the first or the last."""
    weights, values = list(losses), list(losses.values())
    i = int(np.argmin(values))
    if not 0 < i < len(values) - 1:
        return weights[i]
    x = np.log(weights[i - 1 : i + 2])
    a, b, _ = np.polyfit(x, values[i - 1 : i + 2], 2)
    return float(f"{np.exp(np.clip(-b / (2 * a), x[0], x[2])):.3g}")


def interpolated(tried: dict[float, Predictions], weight: float) -> Predictions:
    """What a weight between those tried would predict, linear in log weight."""
    weights = list(tried)
    i = max(0, min(int(np.searchsorted(weights, weight)) - 1, len(weights) - 2))
    if len(weights) == 1:
        return tried[weights[0]]
    share = math.log(weight / weights[i]) / math.log(weights[i + 1] / weights[i])
    return tried[weights[i]].mixed(tried[weights[i + 1]], share)


class Folds:
    """Fits to parts of the training data, each of which leaves out a fold. n_judged : left-out tokens that
    have a label, one which occurs in the rest too."""

    def __init__(self, options: Options, plan: Plan, examples: Examples) -> None:
        self.folds = []
        for n, parts in enumerate(_parts(options, plan, examples), 1):
            # Draws of its own in each fold, so that their errors average out, and the same ones for all
            # candidates.
            seed = (int(options.random_state) + n) % 2**63
            self.folds.append(Fold(replace(options, random_state=seed), plan, examples, *parts))
        self.n_judged = sum(int(judged.sum()) for fold in self.folds for judged in fold.judged)

    def predict(self, candidate: Candidate) -> Predictions:
        """What all folds predict under a candidate."""
        found = [fold.predict(candidate) for fold in self.folds]
        return Predictions(*np.concatenate(found).T)


def _parts(options: Options, plan: Plan, examples: Examples) -> Iterator[tuple[list[int], list[int]]]:
    """Of each fold, the sequences that it leaves out, and those that it is fitted to."""
    lengths = np.array([len(rows) for rows in examples.rows])
    order = np.random.default_rng(int(options.random_state)).permutation(np.flatnonzero(lengths))
    enough, most = CHEAP if plan.has_weights and not plan.has_dense else COSTLY
    left_out = 0
    for fold in np.array_split(order, min(N_FOLDS, len(order))):
        if left_out >= enough:
            return
        rest = order[~np.isin(order, fold)]
        rest = rest[: int(np.searchsorted(lengths[rest].cumsum(), most)) + 1]
        fold = fold[: int(np.searchsorted(lengths[fold].cumsum(), enough)) + 1]
        if plan.split.next is None or (lengths[rest] > 1).any():  # or transitions had nothing to learn from
            left_out += int(lengths[fold].sum())
            yield sorted(fold.tolist()), sorted(rest.tolist())


class Fold:
    """One part of the data. Every candidate is fitted from nothing, as the real fit will be: learning of
    scales ends before they settle, so where it ends depends on where it began. judged : of each sequence
    left out, (T,) which tokens count."""

    def __init__(
        self, options: Options, plan: Plan, examples: Examples, left_out: list[int], rest: list[int]
    ) -> None:
        optimizer = plan.optimizer.value
        assert isinstance(optimizer, SecondOrder)
        # What comes after the scales have been learned hardly moves predictions.
        shorter = replace(optimizer, max_rounds=min(optimizer.max_rounds, optimizer.learning_rounds))
        self.plan = replace(plan, optimizer=replace(plan.optimizer, value=shorter), trial=True)
        self.options, self.examples, self.left_out = options, examples.part(rest), examples.part(left_out)
        known = self.examples.label_counts > 0
        self.judged = [(y >= 0) & known[np.maximum(y, 0)] for y in self.left_out.y]

    def predict(self, candidate: Candidate) -> np.ndarray:
        """(N, 6) the sums of ``Predictions`` for each sequence left out; where the fit fails, as bad as can
        be."""
        try:
            marginals = self._marginals(candidate)
        except torch.linalg.LinAlgError:
            marginals = [np.zeros((len(judged), self.examples.n_labels)) for judged in self.judged]
        parts = zip(marginals, self.left_out.y, self.judged, strict=True)
        sums = np.array([_sums(p, y, judged) for p, y, judged in parts])
        weights = self.left_out.weights
        return sums if weights is None else weights[:, None] * sums

    def _marginals(self, candidate: Candidate) -> list[np.ndarray]:
        weight = Choice[float | None](candidate.data_weight, "tried")
        plan = replace(self.plan, data_weight=weight, shape=candidate.shape, tails=candidate.tails)
        generator = torch.Generator().manual_seed(int(self.options.random_state))
        start = start_of(self.options, plan, self.examples, generator)
        fit = Fit(self.options, self.examples, start, generator)
        fit.train(start.plan, on_fresh_draws=False)
        question = Question(ANSWER_DRAWS, None, plan.device.value)
        return Asked(fit.model({}), question, self.left_out.rows).marginals()


def _sums(p: np.ndarray, y: np.ndarray, judged: np.ndarray) -> list[float]:
    """Of tokens with label probabilities p (T, V) and labels y (T,), negative where they are missing."""
    p = np.where(np.isfinite(p), p, 0.0)  # a weight under which the fit went astray is not chosen
    unseen = (y >= 0) & ~judged
    doubt = (1 - p[unseen].max(1)).sum()
    p, y = p[judged], y[judged]
    loss = -np.log(np.maximum(p[np.arange(len(y)), y], 1e-300))
    return [len(y), loss.sum(), p.max(1).sum(), (p.argmax(1) == y).sum(), unseen.sum(), doubt]
