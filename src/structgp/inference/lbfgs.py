"""L-BFGS: SciPy's on the CPU, torch's on a GPU, where only the objective's value is copied to the CPU."""

from __future__ import annotations

from collections.abc import Callable
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
