"""Eight draws at a time (``graph.lanes``), for probabilities of spans: sums over the transitions of one
label, and exponentials of scores.

Ways are transitions that some draw allows. The ways of one label are neighbours, from ``first`` to before
``last``, and spans end at those before ``cut``. place : (E,) the other label of each way, times L.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from structgp.structures.graph.lane_code import LANES, Code, written
from structgp.structures.linear_chain.lane_exp import _LOG2_64, _ROUND_64, LOWEST

_i64 = types.int64
DEGREE = 13
"""Degree of the polynomial for exp, as in ``lane_exp``."""


def _sum(to: Code, first: int, last: int, array: int, lanes: int) -> Any:
    """The sum over ways ``first`` to ``last`` of numbers of ``array`` times numbers of a table, all given
    by their index among the arguments. From index ``lanes`` on come the offset in ``array``, the places of
    the ways, the table, and the offset in the table."""
    build = to.builder
    so_far = cgutils.alloca_once_value(build, to.constant(0))
    with cgutils.for_range(build, build.sub(to.arguments[last], to.arguments[first])) as loop:
        m = build.add(to.arguments[first], loop.index)
        told = to.load(array, build.add(to.arguments[lanes], to.number(lanes + 1, m)))
        product = to.times(told, to.load(lanes + 2, to.after(lanes + 3, m, to.lanes)))
        build.store(to.plus(build.load(so_far), product), so_far)
    return build.load(so_far)


@intrinsic
def sum_of_ways(
    _: Any, out: Any, o: Any, first: Any, last: Any, a: Any, i: Any, place: Any, b: Any, j: Any
) -> Any:
    """out[o] <- the sum of a[i + place[m]] b[j + L m] over ways m from first to before last."""

    @written(out, _i64, _i64, _i64, a, _i64, place, b, _i64)
    def found(to: Code) -> None:
        to.store(_sum(to, 2, 3, 4, 5), 0, 1)

    return found


@intrinsic
def both_sums_of_ways(
    _: Any, part: Any, p: Any, out: Any, o: Any, first: Any, cut: Any, last: Any, a: Any, i: Any,
    place: Any, b: Any, j: Any, by: Any, k: Any, more: Any, m: Any,
) -> Any:  # fmt: skip
    """part[p] <- the sum as in ``sum_of_ways`` over ways before the cut, times more[m], and out[o] <- that
    over all ways, times by[k] more[m]."""

    @written(part, _i64, out, _i64, _i64, _i64, _i64, a, _i64, place, b, _i64, by, _i64, more, _i64)
    def found(to: Code) -> None:
        ended, scale = _sum(to, 4, 5, 7, 8), to.load(14, 15)
        to.store(to.times(ended, scale), 0, 1)
        whole = to.plus(ended, _sum(to, 5, 6, 7, 8))
        to.store(to.times(whole, to.times(to.load(12, 13), scale)), 2, 3)

    return found


@intrinsic
def scaled_sum_of_ways(
    _: Any, out: Any, o: Any, first: Any, last: Any, a: Any, i: Any, place: Any, b: Any, j: Any, by: Any,
    k: Any, more: Any, m: Any,
) -> Any:  # fmt: skip
    """out[o] <- the sum as in ``sum_of_ways``, times by[k] more[m]."""

    @written(out, _i64, _i64, _i64, a, _i64, place, b, _i64, by, _i64, more, _i64)
    def found(to: Code) -> None:
        scale = to.times(to.load(9, 10), to.load(11, 12))
        to.store(to.times(_sum(to, 2, 3, 4, 5), scale), 0, 1)

    return found


@intrinsic
def copy(_: Any, out: Any, o: Any, a: Any, i: Any) -> Any:
    """out[o] <- a[i]."""

    @written(out, _i64, a, _i64)
    def found(to: Code) -> None:
        to.store(to.load(2, 3), 0, 1)

    return found


@intrinsic
def fill(_: Any, out: Any, o: Any, value: Any) -> Any:
    """out[o] <- a number."""

    @written(out, _i64, types.float64)
    def found(to: Code) -> None:
        to.store(to.spread(to.arguments[2]), 0, 1)

    return found


@intrinsic
def add_multiplied(_: Any, out: Any, o: Any, a: Any, i: Any, b: Any, j: Any) -> Any:
    """out[o] += a[i] b[j]."""

    @written(out, _i64, a, _i64, b, _i64)
    def found(to: Code) -> None:
        to.store(to.plus(to.load(0, 1), to.times(to.load(2, 3), to.load(4, 5))), 0, 1)

    return found


@intrinsic
def fetch(_: Any, scores: Any, s: Any, b: Any, i: Any) -> Any:
    """Prefetches the cache line of scores[s, b, i], which will be read soon."""

    @written(scores, _i64, _i64, _i64)
    def found(to: Code) -> None:
        build, given = (
            to.builder,
            to.context.make_array(to.types[0])(to.context, to.builder, to.arguments[0]),
        )
        pointer = cgutils.get_item_pointer(to.context, build, to.types[0], given, to.arguments[1:])
        whole, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, whole, whole, whole])
        ask = cgutils.get_or_insert_function(build.module, kind, "llvm.prefetch.p0")
        numbers = [ir.Constant(whole, number) for number in (0, 3, 1)]  # to read, in the nearest cache
        build.call(ask, [build.bitcast(pointer, byte), *numbers])

    return found


@intrinsic
def exp_below_highest(_: Any, a: Any, i: Any, n: Any, widest: Any, lowest: Any, k: Any) -> Any:
    """a[i + L m] <- exp(a[i + L m] - the highest of them) for m < n; widest[0] grows to the difference
    between the highest and the lowest above -inf; lowest[k] falls to the lowest. nan where all are -inf."""

    @written(a, _i64, _i64, widest, lowest, _i64)
    def found(to: Code) -> None:
        build, zero = to.builder, ir.Constant(ir.IntType(64), 0)

        def larger(x: Any, y: Any) -> Any:
            return build.select(build.fcmp_ordered(">", x, y), x, y)

        def smaller(x: Any, y: Any) -> Any:
            return build.select(build.fcmp_ordered("<", x, y), x, y)

        def here(m: Any) -> Any:
            return to.load(0, to.after(1, m, to.lanes))

        def finite(x: Any) -> Any:
            is_finite = build.fcmp_ordered(">", x, to.constant(float("-inf")))
            return build.select(is_finite, x, to.constant(float("inf")))

        start = [float("-inf"), float("inf"), float("inf")]
        extremes = [cgutils.alloca_once_value(build, to.constant(x)) for x in start]
        with cgutils.for_range(build, to.arguments[2]) as loop:
            x = here(loop.index)
            for at, better, value in zip(
                extremes, (larger, smaller, smaller), (x, x, finite(x)), strict=True
            ):
                build.store(better(value, build.load(at)), at)
        high, low, above = (build.load(at) for at in extremes)
        to.store(larger(build.fsub(high, above), to.load(3, zero)), 3, zero)
        to.store(smaller(low, to.load(4, 5)), 4, 5)
        with cgutils.for_range(build, to.arguments[2]) as loop:
            below = build.fsub(here(loop.index), high)
            to.store(_exp(to, below), 0, to.after(1, loop.index, to.lanes))

    return found


def _exp(to: Code, x: Any) -> Any:
    """exp in all lanes, by the method that ``lane_exp`` describes. nan stays nan."""
    build, whole = to.builder, ir.VectorType(ir.IntType(64), LANES)

    def constant_sum(y: Any, number: float) -> Any:
        return to.plus(y, to.constant(number))

    rounded = constant_sum(to.times(x, to.constant(1.4426950408889634)), _ROUND_64)
    k = build.fsub(rounded, to.constant(_ROUND_64))
    r = x
    for part in _LOG2_64:
        r = to.plus(r, to.times(k, to.constant(-part)))
    p = to.constant(1 / math.factorial(DEGREE))
    for n in range(DEGREE - 1, -1, -1):
        p = constant_sum(to.times(p, r), 1 / math.factorial(n))
    shift = ir.Constant(whole, [52] * LANES)
    bits = build.add(build.bitcast(p, whole), build.shl(build.bitcast(rounded, whole), shift))
    y = build.bitcast(bits, to.vector)
    is_small = build.fcmp_ordered("<", x, to.constant(LOWEST["float64"]))
    y = build.select(is_small, to.constant(0), y)
    return build.select(build.fcmp_unordered("uno", x, x), x, y)
