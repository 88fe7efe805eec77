"""What a model has learned as a whole: the plan of its fit, scales of templates, transitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from structgp.api.estimator import StructuredGPClassifier
from structgp.data.sources import Coverage
from structgp.gp.kernels.build import kernel_scales
from structgp.plan.resolve import plan_lines

MOST_LENGTHS = 10
"""Length-scales that a summary shows."""


@dataclass(frozen=True)
class Summary:
    """templates : prior variance of a weight, by template; transition_templates : the same for features of
    transitions, empty where those have none; classes : the labels; transitions : (V, V) mean of the score
    of a label (row) followed by another (column), apart from features, and transition_sds : (V, V) its
    posterior sd, all 0 where the model has no transitions; plan : every choice of the fit, with its
    reason; vectors : how many training tokens have a word vector, for a model from a file that was trained
    with word vectors, else None; held_out : figures of cross-validation (``held_out_``), None where there
    are none; length_scales : of the kernel on dense columns, in their units: one number where all columns
    share one after scaling (for a typical column), else one per column, None for a constant one; None
    where there are none."""

    templates: dict[str, float]
    classes: list[str]
    transitions: np.ndarray
    transition_sds: np.ndarray
    plan: dict[str, dict[str, Any]] = field(default_factory=dict)
    transition_templates: dict[str, float] = field(default_factory=dict)
    vectors: Coverage | None = None
    held_out: dict[str, Any] | None = None
    length_scales: float | list[float | None] | None = None

    def __str__(self) -> str:
        width = max(map(len, (*self.templates, *self.transition_templates, *self.classes)))
        lines = ["plan", *(f"  {line}" for line in plan_lines(self.plan)), ""] if self.plan else []
        lines += ["word vectors", f"  {self.vectors} (training)", ""] if self.vectors else []
        if self.held_out is not None:
            lines += [
                "cross-validation within the training data",
                *(f"  {line}" for line in held_out_lines(self.held_out)),
                "",
            ]
        for name, scales in (("template", self.templates), ("transition", self.transition_templates)):
            if scales:
                lines.append(f"{name} weights (prior variance)")
                lines += [*(f"  {name:<{width}}  {value:8.3f}" for name, value in scales.items()), ""]
        if self.length_scales is not None:
            lines += ["length-scales (in units of the dense columns)"]
            lines += [*(f"  {line}" for line in length_lines(self.length_scales)), ""]
        if not self.transition_sds.any():
            return "\n".join(lines).rstrip()
        heads = "".join(f"{c:>14}" for c in self.classes)
        lines += ["transitions (mean, sd)", " " * (width + 2) + heads]
        for name, means, sds in zip(self.classes, self.transitions, self.transition_sds, strict=True):
            cells = (f"{m:+.2f} ({s:.2f})".rjust(14) for m, s in zip(means, sds, strict=True))
            lines.append(f"  {name:<{width}}" + "".join(cells))
        return "\n".join(lines)


def held_out_lines(found: dict[str, Any]) -> list[str]:
    """What cross-validation within the training data has found, for people to read."""
    sizes = f"{found['n_tokens']} tokens in {found['n_folds']} folds"
    error, nll = found["token_error"], found["token_nll"]
    return [f"token error {error:.2%}, token NLL {nll:.4f} ({sizes})", found["verdict"]]


def length_lines(found: float | list[float | None]) -> list[str]:
    """Length-scales for people to read: the shortest first, which matter most."""
    if not isinstance(found, list):
        return [f"{found:.3g} for a typical column; one for all after scaling"]
    order = sorted((length, column) for column, length in enumerate(found) if length is not None)
    lines = [f"{length:.3g}  column {column}" for length, column in order[:MOST_LENGTHS]]
    return [*lines, f"and {len(order) - MOST_LENGTHS} longer ones"] if order[MOST_LENGTHS:] else lines


def describe(model: StructuredGPClassifier) -> Summary:
    """What the model has learned about templates and transitions, and the plan of its fit."""
    check_is_fitted(model, "model_")
    fitted, edges = model.model_, model.model_.split.next
    transitions, covered = fitted.posterior["next"], model.training_log_.get("vectors")
    mean, sd = transitions.constant_scores()
    return Summary(
        dict(fitted.info["kernel_scales"]),
        list(fitted.labels.classes),
        mean.numpy().copy(),
        sd.numpy().copy(),
        dict(fitted.info.get("plan", {})),
        {} if edges is None else dict(kernel_scales(transitions.kernel, edges.blocks)),
        Coverage(**covered) if covered else None,
        fitted.info.get("held_out"),
        fitted.info.get("length_scales"),
    )
