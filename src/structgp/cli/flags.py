"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from structgp.data.opening import check_encoding

# Copies of names from modules that import torch, so that help does not wait for it. Tests compare them.
DOCUMENTS = ("conll", "conllu", "prodigy", "doccano", "label-studio", "brat", "spacy", "text")
FORMATS = ("columns", "crfsuite", "jsonl", *DOCUMENTS)
INFERENCE = (
    "auto",
    "second-order",
    "minibatch",
    "natural",
    "adam",
    "saga",
    "lbfgs",
    "paper-batch",
    "paper-stochastic",
)
STRATEGIES = ("least-confidence", "margin", "token-entropy", "n-best-entropy", "bald")
KERNELS = ("relevance", "template", "template-product")


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
    "--device", default="cpu", show_default=True, help="cpu, cuda, or auto for the GPU if there is one."
)
model_option = click.option("-m", "--model", "model_path", required=True, type=click.Path(), help="Model.")


def combined(*options: Any) -> Any:
    """One decorator that adds several options, listed in the help in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def choice(option: str, values: Iterable[str], help: str) -> Any:
    """An option that takes one of the values; the default is the first."""
    names = list(values)
    return click.option(option, type=click.Choice(names), default=names[0], show_default=True, help=help)


snap_option = click.option(
    "--snap", is_flag=True, help="Let spans of documents that cut a token grow to hold all of it."
)
field_option = click.option(
    "--field",
    metavar="NAME",
    help="Where CoNLL-U has the labels: upos, xpos, deprel, feats:NAME or misc:NAME, such as "
    "misc:NER.  [default: upos]",
)

FEATURES = ("format", "dialect", "numeric", "vectors", "vector_column", "snap", "field")
"""Parameters of ``feature_options``, with the names that they have in ``sources.learn``."""

feature_options = combined(
    choice(
        "--format",
        FORMATS,
        "Format of TRAIN: columns; CRFsuite's attributes, or JSON lines with one example per line, which "
        "need no TEMPLATE; or a format of documents, whose words have default features without TEMPLATE.",
    ),
    snap_option,
    field_option,
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
        help="Use word vectors as features: a text file, one word and its numbers per line. A word that "
        "it does not have is looked up in lower case; other words get zeros. The vectors are not stored in "
        "the model.",
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
    help="File of the word vectors that the model was trained with.  [default: in the model's folder]",
)
# Options of commands that read files for a model.
reading_options = combined(
    vectors_option,
    click.option(
        "--format",
        "documents",
        type=click.Choice(DOCUMENTS),
        help="Format of the documents, for a model that was trained on some.  [default: by the name: "
        ".conllu, .spacy, ...; else that of the training file, also for .txt if that had columns]",
    ),
    snap_option,
    device_option,
    encoding_option,
)


# Options of commands that listen for requests.
place_options = combined(
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
    click.option(
        "--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on.  [default: a free one]"
    ),
    click.option("--token", help="Token that requests have to bring.  [default: a random one]"),
    click.option("--no-token", is_flag=True, help="Answer without a token."),
    click.option(
        "--allow-host",
        multiple=True,
        metavar="NAME",
        help="Also answer requests that are addressed to this host name; * for any. May be repeated.",
    ),
)


def verbose(help: str) -> Any:
    """The option -v of commands that write labels."""
    return click.option("-v", "--verbose", "level", type=click.IntRange(0, 2), default=0, help=help)


def place_of(given: dict[str, Any]) -> Any:
    """Removes the values of ``place_options`` from a command's arguments, and returns them as a Place."""
    from structgp.errors import InputError
    from structgp.service.running import Place

    host, port, token, hosts = (given.pop(name) for name in ("host", "port", "token", "allow_host"))
    if given.pop("no_token"):
        if token is not None:
            raise InputError("--no-token", "cannot be combined with --token", "use one of them")
        return Place(host, port, None, hosts)
    if token == "":
        raise InputError("--token", "empty", "give some letters, or leave it out for a random one")
    return Place(host, port, token or "", hosts)
