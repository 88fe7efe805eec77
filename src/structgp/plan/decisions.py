"""What the user leaves open about labellings: the rules that all training data obey, the measure that
labels are chosen for, and the threshold of spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import torch

from structgp.answers.ask import Asked, Model, Question
from structgp.answers.best_spans import LEAST_COUNTED, expected_f1
from structgp.data.batch import by_length, pad
from structgp.data.examples import Examples
from structgp.data.schemes import allowed, obeyed_scheme, scheme_of
from structgp.data.shards import ShardedExamples
from structgp.errors import InputError, warn_caller
from structgp.plan.choices import AS_BEFORE, ASKED, TOKENS, Choice, has_much_data, shown
from structgp.plan.options import Options
from structgp.plan.resolve import Plan
from structgp.structures import Chain, Declared, Piecewise, Rules, Segments, structure_for

AnyExamples = TypeVar("AnyExamples", bound=Examples | ShardedExamples)

UNKNOWN_THRESHOLD = 1 / 3
"""Least probability of a span where nothing tells how good the model is. The best threshold is half the F1
that can be reached (``answers.best_spans``): one half for a model that is always right. A threshold that is
too high costs more than one that is too low."""

UNTOLD = "no left-out data tell how good the model is"

SEEN_TOKENS, SEEN_DRAWS = 5_000, 32
"""Number of training tokens from which the threshold is estimated where there is much data, and of draws of
their scores. That is some hundred spans, whose expected F1 is known to a point or two, and the threshold to
half of that."""

TOKENS_AT_ONCE = 2_000
"""Largest number of tokens whose labellings are looked for at once."""


def declared(options: Options) -> Any:
    """The constraints that the user declares; None if they are left open."""
    return None if _is_open(options) else options.constraints


def _is_open(options: Options) -> bool:
    return isinstance(options.constraints, str) and options.constraints == "auto"


def adopt(
    options: Options, plan: Plan, examples: AnyExamples, before: Mapping[str, Any] | None = None
) -> tuple[Plan, AnyExamples]:
    """The plan with constraints, measure and threshold settled, and the examples under those constraints.
    before : the log of an earlier fit that this one goes on from; what it adopted stays, as long as the new
    labellings obey it."""
    classes, earlier = examples.labels.classes, (before or {}).get("plan", {})
    spans = scheme_of(classes) is not None and plan.answers_spans
    plan = replace(plan, decode=TOKENS)
    if spans:
        threshold = Choice(UNKNOWN_THRESHOLD, UNTOLD)
        plan = replace(plan, decode=Choice("f1", "labels are spans"), threshold=threshold)
    if not _is_open(options):
        _check_possible(plan, examples)
        return replace(plan, constraints=Choice(_shown(options.constraints), ASKED)), examples
    name, reason = None, "the labels are not in a tagging scheme"
    kind = type(plan.structure.value)
    if kind not in (Chain, Piecewise, Declared, Segments) or plan.predictor is not None:
        reason = f"{shown(plan.structure.value)} does not know constraints"
    elif before is not None and earlier.get("constraints", {}).get("value") is None:
        reason = AS_BEFORE
    elif spans:
        name = obeyed_scheme(classes, _labels(examples))
        reason = "every training labelling obeys it"
        if name is None:
            scheme = scheme_of(classes)
            reason = f"some training labellings do not obey {scheme}"
            if isinstance(examples, ShardedExamples) or examples.given is None:  # annotators err anyway
                what = f"constraints={scheme!r} (--scheme {scheme}) says where, None (none) accepts them"
                warn_caller(f"labels: {reason}, so predictions need not either; {what}")
    plan = replace(plan, constraints=Choice(name, reason))
    if name is None:
        return plan, examples
    rules = allowed(name, classes)
    if kind in (Chain, Declared, Segments):
        fitted = structure_for(plan.structure.value.spec, Rules.of(rules), classes, True)
        plan = replace(plan, structure=replace(plan.structure, value=fitted))
    return plan, examples.under(rules)  # type: ignore[return-value]


def settle_threshold(plan: Plan, model: Model, examples: Examples | ShardedExamples) -> Plan:
    """The plan with its threshold set to half of the F1 that the fitted model expects on training data,
    where there is much data and cross-validation has given no threshold. What a model expects of data that
    it has seen is then not far above what it expects of other data."""
    untold = plan.threshold is not None and plan.threshold.reason == UNTOLD
    if not untold or not isinstance(examples, Examples) or not has_much_data(examples):
        return plan
    order = np.random.default_rng(model.seed).permutation(len(examples.rows))
    tokens = np.cumsum([len(examples.rows[i]) for i in order])
    part = examples.part(sorted(order[: int(np.searchsorted(tokens, SEEN_TOKENS)) + 1].tolist()))
    asked = Asked(model, Question(SEEN_DRAWS, None, plan.device.value), part.rows, part.links)
    f1, threshold = expected_f1(asked.spans(LEAST_COUNTED))
    if not threshold:
        return plan
    return replace(plan, threshold=Choice(threshold, f"half of the expected F1 of training data, {f1:.1%}"))


def _check_possible(plan: Plan, examples: Examples | ShardedExamples) -> None:
    """InputError for an example with missing labels, if the rules on templates leave no labelling that
    agrees with its known labels."""
    structure = plan.structure.value
    if not isinstance(structure, Declared) or structure.rules is None or not isinstance(examples, Examples):
        return
    if examples.given is not None:  # what annotators say never rules a label out
        return
    missing = [len(y) if (y < 0).any() else 0 for y in examples.y]
    for index in by_length(missing, TOKENS_AT_ONCE):
        given = examples.rows, examples.y, examples.encoder.pad_row, index, None, examples.n_layers
        batch, split = examples.as_graphs(pad(*given)), examples.split
        assert split is not None
        shapes = [mask.shape if k in structure.nodes else () for k, mask in enumerate(batch.masks)]
        sizes = [(1, *shape, *split.sizes(k)) for k, shape in enumerate(shapes)]
        scores = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        known = structure.keep_known(scores, batch.y, batch.layout)
        possible = structure.has_labelling(known, batch.layout)
        if not bool(possible.all()):
            n = index[int((~possible).nonzero()[0, 0])]
            problem = "no labelling that agrees with its labels obeys the constraints"
            raise InputError(f"y[{n}]", problem, "correct the labels or the constraints")


def decoder_of(
    options: Options, info: Mapping[str, Any], classes: Sequence[str]
) -> tuple[str, np.ndarray | None]:
    """The measure that labels are chosen for, and the costs of errors if it needs them. info : the log of
    the model that is asked."""
    if options.decode == "auto":
        return info.get("decode", "accuracy"), None
    return options.decode, None if options.costs is None else cost_matrix(options.costs, classes)


def _shown(constraints: Any) -> Any:
    """Constraints as a plan names them."""
    if isinstance(constraints, Mapping):
        parts = [f"scheme {constraints['scheme']}"] if "scheme" in constraints else []
        for kind, rules in constraints.items():
            if isinstance(rules, Mapping):
                parts += [f"{len(tuples)} {kind} tuples of {name}" for name, tuples in rules.items()]
            elif kind != "scheme":
                parts.append(f"{len(rules)} {kind} pairs")
        return ", ".join(parts)
    return constraints


def _labels(examples: Examples | ShardedExamples) -> Iterable[np.ndarray]:
    if isinstance(examples, Examples):
        return examples.y if examples.given is None else examples.given.labellings()
    return (labels for _, labels in examples.shards.labels())


def cost_matrix(costs: Any, classes: Sequence[str]) -> np.ndarray:
    """(V, V) cost of each predicted label (column) where another is true (row). costs : such a matrix, or a
    dict {true: {predicted: cost}}, in which an error costs 1 unless it is named."""
    V, place = len(classes), "costs"
    if not isinstance(costs, Mapping):
        try:
            found = np.array(costs, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError(place, "not all numbers", "pass {true: {predicted: cost}}") from None
        if found.shape != (V, V):
            remedy = f"pass one row per true label and one column per predicted one, {V} of each"
            raise InputError(place, f"shape {found.shape} for {V} labels", remedy)
    else:
        found, index = 1.0 - np.eye(V), {label: i for i, label in enumerate(classes)}
        for true, predicted, cost in _named_costs(costs):
            for label in (true, predicted):
                if label not in index:
                    problem = f"{label!r} is not a label of the training data"
                    raise InputError(place, problem, f"use {', '.join(classes)}")
            if not isinstance(cost, Real):
                raise InputError(place, f"must be a number, got {cost!r}", "use a number")
            found[index[true], index[predicted]] = float(cost)
    if not np.isfinite(found).all():
        raise InputError(place, "must be finite numbers", "use large numbers instead of infinite ones")
    return found


def _named_costs(costs: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for true, row in costs.items():
        if not isinstance(row, Mapping):
            problem = f"must be a dict from predicted label to cost, got {row!r} for {true!r}"
            raise InputError("costs", problem, "pass {true: {predicted: cost}}")
        yield from ((true, predicted, cost) for predicted, cost in row.items())
