"""Snakes and Potts grids: what they generate and read, and that the comparisons run."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from experiments import potts, snakes
from structgp import InputError, chain, grid, metrics


def test_pixels_have_the_colours_around_them() -> None:
    (first, second), (third, fourth) = snakes.pixels(np.array([[1, 2], [3, 4]]))
    assert (first["0,0"], first["0,1"], first["1,1"], first["-1,0"]) == ("1", "2", "4", snakes.OUTSIDE)
    assert (fourth["-1,-1"], third["-1,1"], second["1,0"]) == ("1", "2", "4")
    assert len(first) == 9


def write_snakes(folder: Path, n: int = 8) -> None:
    """Pictures of 2 x 3 pixels whose label is their colour."""
    rng, arrays = np.random.default_rng(0), {}
    for part in ("train", "test"):
        label = rng.integers(2, size=6 * n)
        arrays |= {
            f"{part}_shape": np.tile([2, 3], (n, 1)),
            f"{part}_colour": label + 1,
            f"{part}_label": label,
        }
    np.savez(folder / "snakes.npz", **arrays)


def test_snakes_are_read_and_compared(tmp_path: Path) -> None:
    write_snakes(tmp_path)
    fold = snakes.load_snakes(str(tmp_path))
    assert (len(fold.X), len(fold.X_test)) == (8, 8)
    assert [len(fold.X[0]), len(fold.X[0][0])] == [2, 3]
    for spec, program in ((chain(order=0), "every pixel by itself"), (grid(), "elimination")):
        row = snakes.compare(fold, spec)
        assert row["right"] > 0.95
        assert 0 < row["nll"] < 0.3
        assert row["program"] == program


def test_snakes_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"snakes\.npz"):
        snakes.load_snakes(str(tmp_path))


def test_potts_labels_are_drawn_from_their_distribution() -> None:
    rng, coupling = np.random.default_rng(0), 0.8
    node = rng.normal(size=(2, 2, 3))
    scores = {
        y: sum(node.reshape(4, 3)[n, v] for n, v in enumerate(y))
        + coupling * sum(y[a] == y[b] for a, b in ((0, 1), (2, 3), (0, 2), (1, 3)))
        for y in product(range(3), repeat=4)
    }
    total = sum(map(np.exp, scores.values()))
    drawn = [tuple(potts.draw(node, coupling, rng).ravel().tolist()) for _ in range(3_000)]
    for place in range(4):
        for v in range(3):
            expected = sum(np.exp(s) for y, s in scores.items() if y[place] == v) / total
            assert np.mean([y[place] == v for y in drawn]) == pytest.approx(expected, abs=0.04)


def test_the_truth_predicts_potts_labels_best() -> None:
    fold = potts.pictures(1.0, 0, 200, 3)
    y = [potts._flat(labels) for labels in fold.y_test]

    def nll(coupling: float) -> float:
        return metrics.token_nll(y, potts.answers(potts.Elimination, fold.X_test, *potts.truth(coupling)))

    assert nll(1.0) < min(nll(0.3), nll(2.0))


@pytest.mark.slow
def test_potts_methods_are_compared() -> None:
    row = potts.compare(0.5, 0, n_pictures=12, side=3)
    assert row["programs"]["exact"] == "elimination"
    assert "tree-reweighted" in row["programs"]["reweighted"]
    assert set(row["nll"]) == set(potts.METHODS)
    assert all(0.3 < loss < 1.3 for loss in row["nll"].values())
