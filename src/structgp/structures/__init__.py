"""Likelihoods of labelled structures: p(y | f, g), seen by the engine as values only."""

from structgp.structures.base import Curvature, LocalCurvature, Structure
from structgp.structures.choose import as_structure
from structgp.structures.composite import PARTS
from structgp.structures.linear_chain.chain import Chain
from structgp.structures.masks import Rules, keep_known, some_missing
from structgp.structures.opaque.blackbox import BlackBox
from structgp.structures.opaque.differences import Differences
from structgp.structures.opaque.finite import all_finite
from structgp.structures.piecewise import Piecewise

__all__ = [
    "PARTS",
    "BlackBox",
    "Chain",
    "Curvature",
    "Differences",
    "LocalCurvature",
    "Piecewise",
    "Rules",
    "Structure",
    "all_finite",
    "as_structure",
    "keep_known",
    "some_missing",
]
