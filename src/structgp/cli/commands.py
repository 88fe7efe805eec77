"""The commands: train, tag, evaluate, demo."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from structgp._version import __version__
from structgp.cli.inputs import (
    Input,
    Unlabelled,
    feature_options,
    learn,
    load_with_input,
    vectors_option,
)
from structgp.cli.shared import (
    Group,
    check_two_labels,
    check_writable,
    chunks,
    fit_with_progress,
    output_stream,
    print_reports,
    say_fit,
    score,
    score_crf,
)
from structgp.data import ingredients
from structgp.data.columns import check_encoding, format_sequence
from structgp.data.corpora import recipes
from structgp.errors import InputError
from structgp.estimator import StructuredGPClassifier
from structgp.inference import INFERENCE

_TAG_CHUNK = 200
_DEMO_LINES = (
    "2 1/2 cups self-raising flour, sifted",
    "1 (400 g) tin plum tomatoes, roughly chopped",
    "a good handful of fresh mint leaves (optional)",
)


def _known_encoding(_: click.Context, __: click.Parameter, encoding: str) -> str:
    check_encoding(encoding, "--encoding")
    return encoding


_ENCODING = click.option(
    "--encoding",
    default="utf-8",
    show_default=True,
    callback=_known_encoding,
    help="Encoding of every file read and written.",
)
_MODEL = click.option(
    "-m", "--model", "model_path", required=True, type=click.Path(), help="Model file."
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="structgp")
def main() -> None:
    """Label sequences, and know how sure the labels are.

    Files hold one token a line, columns separated by spaces or tabs, a blank line between sequences,
    and the label in the last column. Templates are CRF++'s or Wapiti's. CRFsuite's own files, a label and
    attributes a line, need none.
    """


# -- train -------------------------------------------------------------------------------------


@main.command()
@click.argument("paths", metavar="[TEMPLATE] TRAIN", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Model file to write.")
@click.option("--dev", "dev_path", type=click.Path(), help="Labelled file to score afterwards.")
@feature_options
@click.option(
    "--inducing",
    type=int,
    help="Most inducing inputs, in the place of one weight a feature.  [default: weights; where the "
    "kernel or the optimiser has none, 1000 or what a preset has]",
)
@click.option(
    "--kernel",
    type=click.Choice(["auto", "relevance", "template", "template-product"]),
    default="auto",
    show_default=True,
    help="What the templates are worth: a relevance for each feature, or a weight for each template, "
    "summed or multiplied.",
)
@click.option(
    "--inference",
    type=click.Choice(INFERENCE),
    default="auto",
    show_default=True,
    help="Optimiser of the evidence bound.",
)
@click.option(
    "--likelihood",
    type=click.Choice(["chain", "piecewise"]),
    default="chain",
    show_default=True,
    help="Structured softmax, or its piecewise pseudo-likelihood.",
)
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal models.")
@_ENCODING
def train(
    paths: Sequence[str],
    output: str,
    dev_path: str | None,
    inducing: int | None,
    kernel: str,
    inference: str,
    likelihood: str,
    seed: int,
    encoding: str,
    **features: Any,
) -> None:
    """Fit a model to the labelled file TRAIN, with features from TEMPLATE.

    Ctrl-C stops early and keeps what has been reached.
    """
    check_writable(output)
    source, data = learn(paths, encoding, **features)
    dev = source.read(dev_path, encoding) if dev_path else None
    X, y = data.X, data.y
    check_two_labels(y, data.name)
    estimator = StructuredGPClassifier(
        kernel=source.kernel(kernel),
        n_inducing=inducing,
        inference=inference,
        likelihood=likelihood,
        features="columns",
        random_state=seed,
    )
    if not source.has_pairs:
        estimator.set_params(pairwise_sd=0.0)  # no B line, no label-to-label scores
    fit_with_progress(estimator, X, y)
    estimator.model_.extra |= source.to_extra()
    estimator.save(output)
    say_fit(estimator, len(X), sum(map(len, y)))
    click.echo(f"wrote {output}", err=True)
    if dev is not None:
        print_reports({"structgp": score(estimator, dev.X, dev.y, dev.name)})


# -- tag ---------------------------------------------------------------------------------------


@main.command()
@_MODEL
@click.argument("files", nargs=-1, type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="File to write instead of standard output.")
@click.option(
    "-v",
    "--verbose",
    "level",
    type=click.IntRange(0, 2),
    default=0,
    help="1: probability of the labelling and of each label; 2: of every label.",
)
@click.option(
    "--viterbi", is_flag=True, help="The best whole labelling instead of the best label each."
)
@vectors_option
@_ENCODING
def tag(
    model_path: str,
    files: Sequence[str],
    output: str | None,
    level: int,
    viterbi: bool,
    vectors_path: str | None,
    encoding: str,
) -> None:
    """Label FILES, or standard input. Output is laid out as crf_test does: the columns, a tab, the
    label; with -v1 or -v2 its probability after a slash. A model of CRFsuite's attributes answers as
    crfsuite tag does: the label alone; with -v1 or -v2 its probability after a colon."""
    estimator, source = load_with_input(model_path, vectors_path)
    estimator.decode = "viterbi" if viterbi else "marginal"
    given: Sequence[Any] = files or [sys.stdin.buffer]

    def sequences() -> Iterator[Unlabelled]:
        for file in given:
            name = file if isinstance(file, str) else "<stdin>"
            empty = True
            for sequence in source.sequences(file, encoding, name):
                empty = False
                yield sequence
            if empty and files:
                raise InputError(name, "no tokens in it", "give a file with something to label")

    with output_stream(output, encoding) as out:
        # What comes through a pipe is answered as it comes.
        for chunk in chunks(sequences(), _TAG_CHUNK if files else 1):
            for lines in _tagged(estimator, source, chunk, level):
                out.write(lines + "\n")
            out.flush()


def _tagged(
    estimator: StructuredGPClassifier, source: Input, chunk: Sequence[Unlabelled], level: int
) -> Iterator[str]:
    """One block of lines a sequence, without the blank line after it."""
    rows, X = [sequence.cells for sequence in chunk], [sequence.tokens for sequence in chunk]
    head, mark = source.layout
    labels = estimator.predict(X)
    if level == 0:
        for r, y in zip(rows, labels, strict=True):
            yield format_sequence([(*row, label) for row, label in zip(r, y, strict=True)])
        return
    marginals = estimator.predict_marginals(X)
    log_probs = estimator.model_.log_probs(X, labels, estimator.average)
    for r, y, p, log_prob in zip(rows, labels, marginals, log_probs, strict=True):
        cells = []
        for row, label, probabilities in zip(r, y, p, strict=True):
            every = probabilities.items() if level == 2 else ()
            extra = [f"{name}{mark}{value:.6f}" for name, value in every]
            cells.append((*row, f"{label}{mark}{probabilities[label]:.6f}", *extra))
        assert log_prob is not None, "a predicted label is a known one"
        yield f"{head.format(math.exp(log_prob))}\n{format_sequence(cells)}"


# -- evaluate ----------------------------------------------------------------------------------


@main.command("evaluate")
@_MODEL
@click.argument("test_path", metavar="TEST", type=click.Path())
@click.option(
    "--against",
    type=click.Choice(["crf"]),
    help="Also train a linear CRF, its regulariser cross-validated, on the same data.",
)
@click.option("--train", "train_path", type=click.Path(), help="Training file, for --against.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@vectors_option
@_ENCODING
def evaluate_command(
    model_path: str,
    test_path: str,
    against: str | None,
    train_path: str | None,
    as_json: bool,
    vectors_path: str | None,
    encoding: str,
) -> None:
    """Score a model on the labelled file TEST."""
    if against and not train_path:
        raise InputError(
            "--against", "nothing to train the rival on", "add --train with the training file"
        )
    estimator, source = load_with_input(model_path, vectors_path)
    test = source.read(test_path, encoding)
    reports = {"structgp": score(estimator, test.X, test.y, test.name)}
    if against and train_path:
        data = source.read(train_path, encoding)
        reports["linear CRF"] = score_crf(data.X, data.y, test.X, test.y)
    if as_json:
        click.echo(json.dumps({name: r.as_dict() for name, r in reports.items()}, indent=2))
    else:
        print_reports(reports)


# -- demo --------------------------------------------------------------------------------------


@main.command()
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal runs.")
def demo(seed: int) -> None:
    """Train on the embedded corpus of recipe ingredients, score, and label three new lines."""
    corpus = recipes()
    X = [corpus.template.expand(rows) for rows in corpus.X_train]
    X_test = [corpus.template.expand(rows) for rows in corpus.X_test]
    click.echo(
        f"Recipe ingredients: {len(X)} lines to learn from, {len(X_test)} to test on; "
        "labels for quantity, unit, name, preparation, comment.\n"
    )
    estimator = StructuredGPClassifier(features="columns", random_state=seed)
    fit_with_progress(estimator, X, corpus.y_train)
    say_fit(estimator, len(X), sum(map(len, corpus.y_train)))
    reports = {"structgp": score(estimator, X_test, corpus.y_test, "recipes/test.conll")}
    try:
        reports["linear CRF"] = score_crf(X, corpus.y_train, X_test, corpus.y_test)
    except InputError as error:
        click.echo(f"structgp: warning: no linear CRF beside it: {error}", err=True)
    click.echo()
    print_reports(reports)
    for line in _DEMO_LINES:
        tokens = ingredients.tokenize(line)
        x = corpus.template.expand(ingredients.columns(tokens))
        click.echo(f"\n{line}")
        labels, marginals = estimator.predict_single(x), estimator.predict_marginals_single(x)
        for token, label, p in zip(tokens, labels, marginals, strict=True):
            second = sorted(p, key=p.__getitem__)[-2]
            click.echo(f"  {token:<14}{label:<11}{p[label]:5.2f}   or {second} {p[second]:.2f}")
