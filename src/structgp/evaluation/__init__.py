"""How good predictions are, and a linear CRF to compare with."""

from structgp.evaluation import metrics

__all__ = ["metrics"]
