"""Gaussian processes: kernels, inducing inputs, and posteriors of the potentials of templates."""

from structgp.gp.basis import contrasts
from structgp.gp.block import Block, CovarianceForm, Entropy
from structgp.gp.choose_inducing import InducingChoice, choose_inducing
from structgp.gp.families import FAMILIES, Inducing, Mixture, Table, Weights
from structgp.gp.families.inducing_points import RANK
from structgp.gp.posterior import Posterior
from structgp.gp.relaxation import Relaxation, has_shape, learn_shape
from structgp.gp.scale_steps import Seen

__all__ = [
    "FAMILIES",
    "RANK",
    "Block",
    "CovarianceForm",
    "Entropy",
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
    "has_shape",
    "learn_shape",
]
