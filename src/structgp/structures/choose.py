"""What may stand for a likelihood where one is asked for."""

from __future__ import annotations

import inspect
from typing import Any

from structgp.errors import InputError
from structgp.structures.base import Structure
from structgp.structures.linear_chain.chain import Chain
from structgp.structures.opaque.blackbox import BlackBox
from structgp.structures.piecewise import Piecewise

NAMED: dict[str, type[Structure]] = {"chain": Chain, "piecewise": Piecewise}


def as_structure(likelihood: Any, n_jobs: int = 1) -> Structure:
    """The structure that ``likelihood`` stands for.

    'chain' or 'piecewise'; a :class:`Structure`, which is returned as it is; or any other callable,
    as a :class:`BlackBox` that uses ``n_jobs`` processes. A callable with an attribute
    ``batched = True`` computes a whole batch at once. A callable is asked for values only: one that
    can also give ``marginals`` or ``decode`` should subclass Structure.
    """
    if isinstance(likelihood, Structure):
        return likelihood
    if isinstance(likelihood, str) and likelihood in NAMED:
        return NAMED[likelihood]()
    if inspect.isclass(likelihood):
        name = likelihood.__name__
        raise InputError("likelihood", f"{name} is a class", f"pass an instance, as {name}()")
    if callable(likelihood):
        return BlackBox(
            likelihood, batched=getattr(likelihood, "batched", False) is True, n_jobs=n_jobs
        )
    names = ", ".join(repr(name) for name in NAMED)
    raise InputError(
        "likelihood",
        f"{likelihood!r} is none",
        f"pass one of {names}, a Structure or a function(f, g, y)",
    )
