"""What the background process does: fits, chooses what to label next, and says how good the model is.

It has a copy of the pool's features and is handed the labels, so that nothing is shared with the process
that answers the page. It runs on one thread with a low priority."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from structgp.errors import StructgpError, StructgpWarning
from structgp.service.tag_set import Labels

CHOSEN = 20
"""Sequences that are chosen after a fit: enough for an annotator who is faster than the next fit."""
CANDIDATES = 1000
"""Unlabelled sequences, drawn anew for each fit, among which the next are chosen. Their number decides what
choosing costs, about 1 ms each; of 1,000 drawn at random, the best 20 are on average among the best 2 % of
the pool whatever its size."""
SCORED = 300
"""Unlabelled sequences, drawn at random, whose expected error is shown."""
SWEPT = 500
"""Sequences per part of a sweep over the pool."""
FULL_AT = "settings_chosen_at"
"""Under this name the model's file keeps ``Refitter.full_at``."""
DOUBTED = 0.5
"""A given label with a lower probability than this contradicts the model if the model's label is another
one."""


@dataclass
class Refitter:
    """features : of each sequence of the pool. parameters : of the classifier. keep : what the model's file
    keeps of the reader."""

    features: Sequence[Any]
    model_path: str
    parameters: dict[str, Any] = field(default_factory=dict)
    keep: dict[str, Any] = field(default_factory=dict)
    tagger: Any = None
    full_at: int = 0
    "Number of sequences of the last fit that chose its settings by cross-validation."

    def go_on(self) -> None:
        """Takes up the model of an earlier run, if its file is there and can be read."""
        if os.path.exists(self.model_path):
            from structgp.api.estimator import load

            with suppress(StructgpError):
                self.tagger = load(self.model_path)
                self.full_at = int(self.tagger.model_.extra.get(FULL_AT, 0))

    def run(self, task: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """What a task finds, part by part, as (name, value)."""
        if task["do"] == "sweep":
            yield from self._sweep(task["unlabelled"])
            return
        labels: dict[int, Labels] = task["labels"]
        began = time.process_time()
        self._fit(labels)
        seconds = time.process_time() - began
        self.tagger.save(self.model_path, self.keep | {FULL_AT: self.full_at})
        yield "model", {"path": self.model_path, "sequences": len(labels), "seconds": seconds}
        rng = np.random.default_rng([task["seed"], len(labels)])
        rest = np.array(task["unlabelled"], dtype=np.int64)
        if len(rest):
            yield "chosen", self._chosen(rng.permutation(rest)[:CANDIDATES])
        if len(rest):
            yield "expected", self._expected(rng.permutation(rest)[:SCORED])
        yield "doubted", self._doubted(labels)

    def _fit(self, labels: Mapping[int, Labels]) -> None:
        """From the posterior of the last fit; from the prior, with settings chosen by cross-validation,
        whenever the number of sequences has doubled since they were chosen. On recipes (200 sequences) the
        former takes 1.4 s of one core and the latter 17 s, for the same error."""
        from structgp.api.estimator import StructuredGPClassifier

        X, y = [self.features[i] for i in labels], list(labels.values())
        if self.tagger is None or len(X) >= 2 * self.full_at:
            self.tagger, self.full_at = StructuredGPClassifier(**self.parameters), len(X)
        self.tagger.warm_start = True
        with warnings.catch_warnings():
            # Few labels bring warnings about the fit that an annotator can do nothing about.
            warnings.simplefilter("ignore", StructgpWarning)
            self.tagger.fit(X, y)

    def _chosen(self, among: np.ndarray) -> list[int]:
        from structgp.api.active import select

        places = select(self.tagger, [self.features[i] for i in among], CHOSEN)
        return [int(among[k]) for k in places]

    def _expected(self, among: np.ndarray) -> dict[str, Any]:
        found: dict[str, Any] = self.tagger.expected_scores([self.features[i] for i in among]).as_dict()
        return {name: found[name] for name in ("error", "f1", "precision", "recall", "level")}

    def _doubted(self, labels: Mapping[int, Labels]) -> list[dict[str, Any]]:
        """Tokens whose given label the model contradicts, the most improbable first."""
        asked = self.tagger.ask([self.features[i] for i in labels])
        guesses, marginals = self.tagger.labels_of(asked), self.tagger.marginals_of(asked)
        found = []
        for (i, given), guess, at in zip(labels.items(), guesses, marginals, strict=True):
            for t, label in enumerate(given):
                if label is not None and guess[t] != label and at[t].get(label, 0.0) < DOUBTED:
                    p = {"given": at[t].get(label, 0.0), "model": at[t][guess[t]]}
                    found.append({"sequence": i, "token": t, "given": label, "model": guess[t], "p": p})
        return sorted(found, key=lambda one: one["p"]["given"])

    def _sweep(self, unlabelled: Sequence[int]) -> Iterator[tuple[str, Any]]:
        """The model's labels of all unlabelled sequences, and the probability that all are right."""
        for start in range(0, len(unlabelled), SWEPT):
            part = list(unlabelled[start : start + SWEPT])
            asked = self.tagger.ask([self.features[i] for i in part])
            labels = self.tagger.labels_of(asked)
            both = zip(part, labels, asked.log_probs(labels), strict=True)
            found = {i: (y, float(np.exp(value))) for i, y, value in both if value is not None}
            yield "swept", {"found": found, "done": start + len(part), "of": len(unlabelled)}
        yield "swept", {"found": {}, "done": len(unlabelled), "of": len(unlabelled)}


def serve_tasks(
    connection: Any, features: Sequence[Any], model_path: str, settings: dict[str, Any]
) -> None:
    """The main function of the background process: tasks in, parts of answers out, until the other end is
    closed. An error is an answer too."""
    os.nice(10)
    import torch

    torch.set_num_threads(1)
    refitter = Refitter(features, model_path, **settings)
    refitter.go_on()
    try:
        while True:
            task = connection.recv()
            try:
                for name, value in refitter.run(task):
                    connection.send((name, value))
            except (EOFError, BrokenPipeError):
                raise
            except Exception as error:
                connection.send(("error", f"{type(error).__name__}: {error}"))
            connection.send(("done", task["do"]))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
