"""Both ways to the shape of a kernel on dense columns."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from experiments.dense import process
from gpytorch.kernels import RBFKernel, ScaleKernel

from structgp import Prior, StructuredGPClassifier
from structgp.data.examples import Examples, read_examples
from structgp.gp.kernels import DenseKernel
from structgp.plan import dense_shape, held_out
from structgp.plan.dense_shape import DenseShape, by_bound, by_regression, ways
from structgp.plan.options import Options
from structgp.plan.resolve import resolve

WAYS = {"bound": by_bound, "regression": by_regression}
each_way = pytest.mark.parametrize("way", WAYS)


def learned(
    way: str, lengthscale: float = 0.5, n: int = 20, kernel: Any = "rbf", wild: bool = False
) -> tuple[DenseShape, DenseKernel, Examples]:
    """From data with scores that an RBF has made; the kernel is one that has the shape now."""
    task = process(2, n, 1, n_inputs=2, lengthscale=lengthscale)
    if wild:
        task.X[0][0, 0] = 1e6
    options = Options(kernel=kernel, prior=Prior(data_weight=1.0))
    examples = read_examples(task.X, task.y)
    plan, generator = resolve(options, examples), torch.Generator().manual_seed(0)
    shape = WAYS[way](options, plan, examples, generator)
    made = DenseKernel.of(copy.deepcopy(kernel), torch.from_numpy(np.concatenate(examples.rows)))
    shape.give(made)
    return shape, made, examples


def test_the_bound_rises_and_the_length_scale_is_found() -> None:
    """A length-scale far shorter than the distances that learning starts from."""
    shape, kernel, _ = learned("bound")
    assert shape.name == "bound"
    assert shape.pilot is not None
    bounds = [step.elbo for step in shape.pilot.history.steps]
    assert bounds[-1] > bounds[0] + 10
    assert all(after > before - 1 for before, after in pairwise(bounds))
    assert kernel.typical_lengths() == pytest.approx(0.5, rel=0.25)
    assert shape.basis is not None
    assert shape.transition_sd > 0


def test_a_regression_keeps_the_size() -> None:
    shape, kernel, examples = learned("regression", kernel="linear+rbf")
    rows = torch.from_numpy(np.concatenate(examples.rows))
    untouched = DenseKernel.of("linear+rbf", rows)
    assert shape.name == "regression"
    assert float(kernel.mean_variance(rows)) == pytest.approx(float(untouched.mean_variance(rows)))
    assert kernel.typical_lengths() != untouched.typical_lengths()
    assert shape.relaxation is not None
    assert shape.relaxation.evidence[1] > shape.relaxation.evidence[0]


@each_way
def test_the_parameters_of_a_kernel_of_ones_own_move(way: str) -> None:
    own = ScaleKernel(RBFKernel(ard_num_dims=2))
    before = {name: p.detach().clone() for name, p in own.named_parameters()}
    _, kernel, _ = learned(way, kernel=own, n=10)
    assert kernel.smooth is not None
    for name, p in kernel.smooth.named_parameters():
        assert not torch.equal(p, before[name]), name
    assert not any(p.requires_grad for p in kernel.parameters())
    for name, p in own.named_parameters():  # the user's is copied
        torch.testing.assert_close(p.detach(), before[name], rtol=0, atol=0)


@each_way
@pytest.mark.parametrize("kernel", ["linear+rbf", "rbf-ard"])
def test_one_wild_value_leaves_a_shape(way: str, kernel: str) -> None:
    shape, made, _ = learned(way, kernel=kernel, n=10, wild=True)
    assert all(p.isfinite().all() for p in shape.parameters.values())
    lengths = made.lengths()
    assert lengths is not None
    assert lengths.isfinite().all()


def test_one_long_sequence_is_cropped() -> None:
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(50, 2)) for _ in range(3)]
    y = [["ab"[int(row[0] > 0)] for row in x] for x in X]
    model = StructuredGPClassifier(prior=Prior(data_weight=1.0), n_draws=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_shape, "TOKENS", 60)
        model.fit(X, y)
    assert model.training_log_["pilot"]["tokens"] == 60


def test_frozen_parameters_of_the_users_own_kernel_stay() -> None:
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(5, 2)) for _ in range(8)]
    y = [["ab"[int(row[0] > 0)] for row in x] for x in X]
    kernel = RBFKernel()
    kernel.lengthscale = 2.5
    kernel.requires_grad_(False)
    model = StructuredGPClassifier(prior=Prior(data_weight=1.0), n_draws=4, kernel=kernel).fit(X, y)
    smooth = model.model_.posterior.node.parts[1].smooth
    assert float(smooth.lengthscale) == pytest.approx(2.5)


def test_warm_start_begins_anew_under_another_kernel() -> None:
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(5, 2)) for _ in range(8)]
    y = [["ab"[int(row[0] > 0)] for row in x] for x in X]
    model = StructuredGPClassifier(
        prior=Prior(data_weight=1.0), n_draws=4, kernel="linear", warm_start=True
    ).fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_params(kernel="rbf").fit(X, y)
    assert "dense smooth" in model.training_log_["kernel_scales"]


def _beside_words(n_columns: int, n_words: int, n: int = 16) -> Examples:
    """Sequences of two tokens with a word and a vector each."""
    rng = np.random.default_rng(0)

    def token(i: int) -> dict[str, Any]:
        return {"word": str(i % n_words), "vector": rng.normal(size=n_columns)}

    return read_examples([[token(2 * i), token(2 * i + 1)] for i in range(n)], [["A", "B"]] * n)


def _kernel(choice: Any, examples: Examples) -> Any:
    return resolve(Options(kernel=choice), examples).kernel


@pytest.mark.parametrize(("n_columns", "name"), [(31, "linear+rbf"), (32, "linear")])
def test_many_columns_beside_templates_of_words_have_a_linear_kernel(n_columns: int, name: str) -> None:
    examples = _beside_words(n_columns, n_words=32)
    chosen = _kernel("auto", examples)
    assert chosen.value["dense"] == name
    assert ("templates of words" in chosen.reason) == (name == "linear")
    assert _kernel({"dense": "linear+rbf"}, examples).value["dense"] == "linear+rbf"
    open_part = _kernel({"categorical": "relevance"}, examples)
    assert open_part.value["dense"] == name
    assert ("templates of words" in open_part.reason) == (name == "linear")
    rng = np.random.default_rng(1)
    alone = read_examples([rng.normal(size=(2, n_columns)) for _ in range(12)], [["A", "B"]] * 12)
    assert _kernel("auto", alone).value["dense"] == "linear+rbf"


@pytest.mark.parametrize(("n", "n_words", "is_enough"), [(16, 31, False), (16, 32, True), (321, 32, False)])
def test_a_flag_is_no_template_of_words(n: int, n_words: int, is_enough: bool) -> None:
    """Enough known values, and one for every twenty tokens."""
    examples = _beside_words(40, n_words, n)
    assert _kernel("auto", examples).value["dense"] == ("linear" if is_enough else "linear+rbf")
    assert ways(examples) == ((by_regression,) if is_enough else (by_bound, by_regression))


def test_beside_templates_of_words_the_shape_comes_from_regression_alone() -> None:
    examples = _beside_words(2, n_words=32)
    options = Options()
    (beside,) = held_out._variants(options, resolve(options, examples), examples)
    assert beside.shape is not None
    assert beside.shape.name == "regression"


@pytest.mark.parametrize("prior", [Prior(), Prior(data_weight=1.0)], ids=["chosen", "once"])
def test_vectors_beside_different_numbers_of_flags(prior: Prior) -> None:
    """Sequences whose tokens have one flag, and others with two."""
    rng = np.random.default_rng(0)
    X, y = [], []
    for n in range(12):
        flags = {"first": True} | ({"second": True} if n % 2 else {})
        X.append([{"word": "ab"[i % 2], "vector": rng.normal(size=3)} | flags for i in range(1 + n % 2)])
        y.append(["AB"[i % 2] for i in range(1 + n % 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = StructuredGPClassifier(prior=prior).fit(X, y)
    assert len(fitted.predict_marginals(X)) == 12
