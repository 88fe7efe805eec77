"""Sparse Gaussian processes: inducing inputs, the variational posterior, divergences."""

from structgp.gp.basis import contrasts
from structgp.gp.inducing import InducingChoice, choose_inducing
from structgp.gp.posterior import (
    Conditional,
    CovarianceForm,
    Entropy,
    PairwiseGaussian,
    Posterior,
    SequenceGaussian,
)
from structgp.gp.relaxation import Relaxation, has_shape, learn_shape
from structgp.gp.weights import WeightConditional, WeightPosterior, noise_table

__all__ = [
    "Conditional",
    "CovarianceForm",
    "Entropy",
    "InducingChoice",
    "PairwiseGaussian",
    "Posterior",
    "Relaxation",
    "SequenceGaussian",
    "WeightConditional",
    "WeightPosterior",
    "choose_inducing",
    "contrasts",
    "has_shape",
    "learn_shape",
    "noise_table",
]
