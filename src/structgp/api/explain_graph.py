"""Explains the label of a node in any structure: its own features, and what each neighbouring tuple adds.

Under the posterior mean, the contribution of a tuple is the amount by which the log-odds of the node's
label against another fall if that tuple is removed. In a tree, this is the message that the tuple sends,
and the contributions sum to the whole; if tuples form cycles, there is a rest, which they contribute
jointly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from structgp.answers.ask import Asked
from structgp.answers.potentials import Potentials
from structgp.data.layout import GraphLayout, Tuples
from structgp.errors import InputError
from structgp.structures.program import by_position


class Part(NamedTuple):
    """What one feature adds to the log-odds. ``value`` : the feature's value, if it is a template."""

    name: str
    value: str
    score: float

    def __str__(self) -> str:
        return f"  {self.score:+6.2f}  {self.name} {self.value}"


class Witness(NamedTuple):
    """What one training token adds to the log-odds, or one inducing input, given by its ``features``."""

    sequence: int | None
    token: int | None
    label: str | None
    score: float
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = " ".join(self.features)
        if self.sequence is not None:
            where = f"sequence {self.sequence}, token {self.token}, {self.label}"
        return f"  {self.score:+6.2f}  {where}"


class Neighbour(NamedTuple):
    """What one tuple adds to the log-odds. template : name of its template. nodes : the other nodes of the
    tuple; all tokens for the 'length' of segments. if_label, if_other : the most probable labels of these
    nodes if the node has ``label``, and if it has ``other``; empty for 'length'."""

    template: str
    nodes: tuple[Any, ...]
    score: float
    if_label: tuple[str, ...] = ()
    if_other: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.if_label:
            return f"  {self.score:+6.2f}  {self.template}"
        where = ", ".join(map(str, self.nodes))
        told = " ".join(self.if_label)
        if self.if_other != self.if_label:
            told += f", else {' '.join(self.if_other)}"
        return f"  {self.score:+6.2f}  {self.template} {where}: {told}"


@dataclass(frozen=True)
class GraphExplanation:
    """``log_odds`` of ``label`` against ``other`` = ``unary`` + the scores of ``neighbours`` + ``rest``,
    under the posterior mean.

    features : parts of ``unary``, largest first. neighbours : the tuples that contain the node, largest
    score first. rest : what no tuple adds by itself, 0 in trees. witnesses : see :class:`Explanation`."""

    label: str
    other: str
    probability: float
    log_odds: float
    unary: float
    features: list[Part]
    neighbours: list[Neighbour]
    rest: float
    witnesses: list[Witness] = field(default_factory=list)

    def __str__(self) -> str:
        near = sum(one.score for one in self.neighbours)
        lines = [
            f"{self.label} rather than {self.other}: log-odds {self.log_odds:+.2f} "
            f"= features {self.unary:+.2f}, neighbours {near:+.2f}, together {self.rest:+.2f}"
        ]
        return "\n".join([*lines, *map(str, (*self.features, *self.neighbours, *self.witnesses))])


@dataclass(frozen=True)
class Variable:
    """The variable whose label is explained. template : name of the template of its node scores. token :
    its number in the example. place : how the user named it. layer : number of its layer. labels : first of
    its labels and one past the last."""

    template: str
    token: int
    place: Any
    layer: int
    labels: tuple[int, int]

    def names(self, asked: Asked) -> list[str]:
        """The variable's labels, without the name of the layer."""
        names = asked.model.labels.classes[slice(*self.labels)]
        return [name for name in map(self.short, names) if name is not None]

    def short(self, label: str | None) -> str | None:
        layer = self.template.removesuffix(" node")
        return label if layer == "node" or label is None else label.removeprefix(f"{layer}=")

    def block(self, asked: Asked) -> int:
        """Index of the variable's template in the structure."""
        return [t.name for t in asked.model.spec.templates].index(self.template)


def variable_at(asked: Asked, token: Any) -> Variable:
    """The variable that a user names: a number; (row, column) in a grid; (layer, number) with layers."""
    spec, split, T = asked.model.spec, asked.model.split, len(asked.rows[0])
    assert asked.shapes is not None
    size, layer, name, t = asked.shapes[0].size, 0, spec.node.name, token
    if spec.layers or size is not None:
        what = "(layer, token)" if spec.layers else "(row, column)"
        if not isinstance(token, tuple) or len(token) != 2:
            raise InputError("token", f"must be {what}, got {token!r}", f"pass {what}")
    if spec.layers:
        if token[0] not in spec.layers:
            raise InputError("token", f"no layer {token[0]!r}", f"use {', '.join(spec.layers)}")
        layer, t = spec.layers.index(token[0]), token[1]
        name = next(u.name for u in spec.templates if u.rule == "node" and u.layers == (token[0],))
    elif size is not None:
        H, W = size
        h, w = token
        if not (_is_number(h, H) and _is_number(w, W)):
            raise InputError("token", f"no pixel {token!r} in a grid of {H} x {W}", "count from 0")
        t = h % H * W + w % W
    if not _is_number(t, T):
        raise InputError("token", f"no token {t!r} of {T}", "count from 0")
    labels = split.spans[spec.layers[layer] if spec.layers else ""]
    return Variable(name, int(t) % T, token, layer, labels)


def _is_number(value: Any, n: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and -n <= int(value) < n


def neighbours_of(
    asked: Asked, at: Potentials, to: Variable, a: int, b: int
) -> tuple[float, list[Neighbour]]:
    """Log-odds of label a of the variable against b, and what every tuple that contains it adds, largest
    first. at : potentials of the only example at the posterior mean. Cost: one sum over labellings per
    tuple."""
    if asked.model.spec.has_segments:
        odds, found = _in_segments(asked, at, to, a, b)
    else:
        odds, found = _in_graph(asked, at, to, a, b)
    return odds, sorted(found, key=lambda near: -abs(near.score))


def _odds(at: Potentials, n: int, to: Variable, a: int, b: int) -> Tensor:
    """(B,) log-odds at variable n."""
    first = to.labels[0]
    p = at.ask("marginals")[0, :, n]
    return p[:, first + a].log() - p[:, first + b].log()


def _in_graph(asked: Asked, at: Potentials, to: Variable, a: int, b: int) -> tuple[float, list[Neighbour]]:
    layout: GraphLayout = at.layout
    n = to.layer * (layout.mask.shape[1] // asked.n_layers) + to.token
    near = []
    for k, tuples in enumerate(layout.tuples):
        there = tuples.mask[0] & (tuples.index[0] == n).any(-1)
        near += [(k, e) for e in there.nonzero()[:, 0].tolist()]
    whole = float(_odds(at, n, to, a, b)[0])
    if not near:
        return whole, []
    copies = at.times(len(near))
    less = [_without(t, [e if k == j else None for k, e in near]) for j, t in enumerate(layout.tuples)]
    without = GraphLayout(copies.layout.mask, tuple(less), copies.layout.span)
    lost = whole - _odds(replace(copies, layout=without), n, to, a, b)
    tables = at.ask("template_marginals")
    found = []
    for (k, e), score in zip(near, lost.tolist(), strict=True):
        table, t = tables[k][0, 0, e], layout.tuples[k]
        place = t.index[0, e].tolist().index(n)
        told = [_best(asked, table.select(place, label), t, place) for label in (a, b)]
        found.append(Neighbour(t.name, _others(asked, t, e, place), score, *told))
    return whole, found


def _without(tuples: Tuples, gone: Sequence[int | None]) -> Tuples:
    """The tuples of ``len(gone)`` copies of the only example; copy b lacks tuple gone[b], if not None."""
    index, mask = (x.repeat(len(gone), *[1] * (x.dim() - 1)) for x in (tuples.index, tuples.mask))
    for b, e in enumerate(gone):
        if e is not None:
            index[b, e], mask[b, e] = 0, False
    return replace(tuples, index=index, mask=mask)


def _best(asked: Asked, table: Tensor, tuples: Tuples, place: int) -> tuple[str, ...]:
    """The most probable labels at the other places of a tuple."""
    flat, found = int(table.flatten().argmax()), []
    for size in reversed(table.shape):
        found.append(flat % size)
        flat //= size
    first = [start for j, start in enumerate(tuples.first) if j != place]
    layers = asked.model.spec.layers
    names = [asked.model.labels.classes[start + v] for start, v in zip(first, reversed(found), strict=True)]
    return tuple(name.partition("=")[2] if layers else name for name in names)


def _others(asked: Asked, tuples: Tuples, e: int, place: int) -> tuple[Any, ...]:
    """The other nodes of a tuple, as the user names them."""
    assert asked.shapes is not None
    size, layers = asked.shapes[0].size, asked.model.spec.layers
    T = len(asked.rows[0])  # one example alone has no padding
    found: list[Any] = []
    for j, n in enumerate(tuples.index[0, e].tolist()):
        if j != place:
            named = (layers[n // T], n % T) if layers else n
            found.append(divmod(n, size[1]) if size is not None else named)
    return tuple(found)


def _in_segments(
    asked: Asked, at: Potentials, to: Variable, a: int, b: int
) -> tuple[float, list[Neighbour]]:
    """The transitions into the token and out of it, and the scores of lengths."""
    f, g, h = at.scores
    t, n, names = to.token, len(asked.rows[0]), asked.model.labels.classes
    whole, (node, step) = float(_odds(at, t, to, a, b)[0]), at.ask("walk")
    by_place = by_position(g, at.mask) if g.dim() == 3 else g
    found = []
    for s in (t - 1, t):
        if 0 <= s < n - 1:
            less = by_place.clone()
            less[:, :, s] = 0
            score = whole - float(_odds(replace(at, scores=(f, less, h)), t, to, a, b)[0])
            both = (node[0, 0, s, :, None] * step[0, 0, s]).T if s < t else step[0, 0, s]
            told = [(names[int(both[label].argmax())],) for label in (a, b)]
            found.append(Neighbour("next", (s if s < t else s + 1,), score, *told))
    flat = replace(at, scores=(f, g, torch.zeros_like(h)))
    score = whole - float(_odds(flat, t, to, a, b)[0])
    return whole, [*found, Neighbour("length", tuple(range(n)), score)]
