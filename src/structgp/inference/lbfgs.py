"""L-BFGS: SciPy's on the CPU, but a plain one for searches of few steps and on a GPU.

The plain one does without SciPy's work for bounds, which takes some tenth of a small fit. On a GPU, it
copies only numbers to the CPU, no vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are used
import torch
from torch import Tensor

Objective = Callable[[Tensor], tuple[float, Tensor]]
"""Takes x (P,); returns the value and the gradient (P,)."""


def minimize(
    objective: Objective, start: Tensor, *, steps: int, memory: int, tolerance: float = 2.2e-9
) -> tuple[Tensor, float]:
    """An approximate minimum of ``objective``, and the value there.

    steps : largest number of steps. memory : number of past steps that stand for the curvature. tolerance :
    a step that gains less than this share of the value is the last; the default is SciPy's. Cost O(memory
    P) per step beside the objective."""
    if start.device.type != "cpu":
        return climb_down(objective, start, steps=steps, memory=memory, tolerance=tolerance)

    options = {"maxcor": memory, "maxiter": steps, "ftol": tolerance}
    found: Any = scipy.optimize.minimize(
        _of_arrays(objective), start.numpy(), jac=True, method="L-BFGS-B", options=options
    )
    return torch.from_numpy(found.x), float(found.fun)


def _of_arrays(objective: Objective) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    def of_array(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(torch.from_numpy(x))
        return value, gradient.numpy()

    return of_array


FIRST_LENGTH = 1.0
"""Length of a step while nothing is known of the curvature, the same as SciPy's."""

TRIES, ENOUGH = 12, 1e-4
"""Largest number of lengths that are tried along a direction; and the share of the gain promised by the
slope that a step has to reach."""

Known = tuple[Any, Any, float]
"""A step, the change of the gradient along it, and 1 over their inner product. Arrays on the CPU, where
they take half the time of tensors; tensors elsewhere."""


def climb_down(
    objective: Objective, start: Tensor, *, steps: int, tolerance: float, memory: int | None = None
) -> tuple[Tensor, float]:
    """A point where ``objective`` is less than at ``start``, and its value there. The objective should be
    convex: steps along which the slope falls are not used to estimate the curvature. Takes at most
    ``steps`` steps, and ends with one that gains less than ``tolerance`` of the value; remembers the last
    ``memory`` of them, or all. Cost per step: most often one call of the objective, and O(memory P)."""
    if start.device.type != "cpu":
        return descend(objective, start, steps, tolerance, memory)
    x, value = descend(_of_arrays(objective), start.numpy(), steps, tolerance, memory)
    return torch.from_numpy(x), value


def descend(
    at: Callable[[Any], tuple[float, Any]], x: Any, steps: int, tolerance: float, memory: int | None = None
) -> tuple[Any, float]:
    """``climb_down`` on arrays or on tensors, whichever ``at`` takes and gives."""
    known = list[Known]()
    value, slope = at(x)
    for _ in range(steps):
        d = _direction(known, slope)
        falls = float(slope @ d)
        if not falls < 0:
            break
        length = 1.0 if known else min(1.0, FIRST_LENGTH / (-falls) ** 0.5)
        for _ in range(TRIES):
            new = x + length * d
            new_value, new_slope = at(new)
            if new_value <= value + ENOUGH * length * falls:
                break
            # The minimum of the parabola through what is known, within limits.
            bend = new_value - value - length * falls
            length *= min(0.5, max(0.1, -0.5 * length * falls / bend if 0 < bend < np.inf else 0.1))
        else:
            break
        step, change = new - x, new_slope - slope
        bend, gained = float(step @ change), value - new_value
        if bend > 0:
            known.append((step, change, 1 / bend))
            if memory is not None:
                del known[: max(0, len(known) - memory)]
        x, value, slope = new, new_value, new_slope
        if gained <= tolerance * max(abs(value), 1.0):
            break
    return x, value


def _direction(known: Sequence[Known], slope: Any) -> Any:
    """Minus the slope times the inverse of the curvature, as far as ``known`` tells it."""
    d, shares = -slope, []
    for step, change, rho in reversed(known):
        shares.append(rho * float(step @ d))
        d -= shares[-1] * change
    if known:
        _, change, rho = known[-1]
        d *= 1 / (rho * float(change @ change))
    for (step, change, rho), share in zip(known, reversed(shares), strict=True):
        d += (share - rho * float(change @ d)) * step
    return d
