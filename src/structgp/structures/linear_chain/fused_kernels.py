"""The chain's two passes as Triton kernels: each Triton program handles BLOCK_B sequences of a draw.

A program first takes the quick way: messages are probabilities, each scaled by the power of 2 that brings
its largest entry to between 1 and 2; a step is a matrix product and V exponentials. It keeps a record of
the smallest numbers met. Where a number that should not be 0 may have underflowed, the program discards its
work and takes the careful way: one sequence after the other in log space, with V^2 exponentials per step.
Callers need not inspect the potentials.

Why this record is enough, in the forward pass (the backward pass is alike): let moved_j = sum_i alpha_i
e^g_ij and q_j = moved_j e^f_j, for labels j that f allows. If moved_j > 0, all that underflowed in its sum
is below the smallest number of the type, and q_j >= LOW is far above that: q_j is correct to rounding. If
moved_j = 0, then either no label leads to j, or each product alpha_i e^g_ij underflowed; the latter cannot
be when the smallest alpha > 0 times the smallest e^g > 0 is above TINY. And alpha is at least q / V / 2.

This module needs Triton; ``fused`` imports it when it is needed.
"""

import triton
import triton.language as tl


@triton.jit
def _lengths(mask_ptr, b, here, T, BLOCK_B: tl.constexpr, CHUNK: tl.constexpr):
    """(BLOCK_B,) number of real positions."""
    n = tl.zeros((BLOCK_B,), tl.int32)
    for start in range(0, T, CHUNK):
        t = start + tl.arange(0, CHUNK)
        inside = here[:, None] & (t < T)[None, :]
        n += tl.sum(tl.load(mask_ptr + b[:, None] * T + t[None, :], mask=inside, other=0).to(tl.int32), 1)
    return n


@triton.jit
def _product(x, matrix):
    """x (BLOCK_B, VP) @ matrix (VP, VP)."""
    return tl.sum(x[:, :, None] * matrix[None, :, :], 1)


@triton.jit
def _outer(x, y):
    """x^T y, (VP, VP), of x and y (BLOCK_B, VP)."""
    return tl.sum(x[:, :, None] * y[:, None, :], 0)


@triton.jit
def _finite(x):
    """x with 0 in place of -inf, so that it can be subtracted."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _log(x):
    """log x for x >= 0; -inf for 0."""
    return tl.where(x == 0, -float("inf"), tl.log(tl.where(x == 0, 1.0, x)))


@triton.jit
def _exponent(x):
    """The power of 2 that brings x >= 0 to between 1 and 2, and the integer e for which it is 2^-e."""
    if x.dtype == tl.float32:
        e = (x.to(tl.int32, bitcast=True) >> 23) - 127
        factor = ((127 - e) << 23).to(tl.float32, bitcast=True)
    else:
        e = (x.to(tl.int64, bitcast=True) >> 52) - 1023
        factor = ((1023 - e) << 52).to(tl.float64, bitcast=True)
    return factor, e.to(tl.int32)


@triton.jit
def _smallest_edge(g, g_top):
    """exp of the difference between the lowest score that is not -inf and g_top."""
    lowest = tl.min(tl.min(tl.where(g == -float("inf"), g_top, g), 1), 0)
    return tl.exp(lowest - g_top)


@triton.jit
def _vanished(smallest, zeros, edge, LOW: tl.constexpr, TINY: tl.constexpr, VP: tl.constexpr):
    """True if a number may have been lost, by the record of a program's messages: smallest and zeros, both
    (BLOCK_B, VP)."""
    q = tl.min(tl.min(smallest, 1), 0)
    some_zero = tl.max(tl.max(zeros, 1), 0) > 0
    return (q < LOW) | (some_zero & (q / VP * 0.5 * edge < TINY))


@triton.jit(do_not_specialize=["B", "T", "n_blocks"])
def forward_kernel(
    f_ptr, g_ptr, mask_ptr, log_z_ptr, alpha_ptr, careful_ptr, B, T, n_blocks,
    V: tl.constexpr, VP: tl.constexpr, BLOCK_B: tl.constexpr,
    LOW: tl.constexpr, TINY: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes log Z (S, B), forward messages (S, B, T, V), on any scale and undefined at padding, and for
    each program whether it went the careful way: its messages are then logarithms."""
    dtype: tl.constexpr = f_ptr.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    s = pid // n_blocks
    first = (pid % n_blocks) * BLOCK_B
    row = tl.arange(0, BLOCK_B)
    b = first + row
    n = _lengths(mask_ptr, b, b < B, T, BLOCK_B, CHUNK)
    n_max = tl.max(n, 0)
    v = tl.arange(0, VP)
    at = ((s * B + b) * T * V)[:, None] + v[None, :]
    label = (v < V)[None, :]

    two = (v < V)[:, None] & (v < V)[None, :]
    g = tl.load(g_ptr + s * V * V + v[:, None] * V + v[None, :], mask=two, other=-float("inf"))
    g_top = _finite(tl.max(tl.max(g, 1), 0))
    edge = tl.exp(g - g_top)
    least = _smallest_edge(g, g_top)

    alpha = tl.zeros((BLOCK_B, VP), dtype)
    moved = tl.full((BLOCK_B, VP), 1.0, dtype)
    total = tl.zeros((BLOCK_B,), tl.float64)
    doublings = tl.zeros((BLOCK_B,), tl.int32)
    smallest = tl.full((BLOCK_B, VP), 1.0, dtype)
    zeros = tl.zeros((BLOCK_B, VP), tl.int32)
    f = tl.load(f_ptr + at, mask=(n > 0)[:, None] & label, other=-float("inf"))
    for t in range(n_max):
        live = (t < n)[:, None] & label
        # The next scores are loaded while this step is computed.
        f_next = tl.load(f_ptr + at + (t + 1) * V, mask=(t + 1 < n)[:, None] & label, other=-float("inf"))
        f_top = _finite(tl.max(f, 1))
        q = moved * tl.exp(f - f_top[:, None])
        allowed = f > -float("inf")
        smallest = tl.minimum(smallest, tl.where(allowed & (moved > 0), q, 1.0))
        zeros = tl.maximum(zeros, (allowed & (moved == 0)).to(tl.int32))
        factor, e = _exponent(tl.max(q, 1))
        alpha = tl.where(live, q * factor[:, None], alpha)
        doublings += tl.where(t < n, e, 0)
        total += tl.where(t < n, f_top, 0.0).to(tl.float64)
        tl.store(alpha_ptr + at + t * V, alpha, mask=live)
        moved = _product(alpha, edge)
        f = f_next
    total += doublings.to(tl.float64) * 0.6931471805599453 + tl.maximum(n - 1, 0) * g_top.to(tl.float64)
    log_z = tl.where(n > 0, total + _log(tl.sum(alpha, 1)).to(tl.float64), 0.0)
    tl.store(log_z_ptr + s * B + b, log_z.to(dtype), mask=b < B)

    careful = _vanished(smallest, zeros, least, LOW, TINY, VP)
    tl.store(careful_ptr + pid, careful.to(tl.int8))
    if careful:
        tl.debug_barrier()  # before the same places are written again
        for k in range(BLOCK_B):
            _forward_in_logs(
                f_ptr, g_ptr, log_z_ptr, alpha_ptr, s, s * B + first + k, T,
                tl.sum(tl.where(row == k, n, 0), 0), V, VP,
            )  # fmt: skip


@triton.jit
def _product_of_logs(x):
    """(1, VP) logs of sums over the middle axis of exp x, x (1, VP, VP)."""
    top = _finite(tl.max(x, 1))
    return top + _log(tl.sum(tl.exp(x - top[:, None, :]), 1))


@triton.jit
def _forward_in_logs(f_ptr, g_ptr, log_z_ptr, alpha_ptr, s, chain, T, n, V: tl.constexpr, VP: tl.constexpr):
    """``forward_kernel`` for one sequence of n positions, with any potentials below +inf."""
    v = tl.arange(0, VP)
    label = (v < V)[None, :]
    two = (v < V)[:, None] & (v < V)[None, :]
    g = tl.load(g_ptr + s * V * V + v[:, None] * V + v[None, :], mask=two, other=-float("inf"))
    at = chain * T * V + v[None, :]
    alpha = tl.where(label, 0.0, -float("inf")).to(g.dtype)
    total = tl.zeros((1,), tl.float64)
    for t in range(n):
        f = tl.load(f_ptr + at + t * V, mask=label, other=-float("inf"))
        if t > 0:
            alpha = _product_of_logs(alpha[:, :, None] + g[None, :, :])
        alpha += f
        top = tl.max(alpha, 1)
        alpha -= _finite(top)[:, None]
        total += top.to(tl.float64)
        tl.store(alpha_ptr + at + t * V, alpha, mask=label)
    log_z = total + _log(tl.sum(tl.exp(alpha), 1)).to(tl.float64)
    tl.store(log_z_ptr + chain + tl.arange(0, 1), log_z.to(g.dtype), mask=n > 0)


@triton.jit(do_not_specialize=["B", "T", "n_blocks"])
def backward_kernel(
    f_ptr, g_ptr, mask_ptr, alpha_ptr, careful_ptr, weight_ptr, nodes_ptr, tables_ptr, B, T, n_blocks,
    V: tl.constexpr, VP: tl.constexpr, BLOCK_B: tl.constexpr, LOW: tl.constexpr,
    TINY: tl.constexpr, CHUNK: tl.constexpr, TABLES: tl.constexpr, BENDS: tl.constexpr,
):  # fmt: skip
    """Writes node marginals times weight (S, B, T, V), 0 at padding, and with TABLES those of transitions,
    summed over the sequences of a program (S, n_blocks, V, V). With BENDS, for programs of one sequence and
    weight 1, p (1 - p) of each transition in their place.

    Messages are known only up to a factor, so the products of two are normalised at each step.
    """
    dtype: tl.constexpr = f_ptr.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    s = pid // n_blocks
    first = (pid % n_blocks) * BLOCK_B
    row = tl.arange(0, BLOCK_B)
    b = first + row
    n = _lengths(mask_ptr, b, b < B, T, BLOCK_B, CHUNK)
    n_max = tl.max(n, 0)
    v = tl.arange(0, VP)
    at = ((s * B + b) * T * V)[:, None] + v[None, :]
    label = (v < V)[None, :]
    weight = tl.load(weight_ptr + s * B + b, mask=n > 0, other=0.0)

    # Transposed, [j, i] is the step from i to j: products then sum over the same axis as forward ones.
    two = (v < V)[:, None] & (v < V)[None, :]
    g = tl.load(g_ptr + s * V * V + v[None, :] * V + v[:, None], mask=two, other=-float("inf"))
    g_top = _finite(tl.max(tl.max(g, 1), 0))
    edge = tl.exp(g - g_top)
    least = _smallest_edge(g, g_top)

    for t in range(tl.min(tl.where(b < B, n, T), 0), T):
        padding = ((b < B) & (t >= n))[:, None] & label
        tl.store(nodes_ptr + at + t * V, tl.zeros((BLOCK_B, VP), dtype), mask=padding)

    passed = tl.zeros((BLOCK_B, VP), dtype)  # what position t + 1 passes back: e^f beta
    counts = tl.zeros((VP, VP), dtype)
    smallest = tl.full((BLOCK_B, VP), 1.0, dtype)
    zeros = tl.zeros((BLOCK_B, VP), tl.int32)
    was_careful = tl.load(careful_ptr + pid) > 0
    n_quick = tl.where(was_careful, 0, n_max)
    last = at + (n_max - 1) * V
    real = (n == n_quick)[:, None] & (n_quick > 0) & label
    f = tl.load(f_ptr + last, mask=real, other=-float("inf"))
    alpha = tl.load(alpha_ptr + last, mask=real, other=0.0)
    for back in range(n_quick):
        t = n_quick - 1 - back
        before = (t > 0) & (t - 1 < n)[:, None] & label
        f_next = tl.load(f_ptr + at + (t - 1) * V, mask=before, other=-float("inf"))
        alpha_next = tl.load(alpha_ptr + at + (t - 1) * V, mask=before, other=0.0)

        beta = _product(passed, edge)
        beta = tl.where((t + 1 < n)[:, None], beta, 1.0)
        node = alpha * beta
        norm = tl.sum(node, 1)
        # Only a sequence without any labelling has norm 0 at its last position.
        weight = tl.where((t + 1 == n) & (norm == 0), 0.0, weight)
        share = tl.where(t < n, weight / tl.maximum(norm, LOW), 0.0)
        tl.store(nodes_ptr + at + t * V, node * share[:, None], mask=(t < n)[:, None] & label)
        if BENDS:
            p = _outer(passed, alpha * share[:, None]) * edge
            counts += p - p * p
        elif TABLES:
            counts += _outer(passed, alpha * share[:, None])

        q = beta * tl.exp(f - _finite(tl.max(f, 1))[:, None])
        allowed = f > -float("inf")
        smallest = tl.minimum(smallest, tl.where(allowed & (beta > 0), q, 1.0))
        smallest = tl.minimum(smallest, tl.where((t < n) & (weight != 0), norm, 1.0)[:, None])
        zeros = tl.maximum(zeros, (allowed & (beta == 0)).to(tl.int32))
        factor, _ = _exponent(tl.max(q, 1))
        passed = q * factor[:, None]
        f = f_next
        alpha = alpha_next
    if not BENDS:
        counts *= edge

    if was_careful | _vanished(smallest, zeros, least, LOW, TINY, VP):
        tl.debug_barrier()  # before the same places are written again
        counts = tl.zeros((VP, VP), dtype)
        for k in range(BLOCK_B):
            counts += _backward_in_logs(
                f_ptr, g_ptr, alpha_ptr, weight_ptr, nodes_ptr, was_careful, s, s * B + first + k, T,
                tl.sum(tl.where(row == k, n, 0), 0), V, VP, TABLES, BENDS,
            )  # fmt: skip
    if TABLES:
        tl.store(tables_ptr + pid * V * V + v[None, :] * V + v[:, None], counts, mask=two)


@triton.jit
def _backward_in_logs(
    f_ptr, g_ptr, alpha_ptr, weight_ptr, nodes_ptr, alpha_is_log, s, chain, T, n,
    V: tl.constexpr, VP: tl.constexpr, TABLES: tl.constexpr, BENDS: tl.constexpr,
):  # fmt: skip
    """``backward_kernel`` for one sequence of n positions, with any potentials below +inf. Returns the sums
    of transitions, (VP, VP), [j, i]."""
    v = tl.arange(0, VP)
    label = (v < V)[None, :]
    two = (v < V)[:, None] & (v < V)[None, :]
    g = tl.load(g_ptr + s * V * V + v[None, :] * V + v[:, None], mask=two, other=-float("inf"))
    at = chain * T * V + v[None, :]
    counts = tl.zeros((VP, VP), g.dtype)
    weight = tl.load(weight_ptr + chain + tl.arange(0, 1), mask=n > 0, other=0.0)
    passed = tl.full((1, VP), -float("inf"), g.dtype)
    for back in range(n):
        t = n - 1 - back
        f = tl.load(f_ptr + at + t * V, mask=label, other=-float("inf"))
        alpha = tl.load(alpha_ptr + at + t * V, mask=label, other=0.0)
        alpha = tl.where(label, tl.where(alpha_is_log, alpha, _log(tl.abs(alpha))), -float("inf"))
        ahead = passed[:, :, None] + g[None, :, :]
        beta = tl.where(back == 0, 0.0, _product_of_logs(ahead))
        node = alpha + beta
        best = tl.max(node, 1)
        # Only a sequence without any labelling has -inf everywhere.
        weight = tl.where(best == -float("inf"), 0.0, weight)
        best = _finite(best)
        node = tl.exp(node - best[:, None])
        share = weight / tl.maximum(tl.sum(node, 1), 0.5)
        tl.store(nodes_ptr + at + t * V, node * share[:, None], mask=label)
        if TABLES:
            p = tl.exp(ahead + (alpha - best[:, None])[:, None, :]) * share[:, None, None]
            if BENDS:
                p -= p * p
            counts += tl.sum(p, 0)
        passed = f + beta
        passed -= _finite(tl.max(passed, 1))[:, None]
    return counts
