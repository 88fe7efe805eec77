"""What many labels cost: time and memory of a chain are quadratic in their number, which users should hear
before the fit and not after."""

from __future__ import annotations

import warnings
from typing import Any

from structgp.errors import StructgpWarning
from structgp.structures import Chain, Piecewise

MANY_TRANSITIONS = 3e7
"""Tokens times squared labels from which a fit is not repeated by cross-validation, and is announced as
slow: about a second per draw and step. 50,000 tokens with 24 labels are fewer, 900 with 300 are more. Not
chosen on data."""


def n_transitions(structure: Any, examples: Any) -> float:
    """Scores of transitions that one pass over the data visits when a chain answers, else 0."""
    answers = type(structure) in (Chain, Piecewise)
    return float(examples.n_tokens) * examples.n_labels**2 if answers else 0.0


def warn_of_labels(plan: Any, examples: Any) -> None:
    """A warning where the fit will take long because of the number of labels."""
    work = n_transitions(plan.structure.value, examples)
    is_chain = type(plan.structure.value) is Chain and plan.transition_sd > 0
    if is_chain and work > MANY_TRANSITIONS:
        V = examples.n_labels
        message = (
            f"{V:,} labels: the chain sums over {V * V:,} transitions at each of {examples.n_tokens:,} "
        )
        message += (
            "tokens, for every draw and step, and that takes time quadratic in the number of labels. "
        )
        message += "structure='piecewise' takes linear time, and fewer labels help"
        warnings.warn(message, StructgpWarning, stacklevel=3)
