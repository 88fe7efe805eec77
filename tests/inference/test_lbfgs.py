"""The plain L-BFGS of few steps: on quadratics, beside SciPy's, and where an objective has no value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structgp.inference.lbfgs import climb_down, minimize


def zeros(size):
    return torch.zeros(size, dtype=torch.float64)


def quadratic(seed, size, condition):
    """Half the squared distance to a point, under a curvature of this condition; the point, and calls."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.standard_normal((size, size)))[0]
    curvature = torch.from_numpy(turn * np.geomspace(1, condition, size) @ turn.T)
    goal, calls = torch.from_numpy(rng.standard_normal(size)), []

    def objective(x):
        calls.append(x.clone())
        slope = curvature @ (x - goal)
        return 0.5 * float((x - goal) @ slope), slope

    return objective, goal, calls


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 12), condition=st.floats(1, 1e3))
def test_finds_the_lowest_point_of_a_quadratic(seed, size, condition):
    objective, goal, _ = quadratic(seed, size, condition)
    x, value = climb_down(objective, zeros(size), steps=200, tolerance=0.0)
    torch.testing.assert_close(x, goal, rtol=1e-5, atol=1e-5)
    assert value == pytest.approx(objective(x)[0], abs=1e-15)


def test_few_steps_get_about_as_far_as_scipys():
    for seed in range(5):
        objective, _, calls = quadratic(seed, 200, 1e3)
        start = objective(zeros(200))[0]
        _, mine = climb_down(objective, zeros(200), steps=10, tolerance=0.0)
        assert len(calls) <= 1 + 1 + 10 + 3  # few steps need a second try
        _, theirs = minimize(objective, zeros(200), steps=10, memory=10)
        assert mine < theirs + 0.02 * (start - theirs)


def test_ends_where_a_step_gains_little_or_nothing():
    objective, _, calls = quadratic(0, 50, 1e4)
    climb_down(objective, zeros(50), steps=100, tolerance=0.5)
    assert len(calls) < 20
    flat = climb_down(lambda x: (1.0, torch.zeros_like(x)), zeros(3), steps=5, tolerance=0.0)
    assert flat[0].tolist() == [0, 0, 0]
    assert flat[1] == 1.0


@pytest.mark.parametrize("nothing", [float("inf"), float("nan")])
def test_steps_are_shorter_where_the_objective_has_no_value(nothing):
    """Minus the logarithm of what is left to 1, less 10 x: defined below 1, lowest at .9."""

    def objective(x):
        value = float(-torch.log(1 - x).sum() - 10 * x.sum()) if bool((x < 1).all()) else nothing
        return value, 1 / (1 - x) - 10

    x, _ = climb_down(objective, zeros(2), steps=50, tolerance=0.0)
    assert x.tolist() == pytest.approx([0.9, 0.9], abs=1e-4)


def test_the_last_steps_are_remembered_from_any_start():
    """Those that ``memory`` allows; with none, the steepest way down is all there is."""
    objective, goal, calls = quadratic(0, 30, 1e2)
    start, tries = zeros(30) + 3, []
    for memory in (0, 2, None):
        calls.clear()
        x, _ = climb_down(objective, start, steps=400, tolerance=1e-9, memory=memory)
        tries.append(len(calls))
        torch.testing.assert_close(x, goal, rtol=0, atol=1e-2)
    assert tries == sorted(tries, reverse=True)
    assert tries[0] > tries[-1]
    assert start.tolist() == [3] * 30
