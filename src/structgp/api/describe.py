"""What a model has learned as a whole: the plan of its fit, scales of templates, transitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from structgp.api.estimator import StructuredGPClassifier
from structgp.plan.resolve import plan_lines


@dataclass(frozen=True)
class Summary:
    """templates : prior variance of a weight, by template; classes : the labels; transitions : (V, V) mean
    of the score of a label (row) followed by another (column), and transition_sds : (V, V) its posterior
    sd; plan : every choice of the fit, with its reason."""

    templates: dict[str, float]
    classes: list[str]
    transitions: np.ndarray
    transition_sds: np.ndarray
    plan: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(map(len, (*self.templates, *self.classes)))
        lines = ["plan", *(f"  {line}" for line in plan_lines(self.plan)), ""] if self.plan else []
        lines.append("template weights (prior variance)")
        lines += [f"  {name:<{width}}  {value:8.3f}" for name, value in self.templates.items()]
        heads = "".join(f"{c:>14}" for c in self.classes)
        lines += ["", "transitions (mean, sd)", " " * (width + 2) + heads]
        for i, name in enumerate(self.classes):
            cells = [
                f"{m:+.2f} ({s:.2f})".rjust(14)
                for m, s in zip(self.transitions[i], self.transition_sds[i], strict=True)
            ]
            lines.append(f"  {name:<{width}}" + "".join(cells))
        return "\n".join(lines)


def describe(model: StructuredGPClassifier) -> Summary:
    """What the model has learned about templates and transitions, and the plan of its fit."""
    check_is_fitted(model, "model_")
    fitted = model.model_
    mean, sd = fitted.posterior["next"].constant_scores()
    return Summary(
        dict(fitted.info["kernel_scales"]),
        list(fitted.labels.classes),
        mean.numpy().copy(),
        sd.numpy().copy(),
        dict(fitted.info.get("plan", {})),
    )
