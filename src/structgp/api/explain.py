"""Explains a predicted label by the features, neighbours and training tokens that speak for or against it.

Under the posterior mean, the log-odds of one label against another at a token are a sum,

    log p(a) / p(b) = f(a) - f(b)  +  what comes from the left  +  what comes from the right,

where f is itself a sum over features. At the optimum of the fit, f is also a sum over training tokens n:
the kernel between that token and this one, times the residual of its label,

    f(x) = sum_n k(x, x_n) (1[y_n] - p_n).

For structures beyond the chain, ``explain_graph`` computes what every neighbouring tuple adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from structgp.answers.ask import Asked, Model
from structgp.api.estimator import StructuredGPClassifier
from structgp.api.explain_graph import GraphExplanation, Part, Variable, Witness, neighbours_of, variable_at
from structgp.data.examples import as_list
from structgp.errors import InputError
from structgp.gp.kernels import covariance
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.dense import COMPONENTS
from structgp.gp.kernels.template import MISSING
from structgp.structures import Chain


class Transition(NamedTuple):
    """The neighbour's most probable label if the token has ``label``, and if it has ``other``; the
    difference between the scores of these two transitions, and its posterior sd."""

    if_label: str
    if_other: str
    score: float
    sd: float


@dataclass(frozen=True)
class Explanation:
    """``log_odds`` of ``label`` against ``other`` = ``unary`` + ``left`` + ``right``, under the posterior
    mean.

    features : parts of ``unary``, largest first. before, after : the most probable labels of the two
    neighbours, on which ``left`` and ``right`` mostly depend; None at the ends and if there are no
    transitions. witnesses : training tokens, or inducing inputs; those that speak for the label come first,
    those against it last. Over all inducing inputs their scores sum to ``unary``; over training tokens only
    roughly, since p_n is an average over draws."""

    label: str
    other: str
    probability: float
    log_odds: float
    unary: float
    left: float
    right: float
    features: list[Part]
    before: Transition | None
    after: Transition | None
    witnesses: list[Witness] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"{self.label} rather than {self.other}: log-odds {self.log_odds:+.2f} "
            f"= features {self.unary:+.2f}, left {self.left:+.2f}, right {self.right:+.2f}"
        ]
        lines += map(str, self.features)
        for side, step in (("before", self.before), ("after", self.after)):
            if step is not None:
                lines.append(
                    f"  {step.score:+6.2f}  {step.if_label} {side} {self.label}, where {side} "
                    f"{self.other} were {step.if_other} (sd {step.sd:.2f})"
                )
        return "\n".join([*lines, *map(str, self.witnesses)])


def explain(
    model: StructuredGPClassifier,
    x: Any,
    token: Any,
    label: str | None = None,
    other: str | None = None,
    *,
    X_train: Iterable[Any] | None = None,
    y_train: Iterable[Any] | None = None,
    n: int = 10,
) -> Explanation | GraphExplanation:
    """Explains why token number ``token`` of the sequence x has ``label`` (by default the most probable
    one) rather than ``other`` (by default the next). In a grid, a token is (row, column); with layers,
    (layer, token).

    The witnesses are the ``n`` training tokens that speak most for the label and the ``n`` that speak most
    against it; without training data, they are inducing inputs, if the model has them. For structures
    beyond the chain, the result is a :class:`GraphExplanation`."""
    asked = model.ask([x])
    if asked.links is not None:
        return _explain_graph(model, asked, token, label, other, X_train, y_train, n)
    asked.require("has_walk", "neighbours")
    fitted, rows = asked.model, asked.rows_apart
    if not len(rows[0]):
        raise InputError("x", "no tokens in it", "pass a sequence with at least one")
    ((_, at),) = asked.one_by_one(n_draws=0)
    T, classes = at.f.shape[2], fitted.labels.classes
    if not -T <= token < T:
        raise InputError("token", f"no token {token} of {T}", "count from 0")
    t = token % T
    p = asked.marginals()[0][t]
    a, b = _two(classes, p, label, other)
    node, step = (found[0, 0] for found in at.structure.walk(at.f, at.g, at.mask))
    odds = float((node[t, a] / node[t, b]).log())
    unary = float(at.f[0, 0, t, a] - at.f[0, 0, t, b])
    here = at.one(0, t + 1)  # cut off after the token: nothing comes from the right
    last = Chain(spec=fitted.spec).marginals(here.f, here.g, here.mask)[0, 0, t]
    left = float((last[a] / last[b]).log()) - unary
    before = after = None
    linked = fitted.constraints is not None or not fitted.posterior["next"].is_silent
    if linked and t > 0:
        beside = (node[t - 1, :, None] * step[t - 1]).T
        before = _transition(fitted, rows[0][t], beside, a, b, after=False)
    if linked and t + 1 < T:
        after = _transition(fitted, rows[0][t + 1], step[t], a, b, after=True)
    at_token = Variable("node", t, t, 0, (0, len(classes)))
    features, witnesses = _own(model, asked, at_token, a, b, X_train, y_train, n)
    numbers = float(p[a]), odds, unary, left, odds - unary - left
    return Explanation(classes[a], classes[b], *numbers, features, before, after, witnesses)


def _explain_graph(
    model: StructuredGPClassifier,
    asked: Asked,
    token: Any,
    label: str | None,
    other: str | None,
    X_train: Any,
    y_train: Any,
    n: int,
) -> GraphExplanation:
    """``explain`` for structures beyond the chain."""
    asked.require("has_marginals", "marginals")
    if not len(asked.rows[0]):
        raise InputError("x", "no tokens in it", "pass an example with at least one")
    variable = variable_at(asked, token)
    first, last = variable.labels
    names = variable.names(asked)
    p = asked.marginals()[0][variable.layer * len(asked.rows[0]) + variable.token]
    a, b = _two(names, p[first:last], label, other)
    ((_, at),) = asked.one_by_one(n_draws=0)
    unary = at.scores[variable.block(asked)][0, 0, variable.token]
    odds, found = neighbours_of(asked, at, variable, a, b)
    own = float(unary[a] - unary[b])
    rest = odds - own - sum(near.score for near in found)
    features, witnesses = _own(model, asked, variable, first + a, first + b, X_train, y_train, n)
    numbers = float(p[first + a]), odds, own
    return GraphExplanation(names[a], names[b], *numbers, features, found, rest, witnesses)


def _own(
    model: StructuredGPClassifier, asked: Asked, at: Variable, a: int, b: int, X: Any, y: Any, n: int
) -> tuple[list[Part], list[Witness]]:
    """The features of a token, and the witnesses, that speak for label a or for label b."""
    fitted = asked.model
    row = fitted.split.node.select(torch.from_numpy(asked.rows_apart[0][at.token : at.token + 1]))
    q, first = fitted.posterior[at.template], at.labels[0]
    direction = q.basis[a - first] - q.basis[b - first]  # (R,)
    features = _features(asked, q, row, direction, a, b)[: max(n, 1)]
    return features, _witnesses(model, q, at, row, direction, X, y, n)


def _two(classes: Sequence[str], p: np.ndarray, label: str | None, other: str | None) -> tuple[int, int]:
    for name, given in (("label", label), ("other", other)):
        if given is not None and given not in classes:
            raise InputError(name, f"{given!r} is not a label", f"use one of {', '.join(classes)}")
    order = [int(v) for v in np.argsort(-p)]
    a = order[0] if label is None else classes.index(label)
    b = next(v for v in order if v != a) if other is None else classes.index(other)
    if a == b:
        raise InputError("other", f"{other!r} is the label itself", "name another label")
    return a, b


def _transition(fitted: Model, row: np.ndarray, beside: Tensor, a: int, b: int, after: bool) -> Transition:
    """The transition between the token and a neighbour. row : (W,) features of the transition's second
    token. beside : (V, V) how probable each label of the neighbour (column) is given each label of the
    token (row), up to a factor per row. after : True if the neighbour is the next token."""
    i, j = int(beside[a].argmax()), int(beside[b].argmax())
    edge, names = fitted.split.next, fitted.labels.classes
    if fitted.spec.next is None:  # constraints alone
        return Transition(names[i], names[j], 0.0, 0.0)
    rows = None if edge is None else edge.select(torch.from_numpy(row)[None])
    mean, sd = (found[0] if after else found[0].T for found in fitted.posterior["next"].scores_at(rows))
    score, spread = mean[a, i] - mean[b, j], (sd[a, i].square() + sd[b, j].square()).sqrt()
    return Transition(names[i], names[j], float(score), float(spread))


def _features(asked: Asked, q: Any, row: Tensor, direction: Tensor, a: int, b: int) -> list[Part]:
    """What each feature adds to the log-odds, largest first. q : posterior block of the node scores.
    direction : (R,) difference of the basis vectors of labels a and b."""
    fitted, shift = asked.model, asked.question.shift
    dual = q.dual()
    if dual is None:
        scores = q.feature_scores(row, direction).tolist()
        names = _names(fitted, row, slots=True)
        found = [(t or v, v if t else "", score) for (t, v), score in zip(names, scores, strict=True)]
    else:
        found = _without(fitted, q, row, dual @ direction)
    parts: dict[tuple[str, str], float] = {}
    if shift is not None:
        found = [*found, ("class weight", "", float(shift[a] - shift[b]))]
    for name, value, score in found:
        parts[name, value] = parts.get((name, value), 0.0) + score
    listed = [Part(name, value, score) for (name, value), score in parts.items() if score]
    return sorted(listed, key=lambda part: -abs(part.score))


def _names(fitted: Model, row: Tensor, slots: bool) -> list[tuple[str, str]]:
    """Template and value of each column of a row; a sparse feature is a value without a template. slots :
    True for the order of ``active_features``, which also has entries for rare values and label
    frequencies."""
    encoder, names = fitted.split.node, []
    for block in sorted(encoder.blocks, key=lambda block: slots and block.kind == "dense"):
        cells = row[0, block.start : block.stop].tolist()
        if block.kind == "categorical":
            found = zip(encoder.templates, encoder.values, cells, strict=True)
            names += [(template, _name(list(values), cell)) for template, values, cell in found]
            names += [(template, "rare") for template in encoder.templates if slots]
        elif block.kind == "sparse":
            known = list(encoder.attributes) or [f"column {c}" for c in encoder.columns]
            names += [("", _name(known, cell)) for cell in cells[::2]]
        names += [("label frequency", "")] if slots else []
        names += [(f"dense {name}", "") for name in COMPONENTS[1:] if slots and block.kind == "dense"]
    return names


def _name(known: Sequence[str], cell: float) -> str:
    return "" if cell < 0 else known[int(cell)] if cell < len(known) else "(new)"


def _without(fitted: Model, q: Any, row: Tensor, dual: Tensor) -> list[tuple[str, str, float]]:
    """How much the score falls without each template or block, and the rest, which none of them accounts
    for alone: label frequencies, and interactions of templates. dual : (M,)."""
    encoder, found = fitted.split.node, []
    with torch.no_grad():
        whole = float(covariance(q.kernel, row, q.inducing)[0] @ dual)
        for block in encoder.blocks:
            if block.kind == "categorical":
                for p, template in enumerate(encoder.templates):
                    less = row.clone()
                    less[0, block.start + p] = MISSING
                    lost = whole - float(covariance(q.kernel, less, q.inducing)[0] @ dual)
                    known = list(encoder.values[p])
                    found.append((template, _name(known, float(row[0, block.start + p])), lost))
            elif len(encoder.blocks) == 1:
                found.append((block.kind, "", whole))
            else:
                factor, kernel = 1.0, q.kernel
                if not isinstance(kernel, BlockSumKernel):
                    factor, kernel = float(kernel.outputscale), kernel.base_kernel
                part = kernel.kernels[encoder.blocks.index(block)]
                columns = slice(block.start, block.stop)
                k = covariance(part, row[:, columns], q.inducing[:, columns])[0]
                found.append((block.kind, "", factor * float(k @ dual)))
    rest = whole - sum(score for *_, score in found)
    return [*found, ("the rest", "", rest)] if abs(rest) > 1e-9 else found


def _witnesses(
    model: StructuredGPClassifier,
    q: Any,
    at: Variable,
    row: Tensor,
    direction: Tensor,
    X: Any,
    y: Any,
    n: int,
) -> list[Witness]:
    """Training tokens, or inducing inputs if there is no training data. direction : (R,) difference of the
    basis vectors of the two labels."""
    fitted = model.model_
    if (X is None) != (y is None):
        raise InputError("X_train", "one of X_train and y_train is missing", "pass both or neither")
    if X is None or y is None:
        return _inducing(fitted, q, row, direction, n)
    asked, (first, last) = model.ask(as_list(X)), at.labels
    given = list(y)
    labels = asked.labels_given(given)
    # (T, V) per sequence: 1[y] - p, where y is known
    surprise = [known - p for known, p in zip(asked.marginals(given), asked.marginals(), strict=True)]
    often = fitted.info.get("plan", {}).get("data_weight", {}).get("value", 1.0)
    amplitude, along, scores, places = often * float(q.log_amplitude.exp()), direction @ q.basis.T, [], []
    for i, rows in enumerate(asked.rows_apart):
        if len(rows):
            with torch.no_grad():
                k = covariance(q.kernel, row, fitted.split.node.select(torch.from_numpy(rows)))[0]
            start = at.layer * len(rows)
            own = torch.from_numpy(surprise[i][start : start + len(rows), first:last])
            scores.append((amplitude * k * (own @ along)).numpy())
            places += [(i, t) for t in range(len(rows))]
    flat = np.concatenate(scores) if scores else np.empty(0)
    found = [(*places[k], float(flat[k])) for k in _extremes(flat, n)]
    told = [labels[i][at.layer * len(asked.rows[i]) + t] for i, t, _ in found]
    return [Witness(i, t, at.short(v), score) for (i, t, score), v in zip(found, told, strict=True)]


def _inducing(fitted: Model, q: Any, row: Tensor, direction: Tensor, n: int) -> list[Witness]:
    dual = q.dual()
    if dual is None:
        return []
    with torch.no_grad():
        scores = (covariance(q.kernel, row, q.inducing)[0] * (dual @ direction)).numpy()
    found = []
    for k in _extremes(scores, n):
        values = tuple(v for _, v in _names(fitted, q.inducing[k : k + 1], slots=False) if v)
        found.append(Witness(None, None, None, float(scores[k]), values))
    return found


def _extremes(scores: np.ndarray, n: int) -> list[int]:
    """Indices of the n largest and the n smallest scores, in descending order, without zeros."""
    order = np.argsort(-scores, kind="stable")
    ends = order if len(order) <= 2 * n else np.concatenate([order[:n], order[-n:]])
    return [int(k) for k in ends if scores[k] != 0]
