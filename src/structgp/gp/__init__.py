"""Gaussian processes: kernels, inducing inputs, and posteriors of the potentials of templates."""

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
