"""Eight numbers at a time for compiled loops, or sixteen in single precision: the same place in as many
draws, side by side in memory.

Each function is a few vector instructions (``lane_code``). A place is that of the first of L lanes in a
flat array; the arrays of a call all have one type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from structgp.structures.graph.lane_code import LANES, VECTOR, Code, written


@intrinsic
def multiply(_: Any, out: Any, o: Any, a: Any, i: Any, b: Any, j: Any) -> Any:
    """out[o] <- a[i] b[j]."""

    @written(out, types.int64, a, types.int64, b, types.int64)
    def found(to: Code) -> None:
        to.store(to.times(to.load(2, 3), to.load(4, 5)), 0, 1)

    return found


@intrinsic
def add(_: Any, out: Any, o: Any, a: Any, i: Any) -> Any:
    """out[o] += a[i]."""

    @written(out, types.int64, a, types.int64)
    def found(to: Code) -> None:
        to.store(to.plus(to.load(0, 1), to.load(2, 3)), 0, 1)

    return found


@intrinsic
def divide(_: Any, out: Any, o: Any, a: Any, i: Any, b: Any, j: Any) -> Any:
    """out[o] /= a[i] b[j], where that product is not 0."""

    @written(out, types.int64, a, types.int64, b, types.int64)
    def found(to: Code) -> None:
        by = to.times(to.load(2, 3), to.load(4, 5))
        by = to.builder.select(to.builder.fcmp_ordered("==", by, to.constant(0)), to.constant(1), by)
        to.store(to.builder.fdiv(to.load(0, 1), by), 0, 1)

    return found


@intrinsic
def multiply_and_add(_: Any, out: Any, o: Any, a: Any, i: Any, total: Any, k: Any) -> Any:
    """total[k] += out[o] <- out[o] a[i]."""

    @written(out, types.int64, a, types.int64, total, types.int64)
    def found(to: Code) -> None:
        product = to.times(to.load(0, 1), to.load(2, 3))
        to.store(product, 0, 1)
        to.store(to.plus(to.load(4, 5), product), 4, 5)

    return found


@intrinsic
def dot(_: Any, out: Any, o: Any, n: Any, a: Any, b: Any, j: Any, step: Any) -> Any:
    """out[o] <- the sum of a[L m] b[j + step m] over m < n."""

    @written(out, types.int64, types.int64, a, b, types.int64, types.int64)
    def found(to: Code) -> None:
        def term(so_far: Any, m: Any) -> Any:
            first = to.load(3, to.builder.mul(m, to.lanes))
            return to.plus(so_far, to.times(first, to.load(4, to.after(5, m, to.arguments[6]))))

        to.store(to.fold(2, 0, term), 0, 1)

    return found


@intrinsic
def row_sum(_: Any, out: Any, o: Any, n: Any, a: Any, i: Any) -> Any:
    """out[o] <- the sum of a[i + L m] over m < n."""

    @written(out, types.int64, types.int64, a, types.int64)
    def found(to: Code) -> None:
        to.store(to.fold(2, 0, lambda x, m: to.plus(x, to.load(3, to.after(4, m, to.lanes)))), 0, 1)

    return found


@intrinsic
def extremes(_: Any, high: Any, low: Any, n: Any, a: Any, i: Any) -> Any:
    """high[0] <- the largest of a[i + L m] over m < n, or 0; low[0] <- the smallest above 0, or inf."""

    @written(high, low, types.int64, a, types.int64)
    def found(to: Code) -> None:
        def larger(so_far: Any, m: Any) -> Any:
            here = to.load(3, to.after(4, m, to.lanes))
            return to.builder.select(to.builder.fcmp_ordered(">", here, so_far), here, so_far)

        def smaller(so_far: Any, m: Any) -> Any:
            here = to.load(3, to.after(4, m, to.lanes))
            here = to.builder.select(
                to.builder.fcmp_ordered(">", here, to.constant(0)), here, to.constant(float("inf"))
            )
            return to.builder.select(to.builder.fcmp_ordered("<", here, so_far), here, so_far)

        zero = ir.Constant(ir.IntType(64), 0)
        to.store(to.fold(2, 0, larger), 0, zero)
        to.store(to.fold(2, float("inf"), smaller), 1, zero)

    return found


@intrinsic
def four_dots(_: Any, out: Any, o: Any, n: Any, a: Any, b: Any, j: Any, step: Any, across: Any) -> Any:
    """out[o + L r] <- the sum of a[L m] b[j + across r + step m] over m < n, for r = 0, 1, 2, 3: a number
    of a, once loaded, serves all four."""
    i64 = types.int64

    @written(out, i64, i64, a, b, i64, i64, i64)
    def found(to: Code) -> None:
        sums = [cgutils.alloca_once_value(to.builder, to.constant(0)) for _ in range(4)]
        with cgutils.for_range(to.builder, to.arguments[2]) as loop:
            first = to.load(3, to.builder.mul(loop.index, to.lanes))
            place = to.after(5, loop.index, to.arguments[6])
            for so_far in sums:
                product = to.times(first, to.load(4, place))
                to.builder.store(to.plus(to.builder.load(so_far), product), so_far)
                place = to.builder.add(place, to.arguments[7])
        place = to.arguments[1]
        for so_far in sums:
            to.store(to.builder.load(so_far), 0, place)
            place = to.builder.add(place, to.lanes)

    return found


def _sums_of(rows: int) -> Callable[..., Any]:
    def sums(
        _: Any, out: Any, o: Any, apart: Any, n: Any, x: Any, i: Any, step: Any, across: Any, b: Any,
        j: Any, along: Any,
    ) -> Any:  # fmt: skip
        """out[o + apart r] <- the sum of x[i + across r + step m] b[j + along m] over m < n, for each row
        r < rows. x has single numbers, not lanes: each multiplies all lanes of b."""
        i64 = types.int64

        @written(out, i64, i64, i64, x, i64, i64, i64, b, i64, i64)
        def found(to: Code) -> None:
            sums = [cgutils.alloca_once_value(to.builder, to.constant(0)) for _ in range(rows)]
            with cgutils.for_range(to.builder, to.arguments[3]) as loop:
                lanes = to.load(8, to.after(9, loop.index, to.arguments[10]))
                place = to.after(5, loop.index, to.arguments[6])
                for so_far in sums:
                    product = to.times(to.spread(to.number(4, place)), lanes)
                    to.builder.store(to.plus(to.builder.load(so_far), product), so_far)
                    place = to.builder.add(place, to.arguments[7])
            place = to.arguments[1]
            for so_far in sums:
                to.store(to.builder.load(so_far), 0, place)
                place = to.builder.add(place, to.arguments[2])

        return found

    return sums


four_sums, eight_sums = intrinsic(_sums_of(4)), intrinsic(_sums_of(8))
"""Eight sums keep two multipliers busy, each of which takes four steps for a product."""


@intrinsic
def largest_square(_: Any, out: Any, o: Any, n: Any, a: Any, i: Any) -> Any:
    """out[o] <- the largest square of a[i + L m] over m < n."""

    @written(out, types.int64, types.int64, a, types.int64)
    def found(to: Code) -> None:
        def larger(so_far: Any, m: Any) -> Any:
            here = to.load(3, to.after(4, m, to.lanes))
            here = to.times(here, here)
            return to.builder.select(to.builder.fcmp_ordered(">", here, so_far), here, so_far)

        to.store(to.fold(2, 0, larger), 0, 1)

    return found


@intrinsic
def scale(_: Any, out: Any, o: Any, a: Any, i: Any, x: Any, k: Any) -> Any:
    """out[o] <- a[i] times the number x[k]."""

    @written(out, types.int64, a, types.int64, x, types.int64)
    def found(to: Code) -> None:
        to.store(to.times(to.load(2, 3), to.spread(to.number(4, to.arguments[5]))), 0, 1)

    return found


@intrinsic
def product_sum(_: Any, out: Any, o: Any, n: Any, a: Any, b: Any, c: Any, i: Any) -> Any:
    """out[o] <- the sum of a[i + L m] b[i + L m] c[i + L m] over m < n."""

    @written(out, types.int64, types.int64, a, b, c, types.int64)
    def found(to: Code) -> None:
        def term(so_far: Any, m: Any) -> Any:
            place = to.after(6, m, to.lanes)
            return to.plus(
                so_far, to.times(to.times(to.load(3, place), to.load(4, place)), to.load(5, place))
            )

        to.store(to.fold(2, 0, term), 0, 1)

    return found


@intrinsic
def invert(_: Any, out: Any, o: Any, a: Any, i: Any) -> Any:
    """out[o] <- 1 / a[i], or 0 where a[i] is 0."""

    @written(out, types.int64, a, types.int64)
    def found(to: Code) -> None:
        by = to.load(2, 3)
        nothing = to.builder.fcmp_ordered("==", by, to.constant(0))
        found = to.builder.fdiv(to.constant(1), to.builder.select(nothing, to.constant(1), by))
        to.store(to.builder.select(nothing, to.constant(0), found), 0, 1)

    return found


@intrinsic
def agree_two(_: Any, node: Any, i: Any, j: Any, a: Any, b: Any, factor: Any, gap: Any, least: Any) -> Any:
    """Makes two marginals agree: p = node a b factor at i and at j, with factor[0] and factor[8], both at
    least ``least``. Multiplies node[i] and node[j] so that both p become their geometric mean, and raises
    gap[0] to half their difference if that is larger."""
    given = (node, types.int64, types.int64, a, b, factor, gap, types.float64)

    @written(*given)
    def found(to: Code) -> None:
        build = to.builder
        root = cgutils.get_or_insert_function(
            build.module, ir.FunctionType(VECTOR, [VECTOR]), f"llvm.sqrt.v{LANES}f64"
        )

        def larger(x: Any, y: Any) -> Any:
            return build.select(build.fcmp_ordered(">", x, y), x, y)

        floor = to.spread(to.arguments[7])
        p, nodes = [], []
        for place, k in ((1, 0), (2, LANES)):
            nodes.append(to.load(0, place))
            product = to.times(to.times(nodes[-1], to.load(3, place)), to.load(4, place))
            p.append(to.times(product, to.load(5, ir.Constant(ir.IntType(64), k))))
        zero = ir.Constant(ir.IntType(64), 0)
        apart = build.fsub(p[0], p[1])
        apart = to.times(larger(apart, build.fsub(to.constant(0), apart)), to.constant(0.5))
        to.store(larger(apart, to.load(6, zero)), 6, zero)
        one, other = (larger(x, floor) for x in p)
        both = to.times(one, other)
        by = build.fdiv(build.call(root, [both]), both)
        to.store(to.times(nodes[0], to.times(by, other)), 0, 1)
        to.store(to.times(nodes[1], to.times(by, one)), 0, 2)

    return found


@intrinsic
def scale_by(_: Any, out: Any, o: Any, a: Any, i: Any, factor: Any) -> Any:
    """out[o] <- factor a[i], where ``factor`` is a single number."""

    @written(out, types.int64, a, types.int64, types.float64)
    def found(to: Code) -> None:
        to.store(to.times(to.load(2, 3), to.spread(to.arguments[4])), 0, 1)

    return found


def _outer(out: Any, a: Any, b: Any, times: int) -> tuple[Any, Any]:
    """The code of ``add_outer`` and ``add_four_outers``."""

    @written(out, types.int64, types.int64, a, types.int64, b, types.int64, types.int64)
    def found(to: Code) -> None:
        moves = [to.builder.mul(ir.Constant(ir.IntType(64), r), to.arguments[7]) for r in range(times)]
        first = [to.load(3, to.builder.add(to.arguments[4], move)) for move in moves]
        with cgutils.for_range(to.builder, to.arguments[2]) as loop:
            place, here = to.after(1, loop.index, to.lanes), to.after(6, loop.index, to.lanes)
            total = to.load(0, place)
            for lanes, move in zip(first, moves, strict=True):
                total = to.plus(total, to.times(lanes, to.load(5, to.builder.add(here, move))))
            to.store(total, 0, place)

    return found


@intrinsic
def add_outer(_: Any, out: Any, o: Any, n: Any, a: Any, i: Any, b: Any, j: Any, step: Any) -> Any:
    """out[o + L m] += a[i] b[j + L m] for each m < n."""
    return _outer(out, a, b, 1)


@intrinsic
def add_four_outers(_: Any, out: Any, o: Any, n: Any, a: Any, i: Any, b: Any, j: Any, step: Any) -> Any:
    """out[o + L m] += the sum of a[i + step r] b[j + step r + L m] over r < 4, for each m < n: a number of
    ``out``, once loaded, serves all four."""
    return _outer(out, a, b, 4)


@intrinsic
def multiply_and_split(_: Any, product: Any, exponent: Any, o: Any, a: Any, i: Any) -> Any:
    """product[o] <- product[o] a[i], scaled to between 1 and 2 by a power of 2, whose exponent is added to
    exponent[o]. For positive numbers in double precision."""

    @written(product, exponent, types.int64, a, types.int64)
    def found(to: Code) -> None:
        build, whole = to.builder, ir.VectorType(ir.IntType(64), LANES)

        def all_lanes(number: int) -> Any:
            return ir.Constant(whole, [number] * LANES)

        bits = build.bitcast(to.times(to.load(0, 2), to.load(3, 4)), whole)
        power = build.sub(build.lshr(bits, all_lanes(52)), all_lanes(1023))
        digits = build.or_(build.and_(bits, all_lanes((1 << 52) - 1)), all_lanes(1023 << 52))
        to.store(build.bitcast(digits, VECTOR), 0, 2)
        to.store(to.plus(to.load(1, 2), build.sitofp(power, VECTOR)), 1, 2)

    return found


@intrinsic
def lane_sum(_: Any, a: Any, i: Any) -> Any:
    """The sum of all lanes of a[i], in double precision."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to = Code(context, builder, signature, arguments)
        kind = ir.FunctionType(ir.DoubleType(), [ir.DoubleType(), VECTOR])
        add_up = cgutils.get_or_insert_function(
            builder.module, kind, f"llvm.vector.reduce.fadd.v{LANES}f64"
        )
        zero = ir.Constant(ir.DoubleType(), 0.0)
        return builder.call(add_up, [zero, to.load(0, 1)], fastmath=("reassoc",))

    return types.float64(a, types.int64), generate
