"""How numbers are written on the page."""

from __future__ import annotations

import math

MINUS, NARROW_SPACE = "\N{MINUS SIGN}", "\N{NARROW NO-BREAK SPACE}"


def count(n: float) -> str:
    """12,345"""
    return f"{n:,.0f}".replace("-", MINUS)


def decimal(value: float | None, digits: int) -> str:
    """A fixed number of decimals, with a real minus sign; a dash for what is not known."""
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
