"""Covariance functions: GPyTorch's for dense features, ours for categorical and sparse ones."""

from structgp.kernels.evaluate import covariance, variance
from structgp.kernels.relevance import RelevanceKernel
from structgp.kernels.sparse import SparseLinearKernel, SparseRBFKernel
from structgp.kernels.template import TemplateKernel
from structgp.kernels.weights import (
    ActiveFeatures,
    active_features,
    has_weights,
    weight_parts,
    weight_variances,
)

__all__ = [
    "ActiveFeatures",
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
