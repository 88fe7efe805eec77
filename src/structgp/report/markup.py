"""Pieces of the page: HTML and SVG that escape plain text, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

MINUS, NARROW_SPACE = "\N{MINUS SIGN}", "\N{NARROW NO-BREAK SPACE}"
_VOID = frozenset({"br", "input", "meta"})


class Markup(str):
    """Text that is HTML already; plain strings are escaped when they are joined to it."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """One element. Attributes are named as in HTML, with _ for - and a trailing _ after words that Python
    reserves (``class_``); True gives a bare attribute, None and False leave it out."""
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


def count(n: float) -> str:
    """12,345"""
    return f"{n:,.0f}".replace("-", MINUS)


def decimal(value: float | None, digits: int) -> str:
    """A fixed number of decimals, with a real minus sign; a dash for an unknown value."""
    if value is None or math.isnan(value):
        return "\N{EN DASH}"
    if math.isinf(value):
        return "\N{INFINITY}" if value > 0 else MINUS + "\N{INFINITY}"
    text = f"{value:,.{digits}f}"
    # No negative zero.
    return text.lstrip("-") if not text.strip("-0.,") else text.replace("-", MINUS)


def percent(share: float, digits: int = 1) -> str:
    return decimal(100 * share, digits) + NARROW_SPACE + "%"


def plural(n: int, noun: str) -> str:
    """1 token, 2 tokens"""
    return f"{count(n)} {noun}" if n == 1 else f"{count(n)} {noun}s"
