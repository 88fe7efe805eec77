"""The command tag."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from structgp.answers.ask import Asked
from structgp.api.fitted import Fitted
from structgp.cli.arriving import arriving
from structgp.cli.document_tagging import (
    DocumentTagger,
    check_options,
    field_of,
    with_first_checked,
    write_documents,
)
from structgp.cli.json_tagging import JsonTagger
from structgp.cli.shared import in_files, load_with_reader, output_stream, sequences
from structgp.data.formats.document_reader import DocumentReader
from structgp.data.sources import FileSequence, Reader
from structgp.data.sources.columns import format_sequence
from structgp.errors import InputError
from structgp.inference.distributed import joined, local_device
from structgp.plan.options import device_of

_CHUNK = 200
# The text before the probability of a labelling, and the text before the probability of a label.
_LAYOUTS = {"columns": ("# ", "/"), "crfsuite": ("@probability\t", ":")}

Known = list[list[str | None]]


def tag(
    model_path: str,
    files: Sequence[str],
    output: str | None,
    n_best: int | None,
    level: int,
    decode: str | None,
    defer: float | None,
    coverage: float | None,
    force: bool,
    missing: str,
    to: str | None,
    field: str | None,
    vectors_path: str | None,
    documents: str | None,
    snap: bool,
    device: str,
    encoding: str,
) -> None:
    """The command tag."""
    estimator, reader = load_with_reader(Fitted, model_path, vectors_path, "cpu", documents, snap, files)
    if decode is not None:
        estimator.decode, estimator.costs = decode, None
    tagger = _tagger_of(estimator, reader, level, n_best, force, missing, defer, coverage)
    if isinstance(reader, DocumentReader):
        to = check_options(n_best, level, coverage, reader, to)
        field = field_of(estimator, reader, to, field)
        reader = reader.of_missing(missing)
    elif to is not None or field is not None:
        option = "--field" if to is None else "--to"
        raise InputError(option, f"is for documents; {model_path} knows {reader.format}", "leave it out")
    end = "" if reader.format == "jsonl" else "\n"
    given: Sequence[Any] = files or [sys.stdin.buffer]
    with joined(device_of(device)) as together:
        if together.size > 1 and not files:
            raise InputError("torchrun", "several processes cannot share a pipe", "name a file")
        estimator.device = local_device(device_of(device))  # each process its own
        found = sequences(reader, given, encoding, quiet=not together.is_first)
        found = with_first_checked(found, reader, estimator.classes_.tolist())
        # Somebody may be typing into the pipe, and should get answers without having to type more.
        parts = _chunks(found, _CHUNK) if files else arriving(found, _CHUNK)

        def answered() -> Iterator[Any]:
            """All answers in order, in the first process; nothing in the others."""
            for dealt in _chunks(parts, together.size):
                own = [tagger.answer(chunk) for chunk in together.share(dealt)]
                yield [one for answers in together.gather(own) for some in answers for one in some]

        if isinstance(reader, DocumentReader):
            each = (document for some in answered() for document in some)
            if together.is_first:
                write_documents(each, reader, to, output, encoding, at_once=not files, field=field)
            else:
                deque(each, maxlen=0)
            return
        with output_stream(output, encoding) if together.is_first else nullcontext() as out:
            for blocks in answered():
                if out is not None:
                    out.writelines(block + end for block in blocks)
                    out.flush()


def _tagger_of(
    estimator: Fitted,
    reader: Reader,
    level: int,
    n_best: int | None,
    force: bool,
    missing: str,
    defer: float | None,
    coverage: float | None,
) -> Tagger | JsonTagger | DocumentTagger:
    """The object that answers about the sequences of this reader."""
    if isinstance(reader, DocumentReader):
        return DocumentTagger(estimator, force, defer)
    if reader.format == "jsonl":
        return JsonTagger(estimator, level, n_best, force, defer, coverage)
    return Tagger(estimator, reader, level, n_best, force, missing, defer, coverage)


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


@dataclass(frozen=True)
class Tagger:
    """Turns sequences into blocks of lines, without the blank line after each block. level : value of
    ``--verbose``. n_best : number of labellings; None for one, without its rank. force : whether the labels
    in the file are kept. missing : the text of a missing label. defer, coverage : values of these
    options."""

    estimator: Fitted
    reader: Reader
    level: int
    n_best: int | None
    force: bool
    missing: str
    defer: float | None = None
    coverage: float | None = None

    def answer(self, chunk: Sequence[FileSequence]) -> list[str]:
        known = [self._labels_in(s, self.missing) for s in chunk] if self.force else None
        with in_files([(s.name, s.line) for s in chunk], has_token_lines=True):
            asked = self.estimator.ask([sequence.tokens for sequence in chunk])
            found = self._tagged(asked, known) if self.n_best is None else self._ranked(asked, known)
            return [
                head + format_sequence([(*row, cell) for row, cell in zip(s.cells, cells, strict=True)])
                for s, blocks in zip(chunk, found, strict=True)
                for head, cells in blocks
            ]

    def _labels_in(self, sequence: FileSequence, missing: str) -> list[str | None]:
        """The labels in the file, which are kept; None for each missing one."""
        name, line = sequence.name, sequence.line
        if sequence.labels is None:
            remedy = "add it as last column, or leave --force out"
            raise InputError(f"{name}:{line}", "no label column for --force", remedy)
        known = set(self.estimator.classes_)
        for t, label in enumerate(sequence.labels):
            if label not in known and label != missing:
                remedy = f"write {missing!r} for a missing label, or use {', '.join(sorted(known))}"
                raise InputError(f"{name}:{line + t}", f"{label!r} is not a label of the model", remedy)
        return [label if label in known else None for label in sequence.labels]

    def _tagged(self, asked: Asked, known: Known | None) -> Iterator[list[tuple[str, list[str]]]]:
        """One labelling per sequence: the line before it, and the text after the columns of each token."""
        if self.coverage is not None:
            sets = self.estimator.sets_of(asked, self.coverage)
            yield from ([("", ["|".join(held) for held in tokens])] for tokens in sets)
            return
        labels = shown = self.estimator.labels_of(asked, known)
        if self.defer is not None:
            kept = self.estimator.deferred(asked, labels, self.defer, known)
            shown = [[label or self.missing for label in y] for y in kept]
        if self.level == 0:
            yield from ([("", y)] for y in shown)
            return
        marginals, log_probs = self.estimator.marginals_of(asked, known), asked.log_probs(labels)
        given = [0.0] * len(labels) if known is None else asked.log_probs(known)
        for y, named, p, joint, part in zip(labels, shown, marginals, log_probs, given, strict=True):
            assert joint is not None, "a predicted label is a known one"
            assert part is not None, "so is one that is kept"
            head = f"{_LAYOUTS[self.reader.format][0]}{math.exp(min(0.0, joint - part)):.6f}\n"
            yield [(head, self._with_probabilities(y, named, p))]

    def _ranked(self, asked: Asked, known: Known | None) -> Iterator[list[tuple[str, list[str]]]]:
        """As ``_tagged``, with the n best labellings of each sequence, best first."""
        assert self.n_best is not None
        best = asked.n_best(self.n_best, known)
        marginals = self.estimator.marginals_of(asked, known) if self.level else [None] * len(best)
        for found, p in zip(best, marginals, strict=True):
            named = [(asked.model.labels.names(indices), math.exp(value)) for indices, value in found]
            yield [
                (f"# {rank} {value:.6f}\n", y if p is None else self._with_probabilities(y, y, p))
                for rank, (y, value) in enumerate(named)
            ]

    def _with_probabilities(
        self, labels: list[str], shown: list[str], marginals: list[dict[str, float]]
    ) -> list[str]:
        """The text after the columns of each token. shown : the text that is written for each label."""
        mark, found = _LAYOUTS[self.reader.format][1], []
        for label, named, p in zip(labels, shown, marginals, strict=True):
            every = [f"{name}{mark}{value:.6f}" for name, value in p.items()] if self.level == 2 else []
            found.append("\t".join([f"{named}{mark}{p[label]:.6f}", *every]))
        return found
