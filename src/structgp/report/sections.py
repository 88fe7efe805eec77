"""The sections of the page, each a function from the findings to HTML."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from structgp.answers.expected import Interval
from structgp.api.describe import describe
from structgp.data.word_parts import feature_name
from structgp.evaluation.metrics import Report
from structgp.report import charts, tables
from structgp.report.findings import LEVEL, Findings, Truth
from structgp.report.markup import Markup, count, decimal, join, percent, plural, tag
from structgp.report.template_tables import scores_by_template

_COVERAGES = (0.1, 0.25, 0.5, 0.75, 0.8, 0.9, 0.95, 1.0)
_ENLARGED = 0.25
"""Share of the curve's height below which the bracket gets an enlargement."""


NOUNS = {
    "sequence": ("token", "sequence"),
    "grid": ("pixel", "image"),
    "tree": ("node", "tree"),
    "graph": ("node", "graph"),
}
"""The nouns for a variable and for an example, by form."""


def headline(findings: Findings) -> Markup:
    tiles = _unlabelled_tiles(findings) if findings.truth is None else _tiles(findings, findings.truth)
    return join((tag("div", *tiles, class_="tiles"), _facts(findings)))


def _tiles(findings: Findings, truth: Truth) -> list[Markup]:
    scores, (one, example) = truth.scores, NOUNS[findings.form]
    wrong = round(scores.token_error * scores.n_tokens)
    sizes = f"{plural(scores.n_tokens, one)} in {plural(scores.n_sequences, example)}"
    whole = f"{decimal(scores.sequence_nll, 2)} per {example}"
    if scores.n_unseen_tokens:
        whole += f"; {plural(scores.n_unseen_tokens, one)} with unseen labels left out"
    told = f"{count(wrong)} of {sizes}"
    if scores.layers:
        told = ", ".join(f"{layer} {percent(own.token_error)}" for layer, own in scores.layers.items())
    return [
        _tile(f"{one.capitalize()} error", percent(scores.token_error), told),
        _whole_tile(findings, truth),
        _tile("Negative log-likelihood", decimal(scores.token_nll, 3), f"nats per {one}; {whole}"),
        _tile("Calibration error", decimal(scores.ece, 3), "ECE: confidence against accuracy"),
    ]


def _whole_tile(findings: Findings, truth: Truth) -> Markup:
    """Span scores for sequences; for other examples, how many are right as a whole."""
    scores, example = truth.scores, NOUNS[findings.form][1]
    if findings.form == "sequence":
        spans = f"precision {percent(scores.span_precision)}, recall {percent(scores.span_recall)}"
        return _tile("Span F1", percent(scores.span_f1), spans)
    both = list(zip(truth.labels, findings.predicted, strict=True))
    right = sum(list(labels) == list(guess) for labels, guess in both)
    told = f"{count(right)} of {plural(len(both), example)} without an error"
    return _tile(f"Whole {example}s right", percent(right / max(1, len(both))), told)


def _unlabelled_tiles(findings: Findings) -> list[Markup]:
    tops = [max(p.values()) for sequence in findings.marginals for p in sequence]
    n, expected = len(findings.text.words), findings.expected
    mean = sum(float(v.sum()) for v in findings.uncertainties[0].values) / len(tops)
    unsure = sum(p < 0.5 for p in tops)
    one, example = NOUNS[findings.form]
    sizes = f"{plural(len(tops), one)} in {plural(n, example)}, without labels"
    tiles = [_tile(f"{one.capitalize()}s", count(len(tops)), sizes)]
    if expected is not None:
        error = f"{_bounds(expected.error)}; {sizes}"
        tiles = [_tile("Expected error", percent(expected.error.mean), error)]
        if findings.form == "sequence":
            tiles.append(_tile("Expected span F1", percent(expected.f1.mean), _bounds(expected.f1)))
    return [
        *tiles,
        _tile("Mean uncertainty", decimal(mean, 3), f"nats per {one}"),
        _tile("No label above one half", percent(unsure / len(tops)), plural(unsure, one)),
    ]


def _interval(score: Interval) -> str:
    return f"{percent(score.mean)} ({_bounds(score)})"


def _bounds(score: Interval) -> str:
    return f"{percent(LEVEL, 0)} interval {percent(score.low)} to {percent(score.high)}"


def _tile(name: str, figure: str, below: str) -> Markup:
    return tag("div", tag("h2", name), tag("p", figure, class_="figure"), _note(below), class_="tile")


def _facts(findings: Findings) -> Markup:
    model, log = findings.estimator.model_, findings.estimator.model_.info
    unit = "weights" if log["posterior"] == "weights" else "inducing inputs per function"
    fitted = f"{log['optimizer']}, {log['stopped']}"
    if trace := log.get("trace"):
        fitted += f" after {plural(int(trace[-1][0]), 'step')}"
    sizes = log["n_sequences"], log["n_tokens"], len(model.labels.classes)
    one, example = NOUNS[findings.form]
    trained = ", ".join(map(plural, sizes, (example, one, "label")))
    draws = plural(n, "draw") if (n := findings.estimator.ask([]).question.n_draws) else "the mean"
    facts = (
        ("Trained on", trained),
        ("Structure", str(model.spec)),
        ("Posterior", f"{count(log['n_inducing'])} {unit}"),
        ("Effective parameters", count(log["effective_parameters"])),
        ("Fit", f"{fitted}, {decimal(log['seconds'], 1)} s"),
        ("Data weight", f"{log.get('plan', {}).get('data_weight', {}).get('value', 1.0):g}"),
        ("Spread of draws", f"{model.spread:g}"),
        ("Evidence bound", decimal(log["elbo"], 1)),
        ("Predictions from", f"{draws} of the posterior"),
        ("Written by", f"structgp {log['version']}"),
    )
    entries = (tag("div", tag("dt", name), tag("dd", value)) for name, value in facts)
    return tag("dl", *entries, class_="facts")


def confidence(findings: Findings) -> Markup:
    truth, found = findings.truth, findings.estimator.held_out_
    plots = [_risk(findings)] if truth is None else [_reliability(findings, truth), _risk(findings)]
    notes = [tag("div", *plots, class_="halves")]
    if truth is None:
        notes.append(_note("Only true labels show whether confidence is deserved; this file has none."))
    elif findings.expected is not None:
        said = f"Without labels, the model expects an error of {_interval(findings.expected.error)}"
        if findings.form == "sequence":
            said += f" and a span F1 of {_interval(findings.expected.f1)}"
        notes.append(_note(f"{said}."))
    if found is not None:
        sizes = (
            f"{plural(found['n_tokens'], NOUNS[findings.form][0])} in {plural(found['n_folds'], 'fold')}"
        )
        said = f"In cross-validation within the training data ({sizes}): "
        notes.append(
            _note(
                f"{said}an error of {percent(found['token_error'])} is to be expected. {found['verdict']}"
            )
        )
    return join(notes)


def _reliability(findings: Findings, truth: Truth) -> Markup:
    calibration, one, rows = truth.calibration, NOUNS[findings.form][0], []
    for b in calibration.bins:
        span = f"{decimal(b.low, 2)}\N{EN DASH}{decimal(b.high, 2)}"
        rows.append((span, count(b.count), decimal(b.confidence, 3), decimal(b.accuracy, 3)))
    said = (
        "On the dashed line confidence equals accuracy; below it the model claims too much. "
        f"Upright lines: two standard errors. Expected calibration error {decimal(calibration.ece, 4)}."
    )
    table = tables.figures(("bin", f"{one}s", "confidence", "accuracy"), rows, text_columns=1)
    plots = charts.reliability(calibration, one), charts.confidence_counts(calibration, one)
    return _figure("Is it right as often as it claims?", plots, said, "Figures of the bins", table)


def _risk(findings: Findings) -> Markup:
    left, risk = findings.deferral, None if findings.truth is None else findings.truth.risk
    columns = [left.expected] if risk is None else [left.expected, risk.risk]
    rows = [
        (
            percent(share, 0),
            decimal(charts.at_share(left.doubt, share), 3),
            *(percent(charts.at_share(values, share)) for values in columns),
        )
        for share in _COVERAGES
    ]
    one = NOUNS[findings.form][0]
    said = f"Error that the model expects among the {one}s that it is most confident of. "
    if risk is not None:
        said = f"Error among the {one}s that the model is most confident of, and dashed what it expects. "
        said += f"Area under the curve {decimal(risk.area, 4)}; lower is better. "
    said += f"The table below gives, for each share, the value of --defer that keeps just those {one}s."
    head = ("answered", "defer", "expected error", "error")[: 2 + len(columns)]
    title, plots = "What if it answers only where it is sure?", [charts.risk_curve(left, risk, one)]
    return _figure(title, plots, said, "Figures of the curve", tables.figures(head, rows))


def _figure(title: str, plots: Sequence[Markup], said: str, summary: str, table: Markup) -> Markup:
    details = tag("details", tag("summary", summary), table)
    return tag("figure", tag("h3", title), *plots, tag("figcaption", said), details)


def by_type(scores: Report) -> Markup:
    """Precision, recall, F1 and support of each type of span and of each label, layer by layer."""
    columns = []
    for name, report in (scores.layers or {"": scores}).items():
        of = f" of {name}" if name else ""
        tables_of = {"span type": report.by_type, "label": report.by_label}
        if set(report.by_type) == set(report.by_label):
            del tables_of["span type"]
        for title, counts in tables_of.items():
            heading = {"span type": "Each type of span", "label": "Each label"}[title] + of
            table, left_out = tables.by_name(title, counts)
            rest = [_note(f"{left_out} with the least support left out.")] if left_out else []
            columns.append(tag("div", tag("h3", heading), table, *rest))
    return tag("div", *columns, class_="side")


def confusions(findings: Findings) -> Markup:
    if findings.truth is None:
        return _note("Only true labels show what is taken for what; this file has none.")
    counts, one = findings.truth.confusion, NOUNS[findings.form][0]
    table, left_out = tables.confusion(counts)
    said = _note(f"Numbers of {one}s, shaded by their share of the true label's.")
    parts = [tag("h3", "What is taken for what"), said, table]
    if left_out:
        parts.append(_note(f"The {plural(left_out, 'label')} with the fewest {one}s left out."))
    columns = [tag("div", *parts)]
    if any(truth != guess for truth, guess in counts):
        worst = tables.worst_confusions(counts, one)
        columns.append(tag("div", tag("h3", "Most frequent errors"), worst))
    return tag("div", *columns, class_="side")


def transitions(findings: Findings) -> Markup:
    """Scores of labels that go together: from one label to the next for a chain, the tables of all
    templates for other structures."""
    if not findings.estimator.model_.spec.is_chain:
        return scores_by_template(findings)
    next_ = findings.estimator.model_.posterior["next"]
    if next_.is_silent:
        return join(
            (tag("h3", "From one label to the next"), _note("The model has no label-to-label scores."))
        )
    classes = findings.estimator.classes_.tolist()
    used = Counter(label for labels in findings.predicted for label in labels)
    kept = tables.frequent({label: used[label] for label in classes})
    index = [classes.index(label) for label in kept]
    mean, sd = next_.constant_scores()
    rules = findings.estimator.model_.rules
    never = torch.zeros_like(mean, dtype=torch.bool) if rules is None else ~rules.follows
    table = tables.transitions(kept, *(values[index][:, index] for values in (mean, sd, never)))
    said = "Posterior mean and standard deviation of each score. Only differences within the table matter."
    parts = [_note(said), table]
    if left_out := len(classes) - len(kept):
        parts.append(_note(f"The {plural(left_out, 'label')} predicted least often left out."))
    return join([tag("h3", "From one label to the next"), *parts])


def weights(findings: Findings) -> Markup:
    found = describe(findings.estimator)
    parts: dict[str, dict[str, float]] = found.layer_templates or {"": found.templates}
    parts |= {name: table.scales for name, table in found.tables.items()}
    parts = {name: scales for name, scales in parts.items() if scales}
    if not parts:
        return _note("The kernel has no weights by template.")
    said = "Prior variance of a weight in each template, learned on the evidence bound; bars show its root."
    listed: list[Markup] = [_note(said)]
    for name, scales in parts.items():
        listed += [tag("h4", name)] if name else []
        listed.append(
            tables.weights([(feature_name(key, findings.templates), v) for key, v in scales.items()])
        )
    return join(listed)


def fit(findings: Findings) -> Markup:
    log = findings.estimator.model_.info
    trace = [[s, v] for s, v in log.get("trace") or [] if math.isfinite(v)]
    last, fresh = log["elbo"], log["fresh_elbo"]
    if not trace:
        return _note("The model file has no trace of its fit.")
    said = (
        f"The bound of each step. At the end {decimal(last, 1)} on the draws of the fit and "
        f"{decimal(fresh, 1)} on fresh ones (the ring): in expectation the best bound lies between "
        f"them, {decimal(abs(last - fresh), 1)} nats apart, or "
        f"{decimal(abs(last - fresh) / max(1, log['n_tokens']), 3)} per {NOUNS[findings.form][0]} of "
        "the training data."
    )
    figures = [tag("figure", charts.learning_curve(trace, fresh), tag("figcaption", said))]
    start = _enlarged_from(trace, last, fresh)
    if start is not None:
        enlarged = charts.learning_curve(trace, fresh, from_step=start)
        figures.append(tag("figure", enlarged, tag("figcaption", f"The same from step {count(start)} on.")))
    return tag("div", *figures, class_="halves")


def _enlarged_from(trace: list[list[float]], last: float, fresh: float) -> int | None:
    """The step from which an enlargement shows the bracket well; None if no enlargement is needed."""
    if not math.isfinite(fresh) or len(trace) < 4:
        return None
    bracket = abs(last - fresh)
    values = [v for _, v in trace]
    if bracket >= _ENLARGED * (max(values) - min(values)):
        return None
    # The longest end of the curve that stays within a few brackets of its last value, at least two steps.
    first = len(trace) - 2
    while first > 0 and abs(values[first - 1] - last) <= 3 * bracket:
        first -= 1
    return int(trace[first][0]) if first > 0 else None


def _note(text: str) -> Markup:
    return tag("p", text, class_="note")
