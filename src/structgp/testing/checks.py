"""The checks of a likelihood, one function each.

Letters: S draws, B sequences in a batch, T positions (padded), V labels.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from structgp.structures import BlackBox, Structure

MOST_LABELLINGS = 1000
N_TRIES = 100
LENGTHS = (3, 1, 2)
IN_LOGS = "compute in logarithms (logsumexp)"

# Loose enough for a function that computes in single precision.
CLOSE = 1e-5
STEP = 5e-3
CLOSE_SLOPE = 1e-3
# Tolerance of second differences of values, whose step leaves four digits in double precision.
CLOSE_BENT = 1e-3


@dataclass(frozen=True)
class Trial:
    """A likelihood, and the scores to try it on."""

    structure: Structure
    n_labels: int
    seed: int

    def inputs(self, S: int = 3, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, ...]:
        """f (S, B, T, V), g (S, V, V), y (B, T), mask (B, T), float64."""
        generator = torch.Generator().manual_seed(self.seed)
        B, T, V = len(lengths), max(lengths), self.n_labels
        f = torch.randn(S, B, T, V, generator=generator, dtype=torch.float64)
        g = torch.randn(S, V, V, generator=generator, dtype=torch.float64)
        mask = torch.arange(T) < torch.tensor(lengths)[:, None]
        y = torch.where(mask, torch.randint(V, (B, T), generator=generator), 0)
        return f, g, y, mask

    def values(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """``log_prob``, after checking its shape and type."""
        with torch.no_grad():
            values = self.structure.log_prob(f, g, y, mask)
        expected = tuple(f.shape[:2])
        got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        said = f"log_prob returned {got} where (S, B) = {expected} was expected"
        _require(got == expected, f"{said}; return one number for each draw and sequence")
        said = f"log_prob returned {values.dtype} for latent values of {f.dtype}; return the type of f"
        _require(values.dtype == f.dtype, said)
        return values

    def every_labelling(self, f: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """All labellings y (n, T) of one sequence with f (S, T, V), and their log-probabilities (S, n)."""
        T = f.shape[1]
        y = torch.tensor(list(product(range(self.n_labels), repeat=T)))
        every = f[:, None].expand(-1, len(y), -1, -1)
        return y, self.values(every, g, y, torch.ones_like(y, dtype=torch.bool))

    def possible(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """y, with new labels drawn for those sequences that are impossible in some draw."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(N_TRIES):
            impossible = ~self.values(f, g, y, mask).isfinite().all(0)
            if not impossible.any():
                break
            other = torch.randint(self.n_labels, y.shape, generator=generator)
            y = torch.where(impossible[:, None] & mask, other, y)
        return y


def _require(condition: Any, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def _same(values: Tensor, expected: Tensor, tolerance: float = CLOSE) -> bool:
    return torch.allclose(values, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def _require_same(values: Tensor, expected: Tensor, text: str, tolerance: float = CLOSE) -> None:
    """Raises unless the values agree; ``text`` has a placeholder {} for the two that differ most."""
    if _same(values, expected, tolerance):
        return
    gap = torch.where(values == expected, 0, (values - expected).abs())
    worst = int(gap.nan_to_num(torch.inf).argmax())
    got, right = float(values.flatten()[worst]), float(expected.flatten()[worst])
    raise AssertionError(text.format(f"{got:.6g} where {right:.6g} is right"))


def check_shape(trial: Trial) -> None:
    for S, T, dtype in product((1, 7), range(1, 5), (torch.float64, torch.float32)):
        f, g, y, mask = trial.inputs(S, (T,))
        trial.values(f.to(dtype), g.to(dtype), y, mask)


def check_deterministic(trial: Trial) -> None:
    first, again = (trial.values(*trial.inputs()) for _ in range(2))
    remedy = "take random numbers out of the likelihood, or draw them once"
    _require(torch.equal(first, again), f"the same arguments gave two values; {remedy}")


def check_draws(trial: Trial) -> None:
    f, g, y, mask = trial.inputs(S=5)
    values = trial.values(f, g, y, mask)
    said = "a draw has another value among other draws: {}; compute its value from f[s] and g[s] alone"
    for draws in ([4, 2, 0, 3, 1], [3, 1], [2]):
        _require_same(trial.values(f[draws], g[draws], y, mask), values[draws], said)


def check_inputs(trial: Trial) -> None:
    structure = trial.structure
    if isinstance(structure, BlackBox):
        # Through the structure the function would get copies, so it is called directly.
        f, g, y, mask = trial.inputs(lengths=(3,))
        given: list[Any] = [f, g, y, mask] if structure.batched else [f[:, 0], g, y[0]]
        if structure.probe(trial.n_labels) == "numpy":
            given = [x.numpy().copy() for x in given]
        call: Callable[..., Any] = structure.function
    else:
        given, call = list(trial.inputs()), structure.log_prob
    before = [np.asarray(x).copy() for x in given]
    with torch.no_grad():
        call(*given)
    for name, old, new in zip(("f", "g", "y", "mask"), before, given, strict=False):
        _require(np.array_equal(old, np.asarray(new)), f"{name} was changed in place; work on a copy")


def check_finite(trial: Trial) -> None:
    f, g, _, _ = trial.inputs(S=7, lengths=(2,))
    _, values = trial.every_labelling(3 * f[:, 0], 3 * g)
    impossible = (values == -torch.inf).all(0)
    _require(not impossible.all(), "every labelling is impossible (-inf); let some be possible")
    said = "values are not finite at scores of about 3, for labellings that are possible in other draws"
    _require(torch.isfinite(values[:, ~impossible]).all(), f"{said}; {IN_LOGS}")


def check_large(trial: Trial) -> None:
    f, g, y, mask = trial.inputs(S=7)
    f, g = 50 * f.sign(), 50 * g.sign()
    for scale_f, scale_g in ((1, 1), (1, 0), (0, 1)):
        values = trial.values(scale_f * f, scale_g * g, y, mask)
        broken = values.isnan().any() or (values == torch.inf).any()
        _require(not broken, f"values are nan or +inf at scores of -50 and 50; {IN_LOGS}")


def check_padding(trial: Trial) -> None:
    f, g, y, mask = trial.inputs(lengths=(4, 1, 3))
    together = trial.values(f, g, y, mask)
    remedy = "leave out what the mask leaves out"
    said = f"a sequence has another value alone than in a padded batch: {{}}; {remedy}"
    for b, n in enumerate(mask.sum(-1).tolist()):
        alone = trial.values(f[:, [b], :n], g, y[[b], :n], mask[[b], :n])
        _require_same(alone, together[:, [b]], said)
    junk = torch.where(mask[..., None], f, 1e3), g, torch.where(mask, y, trial.n_labels - 1), mask
    _require_same(
        trial.values(*junk), together, f"what stands at padding changes the value: {{}}; {remedy}"
    )
    order = [2, 0, 1]
    said = "a sequence has another value elsewhere in the batch: {}; compute each sequence for itself"
    _require_same(trial.values(f[:, order], g, y[order], mask[order]), together[:, order], said)


def check_gradient(trial: Trial) -> None:
    structure = trial.structure
    if isinstance(structure, BlackBox):
        structure.probe(trial.n_labels)
        remedy = "let torch compute everything from f and g, or return NumPy numbers"
        problem = structure.gradient_problem
        _require(not problem, f"the gradient carried is not used: {problem}; {remedy}")
    if not structure.has_gradient:
        return
    f, g, y, mask = trial.inputs()
    y = trial.possible(f, g, y, mask)
    leaves = f.clone().requires_grad_(), g.clone().requires_grad_()
    values = structure.log_prob(*leaves, y, mask)
    remedy = "compute it with torch from f and g, or let has_gradient be False"
    _require(values.requires_grad, f"log_prob carries no gradient; {remedy}")
    weight = torch.linspace(0.5, 1.5, values.numel(), dtype=f.dtype).reshape(values.shape)
    grads = torch.autograd.grad((values * weight).sum(), leaves, allow_unused=True)
    for letter, x, grad in zip("fg", (f, g), grads, strict=True):
        expected = torch.zeros_like(x)
        # Draws do not mix, so one step moves them all.
        for place in np.ndindex(*x.shape[1:]):
            here = (slice(None), *place)
            step = torch.zeros_like(x)
            step[here] = STEP
            ahead, behind = (
                trial.values(f + h, g, y, mask) if letter == "f" else trial.values(f, g + h, y, mask)
                for h in (step, -step)
            )
            expected[here] = ((ahead - behind) * weight).sum(1) / (2 * STEP)
        remedy = "let torch compute everything from f and g, or correct the backward pass"
        said = f"the gradient in {letter} is not the slope of the values: {{}}; {remedy}"
        _require_same(torch.zeros_like(x) if grad is None else grad, expected, said, CLOSE_SLOPE)


def check_normalised(trial: Trial) -> None:
    remedy = "subtract the log of the sum over labellings, or pass normalised=False for a pseudo-likelihood"
    for T in (T for T in range(1, 5) if T == 1 or trial.n_labels**T <= MOST_LABELLINGS):
        f, g, _, _ = trial.inputs(lengths=(T,))
        _, values = trial.every_labelling(f[:, 0], g)
        total = values.exp().sum(1)
        said = f"the probabilities of all labellings of T = {T} sum to {float(total[0]):.6g}; {remedy}"
        _require(_same(total, torch.ones_like(total)), said)


def check_shift(trial: Trial) -> None:
    f, g, y, mask = trial.inputs()
    y = trial.possible(f, g, y, mask)
    shift = torch.linspace(-1, 2, f[..., 0].numel(), dtype=f.dtype).reshape(f[..., 0].shape)
    before, after = trial.values(f, g, y, mask), trial.values(f + shift[..., None], g, y, mask)
    said = "ignores_shift is True, but adding a number to all labels of a position changes log_prob"
    _require(_same(after, before), f"{said}; leave it False")
    if trial.structure.has_curvature:
        each = torch.eye(trial.n_labels, dtype=f.dtype)
        along = trial.structure.curvature(f, g, y, mask, each).node
        plain = trial.structure.curvature(f, g, y, mask).node
        _require_same(along, plain, "curvature along the labels is not that of the labels: {}", CLOSE_BENT)


def check_curvature(trial: Trial) -> None:
    f, g, y, mask = trial.inputs()
    y = trial.possible(f, g, y, mask)
    B, T = mask.shape
    V, h = trial.n_labels, 1e-3
    curvature = trial.structure.curvature(f, g, y, mask)
    for name, got, shape in (("node", curvature.node, (B, V, T, T)), ("next", curvature.next, (B, V, V))):
        _require(got.shape == shape, f"curvature.{name} is {tuple(got.shape)}; return {shape}")

    def bend(letter: str, *places: Any) -> Tensor:
        """(B,) minus the second derivative in two entries of f or g, averaged over draws."""
        total = torch.zeros(B, dtype=f.dtype)
        for signs in product((1, -1), repeat=2):
            moved = {"f": f.clone(), "g": g.clone()}
            for place, sign in zip(places, signs, strict=True):
                moved[letter][place] += sign * h
            total -= math.prod(signs) * trial.values(**moved, y=y, mask=mask).mean(0) / (4 * h * h)
        return total

    node, table = torch.zeros(B, V, T, T, dtype=f.dtype), torch.zeros(B, V, V, dtype=f.dtype)
    for j, t, u in product(range(V), range(T), range(T)):
        node[:, j, t, u] = bend("f", (..., t, j), (..., u, j))
    for i, j in product(range(V), repeat=2):
        table[:, i, j] = bend("g", (..., i, j), (..., i, j))
    text = "is not minus the second derivative of log_prob: {}; see Curvature for what is meant"
    _require_same(curvature.node, node, f"curvature.node {text}", CLOSE_BENT)
    _require_same(curvature.next, table, f"curvature.next {text}", CLOSE_BENT)
    least = min(float(torch.linalg.eigvalsh(curvature.node).min()), float(table.min()))
    said = f"the curvature has an eigenvalue of {least:.3g}: log_prob is not concave; leave curvature out"
    _require(least >= -CLOSE_BENT, said)


def check_marginals(trial: Trial) -> None:
    f, g, _, mask = trial.inputs()
    marginals = trial.structure.marginals(f, g, mask)
    got, shape = tuple(marginals.shape), tuple(f.shape)
    _require(got == shape, f"marginals are {got}; return (S, B, T, V) = {shape}")
    said = "marginals at padding are not 0; set them to 0 where mask is false"
    _require((marginals[:, ~mask] == 0).all(), said)
    total = marginals.sum(-1)[:, mask]
    _require_same(total, torch.ones_like(total), "marginals of a position sum to {}; divide by their sum")
    said = "marginals are not the sums of exp(log_prob) over labellings: {}; compute both from one model"
    for b, n in enumerate(mask.sum(-1).tolist()):
        y, values = trial.every_labelling(f[:, b, :n], g)
        on = torch.nn.functional.one_hot(y, trial.n_labels).to(f.dtype)
        expected = torch.einsum("sn,ntv->stv", values.softmax(1), on)
        _require_same(marginals[:, b, :n], expected, said)


def check_decode(trial: Trial) -> None:
    f, g, _, mask = trial.inputs()
    decoded = trial.structure.decode(f, g, mask)
    shape = tuple(f.shape[:3])
    _require(decoded.shape == shape, f"decode returned {tuple(decoded.shape)}; return (S, B, T) = {shape}")
    _require((decoded[:, ~mask] == 0).all(), "decoded labels at padding are not 0; set them to 0")
    said = "decode does not reach the greatest log_prob: {}; return the most probable labelling"
    for b, n in enumerate(mask.sum(-1).tolist()):
        y, values = trial.every_labelling(f[:, b, :n], g)
        same = (decoded[:, b, None, :n] == y).all(-1)  # (S, number of labellings)
        _require(same.any(1).all(), f"decode returned labels outside 0 to {trial.n_labels - 1}")
        _require_same(torch.where(same, values, -torch.inf).amax(1), values.amax(1), said)


def check_pickle(trial: Trial) -> None:
    from joblib import wrap_non_picklable_objects

    inputs = trial.inputs()
    expected = trial.values(*inputs)
    try:
        # As joblib pickles for its workers, closures and lambdas included.
        wrapped = wrap_non_picklable_objects(trial.structure, keep_wrapper=False)
        copy = pickle.loads(pickle.dumps(wrapped))
    except Exception as error:
        remedy = "keep locks, files and generators out of it, or use n_jobs=1"
        problem = f"it cannot be pickled ({type(error).__name__}: {error}), which n_jobs needs"
        raise AssertionError(f"{problem}; {remedy}") from error
    found = Trial(copy, trial.n_labels, trial.seed).values(*inputs)
    said = "a pickled copy has another value: {}; let everything it needs be pickled with it"
    _require_same(found, expected, said)
