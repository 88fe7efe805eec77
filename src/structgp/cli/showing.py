"""The commands describe, demo and report."""

from __future__ import annotations

import os
from typing import Any

import click

from structgp.api.describe import describe
from structgp.api.estimator import StructuredGPClassifier, load
from structgp.cli import shared
from structgp.cli.progress import fit_with_progress, say_fit
from structgp.cli.scoring import print_reports, score, score_crf
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


def show_model(model_path: str) -> None:
    """The command describe."""
    click.echo(str(describe(load(model_path))))


def demo(seed: int) -> None:
    """The command demo."""
    corpus = corpora.recipes()
    X = [corpus.template.expand(rows) for rows in corpus.X_train]
    X_test = [corpus.template.expand(rows) for rows in corpus.X_test]
    sizes = f"{len(X)} lines to learn from, {len(X_test)} to test on"
    click.echo(f"Recipe ingredients: {sizes}; labels for quantity, unit, name, preparation, comment.\n")
    estimator = StructuredGPClassifier(features="columns", random_state=seed)
    fit_with_progress(estimator, X, corpus.y_train)
    say_fit(estimator, len(X), sum(map(len, corpus.y_train)))
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
        StructuredGPClassifier, model_path, vectors_path, device, documents, snap
    )
    found = list(shared.sequences(reader, [data_path], encoding))
    every: list[Any] = [s.labels for s in found if s.labels is not None]
    whole = len(every) == len(found) and not any(None in shared.flat(labels) for labels in every)
    labels = every if whole else None
    text = Text(os.path.basename(data_path), [s.words for s in found], [s.line for s in found], labels)
    model, templates = os.path.basename(model_path), reader.template_lines
    with shared.in_files([(s.name, s.line) for s in found] if reader.names_examples else []):
        X = [s.tokens for s in found]
        findings = examine(estimator, X, text, model_name=model, templates=templates)
    # Some encodings hold halves of characters, which UTF-8 does not.
    content = render(findings).encode("utf-8", "replace")
    with atomic_write(output, "wb") as file:
        file.write(content)
    click.echo(f"wrote {output}", err=True)
