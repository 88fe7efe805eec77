"""The labelling page with a perfect annotator: sequences and keys that it takes, and the panel's intervals.

    python -m experiments.labelling --data DIR [--task TASK ...] [--seeds N ...] [--every N]

The loop is the page's own (``service.session``, ``service.refit``), without the browser; the model is
fitted after every N labelled sequences. For each task, 60 % of the sequences are the pool, and the rest are
test data. Random choice is scored once, at 100 labelled sequences; the page's choice after each fit.

Keys are counted as the page takes them: arrows to reach a span, shift and arrows to select it, a letter for
its type or a digit for one of the model's alternatives, and Enter. Without suggestions, all tokens are
outside at first.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.active import load
from experiments.data import TASKS, keep, run_command
from structgp.data.sources import JsonReader
from structgp.data.sources.lines import FileSequence
from structgp.data.span_labels import labels_to_spans
from structgp.service.answering import Answerer
from structgp.service.label_pool import Pool
from structgp.service.refit import Refitter
from structgp.service.session import Session
from structgp.service.store import Store
from structgp.service.tag_set import Labels, TagSet

LAST = 100
SETTLED = 20
"""Number of labelled sequences after which keys are counted and intervals checked."""


class AtOnce:
    """Stands in for ``Background``: it keeps a task until ``work`` is called, and then runs it at once."""

    def __init__(self, refitter: Refitter) -> None:
        self.refitter, self.listener, self.busy = refitter, None, None
        self.task: dict[str, Any] | None = None

    def start(self, task: dict[str, Any]) -> bool:
        if task["do"] != "warm":
            self.task = task
        return False

    def work(self) -> None:
        task, self.task = self.task, None
        for name, value in () if task is None else self.refitter.run(task):
            self.listener(name, value)  # type: ignore[misc]


def spans_of(labels: Labels, tags: TagSet) -> set[tuple[int, int, str]]:
    """The spans of the labels; if labels are not spans, the runs of tokens with the same label."""
    if tags.spans:
        return {(s[0], s[1], s[2]) for s in labels_to_spans(labels)}
    found: list[tuple[int, int, str]] = []
    for t, label in enumerate(labels):
        if label is not None and found and found[-1][2] == label and found[-1][1] == t:
            found[-1] = (found[-1][0], t + 1, label)
        elif label is not None:
            found.append((t, t + 1, label))
    return set(found)


def begun(labels: Sequence[str]) -> list[str]:
    """The labels with an I at the beginning of a span replaced by B, since the page accepts no such I. They
    occur in two sequences of japanesene."""
    found: list[str] = []
    for label in labels:
        before = found[-1] if found else "O"
        stray = label.startswith("I-") and (before == "O" or before[1:] != label[1:])
        found.append("B" + label[1:] if stray else label)
    return found


def keys(start: Labels, goal: Labels, tags: TagSet, told: dict[str, Any] | None) -> int:
    """Number of keys that turn the labels ``start`` into ``goal``, with Enter. told : the model's answer
    with its alternatives."""
    have, want = spans_of(start, tags), spans_of(goal, tags)
    cursor, count = 0, 1
    if told is not None:
        cursor = int(np.argmax([u[0] for u in told["uncertainty"]]))
    for first, stop, label in sorted(want - have):
        ranked = [] if told is None else _alternatives(told, first, tags)
        one_key = (first, stop, label) in ranked[:9]
        away = min(abs(cursor - first), first + 1)
        count += away + (1 if one_key else stop - first)
        cursor = first if one_key else stop - 1
        have = {s for s in have if s[1] <= first or s[0] >= stop}
    for first, stop, _ in sorted(have - want) if tags.spans else ():
        count += min(abs(cursor - first), first + 1) + stop - first
        cursor = stop - 1
    return count


def _alternatives(told: dict[str, Any], t: int, tags: TagSet) -> list[tuple[int, int, str]]:
    if not tags.spans:
        return [(t, t + 1, label) for label, _ in told["alternatives"][t]]
    found = sorted((s for s in told["spans"] if s[0] <= t < s[1]), key=lambda s: -s[3])
    return [(start, stop, label) for start, stop, label, _ in found]


def run(task: str, data: str | None, seed: int, every: int) -> dict[str, Any]:
    """Simulates one annotator up to 100 labelled sequences."""
    X, y, X_test, y_test = load(task, data, seed)
    y = [begun(labels) for labels in y]
    words = [[str(t) for t in range(len(x))] for x in X]
    parts = zip(X, words, strict=True)
    sequences = [FileSequence([()] * len(x), x, w, None, task, i) for i, (x, w) in enumerate(parts)]
    pool, tags = Pool(task, JsonReader(), sequences), TagSet.from_labels((v for s in y for v in s), task)
    with tempfile.TemporaryDirectory() as folder:
        refitter = Refitter(X, str(Path(folder) / "model"), {"features": "columns"})
        store, background = Store(str(Path(folder) / "db")), AtOnce(refitter)
        store.open_pool(pool.digest, tags, [("", w) for w in words])
        session = Session(pool, store, tags, Answerer(), background, seed)  # type: ignore[arg-type]
        errors, with_keys, without, looks = {}, [], [], []
        for n in range(1, LAST + 1):
            shown = session.next("ann")
            i = shown["sequence"]
            told = shown["suggestion"]
            blank: Labels = ["O" if tags.spans else None] * len(X[i])
            if n > SETTLED and shown["stream"] != "audit":
                with_keys.append(keys(told["labels"] if told else blank, y[i], tags, told))
                without.append(keys(blank, y[i], tags, None))
            session.accept(str(n), "ann", i, list(y[i]), shown["stream"])
            if n % every == 0:
                background.work()
            if n % every == 0 and session.answerer.tagger is not None:
                tagger = session.answerer.tagger
                errors[n] = 1 - tagger.score(X_test, y_test)
                if n % 10 == 0 and n >= SETTLED:
                    rest = [k for k in range(len(X)) if not store.is_labelled(k)]
                    true = 1 - tagger.score([X[k] for k in rest], [y[k] for k in rest])
                    at = session.status()["model"]["error"]
                    looks.append((at["low"], true, at["high"]))
        session.answerer.close()
        store.close()
        drawn = np.random.default_rng([seed, 2]).permutation(len(X))[:LAST]
        alone = Refitter(X, str(Path(folder) / "random"), {"features": "columns"})
        alone._fit({int(i): list(y[i]) for i in drawn}, choose_settings=True)
        at_random = 1 - alone.tagger.score(X_test, y_test)
    there = next((n for n, e in errors.items() if e <= at_random), None)
    held = sum(low <= true <= high for low, true, high in looks)
    return {
        "task": task,
        "seed": seed,
        "random": at_random,
        "reached": there,
        "errors": {str(n): round(e, 4) for n, e in errors.items()},
        "keys": float(np.mean(with_keys)),
        "keys_without": float(np.mean(without)),
        "held": held,
        "looks": [[round(v, 4) for v in look] for look in looks],
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.labelling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", help="folder of the paper's data (default: STRUCTGP_DATA)")
    parser.add_argument("--task", nargs="+", choices=("recipes", *TASKS), default=["recipes"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--every", type=int, default=5, help="labelled sequences between fits")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    print(f"{'':<12}{'seed':>5}{'random at 100':>15}{'reached at':>12}{'keys':>7}{'without':>9}{'held':>8}")
    for task in options.task:
        for seed in options.seeds:
            row = run(task, options.data, seed, options.every)
            keep("labelling", row | {"every": options.every})
            shown = f"{row['reached'] or 'never'}"
            print(
                f"{task:<12}{seed:>5}{row['random']:>15.2%}{shown:>12}{row['keys']:>7.1f}"
                f"{row['keys_without']:>9.1f}{row['held']:>4} of {len(row['looks'])}",
                flush=True,
            )


if __name__ == "__main__":
    run_command(main)
