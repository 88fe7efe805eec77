"""Templates, vectors and numbers in one feature dict: a kernel for each kind, learned, saved and read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpytorch.kernels import LinearKernel, RBFKernel

import structgp
from structgp import Inducing, InputError, StructuredGPClassifier
from structgp.evaluation.crf import LinearCRF
from structgp.gp.kernels import DenseKernel, RelevanceKernel
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.build import build_kernel


def corpus(n: int, seed: int) -> tuple[list[Any], list[list[str]]]:
    """Far from the origin in the first two numbers of its vector a token is A; else its word decides."""
    rng = np.random.default_rng(seed)
    X, y = [], []
    for _ in range(n):
        x, labels = [], []
        for _ in range(rng.integers(2, 7)):
            vector, word = rng.normal(size=3), int(rng.integers(6))
            far = vector[:2] @ vector[:2] > 1.5
            labels.append("A" if far else "B" if word < 3 else "C")
            noise, size = f"n{rng.integers(20)}", float(rng.normal())
            x.append({"word": f"w{word}", "noise": noise, "vector": vector, "size": size})
        X.append(x)
        y.append(labels)
    return X, y


X, Y = corpus(70, 0)
X_TEST, Y_TEST = corpus(40, 1)


@pytest.fixture(scope="module")
def fitted() -> StructuredGPClassifier:
    return StructuredGPClassifier().fit(X, Y)


def test_each_kind_has_its_kernel(fitted: StructuredGPClassifier) -> None:
    kernel = fitted.model_.posterior.node.kernel
    assert isinstance(kernel, BlockSumKernel)
    templates, vectors, numbers = kernel.kernels
    assert isinstance(templates, RelevanceKernel)
    assert isinstance(vectors, DenseKernel)
    assert vectors.linear
    assert isinstance(vectors.smooth, RBFKernel)
    assert isinstance(numbers, RelevanceKernel)
    assert numbers.sparse
    assert kernel.bounds == [(0, 2), (2, 5), (5, None)]


def test_the_kernel_of_vectors_is_learned(fitted: StructuredGPClassifier) -> None:
    encoder = fitted.model_.encoder
    tokens = structgp.data.batch.flat_tokens(encoder.transform(X))
    names = {"categorical": "relevance", "dense": "linear+rbf", "sparse": "relevance"}
    start = build_kernel(names, encoder.blocks, tokens, as_weights=True).requires_grad_(False).kernels[1]
    learned = fitted.model_.posterior.node.kernel.kernels[1]
    for name, least in (("evenness", 0.1), ("log_scale", 0.5)):
        assert (getattr(learned, name) - getattr(start, name)).abs().max() > least
    scales = fitted.training_log_["kernel_scales"]
    assert scales["dense smooth"] > 10 * scales["dense linear"], "how far from the origin is not linear"
    assert scales["dense smooth"] > 10 * scales["sparse"]
    assert scales["word"] > 10 * scales["noise"]


def test_both_kinds_are_worth_having(fitted: StructuredGPClassifier) -> None:
    assert fitted.score(X_TEST, Y_TEST) > 0.85
    majority = max(np.mean([v == label for y in Y_TEST for v in y]) for label in "ABC")
    assert majority < 0.6


def test_a_file_keeps_them(fitted: StructuredGPClassifier, tmp_path: Any) -> None:
    fitted.save(tmp_path / "model")
    read = structgp.load(tmp_path / "model")
    assert read.model_.encoder == fitted.model_.encoder
    assert read.predict_marginals(X_TEST) == fitted.predict_marginals(X_TEST)


def test_one_sequence_at_a_time_is_all_at_once(fitted: StructuredGPClassifier) -> None:
    together = fitted.predict_marginals(X_TEST[:5])
    for x, expected in zip(X_TEST[:5], together, strict=True):
        for p, q in zip(fitted.predict_marginals_single(x), expected, strict=True):
            assert p == pytest.approx(q, abs=1e-9)
    assert fitted.predict([[], X_TEST[0]])[0] == []


def test_a_kernel_of_ones_own_for_each_kind() -> None:
    kernel = {"categorical": "template", "dense": LinearKernel(), "sparse": "rbf"}
    model = StructuredGPClassifier(
        kernel=kernel, inference="natural", posterior=Inducing(n_inducing=20)
    ).fit(X, Y)
    names = [type(k).__name__ for k in model.model_.posterior.node.kernel.modules()]
    for name in ("TemplateKernel", "LinearKernel", "SparseRBFKernel"):
        assert name in names
    with pytest.raises(InputError, match="no sparse features in the data"):
        StructuredGPClassifier(kernel=kernel).fit([[{"w": "a", "v": np.ones(1)}] * 2], [["A", "B"]])


def test_a_vector_forgotten_at_prediction(fitted: StructuredGPClassifier) -> None:
    token = {key: value for key, value in X_TEST[0][0].items() if key != "vector"}
    with pytest.raises(InputError, match=r"^X\[0\]\[0\]: vector 'vector' is missing; "):
        fitted.predict([[token]])


def test_tensors_give_the_model_of_arrays(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(int(n), 3)) for n in rng.integers(1, 6, size=8)]
    y = [["AB"[int(row[0] > 0)] for row in x] for x in arrays]
    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    one, other = (StructuredGPClassifier().fit(data, y) for data in (arrays, tensors))
    assert one.predict_marginals(arrays) == other.predict_marginals(tensors)
    other.save(tmp_path / "model")
    assert structgp.load(tmp_path / "model").predict(tensors) == one.predict(arrays)
    assert other.predict_single(tensors[0]) == one.predict_single(arrays[0])
    assert structgp.explain(other, tensors[0], 0).label == one.predict_single(arrays[0])[0]


def test_the_rival_reads_vectors_too() -> None:
    pytest.importorskip("pycrfsuite")
    flat = [
        [
            {k: v for k, v in token.items() if k != "vector"}
            | {f"vector:{i}": float(v) for i, v in enumerate(token["vector"])}
            for token in x
        ]
        for x in X
    ]
    one, other = LinearCRF(c2=1.0).fit(X, Y), LinearCRF(c2=1.0).fit(flat, Y)
    found, expected = one.predict_marginals(X[:1]), other.predict_marginals(flat[:1])
    for p, q in zip(found[0], expected[0], strict=True):
        assert p == pytest.approx(q, abs=1e-3)
    with pytest.raises(InputError, match=r"^X\[0\]\[0\]: feature 'v' is not finite; "):
        one.predict([[{"v": np.array([np.nan])}]])
