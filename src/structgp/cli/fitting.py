"""The command train."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from structgp.api.estimator import StructuredGPClassifier
from structgp.cli import shared
from structgp.cli.flags import FEATURES, choice, device_option, encoding_option, feature_options
from structgp.cli.structure_files import check_format, declared_in, features_named, read_json, structure_of
from structgp.data import shards, sources
from structgp.errors import InputError
from structgp.inference.distributed import Processes, joined, n_started
from structgp.plan.options import INFERENCE, Inducing, Parameters, Prior, device_of
from structgp.plan.resolve import check_alone
from structgp.structures import Spec

KERNELS = ("relevance", "template", "template-product")


@click.command()
@click.argument("paths", metavar="[TEMPLATE] TRAIN", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Model file to write.")
@click.option("--dev", "dev_path", type=click.Path(), help="Labelled file to score after the fit.")
@click.option("--early-stopping", is_flag=True, help="Stop when the likelihood of --dev is highest.")
@feature_options
@click.option(
    "--constraints",
    "--scheme",
    metavar="NAME",
    help="Tagging scheme that every labelling obeys: BIO, IOBES, BILOU, IO or none; auto adopts the one "
    "that all of TRAIN obeys; or a file NAME.json with rules on any template, such as "
    """{"forbidden": {"parent": [["A", "B"]]}}.  [default: auto]""",
)
@click.option(
    "--forbid",
    nargs=2,
    multiple=True,
    metavar="LABEL NEXT",
    help="NEXT never follows LABEL; ^ is the start of a sequence, $ its end. May be repeated.",
)
@click.option("--missing", metavar="TEXT", help="Text in the label column of a token without a label.")
@click.option(
    "--class-weight",
    multiple=True,
    metavar="LABEL=FACTOR",
    help="Predict as if LABEL were FACTOR times as frequent; or 'balanced'. May be repeated.",
)
@click.option(
    "--inducing",
    type=int,
    help="Use at most this many inducing inputs instead of one weight per feature.  [default: weights; if "
    "the kernel or the optimiser does not support them, 1000 or the preset's number]",
)
@choice(
    "--kernel",
    ["auto", *KERNELS],
    "How templates count: one relevance per feature, or one scale per template, summed or multiplied.",
)
@click.option(
    "--data-weight",
    default="auto",
    show_default=True,
    metavar="NUMBER",
    help="How often every sequence counts against the prior; auto chooses by cross-validation in TRAIN.",
)
@choice("--inference", INFERENCE, "Optimiser of the evidence bound.")
@click.option(
    "--structure",
    default="chain",
    show_default=True,
    metavar="NAME",
    help="chain; piecewise, its pseudo-likelihood; or a file NAME.json that declares a structure in words, "
    'such as {"chain": {"order": 2}, "same": {"key": "word"}}, {"grid": {"neighbours": 8, "features": '
    '"both ends"}}, {"tree": {}}, {"edges": [{"name": "cites", "symmetric": true}]}, {"layers": {"pos": '
    '{"chain": {}}, "chunk": {"chain": {}}}} or {"segments": {"max_length": 8}}; with "program" and '
    '"most_entries" for how labellings are summed over. Features of columns go by the number or name of '
    "a line of TEMPLATE.",
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
    shards_folder: str | None,
    restart: bool,
    encoding: str,
    missing: str | None,
    **given: Any,
) -> None:
    """Fit a model to the labelled file TRAIN, with features from TEMPLATE.

    With --format jsonl, TRAIN has one example per line: {"tokens": [{"word": "two"}, ...], "labels":
    ["QTY", ...]}, with "parents" for a tree, "edges" and "features" for a graph, "pixels" in rows in the
    place of tokens for a grid, "labels" by layer for layers.

    Ctrl-C stops early and keeps the model so far. After a crash, the same command continues the fit:
    until it is finished, its state is in the file MODEL.checkpoint.

    Under torchrun, the processes share the sequences, and the first one writes."""
    shared.check_writable(output)
    if early_stopping and not dev_path:
        raise InputError("--early-stopping", "needs a labelled file", "name one with --dev")
    if shards_folder is not None:
        check_alone(Processes(size=n_started()))
    features = {name: given.pop(name) for name in FEATURES}
    spec = declared_in(given["structure"])
    check_format(spec, features["format"], shards_folder)
    features |= _of_structure(spec, features["format"])
    reader, X, y, counts, places = _training_data(paths, encoding, missing, shards_folder, features)
    dev = reader.read(dev_path, encoding=encoding) if dev_path else None
    y_dev = shared.all_labels(dev, missing) if dev is not None else []
    estimator = _classifier(reader, spec, **given)
    checkpoint = Path(f"{output}.checkpoint")
    if restart:
        checkpoint.unlink(missing_ok=True)
    watched = {"X_dev": dev.X, "y_dev": y_dev, "early_stopping": True} if dev and early_stopping else {}
    try:
        with joined(device_of(given["device"])) as together, shared.in_files(places):
            shared.fit_with_progress(estimator, X, y, checkpoint=checkpoint, together=together, **watched)
    except InputError as error:
        if error.place == str(checkpoint):
            raise InputError(error.place, error.problem, "use --restart to start again") from error
        raise
    if not together.is_first:
        return
    estimator.save(output, reader.to_json())
    checkpoint.unlink(missing_ok=True)
    shared.say_fit(estimator, *counts)
    if reader.vectors is not None:
        click.echo(f"{reader.vectors.vectors.name}: {reader.vectors.coverage}", err=True)
    click.echo(f"wrote {output}", err=True)
    if dev is not None:
        shared.print_reports(shared.score(estimator, dev, y_dev))


def _of_structure(spec: Spec | None, format: str) -> dict[str, Any]:
    """What the reader of a format has to know of the structure."""
    if format == "jsonl":
        return {"form": "sequence" if spec is None else spec.form}
    return {"keys": features_named(spec)} if format == "crfsuite" and spec is not None else {}


def _classifier(
    reader: sources.Reader,
    spec: Spec | None,
    *,
    kernel: str,
    inducing: int | None,
    structure: str,
    seed: int,
    constraints: str | None,
    forbid: Sequence[tuple[str, str]],
    class_weight: Sequence[str],
    data_weight: str,
    **same: Any,
) -> StructuredGPClassifier:
    """The classifier that the options ask for; same : those that it has under the same name."""
    if constraints and forbid:
        raise InputError("--forbid", "cannot be combined with --constraints", "use one of them")
    weight: float | str = data_weight
    with suppress(ValueError):
        weight = float(data_weight)
    forbidden = [(None if a == "^" else a, None if b == "$" else b) for a, b in forbid]
    return StructuredGPClassifier(
        # With dense features beside them, the kernel named is that of the templates.
        kernel={"categorical": kernel} if reader.has_dense and kernel in KERNELS else kernel,
        posterior="auto" if inducing is None else Inducing(n_inducing=inducing),
        # Without a B line there are no transition scores, unless a file declares them.
        prior=Prior(
            transition_sd=Prior.transition_sd if reader.has_transitions or spec is not None else 0.0,
            data_weight=weight,
        ),
        structure=structure_of(structure, spec, reader),
        features=Parameters.features if reader.format == "jsonl" else "columns",
        random_state=seed,
        constraints={"forbidden": forbidden} if forbid else _scheme(constraints),
        class_weight=_class_weight(class_weight),
        **same,
    )


def _scheme(name: str | None) -> Any:
    """``constraints`` of the classifier."""
    default = str(Parameters.constraints)
    if name is None or name.lower() == default:
        return default
    if name.endswith(".json"):
        return read_json(name)
    return None if name.lower() == "none" else name


def _training_data(
    paths: Sequence[str], encoding: str, missing: str | None, folder: str | None, features: dict[str, Any]
) -> tuple[sources.Reader, Any, list[Any] | None, tuple[int, int], list[tuple[str, int]]]:
    """The reader that the arguments ask for, X and y as ``fit`` takes them, the numbers of sequences and
    tokens, and the places of JSON lines. A file is read once, since it may be a pipe, and with shards never
    held whole."""
    format_name, given = features["format"], f"{len(paths)} file{'s' if len(paths) > 1 else ''}"
    if format_name != "columns" and len(paths) != 1:
        name, what = {"crfsuite": ("CRFsuite's format", "attributes")}.get(
            format_name, ("JSON lines", "keys")
        )
        problem = f"{given}, but {name} {'need' if format_name == 'jsonl' else 'needs'} only TRAIN"
        raise InputError("train", problem, f"leave TEMPLATE out: {what} are already features")
    if format_name == "columns" and len(paths) != 2:
        problem = f"{given}, but TEMPLATE and TRAIN are needed"
        remedy = "give both, or --format crfsuite for a file of attributes, jsonl for JSON lines"
        raise InputError("train", problem, remedy)
    hold, train, template = folder is None, paths[-1], None
    for option in ("numeric", "vectors"):
        if features[option] and not hold:
            raise InputError(f"--{option}", "shards cannot hold dense features", "leave out --shards")
    file: Any = train
    if format_name == "columns":
        dialect = features["dialect"] or "crf++"
        template = sources.Template.read(paths[0], encoding=encoding, dialect=dialect)
        file = sources.read_columns(train, encoding=encoding) if hold else train
        if template.bigrams and not hold:
            problem = "shards cannot hold features of transitions"
            remedy = "leave out --shards, or write a plain B line"
            raise InputError(f"{template.name}:{template.bigrams[0].line}", problem, remedy)
    reader = sources.learn(file, template=template, missing=missing, encoding=encoding, **features)
    if folder is not None:
        found = _shards_of(reader.stream(train, encoding), folder)
        return reader, found, None, (found.about["n_given"], found.n_tokens), []
    data = reader.read(file, encoding=encoding)
    shared.check_two_labels(data.y, data.name)
    places = shared.places_of(data) if format_name == "jsonl" else []
    return reader, data.X, data.y, (len(data.X), shared.n_tokens(data.y)), places


def _shards_of(stream: sources.Stream, folder: str) -> shards.Shards:
    """The shards of a file: those in the folder if they belong to this file, else new ones."""
    digest = stream.digest
    if (Path(folder) / "manifest.json").exists():
        found = shards.read(folder)
        if found.about["source"] != digest:
            problem = f"holds shards of other data than {stream.path}"
            raise InputError(folder, problem, "name another folder, or remove this one")
        click.echo(f"{folder}: already written", err=True)
        return found
    click.echo(f"encoding {stream.path} into {folder}", err=True)
    return shards.write(stream, folder, features="columns", source=digest, name=stream.path)


def _class_weight(given: Sequence[str]) -> str | dict[str, float] | None:
    if not given or list(given) == ["balanced"]:
        return "balanced" if given else None
    weights = {}
    for item in given:
        label, equals, factor = item.rpartition("=")
        try:
            weights[label] = float(factor)
        except ValueError:
            equals = ""
        if not equals or not label:
            problem = f"must be LABEL=FACTOR or balanced, got {item!r}"
            raise InputError("--class-weight", problem, "correct it")
    return weights
