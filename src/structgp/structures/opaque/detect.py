"""Finds out what a user's likelihood works with by calling it on a small example."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from structgp.errors import LikelihoodError
from structgp.structures.opaque.user_function import Caller, name_of, told

Kind = Literal["torch with gradient", "numpy", "torch, values only"]

N_POSITIONS = 3
N_TRIES = 32

N_SHIFTS = 6
SHIFT = 3.0
SAME = 1e-5

# Differences this wide leave three digits to a function that computes in single precision.
STEP = 1e-3
CLOSE = 2e-3


def find_kind(caller: Caller, n_labels: int) -> tuple[Kind, str | None, bool]:
    """What the function works with; why the gradient that it carries is not used, None if it is used or
    there is none; and whether adding a number to all labels of a position changed no trial.

    Tries, in this order, tensors that require grad, NumPy arrays, and plain tensors. The gradient of a
    differentiable result is compared with differences of the values, along random directions of f and of g.
    A shift of all labels is tried as well. About 24 calls with S < 6, T = 3.
    """
    with warnings.catch_warnings(), torch.enable_grad():
        # NumPy code may warn about tensors that it was never meant for.
        warnings.simplefilter("ignore")
        example = Example(caller, n_labels)
        kind, problem = example.kind()
        return kind, problem, example.ignores_shift(kind)


class Example:
    """Latent values to try a function on: 3 positions, n_labels labels, and a number of draws that differs
    from both, so that a mixed-up dimension shows."""

    def __init__(self, caller: Caller, n_labels: int) -> None:
        self.caller, self.n_labels = caller, n_labels
        self.generator = torch.Generator().manual_seed(0)
        lengths = torch.tensor([[N_POSITIONS], [N_POSITIONS - 1]])
        self.mask = (torch.arange(N_POSITIONS) < lengths,) if caller.batched else ()
        S, batch = 4 if n_labels != 4 else 5, (2,) if caller.batched else ()
        self.f = self._padded(self._normal(S, *batch, N_POSITIONS, n_labels))
        self.g = self._normal(S, n_labels, n_labels)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def _padded(self, f: Tensor) -> Tensor:
        """f with the zeros that a batched function is promised at padding."""
        return f.masked_fill(~self.mask[0][..., None], 0) if self.mask else f

    def _labellings(self) -> Iterator[Tensor]:
        """Random labellings, and labellings with one label throughout: most of them may be impossible."""
        generator, shape = torch.Generator().manual_seed(1), self.f.shape[1:-1]
        for label in range(N_TRIES):
            some = [torch.randint(self.n_labels, shape, generator=generator)]
            some += [torch.full(shape, label)] if label < self.n_labels else []
            yield from (y * self.mask[0] if self.mask else y for y in some)

    def kind(self) -> tuple[Kind, str | None]:
        """What the function works with, and what is wrong with the gradient that it carries; None if
        nothing is."""
        try:
            for y in self._labellings():
                f, g = self.f.clone().requires_grad_(), self.g.clone().requires_grad_()
                values = self.caller.torch(f, g, y, *self.mask)
                if values.isfinite().any():
                    break
            if values.requires_grad:
                problem = self._gradient_problem(y, f, g, values)
                return "torch, values only" if problem else "torch with gradient", problem
        except LikelihoodError:
            pass
        y, failures = next(self._labellings()), []
        for kind in ("numpy", "torch, values only"):
            try:
                self._values(kind, self.f, self.g, y)
                return kind, None
            except LikelihoodError as error:  # noqa: PERF203
                failures.append(error)
        # Most of NumPy accepts a plain tensor, so the error with tensors is the informative one.
        with_numpy, with_torch = failures
        problem = f"with torch tensors it {with_torch.problem}; with NumPy arrays it {with_numpy.problem}"
        problem = f"tried on {N_POSITIONS} positions and {self.n_labels} labels, {problem}"
        name = name_of(self.caller.function)
        remedy = f"make {name}(f, g, y{', mask' if self.mask else ''}) work with one of them"
        cause = with_torch.__cause__ or with_torch
        raise LikelihoodError(self.caller.place, problem, remedy) from cause

    def ignores_shift(self, kind: Kind) -> bool:
        """True if a shift of all labels changed no finite value, over all labellings tried."""
        moved, tried = self._padded(self.f + SHIFT * self._normal(*self.f.shape[:-1], 1)), 0
        for y in islice(self._labellings(), N_SHIFTS):
            try:
                before, after = (self._values(kind, f, self.g, y) for f in (self.f, moved))
            except LikelihoodError:  # a labelling that the function cannot take
                continue
            tried += int(before.isfinite().sum())
            if not torch.allclose(before, after, rtol=SAME, atol=SAME, equal_nan=True):
                return False
        return tried > 0

    def _values(self, kind: str, f: Tensor, g: Tensor, y: Tensor) -> Tensor:
        """Values as numbers, whatever the function works with."""
        if kind == "numpy":
            return torch.from_numpy(self.caller.numpy(*(x.numpy() for x in (f, g, y, *self.mask))))
        with torch.no_grad():
            return self.caller.torch(f, g, y, *self.mask)

    def _gradient_problem(self, y: Tensor, f: Tensor, g: Tensor, values: Tensor) -> str | None:
        """What is wrong with the gradient of the values in f and g; None if nothing is."""
        finite = values.isfinite()
        if not finite.any():
            return "no labelling that it was tried on has a finite value to compare with"
        weight = 0.5 + torch.rand(values.shape, generator=self.generator, dtype=f.dtype)
        try:
            total = (torch.where(finite, values, 0) * weight).sum()
            grads = torch.autograd.grad(total, (f, g), allow_unused=True)
        except Exception as error:
            return f"its backward pass raised {told(error)}"
        for letter, grad in (("f", grads[0]), ("g", grads[1])) * 2:
            if letter == "f":
                step = self._padded(self._normal(*f.shape))
                moved = [(self.f + h, self.g) for h in (STEP * step, -STEP * step)]
            else:
                step = self._normal(*g.shape)
                moved = [(self.f, self.g + h) for h in (STEP * step, -STEP * step)]
            ahead, behind = (self._values("torch", *scores, y) for scores in moved)
            slope = float((torch.where(finite, ahead - behind, 0) * weight).sum()) / (2 * STEP)
            carried = 0.0 if grad is None else float((grad * step).sum())
            if not abs(slope - carried) <= CLOSE * (1 + abs(slope)):
                said = f"along a direction of {letter} it is {carried:.4g}"
                return f"{said}, and differences of the values give {slope:.4g}"
        return None
