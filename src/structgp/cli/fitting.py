"""The command train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import click

from structgp.api.estimator import StructuredGPClassifier
from structgp.cli import shared
from structgp.cli.annotated_files import read_json as read_json_annotations
from structgp.cli.annotated_files import split_columns
from structgp.cli.flags import DOCUMENTS, FEATURES, KERNELS
from structgp.cli.group import INTERRUPTED
from structgp.cli.one_writer import one_writer
from structgp.cli.progress import fit_with_progress, say_fit
from structgp.cli.scoring import score
from structgp.cli.structure_files import (
    check_format,
    column_of,
    declared_in,
    features_named,
    read_json,
    structure_of,
)
from structgp.data import shards, sources
from structgp.data.graphs import length_of
from structgp.data.span_labels import SCHEMES
from structgp.errors import InputError, warn_caller
from structgp.evaluation.score_table import table
from structgp.inference.distributed import Processes, joined, n_started
from structgp.plan.options import Inducing, Parameters, Prior, device_of
from structgp.structures import Spec

LONG = 100
"""Number of tokens from which a file of one sequence looks as if its empty lines were missing."""


def train(output: str, **given: Any) -> None:
    """The command train."""
    with one_writer(output) if n_started() == 1 else nullcontext():
        stopped = _train(output=output, **given)
    if stopped == "interrupted":  # the model so far is saved; the exit status tells scripts
        click.get_current_context().exit(INTERRUPTED)


def _train(
    paths: Sequence[str],
    output: str,
    dev_path: str | None,
    early_stopping: bool,
    shards_folder: str | None,
    restart: bool,
    encoding: str,
    missing: str | None,
    annotators: str | None,
    from_path: str | None,
    **given: Any,
) -> str:
    """Fits and saves the model; returns how the fit was stopped."""
    features = {name: given.pop(name) for name in FEATURES}
    spec = declared_in(given["structure"])
    check_format(spec, features["format"], shards_folder)
    features |= _of_structure(spec, features["format"]) | _of_documents(given["constraints"], features)
    names = annotators.split(",") if annotators else []
    checkpoint = Path(f"{output}.checkpoint")
    with joined(device_of(given["device"])) as together:
        read = _training_data(paths, encoding, missing, shards_folder, features, names, together)
        reader, X, y, counts, places = read
        dev = reader.read(dev_path, encoding=encoding) if dev_path else None
        y_dev = shared.all_labels(dev, missing) if dev is not None else []
        estimator = _classifier(reader, spec, **given)
        if from_path is not None:
            _start_from(estimator, reader, from_path)
        if restart:
            checkpoint.unlink(missing_ok=True)
            together.wait()  # or another process might still find it
        if checkpoint.exists() and together.is_first:
            click.echo(f"continuing from {checkpoint}; --restart starts again", err=True)
        watched = {"X_dev": dev.X, "y_dev": y_dev, "early_stopping": True} if dev and early_stopping else {}
        try:
            with shared.in_files(places, reader.has_token_lines):
                fit_with_progress(estimator, X, y, checkpoint=checkpoint, together=together, **watched)
        except InputError as error:
            if error.place == str(checkpoint):
                raise InputError(error.place, error.problem, "use --restart to start again") from error
            raise
    stopped = str(estimator.training_log_["stopped"])
    if not together.is_first:
        return stopped
    estimator.warm_start = False
    estimator.save(output, reader.to_json())
    checkpoint.unlink(missing_ok=True)
    say_fit(estimator, *counts)
    if reader.vectors is not None:
        click.echo(f"{reader.vectors.vectors.name}: {reader.vectors.coverage}", err=True)
    if names:
        click.echo(str(estimator.annotators_), err=True)
    click.echo(f"wrote {output}", err=True)
    if dev is not None:
        click.echo(table(score(estimator, reader, dev, y_dev)))
    return stopped


def _of_structure(spec: Spec | None, format: str) -> dict[str, Any]:
    """What the reader of a format needs to know about the structure."""
    if format == "jsonl":
        return {"form": "sequence" if spec is None else spec.form}
    return {"keys": features_named(spec)} if format == "crfsuite" and spec is not None else {}


def _of_documents(constraints: str | None, features: dict[str, Any]) -> dict[str, Any]:
    """The scheme in which spans are written as labels: the one named in --constraints, if any."""
    named = str(constraints).upper() in (*SCHEMES, "IOB2", "BIOES")
    return {"scheme": constraints} if features["format"] in DOCUMENTS and named else {}


def _classifier(
    reader: sources.Reader,
    spec: Spec | None,
    *,
    kernel: str,
    inducing: int | None,
    structure: str,
    seed: int,
    constraints: str | None,
    forbid: Sequence[tuple[str, str]],
    class_weight: Sequence[str],
    data_weight: str,
    word_parts: str,
    **same: Any,
) -> StructuredGPClassifier:
    """The classifier that the options ask for. same : options that are parameters of the same name."""
    if constraints and forbid:
        raise InputError("--forbid", "cannot be combined with --constraints", "use one of them")
    weight: float | str = data_weight
    with suppress(ValueError):
        weight = float(data_weight)
    forbidden = [(None if a == "^" else a, None if b == "$" else b) for a, b in forbid]
    return StructuredGPClassifier(
        # If there are dense features too, the option names the kernel of the templates only.
        kernel={"categorical": kernel} if reader.has_dense and kernel in KERNELS else kernel,
        posterior="auto" if inducing is None else Inducing(n_inducing=inducing),
        # Without a B line there are no transition scores, unless a file declares them.
        prior=Prior(
            transition_sd=Prior.transition_sd if reader.has_transitions or spec is not None else 0.0,
            data_weight=weight,
        ),
        structure=structure_of(structure, spec, reader),
        features=Parameters.features if reader.format == "jsonl" else "columns",
        random_state=seed,
        constraints={"forbidden": forbidden} if forbid else _scheme(constraints),
        word_parts=_word(word_parts, reader.template_lines),
        class_weight=_class_weight(class_weight),
        **same,
    )


def _word(name: str, lines: Mapping[str, str]) -> str | None:
    """The parameter ``word_parts`` of the classifier."""
    if name.lower() in ("none", Parameters.word_parts):
        return None if name.lower() == "none" else Parameters.word_parts
    return column_of(name, lines, "--word-parts") if lines else name


def _scheme(name: str | None) -> Any:
    """The parameter ``constraints`` of the classifier."""
    default = str(Parameters.constraints)
    if name is None or name.lower() == default:
        return default
    if name.endswith(".json"):
        return read_json(name)
    return None if name.lower() == "none" else name


def _training_data(
    paths: Sequence[str],
    encoding: str,
    missing: str | None,
    folder: str | None,
    features: dict[str, Any],
    annotators: Sequence[str],
    together: Processes,
) -> tuple[sources.Reader, Any, Any, tuple[int, int], list[tuple[str, int]]]:
    """The reader that the arguments ask for, X and y as ``fit`` takes them, the numbers of sequences and
    tokens, and the places of JSON lines. A file is read only once, since it may be a pipe; with shards, it
    is never held in memory as a whole."""
    format_name = features["format"]
    hold, train, template = folder is None, paths[-1], None
    for option in ("numeric", "vectors"):
        if features[option] and not hold:
            raise InputError(f"--{option}", "shards cannot hold dense features", "leave out --shards")
    file: Any = train
    if format_name in DOCUMENTS and len(paths) == 2:
        dialect = features["dialect"] or "crf++"
        template = sources.Template.read(paths[0], encoding=encoding, dialect=dialect)
    if format_name == "columns":
        dialect = features["dialect"] or "crf++"
        template = sources.Template.read(paths[0], encoding=encoding, dialect=dialect)
        file = sources.read_columns(train, encoding=encoding) if hold else train
        if annotators:
            file, said = split_columns(file, annotators, missing)
        if template.bigrams and not hold:
            problem = "shards cannot hold features of transitions"
            remedy = "leave out --shards, or write a plain B line"
            raise InputError(f"{template.name}:{template.bigrams[0].line}", problem, remedy)
    reader = sources.learn(file, template=template, missing=missing, encoding=encoding, **features)
    if folder is not None:
        found = _shards_of(reader.stream(train, encoding), folder, together)
        return reader, found, None, (found.about["n_given"], found.n_tokens), []
    if annotators and format_name == "jsonl":
        X, said, places = read_json_annotations(reader, train, annotators, encoding)
        return reader, X, said, (len(X), sum(map(length_of, X))), places
    data = reader.read(file, encoding=encoding)
    if annotators:
        return reader, data.X, said, (len(data.X), shared.n_tokens(data.y)), []
    shared.check_two_labels(data.y, data.name)
    n_given = len(data.X), shared.n_tokens(data.y)
    if n_given[0] == 1 and n_given[1] >= LONG and format_name in ("columns", "conll", "crfsuite"):
        warn_caller(f"{data.name}: one sequence of {n_given[1]:,} tokens; an empty line ends a sequence")
    return reader, data.X, data.y, n_given, shared.places_of(data)


def _start_from(estimator: StructuredGPClassifier, reader: sources.Reader, path: str) -> None:
    """Makes the fit start from the model in a file."""
    before, old = shared.load_with_reader(StructuredGPClassifier, path)
    ours, theirs = ({**r.to_json(), "missing": None} for r in (reader, old))
    for state in (ours, theirs):
        state.pop("numeric", None)  # its scale is that of each training file
    if ours != theirs:
        problem = "was trained with another template, other columns or another format"
        raise InputError(path, problem, "leave out --from, or use what it was trained with")
    estimator.model_, estimator.training_log_ = before.model_, before.training_log_
    estimator.classes_, estimator.warm_start = before.classes_, True


def _shards_of(stream: sources.Stream, folder: str, together: Processes) -> shards.Shards:
    """The shards of a file: those in the folder if they belong to this file (InputError if they belong to
    another), else new ones, written by the first of several processes."""
    digest = stream.digest
    if not together.is_first:
        together.wait()
    if (Path(folder) / "manifest.json").exists():
        found = shards.read(folder)
        if found.about["source"] != digest:
            problem = f"holds shards of other data than {stream.path}"
            raise InputError(folder, problem, "name another folder, or remove this one")
        if together.is_first:
            click.echo(f"{folder}: already written", err=True)
    else:
        click.echo(f"encoding {stream.path} into {folder}", err=True)
        found = shards.write(stream, folder, features="columns", source=digest, name=stream.path)
    if together.is_first:
        together.wait()
    return found


def _class_weight(given: Sequence[str]) -> str | dict[str, float] | None:
    if not given or list(given) == ["balanced"]:
        return "balanced" if given else None
    weights = {}
    for item in given:
        label, equals, factor = item.rpartition("=")
        try:
            weights[label] = float(factor)
        except ValueError:
            equals = ""
        if not equals or not label:
            problem = f"must be LABEL=FACTOR or balanced, got {item!r}"
            raise InputError("--class-weight", problem, "correct it")
    return weights
