"""The command: train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from structgp.api.estimator import StructuredGPClassifier
from structgp.cli.flags import combined, device_option, encoding_option, feature_options
from structgp.cli.inputs import shards_of, training_reader
from structgp.cli.shared import (
    all_labels,
    check_two_labels,
    check_writable,
    fit_with_progress,
    print_reports,
    say_fit,
    score,
)
from structgp.data.sources import Reader
from structgp.errors import InputError
from structgp.inference.distributed import Processes, joined, n_started
from structgp.plan.optimizers import INFERENCE
from structgp.plan.options import Inducing, Prior, device_of
from structgp.plan.resolve import check_alone
from structgp.structures import chain, piecewise

STRUCTURES = {"chain": chain, "piecewise": piecewise}

_label_options = combined(
    click.option(
        "--scheme", metavar="NAME", help="Tagging scheme that all labellings follow: BIO or IOBES."
    ),
    click.option(
        "--forbid",
        nargs=2,
        multiple=True,
        metavar="LABEL NEXT",
        help="NEXT never follows LABEL; ^ is the start of a sequence, $ its end. May be repeated.",
    ),
    click.option("--missing", metavar="TEXT", help="Text in the label column of a token without a label."),
    click.option(
        "--class-weight",
        multiple=True,
        metavar="LABEL=FACTOR",
        help="Predict as if LABEL were FACTOR times as frequent; or 'balanced'. May be repeated.",
    ),
)


@click.command()
@click.argument("paths", metavar="[TEMPLATE] TRAIN", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Model file to write.")
@click.option("--dev", "dev_path", type=click.Path(), help="Labelled file to score after the fit.")
@click.option(
    "--early-stopping", is_flag=True, help="Stop when the likelihood of the --dev file is highest."
)
@feature_options
@_label_options
@click.option(
    "--inducing",
    type=int,
    help="Use at most this many inducing inputs instead of one weight per feature.  [default: weights; if "
    "the kernel or the optimiser does not support them, 1000 or the preset's number]",
)
@click.option(
    "--kernel",
    type=click.Choice(["auto", "relevance", "template", "template-product"]),
    default="auto",
    show_default=True,
    help="How templates count: one relevance per feature, or one scale per template, summed or multiplied.",
)
@click.option(
    "--inference",
    type=click.Choice(INFERENCE),
    default="auto",
    show_default=True,
    help="Optimiser of the evidence bound.",
)
@click.option(
    "--structure",
    type=click.Choice(list(STRUCTURES)),
    default="chain",
    show_default=True,
    help="Structured softmax, or its piecewise pseudo-likelihood.",
)
@device_option
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal models.")
@click.option(
    "--shards",
    "shards_folder",
    type=click.Path(),
    metavar="FOLDER",
    help="Encode TRAIN into files in FOLDER and fit from there, batch by batch: memory does not grow with "
    "TRAIN. Complete files in FOLDER are used again.",
)
@click.option("--restart", is_flag=True, help="Ignore the checkpoint of a killed run.")
@encoding_option
def train(
    paths: Sequence[str],
    output: str,
    dev_path: str | None,
    early_stopping: bool,
    inducing: int | None,
    kernel: str,
    inference: str,
    structure: str,
    device: str,
    seed: int,
    shards_folder: str | None,
    restart: bool,
    encoding: str,
    scheme: str | None,
    forbid: Sequence[tuple[str, str]],
    missing: str | None,
    class_weight: Sequence[str],
    **features: Any,
) -> None:
    """Fit a model to the labelled file TRAIN, with features from TEMPLATE.

    Ctrl-C stops early and keeps the model so far. After a crash, the same command continues the fit:
    until it is finished, its state is in the file MODEL.checkpoint.

    Under torchrun, the processes share the sequences, and the first one writes."""
    check_writable(output)
    if early_stopping and not dev_path:
        raise InputError("--early-stopping", "needs a labelled file", "name one with --dev")
    if shards_folder is not None:
        check_alone(Processes(size=n_started()))
    reader, data = _training_data(paths, encoding, missing, shards_folder, features)
    dev = reader.read(dev_path, encoding=encoding) if dev_path else None
    y_dev = all_labels(dev, missing) if dev is not None else []
    estimator = StructuredGPClassifier(
        # With dense features beside them, the kernel named is that of the templates.
        kernel={"categorical": kernel} if reader.has_dense else kernel,
        posterior="auto" if inducing is None else Inducing(n_inducing=inducing),
        # Without a B line there are no transition scores.
        prior=Prior() if reader.has_transitions else Prior(transition_sd=0.0),
        inference=inference,
        structure=STRUCTURES[structure](reader.transition_columns, shared=False),
        features="columns",
        random_state=seed,
        constraints=_constraints(scheme, forbid),
        class_weight=_class_weight(class_weight),
        device=device,
    )
    checkpoint = Path(f"{output}.checkpoint")
    if restart:
        checkpoint.unlink(missing_ok=True)
    watched: dict[str, Any] = {}
    if dev is not None and early_stopping:
        watched = {"X_dev": dev.X, "y_dev": y_dev, "early_stopping": True}
    if not _fit(estimator, data, checkpoint, **watched):
        return
    estimator.save(output, reader.to_json())
    checkpoint.unlink(missing_ok=True)
    say_fit(estimator, data.n_sequences, data.n_tokens)
    click.echo(f"wrote {output}", err=True)
    if dev is not None:
        print_reports({"structgp": score(estimator, dev.X, y_dev, dev.name)})


def _fit(estimator: StructuredGPClassifier, data: _Data, checkpoint: Path, **watched: Any) -> bool:
    """Fits with all processes that there are; whether this is the one that writes."""
    try:
        with joined(device_of(estimator.device)) as together:
            fit_with_progress(
                estimator, data.X, data.y, checkpoint=checkpoint, together=together, **watched
            )
    except InputError as error:
        if error.place == str(checkpoint):
            raise InputError(error.place, error.problem, "use --restart to start again") from error
        raise
    return together.is_first


class _Data(NamedTuple):
    """What is passed to ``fit``; y is None if X is shards."""

    X: Any
    y: list[list[str | None]] | None
    n_sequences: int
    n_tokens: int


def _training_data(
    paths: Sequence[str],
    encoding: str,
    missing: str | None,
    shards_folder: str | None,
    features: dict[str, Any],
) -> tuple[Reader, _Data]:
    reader, file = training_reader(paths, encoding, missing, shards_folder is None, features)
    if shards_folder is not None:
        found = shards_of(reader.stream(file, encoding), shards_folder)
        return reader, _Data(found, None, found.about["n_given"], found.n_tokens)
    data = reader.read(file, encoding=encoding)
    check_two_labels(data.y, data.name)
    return reader, _Data(data.X, data.y, len(data.X), sum(map(len, data.y)))


def _constraints(scheme: str | None, forbid: Sequence[tuple[str, str]]) -> str | dict[str, Any] | None:
    if scheme and forbid:
        raise InputError("--forbid", "cannot be combined with --scheme", "use one of them")
    if not forbid:
        return scheme
    return {"forbidden": [(None if a == "^" else a, None if b == "$" else b) for a, b in forbid]}


def _class_weight(given: Sequence[str]) -> str | dict[str, float] | None:
    if not given:
        return None
    if list(given) == ["balanced"]:
        return "balanced"
    weights = {}
    for item in given:
        label, equals, factor = item.rpartition("=")
        try:
            weights[label] = float(factor)
        except ValueError:
            equals = ""
        if not equals or not label:
            raise InputError(
                "--class-weight", f"must be LABEL=FACTOR or balanced, got {item!r}", "correct it"
            )
    return weights
