"""The background process: it fits, chooses what to label next, and estimates how good the model is.

It has its own copy of the pool's features and receives the labels with each task, so that it shares nothing
with the process that answers the page. It runs on one thread with low priority."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from structgp.errors import StructgpError, StructgpWarning
from structgp.service.tag_set import Labels

CHOSEN = 20
"""Number of sequences that are chosen after a fit: enough until the next fit, even for a fast annotator."""
CANDIDATES = 1000
"""Number of unlabelled sequences, drawn anew after each fit, among which the next ones are chosen. Choosing
costs about 1 ms for each; the best 20 of 1,000 random sequences are on average among the best 2 % of the
pool, whatever its size."""
SCORED = 300
"""Number of unlabelled sequences, drawn at random, on which the expected error is computed."""
SWEPT = 500
"""Number of sequences in each part of a sweep over the pool."""
AGAIN = 2
"""Factor by which the labelled sequences grow before settings are chosen anew, which takes some ten times
as long as a fit from the last posterior. With 4, the settings of 20 recipes were kept up to 80, and the
model was too pessimistic meanwhile: the intervals of its expected error were above the true error."""
PRIORITY = 5
"""Niceness of the process: other work comes first, but cannot stop it completely."""
FEWEST_TO_CHOOSE = 20
"""Number of labelled sequences from which on settings are chosen: with fewer, cross-validation can tell
little, and there should be suggestions soon."""
FULL_AT = "settings_chosen_at"
"""Name under which the model file keeps ``Refitter.full_at``."""
DOUBTED = 0.5
"""The model contradicts a given label if its probability is lower than this and another label is more
probable."""


@dataclass
class Refitter:
    """Runs the tasks of the background process. features : features of each sequence of the pool.
    parameters : parameters of the classifier. keep : values about the reader that are kept in the model
    file. has_transitions : whether labels depend on their neighbours."""

    features: Sequence[Any]
    model_path: str
    parameters: dict[str, Any] = field(default_factory=dict)
    keep: dict[str, Any] = field(default_factory=dict)
    has_transitions: bool = True
    tagger: Any = None
    full_at: int = 0
    "Number of sequences in the last fit that chose its settings by cross-validation."

    def go_on(self) -> None:
        """Continues with the model of an earlier run, if its file exists and can be read."""
        if os.path.exists(self.model_path):
            from structgp.api.estimator import load

            with suppress(StructgpError):
                self.tagger = load(self.model_path)
                self.full_at = int(self.tagger.model_.extra.get(FULL_AT, 0))

    def run(self, task: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """The results of a task, one by one, as (name, value)."""
        if task["do"] == "warm":
            _warm_up()
            return
        if task["do"] == "sweep":
            yield from self._sweep(task["unlabelled"])
            return
        labels: dict[int, Labels] = task["labels"]
        rest = np.array(task["unlabelled"], dtype=np.int64)
        rng = np.random.default_rng([task["seed"], len(labels)])
        yield from self._fitted(labels, rest, rng, choose_settings=False)
        if len(labels) >= AGAIN * max(1, self.full_at) and len(labels) >= FEWEST_TO_CHOOSE:
            yield from self._fitted(labels, rest, rng, choose_settings=True)
        if len(rest):
            yield "expected", self._expected(rng.permutation(rest)[:SCORED])
        yield "doubted", self._doubted(labels)

    def _fitted(
        self,
        labels: Mapping[int, Labels],
        rest: np.ndarray,
        rng: np.random.Generator,
        choose_settings: bool,
    ) -> Iterator[tuple[str, Any]]:
        """Fits, saves the model file, and chooses what to label next."""
        began = time.process_time()
        self._fit(labels, choose_settings)
        seconds = time.process_time() - began
        self.tagger.save(self.model_path, self.keep | {FULL_AT: self.full_at})
        told = {"sequences": len(labels), "seconds": seconds, "settings": self.full_at}
        yield "model", {"path": self.model_path, **told}
        if len(rest):
            yield "chosen", self._chosen(rng.permutation(rest)[:CANDIDATES])

    def _fit(self, labels: Mapping[int, Labels], choose_settings: bool) -> None:
        """Fits from the prior, with settings chosen by cross-validation, or from the posterior of the last
        fit."""
        from structgp.api.estimator import StructuredGPClassifier
        from structgp.plan.options import Prior

        X, y = [self.features[i] for i in labels], list(labels.values())
        prior = Prior() if self.has_transitions else Prior(transition_sd=0.0)
        if choose_settings:
            self.tagger, self.full_at = StructuredGPClassifier(prior=prior, **self.parameters), len(X)
        elif self.tagger is None:
            once = replace(prior, data_weight=1.0)
            self.tagger = StructuredGPClassifier(prior=once, **self.parameters)
        self.tagger.warm_start = True
        with warnings.catch_warnings():
            # With few labels, there are warnings about the fit that an annotator can do nothing about.
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
        """Tokens whose given label the model contradicts, the most improbable label first."""
        asked = self.tagger.ask([self.features[i] for i in labels])
        found = []
        for (i, given), at in zip(labels.items(), self.tagger.marginals_of(asked), strict=True):
            for t, label in enumerate(given):
                best, _ = max(at[t].items(), key=lambda item: item[1])
                if label is not None and best != label and at[t].get(label, 0.0) < DOUBTED:
                    p = {"given": at[t].get(label, 0.0), "model": at[t][best]}
                    found.append({"sequence": i, "token": t, "given": label, "model": best, "p": p})
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


def _warm_up() -> None:
    """Imports and compiles what a fit needs, so that the first fit does not have to."""
    from structgp.api.estimator import StructuredGPClassifier
    from structgp.plan.options import Prior

    X = [[{"word": "two"}, {"word": "eggs"}], [{"word": "salt"}]]
    tagger = StructuredGPClassifier(prior=Prior(data_weight=1.0)).fit(X, [["A", "B"], ["B"]])
    tagger.expected_scores(X)


def _end_with_parent(parent: int) -> None:
    """Ends this process soon after its parent, even in the middle of a fit."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def serve_tasks(
    connection: Any, parent: int, features: Sequence[Any], model_path: str, settings: dict[str, Any]
) -> None:
    """The main function of the background process: receives tasks and sends results, until the other end is
    closed or the process ``parent`` has ended. An error is sent as a result too."""
    os.nice(PRIORITY)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
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
