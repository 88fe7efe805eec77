"""Checks that a JSON value from a file has the expected form, before anything is built from it.

A form is a type (``str``, ``bool``, ``list``, ``dict``, ``object`` for anything), ``WHOLE`` or ``NUMBER``;
``[form]`` for a list; ``{"name": form}`` for an object, in which names that end in ? may be missing and
other names are ignored; ``{str: form}`` for an object with any names; or a tuple of alternatives, in which
None stands for null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

WHOLE = "a whole number, 0 or more"
NUMBER = "a number"
MOST = 2**63


_NAMES = {str: "text", bool: "true or false", list: "a list", dict: "an object", None: "null"}


class FormError(ValueError):
    """Says, in a few words, where a value does not have its form and what is there instead."""


def read_object(text: str) -> dict[str, Any]:
    """The JSON object in ``text``; FormError if there is none, or if Python cannot hold it."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise FormError("nested too deeply") from None
    except ValueError as error:
        raise FormError(f"not JSON ({error})"[:100]) from None
    if not isinstance(found, dict):
        raise FormError("not a JSON object")
    return found


def check_form(value: Any, form: Any, place: str = "") -> None:
    """FormError, with the place, for the first value that does not have its form."""
    if isinstance(form, tuple):
        if not any(_fits(value, one, place) for one in form):
            _check_alternatives(value, form, place)
    elif isinstance(form, list):
        _check_type(isinstance(value, list), value, "a list", place)
        for i, one in enumerate(value):
            check_form(one, form[0], f"{place}[{i}]")
    elif isinstance(form, Mapping):
        _check_type(isinstance(value, Mapping), value, "an object", place)
        _check_entries(value, form, place)
    elif form is WHOLE:
        _check_type(type(value) is int and 0 <= value < MOST, value, form, place)
    elif form is NUMBER:
        number = type(value) in (int, float) and -MOST < value < MOST and math.isfinite(value)
        _check_type(number, value, form, place)
    else:
        right = value is None if form is None else isinstance(value, form)
        _check_type(right, value, _NAMES.get(form, "something else"), place)


def _check_entries(value: Mapping[str, Any], form: Mapping[Any, Any], place: str) -> None:
    if str in form:
        for name, one in value.items():
            check_form(one, form[str], f"{place}.{name}"[:100])
        return
    for name, one in form.items():
        key = name.removesuffix("?")
        if key in value:
            check_form(value[key], one, f"{place}.{key}")
        elif key == name:
            raise FormError(f"{place}.{key} is missing".lstrip("."))


def _fits(value: Any, form: Any, place: str) -> bool:
    try:
        check_form(value, form, place)
    except FormError:
        return False
    return True


def _check_alternatives(value: Any, form: tuple[Any, ...], place: str) -> None:
    """Raises the error of the last alternative; null, if it is an alternative, comes first."""
    check_form(value, form[-1], place)


def _check_type(right: bool, value: Any, wanted: str, place: str) -> None:
    if not right:
        kinds = {dict: "an object", list: "a list", str: "text", bool: "a flag", type(None): "null"}
        raise FormError(f"{place.lstrip('.')} must be {wanted}, got {kinds.get(type(value), 'a number')}")
