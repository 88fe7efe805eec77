"""The commands: evaluate, describe, demo."""

from __future__ import annotations

import json

import click

from structgp import __version__
from structgp.api.describe import describe
from structgp.api.estimator import StructuredGPClassifier, load
from structgp.cli.inputs import load_with_input
from structgp.cli.options import device_option, encoding_option, model_option, vectors_option
from structgp.cli.shared import (
    Group,
    check_labelled,
    fit_with_progress,
    print_reports,
    say_fit,
    score,
    score_crf,
)
from structgp.data import ingredients
from structgp.data.corpora import recipes
from structgp.errors import InputError

_DEMO_LINES = (
    "2 1/2 cups self-raising flour, sifted",
    "1 (400 g) tin plum tomatoes, roughly chopped",
    "a good handful of fresh mint leaves (optional)",
)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="structgp")
def main() -> None:
    """Label sequences, and know how sure the labels are.

    Files hold one token a line, columns separated by spaces or tabs, a blank line between sequences,
    and the label in the last column. Templates are CRF++'s or Wapiti's. CRFsuite's own files, a label and
    attributes a line, need none.
    """


# -- evaluate ----------------------------------------------------------------------------------


@main.command("evaluate")
@model_option
@click.argument("test_path", metavar="TEST", type=click.Path())
@click.option(
    "--against",
    type=click.Choice(["crf"]),
    help="Also train a linear CRF, its regulariser cross-validated, on the same data.",
)
@click.option("--train", "train_path", type=click.Path(), help="Training file, for --against.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@vectors_option
@device_option
@encoding_option
def evaluate_command(
    model_path: str,
    test_path: str,
    against: str | None,
    train_path: str | None,
    as_json: bool,
    vectors_path: str | None,
    device: str,
    encoding: str,
) -> None:
    """Score a model on the labelled file TEST."""
    if against and not train_path:
        raise InputError(
            "--against", "nothing to train the rival on", "add --train with the training file"
        )
    estimator, source = load_with_input(model_path, vectors_path, device)
    test = source.read(test_path, encoding)
    missing = estimator.model_.extra.get("missing")
    check_labelled(test.y, test.name, missing)
    reports = {"structgp": score(estimator, test.X, test.y, test.name)}
    if against and train_path:
        data = source.read(train_path, encoding)
        check_labelled(data.y, data.name, missing)
        reports["linear CRF"] = score_crf(data.X, data.y, test.X, test.y)
    if as_json:
        click.echo(json.dumps({name: r.as_dict() for name, r in reports.items()}, indent=2))
    else:
        print_reports(reports)


# -- describe ----------------------------------------------------------------------------------


@main.command("describe")
@click.argument("model_path", metavar="MODEL", type=click.Path())
def describe_command(model_path: str) -> None:
    """Show how MODEL was fitted and what it has learned: every choice of the fit with its reason, the prior
    scales of its templates, and its transitions."""
    click.echo(str(describe(load(model_path))))


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
