"""The commands describe and report."""

from __future__ import annotations

import os
from typing import Any

import click

from structgp.api.describe import describe
from structgp.api.estimator import StructuredGPClassifier, load
from structgp.cli import shared
from structgp.data.atomic import atomic_write
from structgp.report import Text, examine, render


def show_model(model_path: str) -> None:
    """The command describe."""
    click.echo(str(describe(load(model_path))))


def write_report(
    model_path: str,
    data_path: str,
    output: str,
    encoding: str,
    vectors_path: str | None,
    documents: str | None,
    snap: bool,
    device: str,
) -> None:
    """The command report."""
    estimator, reader = shared.load_with_reader(
        StructuredGPClassifier, model_path, vectors_path, device, documents, snap, [data_path]
    )
    found = list(shared.sequences(reader, [data_path], encoding))
    every: list[Any] = [s.labels for s in found if s.labels is not None]
    whole = len(every) == len(found) and not any(None in shared.flat(labels) for labels in every)
    labels = every if whole else None
    text = Text(os.path.basename(data_path), [s.words for s in found], [s.line for s in found], labels)
    model, templates = os.path.basename(model_path), reader.template_lines
    with shared.in_files([(s.name, s.line) for s in found], reader.has_token_lines):
        X = [s.tokens for s in found]
        findings = examine(estimator, X, text, model_name=model, templates=templates)
    # Some encodings can hold lone surrogates (halves of characters), which UTF-8 cannot.
    content = render(findings).encode("utf-8", "replace")
    with atomic_write(output, "wb") as file:
        file.write(content)
    click.echo(f"wrote {output}", err=True)
