"""The commands that read unlabelled files: tag and next."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import click

from structgp.api.active import STRATEGIES, select
from structgp.api.estimator import StructuredGPClassifier
from structgp.cli.flags import device_option, encoding_option, model_option, vectors_option
from structgp.cli.inputs import load_with_reader
from structgp.cli.shared import chunks, output_stream
from structgp.data.sources import FileSequence, Reader
from structgp.data.sources.columns import format_sequence
from structgp.errors import InputError
from structgp.inference.distributed import joined, local_device
from structgp.plan.options import device_of

_CHUNK = 200
# How probabilities are written: before that of a labelling, and before that of a label.
_LAYOUTS = {"columns": ("# ", "/"), "crfsuite": ("@probability\t", ":")}

Known = list[list[str | None]]


@click.command()
@model_option
@click.argument("files", nargs=-1, type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="File to write instead of standard output.")
@click.option(
    "-n",
    "--n-best",
    "--nbest",
    "n_best",
    type=click.IntRange(min=1),
    help="Number of labellings per sequence, the most probable first.",
)
@click.option(
    "-v",
    "--verbose",
    "level",
    type=click.IntRange(0, 2),
    default=0,
    help="1: probabilities of the labelling and of each token's label; 2: of every label too.",
)
@click.option(
    "--viterbi",
    is_flag=True,
    help="The most probable labelling instead of the most probable label of each token.",
)
@click.option("--force", is_flag=True, help="Keep the labels in the file, and label the rest.")
@click.option(
    "--missing",
    default="?",
    show_default=True,
    metavar="TEXT",
    help="With --force, the text in the label column of a token without a label.",
)
@vectors_option
@device_option
@encoding_option
def tag(
    model_path: str,
    files: Sequence[str],
    output: str | None,
    n_best: int | None,
    level: int,
    viterbi: bool,
    force: bool,
    missing: str,
    vectors_path: str | None,
    device: str,
    encoding: str,
) -> None:
    """Label FILES, or standard input. Output looks like that of crf_test: the columns, a tab, the
    label; with -v1 or -v2 its probability after a slash; with -n one block per labelling, after a line
    with its rank and probability. A model of CRFsuite's attributes answers like crfsuite tag: the label
    alone; with -v1 or -v2 its probability after a colon.

    Under torchrun, the processes share the sequences, and the first one writes."""
    if n_best and viterbi:
        raise InputError(
            "--viterbi", "cannot be combined with -n", "use -n 1 for the most probable labelling"
        )
    estimator, reader = load_with_reader(model_path, vectors_path)
    estimator.decode = "viterbi" if viterbi else "marginal"
    given: Sequence[Any] = files or [sys.stdin.buffer]

    def answer(chunk: Sequence[FileSequence]) -> list[str]:
        known = [_labels_in(s, estimator, missing) for s in chunk] if force else None
        with _naming(chunk):
            if n_best is None:
                return list(_tagged(estimator, reader, chunk, level, known))
            return list(_ranked(estimator, reader, chunk, level, known, n_best))

    with joined(device_of(device)) as together:
        if together.size > 1 and not files:
            raise InputError("torchrun", "several processes cannot share a pipe", "name a file")
        estimator.device = local_device(device_of(device))  # each process its own
        # Sequences from a pipe are answered one by one.
        parts = chunks(_sequences(reader, given, encoding), _CHUNK if files else 1)
        with output_stream(output, encoding) if together.is_first else nullcontext() as out:
            for dealt in chunks(parts, together.size):
                own = [answer(chunk) for chunk in together.share(dealt)]
                for lines in (lines for found in together.gather(own) for lines in found):
                    assert out is not None
                    out.writelines(block + "\n" for block in lines)
                if out is not None:
                    out.flush()


@contextmanager
def _naming(chunk: Sequence[FileSequence]) -> Iterator[None]:
    """Make errors about a sequence of the chunk name its place in the file."""
    try:
        yield
    except InputError as error:
        number = error.place.removeprefix("sequence ")
        if number == error.place or not number.isdigit():
            raise
        at = chunk[int(number)]
        raise InputError(f"{at.name}:{at.line}", error.problem, "check its labels") from error


def _sequences(reader: Reader, files: Sequence[Any], encoding: str) -> Iterator[FileSequence]:
    for file in files:
        name = file if isinstance(file, str) else "<stdin>"
        empty = True
        for sequence in reader.sequences(file, encoding=encoding, name=name):
            empty = False
            yield sequence
        if empty and isinstance(file, str):
            raise InputError(name, "no tokens", "give a file with at least one")


def _labels_in(sequence: FileSequence, estimator: StructuredGPClassifier, missing: str) -> list[str | None]:
    """The labels in the file, which are kept; None where one is missing."""
    if sequence.labels is None:
        raise InputError(
            f"{sequence.name}:{sequence.line}",
            "no label column for --force",
            "add it as last column, or leave --force out",
        )
    known, found = set(estimator.classes_), []
    for t, label in enumerate(sequence.labels):
        if label not in known and label != missing:
            raise InputError(
                f"{sequence.name}:{sequence.line + t}",
                f"{label!r} is not a label of the model",
                f"write {missing!r} for a missing label, or use {', '.join(sorted(known))}",
            )
        found.append(label if label in known else None)
    return found


def _tagged(
    estimator: StructuredGPClassifier,
    reader: Reader,
    chunk: Sequence[FileSequence],
    level: int,
    known: Known | None,
) -> Iterator[str]:
    """One block of lines per sequence, without the blank line after it."""
    asked = estimator.ask([sequence.tokens for sequence in chunk])
    labels = estimator.labels_of(asked, known)
    if level == 0:
        for sequence, y in zip(chunk, labels, strict=True):
            yield _block(sequence, y)
        return
    head, mark = _LAYOUTS[reader.format]
    marginals = estimator.marginals_of(asked, known)
    log_probs = asked.log_probs(labels)
    given = [0.0] * len(labels) if known is None else asked.log_probs(known)
    for sequence, y, p, joint, part in zip(chunk, labels, marginals, log_probs, given, strict=True):
        assert joint is not None, "a predicted label is a known one"
        assert part is not None, "so is one that is kept"
        cells = _with_probabilities(y, p, mark, level)
        yield f"{head}{math.exp(min(0.0, joint - part)):.6f}\n{_block(sequence, cells)}"


def _ranked(
    estimator: StructuredGPClassifier,
    reader: Reader,
    chunk: Sequence[FileSequence],
    level: int,
    known: Known | None,
    n: int,
) -> Iterator[str]:
    """One block per labelling, best first."""
    asked = estimator.ask([sequence.tokens for sequence in chunk])
    best, mark = asked.n_best(n, known), _LAYOUTS[reader.format][1]
    marginals = estimator.marginals_of(asked, known) if level else [None] * len(chunk)
    for sequence, found, p in zip(chunk, best, marginals, strict=True):
        for rank, (indices, value) in enumerate(found):
            labels = asked.model.labels.names(indices)
            cells = labels if p is None else _with_probabilities(labels, p, mark, level)
            yield f"# {rank} {math.exp(value):.6f}\n{_block(sequence, cells)}"


def _with_probabilities(
    labels: Sequence[str], marginals: Sequence[dict[str, float]], mark: str, level: int
) -> list[str]:
    """The text after the columns of each token."""
    found = []
    for label, p in zip(labels, marginals, strict=True):
        every = [f"{name}{mark}{value:.6f}" for name, value in p.items()] if level == 2 else []
        found.append("\t".join([f"{label}{mark}{p[label]:.6f}", *every]))
    return found


def _block(sequence: FileSequence, cells: Sequence[str]) -> str:
    return format_sequence([(*row, cell) for row, cell in zip(sequence.cells, cells, strict=True)])


# -- next ------------------------------------------------------------------------------------------


@click.command("next")
@model_option
@click.argument("files", metavar="POOL", nargs=-1, required=True, type=click.Path())
@click.option("-n", "--number", default=10, show_default=True, help="Number of sequences.")
@click.option(
    "--strategy",
    type=click.Choice([*STRATEGIES, "batch", "random"]),
    default="batch",
    show_default=True,
    help="How sequences are chosen; 'batch' avoids near-duplicates.",
)
@click.option(
    "--cost",
    type=click.Choice(["sequence", "token"]),
    default="sequence",
    show_default=True,
    help="Cost of labelling: the same per sequence, or per token.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of --strategy random.")
@click.option("-o", "--output", type=click.Path(), help="File to write instead of standard output.")
@vectors_option
@device_option
@encoding_option
def next_command(
    model_path: str,
    files: Sequence[str],
    number: int,
    strategy: str,
    cost: str,
    seed: int,
    output: str | None,
    vectors_path: str | None,
    device: str,
    encoding: str,
) -> None:
    """Choose the sequences of POOL to label next, most useful first.

    They are written with the model's labels in the last column, to be corrected; the place of each in its
    file goes to standard error. Labels in POOL are ignored."""
    estimator, reader = load_with_reader(model_path, vectors_path, device)
    pool = list(_sequences(reader, files, encoding))
    X = [sequence.tokens for sequence in pool]
    chosen = select(estimator, X, number, strategy, cost=cost, random_state=seed)
    labels = estimator.predict([X[i] for i in chosen])
    with output_stream(output, encoding) as out:
        for i, y in zip(chosen, labels, strict=True):
            click.echo(f"{pool[i].name}:{pool[i].line}", err=True)
            out.write(reader.with_labels(pool[i], y) + "\n")
