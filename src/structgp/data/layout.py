"""Which variables and factors the examples of a padded batch have.

Letters: B examples in a batch, N variables of an example (padded), V labels, E tuples of a template in an
example (padded), a labels per tuple.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tuples:
    """The tuples of one template. index : (B, E, a) the variables of each tuple, all different; 0 at
    padding. mask : (B, E) true at real tuples. first, sizes : (a,) each; the label at place j of a tuple is
    one of the ``sizes[j]`` labels from ``first[j]`` on."""

    name: str
    index: Tensor
    mask: Tensor
    first: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def arity(self) -> int:
        return len(self.sizes)

    def places(self, y: Tensor) -> Tensor:
        """(B, E) the entry of a flat table (prod sizes,) that labelling y (B, N) picks at each tuple; 0 at
        padding."""
        B, E, a = self.index.shape
        labels = y.gather(1, self.index.flatten(1)).view(B, E, a)
        place = torch.zeros_like(labels[..., 0])
        for j, (first, size) in enumerate(zip(self.first, self.sizes, strict=True)):
            place = place * size + (labels[..., j] - first)
        return torch.where(self.mask, place, 0)


@dataclass(frozen=True)
class GraphLayout:
    """mask : (B, N) true at real variables, which come first in each row unless ``span`` says otherwise.
    tuples : one entry per template other than the nodes. span : (B, N, 2) first label of each variable and
    one past its last, None if every variable takes all V labels. Two layouts with equal ``key`` have the
    same programs."""

    mask: Tensor
    tuples: tuple[Tuples, ...] = ()
    span: Tensor | None = None

    def __len__(self) -> int:
        return len(self.mask)

    @cached_property
    def key(self) -> bytes:
        """Identifies this topology: layouts with equal keys have the same variables, tuples and spans."""
        parts = [self.mask, *(x for t in self.tuples for x in (t.index, t.mask))]
        parts += [] if self.span is None else [self.span]
        told = [repr((t.first, t.sizes)).encode() for t in self.tuples]
        return b"|".join(
            [
                *told,
                *(bytes(str(tuple(x.shape)), "ascii") for x in parts),
                *(x.cpu().numpy().tobytes() for x in parts),
            ]
        )

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """Cache in which programs keep what they need the next time they meet this layout."""
        return {}

    def to(self, device: str | torch.device) -> GraphLayout:
        if torch.device(device) == self.mask.device:
            return self
        tuples = tuple(replace(t, index=t.index.to(device), mask=t.mask.to(device)) for t in self.tuples)
        span = None if self.span is None else self.span.to(device)
        return GraphLayout(self.mask.to(device), tuples, span)

    def rows(self, index: Sequence[int] | Tensor) -> GraphLayout:
        """The layout of the examples ``index``, in this order; an example may come several times."""
        at = torch.as_tensor(index, dtype=torch.long, device=self.mask.device)
        tuples = tuple(replace(t, index=t.index[at], mask=t.mask[at]) for t in self.tuples)
        return GraphLayout(self.mask[at], tuples, None if self.span is None else self.span[at])
