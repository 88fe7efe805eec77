"""Scores as a plain-text table: overall figures, then those of each type of span and of each label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structgp.evaluation.metrics import Report, SpanCounts

ROWS = (
    ("token error", "token_error", "{:.2%}"),
    ("span F1", "span_f1", "{:.2%}"),
    ("span precision", "span_precision", "{:.2%}"),
    ("span recall", "span_recall", "{:.2%}"),
    ("token NLL", "token_nll", "{:.4f}"),
    ("sequence NLL", "sequence_nll", "{:.3f}"),
    ("ECE (15 bins)", "ece", "{:.4f}"),
)


def table(reports: Mapping[str, Report]) -> str:
    """One column per report, under its name. Below, the scores of the first report, or of each of its
    layers if it has any, by type of span and by label."""
    return "\n".join([*_figures(reports), *_details(reports)])


def _figures(reports: Mapping[str, Report]) -> Iterator[str]:
    widths = [max(14, len(name) + 2) for name in reports]
    yield f"{'':<16}" + "".join(f"{name:>{w}}" for name, w in zip(reports, widths, strict=True))
    for title, key, form in ROWS:
        values = [getattr(report, key) for report in reports.values()]
        cells = ["-" if value is None else form.format(value) for value in values]
        yield f"{title:<16}" + "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
    first = next(iter(reports.values()))
    yield f"({first.n_sequences} sequences, {first.n_tokens} tokens)"


def _details(reports: Mapping[str, Report]) -> Iterator[str]:
    """Precision, recall, F1 and support of each type of span and of each label, for the first report or
    each of its layers; without layers, also the F1 of the other reports."""
    first, *others = reports.items()
    told = first[1].layers or {first[0]: first[1]}
    rivals = {} if first[1].layers else dict(others)
    for name, report in told.items():
        layer = f" of {name}" if first[1].layers else ""
        if set(report.by_type) != set(report.by_label):  # else spans are single tokens
            yield from _counts(
                f"span type{layer}", report.by_type, {n: r.by_type for n, r in rivals.items()}
            )
        yield from _counts(f"label{layer}", report.by_label, {n: r.by_label for n, r in rivals.items()})


def _counts(
    title: str, counts: Mapping[str, SpanCounts], others: Mapping[str, Mapping[str, SpanCounts]]
) -> Iterator[str]:
    width = max(16, *(len(name) + 2 for name in [title, *counts]))
    head = [*("precision", "recall", "F1"), *(f"{name} F1" for name in others), "support"]
    widths = [max(11, len(column) + 2) for column in head]
    yield f"\n{title:<{width}}" + "".join(f"{name:>{w}}" for name, w in zip(head, widths, strict=True))
    for name, of in counts.items():
        values = [of.precision, of.recall, of.f1]
        values += [other[name].f1 if name in other else 0.0 for other in others.values()]
        cells = [*(f"{value:.2%}" for value in values), str(of.n_true)]
        shown = "".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        yield f"{name or '(no type)':<{width}}{shown}"
