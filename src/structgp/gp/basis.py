"""Which functions the labels are made of: f = h B^T, with one GP for each column of the basis B.

Adding a number to all labels of a position changes no probability of a softmax. With one kernel for all
labels that direction is independent of the others in the prior, and no data ever moves it: leaving it out
is the same model with V - 1 functions, less work and a higher bound. Any rotation of what is left is
still the same model; this one makes the functions as independent as they can be under the data.
"""

from __future__ import annotations

import torch
from torch import Tensor


def contrasts(frequency: Tensor) -> Tensor:
    """(V, V - 1) orthonormal columns that sum to 0, from the frequencies (V,) of the labels.

    They are the principal axes of diag(p) - p p^T, which is how a softmax bends where every token has the
    labels' frequencies: along them its second derivatives do not mix.
    """
    p = frequency.double() / frequency.double().sum().clamp(min=1e-300)
    V = len(p)
    even = torch.full((V, V), 1 / V, dtype=p.dtype)
    centre = torch.eye(V, dtype=p.dtype) - even
    bend = centre @ (p.diag() - p[:, None] * p) @ centre
    # The constant direction gets an eigenvalue below all others, and comes first.
    axes = torch.linalg.eigh(bend - even)[1][:, 1:]
    # Eigenvectors have no sign of their own: the largest entry is positive.
    largest = axes.abs().argmax(0)
    return axes * axes[largest, torch.arange(V - 1)].sign()
