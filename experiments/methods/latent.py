"""GPstruct on its training tokens: a GP with the linear kernel for each label, and the linear chain.

    f_v = X w_v,  w_v ~ N(0, s^2 I)  for each label v,    g ~ N(0, sd^2 I),    p(y | f, g): Chain

is the same model as f_v ~ GP(0, s^2 X X^T). Two things are left out because no data can tell about them:
the direction in which all labels move alike (f = h B^T with ``contrasts`` B), and directions of w that no
training token depends on (h = phi z with as many coordinates z as the rank of X). The rest is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from experiments.methods.design import Tokens
from structgp.data.batch import by_length
from structgp.errors import InputError
from structgp.structures import Chain

LARGEST_RANK = 6000
RANK_TOLERANCE = 1e-10


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of the linear kernel, from s X = U diag(scale) Q^T. phi : (N, R) U diag(scale), so that
    h = phi z with z standard normal. directions : (D, R) s Q, so that new tokens have
    E[h* | h] = X* directions z."""

    phi: Tensor
    scale: Tensor
    directions: Tensor

    @staticmethod
    def of(features: csr_array, sd: float) -> Coordinates:
        """Cost O(min(N, D)^3)."""
        N, D = features.shape
        if min(N, D) > LARGEST_RANK:
            raise InputError(
                "X",
                f"{N} tokens with {D} features are too many for a full Gaussian process",
                f"pass at most {LARGEST_RANK} tokens, or use StructuredGPClassifier",
            )
        x = sd * features
        gram = (x.T @ x if D <= N else x @ x.T).toarray()
        values, vectors = np.linalg.eigh(gram)
        kept = values > RANK_TOLERANCE * max(values[-1], 1e-300)
        scale, vectors = np.sqrt(values[kept]), vectors[:, kept]
        if D <= N:
            phi, directions = x @ vectors, sd * vectors
        else:
            phi, directions = vectors * scale, sd * (x.T @ (vectors / scale))
        parts = (np.ascontiguousarray(a) for a in (phi, scale, directions))
        return Coordinates(*map(torch.from_numpy, parts))

    def inverse(self, h: Tensor) -> Tensor:
        """(..., R, C) the coordinates z of h = phi z (..., N, C)."""
        return (self.phi.T @ h) / self.scale.square()[:, None]


@dataclass(frozen=True)
class Part:
    """Sequences of similar length. token : (B, T) index of each position among all N tokens. y, mask : (B,
    T)."""

    token: Tensor
    y: Tensor
    mask: Tensor


@dataclass(frozen=True)
class LatentChain:
    """log p(y | f, g) of all sequences, where f = h basis^T. basis : (V, C)."""

    parts: list[Part]
    basis: Tensor
    n_tokens: int

    @staticmethod
    def of(tokens: Tokens, y: Sequence[np.ndarray] | None, basis: Tensor) -> LatentChain:
        n_tokens, starts = sum(tokens.lengths), tokens.starts
        parts = []
        # Two or three parts, since each costs a pass over its longest sequence, whatever its size.
        for index in by_length(tokens.lengths, max(1, n_tokens // 2)):
            T = max(tokens.lengths[i] for i in index)
            token = torch.zeros(len(index), T, dtype=torch.int64)
            labels, mask = torch.zeros_like(token), torch.zeros_like(token, dtype=torch.bool)
            for b, i in enumerate(index):
                here = slice(0, tokens.lengths[i])
                token[b, here] = torch.arange(starts[i], starts[i + 1])
                mask[b, here] = True
                if y is not None:
                    labels[b, here] = torch.from_numpy(y[i])
            parts.append(Part(token, labels, mask))
        return LatentChain(parts, basis, n_tokens)

    def log_prob(self, h: Tensor, g: Tensor) -> Tensor:
        """(S,) log-likelihoods for h (S, N, C) and g (S, V, V). Cost O(S N V^2)."""
        f, chain = h @ self.basis.T, Chain()
        values = [chain.log_prob(f[:, p.token], g, p.y, p.mask).sum(1) for p in self.parts]
        return torch.stack(values).sum(0)

    def slope(self, h: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C) and (V, V), the gradients in h and g, averaged over draws."""
        h, g = h.detach().requires_grad_(), g.detach().requires_grad_()
        slope_h, slope_g = torch.autograd.grad(self.log_prob(h, g).sum() / len(h), [h, g])
        return slope_h.sum(0), slope_g.sum(0)

    def bend(self, h: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """(N, C) and (V, V), the negative second derivatives for each position, averaged over draws."""
        f = h @ self.basis.T
        node = h.new_zeros(h.shape[1:])
        table = torch.zeros_like(g[0])
        for part in self.parts:
            found = Chain().local_curvature(f[:, part.token], g, part.y, part.mask, self.basis)
            node[part.token[part.mask]] = found.node[part.mask]
            table += found.next.sum(0)
        return node, table

    def marginals(self, h: Tensor, g: Tensor) -> Tensor:
        """(N, V) label probabilities, averaged over draws."""
        f = h @ self.basis.T
        found = h.new_zeros(self.n_tokens, len(self.basis))
        for part in self.parts:
            p = Chain().marginals(f[:, part.token], g, part.mask).mean(0)
            found[part.token[part.mask]] = p[part.mask]
        return found
