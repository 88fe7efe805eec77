"""Forward-backward in probability space, compiled by numba: no Python within the loop.

One chain at a time, with all its numbers in the nearest cache: potentials are read from memory, gradients
are written to it, and nothing else. Messages are in double precision even where potentials are not: in the
cache that costs next to nothing, and wide potentials need no second try. The backward pass repeats the
forward pass rather than keep its messages: fresh memory for them would cost more than computing them again.
The product of a message and the transitions is V sums along rows, which the compiler turns into vector
instructions; these add in a different order, so results differ from those of ``Scaled`` by rounding. Units
of whole chains are shared out to threads, so the result does not depend on how many there are.

Needs numba (``structgp[fast]``), which compiles at the first use and keeps the compiled code in a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from structgp.structures.linear_chain.lane_exp import exp_in_place
from structgp.threads import share

# Most chains in a unit of work, all of one draw. Gradients of a shared table are summed unit by unit.
CHAINS_AT_ONCE = 16
# What the backward pass gives beside node marginals: gradients in g, transition matrices, or variances.
GRADIENTS, STEPS, VARIANCES = range(3)

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


class Compiled:
    """``Messages`` for float32 and float64 on the CPU.

    ``spread`` : largest log-ratio within a message that the potentials allow; inf or nan where some
    potentials are. ``finite_spread`` : the same without potentials of -inf. ``is_barred`` : whether tokens
    other than the first and the last have potentials of -inf. log Z is -inf where a sequence has no
    labelling. With tables by position their exponentials, O(T V^2) per sequence, are most of the work."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor) -> None:
        self._shape, self._shared = f.shape, g.dim() == 3
        g = g[:, None, None] if self._shared else g  # (S, B or 1, T-1 or 1, V, V)
        self._given = f.contiguous().numpy(), g.contiguous().numpy(), self._shared, mask.sum(-1).numpy()
        log_z, spread = self._empty(*f.shape[:2]), self._empty(3, *f.shape[:2])
        self._share(_forward, log_z, spread)
        self.log_z, self.spread = torch.from_numpy(log_z), float(spread[0].max())
        self.finite_spread, self.is_barred = float(spread[1].max()), bool(spread[2].any())

    def _empty(self, *shape: int) -> np.ndarray:
        # NumPy asks for large pages, torch does not: first use of its memory would cost more than the work.
        return np.empty(shape, self._given[0].dtype)

    def _share(self, work: Callable[..., object], *arrays: Any) -> None:
        """Shares out the units of work to threads, first..last to each."""
        S, B, T, V = self._shape
        units = S * -(-B // CHAINS_AT_ONCE)
        share(partial(work, *self._given, *arrays), units, S * B * T * V * V)

    @property
    def ends_nowhere(self) -> bool:
        """True if some sequence has no labelling at all."""
        return bool((self.log_z == -torch.inf).any())

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        nodes, tables = self._passes(GRADIENTS, weight)
        return nodes, tables.sum((1, 2)) if self._shared else tables

    def node_marginals(self) -> Tensor:
        return self._passes(GRADIENTS)[0]

    def walk(self) -> tuple[Tensor, Tensor]:
        return self._passes(STEPS)

    def next_variances(self) -> tuple[Tensor, Tensor]:
        nodes, tables = self._passes(VARIANCES)
        return nodes, tables.squeeze(2) if self._shared else tables

    def _passes(self, what: int, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Node marginals (S, B, T, V) times weight (S, B), and tables (S, B, T-1, V, V): with one shared
        table, gradients are (S, units of a draw, 1, V, V), and variances (S, B, 1, V, V)."""
        S, B, T, V = self._shape
        rows = -(-B // CHAINS_AT_ONCE) if self._shared and what == GRADIENTS else B
        steps = 1 if self._shared and what != STEPS else T - 1
        weight = torch.ones_like(self.log_z) if weight is None else weight.detach().contiguous()
        nodes, tables = self._empty(*self._shape), self._empty(S, rows, steps, V, V)
        self._share(_backward, what, weight.numpy(), nodes, tables)
        return torch.from_numpy(nodes), torch.from_numpy(tables)


@_reordered
def _multiply(matrix: Any, vector: Any, out: Any) -> None:
    """out <- matrix times vector, four rows at a time: a number of the vector that is loaded serves all
    four."""
    row, zero = 0, vector.dtype.type(0)
    while row + 4 <= len(out):
        a = b = c = d = zero
        for i in range(len(vector)):
            a += matrix[row, i] * vector[i]
            b += matrix[row + 1, i] * vector[i]
            c += matrix[row + 2, i] * vector[i]
            d += matrix[row + 3, i] * vector[i]
        out[row], out[row + 1], out[row + 2], out[row + 3] = a, b, c, d
        row += 4
    while row < len(out):
        a = zero
        for i in range(len(vector)):
            a += matrix[row, i] * vector[i]
        out[row] = a
        row += 1


@_compiled
def _add_transitions(alpha: Any, passed: Any, n: int, weight: Any, table: Any) -> None:
    """table (V, V) += weight * sum_t alpha[t - 1] passed[t]^T, four positions at a time: ``table`` is read
    and written once for four terms."""
    V, t = len(table), 1
    while t + 4 <= n:
        for i in range(V):
            a, b = weight * alpha[t - 1, i], weight * alpha[t, i]
            c, d = weight * alpha[t + 1, i], weight * alpha[t + 2, i]
            for j in range(V):
                table[i, j] += (
                    a * passed[t, j] + b * passed[t + 1, j] + c * passed[t + 2, j] + d * passed[t + 3, j]
                )
        t += 4
    while t < n:
        for i in range(V):
            a = weight * alpha[t - 1, i]
            for j in range(V):
                table[i, j] += a * passed[t, j]
        t += 1


@_compiled
def _set_tables(
    what: int, alpha: Any, edge: Any, shared: bool, beta: Any, passed: Any, n: int, weight: Any, out: Any
) -> None:
    """out (T-1, V, V) <- at each position, according to ``what``: weight times the probabilities of
    transitions, the transition matrix of the posterior, or p (1 - p), which is summed over positions if out
    is (1, V, V)."""
    V = out.shape[1]
    out[0 if what == VARIANCES else max(n - 1, 0) :].fill(0)
    for t in range(n - 1):
        step, table = edge[0 if shared else t], out[min(t, len(out) - 1)]
        for i in range(V):
            a = alpha[t, i]
            if what == VARIANCES:
                for j in range(V):
                    p = a * step[i, j] * passed[t + 1, j]
                    table[i, j] += p - p * p
                continue
            a *= weight
            if what == STEPS:  # a label that nothing can follow: a row of zeros
                a = 1 / beta[t, i] if beta[t, i] > 0 else beta[t, i]
            for j in range(V):
                table[i, j] = a * step[i, j] * passed[t + 1, j]


@_reordered
def _sum(x: Any) -> Any:
    total = x.dtype.type(0)
    for i in range(len(x)):
        total += x[i]
    return total


@_compiled
def _exponentiate(x: Any, n: int, out: Any) -> Any:
    """Row t of out (T, W) <- exp(x[t] - max x[t]), for the first n rows of x. Returns the sum of the
    maxima; the largest spread within a row, nan if there is a nan; the same without -inf; and whether a row
    other than the first and the last has -inf."""
    total, spread, n = 0.0, x.dtype.type(0), max(n, 0)
    finite, barred = x.dtype.type(0), False
    for t in range(n):
        low = high = x[t, 0]
        for i in range(1, x.shape[1]):
            low = x[t, i] if x[t, i] < low else low
            high = x[t, i] if x[t, i] > high else high
        least = low
        if low == -np.inf:
            barred, least = barred or 0 < t < n - 1, high
            for i in range(x.shape[1]):
                least = x[t, i] if -np.inf < x[t, i] < least else least
        finite = max(finite, high - least)
        for i in range(x.shape[1]):
            out[t, i] = x[t, i] - high
        total += high
        wide = high - low  # nan where all are -inf
        spread = wide if wide > spread or wide != wide else spread
    flat = out[:n].reshape(n * x.shape[1])
    exp_in_place(flat)
    return total, spread + 0 * _sum(flat), finite, barred


@_compiled
def _exponentiate_edges(g: Any, n: int, edge: Any, edge_t: Any) -> Any:
    """``_exponentiate`` of the first n tables g (T-1, V, V), each as one row; edge_t <- their
    transposes."""
    V = g.shape[1]
    found = _exponentiate(g.reshape(len(g), V * V), n, edge.reshape(len(g), V * V))
    for t in range(n):
        for i in range(V):
            for j in range(V):
                edge_t[t, j, i] = edge[t, i, j]
    return found


@_compiled
def _forward_chain(
    node: Any, edge_t: Any, shared: bool, n: int, alpha: Any, prior: Any, inverse: Any
) -> float:
    """Returns the sum of the logarithms of the scales. Row t of alpha (T, V) <- the message at t, scaled to
    sum to 1; row t of prior (T, V) <- the message that t gets from the position before; inverse (T,) <- 1 /
    scale."""
    smallest = np.finfo(node.dtype).tiny
    log_scale, scale = 0.0, 1.0
    for t in range(n):
        if t == 0:
            prior[t].fill(1)
        else:
            _multiply(edge_t[0 if shared else t - 1], alpha[t - 1], prior[t])
        for v in range(node.shape[1]):
            alpha[t, v] = prior[t, v] * node[t, v]
        total = _sum(alpha[t])
        if total <= smallest:  # no label is possible here
            total, log_scale = smallest, -np.inf
        inverse[t] = 1 / total
        for v in range(node.shape[1]):
            alpha[t, v] *= inverse[t]
        scale *= total
        if not 1e-200 < scale < 1e200:  # a logarithm costs more than testing whether it can wait
            log_scale += math.log(scale)
            scale = 1.0
    return log_scale + math.log(scale)


@_compiled
def _backward_chain(
    node: Any, edge: Any, shared: bool, n: int, inverse: Any, beta: Any, passed: Any
) -> None:
    """Row t of beta (T, V) <- the message that position t gets from all that follows; row t of passed
    (T, V) <- what t then passes back to the position before."""
    for t in range(n - 1, -1, -1):
        if t == n - 1:
            beta[t].fill(1)
        else:
            _multiply(edge[0 if shared else t], passed[t + 1], beta[t])
        for v in range(node.shape[1]):
            passed[t, v] = node[t, v] * inverse[t] * beta[t, v]


@_compiled
def _forward(
    f: Any, g: Any, shared: bool, lengths: Any, log_z: Any, spread: Any, first: int, last: int
) -> None:
    B, T, V = f.shape[1:]
    node, alpha, prior = np.empty((T, V)), np.empty((T, V)), np.empty((T, V))
    inverse, edge, edge_t = np.empty(T), np.empty(g.shape[2:]), np.empty(g.shape[2:])
    blocks = -(-B // CHAINS_AT_ONCE)
    for unit in range(first, last):
        s, start = unit // blocks, unit % blocks * CHAINS_AT_ONCE
        tops, g_spread, g_finite, _ = _exponentiate_edges(g[s, 0], len(edge) if shared else 0, edge, edge_t)
        for b in range(start, min(B, start + CHAINS_AT_ONCE)):
            n = lengths[b]
            if not shared:
                tops, g_spread, g_finite, _ = _exponentiate_edges(g[s, b], n - 1, edge, edge_t)
            total, f_spread, f_finite, barred = _exponentiate(f[s, b], n, node)
            total += _forward_chain(node, edge_t, shared, n, alpha, prior, inverse)
            log_z[s, b] = total + (max(n - 1, 0) * tops if shared else tops)
            spread[0, s, b], spread[1, s, b] = f_spread + g_spread, f_finite + g_finite
            spread[2, s, b] = barred


@_compiled
def _backward(
    f: Any, g: Any, shared: bool, lengths: Any, what: int, weight: Any, nodes: Any, tables: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """Node marginals times weight, and one of GRADIENTS, STEPS and VARIANCES."""
    B, T, V = f.shape[1:]
    node, alpha, prior = np.empty((T, V)), np.empty((T, V)), np.empty((T, V))
    beta, passed, inverse = np.empty((T, V)), np.empty((T, V)), np.empty(T)
    edge, edge_t = np.empty(g.shape[2:]), np.empty(g.shape[2:])
    blocks, summed = -(-B // CHAINS_AT_ONCE), shared and what == GRADIENTS
    for unit in range(first, last):
        s, block = unit // blocks, unit % blocks
        if shared:
            _exponentiate_edges(g[s, 0], len(edge), edge, edge_t)
        if summed:
            tables[s, block].fill(0)
        for b in range(block * CHAINS_AT_ONCE, min(B, (block + 1) * CHAINS_AT_ONCE)):
            n = lengths[b]
            if not shared:
                _exponentiate_edges(g[s, b], n - 1, edge, edge_t)
            _exponentiate(f[s, b], n, node)
            _forward_chain(node, edge_t, shared, n, alpha, prior, inverse)
            _backward_chain(node, edge, shared, n, inverse, beta, passed)
            for t in range(n):
                for v in range(V):
                    nodes[s, b, t, v] = weight[s, b] * prior[t, v] * passed[t, v]
            nodes[s, b, n:].fill(0)
            if summed:
                _add_transitions(alpha, passed, n, weight[s, b], tables[s, block, 0])
            else:
                _set_tables(what, alpha, edge, shared, beta, passed, n, weight[s, b], tables[s, b])
        if summed:
            tables[s, block] *= edge
