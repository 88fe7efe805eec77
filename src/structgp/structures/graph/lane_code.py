"""A writer of instructions on vectors of 64 bytes, for the functions of ``lanes`` and ``group_lanes``.

Numba does not turn eight statements in a row into vector instructions, and for a loop of eight it first
tests whether arrays overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

LANES, SINGLE_LANES = 8, 16
"""How many numbers in double and in single precision fill 64 bytes."""

VECTOR = ir.VectorType(ir.DoubleType(), LANES)
SINGLE = ir.VectorType(ir.FloatType(), SINGLE_LANES)
CONTRACT = ("contract",)


class Code:
    """Writes the instructions of one function."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.context, self.builder, self.types, self.arguments = context, builder, signature.args, arguments
        self.vector = SINGLE if signature.args[0].dtype == types.float32 else VECTOR
        self.lanes = ir.Constant(ir.IntType(64), self.vector.count)

    def constant(self, value: float) -> Any:
        """The same number in all lanes."""
        return ir.Constant(self.vector, [value] * self.vector.count)

    def pointer(self, array: int, place: Any) -> Any:
        """Pointer to lanes of an array. Array and place are numbers of arguments; the place may be a
        value."""
        given = self.context.make_array(self.types[array])(
            self.context, self.builder, self.arguments[array]
        )
        place = self.arguments[place] if isinstance(place, int) else place
        return self.builder.bitcast(self.builder.gep(given.data, [place]), self.vector.as_pointer())

    def number(self, array: int, place: Any) -> Any:
        """One number of an array."""
        given = self.context.make_array(self.types[array])(
            self.context, self.builder, self.arguments[array]
        )
        return self.builder.load(self.builder.gep(given.data, [place]))

    def spread(self, value: Any) -> Any:
        """Lanes that all hold one number, which is known only when the code runs."""
        first = self.builder.insert_element(
            ir.Constant(self.vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
        )
        nowhere = ir.Constant(self.vector, ir.Undefined)
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.vector.count), [0] * self.vector.count)
        return self.builder.shuffle_vector(first, nowhere, zeros)

    def load(self, array: int, place: Any) -> Any:
        return self.builder.load(self.pointer(array, place), align=4)

    def store(self, value: Any, array: int, place: Any) -> None:
        self.builder.store(value, self.pointer(array, place), align=4)

    def times(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=CONTRACT)

    def plus(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=CONTRACT)

    def fold(self, count: int, start: float, step: Callable[[Any, Any], Any]) -> Any:
        """Applies step(so far, m) for m = 0, 1, ... < argument ``count``, from ``start`` in all lanes."""
        so_far = cgutils.alloca_once_value(self.builder, self.constant(start))
        with cgutils.for_range(self.builder, self.arguments[count]) as loop:
            self.builder.store(step(self.builder.load(so_far), loop.index), so_far)
        return self.builder.load(so_far)

    def after(self, place: int, m: Any, step: Any) -> Any:
        """The place m steps after the one that argument ``place`` gives."""
        return self.builder.add(self.arguments[place], self.builder.mul(m, step))


def written(*given: Any) -> Callable[[Callable[[Code], None]], tuple[Any, Any]]:
    """Makes a function that takes arguments of these types and returns nothing."""

    def of(write: Callable[[Code], None]) -> tuple[Any, Any]:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write(Code(context, builder, signature, arguments))
            return context.get_dummy_value()

        return types.void(*given), generate

    return of
