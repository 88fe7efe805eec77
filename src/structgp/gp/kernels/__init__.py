"""Covariance functions: GPyTorch's for dense features, ours for categorical and sparse ones."""

from structgp.gp.kernels.block_sum import covariance, variance
from structgp.gp.kernels.dense import DenseKernel
from structgp.gp.kernels.relevance import (
    ActiveFeatures,
    RelevanceKernel,
    active_features,
    has_weights,
    weight_parts,
    weight_variances,
)
from structgp.gp.kernels.sparse import SparseLinearKernel, SparseRBFKernel
from structgp.gp.kernels.template import TemplateKernel

__all__ = [
    "ActiveFeatures",
    "DenseKernel",
    "RelevanceKernel",
    "SparseLinearKernel",
    "SparseRBFKernel",
    "TemplateKernel",
    "active_features",
    "covariance",
    "has_weights",
    "variance",
    "weight_parts",
    "weight_variances",
]
