"""The likelihood of a declared structure beyond the chain: templates over any tuples of variables.

Scores are one tensor per template of the spec, in the order of the spec: (S, *sizes) if one table serves
all tuples, else (S, B, E, *sizes). ``layout`` is a ``data.layout.GraphLayout``, in the place of a chain's
mask. With layers, every layer has a node template of its own, but the programs see a single one: (S, B, N,
V) over the labels of all layers, with -inf at the labels of other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Generator, Tensor

from structgp.data.layout import GraphLayout
from structgp.structures.base import Structure
from structgp.structures.graph.factor_graph import GraphProgram
from structgp.structures.graph.program_choice import choose_program
from structgp.structures.masks import Rules, keep_known, leaves_open, shrunk
from structgp.structures.program import TRANSITIONS_AT_ONCE, variance
from structgp.structures.semirings import LOG
from structgp.structures.spec import Spec

STEP = 1e-4
"""Step in a score for differences of marginals. Their error is of the order of its square, plus the
rounding error divided by it."""


class Declared(Structure):
    """The structure that a spec declares, over the labellings that ``rules`` allow. Its cost is that of the
    program chosen for each example (``graph.program_choice``). fitting : True for the likelihood of a fit,
    which needs log Z: a spec that asks for answers by sampling ('gibbs') is then summed as by 'auto'."""

    ignores_shift = handles_missing = takes_evidence = many_templates = True
    has_marginals = has_decoder = has_n_best = has_local_curvature = has_curvature = True

    def __init__(self, spec: Spec, rules: Rules | None = None, fitting: bool = False) -> None:
        self.summed_by = "auto" if fitting and spec.program == "gibbs" else spec.program
        self.spec, self.rules = spec, None if rules is None or rules.is_free else rules
        self.nodes = [k for k, t in enumerate(spec.templates) if t.rule == "node"]
        self.others = [k for k, t in enumerate(spec.templates) if t.rule != "node"]
        self.has_walk = spec.next is not None and not spec.layers and spec.form != "grid"

    def __repr__(self) -> str:
        return f"Declared({self.spec!r})"

    def program(
        self, layout: GraphLayout, scores: Sequence[Tensor], climbing: bool = False
    ) -> GraphProgram:
        """The program that sums over the labellings of these examples. climbing : True for an optimiser."""
        n_labels = sum(scores[k].shape[-1] for k in self.nodes)
        return choose_program(layout, n_labels, self.summed_by, self.spec.most_entries, climbing)

    def gathered(self, scores: Sequence[Tensor], layout: GraphLayout) -> tuple[Tensor, ...]:
        """Scores as programs take them, with -inf at what the rules forbid."""
        f, tables = self._nodes(scores), [scores[k] for k in self.others]
        if self.rules is not None:
            templates = [self.spec.templates[k] for k in self.others]
            f, tables = self.rules.restrict_graph(f, tables, templates, layout)
        return f, *tables

    def _nodes(self, scores: Sequence[Tensor]) -> Tensor:
        """(S, B, N, V) scores of all variables."""
        if len(self.nodes) == 1:
            return scores[self.nodes[0]]
        V, parts = sum(scores[k].shape[-1] for k in self.nodes), []
        for k in self.nodes:
            start = self._first_label(k, scores)
            around = start, V - start - scores[k].shape[-1]
            parts.append(torch.nn.functional.pad(scores[k], around, value=-torch.inf))
        return torch.cat(parts, 2)

    def log_prob(self, *given: Any) -> Tensor:
        """(S, B) log-probabilities, from scores, y (B, N) and layout."""
        *scores, y, layout = given
        climbing = torch.is_grad_enabled() and any(x.requires_grad for x in scores)
        return self.program(layout, scores, climbing).log_prob(self.gathered(scores, layout), y)

    def keep_known(self, scores: Sequence[Tensor], y: Tensor, layout: GraphLayout) -> tuple[Tensor, ...]:
        """Scores in which, where the label y is known (not negative), all other labels have -inf; or scores
        plus evidence y (B, N, V)."""
        found, T = list(scores), scores[self.nodes[0]].shape[2]
        for layer, k in enumerate(self.nodes):
            start = self._first_label(k, scores)
            some = slice(layer * T, (layer + 1) * T)
            if y.is_floating_point():
                own = y[:, some, start : start + scores[k].shape[-1]]
            else:
                own = torch.where(y[:, some] >= 0, y[:, some] - start, y[:, some])
            found[k] = keep_known(found[k], own, layout.mask[:, some])
        return tuple(found)

    def shifted(self, scores: Sequence[Tensor], shift: Tensor) -> list[Tensor]:
        found = list(scores)
        for k in self.nodes:
            start = self._first_label(k, scores)
            found[k] = scores[k] + shift[start : start + scores[k].shape[-1]].to(scores[k])
        return found

    def _first_label(self, k: int, scores: Sequence[Tensor]) -> int:
        """First label of node template k among the labels of all layers, with layers sorted by name."""
        names = [self.spec.templates[n].layers for n in self.nodes]
        before = [
            n for n, name in zip(self.nodes, names, strict=True) if name < self.spec.templates[k].layers
        ]
        return sum(scores[n].shape[-1] for n in before)

    def marginals(self, *given: Any) -> Tensor:
        """(S, B, N, V) probabilities of labels, from scores and layout."""
        *scores, layout = given
        program = self.program(layout, scores)
        parts = _split(scores, layout)
        return torch.cat([program.node_marginals(self.gathered(some, layout)) for some in parts])

    def template_marginals(self, *given: Any) -> tuple[Tensor, ...]:
        """For each template of the spec other than nodes, (S, B, E, *sizes) probabilities of the labels of
        its tuples."""
        *scores, layout = given
        return self.program(layout, scores).marginals(self.gathered(scores, layout))[1:]

    def walk(self, *given: Any) -> tuple[Tensor, Tensor]:
        """The Markov chain over the tokens with the same probabilities of each label with the next one;
        answers about spans are derived from it."""
        *scores, layout = given
        program, found = self.program(layout, scores), []
        assert self.spec.next is not None
        place = [self.spec.templates[k].name for k in self.others].index(self.spec.next.name)
        for some in _split(scores, layout):
            node, *rest = program.marginals(self.gathered(some, layout))
            before = node[:, :, :-1, :, None]
            # A view would keep the tables of all templates.
            found.append((node.clone(), rest[place] / torch.where(before > 0, before, 1)))
        nodes, steps = zip(*found, strict=True)
        return torch.cat(nodes), torch.cat(steps)

    def decode(self, *given: Any) -> Tensor:
        *scores, layout = given
        return self.program(layout, scores).decode(self.gathered(scores, layout))

    def log_partition(self, *given: Any) -> Tensor:
        """(S, B) log Z, from scores and layout."""
        *scores, layout = given
        return self.program(layout, scores).log_total(self.gathered(scores, layout), LOG)

    def best_allowed(self, gain: Tensor, layout: GraphLayout) -> Tensor:
        """(S, B, N) the labelling that the rules allow with the largest sum of gains (S, B, N, V)."""
        tables = [gain.new_zeros((len(gain), *tuples.sizes)) for tuples in layout.tuples]
        if self.rules is not None:
            templates = [self.spec.templates[k] for k in self.others]
            gain, tables = self.rules.restrict_graph(gain, tables, templates, layout)
        program = choose_program(layout, gain.shape[-1], self.summed_by, self.spec.most_entries)
        return program.decode((gain, *tables))

    def has_labelling(self, scores: Sequence[Tensor], layout: GraphLayout) -> Tensor:
        """(B,) False where the rules and scores of -inf are known to leave no labelling. This is certain
        where the sum over labellings is exact."""
        if self.summed_by == "gibbs":  # sampling gives no sum
            return torch.ones(len(layout), dtype=torch.bool)
        free = [torch.where(x > -torch.inf, 0.0, -torch.inf)[:1] for x in scores]
        total = self.program(layout, free).log_total(self.gathered(free, layout), LOG)
        return ~(total[0] == -torch.inf)

    def is_exact(self, *given: Any) -> bool:
        """True if the labellings of all these examples are summed over exactly, from scores and layout."""
        *scores, layout = given
        return self.program(layout, scores).exact

    def n_best(self, *given: Any) -> tuple[Tensor, Tensor]:
        *scores, layout, n = given
        return self.program(layout, scores).n_best(self.gathered(scores, layout), n)

    def sample(self, *given: Any) -> Tensor:
        generator: Generator
        *scores, layout, generator = given
        return self.program(layout, scores).sample(self.gathered(scores, layout), generator)

    def entropy(self, *given: Any) -> Tensor:
        *scores, layout = given
        program = self.program(layout, scores)
        return torch.cat([program.entropy(self.gathered(some, layout)) for some in _split(scores, layout)])

    def bracket(self, *given: Any) -> tuple[Tensor, Tensor]:
        """Lower and upper bound of log Z, (S, B) each; equal where the program is exact."""
        *scores, layout = given
        return self.program(layout, scores).bracket(self.gathered(scores, layout))

    def bends(
        self,
        scores: Sequence[Tensor],
        y: Tensor,
        layout: GraphLayout,
        bases: Sequence[Tensor | None],
        joint: Sequence[bool] = (),
    ) -> list[Tensor]:
        """Minus the second derivatives of log p in the functions of each template, tuple by tuple, averaged
        over draws: (B, E, R) along the columns of its basis (P, R), or (B, E, *sizes) without a basis;
        summed over tuples where one table serves all of them. Negative values, which occur with missing
        labels, are clamped to 0, as if log p were concave. joint : for each node template, True if the
        second derivatives between the nodes of an example are wanted too, (B, R, T, T)."""
        with torch.no_grad():
            found = self._variances(scores, layout, bases)
            if leaves_open(y, layout.mask):
                told = self._variances(self.keep_known(scores, y, layout), layout, bases)
                found = [a - b for a, b in zip(found, told, strict=True)]
            found = [bend.clamp(min=0) for bend in found]
            for layer, k in enumerate(self.nodes):
                if any(joint) and joint[k]:
                    whole = self._covariances(scores, y, layout, layer, bases[k])
                    found[k] = shrunk(whole, found[k]) if y.is_floating_point() else whole
            return found

    def _covariances(
        self, scores: Sequence[Tensor], y: Tensor, layout: GraphLayout, layer: int, basis: Tensor | None
    ) -> Tensor:
        """(B, R, T, T) covariances of the labels of one layer, averaged over draws: differences of
        marginals as the scores of each node move. Nodes whose label is missing get 0; under evidence, no
        node counts as missing. Cost: 2 T R times that of the marginals."""
        k, program = self.nodes[layer], self.program(layout, scores)
        _, B, T, V = scores[k].shape
        basis = torch.eye(V).to(scores[k]) if basis is None else basis.to(scores[k])
        start, R = self._first_label(k, scores), basis.shape[1]
        found = scores[k].new_zeros((B, R, T, T))
        for t in range(T):
            for r in range(R):
                ends = []
                for step in (STEP, -STEP):
                    moved = list(scores)
                    moved[k] = scores[k].clone()
                    moved[k][:, :, t] += step * basis[:, r]
                    p = program.node_marginals(self.gathered(moved, layout))
                    own = p[:, :, layer * T : (layer + 1) * T, start : start + V]
                    ends.append((own @ basis[:, r]).mean(0))  # (B, T)
                found[:, r, t] = (ends[0] - ends[1]) / (2 * STEP)
        known = layout.mask if y.is_floating_point() else (y >= 0) & layout.mask
        known = known[:, layer * T : (layer + 1) * T]
        both = known[:, None, :, None] & known[:, None, None]
        return 0.5 * (found + found.mT) * both

    def _variances(
        self, scores: Sequence[Tensor], layout: GraphLayout, bases: Sequence[Tensor | None]
    ) -> list[Tensor]:
        program, S = self.program(layout, scores, climbing=True), len(scores[0])
        total = [torch.zeros(())] * len(scores)
        for some in _split(scores, layout):
            node, *rest = program.slopes(self.gathered(some, layout))
            marginals: dict[int, Tensor] = dict(zip(self.others, rest, strict=True))
            T = node.shape[2] // len(self.nodes)
            for layer, k in enumerate(self.nodes):
                start = self._first_label(k, scores)
                size = scores[k].shape[-1]
                marginals[k] = node[:, :, layer * T : (layer + 1) * T, start : start + size]
            for k, p in marginals.items():
                basis = bases[k]
                flat = p if basis is None else p.flatten(3)
                bend = variance(flat, None if basis is None else basis.to(p)).sum(0)
                shared = scores[k].dim() == p.dim() - 2
                total[k] = total[k].to(p) + (bend.sum(1) if shared else bend)
        return [bend / S for bend in total]


def _split(scores: Sequence[Tensor], layout: GraphLayout) -> Any:
    """Scores of some draws at a time, so that the tables of all tuples fit into memory."""
    entries = scores[0][0].numel() + sum(t.mask.numel() * prod(t.sizes) for t in layout.tuples)
    at_once = max(1, TRANSITIONS_AT_ONCE // max(1, entries))
    return zip(*(x.split(at_once) for x in scores), strict=True)
