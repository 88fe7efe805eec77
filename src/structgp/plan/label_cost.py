"""The cost of many labels: time and memory of a chain are quadratic in their number.

Transitions are left out if next to none of them can have been seen, and users hear of the cost before the
fit and not after."""

from __future__ import annotations

import warnings
from typing import Any

from structgp.errors import StructgpWarning
from structgp.structures import Chain, Piecewise

MANY_TRANSITIONS = 3e7
"""Number of tokens times squared number of labels from which a fit is not repeated by cross-validation, and
is announced as slow: about a second per draw and step. 50,000 tokens with 24 labels are fewer, 900 with 300
are more. Not chosen on data."""


MANY_LABELS = 100
"""Number of labels below which fits are not announced: their time grows with the tokens, as users
expect."""

SEEN_SHARE = 10
"""Entries of the table of transitions for each token above which transitions are left out: at most a tenth
of the entries can then occur in the data, so there is little to learn of the table. Not chosen on data."""

SECONDS = 2e-6
"""Seconds of one processor per token and label, in a fit of categorical or sparse features without
transitions: on generated data 1.4 s for 900 tokens with 300 labels, and 17 s for 3,000 with 3,000."""


def leaves_out_transitions(examples: Any) -> bool:
    """True if the default structure leaves transitions out. Constraints on neighbours need the chain."""
    table = float(examples.n_labels) ** 2
    many = table * examples.n_tokens > MANY_TRANSITIONS and table > SEEN_SHARE * examples.n_tokens
    return many and examples.constraints is None


def n_transitions(structure: Any, examples: Any) -> float:
    """Number of transition scores that one pass over the data visits, where a chain answers; else 0."""
    answers = type(structure) in (Chain, Piecewise)
    return float(examples.n_tokens) * examples.n_labels**2 if answers else 0.0


def warn_of_labels(plan: Any, examples: Any) -> None:
    """Warns where transitions are left out, or the fit will take long, because of the number of labels."""
    work, V = n_transitions(plan.structure.value, examples), examples.n_labels
    if type(plan.structure.value) is not Chain or work <= MANY_TRANSITIONS or V < MANY_LABELS:
        return
    left_out = plan.transition_sd == 0
    if left_out and not leaves_out_transitions(examples):
        return  # the user asked for none
    message = f"{V:,} labels: "
    if left_out:
        message += f"{examples.n_tokens:,} tokens show next to nothing of {V * V:,} transitions, so the "
        message += "structure has none (structure=structgp.chain() has them)"
        if not plan.has_dense:
            message += (
                f". The fit will take about {_duration(SECONDS * examples.n_tokens * V)} of one processor"
            )
    else:
        message += f"the chain sums over {V * V:,} transitions at each of {examples.n_tokens:,} tokens, "
        message += "for every draw and step, and that takes time quadratic in the number of labels. "
        message += "structure='piecewise' takes linear time, and fewer labels help"
    warnings.warn(message, StructgpWarning, stacklevel=3)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:,.0f} minutes"
