"""How often the training data should count, and how far draws should lie from the posterior mean, chosen by
predicting left-out training sequences.

Scales that are learned on the bound are too small where sequences are few, and predictions then too timid.
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
from dataclasses import replace
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
from structgp.plan.dense_shape import by_bound, by_regression
from structgp.plan.options import Options
from structgp.plan.resolve import Plan
from structgp.plan.run import Fit
from structgp.plan.start import start_of
from structgp.plan.trials import (
    SPREADS,
    BySpread,
    Candidate,
    Predictions,
    interpolated,
    lowest,
    nearest,
    search,
)

logger = logging.getLogger("structgp.held_out")

N_FOLDS = 3
"""At most; fewer where there are fewer sequences."""

CHEAP, COSTLY = (1_000, 20_000), (500, 2_000)
"""Folds are fitted until they have left out so many tokens, and to so many tokens each, about: for weights
of sparse features, and for the posteriors that cost more. The error of a mean loss over a thousand tokens
is a few hundredths, and the same tokens are used for every weight."""

FEWEST_LEFT_OUT = 50
"""Sequences that a fold leaves out at least, where it has them: about as many sentences as have a thousand
tokens. Tokens of one document are alike, and a thousand may be three documents. On 120 TRAINING
announcements of ``experiments.seminars`` (36,000 tokens), the NLL of 120 others was .0577 where four of
them chose the weight, and .0488 where 40 did."""

ANSWER_DRAWS = 32
"""Draws of the predictions, a quarter of the default's: their error is the same for all weights, and small
beside that of so few tokens. The fits have as many draws as the real one: under a large weight, fewer are
overfitted, and large weights would look worse than they are."""


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
    asked = options.prior.spread
    variants, spreads = (
        _variants(options, plan, examples),
        SPREADS if isinstance(asked, str) else (float(asked),),
    )
    n, searches = search(lambda candidate: folds.predict(candidate, spreads), variants)
    weight, spread = lowest(searches[n])
    near = nearest(searches[n], weight)
    f1, threshold = folds.expected_f1(replace(variants[n], data_weight=near), spread)
    mine = torch.tensor([weight, spread, n, f1, threshold], dtype=torch.float64)
    (agreed,) = together.sum(mine * together.is_first)
    weight, spread, chosen_n, f1, threshold = agreed.tolist()
    best, tried = variants[int(chosen_n)], searches[int(chosen_n)]
    at = interpolated({w: by_spread[spread] for w, by_spread in tried.items()}, weight)
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
    """The settings beside the weight that are compared: both ways to the shape of a kernel on dense
    features; heavy and light tails where all features are one group, and nothing else tells good ones from
    bad ones."""
    if not plan.has_weights:
        return [Candidate()]
    if plan.has_dense:
        # Learned once, on all sequences: a handful of numbers says nothing of single ones.
        seed = torch.Generator().manual_seed(int(options.random_state))
        if examples.split is not None:
            plan, examples = plan.of_tokens(), examples.tokens()
        return [Candidate(shape=way(options, plan, examples, seed)) for way in (by_bound, by_regression)]
    if all(block.kind == "sparse" for block in plan.split.node.blocks):
        return [Candidate(tails=tails) for tails in (HEAVY_TAILS, LIGHT_TAILS)]
    return [Candidate()]


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
        self.n_tried = 0

    def predict(self, candidate: Candidate, spreads: Sequence[float] = (1.0,)) -> BySpread:
        """What all folds predict under a candidate, by spread."""
        self.n_tried += 1
        told = "choosing how often sequences count, by cross-validation: try %d (%g times)"
        logger.info(told, self.n_tried, candidate.data_weight)
        found = [fold.predict(candidate, spreads) for fold in self.folds]
        parts = zip(spreads, zip(*found, strict=True), strict=True)
        return {spread: Predictions(*np.concatenate(sums).T) for spread, sums in parts}

    def expected_f1(self, candidate: Candidate, spread: float) -> tuple[float, float]:
        """The F1 that the folds expect of their best spans under a candidate that was tried, and the
        threshold that leads to it; zeros where labels are not spans. No label is looked at."""
        key = (*candidate.key, spread)
        return expected_f1([spans for fold in self.folds for spans in fold.spans.get(key, ())])


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
        cut = int(np.searchsorted(lengths[fold].cumsum(), enough)) + 1
        fold = fold[: max(cut, FEWEST_LEFT_OUT)]
        if plan.split.next is None or (lengths[rest] > 1).any():  # or transitions had nothing to learn from
            left_out += int(lengths[fold].sum())
            yield sorted(fold.tolist()), sorted(rest.tolist())


class Fold:
    """One part of the data. Every candidate is fitted from nothing, as the real fit will be: learning of
    scales ends before they settle, so where it ends depends on where it began. judged : of each sequence
    left out, (T,) which tokens count. spans : by candidate and spread, of each sequence left out, its spans
    with their probabilities, where labels are spans."""

    def __init__(
        self, options: Options, plan: Plan, examples: Examples, left_out: list[int], rest: list[int]
    ) -> None:
        optimizer = plan.optimizer.value
        assert isinstance(optimizer, SecondOrder)
        # What comes after the scales have been learned hardly moves predictions.
        shorter = replace(optimizer, max_rounds=min(optimizer.max_rounds, optimizer.learning_rounds))
        self.plan = replace(plan, optimizer=replace(plan.optimizer, value=shorter), trial=True)
        self.options, self.examples, self.left_out = options, examples.part(rest), examples.part(left_out)
        self.spans: dict[tuple[Any, ...], list[list[tuple[int, int, str, float]]]] = {}
        known = self.examples.label_counts > 0
        self.judged = [(y >= 0) & known[np.maximum(y, 0)] for y in self.left_out.y]

    def predict(self, candidate: Candidate, spreads: Sequence[float]) -> list[np.ndarray]:
        """Under each spread, (N, 6) the sums of ``Predictions`` for each sequence left out; where the fit
        fails, as bad as can be."""
        try:
            model = self._fitted(candidate)
        except torch.linalg.LinAlgError:
            nothing = [np.zeros((len(judged), self.examples.n_labels)) for judged in self.judged]
            return [self._judge(nothing)] * len(spreads)
        question, sums = Question(ANSWER_DRAWS, None, self.plan.device.value), []
        asked = Asked(replace(model, spread=1.0), question, self.left_out.rows, self.left_out.links)
        asked = asked.keeping()
        for spread in spreads:
            here = asked if spread == 1 else asked.narrowed(spread)
            sums.append(self._judge(here.marginals()))
            if self.plan.threshold is not None:
                key = (*candidate.key, spread)
                self.spans[key] = here.spans(LEAST_COUNTED)
        return sums

    def _judge(self, marginals: list[np.ndarray]) -> np.ndarray:
        none: list[Any] = [None] * len(marginals)
        evidence = none if self.left_out.evidence is None else self.left_out.evidence
        parts = zip(marginals, self.left_out.y, self.judged, evidence, strict=True)
        sums = np.array([sums_of(*part) for part in parts])
        weights = self.left_out.weights
        return sums if weights is None else weights[:, None] * sums

    def _fitted(self, candidate: Candidate) -> Model:
        weight = Choice[float | None](candidate.data_weight, "tried")
        plan = replace(self.plan, data_weight=weight, shape=candidate.shape, tails=candidate.tails)
        generator = torch.Generator().manual_seed(int(self.options.random_state))
        start = start_of(self.options, plan, self.examples, generator)
        fit = Fit(self.options, self.examples, start, generator)
        fit.train(start.plan, on_fresh_draws=False)
        return fit.model({})


def sums_of(
    p: np.ndarray, y: np.ndarray, judged: np.ndarray, evidence: np.ndarray | None = None
) -> list[float]:
    """Of tokens with label probabilities p (T, V) and labels y (T,), negative where they are missing.
    evidence : (T, V) what annotators' labels say in the place of y. The loss is then that of their labels,
    up to a constant, and a prediction is right as often as they and p together make it."""
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
