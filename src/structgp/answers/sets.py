"""Calibrates a model on labelled sequences, and gives its sets of labels, spans and labellings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from structgp.answers.ask import Asked
from structgp.answers.best_spans import LEAST_COUNTED
from structgp.answers.conformal import KINDS, Calibration, Targets, Thresholds, label_scores, label_sets
from structgp.errors import InputError
from structgp.evaluation import metrics

MOST_LABELLINGS = 50
"""Most labellings in a set."""

ABILITIES = {"tokens": None, "spans": "has_spans", "labellings": "has_n_best"}
"""The ability that a structure needs for each kind of sets."""


def calibrated(asked: Asked, y: Sequence[Sequence[str]], kinds: Sequence[str] | None) -> Calibration:
    """The calibration of the model's probabilities against the true labels y. kinds : None for all kinds of
    sets that the structure can give."""
    structure, asked_for = asked.model.structure, kinds is not None
    if kinds is None:
        kinds = [k for k, name in ABILITIES.items() if name is None or getattr(structure, name)]
    scores = {"tokens": _token_scores, "spans": _span_scores, "labellings": _labelling_scores}
    kinds = list(kinds)
    if not kinds:
        raise InputError("of", "nothing to calibrate for", f"use one of {', '.join(map(repr, KINDS))}")
    for kind in kinds:
        check_kind(kind)
    there = [i for i, rows in enumerate(asked.rows) if len(rows)]
    if not there:
        raise InputError("X", "no tokens to calibrate with", "pass labelled sequences")
    targets = {}
    for kind in kinds:
        try:
            found = list(scores[kind](asked, y))
        except InputError:  # some example has a program that cannot answer this
            if asked_for or kind == "tokens":
                raise
            continue
        targets[kind] = Targets.of([found[i] for i in there])
    lengths = np.array([len(asked.rows[i]) for i in there])
    quartiles = tuple(asked.model.info.get("length_quartiles", ()))
    return Calibration(lengths, targets, quartiles, settings(asked))


def settings(asked: Asked) -> dict[str, Any]:
    """The settings that probabilities depend on, beside the model and the sequences."""
    question, shift = asked.question, asked.question.shift
    settings = {"n_draws": question.n_draws, "shift": None if shift is None else shift.tolist()}
    is_local = question.local and asked.model.local_points is not None
    return settings | ({"local": True} if is_local else {})


def _draws(settings: Mapping[str, Any]) -> str:
    """The value of ``n_draws`` that leads to these settings."""
    number = settings.get("n_draws")
    return f"'auto' ({number} draws)" if settings.get("local") else str(number)


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise InputError("of", f"{kind!r} is not known", f"use one of {', '.join(map(repr, KINDS))}")


def thresholds(asked: Asked, kind: str, coverage: float, by_length: bool) -> Thresholds:
    """The thresholds for one kind of sets; InputError if the model is not calibrated for this question."""
    check_kind(kind)
    found, now = asked.model.calibration, settings(asked)
    if found is None:
        remedy = "calibrate it with labelled sequences that it was not trained on (calibrate(X, y), or the "
        remedy += "command calibrate)"
        raise InputError("predict_sets", "the model is not calibrated", remedy)
    was = found.settings
    if asked.model.local_points is None:  # where it makes no difference
        was = {name: value for name, value in was.items() if name != "local"}
    if was != now:
        problems = []
        if _draws(was) != _draws(now):
            problems.append(f"n_draws is {_draws(now)}, and was {_draws(was)} in calibration")
        if was.get("shift") != now["shift"]:
            problems.append("class_weight is not what it was in calibration")
        remedy = "calibrate again, or set the parameter back"
        raise InputError("predict_sets", " and ".join(problems), remedy)
    return found.thresholds(kind, coverage, by_length)


def token_sets(asked: Asked, limits: Thresholds) -> list[list[np.ndarray]]:
    """Label indices in the set of each token, most probable first."""
    found = []
    for p in asked.marginals():
        held, order = label_sets(p, limits.of(len(p))), np.argsort(-p, axis=1, kind="stable")
        found.append([some[here[some]] for some, here in zip(order, held, strict=True)])
    return found


def span_sets(asked: Asked, limits: Thresholds) -> list[list[tuple[int, int, str, float]]]:
    """Spans in the set of each sequence, in the form of ``Asked.spans``."""
    each = _limits(asked, limits)
    found = asked.spans(max(LEAST_COUNTED, min(each, default=1.0)))
    return [[s for s in spans if s[3] >= least] for spans, least in zip(found, each, strict=True)]


def labelling_sets(asked: Asked, limits: Thresholds) -> list[list[tuple[np.ndarray, float]]]:
    """Labellings in the set of each sequence, in the form of ``Asked.n_best``."""
    each, sets = _limits(asked, limits), []
    for found, least in zip(asked.n_best(MOST_LABELLINGS), each, strict=True):
        sets.append(found[:1] + [one for one in found[1:] if math.exp(one[1]) >= least])
    return sets


def _limits(asked: Asked, limits: Thresholds) -> list[float]:
    """lambda of each sequence, 1 for an empty one."""
    found = [limits.of(len(rows)) if len(rows) else 1.0 for rows in asked.rows]
    for i, value in enumerate(found):
        if value is None:
            problem = f"calibration sequences of about {len(asked.rows[i])} tokens support no such coverage"
            raise InputError(f"sequence {i}", problem, "use by_length=False, or ask for less coverage")
    return [value for value in found if value is not None]


def _token_scores(asked: Asked, y: Sequence[Sequence[str]]) -> Iterator[np.ndarray]:
    encoded = asked.model.labels.transform(y)
    return (label_scores(p, labels) for p, labels in zip(asked.marginals(), encoded, strict=True))


def _span_scores(asked: Asked, y: Sequence[Sequence[str]]) -> Iterator[np.ndarray]:
    for spans, labels in zip(asked.spans(LEAST_COUNTED), y, strict=True):
        p = {span[:3]: min(span[3], 1 - 1e-12) for span in spans}
        yield np.array([p.get(span, 0.0) for span in metrics.chunks(labels)])


def _labelling_scores(asked: Asked, y: Sequence[Sequence[str]]) -> Iterator[np.ndarray]:
    names = asked.model.labels.names
    for found, labels in zip(asked.n_best(MOST_LABELLINGS), y, strict=True):
        score = 0.0
        for rank, (indices, value) in enumerate(found):
            if names(indices) == list(labels):
                score = 1.0 if rank == 0 else min(math.exp(value), 1 - 1e-12)
        yield np.array([score])
