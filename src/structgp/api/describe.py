"""Describes what a model has learned: the plan of its fit, scales of features, tables of templates."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from structgp.answers.annotators import Annotators
from structgp.answers.ask import Model
from structgp.api.estimator import StructuredGPClassifier
from structgp.data.sources import Coverage
from structgp.gp.kernels.build import kernel_scales
from structgp.plan.resolve import plan_lines
from structgp.structures.segments.span_scheme import SpanScheme

MOST_LENGTHS = 10
"""Largest number of length-scales that a summary shows."""


@dataclass(frozen=True)
class Table:
    """Scores of the joint labels of a template's tuples, apart from features.

    axes : names along each dimension: labels, in the order of a tuple; for 'length', span types and
    lengths. mean, sd : posterior mean and standard deviation. prior_sd : prior standard deviation of a
    score. scales : prior variance of a weight of the tuples' features, by feature; empty if there are no
    features."""

    axes: tuple[tuple[str, ...], ...]
    mean: np.ndarray
    sd: np.ndarray
    prior_sd: float
    scales: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """What a model has learned; ``str`` gives it as text.

    templates : prior variance of a weight, by template. classes : the labels. transitions : (V, V)
    posterior mean of the score of a label (row) followed by another (column), apart from features.
    transition_sds : (V, V) posterior sd of these scores; all 0 if the model has no transitions. plan :
    every choice of the fit, with its reason. transition_templates : as ``templates``, for features of
    transitions; empty if there are none. vectors : how many training tokens have a word vector, for a model
    from a file that was trained with word vectors, else None. held_out : figures of cross-validation
    (``held_out_``), or None. length_scales : length-scales of the kernel on dense columns, in the units of
    the columns: one number (that of a typical column) if all columns share one length-scale after scaling,
    else one per column, with None for a constant column; None if there are no length-scales. tables : the
    table of every template except the nodes, by name, for structures beyond the chain. layer_templates : as
    ``templates``, by layer, if there are several layers. annotators : how reliable they are; None if the
    labels were taken to be true. bounds : the evidence lower bound on the draws of the fit, and on fresh
    draws."""

    templates: dict[str, float]
    classes: list[str]
    transitions: np.ndarray
    transition_sds: np.ndarray
    plan: dict[str, dict[str, Any]] = field(default_factory=dict)
    transition_templates: dict[str, float] = field(default_factory=dict)
    vectors: Coverage | None = None
    held_out: dict[str, Any] | None = None
    length_scales: float | list[float | None] | None = None
    tables: dict[str, Table] = field(default_factory=dict)
    layer_templates: dict[str, dict[str, float]] = field(default_factory=dict)
    annotators: Annotators | None = None
    bounds: tuple[float, float] | None = None

    def __str__(self) -> str:
        of_tuples = {f"{name!r}": table.scales for name, table in self.tables.items()}
        of_nodes = {f"{name!r} feature": scales for name, scales in self.layer_templates.items()}
        scaled = of_nodes or {"template": self.templates}
        scaled |= {"transition": self.transition_templates} | of_tuples
        width = max(map(len, (*(name for some in scaled.values() for name in some), *self.classes)))
        lines = ["plan", *(f"  {line}" for line in plan_lines(self.plan)), ""] if self.plan else []
        lines += ["word vectors", f"  {self.vectors} (training)", ""] if self.vectors else []
        if self.held_out is not None:
            lines += [
                "cross-validation within the training data",
                *(f"  {line}" for line in held_out_lines(self.held_out)),
                "",
            ]
        if self.bounds is not None:
            told = "  {:.1f} on the draws of the fit, {:.1f} on fresh draws".format(*self.bounds)
            lines += ["evidence lower bound", told, ""]
        if self.annotators is not None:
            lines += ["annotators", *(f"  {line}" for line in self.annotators.lines()), ""]
        for name, scales in scaled.items():
            if scales:
                lines.append(f"{name} weights (prior variance)")
                lines += [*(f"  {name:<{width}}  {value:8.3f}" for name, value in scales.items()), ""]
        if self.length_scales is not None:
            lines += ["length-scales (in units of the dense columns)"]
            lines += [*(f"  {line}" for line in length_lines(self.length_scales)), ""]
        for name, table in self.tables.items():
            lines += [f"{name} (mean, sd; prior sd {table.prior_sd:.2f})", *table_lines(table), ""]
        if self.tables or not self.transition_sds.any():
            return "\n".join(lines).rstrip()
        heads = "".join(f"{c:>14}" for c in self.classes)
        lines += ["transitions (mean, sd)", " " * (width + 2) + heads]
        for name, means, sds in zip(self.classes, self.transitions, self.transition_sds, strict=True):
            cells = (f"{m:+.2f} ({s:.2f})".rjust(14) for m, s in zip(means, sds, strict=True))
            lines.append(f"  {name:<{width}}" + "".join(cells))
        return "\n".join(lines)


def table_lines(table: Table) -> list[str]:
    """The table as lines of text: the last dimension runs across, all others run down."""
    names = [" ".join(labels) for labels in product(*table.axes[:-1])]
    width, last = max(map(len, names), default=0), table.axes[-1]
    lines = [" " * (width + 2) + "".join(f"{label:>14}" for label in last)]
    rows = (x.reshape(-1, len(last)) for x in (table.mean, table.sd))
    for name, means, sds in zip(names, *rows, strict=True):
        cells = (f"{m:+.2f} ({s:.2f})".rjust(14) for m, s in zip(means, sds, strict=True))
        lines.append(f"  {name:<{width}}" + "".join(cells))
    return lines


def held_out_lines(found: dict[str, Any]) -> list[str]:
    """The results of cross-validation within the training data, as lines of text."""
    sizes = f"{found['n_tokens']} tokens in {found['n_folds']} folds"
    error, nll = found["token_error"], found["token_nll"]
    told = f"on new data, expect a token error of {error:.2%} and an NLL of {nll:.4f} per token"
    return [f"{told} (from {sizes}).", found["verdict"]]


def length_lines(found: float | list[float | None]) -> list[str]:
    """Length-scales as lines of text, shortest first, since short ones matter most."""
    if not isinstance(found, list):
        return [f"{found:.3g} for a typical column; one for all after scaling"]
    order = sorted((length, column) for column, length in enumerate(found) if length is not None)
    lines = [f"{length:.3g}  column {column}" for length, column in order[:MOST_LENGTHS]]
    return [*lines, f"and {len(order) - MOST_LENGTHS} longer ones"] if order[MOST_LENGTHS:] else lines


def describe(model: StructuredGPClassifier) -> Summary:
    """Summarises what the model has learned about features, transitions and other templates, and the plan
    of its fit."""
    check_is_fitted(model, "model_")
    fitted, covered = model.model_, model.training_log_.get("vectors")
    V, edges = len(fitted.labels.classes), fitted.split.next
    mean, sd = np.zeros((V, V)), np.zeros((V, V))
    bounds: Any = (fitted.info.get("elbo"), fitted.info.get("fresh_elbo"))
    if "next" in fitted.posterior and fitted.spec.next is not None:
        mean, sd = (x.numpy().copy() for x in fitted.posterior["next"].constant_scores())
    return Summary(
        dict(fitted.info.get("kernel_scales") or {}),
        list(fitted.labels.classes),
        mean,
        sd,
        dict(fitted.info.get("plan", {})),
        {} if edges is None else dict(kernel_scales(fitted.posterior["next"].kernel, edges.blocks)),
        Coverage(**covered) if covered else None,
        fitted.info.get("held_out"),
        fitted.info.get("length_scales"),
        {} if fitted.spec.is_chain else tables_of(fitted),
        _by_layer(fitted),
        fitted.annotators,
        None if None in bounds else bounds,
    )


def tables_of(fitted: Model) -> dict[str, Table]:
    """The table of every template except the nodes, by name, for a structure beyond the chain."""
    found = {}
    for k, template in enumerate(fitted.spec.templates):
        block, view = fitted.posterior[template.name], fitted.split.views[k]
        if template.rule == "node" or block.is_silent:
            continue
        mean, sd = (x.numpy().copy() for x in block.constant_scores())
        scales = {} if view is None else dict(kernel_scales(block.kernel, view.blocks))
        found[template.name] = Table(_axes(fitted, k), mean, sd, float(block.prior_sd), scales)
    return found


def _axes(fitted: Model, k: int) -> tuple[tuple[str, ...], ...]:
    """The names along each dimension of the scores of template k, see ``Table``."""
    template, classes = fitted.spec.templates[k], fitted.labels.classes
    if template.rule == "length":
        lengths = [*map(str, range(1, template.longest + 1)), f"over {template.longest}"]
        return tuple(SpanScheme.types_of(classes)), tuple(lengths)
    spans = fitted.split.spans
    parts = [(layer, spans[layer]) for layer in template.layers or ("",) * template.labels]
    return tuple(
        tuple(c.removeprefix(f"{layer}=" if layer else "") for c in classes[start:stop])
        for layer, (start, stop) in parts
    )


def _by_layer(fitted: Model) -> dict[str, dict[str, float]]:
    """Prior variances of weights, by layer and feature."""
    found = {}
    for k, template in enumerate(fitted.spec.templates):
        if template.rule == "node" and template.layers:
            blocks, block = fitted.split.views[k].blocks, fitted.posterior[template.name]
            found[template.layers[0]] = dict(kernel_scales(block.kernel, blocks))
    return found
