"""From a posterior to answers: each an average over joint draws of (f, g), exact under each draw."""

from structgp.answers.labellings import (
    best_tokens,
    log_prob,
    n_best,
    sample_labellings,
    transition_marginals,
)
from structgp.answers.potentials import Draws, Potentials, mean, sample
from structgp.answers.spans import SENSES, Boundaries, likely_spans, span_probability
from structgp.answers.uncertainty import Parts, event_uncertainty, sequence_uncertainty, token_uncertainty

__all__ = [
    "SENSES",
    "Boundaries",
    "Draws",
    "Parts",
    "Potentials",
    "best_tokens",
    "event_uncertainty",
    "likely_spans",
    "log_prob",
    "mean",
    "n_best",
    "sample",
    "sample_labellings",
    "sequence_uncertainty",
    "span_probability",
    "token_uncertainty",
    "transition_marginals",
]
