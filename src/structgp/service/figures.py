"""The figures on the panel: the audited error, how the error falls, and what more labels would bring."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from scipy.special import betaincinv

from structgp.service.store import Event

AUDITED = 50
"""Number of latest audits from which the error is computed; earlier audits judged an outdated model."""
LEVEL = 0.9
"""Probability of all intervals."""
SETTLED = 10
"""Smallest number of audits from which the spread of errors is estimated, see ``audited_error``."""
FEWEST_POINTS = 4
"""Smallest number of fits, with different numbers of labels, for a curve through their errors."""
FEWEST_GROWTH = 1.25
"""Smallest growth factor of the number of labels from the first of these fits to the last: the errors of
fits that are closer together differ by chance."""


@dataclass(frozen=True)
class Audit:
    """One audited sequence: the number of tokens with a label, the number on which the model was wrong
    before it saw the label, and the probability that the model gave to its whole labelling."""

    n_tokens: int
    n_wrong: int
    probability: float


def audits(events: Iterable[Event]) -> list[Audit]:
    """The audits among the events, oldest first. Tokens labelled 'don't know' are not compared."""
    found = []
    for event in events:
        if event.stream != "audit" or event.suggested is None:
            continue
        both = [
            (given, told)
            for given, told in zip(event.labels, event.suggested["labels"], strict=True)
            if given is not None
        ]
        if both:
            wrong = sum(given != told for given, told in both)
            found.append(Audit(len(both), wrong, float(event.suggested["probability"] or 0.0)))
    return found


def audited_error(found: Sequence[Audit]) -> dict[str, Any] | None:
    """Share of wrong tokens in the latest audits, with an interval; None before the first.

    The interval is that of a Beta posterior with Jeffreys' prior. Errors within a sequence are correlated:
    if the variance of the sequences' errors is d times that of independent tokens, a token counts 1 / d.
    With few sequences, d cannot be estimated, and each sequence counts as one token."""
    latest = list(found)[-AUDITED:]
    if not latest:
        return None
    tokens = np.array([a.n_tokens for a in latest], dtype=float)
    wrong = np.array([a.n_wrong for a in latest], dtype=float)
    n, share = tokens.sum(), wrong.sum() / tokens.sum()
    d = float(tokens.mean())
    if len(latest) >= SETTLED and 0 < share < 1:
        residual = ((wrong - share * tokens) ** 2).sum() * len(latest) / (len(latest) - 1)
        d = max(1.0, float(residual / (n * share * (1 - share))))
    low, high = _interval(share * n / d, (1 - share) * n / d)
    return {"error": float(share), "low": low, "high": high, "sequences": len(latest), "tokens": int(n)}


def measured_precision(found: Iterable[Audit], least: float) -> dict[str, Any]:
    """Among the latest audits in which the model gave its labelling at least the probability ``least``, the
    share whose labels were all right, with an interval."""
    sure = [a.n_wrong == 0 for a in list(found)[-AUDITED:] if a.probability >= least]
    right = sum(sure)
    low, high = _interval(right, len(sure) - right)
    share = right / len(sure) if sure else None
    return {"share": share, "low": low, "high": high, "sequences": len(sure), "level": LEVEL}


def _interval(yes: float, no: float) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low = 0.0 if yes == 0 else float(betaincinv(yes + 0.5, no + 0.5, tail))
    high = 1.0 if no == 0 else float(betaincinv(yes + 0.5, no + 0.5, 1 - tail))
    return low, high


def outlook(fits: Sequence[dict[str, Any]], n_rest: int, mean_length: float) -> dict[str, Any] | None:
    """What the next labels should bring, by a power law through the expected errors of the later half of
    the fits; None if there are too few fits. Only fits with the settings of the last one count: when
    settings are chosen anew, the error that a model expects of itself can jump either way.

    removed : the number of wrong tokens in the rest of the pool that one more labelled sequence removes,
    its own tokens aside. Below 1, labelling does little more than correct the sequences that are labelled,
    and 'pays' is False."""
    now = fits[-1].get("settings") if fits else None
    points = {
        f["sequences"]: f["error"]["mean"] for f in fits if f.get("error") and f.get("settings") == now
    }
    later = (
        sorted(points.items())[len(points) // 2 :]
        if len(points) > 2 * FEWEST_POINTS
        else sorted(points.items())
    )
    kept = [(n, e) for n, e in later if n > 0 and e > 0]
    if len(kept) < FEWEST_POINTS or n_rest <= 0 or kept[-1][0] < FEWEST_GROWTH * kept[0][0]:
        return None
    x, y = np.log(np.array(kept)).T
    slope = min(0.0, float(np.polyfit(x, y, 1)[0]))
    n, error = float(np.exp(x[-1])), float(np.exp(y.mean() + slope * (x[-1] - x.mean())))
    more = max(10, round(n / 2))
    after = error * math.exp(slope * math.log((n + more) / n))
    removed = -slope * error / n * max(0.0, n_rest - 1) * mean_length
    return {"more": more, "error": error, "after": after, "removed": removed, "pays": removed >= 1}


def agreement(events: Iterable[Event]) -> list[dict[str, Any]]:
    """For each pair of annotators with sequences in common: the number of tokens that both labelled, and
    the share of these with the same label. Only the latest labels of each annotator count."""
    latest: dict[str, dict[int, list[str | None]]] = {}
    for event in events:
        latest.setdefault(event.annotator, {})[event.sequence] = event.labels
    found = []
    for a, b in combinations(sorted(latest), 2):
        both = [
            (x, y)
            for i in latest[a].keys() & latest[b].keys()
            for x, y in zip(latest[a][i], latest[b][i], strict=True)
            if x is not None and y is not None
        ]
        if both:
            same = sum(x == y for x, y in both) / len(both)
            found.append({"annotators": [a, b], "tokens": len(both), "same": same})
    return found


def unchanged(events: Iterable[Event]) -> dict[str, Any]:
    """Number of sequences shown with suggestions, and how many of these were accepted unchanged."""
    shown = [e for e in events if e.stream == "chosen" and e.suggested is not None]
    same = sum(e.suggested is not None and e.labels == e.suggested["labels"] for e in shown)
    return {"sequences": len(shown), "unchanged": same}
