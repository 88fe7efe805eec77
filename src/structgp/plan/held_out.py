"""Chooses how often the training data should count, and how far draws should lie from the posterior mean,
by predicting left-out training sequences.

Where sequences are few, scales that are learned on the bound are too small, and predictions underconfident.
Counting every sequence eta times, p(w) prod_n p(y_n | x_n, w)^eta, outweighs the prior and lets larger
scales be learned. eta is chosen by cross-validation within the training set, with all scales learned anew
in each fold. Where even then the draws differ too much from each other, as on tasks whose labels follow
from the features without exception, they are brought closer to the posterior mean; that needs no fit of its
own. The same folds tell how confident and how often right the model is on tokens that it has not seen.

``Folds`` predict what they leave out under a candidate; ``plan.trials`` decides which candidates to try and
which one to take."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from structgp.answers.ask import Asked, Model, Question
from structgp.answers.best_spans import LEAST_COUNTED, expected_f1
from structgp.data.examples import Examples
from structgp.gp.kernels.relevance import HEAVY_TAILS, LIGHT_TAILS
from structgp.inference import SecondOrder
from structgp.inference.distributed import ALONE, Processes
from structgp.plan.choices import Choice
from structgp.plan.dense_shape import ways
from structgp.plan.first_round import FirstRound
from structgp.plan.learning_curve import USUAL, Curve
from structgp.plan.options import Options
from structgp.plan.resolve import Plan
from structgp.plan.run import Fit
from structgp.plan.start import KernelOnce, start_of
from structgp.plan.trials import (
    SPREADS,
    BySpread,
    Candidate,
    Predictions,
    best_spread,
    interpolated,
    joined,
    lowest,
    nearest,
    search,
)

logger = logging.getLogger("structgp.held_out")

N_FOLDS, MOST_FOLDS = 3, 10
"""Number of folds for training sets that have enough tokens (``CHEAP``, ``COSTLY``, ``DENSE``), and for
those with half as many or fewer, which are quick to fit. Fits to two thirds of 20 sequences choose weights
and spreads for less data than there is: on training sets of 20 generated product titles (not those of
``experiments.few``), the NLL of other titles was .333 with 3 folds and .300 with 10, and confidence was
.048 and .030 below accuracy."""

HALVED = 2
"""Largest number of folds that tell the learning curve: a third one moved estimates by a hundredth."""

CHEAP, COSTLY, DENSE = (1_000, 20_000), (1_000, 2_000), (500, 2_000)
"""Number of left-out tokens at which there are enough folds, and number of tokens that each is fitted to,
about: for weights of sparse features; for values at inducing inputs, whose fits cost more, but are judged
on the same tokens, so that what is expected of two kernels can be compared; and for weights of dense
features. The error of a mean loss over a thousand tokens is a few hundredths, and the same tokens are used
for every data weight."""

FEWEST_LEFT_OUT = 50
"""Least number of sequences that a fold leaves out, where it has as many: about as many sentences as have a
thousand tokens. Tokens of one document are alike, and a thousand may be three documents. On 120 TRAINING
announcements of ``experiments.seminars`` (36,000 tokens), the NLL of 120 others was .0577 where the data
weight was chosen on four announcements, and .0488 where it was chosen on 40."""

ANSWER_DRAWS = 32
"""Number of draws in the predictions of weights of dense features, and of links, which come from joint
draws: fewer than by default. So few draws raise the loss, by a tenth where many labels are rare. Label
probabilities therefore come without joint draws where those of the fitted model will
(``answers.local_points``), and values at inducing inputs have as many draws as the fitted model, or other
kernels would seem better than theirs. The fits have as many draws as the real one: under a large data
weight, fewer draws are overfitted, and large weights would look worse than they are."""


def choose(
    options: Options, plan: Plan, examples: Examples, together: Processes = ALONE
) -> tuple[Plan, dict[str, Any] | None]:
    """The plan with its data weight chosen, and what was found, for the log; the plan as it is and None
    where it leaves nothing open. The result is the same for the same data and ``random_state``. Each of
    several processes goes through the choice, and all take what the first one has chosen."""
    if plan.data_weight.value is not None:
        return plan, None
    began = time.monotonic()
    folds = Folds(options, plan, examples)
    if not folds.n_judged:
        nothing = "no label occurs in two parts of the training data"
        return replace(plan, data_weight=Choice(1.0, nothing)), None
    asked = options.prior.spread
    variants, spreads = (
        _variants(options, plan, examples),
        SPREADS if isinstance(asked, str) else (float(asked),),
    )
    n, searches = search(partial(folds.predict, spreads), variants, len(folds.folds))
    weight, spread = lowest(searches[n])
    near = nearest(searches[n], weight)
    again = folds.look_again(replace(variants[n], data_weight=near), searches[n][near], spread)
    spread = spread if again is None else best_spread(again)
    f1, threshold = folds.expected_f1(replace(variants[n], data_weight=near), spread)
    mine = torch.tensor([weight, spread, n, f1, threshold], dtype=torch.float64)
    (agreed,) = together.sum(mine * together.is_first)
    weight, spread, chosen_n, f1, threshold = agreed.tolist()
    best, tried = variants[int(chosen_n)], searches[int(chosen_n)]
    at = interpolated({w: by_spread[spread] for w, by_spread in tried.items()}, weight)
    at = at if again is None else again[spread]
    curve = folds.curve(replace(best, data_weight=nearest(tried, weight)), spread) or USUAL
    shrinks = curve.shrinks(folds.n_fitted, examples.n_tokens)
    found = {
        "token_nll": shrinks * at.loss,
        "token_error": shrinks * (1 - at.mean("right")),
        "learning_curve": {"nll_of_folds": at.loss, "slope": curve.slope, "error": curve.error},
        "confidence": at.mean("confidence"),
        "accuracy": at.mean("right"),
        "verdict": at.verdict,
        "error_ratio": list(at.error_ratio),
        "n_tokens": folds.n_judged,
        "n_folds": len(folds.folds),
        "tried": [
            {"data_weight": w, "spread": v, "token_nll": p.loss} | variant.told
            for variant, by_weight in zip(variants, searches, strict=True)
            for w, by_spread in by_weight.items()
            for v, p in by_spread.items()
        ],
        "seconds": time.monotonic() - began,
    }
    if plan.threshold is not None and threshold:
        reason = f"half of the expected F1 of left-out training data, {f1:.1%}"
        plan = replace(plan, threshold=Choice(threshold, reason))
        found["expected_f1"] = f1
    reason = f"predicts left-out training data best: {folds.n_judged} tokens in {len(folds.folds)} folds"
    chosen, narrowed = Choice[float | None](weight, reason), Choice(spread, reason)
    return replace(plan, data_weight=chosen, spread=narrowed, shape=best.shape, tails=best.tails), found


def _variants(options: Options, plan: Plan, examples: Examples) -> list[Candidate]:
    """The settings that are compared beside the data weight: the ways of learning the shape of a kernel on
    dense features (``ways``); or heavy and light tails, where all features are one group and nothing else
    tells good ones from bad ones."""
    if not plan.has_weights:
        return [Candidate()]
    if plan.has_dense:
        # Learned once, on all sequences: a handful of numbers says nothing about single sequences.
        seed = torch.Generator().manual_seed(int(options.random_state))
        if examples.split is not None:
            plan, examples = plan.of_tokens(), examples.tokens()
        return [Candidate(shape=way(options, plan, examples, seed)) for way in ways(examples)]
    if all(block.kind == "sparse" for block in plan.split.node.blocks):
        return [Candidate(tails=tails) for tails in (HEAVY_TAILS, LIGHT_TAILS)]
    return [Candidate()]


class Folds:
    """Fits to parts of the training data, each of which leaves out a fold. n_judged : number of left-out
    tokens whose label is known and occurs in the rest too. n_fitted : number of tokens that a fold is
    fitted to, on average. further : folds beyond those that have left out enough, where features are
    dense."""

    def __init__(self, options: Options, plan: Plan, examples: Examples) -> None:
        self.folds: list[Fold] = []
        self.further: list[Fold] = []
        for n, (*parts, is_needed) in enumerate(_parts(options, plan, examples), 1):
            # Each fold has draws of its own, so that their errors average out; they are the same for all
            # candidates.
            seed = (int(options.random_state) + n) % 2**63
            left_out, rest = map(examples.part, parts)
            where = self.folds if is_needed else self.further
            where.append(Fold(replace(options, random_state=seed), shorter(plan), rest, left_out))
        self.folds.sort(key=lambda fold: not fold.n_judged)  # the first one has to tell candidates apart
        self.n_halved = min(HALVED, len(self.folds))
        self.n_fitted = float(np.mean([fold.examples.n_tokens for fold in self.folds] or [0]))
        self.n_tried = 0

    def predict(self, spreads: Sequence[float], candidate: Candidate, k: int) -> BySpread:
        """What fold k predicts under a candidate, by spread."""
        self.n_tried += 1
        told = "choosing how often sequences count, by cross-validation: try %d (%g times, fold %d)"
        logger.info(told, self.n_tried, candidate.data_weight, k + 1)
        found = self.folds[k].predict(candidate, spreads)
        return {spread: Predictions(*sums.T) for spread, sums in zip(spreads, found, strict=True)}

    @property
    def n_judged(self) -> int:
        return sum(fold.n_judged for fold in self.folds)

    def look_again(self, candidate: Candidate, found: BySpread, spread: float) -> BySpread | None:
        """What was found under a candidate, joined with the predictions of the further folds, which from
        then on belong to the folds. None where there are no further folds, or the chosen spread is already
        the one with the lowest loss: a second look is worth its fits only where caution decided. On digit
        strings of ``experiments.digits`` (seeds 100 and 101), the spreads that the first fold alone chose
        were too wide."""
        if not self.further or spread == best_spread(found):
            return None
        parts = [fold.predict(candidate, list(found)) for fold in self.further]
        self.folds, self.further = self.folds + self.further, []
        looked = zip(found.items(), zip(*parts, strict=True), strict=True)
        return {v: joined([before, *(Predictions(*of.T) for of in sums)]) for (v, before), sums in looked}

    def expected_f1(self, candidate: Candidate, spread: float) -> tuple[float, float]:
        """The F1 that the folds expect of their best spans under a candidate that was tried, and the
        threshold that leads to it; zeros where labels are not spans. It does not look at the true
        labels."""
        key = (*candidate.key, spread)
        kept = (fold.answers[key].spans for fold in self.folds if key in fold.answers)
        return expected_f1([spans for each in kept for spans in each])

    def curve(self, candidate: Candidate, spread: float) -> Curve | None:
        """The learning curve under a candidate that was tried: its losses are compared with those of fits
        to half as much, on the same tokens, those whose label the latter have seen. None where there is
        nothing to halve. Cost: a fit to half of a fold's tokens for each of ``HALVED`` folds."""
        logger.info("choosing how often sequences count, by cross-validation: fits to half as much")
        key, few, many, tokens = (*candidate.key, spread), [], [], []
        asked = [fold for fold in self.folds[: self.n_halved] if key in fold.answers]
        for fold, part in ((fold, fold.half()) for fold in asked):
            if part is not None:
                few.append(part.predict(candidate, (spread,))[0])
                many.append(fold.judge(fold.answers[key].marginals, part.judged))
                tokens.append((part.examples.n_tokens, fold.examples.n_tokens))
        if not few:
            return None
        half, whole = (Predictions(*np.concatenate(sums).T) for sums in (few, many))
        return Curve.through(half, whole, *np.mean(tokens, axis=0).tolist())


def _parts(options: Options, plan: Plan, examples: Examples) -> Iterator[tuple[list[int], list[int], bool]]:
    """Yields for each fold the sequences that it leaves out, those that it is fitted to, and whether it is
    needed, because those before it have not left out enough."""
    lengths = np.array([len(rows) for rows in examples.rows])
    order = np.random.default_rng(int(options.random_state)).permutation(np.flatnonzero(lengths))
    enough, most = DENSE if plan.has_dense else CHEAP if plan.has_weights else COSTLY
    left_out = 0
    for fold in np.array_split(order, _n_folds(lengths, enough)):
        if left_out >= enough and not plan.has_dense:
            return
        rest = order[~np.isin(order, fold)]
        rest = rest[: int(np.searchsorted(lengths[rest].cumsum(), most)) + 1]
        cut = int(np.searchsorted(lengths[fold].cumsum(), enough)) + 1
        fold = fold[: max(cut, FEWEST_LEFT_OUT)]
        if _can_learn(plan, lengths[rest]):
            yield sorted(fold.tolist()), sorted(rest.tolist()), left_out < enough
            left_out += int(lengths[fold].sum())


def _n_folds(lengths: np.ndarray, enough: int) -> int:
    """Number of parts that sequences of these lengths are cut into, at most one per sequence."""
    lacking = min(1.0, max(0.0, enough / max(1, lengths.sum()) - 1))
    return min(round(N_FOLDS + lacking * (MOST_FOLDS - N_FOLDS)), int(np.count_nonzero(lengths)))


def shorter(plan: Plan) -> Plan:
    """The plan of a trial, which ends when the scales have been learned: later rounds hardly change
    predictions. Where the fit does not learn the kernel, only the scale of transitions moves, and trials
    are ``brief``."""
    optimizer = plan.optimizer.value
    assert isinstance(optimizer, SecondOrder)
    rounds = min(optimizer.max_rounds, optimizer.learning_rounds)
    brief = optimizer.brief or optimizer.learn_scales in (False, "transitions")
    value = replace(optimizer, max_rounds=rounds, brief=brief)
    return replace(plan, optimizer=replace(plan.optimizer, value=value), trial=True)


def _can_learn(plan: Plan, lengths: Sequence[int] | np.ndarray) -> bool:
    """True unless transitions have features and sequences of these lengths leave them nothing to learn
    from."""
    return plan.split.next is None or max(lengths) > 1


@dataclass(frozen=True)
class Answers:
    """Answers for each left-out sequence. marginals : (T, V) label probabilities. spans : spans with their
    probabilities; none where labels are not spans."""

    marginals: list[np.ndarray]
    spans: list[list[tuple[int, int, str, float]]]


class Fold:
    """A part of the data that is left out, and fits to the rest. Every candidate is fitted from nothing, as
    the real fit will be: learning of scales ends before they settle, so where it ends depends on where it
    began. judged : for each left-out sequence, (T,) which tokens count. answers : those that were given, by
    candidate and spread."""

    def __init__(self, options: Options, plan: Plan, rest: Examples, left_out: Examples) -> None:
        self.options, self.plan, self.examples, self.left_out = options, plan, rest, left_out
        self.answers: dict[tuple[Any, ...], Answers] = {}
        self._begun: dict[float, FirstRound] = {}
        self._kernel = KernelOnce()
        known = rest.label_counts > 0
        self.judged = [(y >= 0) & known[np.maximum(y, 0)] for y in self.left_out.y]

    @property
    def n_judged(self) -> int:
        """Number of tokens that count, in sequences whose weight is above 0."""
        found, weights = np.array([judged.sum() for judged in self.judged]), self.left_out.weights
        return int((found if weights is None else found[weights > 0]).sum())

    def predict(self, candidate: Candidate, spreads: Sequence[float]) -> list[np.ndarray]:
        """For each spread, (N, 6) the sums of ``Predictions`` for each left-out sequence; as bad as can be
        where the fit fails."""
        try:
            model = self.fitted(candidate)
        except torch.linalg.LinAlgError:
            nothing = [np.zeros((len(judged), self.examples.n_labels)) for judged in self.judged]
            return [self.judge(nothing, self.judged)] * len(spreads)
        sums = []
        for spread, asked in zip(spreads, self._asked(model, spreads), strict=True):
            spans = [] if self.plan.threshold is None else asked.decoded_spans(LEAST_COUNTED)
            key, found = (*candidate.key, spread), Answers(asked.marginals(), spans)
            self.answers[key] = found
            sums.append(self.judge(found.marginals, self.judged))
        return sums

    def _asked(self, model: Model, spreads: Sequence[float]) -> Iterator[Asked]:
        """Yields the left-out sequences under each spread: answered as the fitted model will answer, where
        that takes no joint draws, else by the same few draws."""
        n_draws = ANSWER_DRAWS if self.plan.has_weights else model.n_draws
        question = Question(n_draws, None, self.plan.device.value, local=self.options.local)

        def under(spread: float) -> Asked:
            return Asked(replace(model, spread=spread), question, self.left_out.rows, self.left_out.links)

        first = under(1.0)
        quick = first.local_points()
        if quick is not None:
            for spread in spreads:
                asked = under(spread)
                vars(asked.model)["local_points"] = quick.under(spread)
                yield asked
            return
        kept = first.keeping()
        for spread in spreads:
            yield kept if spread == 1 else kept.narrowed(spread)

    def half(self) -> Fold | None:
        """The fold that leaves out the same sequences, with about half as many tokens to fit to, drawn at
        random; None where halving leaves out nothing, or leaves nothing to learn from."""
        rest, plan = self.examples, self.plan
        order = np.random.default_rng(int(self.options.random_state)).permutation(len(rest.rows))
        ends = np.cumsum([len(rest.rows[i]) for i in order])
        some = sorted(order[: int(np.searchsorted(ends, ends[-1] / 2)) + 1].tolist())
        if len(some) == len(order) or not _can_learn(plan, [len(rest.rows[i]) for i in some]):
            return None
        return Fold(self.options, plan, rest.part(some), self.left_out)

    def judge(self, marginals: list[np.ndarray], judged: list[np.ndarray]) -> np.ndarray:
        """(N, 6) the sums of ``Predictions`` for each left-out sequence, over the tokens that count."""
        none: list[Any] = [None] * len(marginals)
        evidence = none if self.left_out.evidence is None else self.left_out.evidence
        parts = zip(marginals, self.left_out.y, judged, evidence, strict=True)
        sums = np.array([sums_of(*part) for part in parts])
        weights = self.left_out.weights
        return sums if weights is None else weights[:, None] * sums

    def fitted(self, candidate: Candidate) -> Model:
        """The model that is fitted to the rest under a candidate."""
        weight = Choice[float | None](candidate.data_weight, "tried")
        plan = replace(self.plan, data_weight=weight, shape=candidate.shape, tails=candidate.tails)
        generator = torch.Generator().manual_seed(int(self.options.random_state))
        start = start_of(self.options, plan, self.examples, generator, self._kernel)
        fit = Fit(self.options, self.examples, start, generator)
        begun = None
        if candidate.tails is not None and self.examples.given is None:
            begun = self._begun.setdefault(candidate.data_weight, FirstRound())
        fit.train(start.plan, kept=begun, on_fresh_draws=False)
        return fit.model({})


def sums_of(
    p: np.ndarray, y: np.ndarray, judged: np.ndarray, evidence: np.ndarray | None = None
) -> list[float]:
    """The sums of ``Predictions`` over the tokens of a sequence. p : (T, V) label probabilities. y : (T,)
    labels, negative where they are missing. judged : (T,) which tokens count. evidence : (T, V) what
    annotators' labels say, in place of y. The loss is then that of their labels, up to a constant, and a
    prediction is right with the probability that their labels and p together give it."""
    p = np.where(np.isfinite(p), p, 0.0)  # a weight under which the fit went astray is not chosen
    unseen = (y >= 0) & ~judged
    doubt = (1 - p[unseen].max(1)).sum()
    p, y = p[judged], y[judged]
    if evidence is not None and len(y):
        told = evidence[judged]
        both = p * np.exp(told - told.max(1, keepdims=True))
        whole = np.maximum(both.sum(1), 1e-300)
        right = both[np.arange(len(y)), p.argmax(1)] / whole
        loss = -np.log(whole).sum()
        return [len(y), loss, p.max(1).sum(), right.sum(), unseen.sum(), doubt]
    loss = -np.log(np.maximum(p[np.arange(len(y)), y], 1e-300))
    return [len(y), loss.sum(), p.max(1).sum(), (p.argmax(1) == y).sum(), unseen.sum(), doubt]
