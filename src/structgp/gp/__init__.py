"""Sparse Gaussian processes: inducing inputs, the variational posterior, divergences."""

from structgp.gp.basis import contrasts
from structgp.gp.inducing import InducingChoice, choose_inducing
from structgp.gp.lowrank import LowRank
from structgp.gp.posterior import (
    RANK,
    CovarianceForm,
    Entropy,
    PairwiseForm,
    PairwiseGaussian,
    Posterior,
)
from structgp.gp.relaxation import Relaxation, has_shape, learn_shape
from structgp.gp.sequences import Conditional, SequenceGaussian
from structgp.gp.spreads import Spread, root_times, root_transposed_times, traces
from structgp.gp.weights import WeightConditional, WeightPosterior, noise_table

__all__ = [
    "RANK",
    "Conditional",
    "CovarianceForm",
    "Entropy",
    "InducingChoice",
    "LowRank",
    "PairwiseForm",
    "PairwiseGaussian",
    "Posterior",
    "Relaxation",
    "SequenceGaussian",
    "Spread",
    "WeightConditional",
    "WeightPosterior",
    "choose_inducing",
    "contrasts",
    "has_shape",
    "learn_shape",
    "noise_table",
    "root_times",
    "root_transposed_times",
    "traces",
]
