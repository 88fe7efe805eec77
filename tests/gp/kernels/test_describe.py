"""A kernel comes back from its description and its state as the same function, or is refused."""

from __future__ import annotations

import copy
import json

import gpytorch
import pytest
import torch
from gpytorch.constraints import GreaterThan, Interval, Positive
from gpytorch.kernels import (
    AdditiveKernel,
    CosineKernel,
    Kernel,
    LinearKernel,
    MaternKernel,
    PeriodicKernel,
    PiecewisePolynomialKernel,
    PolynomialKernel,
    ProductKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
)
from torch import Tensor

from structgp.errors import InputError
from structgp.gp.kernels import DenseKernel, SparseLinearKernel, SparseRBFKernel, TemplateKernel, covariance
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.kernel_json import _OURS, describe, rebuild
from structgp.gp.kernels.relevance import RelevanceKernel

OURS = {
    "template": lambda: TemplateKernel(4),
    "template-product": lambda: TemplateKernel(4, "product"),
    "sparse-linear": lambda: SparseLinearKernel(),
    "sparse-linear-raw": lambda: SparseLinearKernel(normalize=False),
    "sparse-rbf": lambda: SparseRBFKernel(),
    "relevance": lambda: RelevanceKernel([3, 2, 3, 1]),
    "relevance-sparse": lambda: RelevanceKernel([2], sparse=True),
    "dense": lambda: DenseKernel(RBFKernel(), 4, n_inducing=3, ard=True),
    "dense-linear": lambda: DenseKernel(None, 4),
    "dense-own": lambda: DenseKernel(MaternKernel(nu=0.5), 4, 2, linear=False, standardised=False),
    "scaled": lambda: ScaleKernel(TemplateKernel(4)),
    "blocks": lambda: BlockSumKernel(
        [ScaleKernel(TemplateKernel(2)), ScaleKernel(SparseRBFKernel())], [(0, 2), (2, None)]
    ),
}
GPYTORCH = {
    "rbf": lambda: RBFKernel(),
    "rbf-ard": lambda: RBFKernel(ard_num_dims=4),
    "rbf-active": lambda: RBFKernel(active_dims=(0, 2)),
    "rbf-ard-active": lambda: RBFKernel(ard_num_dims=2, active_dims=[3, 1]),
    "matern-1/2": lambda: MaternKernel(nu=0.5),
    "matern-3/2": lambda: MaternKernel(nu=1.5, ard_num_dims=4),
    "matern-5/2": lambda: MaternKernel(),
    "rational-quadratic": lambda: RQKernel(),
    "linear": lambda: LinearKernel(),
    "linear-ard": lambda: LinearKernel(ard_num_dims=4),
    "polynomial": lambda: PolynomialKernel(power=3),
    "piecewise": lambda: PiecewisePolynomialKernel(q=1),
    "cosine": lambda: CosineKernel(),
    "periodic": lambda: PeriodicKernel(),
    "periodic-ard": lambda: PeriodicKernel(ard_num_dims=4),
    "scale": lambda: ScaleKernel(RBFKernel(ard_num_dims=4)),
    "scale-active": lambda: ScaleKernel(MaternKernel(nu=0.5, active_dims=[1])),
    "sum": lambda: AdditiveKernel(RBFKernel(active_dims=[0]), ScaleKernel(LinearKernel())),
    "product": lambda: ProductKernel(RBFKernel(), PeriodicKernel(active_dims=[2, 3])),
    "operators": lambda: ScaleKernel(ScaleKernel(RBFKernel()) + MaternKernel(nu=1.5) * LinearKernel()),
}
ALL = OURS | GPYTORCH


def rows(n: int, seed: int) -> Tensor:
    """(n, 4), read as ids by some kernels and as pairs (id, value) by others."""
    return torch.randint(0, 3, (n, 4), generator=torch.Generator().manual_seed(seed)).double()


def moved(kernel: Kernel) -> Kernel:
    """The kernel in double precision with no parameter where it started."""
    generator = torch.Generator().manual_seed(1)
    kernel = kernel.double()
    with torch.no_grad():
        for p in kernel.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return kernel


def through_json(kernel: Kernel) -> Kernel:
    copied = rebuild(json.loads(json.dumps(describe(kernel))))
    copied.load_state_dict(kernel.state_dict())
    return copied


@pytest.mark.parametrize("name", ALL)
def test_round_trip_is_the_same_function(name):
    kernel = copy.deepcopy(moved(ALL[name]()))
    copied = through_json(kernel)
    x, z = rows(7, 0), rows(5, 1)
    assert torch.equal(covariance(copied, x, z), covariance(kernel, x, z))
    assert torch.equal(covariance(copied, x, x), covariance(kernel, x, x))
    # The parameters did move: a fresh kernel is another function.
    if list(kernel.parameters()):
        fresh = rebuild(describe(kernel))
        assert not torch.equal(covariance(fresh, x, z), covariance(kernel, x, z))
    assert describe(copied) == describe(kernel)


@pytest.mark.parametrize("name", ALL)
def test_a_scale_put_around_a_copy(name):
    """As the estimator does with a kernel that is passed to it."""
    kernel = ScaleKernel(copy.deepcopy(ALL[name]())).double()
    copied = through_json(moved(kernel))
    x, z = rows(7, 0), rows(5, 1)
    assert torch.equal(covariance(copied, x, z), covariance(kernel, x, z))


@pytest.mark.parametrize("name", ALL)
def test_describing_leaves_the_kernel_alone(name):
    kernel = moved(ALL[name]())
    before = copy.deepcopy(kernel.state_dict())
    describe(kernel)
    assert all(torch.equal(v, before[k]) for k, v in kernel.state_dict().items())
    assert {p.requires_grad for p in kernel.parameters()} <= {True}


def test_every_kernel_of_ours_is_here():
    found = {type(module) for make in OURS.values() for module in make().modules()}
    assert set(_OURS) <= found


def test_the_description_is_plain():
    assert describe(ScaleKernel(MaternKernel(nu=1.5, active_dims=[0, 2]).double())) == {
        "class": "ScaleKernel",
        "arguments": {
            "base_kernel": {
                "kernel": {
                    "class": "MaternKernel",
                    "arguments": {"nu": 1.5, "active_dims": {"dims": [0, 2]}},
                    "positional": [],
                }
            },
            "active_dims": {"dims": [0, 2]},
        },
        "positional": [],
    }


class Custom(Kernel):
    """A user's own."""

    def forward(self, x1, x2, diag=False, **_):
        value = torch.exp(-torch.cdist(x1, x2))
        return value.diagonal(dim1=-1, dim2=-2) if diag else value


class Sharper(RBFKernel):
    """A user's own, from one that could be saved."""

    def forward(self, x1, x2, **params):
        return super().forward(2 * x1, 2 * x2, **params)


def homonym() -> Kernel:
    """A user's own under the name of one of GPyTorch's."""
    return type("RBFKernel", (Sharper,), {})()


REFUSED = {
    "custom": lambda: Custom(),
    "derived": lambda: Sharper(),
    "homonym": homonym,
    "inside": lambda: ScaleKernel(RBFKernel() + Custom()),
    "interval": lambda: RBFKernel(lengthscale_constraint=Interval(0.1, 2.0)),
    "greater": lambda: ScaleKernel(RBFKernel(lengthscale_constraint=GreaterThan(0.5))),
    "transform": lambda: RBFKernel(lengthscale_constraint=Positive(torch.exp, torch.log)),
    "prior": lambda: RBFKernel(lengthscale_prior=gpytorch.priors.GammaPrior(2.0, 1.0)),
    "batch": lambda: RBFKernel(batch_shape=torch.Size([2])),
    "random features": lambda: gpytorch.kernels.RFFKernel(num_samples=3, num_dims=4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_come_back_as_another_function_is_refused(name):
    kernel = REFUSED[name]().double()
    with pytest.raises(InputError, match=r"^kernel: .* cannot be saved; build it from") as caught:
        describe(kernel)
    odd = {"inside": "Custom", "greater": "RBFKernel"}.get(name, type(kernel).__name__)
    assert f"a {odd} with these arguments" in str(caught.value), "the part that is at fault"


@pytest.mark.parametrize("name", ["Kernel42", "os.system", "Module", "Interval", "__doc__", ""])
def test_only_known_kernels_are_built(name):
    with pytest.raises(InputError, match=r"^kernel: unknown kernel .*; update structgp$"):
        rebuild({"class": name, "arguments": {}, "positional": []})
