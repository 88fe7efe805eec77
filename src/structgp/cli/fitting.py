"""The command: train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from structgp.api.estimator import StructuredGPClassifier
from structgp.cli.inputs import Input, learn
from structgp.cli.options import device_option, encoding_option, feature_options
from structgp.cli.shared import (
    check_labelled,
    check_two_labels,
    check_writable,
    fit_with_progress,
    print_reports,
    say_fit,
    score,
)
from structgp.cli.streams import open_stream, shards_of
from structgp.errors import InputError
from structgp.inference.distributed import Together, joined, n_started
from structgp.plan.optimizers import INFERENCE
from structgp.plan.options import Inducing, Prior, device_of
from structgp.plan.resolve import check_alone


def _label_options(command: Any) -> Any:
    """The options that say what is known of the labels."""
    for option in reversed(
        (
            click.option(
                "--scheme",
                metavar="NAME",
                help="Tagging scheme that every labelling keeps to: BIO or IOBES.",
            ),
            click.option(
                "--forbid",
                nargs=2,
                multiple=True,
                metavar="LABEL NEXT",
                help="A label that never follows another; ^ is the beginning of a sequence, $ its end. "
                "May be given several times.",
            ),
            click.option(
                "--missing",
                metavar="TEXT",
                help="What stands in the label column of a token without a label.",
            ),
            click.option(
                "--class-weight",
                multiple=True,
                metavar="LABEL=FACTOR",
                help="Label as if it were so many times as frequent; or 'balanced'. May be given several "
                "times.",
            ),
        )
    ):
        command = option(command)
    return command


@click.command()
@click.argument("paths", metavar="[TEMPLATE] TRAIN", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Model file to write.")
@click.option("--dev", "dev_path", type=click.Path(), help="Labelled file to score afterwards.")
@click.option(
    "--early-stopping", is_flag=True, help="Stop where the likelihood of the --dev file is highest."
)
@feature_options
@_label_options
@click.option(
    "--inducing",
    type=int,
    help="Most inducing inputs, instead of one weight per feature.  [default: weights; where the "
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
    "--structure",
    type=click.Choice(["chain", "piecewise"]),
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
    "TRAIN. Files that are there already are used again.",
)
@click.option("--restart", is_flag=True, help="Do not go on from a checkpoint of a killed run.")
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

    Ctrl-C stops early and keeps what has been reached. A run that was killed goes on where it was when
    the same command is given again: until it is done, its state is in the file MODEL.checkpoint.

    Under torchrun, processes share the sequences, and the first one writes.
    """
    check_writable(output)
    if early_stopping and not dev_path:
        raise InputError("--early-stopping", "no labelled file to stop by", "name one with --dev")
    if shards_folder is not None:
        check_alone(Together(size=n_started()))
    source, data = _training_data(paths, encoding, missing, shards_folder, features)
    dev = source.read(dev_path, encoding) if dev_path else None
    if dev is not None:
        check_labelled(dev.y, dev.name, missing)
    estimator = StructuredGPClassifier(
        kernel=source.kernel(kernel),
        posterior="auto" if inducing is None else Inducing(n_inducing=inducing),
        # Without a B line there are no transition scores.
        prior=Prior() if source.has_pairs else Prior(transition_sd=0.0),
        inference=inference,
        structure=structure,
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
        watched = {"X_dev": dev.X, "y_dev": dev.y, "early_stopping": True}
    try:
        with joined(device_of(device)) as together:
            fit_with_progress(
                estimator, data.X, data.y, checkpoint=checkpoint, together=together, **watched
            )
    except InputError as error:
        if error.place == str(checkpoint):
            raise InputError(error.place, error.problem, "use --restart to begin anew") from error
        raise
    if not together.is_first:
        return
    estimator.save(output, source.to_extra() | {"missing": missing})
    checkpoint.unlink(missing_ok=True)
    say_fit(estimator, data.n_sequences, data.n_tokens)
    click.echo(f"wrote {output}", err=True)
    if dev is not None:
        print_reports({"structgp": score(estimator, dev.X, dev.y, dev.name)})


@dataclass(frozen=True)
class _Data:
    """What is passed to ``fit``; y is None where X are shards."""

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
) -> tuple[Input, _Data]:
    if shards_folder is not None:
        stream = open_stream(paths, encoding, missing, **features)
        found = shards_of(stream, shards_folder)
        return stream.source, _Data(found, None, found.about["n_given"], found.n_tokens)
    source, data = learn(paths, encoding, **features)
    y = [[None if label == missing else label for label in labels] for labels in data.y]
    check_two_labels(y, data.name)
    return source, _Data(data.X, y, len(data.X), sum(map(len, y)))


def _constraints(
    scheme: str | None, forbid: Sequence[tuple[str, str]]
) -> str | dict[str, Any] | None:
    if scheme and forbid:
        raise InputError("--forbid", "given beside --scheme", "use one of them")
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
                "--class-weight", f"cannot read {item!r}", "write LABEL=FACTOR, or balanced"
            )
    return weights
