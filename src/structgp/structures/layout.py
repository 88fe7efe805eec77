"""Which tuples of each template a padded batch of examples has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """mask : (B, T), true at real positions, which come first in each row."""

    mask: Tensor

    def tuples(self, template: str) -> Tensor:
        """True where a tuple of the template exists: (B, T) for 'node'; (B, T-1) for 'next', where both
        ends exist."""
        if template == "node":
            return self.mask
        return self.mask[:, 1:] & self.mask[:, :-1]
