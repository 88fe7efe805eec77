"""Options that several commands have."""

from __future__ import annotations

from typing import Any

import click

from structgp.data.sources.lines import check_encoding


def _known_encoding(_: click.Context, __: click.Parameter, encoding: str) -> str:
    check_encoding(encoding, "--encoding")
    return encoding


encoding_option = click.option(
    "--encoding",
    default="utf-8",
    show_default=True,
    callback=_known_encoding,
    help="Encoding of all files that are read or written.",
)
device_option = click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Where to compute: cpu, cuda, or auto for the GPU if there is one.",
)
model_option = click.option(
    "-m", "--model", "model_path", required=True, type=click.Path(), help="Model file."
)


def combined(*options: Any) -> Any:
    """One decorator for several options, which the help lists in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


# What the features of ``train`` are, under the names that ``sources.learn`` has for them.
feature_options = combined(
    click.option(
        "--format",
        "format",
        type=click.Choice(["columns", "crfsuite"]),
        default="columns",
        show_default=True,
        help="Format of TRAIN: columns, or CRFsuite's attributes, which need no TEMPLATE.",
    ),
    click.option(
        "--dialect", type=click.Choice(["crf++", "wapiti"]), help="Dialect of TEMPLATE.  [default: crf++]"
    ),
    click.option(
        "--numeric",
        type=click.IntRange(min=0),
        multiple=True,
        metavar="COLUMN",
        help="Use a column of numbers, counted from 0, as a feature. May be repeated.",
    ),
    click.option(
        "--vectors",
        type=click.Path(),
        help="Use word vectors as features: a text file, one word and its numbers per line. Other "
        "words get zeros. The vectors are not stored in the model.",
    ),
    click.option(
        "--vector-column",
        type=click.IntRange(min=0),
        metavar="COLUMN",
        help="Column of the words to look up in --vectors.  [default: 0]",
    ),
)
vectors_option = click.option(
    "--vectors",
    "vectors_path",
    type=click.Path(),
    help="File of the word vectors that the model was trained with.  [default: its path in training]",
)
