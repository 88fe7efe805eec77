"""The command evaluate: scores of a model, and for comparison of a linear CRF."""

from __future__ import annotations

import json
from typing import Any

import click

from structgp.api.fitted import Fitted
from structgp.cli.group import show_warning
from structgp.cli.shared import all_labels, in_files, load_with_reader, places_of, warn_of_unseen
from structgp.data.sources import Labelled, Reader
from structgp.errors import InputError
from structgp.evaluation.crf import LinearCRF
from structgp.evaluation.metrics import Report, evaluate
from structgp.evaluation.score_table import table


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
    reports = score(estimator, reader, test, y_test)
    if against and train_path:
        data = reader.read(train_path, encoding=encoding)
        y = all_labels(data, reader.missing)
        reports["linear CRF"] = score_crf(data.X, y, test.X, y_test)
    if as_json:
        click.echo(json.dumps({name: r.as_dict() for name, r in reports.items()}, indent=2))
    else:
        click.echo(table(reports))


def score(estimator: Fitted, reader: Reader, data: Labelled, y: list[Any]) -> dict[str, Report]:
    """Scores on a labelled file; with layers, also the scores of each layer."""
    name = data.name
    with in_files(places_of(data), reader.has_token_lines):
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
