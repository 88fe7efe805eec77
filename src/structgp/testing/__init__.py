"""Checks that a likelihood of your own does what the inference engine relies on.

In a test file of your own, one test per check::

    @pytest.mark.parametrize("check", likelihood_checks(my_likelihood), ids=str)
    def test_likelihood(check):
        check()

or all at once, with one error that lists every failure: ``check_likelihood(my_likelihood)``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from structgp.errors import StructgpWarning
from structgp.structures import BlackBox, as_structure
from structgp.testing import checks

__all__ = ["Check", "check_likelihood", "likelihood_checks"]


@dataclass(frozen=True)
class Check:
    """One check: call it, and it raises AssertionError if the likelihood fails it."""

    name: str
    run: Callable[[], None]

    def __call__(self) -> None:
        with warnings.catch_warnings():
            # A gradient that is not used has a check of its own.
            warnings.simplefilter("ignore", StructgpWarning)
            try:
                self.run()
            except AssertionError:
                raise
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        return self.name


def likelihood_checks(
    likelihood: Any, n_labels: int = 3, *, normalised: bool = True, seed: int = 0, n_jobs: int = 1
) -> list[Check]:
    """The checks that apply to a likelihood.

    Parameters
    ----------
    likelihood : whatever :func:`structgp.structures.as_structure` takes.
    n_labels : number V of labels to try it with; the check that it is normalised enumerates V^T labellings,
        up to 1000.
    normalised : True if its probabilities sum to 1 over all labellings; False for a pseudo-likelihood.
    seed : seed of the random scores that it is tried on.
    n_jobs : number of processes that will evaluate a function; unless 1, it must survive pickling.
    """
    structure = as_structure(likelihood, n_jobs)
    in_processes = isinstance(structure, BlackBox) and structure.n_jobs not in (None, 1)
    names = ["shape", "deterministic", "draws", "inputs", "finite", "large", "gradient"]
    optional = {
        "padding": not isinstance(structure, BlackBox) or structure.batched,
        "normalised": normalised,
        "shift": structure.ignores_shift,
        "curvature": structure.has_curvature,
        "marginals": structure.has_marginals,
        "decode": structure.has_decoder,
        "pickle": in_processes,
    }
    names += [name for name, applies in optional.items() if applies]
    if isinstance(structure, BlackBox) and in_processes:
        # The other checks run in this process, where a small call costs nothing.
        structure = BlackBox(structure.function, batched=structure.batched)
    trial = checks.Trial(structure, n_labels, seed)
    return [Check(name, partial(getattr(checks, f"check_{name}"), trial)) for name in names]


def check_likelihood(
    likelihood: Any, n_labels: int = 3, *, normalised: bool = True, seed: int = 0, n_jobs: int = 1
) -> None:
    """Runs :func:`likelihood_checks`, and raises one AssertionError that lists every failure."""
    to_run = likelihood_checks(likelihood, n_labels, normalised=normalised, seed=seed, n_jobs=n_jobs)
    failures: dict[str, list[str]] = {}
    for check in to_run:
        try:
            check()
        except AssertionError as error:  # noqa: PERF203
            failures.setdefault(str(error) or type(error).__name__, []).append(check.name)
    if failures:
        n_failed = sum(len(names) for names in failures.values())
        lines = [f"- {', '.join(names)}: {text}" for text, names in failures.items()]
        head = f"{n_failed} of {len(to_run)} checks of the likelihood failed"
        raise AssertionError("\n".join([head, *lines]))
