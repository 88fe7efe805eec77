"""The command demo, which shows on one screen what the package is for."""

from __future__ import annotations

import click

from structgp.api.estimator import StructuredGPClassifier
from structgp.cli.progress import fit_with_progress
from structgp.cli.scoring import score_crf
from structgp.data import corpora
from structgp.data.atomic import atomic_write
from structgp.data.span_labels import labels_to_spans
from structgp.errors import InputError
from structgp.evaluation.metrics import Report
from structgp.report import Findings, Text, examine, render

DOUBT = 0.3
"""Labels whose probability of being wrong is higher than this are worth checking."""

SCORES = (
    ("token error", "token_error", "{:.1%}", "lower is better"),
    ("span F1", "span_f1", "{:.1%}", "higher is better"),
    ("NLL per token", "token_nll", "{:.3f}", "lower: true labels get more probability"),
    ("calibration error", "ece", "{:.3f}", "lower: 80% sure is right in 80 of 100 cases"),
)


def demo(line: str, output: str, seed: int) -> None:
    """The command demo."""
    corpus = corpora.recipes()
    X, X_test = ([corpus.template.expand(rows) for rows in of] for of in (corpus.X_train, corpus.X_test))
    click.echo(
        f"Recipe ingredients: {len(X)} labelled lines to learn from, {len(X_test)} others to test on.\n"
        "Labels are quantity (QTY), unit, name, preparation (PREP) and comment. Nothing has to be tuned.\n"
    )
    click.echo("learning; the first run also waits for loops to be compiled ...", err=True)
    tagger = StructuredGPClassifier(features="columns", random_state=seed)
    fit_with_progress(tagger, X, corpus.y_train)
    _say_line(tagger, line, corpus)
    reports = {}
    try:
        click.echo("training a linear CRF, its regulariser cross-validated ...", err=True)
        reports["linear CRF"] = score_crf(X, corpus.y_train, X_test, corpus.y_test)
    except InputError as error:
        click.echo(f"structgp: warning: no linear CRF to compare with: {error}", err=True)
    words = [[row[0] for row in rows] for rows in corpus.X_test]
    text = Text("recipes/test.conll", words, list(range(1, len(words) + 1)), corpus.y_test)
    lines = {str(i): template.source for i, template in enumerate(corpus.template.unigrams)}
    found = examine(tagger, X_test, text, model_name="structgp demo", templates=lines)
    _say_scores(found, reports)
    _say_doubts(found)
    with atomic_write(output, "wb") as file:
        file.write(render(found).encode())
    click.echo(f"\nOpen {output} in a browser: the test lines shaded by doubt, and what was learned.")
    click.echo('Your own line: structgp demo "3 ripe figs, halved". Your own files: structgp train -h.')


def _say_scores(found: Findings, others: dict[str, Report]) -> None:
    """Prints the scores beside those of the CRF, and the scores that are expected without labels."""
    assert found.truth is not None
    assert found.expected is not None
    reports = {"structgp": found.truth.scores, **others}
    click.echo(f"\n{'on the test lines':<20}" + "".join(f"{name:>12}" for name in reports))
    for title, key, form, meaning in SCORES:
        cells = [form.format(getattr(report, key)) for report in reports.values()]
        click.echo(f"{title:<20}" + "".join(f"{cell:>12}" for cell in cells) + f"   {meaning}")
    click.echo("\nAnd where there are no labels? What it expects of the test lines before it sees theirs:")
    for title, guess in (("token error", found.expected.error), ("span F1", found.expected.f1)):
        interval = f"{guess.low:.1%} to {guess.high:.1%} with probability {found.expected.level:.0%}"
        click.echo(f"{title:<20}{guess.mean:>12.1%}   {interval}")


def _say_doubts(found: Findings) -> None:
    assert found.truth is not None
    tokens = [
        (label != y, p[label] < 1 - DOUBT)
        for true, labels, marginals in zip(
            found.truth.labels, found.predicted, found.marginals, strict=True
        )
        for y, label, p in zip(true, labels, marginals, strict=True)
    ]
    n_wrong, n_doubtful = (sum(column) for column in zip(*tokens, strict=True))
    click.echo(
        f"It is less than {1 - DOUBT:.0%} sure of {n_doubtful} of {len(tokens)} tokens; a person who "
        f"checks them finds {sum(map(all, tokens))} of {n_wrong} errors."
    )


def _say_line(tagger: StructuredGPClassifier, line: str, corpus: corpora.Recipes) -> None:
    """Prints the labels of a line and their alternatives, for each token and for the whole line."""
    tokens = corpora.tokenize(line)
    x = corpus.template.expand(corpora.columns(tokens))
    click.echo(f"A new line, with what else it may be: {line}")
    labels, marginals = tagger.predict_single(x), tagger.predict_marginals_single(x)
    for token, label, p in zip(tokens, labels, marginals, strict=True):
        others = sorted(set(p) - {label}, key=p.__getitem__, reverse=True)
        told = ", ".join(f"{other} {p[other]:.2f}" for other in others[:3] if p[other] >= 0.05)
        click.echo(f"  {token:<14}{label:<10}{p[label]:4.2f}" + (f"   or {told}" if told else ""))
    for readings, probability in tagger.predict_n_best([x], 3)[0]:
        parts = [f"{kind} {' '.join(tokens[a:b])}" for a, b, kind in labels_to_spans(readings)]
        click.echo(f"  whole line {probability:.2f}   {' | '.join(parts)}")
