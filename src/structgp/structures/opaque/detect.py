"""What a user's likelihood works with, found by calling it on a small example."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from structgp.errors import LikelihoodError
from structgp.structures.opaque.user_function import Caller, told

Kind = Literal["torch with gradient", "numpy", "torch, values only"]

N_POSITIONS = 3
N_TRIES = 32

N_SHIFTS = 6
SHIFT = 3.0
SAME = 1e-5

# Differences this wide leave three digits to a function that computes in single precision.
STEP = 1e-3
CLOSE = 2e-3


@dataclass(frozen=True)
class Found:
    """kind : what the function works with. gradient_problem : why the gradient that it carries is not
    used; None if it is right, or there is none. ignores_shift : True if adding a number to all labels of
    a position changed no trial."""

    kind: Kind
    gradient_problem: str | None = None
    ignores_shift: bool = False


def find_kind(caller: Caller, n_labels: int) -> Found:
    """Tries, in this order, tensors that require grad, NumPy arrays, and plain tensors.

    The gradient of a differentiable result is compared with differences of the values, along random
    directions of f and of g. A shift of all labels is tried as well. About 24 calls with S < 6, T = 3.
    """
    with warnings.catch_warnings():
        # NumPy code warns of tensors that it was never meant for.
        warnings.simplefilter("ignore")
        found = _find_kind(caller, n_labels)
        shift = Example(caller, n_labels).ignores_shift(found.kind)
        return replace(found, ignores_shift=shift)


def _find_kind(caller: Caller, n_labels: int) -> Found:
    example = Example(caller, n_labels)
    try:
        values, y = example.try_torch(grad=True)
        if values.requires_grad:
            problem = example.gradient_problem(y)
            return Found("torch, values only" if problem else "torch with gradient", problem)
    except LikelihoodError:
        pass
    try:
        example.try_numpy()
        return Found("numpy")
    except LikelihoodError as error:
        with_numpy = error
    try:
        example.try_torch(grad=False)
        return Found("torch, values only")
    except LikelihoodError as error:
        with_torch = error
    # Most of NumPy accepts a plain tensor, so the error with tensors is the informative one.
    arguments = "(f, g, y, mask)" if caller.batched else "(f, g, y)"
    raise LikelihoodError(
        caller.place,
        f"tried on {N_POSITIONS} positions and {n_labels} labels, with torch tensors it"
        f" {with_torch.problem}; with NumPy arrays it {with_numpy.problem}",
        f"make function{arguments} work with one of them",
    ) from (with_torch.__cause__ or with_torch)


class Example:
    """Latent values to try a function on: 3 positions, n_labels labels, and a number of draws that
    differs from both, so that a mixed-up dimension shows."""

    def __init__(self, caller: Caller, n_labels: int) -> None:
        self.caller = caller
        self.n_labels = n_labels
        self.generator = torch.Generator().manual_seed(0)
        S = 4 if n_labels != 4 else 5
        self.batch = (2,) if caller.batched else ()
        self.f = self._normal(S, *self.batch, N_POSITIONS, n_labels)
        self.g = self._normal(S, n_labels, n_labels)
        self.mask = None
        if caller.batched:
            self.mask = torch.arange(N_POSITIONS) < torch.tensor([[N_POSITIONS], [N_POSITIONS - 1]])
            self.f = self._padded(self.f)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def _padded(self, f: Tensor) -> Tensor:
        """f with the zeros that a batched function is promised at padding."""
        return f if self.mask is None else f.masked_fill(~self.mask[..., None], 0)

    def _labellings(self) -> Iterator[Tensor]:
        """Random labellings, and those of one label throughout: most may be impossible."""
        generator = torch.Generator().manual_seed(1)
        shape = (*self.batch, N_POSITIONS)
        for label in range(N_TRIES):
            y = torch.randint(self.n_labels, shape, generator=generator)
            yield y if self.mask is None else torch.where(self.mask, y, 0)
            if label < self.n_labels:
                y = torch.full(shape, label)
                yield y if self.mask is None else torch.where(self.mask, y, 0)

    def try_torch(self, *, grad: bool) -> tuple[Tensor, Tensor]:
        """Values, and the first labels for which one of them is finite, or the last tried."""
        for y in self._labellings():
            values = self._values(self.f, self.g, y, grad=grad)
            if values.isfinite().any():
                break
        return values, y

    def try_numpy(self) -> None:
        y = next(self._labellings())
        mask = None if self.mask is None else self.mask.numpy()
        self.caller.numpy(self.f.numpy(), self.g.numpy(), y.numpy(), mask)

    def ignores_shift(self, kind: Kind) -> bool:
        """Whether a shift of all labels changed no finite value, over all labellings tried."""
        shape = (*self.f.shape[:-1], 1)
        moved, tried = self._padded(self.f + SHIFT * self._normal(*shape)), 0
        for y, _ in zip(self._labellings(), range(N_SHIFTS), strict=False):
            try:
                before, after = (self._plain(kind, f, y) for f in (self.f, moved))
            except LikelihoodError:  # a labelling that the function cannot take
                continue
            finite = before.isfinite()
            tried += int(finite.sum())
            same = torch.isclose(before, after, rtol=SAME, atol=SAME, equal_nan=True)
            if not bool(same.all()):
                return False
        return tried > 0

    def _plain(self, kind: Kind, f: Tensor, y: Tensor) -> Tensor:
        """Values as numbers, whatever the function works with."""
        if kind == "numpy":
            mask = None if self.mask is None else self.mask.numpy()
            values = self.caller.numpy(f.numpy(), self.g.numpy(), y.numpy(), mask)
            return torch.as_tensor(values, dtype=torch.float64)
        return self._values(f, self.g, y, grad=False).detach().double()

    def _values(self, f: Tensor, g: Tensor, y: Tensor, *, grad: bool) -> Tensor:
        if not grad:
            with torch.no_grad():
                return self.caller.torch(f, g, y, self.mask)
        with torch.enable_grad():
            f, g = f.detach().requires_grad_(), g.detach().requires_grad_()
            return self.caller.torch(f, g, y, self.mask)

    def gradient_problem(self, y: Tensor) -> str | None:
        """What is wrong with the gradient of the values; None if nothing is."""
        with torch.enable_grad():
            f, g = self.f.clone().requires_grad_(), self.g.clone().requires_grad_()
            values = self.caller.torch(f, g, y, self.mask)
            finite = values.isfinite()
            if not finite.any():
                return "no labelling that it was tried on has a finite value to compare with"
            weight = 0.5 + torch.rand(values.shape, generator=self.generator, dtype=f.dtype)
            try:
                grads = torch.autograd.grad(
                    (torch.where(finite, values, 0) * weight).sum(), (f, g), allow_unused=True
                )
            except Exception as error:
                return f"its backward pass raised {told(error)}"
        for letter, grad in zip("fg", grads, strict=True):
            for _ in range(2):
                step_f, step_g = torch.zeros_like(f), torch.zeros_like(g)
                if letter == "f":
                    step = step_f.copy_(self._padded(self._normal(*f.shape)))
                else:
                    step = step_g.copy_(self._normal(*g.shape))
                ahead, behind = (
                    self._values(self.f + h * step_f, self.g + h * step_g, y, grad=False)
                    for h in (STEP, -STEP)
                )
                change = torch.where(finite, ahead - behind, 0)
                slope = float((change * weight).sum()) / (2 * STEP)
                carried = 0.0 if grad is None else float((grad * step).sum())
                if not abs(slope - carried) <= CLOSE * (1 + abs(slope)):
                    return (
                        f"along a direction of {letter} it is {carried:.4g}, and differences of"
                        f" the values give {slope:.4g}"
                    )
        return None
