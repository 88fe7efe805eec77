"""Scores of -inf for what is impossible: one mechanism for rules, known labels and missing labels.

A rule that label j never follows label i puts -inf at g[i, j]. A rule on how a sequence begins or ends, or
a known label, puts -inf at all other labels of the position. What remains is summed over or maximised as
before. Evidence about a label, such as what annotators said, adds a finite number to the score of each
label: a known label is the limit in which all others get -inf, and a missing label adds 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """What is allowed. follows : (V, V) bool, row = from, column = to. starts, ends : (V,) bool. more :
    ``(*sizes)`` bool by the name of a template."""

    follows: Tensor
    starts: Tensor
    ends: Tensor
    more: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, allowed: Any) -> Rules:
        """Rules from arrays, a :class:`structgp.data.schemes.Allowed`."""
        follows, starts, ends = map(torch.from_numpy, (allowed.follows, allowed.starts, allowed.ends))
        more = {name: torch.from_numpy(table) for name, table in allowed.more.items()}
        return cls(follows, starts, ends, more)

    def restrict(self, scores: Sequence[Tensor], mask: Tensor) -> tuple[Tensor, ...]:
        """Scores (S, B, T, V) of nodes and, if given, (..., V, V) of transitions, with -inf at what is not
        allowed. Rules on transitions add a table (S, V, V) where there is none."""
        f, *tables = scores
        follows, starts, ends = (x.to(f.device) for x in (self.follows, self.starts, self.ends))
        if not tables and not bool(follows.all()):
            tables = [f.new_zeros((len(f), *follows.shape))]
        last = mask.clone()
        last[:, :-1] &= ~mask[:, 1:]
        banned = last[..., None] & ~ends  # (B, T, V)
        banned[:, 0] |= ~starts
        nodes = f.masked_fill(banned & mask[..., None], -torch.inf)
        return nodes, *(g.masked_fill(~follows, -torch.inf) for g in tables)

    def restrict_graph(
        self, f: Tensor, tables: Sequence[Tensor], templates: Sequence[Any], layout: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """Scores of nodes (S, B, N, V) and of the tuples of each template, with -inf at what is not
        allowed: rules on transitions apply to the template of neighbours in a sequence."""
        found = []
        for g, template in zip(tables, templates, strict=True):
            rule = self.more.get(template.name)
            if template.rule == "next" and template.labels == 2 and not template.layers:
                rule = self.follows if rule is None else rule & self.follows
            found.append(g if rule is None else g.masked_fill(~rule.to(g.device), -torch.inf))
        if not bool(self.starts.all() and self.ends.all()):
            (f,) = Rules(torch.ones_like(self.follows), self.starts, self.ends).restrict((f,), layout.mask)
        return f, found

    @cached_property
    def is_free(self) -> bool:
        free = self.follows.all() and self.starts.all() and self.ends.all()
        return bool(free and all(rule.all() for rule in self.more.values()))


def leaves_open(y: Tensor, mask: Tensor) -> bool:
    """True if y leaves labels to be summed over: it is labels (B, T) of which some are missing, or evidence
    (B, T, V) in place of labels."""
    return y.is_floating_point() or bool(((y < 0) & mask).any())


def keep_known(f: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """f (S, B, T, V) with -inf at all labels but y (B, T), where y is known (not negative); or with
    evidence y (B, T, V) added, the log-likelihood of what was seen given each label."""
    if y.is_floating_point():
        return f + torch.where(mask[..., None], y, 0).to(f)
    known = (y >= 0) & mask
    others = torch.arange(f.shape[-1], device=f.device) != y[..., None]
    return f.masked_fill(others & known[..., None], -torch.inf)


def shrunk(whole: Tensor, local: Tensor) -> Tensor:
    """The curvature ``whole`` (B, R, T, T) of fully known labels, with rows and columns scaled down so that
    the diagonal is the curvature under evidence, ``local`` (B, T, R), not negative. It stays positive
    semi-definite."""
    full = whole.diagonal(dim1=-1, dim2=-2)  # (B, R, T)
    share = torch.where(full > 0, local.mT / full.clamp(min=1e-300), 0).clamp(max=1).sqrt()
    return whole * share[..., :, None] * share[..., None, :]


def steps_to_anywhere(follows: Tensor) -> int | None:
    """The least number of steps after which every label can follow every label; None if there is none.

    ``follows`` : (V, V) bool. Such a number is at most V^2 - 2 V + 2 (Wielandt)."""
    V = len(follows)
    step = follows.to(torch.float64)
    reach = step.clone()
    for n in range(1, V * V - 2 * V + 3):
        if bool((reach > 0).all()):
            return n
        reach = ((reach @ step) > 0).to(torch.float64)
    return None
