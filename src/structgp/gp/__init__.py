"""Sparse Gaussian processes: inducing inputs, the variational posterior, divergences."""

from structgp.gp.inducing import InducingChoice, choose_inducing
from structgp.gp.posterior import Conditional, Noise, Posterior, SequenceGaussian

__all__ = [
    "Conditional",
    "InducingChoice",
    "Noise",
    "Posterior",
    "SequenceGaussian",
    "choose_inducing",
]
