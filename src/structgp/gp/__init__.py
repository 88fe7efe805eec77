"""Gaussian processes: kernels, inducing inputs, and posteriors of the potentials of templates."""

import warnings

with warnings.catch_warnings():
    # linear_operator compiles some functions in a way that newer versions of torch call deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    warnings.simplefilter("ignore", FutureWarning)
    import gpytorch  # noqa: F401

from structgp.gp.block import Block, CovarianceForm, Entropy, Posterior, Seen, contrasts
from structgp.gp.families import FAMILIES, DenseWeights, FullTable, Inducing, Mixture, Table, Weights
from structgp.gp.families.inducing_points import RANK
from structgp.gp.inducing_inputs import InducingChoice, choose_inducing
from structgp.gp.relaxation import Relaxation, learn_shape, shape_parameters

__all__ = [
    "FAMILIES",
    "RANK",
    "Block",
    "CovarianceForm",
    "DenseWeights",
    "Entropy",
    "FullTable",
    "Inducing",
    "InducingChoice",
    "Mixture",
    "Posterior",
    "Relaxation",
    "Seen",
    "Table",
    "Weights",
    "choose_inducing",
    "contrasts",
    "learn_shape",
    "shape_parameters",
]
