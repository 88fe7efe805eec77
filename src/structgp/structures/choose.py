"""What users may pass as the structure, and the likelihood that it means."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from structgp.errors import InputError
from structgp.structures.base import Structure
from structgp.structures.linear_chain.chain import Chain
from structgp.structures.opaque.blackbox import BlackBox
from structgp.structures.pseudo_likelihood import Piecewise
from structgp.structures.spec import Spec, chain, piecewise

NAMED: dict[str, Callable[[], Spec]] = {"chain": chain, "piecewise": piecewise}


@dataclass(frozen=True)
class Custom:
    """A likelihood of one's own to train with, and what answers questions afterwards.

    log_prob : a function or a :class:`Structure`. predict_with : 'auto' for the likelihood itself if it
    offers marginals, else the chain; 'chain'; or a Structure. n_jobs : processes for a NumPy function, -1
    for one per core. batched : whether a function computes a whole batch, ``function(f, g, y, mask)``; None
    to read its attribute ``batched``."""

    log_prob: Callable[..., Any] | Structure
    predict_with: str | Structure = "auto"
    n_jobs: int = 1
    batched: bool | None = None

    @property
    def structure(self) -> Structure:
        """What to train with."""
        if isinstance(self.log_prob, Structure):
            return self.log_prob
        _check_instance(self.log_prob)
        batched = self.batched
        if batched is None:
            batched = getattr(self.log_prob, "batched", False) is True
        return BlackBox(self.log_prob, batched=batched, n_jobs=self.n_jobs)


def as_structure(given: Any, n_jobs: int = 1) -> Structure:
    """The likelihood to train with.

    given : 'chain' or 'piecewise'; a :class:`Spec`; a :class:`Structure`, which is returned as it is; any
    other callable, as a :class:`BlackBox` that uses ``n_jobs`` processes; or a :class:`Custom`. A callable
    is asked for values only: one that also offers ``marginals`` or ``decode`` should subclass Structure."""
    if isinstance(given, Structure):
        return given
    if isinstance(given, Custom):
        return given.structure
    if isinstance(given, str) and given in NAMED:
        given = NAMED[given]()
    if isinstance(given, Spec):
        return Piecewise(given) if given.likelihood == "piecewise" else Chain(spec=given)
    _check_instance(given)
    if callable(given):
        return Custom(given, n_jobs=n_jobs).structure
    names = ", ".join(repr(name) for name in NAMED)
    raise InputError(
        "structure",
        f"must be a structure, got {given!r}",
        f"pass one of {names}, a Spec, a Structure or a function(f, g, y)",
    )


def _check_instance(given: Any) -> None:
    if inspect.isclass(given):
        name = given.__name__
        raise InputError("structure", f"{name} is a class", f"pass an instance, as {name}()")
