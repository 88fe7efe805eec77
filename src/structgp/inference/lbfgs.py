"""L-BFGS: torch's on a GPU, where only the objective's value is copied to the CPU; on the CPU SciPy's, or
for searches of few steps a plain one, without SciPy's work for bounds: some tenth of a small fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy  # its parts are imported when they are used
import torch
from torch import Tensor

Objective = Callable[[Tensor], tuple[float, Tensor]]
"""Takes x (P,); returns the value and the gradient (P,)."""

MOST_TRIES = 25
"""Evaluations along one direction, at most."""


def minimize(
    objective: Objective, start: Tensor, *, steps: int, memory: int, tolerance: float = 2.2e-9
) -> tuple[Tensor, float]:
    """Where ``objective`` is least, about, and its value there.

    steps : at most. memory : steps whose differences stand for the curvature. tolerance : a step that gains
    less than this share of the value is the last; the default is SciPy's. Cost O(memory P) per step beside
    the objective."""
    if start.device.type != "cpu":
        return _on_device(objective, start, steps, memory, tolerance)

    def of_array(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = objective(torch.from_numpy(x))
        return value, gradient.numpy()

    options = {"maxcor": memory, "maxiter": steps, "ftol": tolerance}
    found: Any = scipy.optimize.minimize(
        of_array, start.numpy(), jac=True, method="L-BFGS-B", options=options
    )
    return torch.from_numpy(found.x), float(found.fun)


FIRST_LENGTH = 1.0
"""Of a step that knows nothing of the curvature, as SciPy's."""

TRIES, ENOUGH = 12, 1e-4
"""Lengths that are tried along a direction, at most; and the share of the gain promised by the slope that a
step has to reach."""

Known = tuple[np.ndarray, np.ndarray, float]
"""A step, what it changed in the gradient, and 1 over their inner product."""


def climb_down(objective: Objective, size: int, *, steps: int, tolerance: float) -> tuple[Tensor, float]:
    """Where a convex ``objective`` is less than at 0 (size,), and its value there: at most so many steps,
    all of which are remembered, until one gains less than ``tolerance`` of the value. Cost of a step: most
    often one call of the objective, and O(steps P)."""

    def at(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = objective(torch.from_numpy(x))
        return value, slope.numpy()

    x, known = np.zeros(size), list[Known]()
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
            # Where the parabola through what is known is lowest, within reason.
            bend = new_value - value - length * falls
            length *= min(0.5, max(0.1, -0.5 * length * falls / bend if 0 < bend < np.inf else 0.1))
        else:
            break
        step, change = new - x, new_slope - slope
        bend, gained = float(step @ change), value - new_value
        if bend > 0:
            known.append((step, change, 1 / bend))
        x, value, slope = new, new_value, new_slope
        if gained <= tolerance * max(abs(value), 1.0):
            break
    return torch.from_numpy(x), value


def _direction(known: Sequence[Known], slope: np.ndarray) -> np.ndarray:
    """Minus the inverse of the curvature, so far as it is known, times the slope."""
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


def _on_device(
    objective: Objective, start: Tensor, steps: int, memory: int, tolerance: float
) -> tuple[Tensor, float]:
    x = start.clone().requires_grad_()
    # One iteration per call, and by default 5/4 evaluations per iteration: the search along a line would
    # end at its first try, and where that is too long, the whole search.
    never: dict[str, Any] = {"tolerance_grad": 0.0, "tolerance_change": 0.0, "max_eval": MOST_TRIES + 1}
    search = torch.optim.LBFGS([x], max_iter=1, history_size=memory, line_search_fn="strong_wolfe", **never)
    last: tuple[Tensor, float, Tensor] | None = None
    graded = torch.is_grad_enabled()  # torch's optimisers turn it on for their closures

    def closure() -> float:
        # A step begins by asking again for the point where the last one ended.
        nonlocal last
        if last is None or not torch.equal(last[0], x):
            with torch.set_grad_enabled(graded):
                last = x.detach().clone(), *objective(x.detach())
        x.grad = last[2].clone()
        return last[1]

    # The first step has length 1, as SciPy's: torch's is shorter by the root of the number of parameters,
    # and so small a gain ended the search.
    closure()
    assert x.grad is not None
    sizes = x.grad.abs()
    search.param_groups[0]["lr"] = float(sizes.sum() / sizes.norm().clamp(min=1e-300))
    best = start, float("inf")
    for _ in range(steps):
        search.step(closure)
        search.param_groups[0]["lr"] = 1.0
        gained, value = best[1], closure()
        if value < best[1]:
            best = x.detach().clone(), value
        if not gained - value > tolerance * max(abs(value), 1.0):
            break
    return best
