"""A vectorised exp of numbers up to 0, for compiled loops: that of the C library takes one number per call.

exp(x) = 2^k exp(r) with k the integer nearest to x / log 2, and |r| <= log(2) / 2, so that a polynomial
gives exp(r). Adding 1.5 * 2^52 (2^23 in single precision) rounds to an integer and leaves it in the low
bits of the sum, from where it goes to the exponent of the result. Accurate to 2 units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

# Below this, -inf included, the result is 0: messages in probability space do not span more.
LOWEST = {"float64": -700.0, "float32": -86.0}

_ROUND_64 = 1.5 * 2.0**52
_LOG2_64 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)  # the first has zeros at its end
_LOWEST_64 = LOWEST["float64"]

_single = np.float32
_ROUND_32, _PER_LOG2_32 = _single(1.5 * 2.0**23), _single(1 / np.log(2))
_LOG2_32 = (_single(0.693359375), _single(-2.12194440e-4))
_LOWEST_32, _ZERO_32, _ONE_32 = _single(LOWEST["float32"]), _single(0), _single(1)
_TERMS_32 = tuple(_single(1 / n) for n in (5040, 720, 120, 24, 6, 2))


def _reinterpreted(to: Any, x: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return to(x), generate


@intrinsic
def _bits(_: Any, x: Any) -> Any:
    return _reinterpreted(types.int64 if x == types.float64 else types.int32, x)


@intrinsic
def _float(_: Any, x: Any) -> Any:
    return _reinterpreted(types.float64 if x == types.int64 else types.float32, x)


@njit(cache=True, fastmath={"contract"}, nogil=True)
def _exp_64(x: Any) -> Any:
    rounded = x * 1.4426950408889634 + _ROUND_64
    k = rounded - _ROUND_64
    r = x - k * _LOG2_64[0] - k * _LOG2_64[1]
    p = r / 6227020800.0 + 1 / 479001600.0
    p = (p * r + 1 / 39916800.0) * r + 1 / 3628800.0
    p = (p * r + 1 / 362880.0) * r + 1 / 40320.0
    p = (p * r + 1 / 5040.0) * r + 1 / 720.0
    p = (p * r + 1 / 120.0) * r + 1 / 24.0
    p = (p * r + 1 / 6.0) * r + 0.5
    p = (p * r + 1.0) * r + 1.0
    y = _float(_bits(p) + (_bits(rounded) << 52))
    return y if x >= _LOWEST_64 else (0.0 if x < _LOWEST_64 else x)  # nan stays nan


@njit(cache=True, fastmath={"contract"}, nogil=True)
def _exp_32(x: Any) -> Any:
    rounded = x * _PER_LOG2_32 + _ROUND_32
    k = rounded - _ROUND_32
    r = x - k * _LOG2_32[0] - k * _LOG2_32[1]
    p = _TERMS_32[0] * r + _TERMS_32[1]
    p = (p * r + _TERMS_32[2]) * r + _TERMS_32[3]
    p = (p * r + _TERMS_32[4]) * r + _TERMS_32[5]
    p = (p * r + _ONE_32) * r + _ONE_32
    y = _float(types.int32(_bits(p) + types.int32(_bits(rounded) << 23)))
    return y if x >= _LOWEST_32 else (_ZERO_32 if x < _LOWEST_32 else x)


def _exp(x: Any) -> Any:
    """exp of one number, by the one of the two functions above that fits its type."""


@overload(_exp, strict=False)
def _(x: Any) -> Any:
    return (lambda x: _exp_64(x)) if x == types.float64 else (lambda x: _exp_32(x))


@njit(cache=True, fastmath={"contract"}, nogil=True)
def exp_in_place(x: Any) -> None:
    """x (n,) <- exp(x)."""
    for i in range(x.size):
        x[i] = _exp(x[i])
