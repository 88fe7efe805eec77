"""The commands expect and calibrate: expected scores on unlabelled text, and sets with a guarantee."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from structgp.api.fitted import Fitted
from structgp.cli.document_tagging import with_first_checked
from structgp.cli.shared import (
    all_labels,
    flat,
    in_files,
    load_with_reader,
    places_of,
    sequences,
    warn_of_unseen,
)
from structgp.errors import InputError

ROWS = (
    ("token error", "error"),
    ("span F1", "f1"),
    ("span precision", "precision"),
    ("span recall", "recall"),
)


def expect(
    model_path: str,
    files: Sequence[str],
    level: float,
    as_json: bool,
    vectors_path: str | None,
    documents: str | None,
    snap: bool,
    device: str,
    encoding: str,
) -> None:
    """The command expect."""
    estimator, reader = load_with_reader(Fitted, model_path, vectors_path, device, documents, snap, files)
    found = sequences(reader, files, encoding)
    read = list(with_first_checked(found, reader, estimator.classes_.tolist()))
    with in_files([(s.name, s.line) for s in read], reader.has_token_lines):
        scores = estimator.expected_scores([s.tokens for s in read], level)
    if as_json:
        click.echo(json.dumps(scores.as_dict(), indent=2))
        return
    click.echo(f"{'':<16}{'expected':>10}   {level:.0%} interval")
    spec = estimator.model_.spec
    # Only sequences with one label per token have spans.
    for title, name in ROWS if spec.form == "sequence" and not spec.layers else ROWS[:1]:
        at = getattr(scores, name)
        click.echo(f"{title:<16}{at.mean:>10.2%}   {at.low:.2%} to {at.high:.2%}")
    click.echo(f"({scores.n_sequences} sequences, {scores.n_tokens} tokens)")


def calibrate(
    model_path: str,
    data_path: str,
    output: str | None,
    encoding: str,
    vectors_path: str | None,
    documents: str | None,
    snap: bool,
    device: str,
) -> None:
    """The command calibrate."""
    from structgp.api.estimator import StructuredGPClassifier  # to save it; brings scikit-learn

    output = model_path if output is None else output
    estimator, reader = load_with_reader(
        StructuredGPClassifier, model_path, vectors_path, device, documents, snap, [data_path]
    )
    data = reader.read(data_path, encoding=encoding)
    y = all_labels(data, reader.missing)
    if not any(map(flat, y)):
        raise InputError(data.name, "no tokens", "give a file with at least one")
    warn_of_unseen(estimator, y, f"{data.name}:", "no set holds those")
    with in_files(places_of(data), reader.has_token_lines):
        estimator.calibrate(data.X, y)
    estimator.device = "cpu"
    estimator.save(output)
    sequence = "sequence" if len(y) == 1 else "sequences"
    click.echo(f"calibrated on {len(y)} {sequence}; wrote {output}", err=True)
