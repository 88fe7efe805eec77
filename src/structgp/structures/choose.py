"""Turns whatever users may pass as the structure into the likelihood that it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from structgp.errors import InputError
from structgp.structures.base import Structure
from structgp.structures.declare import edges, grid, layers, same, segments, tree
from structgp.structures.declared import Declared
from structgp.structures.linear_chain.chain import Chain
from structgp.structures.masks import Rules
from structgp.structures.opaque.blackbox import BlackBox
from structgp.structures.opaque.by_values import ByValues
from structgp.structures.opaque.differences import Differences
from structgp.structures.pseudo_likelihood import Piecewise
from structgp.structures.segments.segments import Segments
from structgp.structures.segments.span_scheme import SpanScheme
from structgp.structures.spec import Spec, chain, piecewise

NAMED: dict[str, Spec] = {"chain": chain(), "piecewise": piecewise()}
DECLARING = {each.__name__: each for each in (chain, edges, grid, layers, piecewise, same, segments, tree)}
"""Functions that declare a structure, by name."""


@dataclass(frozen=True)
class Custom:
    """A user's own likelihood to train with, and the likelihood that answers questions afterwards.

    log_prob : a function, or whatever else :func:`as_structure` takes. predict_with : 'auto' for the
    likelihood itself, used through its values alone if it offers no marginals; 'chain'; or a Structure.
    n_jobs : number of processes for a NumPy function, -1 for one per core; None for one, or for one per
    core where a fit would take long. Each process imports the module that defines the function, unless that
    is the script itself. batched : True if a function computes a whole batch, ``function(f, g, y, mask)``;
    None to read its attribute ``batched``."""

    log_prob: Callable[..., Any] | Structure | Spec | str
    predict_with: str | Structure = "auto"
    n_jobs: int | None = None
    batched: bool | None = None


def structure_for(
    spec: Spec, rules: Rules | None = None, classes: Sequence[str] = (), fitting: bool = False
) -> Structure:
    """The likelihood that a spec declares, over the labellings that ``rules`` allow. classes : the labels,
    which determine what a segment is. fitting : True for a fit, False for answers."""
    if spec.has_segments:
        return Segments(SpanScheme.of(list(classes)), rules, spec)
    return Chain(rules, spec) if spec.is_chain else Declared(spec, rules, fitting)


def check_structure(given: Any) -> None:
    """Raises InputError for an unknown name, and for a function that declares a structure but was not
    called, as it would be mistaken for a likelihood."""
    given = given.log_prob if isinstance(given, Custom) else given
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    if isinstance(given, str) and given not in NAMED:
        remedy = f"use {', '.join(map(repr, NAMED))}, or a function that declares one, such as grid()"
        if name in DECLARING:
            remedy = f"pass structgp.{name}(...)"
        raise InputError("structure", f"{name!r} is not a name of one", remedy)
    if any(given is each for each in DECLARING.values()):
        raise InputError("structure", f"{name} is a function that declares one", f"call it: {name}(...)")


def as_structure(given: Any, n_jobs: int | None = None) -> Structure:
    """The likelihood to train with.

    given : 'chain' or 'piecewise'; a :class:`Spec`; a :class:`Structure`, which is returned as it is; any
    other callable, as a :class:`BlackBox` that uses ``n_jobs`` processes; or a :class:`Custom`. A callable
    gives values only: one that also offers ``marginals`` or ``decode`` should subclass Structure."""
    batched = None
    if isinstance(given, Custom):
        given, n_jobs, batched = given.log_prob, given.n_jobs, given.batched
    if isinstance(given, Structure):
        return given
    if isinstance(given, str) and given in NAMED:
        given = NAMED[given]
    if isinstance(given, Spec):
        if not given.is_chain:
            return Declared(given)
        return Piecewise(given) if given.likelihood == "piecewise" else Chain(spec=given)
    if inspect.isclass(given):
        name = given.__name__
        raise InputError("structure", f"{name} is a class", f"pass an instance, as {name}()")
    if callable(given):
        whole = getattr(given, "batched", False) is True if batched is None else batched
        return BlackBox(given, batched=whole, n_jobs=n_jobs)
    names = ", ".join(map(repr, NAMED))
    remedy = f"pass one of {names}, a Spec, a Structure or a function(f, g, y)"
    raise InputError("structure", f"must be a structure, got {given!r}", remedy)


def answers_of(structure: Structure) -> Structure:
    """The structure that answers for a likelihood: itself, or ``ByValues`` of it if it offers no
    marginals."""
    inner = structure.inner if isinstance(structure, Differences) else structure
    return inner if inner.has_marginals else ByValues(inner)
