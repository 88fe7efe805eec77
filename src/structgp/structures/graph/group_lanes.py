"""Products of a table's rows with one vector, several rows at a time, in the lanes of ``lanes``.

Rows of a group lie at equal distances. A vector, once loaded, serves all rows of a call, and their separate
sums keep the multipliers busy. Letters and places as in ``lanes``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from structgp.structures.graph.lane_code import Code, written


def _dots_of(rows: int) -> Callable[..., Any]:
    def dots(
        _: Any, out: Any, o: Any, apart: Any, n: Any, a: Any, i: Any, b: Any, j: Any, step: Any,
        across: Any,
    ) -> Any:  # fmt: skip
        """out[o + apart r] <- the sum of a[i + L m] b[j + across r + step m] over m < n, for all
        r < rows."""
        i64 = types.int64

        @written(out, i64, i64, i64, a, i64, b, i64, i64, i64)
        def found(to: Code) -> None:
            sums = [cgutils.alloca_once_value(to.builder, to.constant(0)) for _ in range(rows)]
            with cgutils.for_range(to.builder, to.arguments[3]) as loop:
                first = to.load(4, to.after(5, loop.index, to.lanes))
                place = to.after(7, loop.index, to.arguments[8])
                for so_far in sums:
                    product = to.times(first, to.load(6, place))
                    to.builder.store(to.plus(to.builder.load(so_far), product), so_far)
                    place = to.builder.add(place, to.arguments[9])
            place = to.arguments[1]
            for so_far in sums:
                to.store(to.builder.load(so_far), 0, place)
                place = to.builder.add(place, to.arguments[2])

        return found

    return dots


def _slopes_of(rows: int) -> Callable[..., Any]:
    def slopes(
        _: Any, out: Any, total: Any, n: Any, a: Any, i: Any, b: Any, j: Any, step: Any, across: Any,
        c: Any, k: Any, apart: Any,
    ) -> Any:  # fmt: skip
        """p = b[j + across r + step m] c[k + apart r]; out[j + across r + step m] += p a[i + L m] and
        total[i + L m] += p, for each m < n and each row r < rows. Different rows must have different places
        of b."""
        i64 = types.int64

        @written(out, total, i64, a, i64, b, i64, i64, i64, c, i64, i64)
        def found(to: Code) -> None:
            factors, place = [], to.arguments[10]
            for _ in range(rows):
                factors.append(to.load(9, place))
                place = to.builder.add(place, to.arguments[11])
            with cgutils.for_range(to.builder, to.arguments[2]) as loop:
                here = to.after(4, loop.index, to.lanes)
                first, so_far = to.load(3, here), to.load(1, here)
                place, grown = to.after(6, loop.index, to.arguments[7]), []
                for factor in factors:
                    product = to.times(to.load(5, place), factor)
                    so_far = to.plus(so_far, product)
                    grown.append((to.plus(to.load(0, place), to.times(product, first)), place))
                    place = to.builder.add(place, to.arguments[8])
                for value, place in grown:
                    to.store(value, 0, place)
                to.store(so_far, 1, here)

        return found

    return slopes


ROWS = 4
"""Rows per call of ``some_dots`` and ``some_slopes``: four sums and four factors stay in registers."""

one_dot, some_dots = intrinsic(_dots_of(1)), intrinsic(_dots_of(ROWS))
one_slope, some_slopes = intrinsic(_slopes_of(1)), intrinsic(_slopes_of(ROWS))
