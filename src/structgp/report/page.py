"""One self-contained HTML page: nothing is fetched, and no other script than ours can run in it."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from string import Template

from structgp.report import sections
from structgp.report.findings import Findings
from structgp.report.markup import join
from structgp.report.payload import payload


def render(findings: Findings) -> str:
    """The page; equal findings give equal text."""
    script = _asset("page.js")
    return Template(_asset("page.html")).substitute(
        style=_asset("page.css"),
        script=script,
        script_hash=_hash(script),
        data_name=join([findings.text.name]),
        model_name=join([findings.model_name]),
        headline=sections.headline(findings),
        confidence=sections.confidence(findings),
        confusions=sections.confusions(findings),
        transitions=sections.transitions(findings),
        weights=sections.weights(findings),
        fit=sections.fit(findings),
        payload=payload(findings),
    )


def _asset(name: str) -> str:
    return (resources.files("structgp.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """What the page's security policy knows its script by."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
