"""The kernel with a relevance for every feature against the sum over one-hot features."""

from __future__ import annotations

import json
from typing import Any

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.kernels import Kernel, ScaleKernel
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from structgp.data.encode import FeatureEncoder
from structgp.data.vocabulary import Block
from structgp.errors import InputError
from structgp.gp.kernels import RelevanceKernel, TemplateKernel, covariance, variance, weight_variances
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.build import build_kernel
from structgp.gp.kernels.kernel_json import describe, rebuild
from structgp.gp.kernels.sparse import pack, unpack

SIZES = [3, 1, 4]

generated = settings(max_examples=40, deadline=None, derandomize=True)


def moved(kernel: RelevanceKernel, seed: int = 0) -> RelevanceKernel:
    """In double precision, with no parameter where it started."""
    rng = np.random.default_rng(seed)
    kernel = kernel.double().requires_grad_(False)
    for p in kernel.parameters():
        p.copy_(torch.from_numpy(rng.normal(size=p.shape)))
    return kernel


def categorical(seed: int = 0) -> RelevanceKernel:
    return moved(RelevanceKernel(SIZES), seed)


def sparse(size: int = 8, seed: int = 0) -> RelevanceKernel:
    return moved(RelevanceKernel([size], sparse=True), seed)


def one_hot(kernel: RelevanceKernel, x: np.ndarray, width: int = 12) -> tuple[np.ndarray, ...]:
    """Features (N, F) of rows with ids below ``width``, and the prior variance (F,) of their weights,
    known or not."""
    scale = np.exp(kernel.log_scale.detach().numpy())
    relevance = np.exp(kernel.log_relevance.detach().numpy())
    if kernel.sparse:
        features = np.zeros((len(x), width))
        for n, row in enumerate(x):
            for name, value in zip(row[0::2], row[1::2], strict=True):
                if name >= 0:
                    features[n, int(name)] += value
        known = np.append(relevance, np.ones(width))[:width]
        return features, scale[0] * known
    parts, weights, start = [], [], 0
    for p, size in enumerate(kernel.sizes):
        parts.append(x[:, p, None] == np.arange(width))
        known = np.append(relevance[start : start + size], np.ones(width))[:width]
        weights.append(scale[p] * known)
        start += size
    return np.concatenate(parts, 1).astype(float), np.concatenate(weights)


def explicit(kernel: RelevanceKernel, x: np.ndarray, z: np.ndarray) -> np.ndarray:
    (left, weights), (right, _) = one_hot(kernel, x), one_hot(kernel, z)
    return float(kernel.log_scale[-1].exp()) + left * weights @ right.T


@st.composite
def rows_of(draw: st.DrawFn, form: str) -> np.ndarray:
    """Known, unseen and missing ids; of sparse rows any order, and some features twice."""
    n = draw(st.integers(1, 5))
    if form == "categorical":
        return draw(arrays(float, (n, len(SIZES)), elements=st.integers(-1, 6).map(float)))
    ids = draw(arrays(float, (n, 3), elements=st.integers(-1, 10).map(float)))
    values = draw(arrays(float, (n, 3), elements=st.floats(-3, 3)))
    return np.stack([ids, np.where(ids < 0, 0, values)], -1).reshape(n, 6)


KERNELS = {"categorical": categorical, "sparse": sparse}
each_form = pytest.mark.parametrize("form", KERNELS)


# -- values ------------------------------------------------------------------------------------------


@each_form
@generated
@given(data=st.data())
def test_against_the_sum_over_features(form: str, data: st.DataObject) -> None:
    kernel = KERNELS[form](seed=data.draw(st.integers(0, 9)))
    x, z = data.draw(rows_of(form)), data.draw(rows_of(form))
    K = covariance(kernel, torch.tensor(x), torch.tensor(z))
    np.testing.assert_allclose(K, explicit(kernel, x, z), rtol=1e-10, atol=1e-12)
    expected = explicit(kernel, x, x).diagonal()
    found = variance(kernel, torch.tensor(x))
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@each_form
@generated
@given(data=st.data())
def test_symmetric_and_positive_semi_definite(form: str, data: st.DataObject) -> None:
    kernel = KERNELS[form](seed=data.draw(st.integers(0, 9)))
    x = torch.tensor(data.draw(rows_of(form)))
    K = covariance(kernel, x, x)
    torch.testing.assert_close(K, K.mT, rtol=0, atol=1e-12)
    assert torch.linalg.eigvalsh(K).min() > -1e-12 * K.trace()


@each_form
@generated
@given(data=st.data())
def test_batches_are_their_sequences_one_by_one(form: str, data: st.DataObject) -> None:
    kernel = KERNELS[form]()
    one, other = data.draw(rows_of(form)), data.draw(rows_of(form))
    n = min(len(one), len(other))
    x = torch.tensor(np.stack([one[:n], other[:n]]))
    K = covariance(kernel, x, x)
    assert K.shape == (2, n, n)
    diagonal = variance(kernel, x)
    for b in range(2):
        torch.testing.assert_close(K[b], covariance(kernel, x[b], x[b]), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(diagonal[b], K[b].diagonal(), rtol=1e-12, atol=1e-12)


def test_both_forms_agree_on_the_same_features() -> None:
    """Templates as one group of attributes that are there or not."""
    rng = np.random.default_rng(0)
    columns, bag = categorical(), sparse(sum(SIZES))
    columns.log_scale[:-1] = 0.4
    bag.log_scale.copy_(columns.log_scale[-2:])
    bag.log_relevance.copy_(columns.log_relevance)
    x = np.stack([rng.integers(-1, n, size=20) for n in SIZES], -1).astype(float)
    ids = np.where(x < 0, -1, x + np.cumsum([0, *SIZES[:-1]]))
    ids = rng.permuted(ids, axis=1)
    packed = pack(torch.tensor(ids), torch.tensor(ids >= 0).double())
    expected = covariance(columns, torch.tensor(x), torch.tensor(x))
    torch.testing.assert_close(covariance(bag, packed, packed), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variance(bag, packed), expected.diagonal())
    assert len(expected.unique()) > 20


# -- what was never seen, and what is not there ------------------------------------------------------


def test_unseen_values_weigh_what_their_group_does() -> None:
    """They agree with themselves, not with each other, and not across templates."""
    kernel = categorical()
    scale = kernel.log_scale.exp()
    x = torch.tensor([[3, -1, -1], [7, -1, -1], [-1, 3, -1], [-1, 1, -1], [-1, -1, 4]], dtype=torch.float64)
    K = covariance(kernel, x, x) - scale[-1]
    torch.testing.assert_close(K, scale[[0, 0, 1, 1, 2]].diag(), rtol=1e-12, atol=1e-12)
    batched = covariance(kernel, x[None], x[None])[0] - scale[-1]
    torch.testing.assert_close(batched, K, rtol=1e-12, atol=1e-12)
    kernel = sparse()
    scale = kernel.log_scale.exp()
    packed = torch.tensor([[8, 1, -1, 0], [30, 2, -1, 0], [30, 1, 8, 3]], dtype=torch.float64)
    expected = scale[0] * torch.tensor([[1, 0, 3], [0, 4, 2], [3, 2, 10]]) + scale[1]
    torch.testing.assert_close(covariance(kernel, packed, packed), expected)


def test_missing_agrees_with_nothing() -> None:
    kernel = categorical()
    x = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 0.0, -1.0]], dtype=torch.float64)
    bias, one = kernel.log_scale[-1].exp(), weight_variances(kernel)[3]
    expected = torch.stack([bias, bias, bias, bias + one]).view(2, 2)
    torch.testing.assert_close(covariance(kernel, x, x), expected)
    torch.testing.assert_close(covariance(kernel, x[None], x[None])[0], expected)
    torch.testing.assert_close(variance(kernel, x), expected.diagonal())
    # A value at an unused place is no feature.
    nothing = torch.tensor([[-1.0, 5.0]], dtype=torch.float64)
    bag = sparse()
    for K in (covariance(bag, nothing, nothing), variance(bag, nothing)):
        torch.testing.assert_close(K.squeeze(), bag.log_scale[-1].exp())


def test_rows_of_different_widths() -> None:
    kernel = sparse()
    narrow = torch.tensor([[2.0, 1.5], [5.0, 1.0]], dtype=torch.float64)
    wide = torch.cat([narrow, torch.tensor([[-1.0, 0.0], [-1.0, 0.0]])], -1)
    expected = covariance(kernel, narrow, narrow)
    torch.testing.assert_close(covariance(kernel, narrow, wide), expected)
    torch.testing.assert_close(covariance(kernel, wide, narrow), expected)


# -- parameters --------------------------------------------------------------------------------------


def test_sizes_and_groups() -> None:
    kernel = categorical()
    assert (kernel.sizes, kernel.sparse) == (SIZES, False)
    assert kernel.group.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3]
    assert kernel.log_scale.shape == (4,)
    assert kernel.log_relevance.shape == (8,)
    scale, relevance = kernel.log_scale.exp(), kernel.log_relevance.exp()
    torch.testing.assert_close(weight_variances(kernel)[:-1], scale[kernel.group[:-1]] * relevance)
    assert weight_variances(kernel)[-1] == scale[-1]
    found = kernel.active(torch.tensor([[2.0, 0.0, 3.0], [3.0, -1.0, 0.0]]).double())
    assert found.place.tolist() == [[2, 3, 7], [-1, -1, 4]]
    assert found.value.tolist() == [[1, 1, 1], [1, 0, 1]]
    bag = sparse()
    assert bag.group.tolist() == [0] * 8 + [1]
    assert bag.log_scale.shape == (2,)
    found = bag.active(torch.tensor([[7.0, 0.5, 8.0, 2.0, -1.0, 0.0]]).double())
    assert found.place.tolist() == [[7, -1, -1]]
    assert found.value.tolist() == [[0.5, 2, 0]]


def test_starts_as_the_plain_inner_product() -> None:
    x = torch.randint(0, 3, (9, 2), generator=torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        K = covariance(RelevanceKernel([3, 3]).double(), x, x)
        plain = 1 + 2 * covariance(TemplateKernel(2).double(), x, x)
    torch.testing.assert_close(K, plain, rtol=1e-6, atol=1e-6)


@each_form
@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradient_in_every_parameter(form: str, batch: tuple[int, ...]) -> None:
    """Where an optimiser moves them by gradients."""
    kernel = KERNELS[form]()
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.randint(-1, 5, (*batch, n, 3), generator=generator).double() for n in (4, 3))
    if form == "sparse":
        x, z = (pack(ids, torch.where(ids < 0, 0, 0.3 * ids + 0.5)) for ids in (x, z))

    def value(scale: Tensor, relevance: Tensor, **given: Any) -> Tensor:
        parameters = {"log_scale": scale, "log_relevance": relevance}
        rows = (x,) if given else (x, z)
        with gpytorch.settings.lazily_evaluate_kernels(False):
            K = torch.func.functional_call(kernel, parameters, rows, given)
        return K if isinstance(K, Tensor) else K.to_dense()

    at = [p.detach().clone().requires_grad_() for p in (kernel.log_scale, kernel.log_relevance)]
    assert torch.autograd.gradcheck(value, at)
    assert torch.autograd.gradcheck(lambda *given: value(*given, diag=True), at)


def test_no_form_over_the_last_dimension() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="last_dim_is_batch"):
        categorical().forward(x, x, last_dim_is_batch=True)


# -- by name, and in a file --------------------------------------------------------------------------


def mixed() -> tuple[FeatureEncoder, Tensor]:
    X = [
        [{"word": "a", "tag": "X", "size": 2.0, "up": True}, {"word": "b", "tag": "X"}],
        [{"word": "a", "size": 1.0, "low": 3.0}, {"word": "c", "more": ["p", "q"]}],
    ]
    encoder = FeatureEncoder().fit(X)
    rows = encoder.transform(X)
    width = max(r.shape[1] for r in rows)
    wide = [np.hstack([r, np.tile([-1.0, 0.0], (2, (width - r.shape[1]) // 2))]) for r in rows]
    return encoder, torch.from_numpy(np.concatenate(wide))


def test_relevances_by_name() -> None:
    encoder, rows = mixed()
    kernel = build_kernel("relevance", encoder.blocks, rows)
    assert isinstance(kernel, BlockSumKernel)
    columns, bag = kernel.kernels
    assert isinstance(columns, RelevanceKernel)
    assert isinstance(bag, RelevanceKernel)
    assert (columns.sizes, columns.sparse) == ([3, 1], False)
    assert (bag.sizes, bag.sparse) == ([len(encoder.attributes)], True)
    assert all(p.dtype == torch.float64 for p in kernel.parameters())
    named = build_kernel({"sparse": "relevance", "categorical": "template"}, encoder.blocks, rows)
    assert [type(k) for k in named.kernels] == [ScaleKernel, RelevanceKernel]


def test_all_sizes_come_from_the_rows() -> None:
    nothing = torch.full((2, 2), -1.0, dtype=torch.float64)
    made = build_kernel("relevance", [Block("categorical", 0, 2, ("a", "b"))], nothing)
    assert made.sizes == [1, 1]
    made = build_kernel("relevance", [Block("sparse", 0, None)], torch.tensor([[-1.0, 0.0]]).double())
    assert made.sizes == [1]


@torch.no_grad()
def test_amplitude_is_the_variance_of_a_latent_value() -> None:
    """Of the mean row, shared out equally over the blocks."""
    encoder, rows = mixed()
    rows[rows[:, 1] < 0, 1] = 0  # no value missing
    for amplitude in (0.5, 6.0):
        kernel = build_kernel("relevance", encoder.blocks, rows, amplitude)
        columns, bag = kernel.kernels
        assert float(variance(columns, rows[:, :2]).mean()) == pytest.approx(amplitude / 2, rel=1e-6)
        assert float(variance(bag, rows[:, 2:]).mean()) == pytest.approx(amplitude / 2, rel=1e-6)
    weight = weight_variances(build_kernel("relevance", encoder.blocks, rows).kernels[1])[:-1]
    torch.testing.assert_close(weight, torch.ones_like(weight))
    assert unpack(rows[:, 2:])[1].square().sum(-1).mean() > 1


def test_only_on_rows_that_hold_ids() -> None:
    dense = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises(InputError, match="'relevance' is not a kernel for dense features"):
        build_kernel("relevance", [Block("dense", 0, 3)], dense)
    ids = torch.zeros(2, 3, dtype=torch.float64)
    given = RelevanceKernel([1, 1, 1])
    assert build_kernel(given, [Block("categorical", 0, 3, ("a", "b", "c"))], ids) is given


def through_json(kernel: Kernel) -> Kernel:
    copied = rebuild(json.loads(json.dumps(describe(kernel))))
    copied.load_state_dict(kernel.state_dict())
    return copied


@pytest.mark.parametrize(
    ("kernel", "form"),
    [
        (categorical(), "categorical"),
        (sparse(), "sparse"),
        (ScaleKernel(categorical()).double(), "categorical"),
    ],
    ids=["categorical", "sparse", "scaled"],
)
def test_comes_back_as_the_same_function(kernel: Kernel, form: str) -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(-1, 6, size=(9, 3)).astype(float)
    if form == "sparse":
        x = np.stack([x, np.where(x < 0, 0, rng.normal(size=x.shape))], -1).reshape(9, 6)
    rows = torch.tensor(x)
    copied = through_json(kernel)
    assert torch.equal(covariance(copied, rows, rows), covariance(kernel, rows, rows))
    assert torch.equal(variance(copied, rows), variance(kernel, rows))
    assert describe(copied) == describe(kernel)
    fresh = covariance(rebuild(describe(kernel)), rows, rows)
    assert not torch.equal(fresh, covariance(kernel, rows, rows))


def test_a_sum_of_both_comes_back() -> None:
    encoder, rows = mixed()
    kernel: Any = build_kernel("relevance", encoder.blocks, rows)
    for part in kernel.kernels:
        moved(part)
    copied = through_json(kernel)
    assert [(k.sizes, k.sparse) for k in copied.kernels] == [(k.sizes, k.sparse) for k in kernel.kernels]
    assert torch.equal(covariance(copied, rows, rows), covariance(kernel, rows, rows))
