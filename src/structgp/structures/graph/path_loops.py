"""The sweeps of ``path_sweeps``, compiled by numba: one example of one draw at a time, in probability space.

All messages of an example stay in the nearest caches, tables are exponentiated once for all sweeps, and each
example stops when it has converged. Variables go in the order of their places, which is an order of levels
too, so that the numbers agree with ``PathSweeps`` but for rounding. Within the loops all is float64.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from structgp.structures.graph.cover import FLOOR, Solution, is_shared
from structgp.structures.graph.path_sweeps import PathCover, PathPlan, label_ranges
from structgp.structures.linear_chain.lane_exp import exp_in_place
from structgp.structures.program import Scores

LEAST, TINY = float(np.exp(FLOOR)), float(np.finfo(np.float64).tiny)
WORTH_A_THREAD = 200_000
"""Products of a number by a number below which a second thread does not pay."""

_compiled = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"})
_reordered = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"})


def share(work: Callable[..., object], units: int, cost: int, arrays: tuple[Any, ...]) -> None:
    """Units first..last of the work to each thread, as many threads as torch uses."""
    n = max(1, min(torch.get_num_threads(), units, cost // WORTH_A_THREAD))
    first, *others = pairwise(units * i // n for i in range(n + 1))
    if not others:
        work(*arrays, *first)
        return
    with ThreadPoolExecutor(len(others)) as pool:
        running = [pool.submit(work, *arrays, *ends) for ends in others]
        work(*arrays, *first)
    for part in running:
        part.result()  # raises what went wrong there


def solve_compiled(
    cover: PathCover, f: Tensor, tables: Scores, sweeps: int, tolerance: float, split: Tensor | None
) -> Solution | None:
    """``PathCover.solve``; None where numbers vanish in probability space, or nothing is possible."""
    plan, (S, B, N, V) = cover.plan, f.shape
    shared = tuple(is_shared(g, t) for g, t in zip(tables, cover.layout.tuples, strict=True))
    index = edge_index(cover, shared)
    log_z, gap, taken = np.empty((S, B)), np.empty((S, B)), np.empty((S, B), np.int64)
    nodes, failed = np.empty((S, B, N, V)), np.empty((S, B), bool)
    pairs = np.zeros((S, index.n_out, V, V))
    moved = np.zeros((S, B * N, plan.into.shape[1], V))
    if split is not None:
        moved[:] = split.numpy()
    given = (
        f.contiguous().numpy(), _pool(cover, f, tables).numpy(), cover.layout.mask.numpy(),
        (plan.weight > 0).sum(1).numpy(), index.first_edge, plan.ends.numpy(), plan.into.numpy(),
        plan.out.numpy(), index.row, index.slot, index.n_slots, plan.scale.numpy(), index.times,
        plan.flip.numpy(), moved, split is not None, sweeps, tolerance, log_z, nodes, pairs, index.out_row,
        gap, taken, failed,
    )  # fmt: skip
    share(solve, S * B, S * len(plan.ends) * V * V, given)
    if failed.any():
        return None
    slopes, first = [], 0
    for is_one, t in zip(shared, cover.layout.tuples, strict=True):
        n = B if is_one else t.mask.numel()
        if t.arity == 2:
            rows, columns = label_ranges(t)
            found = torch.from_numpy(pairs[:, first : first + n, rows, columns]).to(f)
        else:
            found = f.new_zeros((S, n, *t.sizes))
        slopes.append(found if is_one else found.unflatten(1, tuple(t.mask.shape)))
        first += n
    value, node, d, apart = (torch.from_numpy(x).to(f) for x in (log_z, nodes, moved, gap))
    return Solution(value, node, tuple(slopes), d, int(taken.max()), apart)


@dataclass(frozen=True)
class EdgeIndex:
    """Where the loops find things: see ``solve``."""

    first_edge: np.ndarray
    row: np.ndarray
    out_row: np.ndarray
    n_out: int
    slot: np.ndarray
    n_slots: int
    times: np.ndarray


def edge_index(cover: PathCover, shared: tuple[bool, ...]) -> EdgeIndex:
    """Of a cover whose tables are shared, or not, template by template; kept for the next call."""
    if shared not in cover.kept:
        cover.kept[shared] = _edge_index(cover, shared)
    return cover.kept[shared]


def _edge_index(cover: PathCover, shared: tuple[bool, ...]) -> EdgeIndex:
    plan, B = cover.plan, len(cover.rows)
    N = cover.layout.mask.shape[1]
    example = (plan.ends[:, 0] // N).numpy()
    place, template = plan.place.numpy(), plan.template.numpy()
    row, out_row, in_pool, in_out = np.zeros_like(place), np.zeros_like(place), 0, 0
    for k, (is_one, t) in enumerate(zip(shared, cover.layout.tuples, strict=True)):
        at = template == k
        row[at] = in_pool + (0 if is_one else place[at])
        out_row[at] = in_out + (example[at] if is_one else place[at])
        in_pool += 1 if is_one else t.mask.numel()
        in_out += B if is_one else t.mask.numel()
    first_edge = np.searchsorted(example, np.arange(B + 1))
    slot, n_slots = np.zeros_like(row), 1
    for b in range(B):
        some = slice(first_edge[b], first_edge[b + 1])
        told = np.stack([row[some], plan.scale.numpy()[some], plan.flip.numpy()[some]], 1)
        if len(told):
            slot[some] = np.unique(told, axis=0, return_inverse=True)[1].reshape(-1)
            n_slots = max(n_slots, int(slot[some].max()) + 1)
    return EdgeIndex(first_edge, row, out_row, in_out, slot, n_slots, _forests_with(plan))


def _forests_with(plan: PathPlan) -> np.ndarray:
    """(M,) how many forests have each edge."""
    found = plan.into[plan.into >= 0]
    return torch.bincount(found, minlength=len(plan.ends)).double().numpy()


def _pool(cover: PathCover, f: Tensor, tables: Scores) -> Tensor:
    """(S, R, V, V) all tables, template by template; 0 outside a tuple's labels."""
    S, V = f.shape[0], f.shape[-1]
    parts = []
    for g, t in zip(tables, cover.layout.tuples, strict=True):
        g = g[:, None] if is_shared(g, t) else g.flatten(1, 2)
        if t.sizes != (V, V):
            whole = g.new_zeros((*g.shape[:2], V, V))
            if t.arity == 2:
                rows, columns = label_ranges(t)
                whole[:, :, rows, columns] = g
            g = whole
        parts.append(g)
    if not parts:
        return f.new_zeros((S, 1, V, V))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).contiguous()


@_reordered
def _sum(x: Any) -> float:
    total = 0.0
    for i in range(len(x)):
        total += x[i]
    return total


@_reordered
def _times(table: Any, a: Any, out: Any) -> None:
    """out <- table a, four rows at a time: a number that is loaded serves all of them."""
    row = 0
    while row + 4 <= len(out):
        w = x = y = z = 0.0
        for i in range(len(a)):
            w += table[row, i] * a[i]
            x += table[row + 1, i] * a[i]
            y += table[row + 2, i] * a[i]
            z += table[row + 3, i] * a[i]
        out[row], out[row + 1], out[row + 2], out[row + 3] = w, x, y, z
        row += 4
    while row < len(out):
        w = 0.0
        for i in range(len(a)):
            w += table[row, i] * a[i]
        out[row] = w
        row += 1


@_compiled
def _exponentiate(x: Any, scale: float, flip: bool, out: Any) -> float:
    """out (V, V) <- exp(scale x - top), transposed if ``flip``; the top."""
    V, top = len(x), -np.inf
    for i in range(V):
        for j in range(V):
            top = max(top, x[i, j])
    if top == -np.inf:
        out.fill(0)
        return 0.0
    for i in range(V):
        for j in range(V):
            found = scale * (x[i, j] - top)
            if flip:
                out[j, i] = found
            else:
                out[i, j] = found
    exp_in_place(out.reshape(V * V))
    return scale * top


@_compiled
def _marginals(node: Any, prior: Any, beta: Any, p: Any) -> bool:
    """p (K, V) <- of each forest; False if one has no label left."""
    for k in range(len(p)):
        total = 0.0
        for v in range(p.shape[1]):
            p[k, v] = node[k, v] * prior[k, v] * beta[k, v]
            total += p[k, v]
        if not total > 0:
            return False
        factor = 1 / total
        for v in range(p.shape[1]):
            p[k, v] *= factor
    return True


@_compiled
def _agree(node: Any, top: Any, p: Any) -> float:
    """Moves the node scores (K, V), exp(h - top), of one variable so that its marginals p become their
    geometric mean; the largest difference to their mean before."""
    K, V = p.shape
    gap = 0.0
    for v in range(V):
        mean = 0.0
        for k in range(K):
            mean += p[k, v]
        mean /= K
        for k in range(K):
            gap = max(gap, abs(p[k, v] - mean))
        if K == 2:
            one, other = max(p[0, v], LEAST), max(p[1, v], LEAST)
            middle = np.sqrt(one * other)
            node[0, v] *= middle / one
            node[1, v] *= middle / other
            continue
        logs = 0.0
        for k in range(K):
            logs += np.log(max(p[k, v], LEAST))
        middle = np.exp(logs / K)
        for k in range(K):
            node[k, v] *= middle / max(p[k, v], LEAST)
    for k in range(K):
        most = 0.0
        for v in range(V):
            most = max(most, node[k, v])
        if most > 0:
            top[k] += np.log(most)
            factor = 1 / most
            for v in range(V):
                node[k, v] *= factor
    return gap


@_compiled
def _back(
    n: int, K: int, out: Any, ends: Any, slot: Any, start: int, tables: Any, node: Any, beta: Any,
    passed: Any,
) -> None:  # fmt: skip
    """Renews what all that follows says of variable n."""
    for k in range(K):
        edge = out[start + n, k]
        if edge < 0:
            beta[n, k].fill(1)
        else:
            w = ends[edge, 1] - start
            for v in range(len(passed)):
                passed[v] = node[w, k, v] * beta[w, k, v]
            _times(tables[slot[edge]], passed, beta[n, k])
            factor = 1 / max(_sum(beta[n, k]), TINY)
            for v in range(len(passed)):
                beta[n, k, v] *= factor


@_compiled
def _forth(
    n: int, K: int, into: Any, ends: Any, slot: Any, start: int, tables_t: Any, node: Any, prior: Any, a: Any
) -> Any:
    """Renews what all that comes before says of variable n, and its forward message a (N, K, V), which sums
    to 1. The sum over forests of the logarithms of what it was divided by."""
    total = 0.0
    for k in range(K):
        edge = into[start + n, k]
        if edge < 0:
            prior[n, k].fill(1)
        else:
            _times(tables_t[slot[edge]], a[ends[edge, 0] - start, k], prior[n, k])
        total += _message(node[n, k], prior[n, k], a[n, k])
    return total


@_compiled
def _message(node: Any, prior: Any, a: Any) -> float:
    for v in range(len(a)):
        a[v] = node[v] * prior[v]
    scale = _sum(a)
    if not scale > 0:
        return -np.inf
    factor = 1 / scale
    for v in range(len(a)):
        a[v] *= factor
    return np.log(scale)


@_compiled
def solve(
    f: Any, pool: Any, there: Any, count: Any, first_edge: Any, ends: Any, into: Any, out: Any, row: Any,
    slot: Any, n_slots: int, scale: Any, times: Any, flip: Any, split: Any, warm: bool, sweeps: int,
    tolerance: float, log_z: Any, nodes: Any, pairs: Any, out_row: Any, gaps: Any, taken: Any, failed: Any,
    first: int, last: int,
) -> None:  # fmt: skip
    """Units first..last of draws and examples, draw by draw. Arrays as in ``PathPlan``, and: pool (S, R, V, V)
    tables; row (M,) which one an edge has; slot (M,) edges of an example with the same slot share it; count
    (B,) forests; times (M,) forests that have the edge; out_row (M,) where in pairs (S, R', V, V) its
    gradient goes. split (S, B N, K, V) is read if ``warm`` and written where it is not empty."""
    B, N, V = f.shape[1:]
    most = into.shape[1]
    node, prior = np.empty((N, most, V)), np.empty((N, most, V))
    beta, a = np.empty((N, most, V)), np.empty((N, most, V))
    p, pair, top = np.empty((most, V)), np.empty((V, V)), np.empty((N, most))
    tables, tables_t = np.empty((n_slots, V, V)), np.empty((n_slots, V, V))
    table_top, passed = np.empty(n_slots), np.empty(V)
    done = np.empty(n_slots, np.int64)
    for unit in range(first, last):
        s, b = unit // B, unit % B
        K, start = count[b], b * N
        edges = range(first_edge[b], first_edge[b + 1])
        done.fill(0)
        for e in edges:
            if done[slot[e]] == 0:
                table_top[slot[e]] = _exponentiate(pool[s, row[e]], scale[e], flip[e], tables[slot[e]])
                tables_t[slot[e]] = tables[slot[e]].T
                done[slot[e]] = 1
        for n in range(N):
            if not there[b, n]:
                continue
            for v in range(V):
                mean = 0.0
                if warm:
                    for k in range(K):
                        mean += split[s, start + n, k, v] / K
                for k in range(K):
                    node[n, k, v] = f[s, b, n, v]
                    if warm:
                        node[n, k, v] += split[s, start + n, k, v] - mean
            for k in range(K):
                most_here = node[n, k].max()
                top[n, k] = most_here if most_here > -np.inf else 0.0
                node[n, k] -= top[n, k]
                exp_in_place(node[n, k])
        for n in range(N - 1, -1, -1):
            if there[b, n]:
                _back(n, K, out, ends, slot, start, tables, node, beta, passed)
        ok, sweep, gap = True, 0, 0.0 if K == 1 else np.inf
        while sweep < sweeps and gap > tolerance and ok:
            sweep, gap = sweep + 1, 0.0
            for n in range(N):
                if there[b, n]:
                    _forth(n, K, into, ends, slot, start, tables_t, node, prior, a)
                    ok = ok and _marginals(node[n, :K], prior[n, :K], beta[n, :K], p[:K])
                    _agree(node[n, :K], top[n, :K], p[:K])
                    for k in range(K):
                        _message(node[n, k], prior[n, k], a[n, k])
            for n in range(N - 1, -1, -1):
                if there[b, n]:
                    _back(n, K, out, ends, slot, start, tables, node, beta, passed)
                    ok = ok and _marginals(node[n, :K], prior[n, :K], beta[n, :K], p[:K])
                    gap = max(gap, _agree(node[n, :K], top[n, :K], p[:K]))
        total = 0.0
        for n in range(N):
            nodes[s, b, n].fill(0)
            if there[b, n]:
                total += _forth(n, K, into, ends, slot, start, tables_t, node, prior, a)
                ok = ok and _marginals(node[n, :K], prior[n, :K], beta[n, :K], p[:K])
                for k in range(K):
                    total += top[n, k]
                    for v in range(V):
                        nodes[s, b, n, v] += p[k, v] / K
                    edge = into[start + n, k]
                    if edge >= 0:
                        total += table_top[slot[edge]]
                        u = ends[edge, 0] - start
                        _pair(tables[slot[edge]], a[u, k], node[n, k], beta[n, k], pair)
                        _add(pair, times[edge], flip[edge], pairs[s, out_row[edge]])
                if split.shape[1] > 0:
                    for k in range(K):
                        for v in range(V):
                            found = np.log(max(node[n, k, v], 1e-300)) + top[n, k] - f[s, b, n, v]
                            split[s, start + n, k, v] = found if f[s, b, n, v] > -np.inf else 0.0
        log_z[s, b], gaps[s, b], taken[s, b] = total / K, gap, sweep
        failed[s, b] = not (ok and total > -np.inf)


@_compiled
def _pair(table: Any, before: Any, node: Any, beta: Any, out: Any) -> None:
    """out (V, V) <- marginals of an edge."""
    V, total = len(out), 0.0
    for i in range(V):
        for j in range(V):
            out[i, j] = before[i] * table[i, j] * (node[j] * beta[j])
            total += out[i, j]
    if total > 0:
        for i in range(V):
            for j in range(V):
                out[i, j] /= total


@_compiled
def _add(pair: Any, times: float, flip: bool, out: Any) -> None:
    V = len(pair)
    for i in range(V):
        for j in range(V):
            out[i, j] += (pair[j, i] if flip else pair[i, j]) / times
