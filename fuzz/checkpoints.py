"""Fits that are cut off, and continue from damaged checkpoints."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import structgp
from fuzz.models import strings
from structgp import Prior, StructuredGPClassifier

KINDS: dict[str, dict[str, Any]] = {
    "second order": {},
    "natural": {"inference": "natural", "posterior": structgp.Inducing(5)},
    "adam": {"inference": "adam", "posterior": structgp.Inducing(5)},
    "minibatch": {"inference": structgp.Minibatch()},
    "saga": {"inference": "saga", "posterior": structgp.Inducing(5)},
}
LAST = 6


class CutOffError(Exception):
    """Simulates a kill."""


def model(name: str) -> StructuredGPClassifier:
    return StructuredGPClassifier(prior=Prior(data_weight=1.0), n_draws=4).set_params(**KINDS[name])


def data() -> tuple[list[Any], list[Any]]:
    return strings(random.Random(3), 10)


def write(name: str, path: Path) -> bytes:
    """The checkpoint of a fit that was cut off after some steps."""

    def cut_off(info: Any) -> bool:
        if info.iteration == 2:
            raise CutOffError
        return False

    from structgp.inference.checkpoint import Checkpoint

    seconds, Checkpoint.seconds = Checkpoint.seconds, 0.0
    before = Checkpoint.__init__.__defaults__
    Checkpoint.__init__.__defaults__ = (0.0,)
    try:
        model(name).fit(*data(), callback=cut_off, checkpoint=path)
    except CutOffError:
        return path.read_bytes()
    finally:
        Checkpoint.seconds, Checkpoint.__init__.__defaults__ = seconds, before
    raise RuntimeError("the fit was not cut off")


def answers(path: str, name: str) -> str:
    """Continues a fit from a file: 'answered', or 'refused' with the error message; raises on anything
    else."""
    X, y = data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = model(name).fit(X, y, callback=lambda i: i.iteration >= LAST, checkpoint=path)
            p = found.predict_marginals(X)
        except structgp.InputError as error:
            if "\n" in str(error) or len(str(error)) > 2000:
                raise RuntimeError("an error of several lines, or a long one") from error
            return f"refused: {error}"
    if not np.isfinite([v for x in p for token in x for v in token.values()]).all():
        raise FloatingPointError("answers are not finite, and nothing was said")
    return "answered"
