"""The command: report."""

from __future__ import annotations

import os

import click

from structgp.cli.shared import check_columns, check_writable, load_with_template
from structgp.data.atomic import atomic_write
from structgp.data.columns import ColumnFile, read_columns
from structgp.data.templates import Template
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
def report(model_path: str, data_path: str, output: str, encoding: str) -> None:
    """Show what a model makes of the file DATA, on one HTML page.

    Labels in the last column are compared with; without them the page has the doubts alone.
    """
    check_writable(output)
    estimator, template, n_columns = load_with_template(model_path)
    text, X = _read(read_columns(data_path, encoding=encoding), template, n_columns)
    findings = examine(
        estimator,
        X,
        text,
        model_name=os.path.basename(model_path),
        templates={str(i): line.source for i, line in enumerate(template.unigrams)},
    )
    # Some encodings hold halves of characters, which UTF-8 does not.
    content = render(findings).encode("utf-8", "replace")
    with atomic_write(output, "wb") as file:
        file.write(content)
    click.echo(f"wrote {output}", err=True)


def _read(
    data: ColumnFile, template: Template, n_columns: int
) -> tuple[Text, list[list[tuple[str, ...]]]]:
    """The text and its features; its last column is a label where there are more than the model knows."""
    check_columns(data.sequences[0], n_columns, data.name)
    labels = data.split_labels()[1] if data.n_columns > n_columns else None
    words = [[row[0] for row in sequence.rows] for sequence in data.sequences]
    lines = [sequence.line for sequence in data.sequences]
    X = [template.expand(sequence.rows) for sequence in data.sequences]
    return Text(os.path.basename(data.name), words, lines, labels), X
