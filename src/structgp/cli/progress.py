"""A fit with its progress, and what is said of it afterwards."""

from __future__ import annotations

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
    """Fit with a progress bar on a terminal, with plain lines elsewhere. Ctrl-C stops after the current
    step. Of several processes, only the first one prints."""
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

    previous = signal.signal(signal.SIGINT, stop)
    try:
        estimator.fit(X, y, callback=show, together=together, **options)
    finally:
        signal.signal(signal.SIGINT, previous)
        bar.close()


def say_fit(estimator: StructuredGPClassifier, n_sequences: int, n_tokens: int) -> None:
    log = estimator.training_log_
    of = f"{log['n_inducing']} inducing inputs leave {log['inducing_residual']:.1%} of the variance"
    if log["posterior"] == "weights":
        of = f"{log['n_inducing']} weights"
    click.echo(
        f"{n_sequences} sequences, {n_tokens} tokens, {len(estimator.classes_)} labels; {of}; "
        f"{log['optimizer']} ({log['reason']}): {log['stopped']} after {len(log['steps'])} steps, "
        f"{log['seconds']:.1f} s; bound {log['elbo']:.1f} (fresh draws {log['fresh_elbo']:.1f}), "
        f"{log['effective_parameters']:.0f} effective parameters",
        err=True,
    )
    if log["held_out"] is not None:
        weight, spread = (log["plan"][name]["value"] for name in ("data_weight", "spread"))
        told = "; ".join(held_out_lines(log["held_out"]))
        click.echo(f"data weight {weight:g}, spread {spread:g}; in cross-validation {told}", err=True)
