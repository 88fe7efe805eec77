"""The variational posterior: one block of potentials per template, independent of one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from structgp.gp.block import Entropy


class Posterior(nn.Module):
    """blocks : by the template's name, in the order in which the structure takes their scores; 'node'
    first.

    Blocks are of the families in ``gp.families``. Nobody outside asks which: what an optimiser needs are
    their methods."""

    def __init__(self, blocks: Mapping[str, Any]) -> None:
        super().__init__()
        self._blocks = nn.ModuleDict(blocks)

    @property
    def blocks(self) -> list[Any]:
        return list(self._blocks.values())

    @property
    def names(self) -> list[str]:
        """Of the templates."""
        return list(self._blocks)

    def __getitem__(self, template: str) -> Any:
        return self._blocks[template]

    @property
    def node(self) -> Any:
        return self._blocks["node"]

    @property
    def n_labels(self) -> int:
        return self.node.n_scores

    @property
    def n_components(self) -> int:
        """K of a mixture, 1 for other families."""
        return self.node.n_components

    @property
    def mixing(self) -> Tensor:
        """(K,) weights of the mixture's components."""
        return self.node.mixing

    @property
    def like(self) -> Tensor:
        """A tensor of the posterior's precision and device."""
        return self.node.m

    @property
    def device(self) -> torch.device:
        return self.like.device

    def divergence(self, entropy: Entropy = "bhattacharyya") -> Tensor:
        """sum_b KL(q_b || p_b), or with a mixture a bound above it (``klun``, ``klbin``)."""
        return torch.stack([block.kl(entropy) for block in self.blocks]).sum()

    def snapshot(self) -> dict[str, Tensor]:
        """All parameters as they are now, for ``load_state_dict`` later."""
        return {name: value.detach().clone() for name, value in self.state_dict().items()}

    def round_factor(self) -> None:
        """Rounds the spreads to what a file holds, in place."""
        for block in self.blocks:
            block.round_factor()
