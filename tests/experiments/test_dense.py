"""Generated tasks with dense features: their truth, and the rival that is fitted to them."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from experiments.methods.dense_crf import DenseCRF

from experiments import dense, length_scales
from structgp import StructuredGPClassifier, metrics
from structgp.evaluation.crf import LinearCRF

SMALL: dict[str, Any] = {
    "embeddings": lambda seed: dense.embeddings(seed, n_tokens=200, n_dims=120, n_test=1_000),
    "pixels": lambda seed: dense.pixels(seed, n_tokens=300, n_test=1_000),
    "smooth": lambda seed: dense.smooth(seed, 20, 100),
    "linear": lambda seed: dense.nearly_linear(seed, 20, 100),
    "clusters": lambda seed: dense.clusters(seed, 20, 100),
    "process": lambda seed: dense.process(seed, 20, 80),
    "ard": lambda seed: dense.process(seed, 20, 80, lengthscale=[1.0, *[100.0] * 9]),
}
SHAPES = {"embeddings": (120, 9), "pixels": (128, 26), "smooth": (5, 4), "linear": (20, 6)} | {
    "clusters": (12, 3), "process": (10, 3), "ard": (10, 3)
}  # fmt: skip


def nll(y: list[list[str]], node: list[np.ndarray], transitions: np.ndarray) -> float:
    """Per token, of a chain with these scores."""
    fold = dense.Task([], [], [], y, node, transitions)
    return metrics.token_nll(y, fold.oracle())


def test_every_task_is_tried() -> None:
    assert SMALL.keys() == SHAPES.keys() == dense.TASKS.keys()


@pytest.mark.parametrize("name", SMALL)
def test_shapes_seeds_and_truth(name: str) -> None:
    task, again, other = SMALL[name](3), SMALL[name](3), SMALL[name](4)
    D, V = SHAPES[name]
    for X, y in ((task.X, task.y), (task.X_test, task.y_test)):
        assert [(len(labels), D) for labels in y] == [x.shape for x in X]
        assert {label for labels in y for label in labels} <= set(dense.LABELS[:V])
    assert [node.shape for node in task.node] == [(len(y), V) for y in task.y_test]
    assert all(map(np.array_equal, task.X + task.node, again.X + again.node))
    assert (task.y, task.y_test) == (again.y, again.y_test)
    assert task.y != other.y
    # Nothing is better than the truth, and the truth is calibrated.
    truth = nll(task.y_test, task.node, task.transitions)
    rng = np.random.default_rng(0)
    assert truth < nll(task.y_test, [0.7 * node for node in task.node], task.transitions)
    assert truth < nll(task.y_test, [1.5 * node for node in task.node], task.transitions)
    assert truth < nll(task.y_test, [n + rng.normal(size=n.shape) for n in task.node], task.transitions)
    assert truth < nll(task.y_test, task.node, 0 * task.transitions)
    found = dense.figures(task.y_test, task.oracle())
    assert abs(found["bias"]) < 0.04
    assert found["nll"] == truth


def test_marginals_are_those_of_all_labellings() -> None:
    rng = np.random.default_rng(0)
    node, transitions = 2 * rng.normal(size=(4, 3)), rng.normal(size=(3, 3))
    paths = list(product(range(3), repeat=4))
    scores = [
        sum(node[t, v] for t, v in enumerate(path)) + sum(transitions[a, b] for a, b in pairwise(path))
        for path in paths
    ]
    weights = np.exp(scores) / np.exp(scores).sum()
    expected = np.zeros((4, 3))
    for path, weight in zip(paths, weights, strict=True):
        expected[np.arange(4), path] += weight
    np.testing.assert_allclose(dense.true_marginals(node, transitions), expected, atol=1e-12)
    drawn = [dense.draw_labels(node, transitions, rng) for _ in range(4_000)]
    shares = np.stack([np.mean(np.array(drawn) == v, axis=0) for v in range(3)], 1)
    np.testing.assert_allclose(shares, expected, atol=0.03)
    together = sum(w for path, w in zip(paths, weights, strict=True) if path[:2] == (1, 2))
    assert np.mean([labels[:2] == [1, 2] for labels in drawn]) == pytest.approx(together, abs=0.02)


def test_images_have_the_probability_that_they_are_drawn_with() -> None:
    modes = np.array([[[0, 0], [0, 1]], [[1, 1], [1, 1]]], dtype=bool)  # 2 letters, 2 modes, 2 pixels
    x = np.array(list(product((0.0, 1.0), repeat=2)))
    found = np.exp(dense._image_scores(x, modes, [(0.1, 0.75), (0.4, 0.25)]))
    np.testing.assert_allclose(found.sum(0), 1)

    def chance(image: np.ndarray, mode: np.ndarray) -> float:
        return sum(s * np.prod(np.where(image == mode, 1 - r, r)) for r, s in ((0.1, 0.75), (0.4, 0.25)))

    expected = [[np.mean([chance(image, mode) for mode in of]) for of in modes] for image in x]
    np.testing.assert_allclose(found, expected)


def test_a_process_has_its_covariance() -> None:
    """Nearby inputs have alike scores, as far as the length-scale and the amplitude say."""
    task = dense.process(0, 1, 99, n_inputs=1, lengthscale=0.5, amplitude=4.0, n_labels=26)
    x, node = np.concatenate(task.X_test)[:, 0], np.concatenate(task.node)
    far = np.abs(x[:, None] - x)
    products = node @ node.T / 26
    for low, high in ((0, 0.02), (0.48, 0.52), (1.4, 1.6)):
        near = (far >= low) & (far < high)
        expected = 4 * np.exp(-np.square(far[near]).mean() / (2 * 0.5**2))
        assert products[near].mean() == pytest.approx(expected, abs=1.0)


def test_the_rival_is_python_crfsuites() -> None:
    pytest.importorskip("pycrfsuite")
    task = dense.smooth(0, 30, 20)

    def with_ones(X: list[np.ndarray]) -> list[np.ndarray]:
        return [np.concatenate([x, np.ones((len(x), 1))], 1) for x in X]

    one = DenseCRF(c2=0.5).fit(task.X, task.y).predict_marginals(task.X_test)
    other = LinearCRF(c2=0.5).fit(with_ones(task.X), task.y).predict_marginals(with_ones(task.X_test))
    for p, q in zip((p for x in one for p in x), (q for x in other for q in x), strict=True):
        assert p == pytest.approx(q, abs=0.005)


def test_the_rivals_regulariser_is_the_best_on_left_out_sequences() -> None:
    task = dense.nearly_linear(1, 30, 50)
    chosen = DenseCRF((0.01, 0.1, 1.0, 10.0, 1000.0)).fit(task.X, task.y)
    assert chosen.cv_scores_[chosen.c2_] == min(chosen.cv_scores_.values())
    assert 0.01 < chosen.c2_ < 1000
    found = {}
    for c2 in (0.01, chosen.c2_, 1000.0):
        fitted = DenseCRF(c2).fit(task.X, task.y)
        found[c2] = metrics.token_nll(task.y_test, fitted.predict_marginals(task.X_test))
    assert min(found, key=found.__getitem__) == chosen.c2_


@pytest.mark.slow
def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(dense, "keep", lambda name, row: rows.append(row))
    monkeypatch.setattr(dense, "_in_new_process", dense.run)
    monkeypatch.setitem(dense.TASKS, "smooth", lambda seed: dense.smooth(seed, 10, 10))
    dense.main(["--task", "smooth", "--seeds", "5"])
    assert not rows[0]["twice"]
    lines = capsys.readouterr().out.splitlines()
    names = [line[18:35].strip() for line in lines[1:]]
    assert names == ["structgp draws", "structgp mean", "linear CRF", "oracle"]
    assert [(row["task"], row["seed"], row["method"]) for row in rows] == [
        ("smooth", 5, "structgp"),
        ("smooth", 5, "crf"),
    ]
    assert rows[0]["answers"]["oracle"] == rows[1]["answers"]["oracle"]
    assert f"{rows[1]['answers']['linear CRF']['nll']:.4f}" in lines[3]


def test_the_second_fit_of_a_process_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that every fit moves on: the first by 100 s, others by 1 s."""
    clock = [0.0]

    class Slow(StructuredGPClassifier):
        def fit(self, *data: Any, **given: Any) -> StructuredGPClassifier:
            clock[0] += 100 if clock == [0.0] else 1
            return super().fit(*data, **given)

    monkeypatch.setattr(dense.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(dense, "StructuredGPClassifier", Slow)
    monkeypatch.setitem(dense.TASKS, "smooth", lambda seed: dense.smooth(seed, 4, 4))
    row = dense.run("smooth", 5, "structgp", twice=True)
    assert (row["seconds"], row["test_tokens"]) == (1, 32)


@pytest.mark.parametrize("lengths", [(1.0,), (0.7, *[length_scales.IRRELEVANT] * 9)], ids=["one", "ard"])
def test_length_scales_are_compared_with_the_truth(lengths: tuple[float, ...]) -> None:
    row = length_scales.learned(3, lengths, n_sequences=12)
    assert row["lengths"] == list(lengths)
    assert len(row["ratios"]) == 1
    assert 0.1 < row["ratios"][0] < 10
    assert ("irrelevant" in row) == (len(lengths) > 1)
