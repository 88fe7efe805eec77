"""The chain's two passes as Triton kernels: one program has BLOCK_B sequences of one draw, all steps of them.

A program first takes the quick way: messages are probabilities with a largest entry of 1, a step is a matrix
product, V exponentials. It keeps account of the smallest numbers met. Where one that should not be 0 may have
vanished, the program throws its work away and takes the careful way: one sequence after the other, in
log space, V^2 exponentials a step. Nobody outside has to look at the potentials.

Why the account is enough, for messages forward (those backward are alike). Let moved_j = sum_i alpha_i e^g_ij and
q_j = moved_j e^f_j, for labels j that f allows. If moved_j > 0, all that vanished in its sum is below the
smallest number of the type, and q_j >= LOW is far above that: q_j is right to rounding. If moved_j = 0, then
either no label leads to j, or each product alpha_i e^g_ij vanished; the latter cannot be
when the smallest alpha > 0 times the smallest e^g > 0 is above TINY. alpha is q over its largest entry, and so at least q / V.

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
def _product(x, matrix, DOT: tl.constexpr):
    """x (BLOCK_B, VP) @ matrix (VP, VP)."""
    if DOT == "no":
        out = tl.sum(x[:, :, None] * matrix[None, :, :], 1)
    else:
        out = tl.dot(x, matrix, input_precision=DOT, out_dtype=x.dtype)
    return out


@triton.jit
def _outer(x, y, DOT: tl.constexpr):
    """x^T y, (VP, VP), of x and y (BLOCK_B, VP)."""
    if DOT == "no":
        out = tl.sum(x[:, :, None] * y[:, None, :], 0)
    else:
        out = tl.dot(tl.trans(x), y, input_precision=DOT, out_dtype=x.dtype)
    return out


@triton.jit
def _finite(x):
    """x, or 0 in the place of -inf: what may be subtracted."""
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _log(x):
    """log x of x >= 0; -inf of 0."""
    return tl.where(x == 0, -float("inf"), tl.log(tl.where(x == 0, 1.0, x)))


@triton.jit
def _smallest_edge(g, g_top):
    """exp of the lowest score that is not -inf, less g_top."""
    lowest = tl.min(tl.min(tl.where(g == -float("inf"), g_top, g), 1), 0)
    return tl.exp(lowest - g_top)


@triton.jit
def _vanished(smallest, zeros, edge, LOW: tl.constexpr, TINY: tl.constexpr, VP: tl.constexpr):
    """Whether the account of a program's messages, two (BLOCK_B, VP), allows that a number was lost."""
    q = tl.min(tl.min(smallest, 1), 0)
    some_zero = tl.max(tl.max(zeros, 1), 0) > 0
    return (q < LOW) | (some_zero & (q / VP * edge < TINY))


@triton.jit(do_not_specialize=["B", "T", "n_blocks"])
def forward_kernel(
    f_ptr,
    g_ptr,
    mask_ptr,
    log_z_ptr,
    alpha_ptr,
    B,
    T,
    n_blocks,
    V: tl.constexpr,
    VP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DOT: tl.constexpr,
    LOW: tl.constexpr,
    TINY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """log Z (S, B), and the logs of forward messages (S, B, T, V), the largest entry of each 0. Nothing is
    written to alpha at padding."""
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
    smallest = tl.full((BLOCK_B, VP), 1.0, dtype)
    zeros = tl.zeros((BLOCK_B, VP), tl.int32)
    f = tl.load(f_ptr + at, mask=(n > 0)[:, None] & label, other=-float("inf"))
    for t in range(0, n_max):
        live = (t < n)[:, None] & label
        # The next scores are on their way while this step is worked on.
        f_next = tl.load(
            f_ptr + at + (t + 1) * V, mask=(t + 1 < n)[:, None] & label, other=-float("inf")
        )
        f_top = _finite(tl.max(f, 1))
        q = moved * tl.exp(f - f_top[:, None])
        allowed = f > -float("inf")
        smallest = tl.minimum(smallest, tl.where(allowed & (moved > 0), q, 1.0))
        zeros = tl.maximum(zeros, (allowed & (moved == 0)).to(tl.int32))
        top = tl.max(q, 1)
        alpha = tl.where(live, q / tl.where(top == 0, 1.0, top)[:, None], alpha)
        total += tl.where(t < n, f_top + _log(top), 0.0).to(tl.float64)
        tl.store(alpha_ptr + at + t * V, _log(alpha), mask=live)
        moved = _product(alpha, edge, DOT)
        f = f_next
    log_z = total + _log(tl.sum(alpha, 1)).to(tl.float64) + tl.maximum(n - 1, 0) * g_top.to(tl.float64)
    log_z = tl.where(n > 0, log_z, 0.0)
    tl.store(log_z_ptr + s * B + b, log_z.to(dtype), mask=b < B)

    if _vanished(smallest, zeros, least, LOW, TINY, VP):
        tl.debug_barrier()  # before the same places are written again
        for k in range(0, BLOCK_B):
            _forward_in_logs(
                f_ptr, g_ptr, log_z_ptr, alpha_ptr, s, s * B + first + k, T,
                tl.sum(tl.where(row == k, n, 0), 0), V, VP,
            )  # fmt: skip


@triton.jit
def _forward_in_logs(
    f_ptr, g_ptr, log_z_ptr, alpha_ptr, s, chain, T, n, V: tl.constexpr, VP: tl.constexpr
):
    """``forward_kernel`` of one sequence of n positions, for any potentials below +inf."""
    v = tl.arange(0, VP)
    two = (v < V)[:, None] & (v < V)[None, :]
    g = tl.load(g_ptr + s * V * V + v[:, None] * V + v[None, :], mask=two, other=-float("inf"))
    at = chain * T * V + v
    alpha = tl.where(v < V, 0.0, -float("inf")).to(g.dtype)
    total = tl.zeros((1,), tl.float64)
    for t in range(0, n):
        f = tl.load(f_ptr + at + t * V, mask=v < V, other=-float("inf"))
        if t > 0:
            ahead = alpha[:, None] + g
            top = _finite(tl.max(ahead, 0))
            alpha = top + _log(tl.sum(tl.exp(ahead - top[None, :]), 0))
        alpha += f
        top = tl.max(alpha, 0)
        alpha -= _finite(top)
        total += top.to(tl.float64)
        tl.store(alpha_ptr + at + t * V, alpha, mask=v < V)
    if n > 0:
        log_z = total + _log(tl.sum(tl.exp(alpha), 0)).to(tl.float64)
        tl.store(log_z_ptr + chain + tl.arange(0, 1), log_z.to(g.dtype))


@triton.jit(do_not_specialize=["B", "T", "n_blocks"])
def backward_kernel(
    f_ptr,
    g_ptr,
    mask_ptr,
    alpha_ptr,
    weight_ptr,
    nodes_ptr,
    pairs_ptr,
    B,
    T,
    n_blocks,
    V: tl.constexpr,
    VP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    DOT: tl.constexpr,
    LOW: tl.constexpr,
    TINY: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Node marginals times weight (S, B, T, V), 0 at padding, and with PAIRS those of pairs, summed over the
    sequences of a program (S, n_blocks, V, V).

    beta is known but for a factor, here as in log space: what it is multiplied with is normalised at each step.
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

    # Turned round, [j, i] is the step from i to j: products then sum over the same axis as those forward.
    two = (v < V)[:, None] & (v < V)[None, :]
    g = tl.load(g_ptr + s * V * V + v[None, :] * V + v[:, None], mask=two, other=-float("inf"))
    g_top = _finite(tl.max(tl.max(g, 1), 0))
    edge = tl.exp(g - g_top)
    least = _smallest_edge(g, g_top)

    for t in range(n_max, T):
        nothing = tl.zeros((BLOCK_B, VP), dtype)
        tl.store(nodes_ptr + at + t * V, nothing, mask=(b < B)[:, None] & label)

    passed = tl.zeros((BLOCK_B, VP), dtype)  # what position t + 1 says of its labels: e^f beta
    counts = tl.zeros((VP, VP), dtype)
    smallest = tl.full((BLOCK_B, VP), 1.0, dtype)
    zeros = tl.zeros((BLOCK_B, VP), tl.int32)
    start = at + (n_max - 1) * V
    real = (n == n_max)[:, None] & (n_max > 0) & label
    f = tl.load(f_ptr + start, mask=real, other=-float("inf"))
    alpha_log = tl.load(alpha_ptr + start, mask=real, other=-float("inf"))
    for back in range(0, n_max):
        t = n_max - 1 - back
        before = (t > 0) & (t - 1 < n)[:, None] & label
        f_next = tl.load(f_ptr + at + (t - 1) * V, mask=before, other=-float("inf"))
        alpha_next = tl.load(alpha_ptr + at + (t - 1) * V, mask=before, other=-float("inf"))

        beta = _product(passed, edge, DOT)
        beta = tl.where((t + 1 < n)[:, None], beta, 1.0)
        alpha = tl.exp(alpha_log)
        node = alpha * beta
        norm = tl.sum(node, 1)
        # Only a sequence without any labelling has nothing at its last position.
        weight = tl.where((t + 1 == n) & (norm == 0), 0.0, weight)
        share = tl.where(t < n, weight / tl.maximum(norm, LOW), 0.0)
        tl.store(nodes_ptr + at + t * V, node * share[:, None], mask=(b < B)[:, None] & label)
        if PAIRS:
            counts += _outer(passed, alpha * share[:, None], DOT)

        q = beta * tl.exp(f - _finite(tl.max(f, 1))[:, None])
        allowed = f > -float("inf")
        smallest = tl.minimum(smallest, tl.where(allowed & (beta > 0), q, 1.0))
        smallest = tl.minimum(smallest, tl.where(alpha_log > -float("inf"), alpha, 1.0))
        smallest = tl.minimum(smallest, tl.where((t < n) & (weight != 0), norm, 1.0)[:, None])
        zeros = tl.maximum(zeros, (allowed & (beta == 0)).to(tl.int32))
        top = tl.max(q, 1)
        passed = q / tl.where(top == 0, 1.0, top)[:, None]
        f = f_next
        alpha_log = alpha_next
    counts *= edge

    if _vanished(smallest, zeros, least, LOW, TINY, VP):
        tl.debug_barrier()  # before the same places are written again
        counts = tl.zeros((VP, VP), dtype)
        for k in range(0, BLOCK_B):
            counts += _backward_in_logs(
                f_ptr, g_ptr, alpha_ptr, weight_ptr, nodes_ptr, s, s * B + first + k, T,
                tl.sum(tl.where(row == k, n, 0), 0), V, VP, PAIRS,
            )  # fmt: skip
    if PAIRS:
        tl.store(pairs_ptr + pid * V * V + v[None, :] * V + v[:, None], counts, mask=two)


@triton.jit
def _backward_in_logs(
    f_ptr, g_ptr, alpha_ptr, weight_ptr, nodes_ptr, s, chain, T, n,
    V: tl.constexpr, VP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """``backward_kernel`` of one sequence of n positions, for any potentials below +inf: (VP, VP) pairs [j, i]."""
    v = tl.arange(0, VP)
    two = (v < V)[:, None] & (v < V)[None, :]
    g = tl.load(g_ptr + s * V * V + v[None, :] * V + v[:, None], mask=two, other=-float("inf"))
    at = chain * T * V + v
    counts = tl.zeros((VP, VP), g.dtype)
    weight = tl.load(weight_ptr + chain, mask=n > 0, other=0.0)
    passed = tl.full((VP,), -float("inf"), g.dtype)
    for back in range(0, n):
        t = n - 1 - back
        f = tl.load(f_ptr + at + t * V, mask=v < V, other=-float("inf"))
        alpha = tl.load(alpha_ptr + at + t * V, mask=v < V, other=-float("inf"))
        ahead = passed[:, None] + g
        top = _finite(tl.max(ahead, 0))
        beta = top + _log(tl.sum(tl.exp(ahead - top[None, :]), 0))
        beta = tl.where(back == 0, 0.0, beta)
        node = alpha + beta
        best = tl.max(node, 0)
        weight = tl.where(best == -float("inf"), 0.0, weight)
        best = _finite(best)
        node = tl.exp(node - best)
        norm = tl.sum(node, 0)
        share = weight / tl.where(norm == 0, 1.0, norm)
        tl.store(nodes_ptr + at + t * V, node * share, mask=v < V)
        if PAIRS:
            counts += tl.exp(ahead + (alpha - best)[None, :]) * share
        passed = f + beta
        passed -= _finite(tl.max(passed, 0))
    return counts
