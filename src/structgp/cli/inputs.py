"""What the commands read: the reader that a model holds, or that the options of ``train`` ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from structgp.api.estimator import StructuredGPClassifier, load
from structgp.data import shards, sources
from structgp.errors import InputError


def load_with_reader(
    path: str, vectors_path: str | None = None, device: str = "cpu"
) -> tuple[StructuredGPClassifier, sources.Reader]:
    """A model and the reader of its files. vectors_path : where its word vectors are now; device : where
    it computes."""
    estimator = load(path)
    estimator.device = device
    return estimator, sources.from_json(estimator.model_.extra, path, vectors_path)


def training_reader(
    paths: Sequence[str], encoding: str, missing: str | None, hold: bool, features: dict[str, Any]
) -> tuple[sources.Reader, Any]:
    """The reader that the arguments and ``feature_options`` of ``train`` ask for, and its training file:
    a path or, with ``hold``, a column file that has been read, so that a pipe is read only once."""
    _check_number(paths, features["format"])
    for option in ("numeric", "vectors"):
        if features[option] and not hold:
            raise InputError(f"--{option}", "shards cannot hold dense features", "leave out --shards")
    train: Any = paths[-1]
    template = None
    if features["format"] == "columns":
        dialect = features["dialect"] or "crf++"
        template = sources.Template.read(paths[0], encoding=encoding, dialect=dialect)
        train = sources.read_columns(train, encoding=encoding) if hold else train
        if template.bigrams and not hold:
            raise InputError(
                f"{template.name}:{template.bigrams[0].line}",
                "shards cannot hold features of transitions",
                "leave out --shards, or write a plain B line",
            )
    reader = sources.learn(train, template=template, missing=missing, encoding=encoding, **features)
    return reader, train


def _check_number(paths: Sequence[str], format_name: str) -> None:
    if format_name == "crfsuite" and len(paths) != 1:
        raise InputError(
            "train",
            f"{len(paths)} files, but CRFsuite's format needs only TRAIN",
            "leave TEMPLATE out: attributes are already features",
        )
    if format_name == "columns" and len(paths) != 2:
        raise InputError(
            "train",
            f"{len(paths)} file{'s' if len(paths) > 1 else ''}, but TEMPLATE and TRAIN are needed",
            "give both, or --format crfsuite for a file of attributes",
        )


def shards_of(stream: sources.Stream, folder: str) -> shards.Shards:
    """The shards of a file: those in the folder if they belong to this file, else new ones."""
    digest = stream.digest
    if (Path(folder) / "manifest.json").exists():
        found = shards.read(folder)
        if found.about["source"] != digest:
            raise InputError(
                folder,
                f"holds shards of other data than {stream.path}",
                "name another folder, or remove this one",
            )
        click.echo(f"{folder}: already written", err=True)
        return found
    click.echo(f"encoding {stream.path} into {folder}", err=True)
    return shards.write(stream, folder, features="columns", source=digest, name=stream.path)
