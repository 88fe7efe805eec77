"""The labelling page: one HTML file with its script and style, which contacts only its own service."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from string import Template
from typing import Any

SCRIPTS = ("spans.js", "view.js", "panel.js", "actions.js")
"""Parts of the page's script, in order."""


def _asset(name: str) -> str:
    return (resources.files("structgp.service") / "assets" / name).read_text(encoding="utf-8")


def _script() -> str:
    body = "\n".join(map(_asset, SCRIPTS))
    return f'"use strict";\n(() => {{\n{body}\n}})();\n'


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# The policy identifies the page's own script by its hash, so that no other script can run.
POLICY = (
    f"default-src 'none'; script-src 'sha256-{_hash(_script())}'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page(given: dict[str, Any]) -> str:
    """The page as HTML. given : JSON values for its script."""
    # Only strings contain '<', which could end the element.
    data = json.dumps(given, ensure_ascii=False).replace("<", "\\u003c")
    return Template(_asset("label.html")).substitute(style=_asset("label.css"), script=_script(), data=data)
