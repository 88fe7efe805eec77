"""Eight numbers at a time for compiled loops: the same place in eight draws, side by side in memory.

Each function loads all that it needs before it stores anything, as plain variables: only then does the compiler
know that vector instructions would give the same. Places are unsigned: it need not look whether they count from
the end.
"""

# ruff: noqa: E702

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

LANES = 8

_inlined = njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract", "nsz"})
_1, _2, _3, _4, _5, _6, _7, _8 = (np.uint64(k) for k in range(1, 9))


@_inlined
def multiply(out: Any, o: Any, a: Any, i: Any, b: Any, j: Any) -> None:
    """out[o] <- a[i] b[j], of eight numbers from each place on."""
    o, i, j = np.uint64(o), np.uint64(i), np.uint64(j)
    p, q, r, s = a[i] * b[j], a[i + _1] * b[j + _1], a[i + _2] * b[j + _2], a[i + _3] * b[j + _3]
    t, u, v, w = (
        a[i + _4] * b[j + _4], a[i + _5] * b[j + _5], a[i + _6] * b[j + _6], a[i + _7] * b[j + _7],
    )  # fmt: skip
    out[o] = p; out[o + _1] = q; out[o + _2] = r; out[o + _3] = s  # fmt: skip
    out[o + _4] = t; out[o + _5] = u; out[o + _6] = v; out[o + _7] = w  # fmt: skip


@_inlined
def divide(out: Any, o: Any, a: Any, i: Any, b: Any, j: Any) -> None:
    """out[o] /= a[i] b[j], where that is not 0."""
    o, i, j = np.uint64(o), np.uint64(i), np.uint64(j)
    p, q, r, s = a[i] * b[j], a[i + _1] * b[j + _1], a[i + _2] * b[j + _2], a[i + _3] * b[j + _3]
    t, u, v, w = (
        a[i + _4] * b[j + _4], a[i + _5] * b[j + _5], a[i + _6] * b[j + _6], a[i + _7] * b[j + _7],
    )  # fmt: skip
    p, q, r, s = (p if p > 0 else 1.0, q if q > 0 else 1.0, r if r > 0 else 1.0, s if s > 0 else 1.0)
    t, u, v, w = (t if t > 0 else 1.0, u if u > 0 else 1.0, v if v > 0 else 1.0, w if w > 0 else 1.0)
    p, q, r, s = out[o] / p, out[o + _1] / q, out[o + _2] / r, out[o + _3] / s
    t, u, v, w = out[o + _4] / t, out[o + _5] / u, out[o + _6] / v, out[o + _7] / w
    out[o] = p; out[o + _1] = q; out[o + _2] = r; out[o + _3] = s  # fmt: skip
    out[o + _4] = t; out[o + _5] = u; out[o + _6] = v; out[o + _7] = w  # fmt: skip


@_inlined
def add(out: Any, o: Any, a: Any, i: Any) -> None:
    """out[o] += a[i]."""
    o, i = np.uint64(o), np.uint64(i)
    p, q, r, s = out[o] + a[i], out[o + _1] + a[i + _1], out[o + _2] + a[i + _2], out[o + _3] + a[i + _3]
    t, u, v, w = (
        out[o + _4] + a[i + _4], out[o + _5] + a[i + _5], out[o + _6] + a[i + _6], out[o + _7] + a[i + _7],
    )  # fmt: skip
    out[o] = p; out[o + _1] = q; out[o + _2] = r; out[o + _3] = s  # fmt: skip
    out[o + _4] = t; out[o + _5] = u; out[o + _6] = v; out[o + _7] = w  # fmt: skip


@_inlined
def dot(out: Any, o: Any, n: int, a: Any, b: Any, j: Any, step: Any) -> None:
    """out[o] <- the sum of a[8 m] b[j + step m] over m < n."""
    o, j, step, i = np.uint64(o), np.uint64(j), np.uint64(step), np.uint64(0)
    p = q = r = s = t = u = v = w = 0.0
    for _ in range(n):
        p += a[i] * b[j]
        q += a[i + _1] * b[j + _1]
        r += a[i + _2] * b[j + _2]
        s += a[i + _3] * b[j + _3]
        t += a[i + _4] * b[j + _4]
        u += a[i + _5] * b[j + _5]
        v += a[i + _6] * b[j + _6]
        w += a[i + _7] * b[j + _7]
        i, j = i + _8, j + step
    out[o] = p; out[o + _1] = q; out[o + _2] = r; out[o + _3] = s  # fmt: skip
    out[o + _4] = t; out[o + _5] = u; out[o + _6] = v; out[o + _7] = w  # fmt: skip


@_inlined
def row_sum(out: Any, o: Any, n: int, a: Any, i: Any) -> None:
    """out[o] <- the sum of a[i + 8 m] over m < n."""
    o, i = np.uint64(o), np.uint64(i)
    p = q = r = s = t = u = v = w = 0.0
    for _ in range(n):
        p += a[i]
        q += a[i + _1]
        r += a[i + _2]
        s += a[i + _3]
        t += a[i + _4]
        u += a[i + _5]
        v += a[i + _6]
        w += a[i + _7]
        i += _8
    out[o] = p; out[o + _1] = q; out[o + _2] = r; out[o + _3] = s  # fmt: skip
    out[o + _4] = t; out[o + _5] = u; out[o + _6] = v; out[o + _7] = w  # fmt: skip


@_inlined
def multiply_and_add(out: Any, o: Any, total: Any, m: Any, a: Any, i: Any, b: Any, j: Any) -> None:
    """total[m] += out[o] <- a[i] b[j]."""
    multiply(out, o, a, i, b, j)
    add(total, m, out, o)


@_inlined
def add_product(
    out: Any, o: Any, total: Any, m: Any, a: Any, i: Any, b: Any, j: Any, c: Any, k: Any
) -> None:
    """out[o] += a[i] b[j] c[k], and total[m] likewise."""
    o, m, i, j, k = np.uint64(o), np.uint64(m), np.uint64(i), np.uint64(j), np.uint64(k)
    p, q = a[i] * b[j] * c[k], a[i + _1] * b[j + _1] * c[k + _1]
    r, s = a[i + _2] * b[j + _2] * c[k + _2], a[i + _3] * b[j + _3] * c[k + _3]
    t, u = a[i + _4] * b[j + _4] * c[k + _4], a[i + _5] * b[j + _5] * c[k + _5]
    v, w = a[i + _6] * b[j + _6] * c[k + _6], a[i + _7] * b[j + _7] * c[k + _7]
    p1, q1, r1, s1 = out[o] + p, out[o + _1] + q, out[o + _2] + r, out[o + _3] + s
    t1, u1, v1, w1 = out[o + _4] + t, out[o + _5] + u, out[o + _6] + v, out[o + _7] + w
    p, q, r, s = total[m] + p, total[m + _1] + q, total[m + _2] + r, total[m + _3] + s
    t, u, v, w = total[m + _4] + t, total[m + _5] + u, total[m + _6] + v, total[m + _7] + w
    out[o] = p1; out[o + _1] = q1; out[o + _2] = r1; out[o + _3] = s1  # fmt: skip
    out[o + _4] = t1; out[o + _5] = u1; out[o + _6] = v1; out[o + _7] = w1  # fmt: skip
    total[m] = p; total[m + _1] = q; total[m + _2] = r; total[m + _3] = s  # fmt: skip
    total[m + _4] = t; total[m + _5] = u; total[m + _6] = v; total[m + _7] = w  # fmt: skip


@_inlined
def highest(out: Any, n: int, a: Any, i: Any) -> None:
    """out[0] <- the largest of a[i + 8 m] over m < n, or 0."""
    i = np.uint64(i)
    p = q = r = s = t = u = v = w = 0.0
    for _ in range(n):
        p = a[i] if a[i] > p else p
        q = a[i + _1] if a[i + _1] > q else q
        r = a[i + _2] if a[i + _2] > r else r
        s = a[i + _3] if a[i + _3] > s else s
        t = a[i + _4] if a[i + _4] > t else t
        u = a[i + _5] if a[i + _5] > u else u
        v = a[i + _6] if a[i + _6] > v else v
        w = a[i + _7] if a[i + _7] > w else w
        i += _8
    out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7] = p, q, r, s, t, u, v, w


@_inlined
def lowest(n: int, a: Any, i: Any) -> float:
    """The smallest positive of the 8 n numbers from a[i] on; 1 if there is none below."""
    i = np.uint64(i)
    p = q = r = s = 1.0
    for _ in range(2 * n):
        p = a[i] if 0 < a[i] < p else p
        q = a[i + _1] if 0 < a[i + _1] < q else q
        r = a[i + _2] if 0 < a[i + _2] < r else r
        s = a[i + _3] if 0 < a[i + _3] < s else s
        i += _4
    return min(min(p, q), min(r, s))
