"""The command evaluate, and scores of a model and of a linear CRF as a table."""

from __future__ import annotations

import json
from typing import Any

import click

from structgp.api.fitted import Fitted
from structgp.cli.group import show_warning
from structgp.cli.shared import all_labels, in_files, load_with_reader, places_of, warn_of_unseen
from structgp.data.sources import Labelled
from structgp.errors import InputError
from structgp.evaluation.crf import LinearCRF
from structgp.evaluation.metrics import Report, SpanCounts, evaluate


def evaluate_files(
    model_path: str,
    test_path: str,
    against: str | None,
    train_path: str | None,
    as_json: bool,
    vectors_path: str | None,
    documents: str | None,
    snap: bool,
    device: str,
    encoding: str,
) -> None:
    """The command evaluate."""
    estimator, reader = load_with_reader(
        Fitted, model_path, vectors_path, device, documents, snap, [test_path]
    )
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
        print_details(reports)


def score(estimator: Fitted, data: Labelled, y: list[Any]) -> dict[str, Report]:
    """Scores on a labelled file, with layers those of each layer too."""
    name = data.name
    with in_files(places_of(data)):
        reports = {"structgp": estimator.evaluate(data.X, y)}
    warn_of_unseen(estimator, y, f"{name}:", "they count as errors and are not part of the NLL")
    if reports["structgp"].sequence_nll == float("inf"):
        what = "some sequences have labels that the constraints forbid: their likelihood is 0"
        show_warning(f"{name}: {what}")
    reports |= reports["structgp"].layers
    return reports


def score_crf(X: list[Any], y: list[list[str]], X_test: list[Any], y_test: list[list[str]]) -> Report:
    crf = LinearCRF(n_jobs=-1).fit(X, y)
    marginals, log_probs = crf.predict_marginals(X_test), crf.sequence_log_probs(X_test, y_test)
    return evaluate(y_test, crf.predict(X_test), marginals, log_probs)


def print_reports(reports: dict[str, Report]) -> None:
    rows = (
        ("token error", "token_error", "{:.2%}"),
        ("span F1", "span_f1", "{:.2%}"),
        ("span precision", "span_precision", "{:.2%}"),
        ("span recall", "span_recall", "{:.2%}"),
        ("token NLL", "token_nll", "{:.4f}"),
        ("sequence NLL", "sequence_nll", "{:.3f}"),
        ("ECE (15 bins)", "ece", "{:.4f}"),
    )
    click.echo(f"{'':<16}" + "".join(f"{name:>14}" for name in reports))
    for title, key, form in rows:
        values = [getattr(report, key) for report in reports.values()]
        cells = ["-" if value is None else form.format(value) for value in values]
        click.echo(f"{title:<16}" + "".join(f"{cell:>14}" for cell in cells))
    first = next(iter(reports.values()))
    click.echo(f"({first.n_sequences} sequences, {first.n_tokens} tokens)")


def print_details(reports: dict[str, Report]) -> None:
    """Precision, recall, F1 and support of each type of span and of each label: of the model, or of each
    of its layers, and the F1 of what it is compared with."""
    first, *others = reports.items()
    told = first[1].layers or {first[0]: first[1]}
    rivals = {} if first[1].layers else dict(others)
    for name, report in told.items():
        layer = f" of {name}" if first[1].layers else ""
        if set(report.by_type) != set(report.by_label):  # else spans are single tokens
            _print_counts(f"span type{layer}", report.by_type, {n: r.by_type for n, r in rivals.items()})
        _print_counts(f"label{layer}", report.by_label, {n: r.by_label for n, r in rivals.items()})


def _print_counts(
    title: str, counts: dict[str, SpanCounts], others: dict[str, dict[str, SpanCounts]]
) -> None:
    width = max(16, *(len(name) + 2 for name in [title, *counts]))
    head = [*("precision", "recall", "F1"), *(f"{name} F1" for name in others), "support"]
    click.echo(f"\n{title:<{width}}" + "".join(f"{name:>{max(11, len(name) + 2)}}" for name in head))
    for name, of in counts.items():
        values = [of.precision, of.recall, of.f1]
        values += [other[name].f1 if name in other else 0.0 for other in others.values()]
        cells = [*(f"{value:.2%}" for value in values), str(of.n_true)]
        widths = [max(11, len(column) + 2) for column in head]
        shown = "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        click.echo(f"{name or '(no type)':<{width}}{shown}")
