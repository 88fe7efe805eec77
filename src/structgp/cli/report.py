"""The command: report."""

from __future__ import annotations

import os
from typing import Any

import click

from structgp.cli.inputs import load_with_reader
from structgp.cli.options import device_option, vectors_option
from structgp.cli.shared import check_writable
from structgp.data.atomic import atomic_write
from structgp.data.sources import Reader
from structgp.errors import InputError
from structgp.report import Text, examine, render


@click.command()
@click.argument("model_path", metavar="MODEL", type=click.Path())
@click.argument("data_path", metavar="DATA", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="HTML page to write.")
@click.option(
    "--encoding",
    default="utf-8",
    show_default=True,
    help="Encoding of DATA; the page is UTF-8.",
)
@vectors_option
@device_option
def report(
    model_path: str,
    data_path: str,
    output: str,
    encoding: str,
    vectors_path: str | None,
    device: str,
) -> None:
    """Show a model's answers for the file DATA on one HTML page.

    If DATA has labels in its last column, the page compares them with the answers.
    """
    check_writable(output)
    estimator, reader = load_with_reader(model_path, vectors_path, device)
    text, X = _read(reader, data_path, encoding)
    findings = examine(
        estimator,
        X,
        text,
        model_name=os.path.basename(model_path),
        templates=reader.template_lines,
    )
    # Some encodings hold halves of characters, which UTF-8 does not.
    content = render(findings).encode("utf-8", "replace")
    with atomic_write(output, "wb") as file:
        file.write(content)
    click.echo(f"wrote {output}", err=True)


def _read(reader: Reader, path: str, encoding: str) -> tuple[Text, list[Any]]:
    """The text and its features, with labels where the file has them."""
    sequences = list(reader.sequences(path, encoding=encoding))
    if not sequences:
        raise InputError(path, "no tokens", "give a file with at least one")
    found = [sequence.labels for sequence in sequences]
    labels = None if any(y is None for y in found) else [list(y or ()) for y in found]
    words = [sequence.words for sequence in sequences]
    lines = [sequence.line for sequence in sequences]
    text = Text(os.path.basename(path), words, lines, labels)
    return text, [sequence.tokens for sequence in sequences]
