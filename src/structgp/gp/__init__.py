"""Sparse Gaussian processes: inducing inputs, the variational posterior, divergences."""

from structgp.gp.inducing import InducingChoice, choose_inducing
from structgp.gp.posterior import Conditional, Noise, Posterior, SequenceGaussian
from structgp.gp.relaxation import Relaxation, has_shape, learn_shape

__all__ = [
    "Conditional",
    "InducingChoice",
    "Noise",
    "Posterior",
    "Relaxation",
    "SequenceGaussian",
    "choose_inducing",
    "has_shape",
    "learn_shape",
]
