"""HTML and SVG from Python, in which plain text cannot become markup by accident."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"br", "input", "meta"})


class Markup(str):
    """Text that is HTML already. What is a plain string is escaped where it meets one."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element. Attributes are named as in HTML, with _ for - and a last _ for what Python keeps to
    itself (``class_``); True gives a bare one, None and False leave it out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Markup:
    """Parts one after the other, each escaped unless it is markup."""
    return Markup("".join(p if isinstance(p, Markup) else escape(str(p)) for p in parts))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
    return f' {name}="{escape(text)}"'
