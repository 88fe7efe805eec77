"""Estimators of the expected log-likelihood and its gradients, all behind one interface.

An estimator sees a function of standard normal numbers (a ``Target``), never a structure or a posterior,
and returns an ``Estimate`` of its mean, slope and bend, with the variance of each."""

from structgp.inference.estimators.moments import Estimate, Estimator, Moments, Noise, Target
from structgp.inference.estimators.surrogate import Pathwise, PathwiseSurrogate, Surrogate

__all__ = [
    "Estimate",
    "Estimator",
    "Moments",
    "Noise",
    "Pathwise",
    "PathwiseSurrogate",
    "Surrogate",
    "Target",
]
