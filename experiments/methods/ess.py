"""GPstruct (Bratieres, Quadrianto and Ghahramani 2015): the full GP, with posterior sampling.

The model is structgp's with the linear kernel and nothing learned: f_v ~ GP(0, variance <x, x'>) for each
label, a Gaussian score for each pair of labels, and the linear chain (``eq:struct-softmax``).
Elliptical slice sampling of all latent values at once is exact in the limit of many iterations; R-hat
indicates whether there were enough. Predictions average the marginals over the samples, each with E[f* | f]
at new tokens, as the published code does by default (one could draw f* instead).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.methods.design import LinearFeatures, checked_labels, read_out
from experiments.methods.ess_sites import Sites, fit_sites, prior_sites
from experiments.methods.latent import Coordinates, LatentChain
from experiments.methods.slices import Samples, elliptical_slices, split_rhat
from structgp import metrics
from structgp.data.labels import check_all_labelled
from structgp.errors import InputError
from structgp.gp import contrasts

DRAWS_AT_ONCE = 64


class GPStruct:
    """Full Gaussian process with elliptical slice sampling, behind the estimator's interface.

    X and y are as in :class:`structgp.StructuredGPClassifier`.

    Parameters
    ----------
    n_iterations : number of iterations of each chain; the first third is burn-in.
    n_chains : number of chains, which start from different points.
    thin : number of iterations from one kept sample to the next.
    around : the Gaussian that ellipses are drawn in: 'prior', as published, or 'fit', one that is first
        fitted to the posterior, with the likelihood corrected for it. Both sample the same posterior; the
        second moves several times as far per iteration.
    variance : prior variance of a weight.
    transition_sd : prior standard deviation of a label-to-label score.
    features : how a token given as a list of strings is read: 'auto', 'columns' or 'bag'.
    random_state : seed; equal seeds give equal fits.

    Attributes (after ``fit``)
    ----------
    classes_ : labels seen in training, sorted.
    weights_ : (K, D, V - 1) and transitions_ : (K, V, V), the samples of all chains; basis_ : (V, V - 1),
        with which f* = X* weights basis^T.
    training_log_ : split R-hat of all latent values and scores: 'rhat', the largest, and 'rhat_median';
        'rhat_likelihood', of the log-likelihood; 'angle', the mean step along an ellipse, at most pi;
        'evaluations' of the likelihood of all data; 'n_samples'; 'seconds'.
    """

    classes_: np.ndarray
    weights_: Tensor
    transitions_: Tensor
    basis_: Tensor
    training_log_: dict[str, Any]

    def __init__(
        self,
        n_iterations: int = 3000,
        *,
        n_chains: int = 4,
        thin: int = 10,
        around: str = "fit",
        variance: float = 1.0,
        transition_sd: float = 1.0,
        features: str = "auto",
        random_state: int = 0,
    ) -> None:
        self.n_iterations = n_iterations
        self.n_chains = n_chains
        self.thin = thin
        self.around = around
        self.variance = variance
        self.transition_sd = transition_sd
        self.features = features
        self.random_state = random_state

    def fit(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> GPStruct:
        """Samples the posterior. Cost O(R^3) once, and O(S N (R + V) V) per iteration of S chains."""
        self._check_parameters()
        began = time.monotonic()
        X = read_out(X)
        paths, self._labels = checked_labels(X, y)
        self._features = LinearFeatures(self.features).fit(X)
        tokens, encoded = self._features.transform(X), self._labels.transform(paths)
        counts = np.bincount(np.concatenate(encoded), minlength=len(self._labels.classes))
        basis = contrasts(torch.from_numpy(counts))
        chain = LatentChain.of(tokens, encoded, basis)
        coordinates = Coordinates.of(tokens.features, float(self.variance) ** 0.5)
        generator = torch.Generator().manual_seed(int(self.random_state))
        if self.around == "prior":
            sites = prior_sites(coordinates, basis, self.transition_sd)
        else:
            sites = fit_sites(chain, coordinates, self.transition_sd, generator)
        samples = self._sample(chain, sites, generator)
        self._keep(samples, sites, coordinates, chain)
        self.training_log_["seconds"] = time.monotonic() - began
        return self

    def _sample(self, chain: LatentChain, sites: Sites, generator: torch.Generator) -> Samples:
        """Runs the chains. A state is a row with the deviations of h and g from the sites' mean."""
        n_node = sites.mean.numel()

        def ratio(rows: Tensor) -> Tensor:
            dh = rows[:, :n_node].reshape(-1, *sites.mean.shape)
            return sites.ratio(chain, dh, rows[:, n_node:].reshape(-1, *sites.transition_mean.shape))

        def draw(n: int) -> Tensor:
            dh, dg = sites.draw(n, generator)
            return torch.cat([dh.reshape(n, -1), dg.reshape(n, -1)], 1)

        with torch.no_grad():
            return elliptical_slices(
                ratio,
                draw,
                draw(self.n_chains),
                n_iterations=self.n_iterations,
                burn_in=self.n_iterations // 3,
                thin=self.thin,
                generator=generator,
            )

    def _keep(self, samples: Samples, sites: Sites, coordinates: Coordinates, chain: LatentChain) -> None:
        rhat = split_rhat(samples.kept)
        moves = rhat[~rhat.isnan()]
        rows, n_node = samples.kept.flatten(0, 1), sites.mean.numel()
        h = sites.mean + rows[:, :n_node].reshape(-1, *sites.mean.shape)
        self.weights_ = torch.stack([coordinates.directions @ coordinates.inverse(one) for one in h])
        self.transitions_ = sites.transition_mean + rows[:, n_node:].reshape(
            -1, *sites.transition_mean.shape
        )
        self.basis_ = chain.basis
        self.classes_ = np.array(self._labels.classes)
        some = zip(h.split(DRAWS_AT_ONCE), self.transitions_.split(DRAWS_AT_ONCE), strict=True)
        likelihood = torch.cat([chain.log_prob(*draws) for draws in some])
        self.training_log_ = {
            "rhat": float(moves.max()),
            "rhat_median": float(moves.median()),
            "rhat_likelihood": float(split_rhat(likelihood.reshape(*samples.kept.shape[:2], 1))),
            "angle": samples.angle,
            "evaluations": samples.evaluations,
            "n_samples": len(rows),
        }

    def predict(self, X: Iterable[Any]) -> list[list[str]]:
        """The most probable label of each token."""
        return [self._labels.names(p.argmax(1)) for p in self._marginals(X)]

    def predict_marginals(self, X: Iterable[Any]) -> list[list[dict[str, float]]]:
        """For every token, a dict from label to its probability."""
        return [
            [dict(zip(self._labels.classes, row, strict=True)) for row in p.tolist()]
            for p in self._marginals(X)
        ]

    def score(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> float:
        """Token accuracy."""
        X = read_out(X)
        return 1.0 - metrics.token_error(check_all_labelled(X, list(y)), self.predict(X))

    def _marginals(self, X: Iterable[Any]) -> list[np.ndarray]:
        """(T, V) probabilities for each sequence, averaged over samples. Cost O(K N V (nnz + V))."""
        if not hasattr(self, "weights_"):
            raise InputError("GPStruct", "not fitted yet", "call fit(X, y) first")
        tokens = self._features.transform(read_out(X))
        chain = LatentChain.of(tokens, None, self.basis_)
        total = torch.zeros(chain.n_tokens, len(self.basis_), dtype=self.weights_.dtype)
        samples = zip(
            self.weights_.split(DRAWS_AT_ONCE), self.transitions_.split(DRAWS_AT_ONCE), strict=True
        )
        for weights, transitions in samples:
            h = np.stack([tokens.features @ one for one in weights.numpy()])
            total += chain.marginals(torch.from_numpy(h), transitions) * len(transitions)
        return tokens.split((total / len(self.transitions_)).numpy())

    def _check_parameters(self) -> None:
        if self.around not in ("prior", "fit"):
            raise InputError("around", f"{self.around!r} is not known", "use 'prior' or 'fit'")
        for name in ("variance", "transition_sd"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InputError(name, f"{value!r} is not possible", "give a number above 0")
        if self.n_chains < 1 or self.thin < 1:
            raise InputError("n_chains or thin", "less than 1", "give 1 or more")
        # R-hat needs two states in each half of a chain.
        least = 6 * self.thin
        if self.n_iterations < least:
            raise InputError("n_iterations", f"{self.n_iterations} is too few", f"give {least} or more")
