"""The scores of every template of a declared structure, one table each."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np

from structgp.api.describe import Table, describe
from structgp.report import tables
from structgp.report.findings import Findings
from structgp.report.markup import Markup, decimal, join, plural, tag
from structgp.structures.spec import Template

MOST_ROWS = 40
"""Largest number of rows and of columns of a table, as in ``tables``."""

PLACES = {
    "next": ("label", "next label"),
    "same": ("label of a token", "of one that is linked to it"),
    "parent": ("parent", "child"),
    "right": ("left", "right"),
    "down": ("above", "below"),
    "length": ("span", "tokens"),
}
"""Names of the places of a tuple, by rule or name of the template."""


def scores_by_template(findings: Findings) -> Markup:
    """A table for each template except the nodes."""
    model = findings.estimator.model_
    found = describe(findings.estimator).tables
    if not found:
        return tag("p", "The model has no scores of labels that go together.", class_="note")
    said = "Posterior mean and standard deviation of each score, apart from features. "
    said += "Only differences within a table matter."
    used = Counter(label for labels in findings.predicted for label in labels)
    by_name = {t.name: t for t in model.spec.templates}
    drawn = [_table(by_name[name], table, used, _never(findings, name)) for name, table in found.items()]
    return join((tag("h3", "What goes together"), tag("p", said, class_="note"), *drawn))


def _never(findings: Findings, name: str) -> np.ndarray | None:
    """True at entries of the template's table that the constraints forbid; None if they forbid nothing."""
    rules = findings.estimator.model_.rules
    if rules is None:
        return None
    allowed = rules.more.get(name, rules.follows if name == "next" else None)
    return None if allowed is None else ~allowed.numpy()


def _table(template: Template, table: Table, used: Counter[str], never: np.ndarray | None) -> Markup:
    """A table with the last place across and all others down; of many labels, those predicted most."""
    most = MOST_ROWS if len(table.axes) <= 2 else int(MOST_ROWS ** (1 / (len(table.axes) - 1)))
    index = []
    for j, axis in enumerate(table.axes):
        layer = f"{template.layers[j]}=" if template.layers else ""
        order = sorted(range(len(axis)), key=lambda v: (-used[layer + axis[v]], v))
        index.append(sorted(order[: MOST_ROWS if template.rule == "length" else most]))
    place = np.ix_(*index)
    columns = [table.axes[-1][v] for v in index[-1]]
    names = product(
        *([axis[v] for v in some] for axis, some in zip(table.axes[:-1], index[:-1], strict=True))
    )
    parts = (table.mean, table.sd, np.zeros(table.mean.shape, bool) if never is None else never)
    mean, sd, banned = (x[place].reshape(-1, len(columns)) for x in parts)
    down, across = PLACES.get(template.name) or PLACES.get(template.rule) or _numbered(len(table.axes))
    if template.rule == "tie":
        down, across = template.layers
    drawn = tables.scores(
        [" ".join(of) for of in names], columns, (mean, sd, banned), down, across, template.name
    )
    title = tag("h4", template.name, tag("small", f" prior sd {decimal(table.prior_sd, 2)}"))
    left_out = max(len(axis) - len(some) for axis, some in zip(table.axes, index, strict=True))
    more = tag("p", f"The {plural(left_out, 'label')} predicted least often left out.", class_="note")
    return tag("div", title, drawn, *([more] if left_out else []), class_="template")


def _numbered(places: int) -> tuple[str, str]:
    names = ["first", "second", "third", "fourth"][:places]
    return ", ".join(names[:-1]), names[-1]
