"""The sweeps of ``path_sweeps`` as one Triton kernel: each program takes one example of one draw, from its
first sweep to its gradients.

As in ``path_loops``, messages are probabilities, and variables go in the order of their places. All forests
of a variable are done together: a step is KP products of a table by a vector. Scratch arrays are in global
memory; a program reads only what it has written itself, after a barrier.

Letters: KP forests and VP labels, padded to powers of 2. A variable is known by its place b N + n.

This module needs Triton; ``path_fused`` imports it when it is needed.
"""

import triton
import triton.language as tl


@triton.jit
def _message(node, told, place, k, v, forests, inside, V: tl.constexpr):
    """(KP, VP) node times told at one place of each forest, scaled to sum to 1; (KP,) the sums before."""
    at = (place * forests + k)[:, None] * V + v[None, :]
    a = tl.load(node + at, mask=inside, other=0.0) * tl.load(told + at, mask=inside, other=0.0)
    total = tl.sum(a, 1)
    return a / tl.where(total > 0, total, 1.0)[:, None], total


@triton.jit
def _tell(
    side, END: tl.constexpr, n, ends, slot, table, node, told, k, v, real, forests,
    V: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """(KP, VP) the message to variable n from its neighbour on one side in each forest; 1 if there is
    none."""
    edge = tl.load(side + n * forests + k, mask=real, other=-1)
    has = edge >= 0
    other = tl.load(ends + 2 * edge + END, mask=has, other=0)
    a, _ = _message(node, told, other, k, v, forests, has[:, None] & (v < V)[None, :], V)
    u = tl.arange(0, VP)
    # Rows of a table are the earlier variable's labels.
    places = v[:, None] * V + u[None, :] if END == 1 else u[None, :] * V + v[:, None]
    labels = (v < V)[:, None] & (u < V)[None, :]
    start = tl.load(slot + edge, mask=has, other=0) * V * V
    scores = tl.load(
        table + start[:, None, None] + places[None, :, :],
        mask=has[:, None, None] & labels[None, :, :],
        other=0.0,
    )
    return tl.where(has[:, None], tl.sum(scores * a[:, None, :], 2), 1.0)


@triton.jit
def _agree(at, node, top, tops, x, inside, real, n_forests, LEAST: tl.constexpr):
    """Moves the node scores at ``at`` so that the marginals of all forests, x (KP, VP) scaled, become their
    geometric mean. Returns the largest difference from their mean before, and whether all could be
    scaled."""
    total = tl.sum(x, 1)
    ok = tl.min(tl.where(real, total, 1.0), 0) > 0
    p = x / tl.where(total > 0, total, 1.0)[:, None]
    logs = tl.where(inside, tl.log(tl.where(p > LEAST, p, LEAST)), 0.0)
    gap = tl.max(tl.max(tl.where(inside, tl.abs(p - (tl.sum(p, 0) / n_forests)[None, :]), 0.0), 1), 0)
    moved = tl.load(node + at, mask=inside, other=0.0) * tl.exp(
        (tl.sum(logs, 0) / n_forests)[None, :] - logs
    )
    most = tl.max(moved, 1)
    most = tl.where(most > 0, most, 1.0)
    tl.store(node + at, moved / most[:, None], mask=inside)
    tl.store(top + tops, tl.load(top + tops, mask=real, other=0.0) + tl.log(most), mask=real)
    return gap, ok


@triton.jit
def _edge_gradient(
    n, j, into, ends, slot, out_row, share, flip, table, node, prior, beta, joint, v, forests,
    V: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Adds the marginals of the edge into variable n in forest j to its row of ``joint``."""
    edge = tl.load(into + n * forests + j)
    if edge >= 0:
        one = tl.arange(0, 1)
        here = (v < V)[None, :]
        before, _ = _message(node, prior, tl.load(ends + 2 * edge), one + j, v, forests, here, V)
        after, _ = _message(node, beta, n, one + j, v, forests, here, V)
        u = tl.arange(0, VP)
        labels = (v < V)[:, None] & (u < V)[None, :]
        places = v[:, None] * V + u[None, :]
        x = tl.load(table + tl.load(slot + edge) * V * V + places, mask=labels, other=0.0)
        # There is only one row: sums over it turn (1, VP) into (VP,).
        x = x * tl.sum(before, 0)[:, None] * tl.sum(after, 0)[None, :]
        total = tl.sum(tl.sum(x, 1), 0)
        x = x * (tl.load(share + edge) / tl.where(total > 0, total, 1.0))
        if tl.load(flip + edge) != 0:
            places = u[None, :] * V + v[:, None]
        to = joint + tl.load(out_row + edge) * V * V + places
        tl.store(to, tl.load(to, mask=labels, other=0.0) + x, mask=labels)
        tl.debug_barrier()


@triton.jit
def sweep_kernel(
    node, top, prior, beta, table, table_top, into, out, ends, slot, out_row, share, flip, count, there,
    marginal, joint, log_z, gaps, taken, failed, B, N, n_slots, n_rows, forests, sweeps, tolerance,
    V: tl.constexpr, VP: tl.constexpr, KP: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Arrays as ``path_fused.solve_fused`` makes them; ``forests`` is the length of a row of ``into``."""
    unit = tl.program_id(0).to(tl.int64)
    s, b = unit // B, unit % B
    k, v = tl.arange(0, KP), tl.arange(0, VP)
    n_forests = tl.load(count + b)
    real = k < n_forests
    inside = real[:, None] & (v < V)[None, :]
    node += s * B * N * forests * V
    prior += s * B * N * forests * V
    beta += s * B * N * forests * V
    top += s * B * N * forests
    table += s * n_slots * V * V
    table_top += s * n_slots
    joint += s * n_rows * V * V
    start = b * N
    for i in range(N):
        n = start + N - 1 - i
        if tl.load(there + n) != 0:
            at = (n * forests + k)[:, None] * V + v[None, :]
            told = _tell(out, 1, n, ends, slot, table, node, beta, k, v, real, forests, V, VP)
            tl.store(beta + at, told, mask=inside)
            tl.debug_barrier()
    zero = tl.sum(tl.zeros((KP,), tl.float64), 0)
    done = 0
    gap = tl.where(n_forests > 1, zero + float("inf"), zero)
    ok = n_forests > 0
    while (done < sweeps) & (gap > tolerance) & ok:
        done += 1
        gap = zero
        for i in range(N):
            n = start + i
            if tl.load(there + n) != 0:
                at = (n * forests + k)[:, None] * V + v[None, :]
                told = _tell(into, 0, n, ends, slot, table, node, prior, k, v, real, forests, V, VP)
                tl.store(prior + at, told, mask=inside)
                x = told * tl.load(beta + at, mask=inside, other=0.0)
                x = x * tl.load(node + at, mask=inside, other=0.0)
                _, fine = _agree(at, node, top, n * forests + k, x, inside, real, n_forests, LEAST)
                ok = ok & fine
                tl.debug_barrier()
        for i in range(N):
            n = start + N - 1 - i
            if tl.load(there + n) != 0:
                at = (n * forests + k)[:, None] * V + v[None, :]
                told = _tell(out, 1, n, ends, slot, table, node, beta, k, v, real, forests, V, VP)
                tl.store(beta + at, told, mask=inside)
                x = told * tl.load(prior + at, mask=inside, other=0.0)
                x = x * tl.load(node + at, mask=inside, other=0.0)
                apart, fine = _agree(at, node, top, n * forests + k, x, inside, real, n_forests, LEAST)
                gap = tl.maximum(gap, apart)
                ok = ok & fine
                tl.debug_barrier()
    total = zero
    for i in range(N):
        n = start + i
        if tl.load(there + n) != 0:
            at = (n * forests + k)[:, None] * V + v[None, :]
            told = _tell(into, 0, n, ends, slot, table, node, prior, k, v, real, forests, V, VP)
            tl.store(prior + at, told, mask=inside)
            a = told * tl.load(node + at, mask=inside, other=0.0)
            x = a * tl.load(beta + at, mask=inside, other=0.0)
            both, alone = tl.sum(x, 1), tl.sum(a, 1)
            ok = ok & (tl.min(tl.where(real, both, 1.0), 0) > 0)
            p = x / tl.where(both > 0, both, 1.0)[:, None]
            tl.store(marginal + (s * B * N + n) * V + v, tl.sum(p, 0) / n_forests, mask=v < V)
            edge = tl.load(into + n * forests + k, mask=real, other=-1)
            at_slot = tl.load(slot + edge, mask=edge >= 0, other=0)
            part = tl.load(top + n * forests + k, mask=real, other=0.0)
            part += tl.log(tl.where(real & (alone > 0), alone, 1.0))
            part += tl.load(table_top + at_slot, mask=edge >= 0, other=0.0)
            total += tl.sum(tl.where(real, part, 0.0), 0)
            tl.debug_barrier()
            for j in range(n_forests):
                _edge_gradient(
                    n, j, into, ends, slot, out_row, share, flip, table, node, prior, beta, joint, v,
                    forests, V, VP,
                )  # fmt: skip
    tl.store(log_z + unit, total / n_forests)
    tl.store(gaps + unit, gap)
    tl.store(taken + unit, done)
    tl.store(failed + unit, tl.where(ok, 0, 1))
