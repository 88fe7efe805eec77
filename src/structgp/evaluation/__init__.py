"""Metrics of predictions, and a linear-chain CRF to compare with."""

from structgp.evaluation import metrics

__all__ = ["metrics"]
