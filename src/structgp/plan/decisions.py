"""What labellings obey and how they are chosen, where the user leaves it open: rules that all training data
obey, the measure that labels are chosen for, and the threshold of spans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from structgp.data.examples import Examples
from structgp.data.schemes import allowed, obeyed_scheme, scheme_of
from structgp.data.shards import ShardedExamples
from structgp.plan.choices import AS_BEFORE, ASKED, Choice, shown
from structgp.plan.options import Options, cost_matrix
from structgp.plan.resolve import Plan
from structgp.structures import Chain, Rules

UNKNOWN_THRESHOLD = 1 / 3
"""Least probability of a span where no left-out data tell how good the model is. The best threshold is half
the F1 that can be reached (``answers.best_spans``): one half for a model that is always right, and too high
costs more than too low."""


def declared(options: Options) -> Any:
    """The constraints that the user declares."""
    return None if _is_open(options) else options.constraints


def _is_open(options: Options) -> bool:
    return isinstance(options.constraints, str) and options.constraints == "auto"


def adopt(
    options: Options,
    plan: Plan,
    examples: Examples | ShardedExamples,
    before: Mapping[str, Any] | None = None,
) -> tuple[Plan, Examples | ShardedExamples]:
    """The plan with constraints, measure and threshold settled, and the examples under those constraints.
    before : the log of an earlier fit that this one goes on from; what it adopted stays, as long as the new
    labellings obey it."""
    classes, earlier = examples.labels.classes, (before or {}).get("plan", {})
    spans = scheme_of(classes) is not None and plan.answers_spans
    decode = Choice("accuracy", "labels are not spans")
    if spans:
        decode = Choice("f1", "labels are spans")
    plan = replace(plan, decode=decode)
    if spans:
        threshold = Choice(UNKNOWN_THRESHOLD, "no left-out data tell how good the model is")
        plan = replace(plan, threshold=threshold)
    if not _is_open(options):
        reason = ASKED
        return replace(plan, constraints=Choice(shown_rules(options.constraints), reason)), examples
    name, reason = None, "the labels are not in a tagging scheme"
    if type(plan.structure.value) is not Chain or plan.predictor is not None:
        reason = f"{shown(plan.structure.value)} does not know constraints"
    elif before is not None and earlier.get("constraints", {}).get("value") is None:
        reason = AS_BEFORE
    elif spans:
        name = obeyed_scheme(classes, _labels(examples))
        reason = "every training labelling obeys it"
        if name is None:
            reason = f"some training labellings do not obey {scheme_of(classes)}"
    plan = replace(plan, constraints=Choice(name, reason))
    if name is None:
        return plan, examples
    rules = allowed(name, classes)
    structure = replace(plan.structure, value=Chain(Rules.of(rules), plan.structure.value.spec))
    return replace(plan, structure=structure), examples.under(rules)


def decoder_of(
    options: Options, info: Mapping[str, Any], classes: Sequence[str]
) -> tuple[str, np.ndarray | None]:
    """What labels are chosen for, and the cost of errors where that decides. info : of the model that is
    asked."""
    if options.decode == "auto":
        return info.get("decode", "accuracy"), None
    return options.decode, None if options.costs is None else cost_matrix(options.costs, classes)


def shown_rules(constraints: Any) -> Any:
    """Constraints as a plan names them."""
    if isinstance(constraints, Mapping):
        (kind, pairs), *_ = constraints.items()
        return f"{len(pairs)} {kind} pairs"
    return constraints


def _labels(examples: Examples | ShardedExamples) -> Iterable[np.ndarray]:
    if isinstance(examples, Examples):
        return examples.y
    return (labels for _, labels in examples.shards.labels())
