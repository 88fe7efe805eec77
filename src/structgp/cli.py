"""The command line: the only room that prints and exits.

Errors of the input are one line on standard error and exit status 2.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import click
from tqdm import tqdm

from structgp._version import __version__
from structgp.baselines.crf import LinearCRF
from structgp.data import ingredients
from structgp.data.atomic import atomic_write
from structgp.data.columns import (
    ColumnFile,
    ColumnSequence,
    format_sequence,
    iter_columns,
    read_columns,
)
from structgp.data.corpora import recipes
from structgp.data.templates import Template
from structgp.errors import InputError, StructgpError, StructgpWarning
from structgp.estimator import StructuredGPClassifier, load
from structgp.metrics import Report, evaluate
from structgp.optimizers import StepInfo

_TAG_CHUNK = 200
_DEMO_LINES = (
    "2 1/2 cups self-raising flour, sifted",
    "1 (400 g) tin plum tomatoes, roughly chopped",
    "a good handful of fresh mint leaves (optional)",
)


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", StructgpWarning)
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except StructgpError as error:
            click.echo(f"structgp: error: {error}", err=True)
            ctx.exit(2)
        except BrokenPipeError:
            # The reader of our output went away; there is nobody left to tell.
            sys.stderr.close()
            ctx.exit(1)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"structgp: warning: {message}", err=True)


_ENCODING = click.option(
    "--encoding", default="utf-8", show_default=True, help="Encoding of every file read and written."
)
_MODEL = click.option(
    "-m", "--model", "model_path", required=True, type=click.Path(), help="Model file."
)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="structgp")
def main() -> None:
    """Label sequences, and know how sure the labels are.

    Files hold one token a line, columns separated by spaces or tabs, a blank line between sequences,
    and the label in the last column. Templates are CRF++'s.
    """


# -- train -------------------------------------------------------------------------------------


@main.command()
@click.argument("template_path", metavar="TEMPLATE", type=click.Path())
@click.argument("train_path", metavar="TRAIN", type=click.Path())
@click.option("-o", "--output", required=True, type=click.Path(), help="Model file to write.")
@click.option("--dev", "dev_path", type=click.Path(), help="Labelled file to score afterwards.")
@click.option("--inducing", default=1000, show_default=True, help="Most inducing inputs.")
@click.option(
    "--kernel",
    type=click.Choice(["template", "template-product"]),
    default="template",
    show_default=True,
    help="How agreement in the templates adds up: summed, or multiplied.",
)
@click.option(
    "--inference",
    type=click.Choice(["auto", "second-order", "adam"]),
    default="auto",
    show_default=True,
    help="Optimiser of the evidence bound.",
)
@click.option("--seed", default=0, show_default=True, help="Equal seeds give equal models.")
@_ENCODING
def train(
    template_path: str,
    train_path: str,
    output: str,
    dev_path: str | None,
    inducing: int,
    kernel: str,
    inference: str,
    seed: int,
    encoding: str,
) -> None:
    """Fit a model to the labelled file TRAIN, with features from TEMPLATE.

    Ctrl-C stops early and keeps what has been reached.
    """
    _check_writable(output)
    template = Template.read(template_path, encoding=encoding)
    data = _read_labelled(train_path, template, encoding)
    dev = _read_labelled(dev_path, template, encoding) if dev_path else None
    X, y = _features(template, data)
    _check_two_labels(y, data.name)
    estimator = StructuredGPClassifier(
        kernel=kernel,
        n_inducing=inducing,
        # Without a B line there are no label-to-label scores.
        pairwise_sd=1.0 if template.has_bigram else 0.0,
        inference=inference,
        features="columns",
        random_state=seed,
    )
    _fit(estimator, X, y)
    estimator.model_.extra |= {"template": template.text, "n_columns": data.n_columns - 1}
    estimator.save(output)
    _say_fit(estimator, len(X), sum(map(len, y)))
    click.echo(f"wrote {output}", err=True)
    if dev is not None:
        _print_reports({"structgp": _report(estimator, *_features(template, dev), dev.name)})


# -- tag ---------------------------------------------------------------------------------------


@main.command()
@_MODEL
@click.argument("files", nargs=-1, type=click.Path())
@click.option("-o", "--output", type=click.Path(), help="File to write instead of standard output.")
@click.option(
    "-v",
    "--verbose",
    "level",
    type=click.IntRange(0, 2),
    default=0,
    help="1: probability of the labelling and of each label; 2: of every label.",
)
@click.option(
    "--viterbi", is_flag=True, help="The best whole labelling instead of the best label each."
)
@_ENCODING
def tag(
    model_path: str,
    files: Sequence[str],
    output: str | None,
    level: int,
    viterbi: bool,
    encoding: str,
) -> None:
    """Label FILES, or standard input. Output is laid out as crf_test does: the columns, a tab, the
    label; with -v1 or -v2 probabilities after it."""
    estimator, template, n_columns = _load(model_path)
    estimator.decode = "viterbi" if viterbi else "marginal"
    sources: Sequence[Any] = files or [sys.stdin.buffer]

    def sequences() -> Iterator[tuple[ColumnSequence, str]]:
        for source in sources:
            name = source if isinstance(source, str) else "<stdin>"
            for sequence in iter_columns(source, encoding=encoding, name=name):
                _check_columns(sequence, n_columns, name)
                yield sequence, name

    with _output(output, encoding) as out:
        for chunk in _chunks(sequences(), _TAG_CHUNK):
            rows = [sequence.rows for sequence, _ in chunk]
            X = [template.expand(r) for r in rows]
            for lines in _tagged(estimator, rows, X, level):
                out.write(lines + "\n")
            out.flush()


def _tagged(
    estimator: StructuredGPClassifier, rows: Sequence[Any], X: list[Any], level: int
) -> Iterator[str]:
    """One block of lines a sequence, without the blank line after it."""
    labels = estimator.predict(X)
    if level == 0:
        for r, y in zip(rows, labels, strict=True):
            yield format_sequence([(*row, label) for row, label in zip(r, y, strict=True)])
        return
    marginals = estimator.predict_marginals(X)
    log_probs = estimator.model_.log_probs(X, labels, estimator.average)
    for r, y, p, log_prob in zip(rows, labels, marginals, log_probs, strict=True):
        cells = []
        for row, label, probabilities in zip(r, y, p, strict=True):
            every = probabilities.items() if level == 2 else ()
            extra = [f"{name}/{value:.6f}" for name, value in every]
            cells.append((*row, label, f"{label}/{probabilities[label]:.6f}", *extra))
        assert log_prob is not None, "a predicted label is a known one"
        yield f"# {math.exp(log_prob):.6f}\n{format_sequence(cells)}"


# -- evaluate ----------------------------------------------------------------------------------


@main.command("evaluate")
@_MODEL
@click.argument("test_path", metavar="TEST", type=click.Path())
@click.option(
    "--against",
    type=click.Choice(["crf"]),
    help="Also train a linear CRF, its regulariser cross-validated, on the same data.",
)
@click.option("--train", "train_path", type=click.Path(), help="Training file, for --against.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@_ENCODING
def evaluate_command(
    model_path: str,
    test_path: str,
    against: str | None,
    train_path: str | None,
    as_json: bool,
    encoding: str,
) -> None:
    """Score a model on the labelled file TEST."""
    if against and not train_path:
        raise InputError(
            "--against", "nothing to train the rival on", "add --train with the training file"
        )
    estimator, template, _ = _load(model_path)
    test = _read_labelled(test_path, template, encoding)
    X, y = _features(template, test)
    reports = {"structgp": _report(estimator, X, y, test.name)}
    if train_path:
        data = _read_labelled(train_path, template, encoding)
        reports["linear CRF"] = _crf_report(*_features(template, data), X, y)
    if as_json:
        click.echo(json.dumps({name: r.as_dict() for name, r in reports.items()}, indent=2))
    else:
        _print_reports(reports)


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
    _fit(estimator, X, corpus.y_train)
    _say_fit(estimator, len(X), sum(map(len, corpus.y_train)))
    reports = {"structgp": _report(estimator, X_test, corpus.y_test, "recipes/test.conll")}
    try:
        reports["linear CRF"] = _crf_report(X, corpus.y_train, X_test, corpus.y_test)
    except InputError as error:
        click.echo(f"structgp: warning: no linear CRF beside it: {error}", err=True)
    click.echo()
    _print_reports(reports)
    for line in _DEMO_LINES:
        tokens = ingredients.tokenize(line)
        x = corpus.template.expand(ingredients.columns(tokens))
        click.echo(f"\n{line}")
        labels, marginals = estimator.predict_single(x), estimator.predict_marginals_single(x)
        for token, label, p in zip(tokens, labels, marginals, strict=True):
            second = sorted(p, key=p.__getitem__)[-2]
            click.echo(f"  {token:<14}{label:<11}{p[label]:5.2f}   or {second} {p[second]:.2f}")


# -- shared ------------------------------------------------------------------------------------


def _read_labelled(path: str, template: Template, encoding: str) -> ColumnFile:
    data = read_columns(path, encoding=encoding)
    if data.n_columns < 2:
        raise InputError(
            f"{data.name}:{data.sequences[0].line}",
            "one column where tokens and labels are needed",
            "add the label as last column",
        )
    template.check_columns(data.n_columns - 1, data.name)
    return data


def _features(template: Template, data: ColumnFile) -> tuple[list[Any], list[list[str]]]:
    rows, labels = data.split_labels()
    return [template.expand(r) for r in rows], labels


def _check_two_labels(y: Sequence[Sequence[str]], name: str) -> None:
    found = {label for labels in y for label in labels}
    if len(found) < 2:
        raise InputError(
            name,
            f"every token has the same label, {found.pop()!r}",
            "check that the label is the last column, and give examples of a second label",
        )


def _check_columns(sequence: ColumnSequence, n_columns: int, name: str) -> None:
    width = len(sequence.rows[0])
    if width < n_columns:
        raise InputError(
            f"{name}:{sequence.line}",
            f"{width} columns where the model was trained on {n_columns} and a label",
            "give it the same columns as the training file; the label may be left out",
        )


def _check_writable(path: str) -> None:
    """Before minutes of work, not after: the folder is there and takes a file."""
    with atomic_write(Path(path).with_name(Path(path).name + ".probe"), "wb"):
        pass
    Path(path).with_name(Path(path).name + ".probe").unlink()


def _load(path: str) -> tuple[StructuredGPClassifier, Template, int]:
    estimator = load(path)
    extra = estimator.model_.extra
    if "template" not in extra:
        raise InputError(
            path,
            "a model without a feature template, saved from Python",
            "use it from Python, or train one with 'structgp train'",
        )
    return estimator, Template.parse(extra["template"], f"{path} (template)"), extra["n_columns"]


def _fit(estimator: StructuredGPClassifier, X: list[Any], y: Sequence[Sequence[str]]) -> None:
    """Fits with a progress bar on a terminal, plain lines elsewhere; Ctrl-C stops after the step."""
    interrupted = False

    def stop(*_: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        click.echo("\nstopping after this step; Ctrl-C again gives up", err=True)

    bar = tqdm(unit=" steps", disable=not sys.stderr.isatty(), leave=False)

    def show(info: StepInfo) -> bool:
        bar.update()
        bar.set_postfix_str(f"bound {info.elbo:.1f}")
        # Hundreds of stochastic steps are not worth a line each.
        if bar.disable and (info.iteration < 10 or info.iteration % 50 == 0 or info.finished):
            click.echo(f"step {info.iteration + 1}: bound {info.elbo:.1f}", err=True)
        return interrupted

    previous = signal.signal(signal.SIGINT, stop)
    try:
        estimator.fit(X, y, callback=show)
    finally:
        signal.signal(signal.SIGINT, previous)
        bar.close()


def _say_fit(estimator: StructuredGPClassifier, n_sequences: int, n_tokens: int) -> None:
    log = estimator.training_log_
    click.echo(
        f"{n_sequences} sequences, {n_tokens} tokens, {len(estimator.classes_)} labels; "
        f"{log['n_inducing']} inducing inputs leave {log['inducing_residual']:.1%} of the variance; "
        f"{log['optimizer']} ({log['reason']}): {log['stopped']} after {len(log['steps'])} steps, "
        f"{log['seconds']:.1f} s; bound {log['elbo']:.1f} (fresh draws {log['fresh_elbo']:.1f})",
        err=True,
    )


def _report(
    estimator: StructuredGPClassifier, X: list[Any], y: list[list[str]], name: str
) -> Report:
    report = estimator.evaluate(X, y)
    if report.n_unseen_tokens:
        known = set(estimator.classes_)
        unseen = sorted({label for labels in y for label in labels} - known)
        click.echo(
            f"structgp: warning: {name}: {report.n_unseen_tokens} tokens have labels that training "
            f"never saw ({', '.join(unseen)}); they count as errors and are left out of the NLL",
            err=True,
        )
    return report


def _crf_report(
    X: list[Any], y: Sequence[Sequence[str]], X_test: list[Any], y_test: list[list[str]]
) -> Report:
    crf = LinearCRF(n_jobs=-1).fit(X, y)
    return evaluate(
        y_test,
        crf.predict(X_test),
        crf.predict_marginals(X_test),
        crf.sequence_log_probs(X_test, y_test),
    )


def _print_reports(reports: dict[str, Report]) -> None:
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


@contextmanager
def _output(path: str | None, encoding: str) -> Iterator[TextIO]:
    if path is None:
        stream = click.get_text_stream("stdout", encoding=encoding)
        yield stream
        stream.flush()
        return
    with atomic_write(path, "w", encoding=encoding) as file:
        yield file


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


if __name__ == "__main__":
    main()
