"""Fits with a progress display, and the summary that is printed afterwards."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

import click
from tqdm import tqdm

from structgp.api.describe import held_out_lines
from structgp.api.estimator import StructuredGPClassifier
from structgp.inference import StepInfo
from structgp.inference.distributed import ALONE, Processes


def fit_with_progress(
    estimator: StructuredGPClassifier,
    X: Any,
    y: Sequence[Sequence[str | None]] | None,
    *,
    together: Processes = ALONE,
    **options: Any,
) -> None:
    """Fits with a progress bar on a terminal, and with plain lines elsewhere. Ctrl-C stops the fit after
    the current step. With several processes, only the first one prints."""
    interrupted = False

    def stop(*_: Any) -> None:
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        click.echo("\nstopping after this step; press Ctrl-C again to abort", err=True)

    quiet = not together.is_first
    bar = tqdm(unit=" steps", disable=quiet or not sys.stderr.isatty(), leave=False)

    def show(info: StepInfo) -> bool:
        bar.update()
        bar.set_postfix_str(f"bound {info.elbo:.1f}")
        # Not one line for each of hundreds of stochastic steps.
        told = not quiet and bar.disable
        if told and (info.iteration < 10 or info.iteration % 50 == 0 or info.finished):
            click.echo(f"step {info.iteration + 1}: bound {info.elbo:.1f}", err=True)
        return interrupted

    class Told(logging.Handler):
        """Shows the progress of cross-validation."""

        def emit(self, record: logging.LogRecord) -> None:
            if bar.disable:
                click.echo(record.getMessage(), err=True)
            else:
                bar.set_postfix_str(record.getMessage())

    previous = signal.signal(signal.SIGINT, stop)
    logger, told = logging.getLogger("structgp.held_out"), Told()
    if not quiet:
        logger.addHandler(told)
        logger.setLevel(logging.INFO)
    try:
        estimator.fit(X, y, callback=show, together=together, **options)
    finally:
        signal.signal(signal.SIGINT, previous)
        logger.removeHandler(told)
        logger.setLevel(logging.NOTSET)
        bar.close()


def say_fit(estimator: StructuredGPClassifier, n_sequences: int, n_tokens: int) -> None:
    log, found = estimator.training_log_, estimator.held_out_
    of = f"{log['n_inducing']} inducing inputs leave {log['inducing_residual']:.1%} of the variance"
    if log["posterior"] == "weights":
        of = f"{log['n_inducing']} weights"
    took = f"{log['seconds']:.1f} s"
    if found is not None:
        took += f" ({log['seconds'] + found['seconds']:.1f} s with cross-validation)"
    click.echo(
        f"{n_sequences} sequences, {n_tokens} tokens, {len(estimator.classes_)} labels; {of}; "
        f"{log['optimizer']} ({log['reason']}): {log['stopped']} after {len(log['steps'])} steps, "
        f"{took}; {log['effective_parameters']:.0f} effective parameters",
        err=True,
    )
    if found is not None:
        told, weight = " ".join(held_out_lines(found)), log["plan"]["data_weight"]["value"]
        often = "once" if weight == 1 else f"{weight:g} times"
        click.echo(f"each sequence counts {often}, chosen by cross-validation: {told}", err=True)
