"""The commands evaluate, describe, demo and report."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from structgp import __version__
from structgp.api.describe import describe
from structgp.api.estimator import StructuredGPClassifier, load
from structgp.cli import shared
from structgp.cli.flags import model_option, reading_options
from structgp.cli.shared import all_labels, load_with_reader, print_reports, score, score_crf
from structgp.data import corpora
from structgp.data.atomic import atomic_write
from structgp.data.sources import Labelled
from structgp.errors import InputError
from structgp.report import Text, examine, render

_DEMO_LINES = (
    "2 1/2 cups self-raising flour, sifted",
    "1 (400 g) tin plum tomatoes, roughly chopped",
    "a good handful of fresh mint leaves (optional)",
)
_DEMO_DOUBT = 0.3


@click.group(cls=shared.Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="structgp")
def main() -> None:
    """Label sequences, trees, grids and other graphs, and know how sure the labels are.

    Files have one token per line, columns separated by spaces or tabs, a blank line between sequences,
    and the label in the last column. Templates are CRF++'s or Wapiti's. CRFsuite's files, with a label
    and attributes on each line, need no template. JSON lines, one example per line, hold any structure."""


@main.command("evaluate")
@model_option
@click.argument("test_path", metavar="TEST", type=click.Path())
@click.option(
    "--against",
    type=click.Choice(["crf"]),
    help="Also train a linear CRF on the same data, its regulariser cross-validated.",
)
@click.option("--train", "train_path", type=click.Path(), help="Training file, for --against.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@reading_options
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
        raise InputError("--against", "needs the training file", "add it with --train")
    estimator, reader = load_with_reader(model_path, vectors_path, device)
    test = reader.read(test_path, encoding=encoding)
    y_test = all_labels(test, reader.missing)
    if against and reader.format == "jsonl":
        raise InputError("--against", "a linear CRF reads no JSON lines", "leave it out")
    reports = score(estimator, test, y_test)
    if against and train_path:
        data = reader.read(train_path, encoding=encoding)
        y = all_labels(data, reader.missing)
        reports["linear CRF"] = score_crf(data.X, y, test.X, y_test)
    if as_json:
        click.echo(json.dumps({name: r.as_dict() for name, r in reports.items()}, indent=2))
    else:
        print_reports(reports)


@main.command("describe")
@click.argument("model_path", metavar="MODEL", type=click.Path())
def describe_command(model_path: str) -> None:
    """Show how MODEL was fitted and what it has learned: every choice of the fit with its reason, the
    prior scales of its templates, and its transitions."""
    click.echo(str(describe(load(model_path))))


@main.command()
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal runs.")
def demo(seed: int) -> None:
    """Train on the embedded corpus of recipe ingredients, score the model, say where its doubts are, and
    label three new lines."""
    corpus = corpora.recipes()
    X = [corpus.template.expand(rows) for rows in corpus.X_train]
    X_test = [corpus.template.expand(rows) for rows in corpus.X_test]
    sizes = f"{len(X)} lines to learn from, {len(X_test)} to test on"
    click.echo(f"Recipe ingredients: {sizes}; labels for quantity, unit, name, preparation, comment.\n")
    estimator = StructuredGPClassifier(features="columns", random_state=seed)
    shared.fit_with_progress(estimator, X, corpus.y_train)
    shared.say_fit(estimator, len(X), sum(map(len, corpus.y_train)))
    reports = score(estimator, Labelled("recipes/test.conll", X_test, corpus.y_test), corpus.y_test)
    try:
        reports["linear CRF"] = score_crf(X, corpus.y_train, X_test, corpus.y_test)
    except InputError as error:
        click.echo(f"structgp: warning: no linear CRF to compare with: {error}", err=True)
    click.echo()
    print_reports(reports)
    _say_doubts(estimator, X_test, corpus.y_test)
    for line in _DEMO_LINES:
        tokens = corpora.tokenize(line)
        x = corpus.template.expand(corpora.columns(tokens))
        click.echo(f"\n{line}")
        labels, marginals = estimator.predict_single(x), estimator.predict_marginals_single(x)
        for token, label, p in zip(tokens, labels, marginals, strict=True):
            second = sorted(p, key=p.__getitem__)[-2]
            click.echo(f"  {token:<14}{label:<11}{p[label]:5.2f}   or {second} {p[second]:.2f}")


def _say_doubts(estimator: StructuredGPClassifier, X: list[Any], y: list[list[str]]) -> None:
    """What probabilities are good for: errors are expected without labels, and found where doubts are."""
    expected = estimator.expected_scores(X)
    click.echo(
        f"\nWithout looking at the labels it expects a token error of {expected.error.mean:.1%} "
        f"({expected.error.low:.1%} to {expected.error.high:.1%}) and a span F1 of {expected.f1.mean:.1%} "
        f"({expected.f1.low:.1%} to {expected.f1.high:.1%})."
    )
    answers = zip(y, estimator.predict(X), estimator.predict(X, defer=_DEMO_DOUBT), strict=True)
    tokens = [token for sequence in answers for token in zip(*sequence, strict=True)]
    wrong = [truth != label for truth, label, _ in tokens]
    doubtful = [kept is None for *_, kept in tokens]
    found = sum(w and d for w, d in zip(wrong, doubtful, strict=True))
    click.echo(
        f"It is less than {1 - _DEMO_DOUBT:.0%} sure of {sum(doubtful)} of the {len(tokens)} tokens. "
        f"A person who looks at these finds {found} of its {sum(wrong)} errors."
    )


@main.command()
@click.argument("model_path", metavar="MODEL", type=click.Path())
@click.argument("data_path", metavar="DATA", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="HTML page to write.")
@reading_options
def report(
    model_path: str, data_path: str, output: str, encoding: str, vectors_path: str | None, device: str
) -> None:
    """Show a model's answers for the file DATA on one HTML page.

    If all of DATA has labels, the page compares them with the answers."""
    shared.check_writable(output)
    estimator, reader = load_with_reader(model_path, vectors_path, device)
    found = list(shared.sequences(reader, [data_path], encoding))
    every: list[Any] = [s.labels for s in found if s.labels is not None]
    whole = len(every) == len(found) and not any(None in shared.flat(labels) for labels in every)
    labels = every if whole else None
    text = Text(os.path.basename(data_path), [s.words for s in found], [s.line for s in found], labels)
    model, templates = os.path.basename(model_path), reader.template_lines
    with shared.in_files([(s.name, s.line) for s in found] if reader.format == "jsonl" else []):
        X = [s.tokens for s in found]
        findings = examine(estimator, X, text, model_name=model, templates=templates)
    # Some encodings hold halves of characters, which UTF-8 does not.
    content = render(findings).encode("utf-8", "replace")
    with atomic_write(output, "wb") as file:
        file.write(content)
    click.echo(f"wrote {output}", err=True)
