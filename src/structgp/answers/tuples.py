"""Probabilities of the labels of any template's tuples, averaged over draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from structgp.answers.ask import Asked, Known
from structgp.answers.potentials import Potentials
from structgp.data.batch import Batch
from structgp.errors import InputError

AT_ONCE = 1 << 24
"""Most numbers in the tables of all draws that are held at once; if there are more, a few draws are
processed at a time."""


class TupleMarginals(NamedTuple):
    """The marginals of one example. tuples : (E, a) indices of the tokens or nodes of each tuple; pixels of
    a grid are counted row by row. probabilities : (E, *sizes) those of the tuples' joint labels, in the
    order of ``classes_``; for a layer, its labels in that order."""

    tuples: np.ndarray
    probabilities: np.ndarray


def template_marginals(asked: Asked, name: str, known: Known | None = None) -> list[TupleMarginals]:
    """The answer of ``predict_template_marginals``. Cost: that of the marginals of nodes."""
    model = asked.model
    k = place_of(asked, name)
    template = model.spec.templates[k]
    sizes = _sizes(asked, k)
    empty = TupleMarginals(np.empty((0, template.labels), dtype=np.int64), np.empty((0, *sizes)))
    found = [empty] * len(asked.rows)
    for batch, at in asked.potentials(known):
        p = _averaged(at, k, sizes).cpu().numpy()
        for b, i in enumerate(batch.index.tolist()):
            tuples = _tuples(asked, i, k)
            found[i] = TupleMarginals(tuples, _real(asked, batch, k, p[b], len(tuples)))
    return found


def place_of(asked: Asked, name: str) -> int:
    """Index of the template with that name; InputError if there is none, or if it has no tuples."""
    spec, structure = asked.model.spec, asked.model.structure
    names = [t.name for t in spec.templates]
    if name not in names:
        raise InputError("template", f"{name!r} is not one of this structure", f"use {', '.join(names)}")
    k = names.index(name)
    if spec.templates[k].rule == "length":
        problem = "segments are no tuples of a fixed number of tokens"
        raise InputError("template", problem, "use predict_spans for their probabilities")
    if spec.is_chain and k:
        asked.require("has_walk", "transition marginals")
    if not spec.is_chain and not structure.many_templates:
        raise InputError("template", f"{structure!r} answers without templates", "use predict_marginals")
    return k


def _sizes(asked: Asked, k: int) -> tuple[int, ...]:
    template, split = asked.model.spec.templates[k], asked.model.split
    V = len(asked.model.labels.classes)
    return (V,) * template.labels if asked.links is None else split.sizes(k)


def _averaged(at: Potentials, k: int, sizes: tuple[int, ...]) -> Tensor:
    """(B, E, *sizes) marginals averaged over draws; for nodes, (B, N, V) over all layers."""
    templates, structure = at.structure.spec.templates, at.structure
    if templates[k].rule == "node":
        return at.marginals()
    per_draw = at.mask.numel() * int(np.prod(sizes)) * max(1, len(templates) - 1)
    total: Any = 0
    for some in at.some_draws(max(1, AT_ONCE // max(1, per_draw))):
        total = total + some.average(_of_template(some, structure, k))
    return total


def _of_template(at: Potentials, structure: Any, k: int) -> Tensor:
    """(S, B, E, *sizes) marginals of template k under each draw."""
    if hasattr(structure, "template_marginals"):
        before = sum(t.rule in ("node", "length") for t in structure.spec.templates[:k])
        return at.ask("template_marginals")[k - before]
    node, step = at.ask("walk")
    return node[:, :, :-1, :, None] * step


def _tuples(asked: Asked, i: int, k: int) -> np.ndarray:
    """(E, a) the tuples of example i."""
    template = asked.model.spec.templates[k]
    if template.rule == "node":
        return np.arange(len(asked.rows[i]))[:, None]
    if asked.links is None:
        return np.arange(max(0, len(asked.rows[i]) - 1))[:, None] + np.arange(2)
    before = sum(t.rule in ("node", "length") for t in asked.model.spec.templates[:k])
    return asked.links[i].tuples[k - before]


def _real(asked: Asked, batch: Batch, k: int, p: np.ndarray, n: int) -> np.ndarray:
    """(E, *sizes) the entries of p (E', ...) that are not padding; for nodes, those of the template's
    layer."""
    template, split = asked.model.spec.templates[k], asked.model.split
    if template.rule != "node" or not template.layers:
        return p[:n]
    (layer,) = template.layers
    T = batch.mask.shape[1]
    first, last = split.spans[layer]
    start = T * asked.model.spec.layers.index(layer)
    return p[start : start + n, first:last]
