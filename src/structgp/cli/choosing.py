"""The command next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from structgp.api.active import select
from structgp.api.estimator import StructuredGPClassifier
from structgp.cli.document_tagging import DocumentTagger, with_first_checked, write_documents
from structgp.cli.json_tagging import JsonTagger
from structgp.cli.shared import in_files, load_with_reader, output_stream, sequences
from structgp.cli.tagging import Tagger
from structgp.data.documents import Prediction
from structgp.data.formats.document_reader import DocumentReader
from structgp.data.sources import FileSequence, Reader
from structgp.data.sources.unlabelled import PlainReader
from structgp.errors import InputError


def choose(
    model_path: str | None,
    files: Sequence[str],
    number: int,
    strategy: str | None,
    cost: str,
    seed: int,
    exclude: Sequence[str],
    level: int,
    format: str | None,
    output: str | None,
    vectors_path: str | None,
    snap: bool,
    device: str,
    encoding: str,
) -> None:
    """The command next."""
    estimator: StructuredGPClassifier | None = None
    reader: Reader
    if model_path is None:
        reader = PlainReader(format or "columns")
    else:
        estimator, reader = load_with_reader(
            StructuredGPClassifier, model_path, vectors_path, device, format, snap, [*files, *exclude]
        )
    excluded = {key_of(reader, s) for s in sequences(reader, exclude, encoding, quiet=True)}
    classes = [] if estimator is None else estimator.classes_.tolist()
    every = list(with_first_checked(sequences(reader, files, encoding), reader, classes))
    pool = [s for s in every if key_of(reader, s) not in excluded]
    if exclude:
        click.echo(f"{len(every) - len(pool)} of {len(every)} sequences excluded", err=True)
    if not pool:
        raise InputError("--exclude", "no sequence of POOL is left", "give a larger pool")
    X = [sequence.tokens for sequence in pool]
    way = strategy or ("diverse" if estimator is None else "batch")
    with in_files([(s.name, s.line) for s in pool], reader.has_token_lines):
        chosen = select(estimator, X, number, way, cost=cost, random_state=seed)
    for i in chosen:
        click.echo(f"{pool[i].name}:{pool[i].line}", err=True)
    if estimator is not None and isinstance(reader, DocumentReader):
        picked: list[Any] = [pool[i] for i in chosen]
        documents = DocumentTagger(estimator).answer(picked)
        if reader.documents == "conll" and not level:  # a column more than files to train on have
            answers = ((d, d.prediction) for d in documents)
            documents = [replace(d, prediction=p and Prediction(p.labels)) for d, p in answers]
        write_documents(documents, reader, None, output, encoding)
        return
    blocks = _written(estimator, reader, [pool[i] for i in chosen], level)
    end = "" if reader.format == "jsonl" else "\n"
    with output_stream(output, encoding) as out:
        out.writelines(block + end for block in blocks)


def key_of(reader: Reader, sequence: FileSequence) -> Any:
    """A key that is the same for sequences that differ in their labels only."""
    if reader.format != "columns":
        return repr(sequence.tokens)
    if isinstance(reader, PlainReader):
        return tuple(sequence.words)  # it is not known yet which of the last columns are labels
    n = reader.n_columns  # type: ignore[attr-defined]
    return tuple(tuple(row[:n]) for row in sequence.cells)


def _written(
    estimator: StructuredGPClassifier | None, reader: Reader, chosen: list[FileSequence], level: int
) -> list[str]:
    """The chosen sequences as text, with the model's labels, and from level 1 on also with probabilities,
    as the command tag writes them. Without a model, each label is a question mark."""
    if estimator is None:
        return [reader.with_labels(s, ["?"] * len(s.words)) for s in chosen]
    if not level:
        labels = estimator.predict([s.tokens for s in chosen])
        return [reader.with_labels(s, y) for s, y in zip(chosen, labels, strict=True)]
    if reader.format == "jsonl":
        return JsonTagger(estimator, level, None, False, None, None).answer(chosen)
    return Tagger(estimator, reader, level, None, False, "?").answer(chosen)
