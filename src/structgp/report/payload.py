"""The text itself as compact JSON, which the page's script turns into tokens as they scroll into view.

    labels     every label that occurs below
    doubts     {name, title, meaning, full} of each kind of doubt
    sequences  [line, surprise, words, predicted, errors, doubts, alternatives]

Of a sequence: ``surprise`` is -log p of its true labelling (null where it has none); ``predicted`` has
a label's number for each token; ``errors`` is [token, true label, token, true label, ...];
``doubts`` has for each kind the thousandths of a nat of each token; ``alternatives`` has for each
token [label, thousandths of its probability, ...], the most probable first.
"""

from __future__ import annotations

import json
from typing import Any

from structgp.report.findings import Findings
from structgp.report.markup import Markup

_WORTH_NAMING = 0.005
_MOST_NAMED = 5


def payload(findings: Findings) -> Markup:
    """JSON that can stand in a script element whatever the tokens are."""
    names = set(findings.estimator.classes_.tolist())
    if findings.truth is not None:
        names.update(label for labels in findings.truth.labels for label in labels)
    labels = sorted(names)
    number = {label: i for i, label in enumerate(labels)}
    content = {
        "labels": labels,
        "doubts": [
            {"name": d.name, "title": d.title, "meaning": d.meaning, "full": round(d.full, 4)}
            for d in findings.doubts
        ],
        "labelled": findings.truth is not None,
        "sequences": [_sequence(findings, i, number) for i in range(len(findings.text.words))],
    }
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # '<' alone could end the element or open a comment in it; strings are all that holds one.
    return Markup(text.replace("<", "\\u003c"))


def _sequence(findings: Findings, i: int, number: dict[str, int]) -> list[Any]:
    guesses = findings.predicted[i]
    truths, surprise = guesses, None
    if findings.truth is not None:
        truths, log_prob = findings.truth.labels[i], findings.truth.log_probs[i]
        # JSON has no infinity.
        surprise = None if log_prob is None else min(round(-log_prob + 0.0, 2), 1e9)
    errors: list[int] = []
    for t, (guess, truth) in enumerate(zip(guesses, truths, strict=True)):
        if guess != truth:
            errors += [t, number[truth]]
    return [
        findings.text.lines[i],
        surprise,
        findings.text.words[i],
        [number[guess] for guess in guesses],
        errors,
        [(1000 * doubt.values[i]).round().astype(int).tolist() for doubt in findings.doubts],
        [
            _alternatives(p, {guess, truth}, number)
            for p, guess, truth in zip(findings.marginals[i], guesses, truths, strict=True)
        ],
    ]


def _alternatives(p: dict[str, float], always: set[str], number: dict[str, int]) -> list[int]:
    """The labels worth naming and those that must be, as [label, thousandths, ...]."""
    ranked = sorted(p, key=lambda label: (-p[label], label))
    named = [
        label
        for rank, label in enumerate(ranked)
        if label in always or (rank < _MOST_NAMED and p[label] >= _WORTH_NAMING)
    ]
    return [value for label in named for value in (number[label], round(1000 * p[label]))]
