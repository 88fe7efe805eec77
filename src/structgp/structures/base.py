"""What the inference engine may know of a likelihood: its value.

Letters: S draws, B sequences in a batch, T positions (padded), V labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Structure(ABC):
    """A likelihood p(y | f, g) of one labelled structure given its latent values.

    ``log_prob`` is all a new structure must have. The rest is optional; a structure that lacks a
    method says so by leaving the base class's, which raises.
    """

    @abstractmethod
    def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """log p(y | f, g) for each draw and sequence.

        Parameters
        ----------
        f : (S, B, T, V) unary latent values.
        g : (S, V, V) pairwise latent values, row = from, column = to.
        y : (B, T) integer labels; entries where ``mask`` is false are ignored.
        mask : (B, T) true at real positions, which come first in each row.

        Returns
        -------
        (S, B) log-probabilities.
        """

    def marginals(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T, V) probabilities of each label at each position; 0 at padding."""
        raise NotImplementedError(f"{type(self).__name__} offers no marginals")

    def decode(self, f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        """(S, B, T) the most probable labelling of each draw; 0 at padding."""
        raise NotImplementedError(f"{type(self).__name__} offers no decoder")
