"""Likelihoods of labelled structures: p(y | f, g), seen by the engine as values only."""

from structgp.structures.base import Curvature, Structure
from structgp.structures.chain import Chain

__all__ = ["Chain", "Curvature", "Structure"]
