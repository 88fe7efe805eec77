"""Splits uncertainty into the part of the data (aleatoric) and that of the model (epistemic).

    H[E p]  =  E H[p]  +  (H[E p] - E H[p])
    total   =  data    +  model

E averages over the posterior. The data's part would remain if the functions were known, because some tokens
are ambiguous in themselves. The model's part, the mutual information of label and functions, is what more
labels would remove. In nats."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structgp.answers.labellings import sample_labellings
from structgp.answers.potentials import Potentials


class Parts(NamedTuple):
    """total = data + model, all of one shape."""

    total: Tensor
    data: Tensor

    @property
    def model(self) -> Tensor:
        return self.total - self.data


def token_uncertainty(at: Potentials) -> Parts:
    """(B, T) uncertainty about the label of each token; 0 at padding."""
    each = at.ask("marginals")
    return Parts(_entropy(at.average(each)), at.average(_entropy(each)))


def event_uncertainty(p: Tensor, share: Tensor) -> Parts:
    """() uncertainty about whether an event happens, from its probability (S,) under each draw."""
    both = torch.stack([p, 1 - p], -1).clamp(0, 1)
    return Parts(_entropy(share @ both), share @ _entropy(both))


def sequence_uncertainty(at: Potentials, n_samples: int, generator: torch.Generator) -> Parts:
    """(B,) uncertainty about the whole labelling. The data's part is exact, from the entropy under each
    draw. The model's part is estimated from ``n_samples`` labellings, each under all draws, and is exact
    for a single draw. Cost O(S B T V^2 n_samples)."""
    data = at.average(at.ask("entropy"))
    if at.n_draws == 1:
        return Parts(data, data)
    values = torch.zeros(len(data), dtype=data.dtype)
    for y in sample_labellings(at, n_samples, generator):
        log_p = at.log_prob(y)  # (S, B)
        # The information in y about the draw it came from: the divergence of p(draw | y) from the shares.
        posterior = (log_p + at.share.log()).softmax(0)
        values += (torch.xlogy(posterior, posterior) - torch.xlogy(posterior, at.share)).sum(0)
    return Parts(data + values / n_samples, data)


def _entropy(p: Tensor) -> Tensor:
    """(...) entropies of p (..., V)."""
    return -torch.xlogy(p, p).sum(-1)
