"""Options that several commands have."""

from __future__ import annotations

from typing import Any

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
device_option = click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Where to compute: cpu, cuda, or auto for the GPU where there is one.",
)
model_option = click.option(
    "-m", "--model", "model_path", required=True, type=click.Path(), help="Model file."
)


def feature_options(command: Any) -> Any:
    """The options of ``train`` that say what features there are, as ``learn`` takes them."""
    for option in reversed(
        (
            click.option(
                "--format",
                "format_name",
                type=click.Choice(["columns", "crfsuite"]),
                default="columns",
                show_default=True,
                help="Of TRAIN: columns, or CRFsuite's labels and attributes, which need no TEMPLATE.",
            ),
            click.option(
                "--dialect",
                type=click.Choice(["crf++", "wapiti"]),
                help="Of TEMPLATE.  [default: crf++]",
            ),
            click.option(
                "--numeric",
                type=click.IntRange(min=0),
                multiple=True,
                metavar="COLUMN",
                help="A column of numbers, counted from 0, as a feature; may be given several times.",
            ),
            click.option(
                "--vectors",
                "vectors_path",
                type=click.Path(),
                help="Word vectors as features: a text file with a word and its numbers a line. Words "
                "that it does not have get zeros. The model does not hold them.",
            ),
            click.option(
                "--vector-column",
                type=click.IntRange(min=0),
                metavar="COLUMN",
                help="Column of the words that have vectors.  [default: 0]",
            ),
        )
    ):
        command = option(command)
    return command


vectors_option = click.option(
    "--vectors",
    "vectors_path",
    type=click.Path(),
    help="Where the word vectors are that the model was trained with.  [default: where they were then]",
)
