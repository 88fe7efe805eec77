"""Checks of options and paths before torch is imported, so that users learn of mistakes at once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from structgp.cli.flags import DOCUMENTS
from structgp.data.atomic import atomic_write
from structgp.data.formats.file_formats import format_by_name
from structgp.data.opening import cannot_read
from structgp.errors import InputError, ModelFileError


def check_model(path: str) -> None:
    """Raises ModelFileError if there is no file at ``path``."""
    if not os.path.exists(path):
        raise ModelFileError(path, "no such file", "check the path")


def check_there(*paths: str | None) -> None:
    """Raises InputError if a path does not exist. Nothing is opened, since it may be a pipe."""
    path = ""
    try:
        for path in filter(None, paths):
            os.stat(path)
    except OSError as error:
        raise cannot_read(path, error) from error


def check_not_input(output: str | None, *paths: str | None) -> None:
    """Raises InputError if the output is one of the files to be read, which would be overwritten. output :
    None for standard output."""
    if output == "":
        raise InputError("--output", "no name", "name the file to write")
    for path in filter(None, paths if output else ()):
        assert output
        if os.path.isfile(output) and os.path.isfile(path) and os.path.samefile(output, path):
            raise InputError(output, "would be overwritten, and is to be read", "name another output")


def is_model(path: str) -> bool:
    """True if a file begins like a model file: with the length of a JSON object, followed by the object."""
    if not os.path.isfile(path):  # a pipe can be read only once
        return False
    with suppress(OSError), open(path, "rb") as file:
        head = file.read(9)
        return head[8:] == b"{" and int.from_bytes(head[:8], "little") < os.path.getsize(path)
    return False


class _UnwrittenError(Exception):
    """Ends a write before the file is replaced."""


def check_writable(path: str) -> None:
    """Raises InputError if a file cannot be written: before minutes of work rather than after."""
    with suppress(_UnwrittenError), atomic_write(path, "wb"):
        raise _UnwrittenError


def check_train(
    paths: Sequence[str],
    output: str,
    dev_path: str | None,
    early_stopping: bool,
    format: str,
    annotators: str | None,
    from_path: str | None,
    shards_folder: str | None,
    **more: Any,
) -> None:
    check_not_input(
        output, *paths, dev_path, *(more.get(k) for k in ("vectors", "constraints", "structure"))
    )
    check_writable(output)
    _check_annotators(annotators, format, shards_folder)
    if from_path is not None:
        if shards_folder is not None:
            raise InputError("--from", "a fit on shards starts from nothing", "leave one of them out")
        check_model(from_path)
    if early_stopping and not dev_path:
        raise InputError("--early-stopping", "needs a labelled file", "name one with --dev")
    given = f"{len(paths)} file{'s' if len(paths) > 1 else ''}"
    if format in DOCUMENTS and len(paths) > 2:
        raise InputError("train", f"{given}, but TEMPLATE and TRAIN are enough", "give one training file")
    if format in ("crfsuite", "jsonl") and len(paths) != 1:
        name, what = {"crfsuite": ("CRFsuite's format", "attributes")}.get(format, ("JSON lines", "keys"))
        problem = f"{given}, but {name} {'need' if format == 'jsonl' else 'needs'} only TRAIN"
        raise InputError("train", problem, f"leave TEMPLATE out: {what} are already features")
    if format == "columns" and len(paths) != 2:
        problem = f"{given}, but TEMPLATE and TRAIN are needed"
        told = format_by_name(paths[-1], "") if len(paths) == 1 else ""
        told = told if told not in ("text", "prodigy") else ""  # columns may be .txt, any JSON lines .jsonl
        remedy = f"give both, or add --format {told}, which needs no TEMPLATE"
        if not told:
            remedy = (
                "give both, or name a format that needs no TEMPLATE: --format conll, doccano, prodigy or "
            )
            remedy += "another of documents, or crfsuite or jsonl"
        raise InputError("train", problem, remedy)
    check_there(*paths, dev_path)


def _check_annotators(annotators: str | None, format: str, shards_folder: str | None) -> None:
    if annotators is None:
        return
    names = annotators.split(",")
    if not all(names) or len(set(names)) < len(names):
        problem = f"must be different names with commas between them, got {annotators!r}"
        raise InputError("--annotators", problem, "write NAME,NAME,...")
    if format == "crfsuite":
        problem = "CRFsuite's files have one label per line"
        raise InputError("--annotators", problem, "use columns or JSON lines")
    if shards_folder is not None:
        raise InputError("--annotators", "shards hold one labelling", "leave out --shards")


def check_tag(
    model_path: str,
    files: Sequence[str],
    output: str | None,
    n_best: int | None,
    level: int,
    decode: str | None,
    defer: float | None,
    coverage: float | None,
    force: bool,
    **_: Any,
) -> None:
    if n_best and decode:
        remedy = "leave it out: -n is for the most probable labellings"
        raise InputError("--decode", "cannot be combined with -n", remedy)
    for option, value in (("--coverage", coverage), ("--defer", defer)):
        beside = n_best or (option == "--coverage" and (level or force or decode or defer is not None))
        if value is not None and beside:
            others = "-n" if option == "--defer" else "-n, -v, --force, --decode or --defer"
            raise InputError(option, f"cannot be combined with {others}", "use one of them")
    check_model(model_path)
    check_there(*files)
    check_not_input(output, model_path)  # a file may be tagged in place


def check_next(
    model_path: str | None,
    files: Sequence[str],
    output: str | None,
    strategy: str | None,
    exclude: Sequence[str],
    level: int,
    format: str | None,
    vectors_path: str | None,
    snap: bool,
    **_: Any,
) -> None:
    if model_path is None:
        if strategy not in (None, "diverse", "random"):
            raise InputError("--strategy", f"{strategy!r} needs a model", "add -m MODEL, or use 'diverse'")
        for option, value in (("-v", level), ("--vectors", vectors_path), ("--snap", snap)):
            if value:
                raise InputError(option, "needs a model", "add -m MODEL, or leave it out")
        if format in DOCUMENTS:
            raise InputError(
                "--format", f"{format} needs a model", "use 'structgp label', or convert to conll"
            )
    else:
        check_model(model_path)
        if format is not None and format not in DOCUMENTS:
            raise InputError("--format", "is known to the model", "leave it out")
    check_there(*files, *exclude)
    if model_path is None and is_model(files[0]):
        remedy = f"use structgp next -m {shlex.join(files)}"
        raise InputError("next", "the model to read needs the option -m", remedy)
    check_not_input(output, model_path, *files, *exclude)


def check_evaluate(
    model_path: str, test_path: str, against: str | None, train_path: str | None, **_: Any
) -> None:
    if against and not train_path:
        raise InputError("--against", "needs the training file", "add it with --train")
    check_model(model_path)
    check_there(test_path, train_path if against else None)
