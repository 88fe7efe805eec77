"""The semi-Markov likelihood: a linear chain with scores of whole spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from structgp.data.layout import GraphLayout
from structgp.errors import InputError
from structgp.structures.base import Curvature, Structure
from structgp.structures.declare import segments
from structgp.structures.masks import Rules, keep_known, leaves_open
from structgp.structures.program import Layout, Scores
from structgp.structures.segments.semi_markov import SegmentsProgram
from structgp.structures.segments.span_scheme import SpanScheme
from structgp.structures.spec import Spec


@dataclass(frozen=True)
class SegmentsCurvature(Curvature):
    """``Curvature`` with two more parts. length : (B, K, L+1) in the scores of lengths. segment :
    (B, T, L, K) in the scores of each possible span, if there are such scores."""

    length: Tensor
    segment: Tensor | None = None


class Segments(Structure):
    """Semi-Markov structured softmax over the labellings that ``rules`` allow. ``scheme`` says which spans
    a labelling has. Labels y that are missing (negative) are summed out.

    In addition to f and g, as for the chain, methods take h (S, K, L+1), scores of spans by type and
    length, the last one for all spans longer than L, and ``segment`` (S, B, T, L, K), scores of each
    possible span by first position, length and type, or None. ``mask`` may be the layout of a graph. Cost
    O(S B T V (V + L)) in usual schemes. The labels alone are not a Markov chain: ``spans`` gives the
    probabilities of spans, and ``walk`` is the chain with the same probabilities of neighbouring labels."""

    ignores_shift = handles_missing = takes_evidence = many_templates = True
    rules: Rules | None = None

    def __init__(self, scheme: SpanScheme, rules: Rules | None = None, spec: Spec | None = None) -> None:
        self.scheme, self.spec = scheme, segments() if spec is None else spec
        self.rules = None if rules is None or rules.is_free else rules

    def __repr__(self) -> str:
        return f"Segments(scheme{'' if self.rules is None else ', rules'})"

    def program(self, mask: Tensor | GraphLayout) -> SegmentsProgram:
        mask = mask.mask if isinstance(mask, GraphLayout) else mask
        return SegmentsProgram(Layout(mask), self.rules, scheme=self.scheme)

    def keep_known(self, scores: Sequence[Tensor], y: Tensor, mask: Any) -> tuple[Tensor, ...]:
        return super().keep_known(scores, y, mask.mask if isinstance(mask, GraphLayout) else mask)

    def log_prob(  # type: ignore[override]
        self, f: Tensor, g: Tensor, h: Tensor, y: Tensor, mask: Tensor, segment: Tensor | None = None
    ) -> Tensor:
        return self.program(mask).log_prob(self._scores(f, g, h, segment), y)

    def marginals(  # type: ignore[override]
        self, f: Tensor, g: Tensor, h: Tensor, mask: Tensor, segment: Tensor | None = None
    ) -> Tensor:
        return self.program(mask).node_marginals(self._scores(f, g, h, segment))

    def log_partition(self, f: Tensor, g: Tensor, h: Tensor, mask: Tensor) -> Tensor:
        """(S, B) log Z."""
        return self.program(mask).log_partition(self._scores(f, g, h, None))

    def spans(self, f: Tensor, g: Tensor, h: Tensor, mask: Tensor, segment: Tensor | None = None) -> Tensor:
        """(S, B, T, L, K) probability of each possible span of up to L tokens, by first position, length
        and type."""
        return self.program(mask).spans(self._scores(f, g, h, segment))

    def walk(self, f: Tensor, g: Tensor, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        node, both, _ = self.program(mask).marginals(self._scores(f, g, h, None))
        before = node[:, :, :-1, :, None]
        return node, both / torch.where(before > 0, before, 1)

    def bends(
        self,
        scores: Sequence[Tensor],
        y: Tensor,
        layout: GraphLayout,
        bases: Sequence[Tensor | None],
        joint: Sequence[bool] = (),
    ) -> list[Tensor]:
        """Like ``Declared.bends``, but without curvature between nodes."""
        basis = None if bases[0] is None else bases[0].to(scores[0])
        f, g, h = scores
        found = self.local_curvature(f, g, h, y, layout.mask, basis)
        return [found.node, found.next, found.length]

    def decode(  # type: ignore[override]
        self, f: Tensor, g: Tensor, h: Tensor, mask: Tensor, segment: Tensor | None = None
    ) -> Tensor:
        return self.program(mask).decode(self._scores(f, g, h, segment))

    def n_best(  # type: ignore[override]
        self, f: Tensor, g: Tensor, h: Tensor, mask: Tensor, n: int, segment: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self.program(mask).n_best(self._scores(f, g, h, segment), n)

    def sample(  # type: ignore[override]
        self, f: Tensor, g: Tensor, h: Tensor, mask: Tensor, generator: Generator,
        segment: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.program(mask).sample(self._scores(f, g, h, segment), generator)

    def entropy(  # type: ignore[override]
        self, f: Tensor, g: Tensor, h: Tensor, mask: Tensor, segment: Tensor | None = None
    ) -> Tensor:
        return self.program(mask).entropy(self._scores(f, g, h, segment))

    def local_curvature(  # type: ignore[override]
        self, f: Tensor, g: Tensor, h: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None,
        segment: Tensor | None = None,
    ) -> SegmentsCurvature:  # fmt: skip
        """Variances of each label, of each label with the next one, and of each span. With labels missing,
        or evidence in their place, the decrease of these variances by what is known; an increase counts as
        0."""
        with torch.no_grad():
            program = self.program(mask)
            scores = program.restrict(self._scores(f, g, h, segment))
            found = program.variances(scores, basis)
            if leaves_open(y, mask):
                left = program.variances((keep_known(scores[0], y, mask), *scores[1:]), basis)
                found = tuple(a - b for a, b in zip(found, left, strict=True))
            return SegmentsCurvature(*(x.clamp(min=0) for x in found))

    def _scores(self, f: Tensor, g: Tensor, h: Tensor, segment: Tensor | None) -> Scores:
        K, V = self.scheme.inside.shape
        if f.shape[-1] != V or h.dim() != 3 or h.shape[1] != K or h.shape[2] < 2:
            problem = f"f has shape {tuple(f.shape)} and h {tuple(h.shape)}, with {V} labels, {K} types"
            raise InputError("scores", problem, "pass f (S, B, T, V), h (S, K, L+1) with L at least 1")
        return (f, g, h) if segment is None else (f, g, h, segment)
