"""Forward-backward in probability space as compiled loops: no step of it is a step of Python.

One chain at a time, all its numbers in the nearest cache: potentials are read and gradients written, and
nothing else goes to memory. The backward pass does the forward pass again rather than keep its messages:
fresh memory for them costs more than they do. A product of a message and the transitions is V sums along
rows, which the compiler makes vector instructions of; they add in an order of their own, so results
differ from those of ``Scaled`` by rounding. Threads share out units of whole chains: the result does not
depend on how many there are.

Needs numba (``structgp[fast]``), which compiles at the first use and keeps the result in a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from threading import Thread
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from structgp.structures.linear_chain.lane_exp import exp_in_place

# A unit of work: up to so many chains of one draw. Gradients of a shared table are summed unit by unit.
CHAINS_AT_ONCE = 16
# Products of a number by a number below which a second thread does not pay.
WORTH_A_THREAD = 1_000_000
# What the backward pass leaves beside node marginals: gradients in g, transition matrices, or variances.
GRADIENTS, STEPS, VARIANCES = range(3)

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


class Compiled:
    """``Messages`` for float32 and float64 on the CPU.

    ``spread`` : largest log-ratio within a message that the potentials allow; inf or nan where some of
    them are. log Z is -inf where a sequence has no labelling. With tables by position their exponentials,
    O(T V^2) per sequence, are most of the work."""

    def __init__(self, f: Tensor, g: Tensor, mask: Tensor) -> None:
        self._shape, lengths, self._shared = f.shape, mask.sum(-1).numpy(), g.dim() == 3
        self._given = f.detach().contiguous().numpy(), g.detach().contiguous().numpy(), lengths
        log_z, spread = self._empty(*f.shape[:2]), self._empty(*f.shape[:2])
        self._share(_forward, log_z, spread)
        self._log_z, self.spread = torch.from_numpy(log_z), float(spread.max())

    def _empty(self, *shape: int) -> np.ndarray:
        # NumPy asks for large pages, torch does not: a first touch would cost more than the work.
        return np.empty(shape, self._given[0].dtype)

    def _share(self, work: Callable[..., object], *arrays: Any) -> None:
        """Units first..last of the work to each thread, as many threads as torch uses."""
        S, B, T, V = self._shape
        units = S * -(-B // CHAINS_AT_ONCE)
        n = min(torch.get_num_threads(), units, max(1, S * B * T * V * V // WORTH_A_THREAD))
        cuts = [units * i // n for i in range(n + 1)]
        failed: list[BaseException] = []

        def part(first: int, last: int) -> None:
            try:
                work(*self._given, *arrays, first, last)
            except BaseException as error:
                failed.append(error)

        others = [Thread(target=part, args=ends) for ends in pairwise(cuts[1:])]
        for thread in others:
            thread.start()
        part(0, cuts[1])
        for thread in others:
            thread.join()
        if failed:
            raise failed[0]

    @property
    def ends_nowhere(self) -> bool:
        """Whether a sequence has no labelling at all."""
        return bool((self._log_z == -torch.inf).any())

    def log_partition(self) -> Tensor:
        # A copy: as the output of a function whose context holds this, it would keep itself alive.
        return self._log_z.clone()

    def gradients(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        _, B, T, _ = self._shape
        each = (-(-B // CHAINS_AT_ONCE),) if self._shared else (B, T - 1)
        nodes, tables = self._passes(GRADIENTS, each, weight)
        return nodes, tables.sum(1) if self._shared else tables

    def node_marginals(self) -> Tensor:
        return self.gradients(torch.ones_like(self._log_z))[0]

    def walk(self) -> tuple[Tensor, Tensor]:
        return self._passes(STEPS, (self._shape[1], self._shape[2] - 1))

    def next_variances(self) -> tuple[Tensor, Tensor]:
        _, B, T, _ = self._shape
        return self._passes(VARIANCES, (B,) if self._shared else (B, T - 1))

    def _passes(
        self, what: int, each: tuple[int, ...], weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        S, _, _, V = self._shape
        weight = torch.ones_like(self._log_z) if weight is None else weight.detach().contiguous()
        nodes, tables = self._empty(*self._shape), self._empty(S, *each, V, V)
        self._share(_backward, what, weight.numpy(), nodes, tables)
        return torch.from_numpy(nodes), torch.from_numpy(tables)


@_reordered
def _multiply(matrix: Any, vector: Any, out: Any) -> None:
    """Four rows at a time: a vector that is loaded serves all of them."""
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
    """table (V, V) += weight * sum_t alpha[t - 1] passed[t]^T, four positions at a time: one way to the
    memory of ``table`` for four sums."""
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
def _set_transitions(alpha: Any, edge: Any, passed: Any, n: int, weight: Any, out: Any) -> None:
    """out (T-1, V, V) <- weight * alpha[t] edge[t] passed[t + 1], position by position."""
    V = out.shape[1]
    for t in range(n - 1):
        for i in range(V):
            a = weight * alpha[t, i]
            for j in range(V):
                step = edge[i, j] if edge.ndim == 2 else edge[t, i, j]
                out[t, i, j] = a * step * passed[t + 1, j]
    out[max(n - 1, 0) :].fill(0)


@_compiled
def _set_steps(edge: Any, beta: Any, passed: Any, n: int, out: Any) -> None:
    """out (T-1, V, V) <- transition matrices of the posterior."""
    V = out.shape[1]
    for t in range(n - 1):
        for i in range(V):
            # A label that nothing can follow: a row of zeros.
            total = 1 / beta[t, i] if beta[t, i] > 0 else beta[t, i]
            for j in range(V):
                step = edge[i, j] if edge.ndim == 2 else edge[t, i, j]
                out[t, i, j] = step * passed[t + 1, j] * total
    out[max(n - 1, 0) :].fill(0)


@_compiled
def _set_variances(alpha: Any, edge: Any, passed: Any, n: int, out: Any) -> None:
    """out <- p (1 - p) of each transition: (V, V), summed over positions, or (T-1, V, V)."""
    V = edge.shape[-1]
    out.fill(0)
    for t in range(n - 1):
        for i in range(V):
            for j in range(V):
                step = edge[i, j] if edge.ndim == 2 else edge[t, i, j]
                p = alpha[t, i] * step * passed[t + 1, j]
                if out.ndim == 2:
                    out[i, j] += p - p * p
                else:
                    out[t, i, j] = p - p * p


@_reordered
def _sum(x: Any) -> Any:
    total = x.dtype.type(0)
    for i in range(len(x)):
        total += x[i]
    return total


@_compiled
def _range(x: Any) -> Any:
    low = high = x[0]
    for i in range(1, len(x)):
        low = x[i] if x[i] < low else low
        high = x[i] if x[i] > high else high
    return low, high


@_compiled
def _exponentiate_edges(g: Any, edge: Any, edge_t: Any) -> Any:
    """edge (V, V) <- exp(g - max g), and its transpose. Returns the maximum and the spread."""
    V = len(g)
    scores, flat = g.reshape(V * V), edge.reshape(V * V)
    low, high = _range(scores)
    for i in range(V * V):
        flat[i] = scores[i] - high
    exp_in_place(flat)
    for i in range(V):
        for j in range(V):
            edge_t[j, i] = edge[i, j]
    return high, high - low + 0 * _sum(flat)  # nan where there is one among the scores


@_compiled
def _exponentiate_all(g: Any, n: int, edge: Any, edge_t: Any) -> Any:
    """The same of the first n tables (T-1, V, V): the sum of the maxima and the largest spread."""
    total, widest = 0.0, g.dtype.type(0)
    for t in range(n):
        high, spread = _exponentiate_edges(g[t], edge[t], edge_t[t])
        total += high
        widest = spread if spread > widest or spread != spread else widest
    return total, widest


@_compiled
def _exponentiate_nodes(f: Any, n: int, node: Any) -> Any:
    """node (T, V) <- exp(f - max f), position by position, of the first n. Returns the sum of the maxima
    and the largest spread."""
    V = f.shape[1]
    total, spread = 0.0, f.dtype.type(0)
    for t in range(n):
        low, high = _range(f[t])
        for v in range(V):
            node[t, v] = f[t, v] - high
        total += high
        wide = high - low  # nan where all are -inf
        spread = wide if wide > spread or wide != wide else spread
    exp_in_place(node[:n].reshape(n * V))
    return total, spread


@_compiled
def _forward_chain(node: Any, edge_t: Any, n: int, alpha: Any, prior: Any, inverse: Any) -> float:
    """The sum of the logarithms of the scales. Row t of alpha (T, V) <- the message at t, which sums to
    1; of prior (T, V) <- what t is told by the position before; inverse (T,) <- 1 / scale."""
    smallest = np.finfo(node.dtype).tiny
    log_scale, scale = 0.0, 1.0
    for t in range(n):
        if t == 0:
            prior[t].fill(1)
        elif edge_t.ndim == 2:  # numba compiles the branch that is taken
            _multiply(edge_t, alpha[t - 1], prior[t])
        else:
            _multiply(edge_t[t - 1], alpha[t - 1], prior[t])
        for v in range(node.shape[1]):
            alpha[t, v] = prior[t, v] * node[t, v]
        total = _sum(alpha[t])
        if total <= smallest:  # no label is possible here
            total, log_scale = smallest, -np.inf
        inverse[t] = 1 / total
        for v in range(node.shape[1]):
            alpha[t, v] *= inverse[t]
        scale *= total
        if not 1e-200 < scale < 1e200:  # a logarithm costs more than the test whether it can wait
            log_scale += math.log(scale)
            scale = 1.0
    return log_scale + math.log(scale)


@_compiled
def _backward_chain(node: Any, edge: Any, n: int, inverse: Any, beta: Any, passed: Any) -> None:
    """Row t of beta (T, V) <- what all that follows says of position t; of passed (T, V) <- what t then
    passes back to the position before."""
    for t in range(n - 1, -1, -1):
        if t == n - 1:
            beta[t].fill(1)
        elif edge.ndim == 2:
            _multiply(edge, passed[t + 1], beta[t])
        else:
            _multiply(edge[t], passed[t + 1], beta[t])
        for v in range(node.shape[1]):
            passed[t, v] = node[t, v] * inverse[t] * beta[t, v]


@_compiled
def _node_marginals(prior: Any, passed: Any, n: int, weight: Any, out: Any) -> None:
    for t in range(n):
        for v in range(out.shape[1]):
            out[t, v] = weight * prior[t, v] * passed[t, v]
    out[n:].fill(0)


@_compiled
def _space(f: Any, g: Any) -> Any:
    """Work space of one thread: node, alpha, prior, inverse; edges, their transposes; beta, passed."""
    T, V = f.shape[2:]
    dtype = f.dtype
    edges = g.shape[1:] if g.ndim == 3 else g.shape[2:]
    chain = np.empty((T, V), dtype), np.empty((T, V), dtype), np.empty((T, V), dtype)
    tables = np.empty(edges, dtype), np.empty(edges, dtype)
    return *chain, np.empty(T, dtype), *tables, np.empty((T, V), dtype), np.empty((T, V), dtype)


@_compiled
def _forward(f: Any, g: Any, lengths: Any, log_z: Any, spread: Any, first: int, last: int) -> None:
    B = f.shape[1]
    node, alpha, prior, inverse, edge, edge_t, _, _ = _space(f, g)
    blocks = -(-B // CHAINS_AT_ONCE)
    for unit in range(first, last):
        s, start = unit // blocks, unit % blocks * CHAINS_AT_ONCE
        if g.ndim == 3:
            g_max, g_spread = _exponentiate_edges(g[s], edge, edge_t)
        for b in range(start, min(B, start + CHAINS_AT_ONCE)):
            n = lengths[b]
            if g.ndim == 3:
                tops = max(n - 1, 0) * g_max
            else:
                tops, g_spread = _exponentiate_all(g[s, b], n - 1, edge, edge_t)
            total, f_spread = _exponentiate_nodes(f[s, b], n, node)
            total += _forward_chain(node, edge_t, n, alpha, prior, inverse)
            log_z[s, b] = total + tops
            spread[s, b] = f_spread + g_spread


@_compiled
def _backward(
    f: Any, g: Any, lengths: Any, what: int, weight: Any, nodes: Any, tables: Any, first: int, last: int
) -> None:
    """Node marginals times weight, and one of GRADIENTS, STEPS and VARIANCES. Of a branch on ``ndim``
    numba compiles the side that is taken."""
    B = f.shape[1]
    node, alpha, prior, inverse, edge, edge_t, beta, passed = _space(f, g)
    blocks = -(-B // CHAINS_AT_ONCE)
    for unit in range(first, last):
        s, block = unit // blocks, unit % blocks
        if g.ndim == 3:
            _exponentiate_edges(g[s], edge, edge_t)
        if tables.ndim == 4 and what == GRADIENTS:
            tables[s, block].fill(0)
        for b in range(block * CHAINS_AT_ONCE, min(B, (block + 1) * CHAINS_AT_ONCE)):
            n = lengths[b]
            if g.ndim == 5:
                _exponentiate_all(g[s, b], n - 1, edge, edge_t)
            _exponentiate_nodes(f[s, b], n, node)
            _forward_chain(node, edge_t, n, alpha, prior, inverse)
            _backward_chain(node, edge, n, inverse, beta, passed)
            _node_marginals(prior, passed, n, weight[s, b], nodes[s, b])
            if what == VARIANCES:
                _set_variances(alpha, edge, passed, n, tables[s, b])
            elif tables.ndim == 4:
                _add_transitions(alpha, passed, n, weight[s, b], tables[s, block])
            elif what == STEPS:
                _set_steps(edge, beta, passed, n, tables[s, b])
            else:
                _set_transitions(alpha, edge, passed, n, weight[s, b], tables[s, b])
        if tables.ndim == 4 and what == GRADIENTS:
            tables[s, block] *= edge
