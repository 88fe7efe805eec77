"""The spans of a labelling: their types, their boundaries, and the spans of known labels.

Letters: B sequences, T positions (padded), V labels, K types of spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.evaluation.metrics import chunks


@dataclass(frozen=True, eq=False)
class SpanScheme:
    """inside : (K, V) bool, whether a label belongs to a span of that type; a label of no type is outside
    all spans. parts : (V, V) bool, whether a boundary lies between a label (row) and the next (column);
    there always is one next to a label outside of spans, and between two types."""

    inside: Tensor
    parts: Tensor

    def __post_init__(self) -> None:
        V = self.inside.shape[-1]
        if self.inside.dim() != 2 or self.parts.shape != (V, V):
            shapes = f"{tuple(self.inside.shape)} and {tuple(self.parts.shape)}"
            raise InputError("scheme", f"inside and parts have shapes {shapes}", "pass (K, V) and (V, V)")
        if bool((self.inside.sum(0) > 1).any()):
            raise InputError("scheme.inside", "a label belongs to two types", "give each label one type")
        same = (self.inside[:, :, None] & self.inside[:, None]).any(0)
        if bool((~same & ~self.parts).any()):
            remedy = "set parts there: only labels of one type can be in one span"
            raise InputError(
                "scheme.parts", "labels of different types, or outside, are not parted", remedy
            )

    @staticmethod
    def of(classes: Sequence[str]) -> SpanScheme:
        """Spans as ``metrics.chunks`` reads them off BIO, IOBES, BILOU or IO labels, types in alphabetical
        order; except that successive equal labels without a prefix are one span."""
        alone = [chunks([label]) for label in classes]  # one span, or none
        kinds = SpanScheme.types_of(classes)
        inside = [[(0, 1, kind) in spans for spans in alone] for kind in kinds]
        parts = [[(0, 2) not in [span[:2] for span in chunks([i, j])] for j in classes] for i in classes]
        for v, label in enumerate(classes):
            parts[v][v] &= alone[v] != [(0, 1, label)]
        whether = torch.tensor(inside, dtype=torch.bool).view(len(kinds), len(classes))
        return SpanScheme(whether, torch.tensor(parts, dtype=torch.bool))

    @staticmethod
    def types_of(classes: Sequence[str]) -> list[str]:
        """Types of spans, in alphabetical order."""
        return sorted({kind for label in classes for *_, kind in chunks([label])})

    @staticmethod
    def runs(V: int) -> SpanScheme:
        """Every label is its own type, and its spans are runs of it: lengths are durations."""
        same = torch.eye(V, dtype=torch.bool)
        return SpanScheme(same, ~same)

    @cached_property
    def kinds(self) -> Tensor:
        """(V,) the type of each label; K for labels that are outside."""
        K = len(self.inside)
        return torch.where(self.inside.any(0), self.inside.long().argmax(0) if K else K, K)

    @cached_property
    def pairs(self) -> Tensor:
        """(P, 2) every label with each label that can continue its span."""
        return (~self.parts).nonzero()

    @cached_property
    def before(self) -> tuple[Tensor, Tensor]:
        """(V, M) the labels whose span each label can continue, and which of these entries are real."""
        counts = (~self.parts).sum(0)
        M = max(1, int(counts.max())) if counts.numel() else 1
        order = self.parts.long().argsort(dim=0, stable=True)[:M].T
        return order, torch.arange(M, device=counts.device) < counts[:, None]

    def to(self, device: torch.device) -> SpanScheme:
        if self.parts.device == device:
            return self
        kept: dict[torch.device, SpanScheme] = self.__dict__.setdefault("_copies", {})
        if device not in kept:
            kept[device] = SpanScheme(self.inside.to(device), self.parts.to(device))
        return kept[device]

    def spans(self, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The spans of labels y (B, T), each given at its last position: (B, T) bool, whether a span ends
        there; (B, T) its type; (B, T) its first position. Where no span ends, the latter two mean
        nothing."""
        T = y.shape[1]
        y = torch.where(mask, y, 0)
        begins = torch.ones_like(mask)
        begins[:, 1:] = self.parts[y[:, :-1], y[:, 1:]] | ~mask[:, 1:]
        kind = self.kinds[y]
        ends = mask & (kind < len(self.inside))
        ends[:, :-1] &= begins[:, 1:]
        first = torch.where(begins, torch.arange(T, device=y.device), 0).cummax(1).values if T else y
        return ends, kind, first
