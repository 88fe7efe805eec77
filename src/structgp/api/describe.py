"""What a model has learned as a whole: of templates, and of label pairs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from structgp.api.estimator import StructuredGPClassifier


@dataclass(frozen=True)
class Summary:
    """templates : prior variance of a weight, by template; classes : the labels; transitions : (V, V)
    mean of the score of a label (row) followed by another (column), and transition_sds : (V, V) its
    posterior sd."""

    templates: dict[str, float]
    classes: list[str]
    transitions: np.ndarray
    transition_sds: np.ndarray

    def __str__(self) -> str:
        width = max(map(len, (*self.templates, *self.classes)))
        lines = ["template weights (prior variance)"]
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
    """What the model has learned of templates and of label pairs."""
    fitted = model._ready()
    table = fitted.posterior["next"]
    return Summary(
        dict(fitted.info["kernel_scales"]),
        list(fitted.labels.classes),
        table.mean_scores.detach().numpy().copy(),
        table.score_sds.detach().numpy().copy(),
    )
