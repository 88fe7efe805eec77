"""What fits to parts of the data tell of the fit to all of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from structgp.plan.learning_curve import FARTHEST, SLOPES_DIFFER, USUAL, USUAL_SLOPE, Curve
from structgp.plan.trials import Predictions


def judged(loss: np.ndarray) -> Predictions:
    """Of sequences of ten tokens, with these losses per token."""
    tens = np.full(len(loss), 10.0)
    return Predictions(tens, 10 * loss, tens, tens)


def test_a_power_law_is_found() -> None:
    """From sequences that all agree, the slope itself: losses n^-.7."""
    easy = np.linspace(0.5, 1.5, 30)
    few, many = (judged(easy * n**-0.7) for n in (500.0, 1000.0))
    curve = Curve.through(few, many, 500.0, 1000.0)
    assert curve.slope == pytest.approx(0.7)
    assert curve.error == pytest.approx(0.0, abs=1e-9)
    assert many.loss * curve.shrinks(1000.0, 1500.0) == pytest.approx(judged(easy * 1500.0**-0.7).loss)


def test_what_says_little_is_near_the_usual_slope() -> None:
    rng = np.random.default_rng(0)
    seen, slopes = [], []
    for N in (4, 40, 4000):
        few, many = judged(rng.gamma(2.0, size=N)), judged(rng.gamma(2.0, size=N))
        few = replace(few, nll=few.nll * many.loss / few.loss * 2**0.9)
        curve = Curve.through(few, many, 500.0, 1000.0)
        slopes.append(curve.slope)
        seen.append(curve.error)
    assert USUAL_SLOPE < slopes[0] < slopes[1] < slopes[2] < 0.9
    assert SLOPES_DIFFER > seen[0] > seen[1] > seen[2]
    assert slopes[2] == pytest.approx(0.9, abs=0.2)


def test_its_error_is_that_of_repeated_samples() -> None:
    rng, found = np.random.default_rng(1), []
    for _ in range(300):
        many = rng.gamma(2.0, size=4000)
        few = many * rng.gamma(20.0, 0.1, size=4000)
        found.append(Curve.through(judged(few), judged(many), 500.0, 1000.0))
    assert np.std([curve.slope for curve in found]) == pytest.approx(found[0].error, rel=0.15)


def test_it_is_followed_as_far_as_it_was_looked_at_and_never_up() -> None:
    assert Curve(0.5, 0.1).shrinks(100.0, 1e6) == pytest.approx(FARTHEST**-0.5)
    assert Curve(-0.5, 0.1).shrinks(100.0, 150.0) == 1.0
    assert USUAL.shrinks(100.0, 150.0) == pytest.approx(math.exp(-USUAL_SLOPE * math.log(1.5)))


@pytest.mark.parametrize("tokens", [[3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
def test_a_single_sequence_tells_no_slope(tokens: list[float]) -> None:
    n = np.array(tokens)
    few, many = (Predictions(n, loss * n, n, n) for loss in (2.0, 0.1))
    assert Curve.through(few, many, 10, 20) == USUAL


def test_losses_of_nothing_tell_no_slope() -> None:
    n = np.array([3.0, 4.0])
    few, many = (Predictions(n, loss * n, n, n) for loss in (0.5, 0.0))
    assert Curve.through(few, many, 10, 20) == USUAL
