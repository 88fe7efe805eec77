"""Families of posteriors, side by side: inducing values, weights, a table of scores, a mixture."""

from structgp.gp.families.inducing import Inducing
from structgp.gp.families.mixture import Mixture
from structgp.gp.families.table import Table
from structgp.gp.families.weights import Weights

FAMILIES = {family.name: family for family in (Inducing, Weights, Table, Mixture)}

__all__ = ["FAMILIES", "Inducing", "Mixture", "Table", "Weights"]
