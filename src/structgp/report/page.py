"""One self-contained HTML page: nothing is fetched, and no script but ours can run in it.

The text goes into the page as compact JSON, which its script turns into tokens as they scroll into view:

    labels         every label that occurs below
    uncertainties  {name, title, meaning, full} of each kind
    sequences      [line, surprise, words, predicted, errors, uncertainties, alternatives]

Per sequence, ``surprise`` is -log p of the true labelling (null where there is none); ``predicted`` has one
label number per token; ``errors`` is [token, true label, token, true label, ...]; ``uncertainties`` has,
for each kind, thousandths of a nat per token; ``alternatives`` has, per token, [label, thousandths of its
probability, ...], the most probable label first."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from itertools import chain
from string import Template
from typing import Any

from structgp.report import sections
from structgp.report.findings import Findings
from structgp.report.markup import Markup, join, tag
from structgp.report.pictures import pictures

_WORTH_NAMING = 0.005
_MOST_NAMED = 5


def render(findings: Findings) -> str:
    """The page; equal findings give equal text."""
    script, drawn = _asset("page.js"), pictures(findings)
    title = {"grid": "Images", "tree": "Trees"}.get(findings.form, "")
    link = "" if drawn is None else tag("a", title, href="#pictures")
    shown = "" if drawn is None else tag("section", tag("h2", title), drawn, id="pictures")
    # An image's pixels one after the other would tell the reader nothing.
    with_text = findings.form != "grid"
    return Template(_asset("page.html")).substitute(
        style=_asset("page.css"),
        script=script,
        # By this hash the page's security policy recognises its script.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data_name=join([findings.text.name]),
        model_name=join([findings.model_name]),
        headline=sections.headline(findings),
        confidence=sections.confidence(findings),
        confusions=sections.confusions(findings),
        transitions=sections.transitions(findings),
        weights=sections.weights(findings),
        fit=sections.fit(findings),
        pictures_link=link,
        pictures=shown,
        **_placed_text(findings, with_text),
        types=_types(findings),
        types_link=tag("a", "By type", href="#types") if findings.truth is not None else "",
        payload=_payload(findings, with_text),
    )


def _placed_text(findings: Findings, with_text: bool) -> dict[str, str]:
    """The text and the link to it: first on the page if there are no true labels, since the text is then
    the main thing to see, else last."""
    section = Template(_asset("text.html")).substitute(hidden="" if with_text else " hidden")
    link = tag("a", "The text", href="#text") if with_text else ""
    parts = ("", "", section, link) if findings.truth is not None else (section, link, "", "")
    return dict(zip(("text_first", "first_link", "text_last", "last_link"), parts, strict=True))


def _types(findings: Findings) -> Markup:
    """Scores of each type of span and of each label, where there are true labels."""
    if findings.truth is None:
        return Markup("")
    return tag("section", tag("h2", "By type"), sections.by_type(findings.truth.scores), id="types")


def _asset(name: str) -> str:
    return (resources.files("structgp.report") / "assets" / name).read_text(encoding="utf-8")


def _payload(findings: Findings, with_text: bool = True) -> Markup:
    """The data as JSON that is safe in a script element, whatever the tokens are."""
    truths = () if findings.truth is None else chain(*findings.truth.labels)
    labels = sorted({*findings.estimator.classes_.tolist(), *truths})
    number = {label: i for i, label in enumerate(labels)}
    content = {
        "labels": labels,
        "uncertainties": [
            {"name": u.name, "title": u.title, "meaning": u.meaning, "full": round(u.full, 4)}
            for u in findings.uncertainties
        ],
        "labelled": findings.truth is not None,
        "sequences": [
            _sequence(findings, i, number) for i in range(len(findings.text.words) if with_text else 0)
        ],
    }
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Only strings contain '<', which could end the element or open a comment in it.
    return Markup(text.replace("<", "\\u003c"))


def _sequence(findings: Findings, i: int, number: dict[str, int]) -> list[Any]:
    guesses = findings.predicted[i]
    truths, surprise = guesses, None
    if findings.truth is not None:
        truths, log_prob = findings.truth.labels[i], findings.truth.log_probs[i]
        # JSON has no infinity.
        surprise = None if log_prob is None else min(round(-log_prob + 0.0, 2), 1e9)
    tokens = list(zip(findings.marginals[i], guesses, truths, strict=True))
    return [
        findings.text.lines[i],
        surprise,
        findings.text.words[i],
        [number[guess] for guess in guesses],
        [v for t, (_, guess, truth) in enumerate(tokens) if guess != truth for v in (t, number[truth])],
        [(1000 * u.values[i]).round().astype(int).tolist() for u in findings.uncertainties],
        [_alternatives(p, {guess, truth}, number) for p, guess, truth in tokens],
    ]


def _alternatives(p: dict[str, float], always: set[str], number: dict[str, int]) -> list[int]:
    """The labels worth naming, and those in ``always``, as [label, thousandths, ...]."""
    ranked = sorted(p, key=lambda label: (-p[label], label))
    named = [
        label
        for rank, label in enumerate(ranked)
        if label in always or (rank < _MOST_NAMED and p[label] >= _WORTH_NAMING)
    ]
    return [value for label in named for value in (number[label], round(1000 * p[label]))]
