"""Covariance functions: GPyTorch's for dense features, ours for categorical and sparse ones."""

from structgp.kernels.evaluate import covariance, variance
from structgp.kernels.relevance import RelevanceKernel
from structgp.kernels.sparse import SparseLinearKernel, SparseRBFKernel
from structgp.kernels.template import TemplateKernel

__all__ = [
    "RelevanceKernel",
    "SparseLinearKernel",
    "SparseRBFKernel",
    "TemplateKernel",
    "covariance",
    "variance",
]
