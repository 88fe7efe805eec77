"""NLL of the default fit on held-out TRAINING data, with its constants and with neighbouring values.

    python -m experiments.constants --data DIR [--task TASK ...] [--fold K ...]

Each row changes one constant and prints the cross-validated NLL that the fit itself reports
(``held_out_``), on the training half of the paper's folds (the first one by default), raw columns. Test
halves are never read. Rows go to results/constants.jsonl.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from experiments.data import arguments, keep, load_fold, run_command
from structgp import StructuredGPClassifier
from structgp.gp.families import weights
from structgp.gp.kernels import build, relevance
from structgp.inference import SecondOrder

TASKS = ("basenp", "chunking", "japanesene", "segmentation")
CHANGES: tuple[tuple[str, Any, str, Any], ...] = (
    ("as it is", None, "", None),
    ("light tails 2", relevance, "LIGHT_TAILS", 2.0),
    ("light tails 32", relevance, "LIGHT_TAILS", 32.0),
    ("prior count 3", weights, "PRIOR_COUNT", 3.0),
    ("prior count 30", weights, "PRIOR_COUNT", 30.0),
    ("seldom: once", build, "SELDOM", 1),
    ("seldom: up to 4 times", build, "SELDOM", 4),
    ("3 learning rounds", None, "learning_rounds", 3),
    ("8 learning rounds", None, "learning_rounds", 8),
)
"""Name of the row; the module whose constant is changed, or None for a setting of the optimiser; the name
of the constant or setting; and its value."""


@contextmanager
def changed(module: Any, name: str, value: Any) -> Iterator[None]:
    """Sets a constant of a module to another value within the context."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def left_out_nll(X: list[Any], y: list[list[str]], module: Any, name: str, value: Any) -> float:
    """The cross-validated NLL that a fit with one constant changed reports."""
    optimizer: Any = "auto" if module or not name else SecondOrder(learn_scales="all", **{name: value})
    model = StructuredGPClassifier(inference=optimizer)
    if module is None:
        model.fit(X, y)
    else:
        with changed(module, name, value):
            model.fit(X, y)
    found = model.held_out_
    assert found is not None
    return float(found["token_nll"])


def main(words: Sequence[str] | None = None) -> None:
    options = arguments("constants", __doc__, TASKS).parse_args(words)
    print(f"{'':<24}" + "".join(f"{task:>14}" for task in options.task))
    for row, *change in CHANGES:
        found = {}
        for task in options.task:
            folds = [load_fold(task, options.data, k, columns=True) for k in options.fold]
            found[task] = statistics.mean(left_out_nll(fold.X, fold.y, *change) for fold in folds)
        keep("constants", {"change": row} | found)
        print(f"{row:<24}" + "".join(f"{nll:>14.4f}" for nll in found.values()), flush=True)


if __name__ == "__main__":
    run_command(main)
