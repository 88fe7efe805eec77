"""What may stand for a structure where one is asked for."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from structgp.errors import InputError
from structgp.structures.base import Structure
from structgp.structures.linear_chain.chain import Chain
from structgp.structures.opaque.blackbox import BlackBox
from structgp.structures.piecewise import Piecewise

NAMED: dict[str, type[Structure]] = {"chain": Chain, "piecewise": Piecewise}


@dataclass(frozen=True)
class Custom:
    """A likelihood of your own, with what it needs beside the function.

    log_prob : see ``as_structure``. predict_with : the structure that turns drawn scores into label
    probabilities: 'auto' (``log_prob`` itself if it offers marginals, else the chain), 'chain', or a
    structure. n_jobs : processes that share the sequences where ``log_prob`` is a NumPy function of one
    sequence; -1 for one per core.
    """

    log_prob: Any
    predict_with: str | Structure = "auto"
    n_jobs: int = 1


def as_structure(structure: Any, n_jobs: int = 1) -> Structure:
    """The structure that ``structure`` stands for.

    'chain' or 'piecewise'; a :class:`Structure`, which is returned as it is; any other callable, as a
    :class:`BlackBox` that uses ``n_jobs`` processes; or one of these in a :class:`Custom`. A callable with
    an attribute ``batched = True`` computes a whole batch at once. A callable is asked for values only: one
    that can also give ``marginals`` or ``decode`` should subclass Structure.
    """
    if isinstance(structure, Custom):
        return as_structure(structure.log_prob, structure.n_jobs)
    if isinstance(structure, Structure):
        return structure
    if isinstance(structure, str) and structure in NAMED:
        return NAMED[structure]()
    if inspect.isclass(structure):
        name = structure.__name__
        raise InputError("structure", f"{name} is a class", f"pass an instance, as {name}()")
    if callable(structure):
        return BlackBox(
            structure, batched=getattr(structure, "batched", False) is True, n_jobs=n_jobs
        )
    names = ", ".join(repr(name) for name in NAMED)
    raise InputError(
        "structure",
        f"must be a structure, got {structure!r}",
        f"pass one of {names}, a Structure or a function(f, g, y)",
    )
