"""The tables: labels against labels, weights of templates, figures behind the plots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from torch import Tensor

from structgp.evaluation.metrics import SpanCounts
from structgp.report.markup import MINUS, Markup, count, decimal, percent, tag

MOST_LABELS = 40
"""Largest number of rows and of columns of a table of labels; nobody reads a larger one."""

Cell = Callable[[str, str], Markup]


def confusion(counts: Counter[tuple[str, str]]) -> tuple[Markup, int]:
    """Tokens by true label (rows) and predicted label (columns), shaded by their share of the row;
    and the number of labels that are left out, those with the fewest tokens."""
    tokens: Counter[str] = Counter()
    of_row: Counter[str] = Counter()
    for (truth, guess), n in counts.items():
        tokens[truth] += n
        tokens[guess] += n
        of_row[truth] += n
    kept = frequent(tokens)

    def cell(truth: str, guess: str) -> Markup:
        n = counts[truth, guess]
        if not n:
            return tag("td", class_="right" if truth == guess else None)
        share = n / of_row[truth]
        title = f"{count(n)} of {count(of_row[truth])} {truth} labelled {guess} ({percent(share)})"
        kind = "right" if truth == guess else "wrong"
        return tag("td", count(n), class_=kind, title=title, style=_strength(math.sqrt(share)))

    table = _label_table(kept, cell, "true label", "predicted label", "confusion")
    return table, len(tokens) - len(kept)


def transitions(labels: Sequence[str], mean: Tensor, sd: Tensor, never: Tensor) -> Markup:
    """Posterior mean (V, V) of each label-to-label score, and below it its standard deviation; a dot where
    constraints forbid it."""
    found = tuple(x.numpy() for x in (mean, sd, never))
    return scores(labels, labels, found, "label", "next label", "transitions", " then ")


def scores(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[np.ndarray],
    down: str,
    across: str,
    name: str,
    between: str = ", ",
) -> Markup:
    """A table of posterior scores. values : mean, standard deviation, and True where constraints forbid the
    entry, (R, C) each. down, across : what the rows and columns are called."""
    mean, sd, never = values
    row_of, column_of = ({v: i for i, v in enumerate(some)} for some in (rows, columns))
    # Scores well below 1 hardly matter, and are shaded accordingly.
    top = max(1.0, float(np.abs(mean).max(initial=0.0)))

    def cell(before: str, after: str) -> Markup:
        here, both = (row_of[before], column_of[after]), f"{before}{between}{after}"
        m, s = float(mean[here]), float(sd[here])
        if never[here]:
            return tag("td", "·", title=f"{both}: the constraints forbid it")
        return tag(
            "td",
            signed(m),
            tag("small", f"±{decimal(s, 1)}"),
            class_="plus" if m >= 0 else "minus",
            title=f"{both}: {signed(m, 2)}, standard deviation {decimal(s, 2)}",
            style=_strength(abs(m) / top),
        )

    return _label_table(rows, cell, down, across, name, columns)


def frequent(tokens: Mapping[str, int]) -> list[str]:
    """The labels with the most tokens, no more than a table holds, in alphabetical order."""
    by_number = sorted(tokens, key=lambda label: (-tokens[label], label))
    return sorted(by_number[:MOST_LABELS])


def worst_confusions(counts: Counter[tuple[str, str]], one: str, most: int = 8) -> Markup:
    """The most frequent errors, as a list. one : the noun for a token, such as 'pixel'."""
    wrong = [(-n, truth, guess) for (truth, guess), n in counts.items() if truth != guess]
    total = -sum(n for n, _, _ in wrong)
    rows = (
        (tag("code", truth), tag("code", guess), count(-n), percent(-n / total, 0))
        for n, truth, guess in sorted(wrong)[:most]
    )
    return figures(("true", "predicted", f"{one}s", "of errors"), rows, text_columns=2)


def by_name(title: str, counts: Mapping[str, SpanCounts]) -> tuple[Markup, int]:
    """Precision, recall, F1 and support of each type of span, or label; and the number of those left out,
    which have the least support."""
    kept = frequent({name: of.n_true for name, of in counts.items()})
    rows = []
    for name in kept:
        of = counts[name]
        shares = map(percent, (of.precision, of.recall, of.f1))
        rows.append((tag("code", name or "(no type)"), *shares, count(of.n_true)))
    table = figures((title, "precision", "recall", "F1", "support"), rows, text_columns=1)
    return _in_box(table, f"scores by {title}"), len(counts) - len(kept)


def weights(scales: Sequence[tuple[str, float]]) -> Markup:
    """The prior variance of each template's weights, the largest first, with a bar."""
    top = max(value for _, value in scales) or 1.0
    rows = []
    for name, value in sorted(scales, key=lambda item: (-item[1], item[0])):
        gauge = tag("span", class_="gauge", style=f"width:{100 * math.sqrt(value / top):.1f}%")
        number = tag("td", decimal(value, 2), class_="number")
        rows.append(tag("tr", tag("th", tag("code", name), scope="row"), tag("td", gauge), number))
    weight = tag("th", tag("span", "weight", class_="unseen"), scope="col")
    variance = tag("th", "variance", scope="col", class_="number")
    head = tag("thead", tag("tr", tag("th", "template", scope="col"), weight, variance))
    table = tag("table", head, tag("tbody", *rows), class_="weights")
    return _in_box(table, "template weights")


def figures(head: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: int = 0) -> Markup:
    """A plain table; columns hold numbers after the first ``text_columns``."""

    def kind(column: int) -> str | None:
        return "number" if column >= text_columns else None

    top = [tag("th", name, scope="col", class_=kind(j)) for j, name in enumerate(head)]
    body = [tag("tr", *(tag("td", value, class_=kind(j)) for j, value in enumerate(row))) for row in rows]
    return tag("table", tag("thead", tag("tr", *top)), tag("tbody", *body), class_="figures")


def signed(value: float, digits: int = 1) -> str:
    text = decimal(value, digits)
    return text if text.startswith(MINUS) or not text.strip("0.") else f"+{text}"


def _label_table(
    labels: Sequence[str],
    cell: Cell,
    down: str,
    across: str,
    name: str,
    others: Sequence[str] | None = None,
) -> Markup:
    """others : labels of the columns, None if they are the same as those of the rows."""
    others = labels if others is None else others
    corner = tag("th", tag("span", f"{down} \N{DOWNWARDS ARROW}"), class_="corner")
    columns = [tag("th", tag("span", label), scope="col", title=label) for label in others]
    body = [
        tag("tr", tag("th", row, scope="row", title=row), *(cell(row, label) for label in others))
        for row in labels
    ]
    caption = tag("caption", f"{across} \N{RIGHTWARDS ARROW}")
    head = tag("thead", tag("tr", corner, *columns))
    return _in_box(tag("table", caption, head, tag("tbody", *body), class_="matrix"), name)


def _in_box(table: Markup, name: str) -> Markup:
    """A box that scrolls by itself and can be reached by keyboard."""
    return tag("div", table, class_="box", tabindex=0, role="region", aria_label=name)


def _strength(share: float) -> str:
    return f"--strength:{100 * min(1.0, share):.0f}%"
