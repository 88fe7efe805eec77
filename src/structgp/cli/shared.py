"""What several commands need: errors, checks, progress, tables.

An error in the input is one line on standard error and exit status 2."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import click
import numpy as np
from tqdm import tqdm

from structgp.api.describe import held_out_lines
from structgp.api.estimator import StructuredGPClassifier, load
from structgp.data.atomic import atomic_write
from structgp.data.sources import Coverage, FileSequence, Labelled, Reader, from_json
from structgp.errors import InputError, StructgpError, StructgpWarning
from structgp.evaluation.crf import LinearCRF
from structgp.evaluation.metrics import Report, evaluate
from structgp.inference import StepInfo
from structgp.inference.distributed import ALONE, Processes

# Arguments of ``sources.learn`` and ``sources.from_json`` that are options here, as errors name them.
_ARGUMENT = re.compile(
    r"(?<!\S)(coverage|data_weight|dialect|encoding|level|missing|numeric|vectors|vector_column)="
    r"(?=$|[ ,;])"
)

_EXAMPLE = re.compile(r"(?P<what>X|y|known|sequence)[\[ ](?P<number>\d+)\]?(?P<rest>.*)")


class Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", StructgpWarning)
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except StructgpError as error:
            click.echo(f"structgp: error: {_in_options(error)}", err=True)
            ctx.exit(2)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                reason = error.strerror or str(error)
                click.echo(f"structgp: error: output: {reason}; choose another place", err=True)
                _silence_stdout()
                ctx.exit(2)
            # The reader of our output is gone, so there is nobody to tell.
            sys.stderr.close()
            ctx.exit(1)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"structgp: warning: {message}", err=True)


def _in_options(error: StructgpError) -> StructgpError:
    """An error that names arguments of Python functions names options instead."""
    if not isinstance(error, InputError):
        return error
    place, remedy = (
        _ARGUMENT.sub(lambda found: "--" + found[1].replace("_", "-"), text)
        for text in (error.place + "=", error.remedy)
    )
    return InputError(place.removesuffix("="), error.problem, remedy)


def load_with_reader(
    path: str, vectors_path: str | None = None, device: str = "cpu"
) -> tuple[StructuredGPClassifier, Reader]:
    """A model, on ``device``, and the reader of its files; vectors_path : where its word vectors are."""
    estimator = load(path)
    estimator.device = device
    return estimator, from_json(estimator.model_.extra, path, vectors_path)


def sequences(
    reader: Reader, files: Sequence[Any], encoding: str, quiet: bool = False
) -> Iterator[FileSequence]:
    """Those of all files, each a path or a stream; InputError if a file has none. After each file, one line
    says how many of its tokens have word vectors, where the reader has those and is not ``quiet``."""
    for file in files:
        name = file if isinstance(file, str) else "<stdin>"
        empty, covered = True, Coverage()
        for sequence in reader.sequences(file, encoding=encoding, name=name):
            empty = False
            covered += reader.coverage(sequence) or Coverage()
            yield sequence
        if empty and isinstance(file, str):
            raise InputError(name, "no tokens", "give a file with at least one")
        if covered.n_tokens and not quiet:
            click.echo(f"{name}: {covered}", err=True)


@contextmanager
def in_files(places: Sequence[tuple[str, int]]) -> Iterator[None]:
    """Errors about an example in memory name its place in a file instead: ``X[3][5]`` is node 5 of the
    fourth place (name, line)."""
    try:
        yield
    except InputError as error:
        found = _EXAMPLE.fullmatch(error.place)
        if found is None or int(found["number"]) >= len(places):
            raise
        name, line = places[int(found["number"])]
        rest = found["rest"]
        if found["what"] == "X":
            rest = re.sub(r"^\[(\d+)\]", r", node \1", rest)
        elif found["what"] in ("y", "known"):
            rest = f".labels{rest}"
        raise InputError(f"{name}:{line}{rest}", error.problem, error.remedy) from error


def places_of(data: Labelled) -> list[tuple[str, int]]:
    """Where each example of a file is."""
    return [(data.name, line) for line in data.lines]


def flat(labels: Any) -> list[str | None]:
    """All labels of an example; those of a layer with its name, as the model calls them."""
    if isinstance(labels, Mapping):
        parts = [(layer, flat(of)) for layer, of in labels.items()]
        return [None if v is None else f"{layer}={v}" for layer, of in parts for v in of]
    if isinstance(labels, np.ndarray):
        return [str(v) for v in labels.ravel().tolist()]
    rows = [row if isinstance(row, list) else [row] for row in labels]
    return [label for row in rows for label in row]


def n_tokens(y: Sequence[Any]) -> int:
    """Tokens that have these labels, of which each may have several."""
    return sum(len(flat(labels)) // (len(labels) if isinstance(labels, Mapping) else 1) for labels in y)


def check_two_labels(y: Sequence[Any], name: str) -> None:
    found = {label for labels in y for label in flat(labels)} - {None}
    if len(found) < 2:
        same = f"the same label, {found.pop()!r}" if found else "no label"
        remedy = "check that the label is the last column, and give examples of a second label"
        raise InputError(name, f"every token has {same}", remedy)


def all_labels(data: Labelled, missing: str | None) -> list[Any]:
    """The labels of a file in which every token needs one."""
    n = sum(flat(labels).count(None) for labels in data.y)
    if n:
        problem = f"{n} tokens have no label ({'null' if missing is None else repr(missing)})"
        raise InputError(data.name, problem, "label them, or leave their sequences out")
    return data.y


class _UnwrittenError(Exception):
    """Ends a write before the file is replaced."""


def check_writable(path: str) -> None:
    """InputError if a file cannot be written, before minutes of work and not after."""
    with suppress(_UnwrittenError), atomic_write(path, "wb"):
        raise _UnwrittenError


def fit_with_progress(
    estimator: StructuredGPClassifier,
    X: Any,
    y: Sequence[Sequence[str | None]] | None,
    *,
    together: Processes = ALONE,
    **options: Any,
) -> None:
    """Fit with a progress bar on a terminal, with plain lines elsewhere. Ctrl-C stops after the current
    step. Of several processes, only the first one prints."""
    interrupted = False

    def stop(*_: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        click.echo("\nstopping after this step; press Ctrl-C again to abort", err=True)

    quiet = not together.is_first
    bar = tqdm(unit=" steps", disable=quiet or not sys.stderr.isatty(), leave=False)

    def show(info: StepInfo) -> bool:
        bar.update()
        bar.set_postfix_str(f"bound {info.elbo:.1f}")
        # Not one line for each of hundreds of stochastic steps.
        told = not quiet and bar.disable
        if told and (info.iteration < 10 or info.iteration % 50 == 0 or info.finished):
            click.echo(f"step {info.iteration + 1}: bound {info.elbo:.1f}", err=True)
        return interrupted

    previous = signal.signal(signal.SIGINT, stop)
    try:
        estimator.fit(X, y, callback=show, together=together, **options)
    finally:
        signal.signal(signal.SIGINT, previous)
        bar.close()


def say_fit(estimator: StructuredGPClassifier, n_sequences: int, n_tokens: int) -> None:
    log = estimator.training_log_
    of = f"{log['n_inducing']} inducing inputs leave {log['inducing_residual']:.1%} of the variance"
    if log["posterior"] == "weights":
        of = f"{log['n_inducing']} weights"
    click.echo(
        f"{n_sequences} sequences, {n_tokens} tokens, {len(estimator.classes_)} labels; {of}; "
        f"{log['optimizer']} ({log['reason']}): {log['stopped']} after {len(log['steps'])} steps, "
        f"{log['seconds']:.1f} s; bound {log['elbo']:.1f} (fresh draws {log['fresh_elbo']:.1f}), "
        f"{log['effective_parameters']:.0f} effective parameters",
        err=True,
    )
    if log["held_out"] is not None:
        weight, spread = (log["plan"][name]["value"] for name in ("data_weight", "spread"))
        told = "; ".join(held_out_lines(log["held_out"]))
        click.echo(f"data weight {weight:g}, spread {spread:g}; in cross-validation {told}", err=True)


def score(estimator: StructuredGPClassifier, data: Labelled, y: list[Any]) -> dict[str, Report]:
    """Scores on a labelled file, with layers those of each layer too."""
    name = data.name
    with in_files(places_of(data)):
        reports = {"structgp": estimator.evaluate(data.X, y)}
    warn_of_unseen(estimator, y, f"{name}:", "they count as errors and are not part of the NLL")
    if reports["structgp"].sequence_nll == float("inf"):
        what = "some sequences have labels that the constraints forbid: their likelihood is 0"
        _show_warning(f"{name}: {what}")
    reports |= reports["structgp"].layers
    return reports


def warn_of_unseen(estimator: StructuredGPClassifier, y: list[Any], place: str, consequence: str) -> None:
    """Warns of labels that training never saw."""
    known = set(estimator.classes_)
    unseen = [str(label) for labels in y for label in flat(labels) if label not in known]
    if unseen:
        names = ", ".join(sorted(set(unseen)))
        what = f"{len(unseen)} tokens have labels that training never saw ({names})"
        _show_warning(f"{place} {what}; {consequence}")


def score_crf(X: list[Any], y: list[list[str]], X_test: list[Any], y_test: list[list[str]]) -> Report:
    crf = LinearCRF(n_jobs=-1).fit(X, y)
    marginals, log_probs = crf.predict_marginals(X_test), crf.sequence_log_probs(X_test, y_test)
    return evaluate(y_test, crf.predict(X_test), marginals, log_probs)


def print_reports(reports: dict[str, Report]) -> None:
    rows = (
        ("token error", "token_error", "{:.2%}"),
        ("span F1", "span_f1", "{:.2%}"),
        ("span precision", "span_precision", "{:.2%}"),
        ("span recall", "span_recall", "{:.2%}"),
        ("token NLL", "token_nll", "{:.4f}"),
        ("sequence NLL", "sequence_nll", "{:.3f}"),
        ("ECE (15 bins)", "ece", "{:.4f}"),
    )
    click.echo(f"{'':<16}" + "".join(f"{name:>14}" for name in reports))
    for title, key, form in rows:
        values = [getattr(report, key) for report in reports.values()]
        cells = ["-" if value is None else form.format(value) for value in values]
        click.echo(f"{title:<16}" + "".join(f"{cell:>14}" for cell in cells))
    first = next(iter(reports.values()))
    click.echo(f"({first.n_sequences} sequences, {first.n_tokens} tokens)")


@contextmanager
def output_stream(path: str | None, encoding: str) -> Iterator[TextIO]:
    """The file at ``path``, written completely or not at all, or standard output."""
    opened = atomic_write(path, "w", encoding=encoding) if path else _standard_output(encoding)
    try:
        with opened as stream:
            yield stream
    except UnicodeEncodeError as error:
        lost = error.object[error.start : error.end]
        problem = f"{lost!r} cannot be written in {encoding}"
        remedy = "convert the data to utf-8, which has all characters"
        raise InputError(path or "<stdout>", problem, remedy) from None


@contextmanager
def _standard_output(encoding: str) -> Iterator[TextIO]:
    stream = io.TextIOWrapper(sys.stdout.buffer, encoding=encoding, newline="\n")
    try:
        yield stream
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence_stdout()
        problem = f"cannot be written ({error.strerror or error})"
        raise InputError("<stdout>", problem, "choose another place with -o") from error
    finally:
        # Flush, but leave standard output open.
        stream.detach()


def _silence_stdout() -> None:
    """Discard the rest of the buffer, whose flush would fail again when the program ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
