"""Kernels as priors on weights: features and their variances against the kernel, and values that are
seldom seen."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gpytorch.kernels import AdditiveKernel, Kernel, RBFKernel, ScaleKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from structgp.data.vocabulary import Block
from structgp.gp.kernels import (
    RelevanceKernel,
    SparseLinearKernel,
    TemplateKernel,
    active_features,
    covariance,
    has_weights,
    variance,
    weight_parts,
    weight_variances,
)
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.build import build_kernel
from structgp.gp.kernels.kernel_json import describe, rebuild
from structgp.gp.kernels.relevance import SELDOM

SIZES = [3, 1, 4]
ATTRIBUTES = 5

generated = settings(max_examples=40, deadline=None, derandomize=True)


def moved(kernel: Kernel, seed: int) -> Kernel:
    """In double precision, with no parameter where it started, and some values seldom."""
    rng = np.random.default_rng(seed)
    kernel = kernel.double().requires_grad_(False)
    for p in kernel.parameters():
        p.copy_(torch.from_numpy(rng.normal(size=p.shape)))
    for name, b in kernel.named_buffers():
        if name.endswith("seldom"):
            b.copy_(torch.from_numpy(rng.random(len(b)) < 0.5))
    return kernel


def columns(seed: int = 0, rare: bool = False) -> Kernel:
    return moved(RelevanceKernel(SIZES, rare=rare), seed)


def bag(seed: int = 0) -> Kernel:
    return moved(RelevanceKernel([ATTRIBUTES], sparse=True), seed)


def both(seed: int = 0, rare: bool = False) -> Kernel:
    parts = [RelevanceKernel(SIZES, rare=rare), RelevanceKernel([ATTRIBUTES], sparse=True)]
    return moved(BlockSumKernel(parts, [(0, len(SIZES)), (len(SIZES), None)]), seed)


FORMS = {
    "columns": columns,
    "rare columns": lambda seed=0: columns(seed, rare=True),
    "bag": bag,
    "both": both,
    "both, rare": lambda seed=0: both(seed, rare=True),
}
each_form = pytest.mark.parametrize("form", FORMS)


@st.composite
def rows_of(draw: st.DrawFn, form: str) -> Tensor:
    """Known, unseen and missing ids; of sparse rows any order, and some features twice."""
    n, parts = draw(st.integers(1, 4)), []
    if form != "bag":
        parts.append(draw(arrays(float, (n, len(SIZES)), elements=st.integers(-1, 6).map(float))))
    if "columns" not in form:
        ids = draw(arrays(float, (n, 3), elements=st.integers(-1, 7).map(float)))
        values = draw(arrays(float, (n, 3), elements=st.floats(-3, 3)))
        parts.append(np.stack([ids, np.where(ids < 0, 0, values)], -1).reshape(n, 6))
    return torch.from_numpy(np.concatenate(parts, 1))


# -- the kernel in terms of weights ------------------------------------------------------------------


def from_weights(kernel: Kernel, x: Tensor) -> np.ndarray:
    """(N, N) the products of values of features of one name, times the variance of its weight."""
    found, weights = active_features(kernel, x), weight_variances(kernel).numpy()
    place, value, name, unseen = (
        getattr(found, key).numpy() for key in ("place", "value", "name", "unseen")
    )
    own = np.where(place >= 0, weights[place], unseen)
    total = np.zeros((len(x), len(x)))
    for i, j in np.ndindex(*total.shape):
        for a, b in np.ndindex(place.shape[1], place.shape[1]):
            if name[i, a] == name[j, b]:
                total[i, j] += value[i, a] * value[j, b] * np.sqrt(own[i, a] * own[j, b])
    return total


@each_form
@generated
@given(data=st.data())
def test_weights_give_back_the_kernel(form: str, data: st.DataObject) -> None:
    kernel = FORMS[form](seed=data.draw(st.integers(0, 9)))
    x = data.draw(rows_of(form))
    expected = covariance(kernel, x, x)
    np.testing.assert_allclose(from_weights(kernel, x), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(variance(kernel, x), expected.diagonal())


@each_form
@generated
@given(data=st.data())
def test_one_name_is_one_weight(form: str, data: st.DataObject) -> None:
    """Of features that are there: what is known of a name is the same in every row, and no place has two
    names."""
    kernel = FORMS[form]()
    found = active_features(kernel, data.draw(rows_of(form)))
    there = found.value != 0
    names, places = found.name[there].tolist(), found.place[there].tolist()
    unseen = torch.where(found.place < 0, found.unseen, 0)[there].tolist()
    about = set(zip(names, places, unseen, strict=True))
    assert len({name for name, _, _ in about}) == len(about)
    known = [place for _, place, _ in about if place >= 0]
    assert len(set(known)) == len(known)
    assert all(0 <= place < len(weight_variances(kernel)) for place in known)


@each_form
def test_batches_are_their_rows_one_by_one(form: str) -> None:
    kernel, rng = FORMS[form](), np.random.default_rng(0)
    x = rng.integers(-1, 6, size=(2, 3, 3)).astype(float)
    packed = np.stack([x, np.where(x < 0, 0, 0.5 + x)], -1).reshape(2, 3, 6)
    shapes = {"bag": packed, "both": np.concatenate([x, packed], -1)}
    rows = torch.from_numpy(shapes.get(form.removesuffix(", rare"), x))
    whole = active_features(kernel, rows)
    for b in range(2):
        for t in range(3):
            one = active_features(kernel, rows[b, t])
            for name in ("place", "value", "name", "unseen"):
                assert torch.equal(getattr(whole, name)[b, t], getattr(one, name)), name


def test_features_of_a_row() -> None:
    """Two templates of 2 and 1 values, then 3 attributes; each part has its constant behind it."""
    kernel = moved(
        BlockSumKernel([RelevanceKernel([2, 1]), RelevanceKernel([3], sparse=True)], [(0, 2), (2, None)]),
        seed=1,
    )
    columns, bag = kernel.kernels
    x = torch.tensor([[1, 0, 2, 0.5, 7, 3], [5, -1, 0, 2, -1, 0]], dtype=torch.float64)
    found = active_features(kernel, x)
    assert found.place.tolist() == [[1, 2, 3, 6, -1, 7], [-1, -1, 3, 4, -1, 7]]
    assert found.value.tolist() == [[1, 1, 1, 0.5, 3, 1], [1, 0, 1, 2, 0, 1]]
    scale, other = columns.log_scale.exp(), bag.log_scale.exp()
    expected = torch.stack([scale[0], scale[1], 0 * other[0], other[0], other[0], 0 * other[0]])
    torch.testing.assert_close(found.unseen, expected.expand(2, -1))
    weights = torch.cat(
        [
            scale[[0, 0, 1]] * columns.log_relevance.exp(),
            scale[2:],
            other[0] * bag.log_relevance.exp(),
            other[1:],
        ]
    )
    torch.testing.assert_close(weight_variances(kernel), weights)


@each_form
def test_parts_share_out_the_weights(form: str) -> None:
    kernel = FORMS[form]()
    places = [i for _, _, span in weight_parts(kernel) for i in range(span.start, span.stop)]
    assert places == list(range(len(weight_variances(kernel))))
    for part, _, span in weight_parts(kernel):
        own = weight_variances(kernel)[span]
        torch.testing.assert_close(own, weight_variances(part))
        torch.testing.assert_close(own[-1], part.log_scale[-1].exp())


def test_variances_have_gradients_in_every_parameter() -> None:
    kernel = both(rare=True).requires_grad_(True)
    names = [name for name, _ in kernel.named_parameters()]

    class Variances(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = kernel

        def forward(self) -> Tensor:
            return weight_variances(self.kernel)

    def value(*given: Tensor) -> Tensor:
        parameters = {f"kernel.{n}": p for n, p in zip(names, given, strict=True)}
        return torch.func.functional_call(Variances(), parameters, ())

    assert len(names) == 4
    assert torch.autograd.gradcheck(value, tuple(kernel.parameters()))


def test_which_kernels_have_weights() -> None:
    for form in FORMS.values():
        assert has_weights(form())
    bounds = [(0, 1), (1, None)]
    assert has_weights(BlockSumKernel([RelevanceKernel([2])], [(0, None)]))
    for kernel in (
        RBFKernel(),
        TemplateKernel(2),
        SparseLinearKernel(),
        ScaleKernel(RelevanceKernel([2])),
        AdditiveKernel(RelevanceKernel([2]), RelevanceKernel([2])),
        BlockSumKernel([RelevanceKernel([2]), TemplateKernel(1)], bounds),
        BlockSumKernel([ScaleKernel(SparseLinearKernel()), RelevanceKernel([2])], bounds),
    ):
        assert not has_weights(kernel), type(kernel)


# -- values that are seldom seen -----------------------------------------------------------------------


def explicit(kernel: RelevanceKernel, x: np.ndarray, width: int = 8) -> np.ndarray:
    """The sum over one-hot features, value by value, and one more a template for being rare."""
    scale = np.exp(kernel.log_scale.numpy())
    relevance = np.exp(kernel.log_relevance.numpy())
    K, start = np.full((len(x), len(x)), scale[-1]), 0
    for p, size in enumerate(kernel.sizes):
        of_value = np.append(relevance[start : start + size], np.ones(width))
        seldom = np.append(kernel.seldom[start : start + size].numpy(), np.ones(width, dtype=bool))
        for i, j in np.ndindex(*K.shape):
            here, there = int(x[i, p]), int(x[j, p])
            if here < 0 or there < 0:
                continue
            if here == there:
                K[i, j] += scale[p] * of_value[here]
            if seldom[here] and seldom[there]:
                K[i, j] += scale[p] * relevance[sum(kernel.sizes) + p]
        start += size
    return K


@generated
@given(x=rows_of("rare columns"), seed=st.integers(0, 9))
def test_being_rare_is_one_more_feature_of_a_template(x: Tensor, seed: int) -> None:
    kernel = columns(seed, rare=True)
    K = explicit(kernel, x.numpy())
    np.testing.assert_allclose(covariance(kernel, x, x), K, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(covariance(kernel, x[None], x[None])[0], K, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(variance(kernel, x), K.diagonal(), rtol=1e-10, atol=1e-12)


def test_seldom_and_unseen_values_are_alike() -> None:
    """A common value, two seldom ones, two that were never seen, and none at all."""
    kernel = moved(RelevanceKernel([4, 4], rare=True), seed=2)
    kernel.seldom.copy_(torch.tensor([False, True, False, True, True, False, False, False]))
    x = torch.tensor([[0, -1], [1, -1], [3, -1], [4, -1], [9, -1], [-1, -1]], dtype=torch.float64)
    scale, relevance = kernel.log_scale.exp(), kernel.log_relevance.exp()
    own = torch.cat([relevance[[0, 1, 3]], torch.ones(2), torch.zeros(1)])
    rare = torch.tensor([0.0, 1, 1, 1, 1, 0], dtype=torch.float64)
    expected = scale[0] * (own.diag() + relevance[8] * rare[:, None] * rare) + scale[-1]
    torch.testing.assert_close(covariance(kernel, x, x), expected)
    # Being rare in one template says nothing of another.
    other = torch.tensor([[1, -1], [-1, 0]], dtype=torch.float64)
    K = covariance(kernel, other, other)
    torch.testing.assert_close(K[0, 1], scale[-1])
    torch.testing.assert_close(K[1, 1], scale[1] * (relevance[4] + relevance[9]) + scale[-1])


def test_without_rare_values_it_is_as_before() -> None:
    """Known values that are all common."""
    plain, kernel = columns(), columns(rare=True)
    kernel.seldom.zero_()
    kernel.log_scale.copy_(plain.log_scale)
    kernel.log_relevance[: sum(SIZES)] = plain.log_relevance
    x = torch.tensor([[0, 0, 3], [2, -1, 3], [1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(covariance(kernel, x, x), covariance(plain, x, x))
    assert not hasattr(plain, "seldom")


def test_sizes_groups_and_places_with_rare() -> None:
    kernel = columns(rare=True)
    kernel.seldom.copy_(torch.tensor([True, False, False, False, False, False, False, True]))
    assert kernel.log_relevance.shape == (sum(SIZES) + len(SIZES),)
    assert kernel.group.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 0, 1, 2, 3]
    scale = kernel.log_scale.exp()
    relevance = torch.cat([kernel.log_relevance.exp(), torch.ones(1)])
    torch.testing.assert_close(weight_variances(kernel), scale[kernel.group] * relevance)
    found = kernel.active(torch.tensor([[0.0, 0, 3], [2, 5, -1]]).double())
    torch.testing.assert_close(found.unseen, scale[[0, 1, 2, 0, 1, 2]])
    assert found.place.tolist() == [[0, 3, 7, 8, -1, 10], [2, -1, -1, -1, 9, -1]]
    assert found.value.tolist() == [[1, 1, 1, 1, 0, 1], [1, 1, 0, 0, 1, 0]]


def test_no_rare_attributes() -> None:
    with pytest.raises(ValueError, match="no templates that a value could be rare in"):
        RelevanceKernel([3], sparse=True, rare=True)


def test_seldom_is_counted_template_by_template() -> None:
    """Values 0, 1, 2 come once, ``SELDOM`` times and once more; in the other template all do often."""
    often = SELDOM + 1
    first = [0] + [1] * SELDOM + [2] * often + [-1] * often
    x = torch.tensor([first, [0, 1] * (len(first) // 2) + [0] * (len(first) % 2)]).double().T
    kernel = build_kernel("relevance", [Block("categorical", 0, 2, ("a", "b"))], x)
    assert isinstance(kernel, RelevanceKernel)
    assert kernel.rare
    assert kernel.sizes == [3, 2]
    assert kernel.seldom.tolist() == [True, True, False, False, False]


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: columns(rare=True), lambda: both(rare=True)])
def test_rare_values_come_back_from_a_file(make: Callable[[], Kernel]) -> None:
    kernel = make()
    copied = rebuild(json.loads(json.dumps(describe(kernel))))
    part = next(p for p in copied.modules() if isinstance(p, RelevanceKernel))
    original = next(p for p in kernel.modules() if isinstance(p, RelevanceKernel))
    assert part.rare
    assert not part.seldom.any()
    copied.load_state_dict(kernel.state_dict())
    assert part.seldom.dtype == torch.bool
    assert torch.equal(part.seldom, original.seldom)
    assert original.seldom.any()
    assert not original.seldom.all()
    x = torch.tensor([[0, 0, 3], [2, -1, 9], [1, 5, 0]], dtype=torch.float64)
    if isinstance(kernel, BlockSumKernel):
        x = torch.cat([x, torch.tensor([[1, 0.5], [6, 1], [-1, 0]])], -1)
    assert torch.equal(covariance(copied, x, x), covariance(kernel, x, x))
    assert describe(copied) == describe(kernel)


def test_rare_is_not_for_those_who_did_not_ask() -> None:
    copied = rebuild(json.loads(json.dumps(describe(columns()))))
    assert not copied.rare
    assert "seldom" not in copied.state_dict()
