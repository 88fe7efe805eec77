"""A fitted posterior in a larger world: more features, more labels.

What was known of the old ones stays as it is; the new ones begin at their prior.
"""

from __future__ import annotations

import torch
from torch import Tensor

from structgp.answers.model import Model
from structgp.data.encode import FeatureEncoder
from structgp.data.examples import Examples
from structgp.data.vocabulary import column_places
from structgp.gp import Posterior, Table, Weights
from structgp.gp.kernels.grow import grown
from structgp.plan.prior import flat_tokens


def carried_over(model: Model, examples: Examples) -> Posterior:
    """The model's posterior of weights, for the features and labels of the examples too, whose encoder goes on
    from the model's and whose labels begin with the model's."""
    old, table = model.posterior.node, model.posterior["next"]
    moved = column_places(model.encoder, examples.encoder)
    kernel, place = grown(
        old.kernel,
        _sizes(examples.encoder),
        flat_tokens(examples.encoder, examples.rows),
        None if moved is None else torch.from_numpy(moved),
    )
    V, N, R = old.n_scores, examples.n_labels, old.n_functions
    new = Weights(kernel, (N,), _basis(old, N))
    wide = Table((N, N), float(table.sd.detach()))
    with torch.no_grad():
        new.log_amplitude.copy_(old.log_amplitude)
        new.m[:R, place] = old.m
        new.factor[:R, place] = old.factor
        wide.m.view(N, N)[:V, :V] = table.m.view(V, V)
        wide.factor.view(N, N)[:V, :V] = table.factor.view(V, V)
    return Posterior({"node": new, "next": wide})


def _sizes(encoder: FeatureEncoder) -> list[list[int]]:
    """How many values each template of each block has."""
    sizes = []
    if encoder.templates:
        sizes.append([max(1, len(values)) for values in encoder.values])
    if encoder.has_sparse:
        sizes.append([max(1, len(encoder.columns or encoder.attributes))])
    return sizes


def _basis(old: Weights, n_labels: int) -> Tensor:
    """(V', R') a function for each new label, as large as the old labels' are; none of the old functions
    moves it."""
    V, R = old.basis.shape
    more = n_labels - V
    basis = old.basis.new_zeros((n_labels, R + more))
    basis[:V, :R] = old.basis
    size = old.basis.square().sum(1).mean().sqrt()
    basis[V:, R:] = size * torch.eye(more, dtype=basis.dtype)
    return basis
