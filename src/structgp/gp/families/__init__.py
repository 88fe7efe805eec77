"""Families of posteriors, side by side: inducing values, weights, a table of scores, a mixture."""

from structgp.gp.families.dense_weights import DenseWeights
from structgp.gp.families.full_table import FullTable
from structgp.gp.families.inducing import Inducing
from structgp.gp.families.mixture import Mixture
from structgp.gp.families.weights import Table, Weights

FAMILIES = {family.name: family for family in (Inducing, Weights, DenseWeights, Table, FullTable, Mixture)}

__all__ = ["FAMILIES", "DenseWeights", "FullTable", "Inducing", "Mixture", "Table", "Weights"]
