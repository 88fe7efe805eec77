"""Options that several commands have."""

from __future__ import annotations

import click

from structgp.data.columns import check_encoding


def _known_encoding(_: click.Context, __: click.Parameter, encoding: str) -> str:
    check_encoding(encoding, "--encoding")
    return encoding


encoding_option = click.option(
    "--encoding",
    default="utf-8",
    show_default=True,
    callback=_known_encoding,
    help="Encoding of every file read and written.",
)
model_option = click.option(
    "-m", "--model", "model_path", required=True, type=click.Path(), help="Model file."
)
