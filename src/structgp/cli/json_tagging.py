"""Answers of the command tag as JSON lines: the line that was read, with the answers added."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from structgp.answers.ask import Asked
from structgp.api.fitted import Fitted
from structgp.cli.shared import in_files
from structgp.data.sources import FileSequence
from structgp.data.sources.json_lines import format_json
from structgp.errors import InputError

DIGITS = 6


@dataclass(frozen=True)
class JsonTagger:
    """Turns examples into lines. level : value of ``--verbose``. n_best : number of labellings, None for
    one. force : whether the labels in the file are kept. defer, coverage : values of these options."""

    estimator: Fitted
    level: int
    n_best: int | None
    force: bool
    defer: float | None = None
    coverage: float | None = None

    def answer(self, chunk: Sequence[FileSequence]) -> list[str]:
        with in_files([(s.name, s.line) for s in chunk]):
            known = [self._labels_in(s) for s in chunk] if self.force else None
            asked = self.estimator.ask([s.tokens for s in chunk])
            found = self._tagged(asked, known) if self.n_best is None else self._ranked(asked, known)
            whole = asked.model.labels.integers
            both: Any = zip(chunk, found, strict=True)
            return [format_json(one.given, **(_whole(found) if whole else found)) for one, found in both]

    def _labels_in(self, example: FileSequence) -> Any:
        if example.labels is None:
            remedy = 'add "labels", null where one is missing, or leave --force out'
            raise InputError(f"{example.name}:{example.line}", "no 'labels' for --force", remedy)
        return example.labels

    def _tagged(self, asked: Asked, known: Any) -> Iterator[dict[str, Any]]:
        """The keys that are added to each line, with one labelling per example."""
        if self.coverage is not None:
            labels = asked.shaped(self.estimator.labels_of(asked))
            sets = self.estimator.sets_of(asked, self.coverage)
            yield from ({"labels": y, "sets": held} for y, held in zip(labels, sets, strict=True))
            return
        labels = self.estimator.labels_of(asked, known)
        shown: list[Any] = labels
        if self.defer is not None:
            shown = self.estimator.deferred(asked, labels, self.defer, known)
        answers = [{"labels": y} for y in asked.shaped(shown)]
        if self.level:
            log_probs = asked.log_probs(labels)
            part = [0.0] * len(labels) if known is None else asked.log_probs(asked.labels_given(known))
            probabilities = self._probabilities(asked, known, labels)
            for n, found in enumerate(answers):
                joint, given = log_probs[n], part[n]
                assert joint is not None, "a predicted label is a known one"
                assert given is not None, "so is one that is kept"
                found |= {"probability": _rounded(math.exp(min(0.0, joint - given)))}
                found |= {"probabilities": probabilities[n]}
        yield from answers

    def _ranked(self, asked: Asked, known: Any) -> Iterator[dict[str, Any]]:
        """The keys that are added to each line, with the n best labellings, best first."""
        assert self.n_best is not None
        best, names = asked.n_best(self.n_best, known), asked.model.labels.names
        for n, found in enumerate(best):
            one, labellings = asked.some([n]), []
            for indices, value in found:
                (labels,) = one.shaped([names(indices)])
                entry = {"labels": labels, "probability": _rounded(math.exp(value))}
                if self.level:
                    own = None if known is None else [known[n]]
                    entry["probabilities"] = self._probabilities(one, own, [names(indices)])[0]
                labellings.append(entry)
            yield {"labels": labellings[0]["labels"], "labellings": labellings}

    def _probabilities(self, asked: Asked, known: Any, labels: Sequence[Sequence[str]]) -> list[Any]:
        """Probabilities of each token's label, or at level 2 of every label, in the shape of the
        example."""
        found: list[list[Any]] = []
        for p, y in zip(self.estimator.marginals_of(asked, known), labels, strict=True):
            if self.level == 2:
                found.append([{name: _rounded(value) for name, value in at.items()} for at in p])
            else:
                found.append([_rounded(at[label]) for at, label in zip(p, y, strict=True)])
        return asked.shaped(found)


def _whole(answer: Any) -> Any:
    """Converts labels back to integers, which they are in the file."""
    if isinstance(answer, dict):
        return {key: _whole(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [_whole(value) for value in answer]
    return int(answer) if isinstance(answer, str) else answer


def _rounded(value: float) -> float:
    return round(float(value), DIGITS)
