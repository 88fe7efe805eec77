"""From a posterior to answers: each an average over joint draws of (f, g), exact under each draw."""

from structgp.answers.draws import Draws, mean, sample
from structgp.answers.labellings import (
    best_tokens,
    log_prob,
    marginals,
    n_best,
    pair_marginals,
    sample_labellings,
    viterbi,
)
from structgp.answers.potentials import Potentials, potentials
from structgp.answers.spans import SENSES, Boundaries, likely_spans, span_probability
from structgp.answers.uncertainty import Doubt, event_doubt, sequence_doubt, token_doubt

__all__ = [
    "SENSES",
    "Boundaries",
    "Doubt",
    "Draws",
    "Potentials",
    "best_tokens",
    "event_doubt",
    "likely_spans",
    "log_prob",
    "marginals",
    "mean",
    "n_best",
    "pair_marginals",
    "potentials",
    "sample",
    "sample_labellings",
    "sequence_doubt",
    "span_probability",
    "token_doubt",
    "viterbi",
]
