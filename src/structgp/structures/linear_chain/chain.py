"""The linear chain: structured softmax over label sequences (``eq:struct-softmax``).

p(y | f, g) = exp(sum_t f[t, y_t] + sum_t g[y_t-1, y_t]) / Z(f, g),

with one table g for all positions or one per position. Answers are those of the compiled program.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.errors import InputError
from structgp.structures.base import Curvature, LocalCurvature, Structure
from structgp.structures.layout import Layout
from structgp.structures.linear_chain.second_moments import chain_curvature
from structgp.structures.masks import Rules, keep_known, some_missing
from structgp.structures.program import Program, compile
from structgp.structures.spec import Spec, chain


class Chain(Structure):
    """Linear-chain structured softmax over the labellings that ``rules`` allow, of the templates that
    ``spec`` declares. Labels y that are missing (negative) are summed out. With ``chain(order=0)`` tokens
    are independent and g is not read. Cost O(S B T V^2) unless a method says otherwise."""

    rules: Rules | None = None
    spec: Spec = chain()

    def __init__(self, rules: Rules | None = None, spec: Spec | None = None) -> None:
        self.rules = None if rules is None or rules.is_free else rules
        self.spec = Chain.spec if spec is None else spec
        if self.spec.likelihood != "exact":
            raise InputError("spec", f"{self.spec} is not a chain", "pass chain(), or use Piecewise")

    def __repr__(self) -> str:
        return f"Chain({'' if self.rules is None else 'rules, '}spec={self.spec})"

    def _program(self, mask: Tensor) -> Program:
        return compile(self.spec, Layout(mask), self.rules)

    def _scores(self, f: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        return (f, g) if self.spec.order else (f,)

    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        value = self._program(mask).log_prob(self._scores(f, g), y)
        # The engine asks for a gradient in g, which is 0 without transitions.
        return value if self.spec.order or not g.requires_grad else value + 0 * g.sum()

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self._program(mask).node_marginals(self._scores(f, g))

    def walk(self, f: Tensor, g: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self._program(mask).walk(self._scores(f, g))

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self._program(mask).decode(self._scores(f, g))

    def n_best(self, f: Tensor, g: Tensor, mask: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Cost O(S B T V n (V + n))."""
        return self._program(mask).n_best(self._scores(f, g), n)

    def sample(self, f: Tensor, g: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        return self._program(mask).sample(self._scores(f, g), generator)

    def entropy(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return self._program(mask).entropy(self._scores(f, g))

    def curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> Curvature:
        """Exact second moments of nodes, the same for every y that is known throughout; cost O(S B T^2
        V^3). Exact for a shared table, too; tables by position have that of ``local_curvature``.
        Positions whose label is missing count as flat, so that what they leave is concave; transitions of
        their sequences bend as ``local_curvature`` has it."""
        with torch.no_grad():
            found = chain_curvature(*self.walk(f, g, mask), mask, basis)
            known = (y >= 0) & mask
            part = (known != mask).any(-1)  # (B,) some label is missing
            exact = g.dim() == 3 and self.spec.order > 0
            if exact and not bool(part.any()):
                return found
            local = self.local_curvature(f, g, y, mask, basis).next
            if exact:
                local = torch.where(part[:, None, None], local, found.next)
            both = known[:, None, :, None] & known[:, None, None]
            return Curvature(found.node * both, local)

    def local_curvature(
        self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor, basis: Tensor | None = None
    ) -> LocalCurvature:
        """Variances of each label, and of each label with the next one. With labels missing, what those
        variances lose by the labels that are known; what they gain counts as flat."""
        with torch.no_grad():
            program = self._program(mask)
            scores = program.restrict(self._scores(f, g))
            node, transition = program.variances(scores, basis)
            if some_missing(y, mask):
                told = keep_known(scores[0], y, mask), *scores[1:]
                node_left, left = program.variances(told, basis)
                node, transition = node - node_left, transition - left
            if not self.spec.order:
                transition = torch.zeros_like(transition)
            return LocalCurvature(node.clamp(min=0), transition.clamp(min=0))

    @property
    def takes_single(self) -> bool:
        return type(self) is Chain

    @property
    def handles_missing(self) -> bool:
        return True

    @property
    def ignores_shift(self) -> bool:
        return True
