"""Estimators of the expected log-likelihood; they see a log_prob callable, never a structure."""

from structgp.gradients.pathwise import Estimate, LogProb, expected_log_prob

__all__ = ["Estimate", "LogProb", "expected_log_prob"]
