"""The scikit-learn face of the library."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from structgp import metrics
from structgp import model as model_file
from structgp._version import __version__
from structgp.data.encode import FeatureEncoder
from structgp.data.labels import LabelEncoder, check_labels
from structgp.errors import InputError, StructgpWarning
from structgp.gp import Posterior, Relaxation
from structgp.kernels.blocks import KernelChoice
from structgp.model import STRUCTURES, Model
from structgp.optimizers import LearnScales, StepInfo
from structgp.prior import choose_kernel, flat_tokens, pick_inducing
from structgp.training import Callback, History, choose_optimizer, make_batches, train

logger = logging.getLogger("structgp")

_BATCH_TOKENS = 1_000
_CHOICES = {
    "inference": ("auto", "second-order", "adam"),
    "average": ("draws", "mean"),
    "decode": ("marginal", "viterbi"),
    "likelihood": tuple(STRUCTURES),
    "learn_scales": ("pairwise", True, False),
}


class StructuredGPClassifier(BaseEstimator):
    """Sequence labelling with Gaussian-process potentials and a posterior over them.

    Each label has a latent function with a sparse GP prior over the features of a token, each pair of
    labels a Gaussian score; given those, a labelling is scored by ``likelihood``. ``fit`` finds the
    variational posterior; predictions average over it.

    Parameters
    ----------
    kernel : 'auto' (one weight a template on categorical features, normalised linear on sparse ones, RBF
        on dense ones), 'linear', 'rbf', 'template', 'template-product', on dense features any GPyTorch
        kernel, or a dict
        from kind of feature ('categorical', 'sparse', 'dense') to one of these.
    likelihood : 'chain', the linear-chain structured softmax.
    inference : 'auto', 'second-order' (needs a structure that gives its curvature) or 'adam'.
    n_inducing : most inducing inputs M, picked from the training tokens (from 8,000 of them at random
        where there are more). If fewer reproduce them all, the model is the full GP.
    amplitude : prior variance of a latent value, where the kernel is chosen by name; 'auto' gives
        every active feature a weight of variance 1.
    pairwise_sd : prior standard deviation of a label-to-label score; 0 leaves them out.
    learn_kernel : learn the kernel's shape (template weights, length-scales, balance of blocks) on
        the evidence of a Gaussian relaxation before the fit. Its amplitude stays.
    learn_scales : which scales move with the evidence bound during the fit: 'pairwise' (the
        label-to-label scale), True (the amplitude too) or False (none).
    features : how a token given as a list of strings is read: 'columns' (place j is template j),
        'bag' (a set of attributes), or 'auto' (columns if every token has equally many).
    n_draws : draws of the latent functions that a prediction averages over.
    average : 'draws', or 'mean' to plug in the posterior mean.
    decode : 'marginal' (the most probable label of each token) or 'viterbi' (the most probable
        whole labelling under the posterior mean).
    random_state : seed; equal seeds give equal fits.
    verbose : report every step through the logger 'structgp', to standard error if nothing
        else listens.

    Attributes
    ----------
    classes_ : labels seen in training, sorted.
    training_log_ : what the optimiser did and why: 'optimizer', 'reason', 'stopped', 'steps',
        'elbo' and 'fresh_elbo' (which bracket the optimum in expectation), 'relaxation' (evidence
        before and after, if the kernel was learned), 'kl_inducing',
        'kl_pairwise', 'amplitude_factor', 'pairwise_sd', 'n_inducing', 'inducing_residual',
        'evaluations', 'seconds', and 'dev' if dev data was passed.
    model_ : the fitted :class:`structgp.model.Model`.

    Notes
    -----
    X is a list (or generator) of sequences; a sequence is a list of feature dicts, a list of lists of
    strings, or a 2-D dense or scipy-sparse array with one row a token. y is a list of lists of
    strings. In a dict, string values are templates, named by their key (beyond 64 keys: a bag of
    attributes); numbers and flags are numeric features; lists and nested dicts are read as
    python-crfsuite reads them. A model read from a file has no 'steps' in its log, and as its
    ``kernel`` the fitted one if it was not given by name.

    Memory is O(V M^2) for the posterior and O(V T^2) for a sequence of T tokens.
    """

    def __init__(
        self,
        kernel: KernelChoice = "auto",
        likelihood: str = "chain",
        inference: str = "auto",
        n_inducing: int = 1000,
        amplitude: float | str = "auto",
        pairwise_sd: float = 1.5,
        learn_kernel: bool = True,
        learn_scales: LearnScales = "pairwise",
        features: str = "auto",
        n_draws: int = 64,
        average: str = "draws",
        decode: str = "marginal",
        random_state: int = 0,
        verbose: bool = False,
    ) -> None:
        self.kernel = kernel
        self.likelihood = likelihood
        self.inference = inference
        self.n_inducing = n_inducing
        self.amplitude = amplitude
        self.pairwise_sd = pairwise_sd
        self.learn_kernel = learn_kernel
        self.learn_scales = learn_scales
        self.features = features
        self.n_draws = n_draws
        self.average = average
        self.decode = decode
        self.random_state = random_state
        self.verbose = verbose

    # -- fitting -------------------------------------------------------------------------------

    def fit(
        self,
        X: Iterable[Any],
        y: Iterable[Sequence[str]],
        X_dev: Iterable[Any] | None = None,
        y_dev: Iterable[Sequence[str]] | None = None,
        *,
        callback: Callback | None = None,
    ) -> StructuredGPClassifier:
        """Fits the posterior. Dev data is scored at the end, into ``training_log_['dev']``.

        ``callback`` is called with every :class:`structgp.optimizers.StepInfo`; if it returns True
        the fit stops there and what has been reached is kept.
        """
        self._check_parameters()
        if (X_dev is None) != (y_dev is None):
            given, missing = ("y_dev", "X_dev") if X_dev is None else ("X_dev", "y_dev")
            raise InputError(missing, f"missing where {given} is given", "pass both or neither")
        X, y = _as_list(X), list(y)
        labels_of = check_labels(X, y)
        labels = LabelEncoder().fit(labels_of)
        encoder = FeatureEncoder(self.features).fit(X)
        if len(labels.classes) < 2:
            raise InputError(
                "y",
                f"every token has the same label, {labels.classes[0]!r}: only one class",
                "pass data with at least two labels",
            )
        rows = encoder.transform(X)
        encoded = labels.transform(labels_of)
        batches = make_batches(rows, encoded, encoder.pad_row, _BATCH_TOKENS)
        generator = torch.Generator().manual_seed(int(self.random_state))
        tokens = flat_tokens(encoder, rows)
        kernel, relaxation = choose_kernel(
            copy.deepcopy(self.kernel),
            encoder.blocks,
            tokens,
            encoded,
            amplitude=self.amplitude,
            learn=self.learn_kernel,
            generator=generator,
        )
        chosen = pick_inducing(kernel, tokens, self.n_inducing, seed=self.random_state)
        posterior = Posterior(
            kernel, chosen.rows, len(labels.classes), pairwise_sd=self.pairwise_sd
        )
        optimizer, reason = choose_optimizer(
            self.inference, STRUCTURES[self.likelihood](), learn_scales=self.learn_scales
        )
        with self._reporting(callback) as report:
            history = train(
                posterior,
                STRUCTURES[self.likelihood](),
                batches,
                optimizer,
                reason,
                generator=generator,
                callback=report,
            )
        if history.stopped == "limit":
            warnings.warn(
                f"the {history.optimizer} optimiser stopped at its limit of {len(history.steps)} "
                "steps before the bound settled; see training_log_",
                StructgpWarning,
                stacklevel=2,
            )
        posterior.round_factor()
        self.classes_ = np.array(labels.classes)
        self.training_log_ = _log(history, posterior, chosen.residual, relaxation)
        info = {k: v for k, v in self.training_log_.items() if k != "steps"}
        info |= {"n_sequences": len(rows), "n_tokens": sum(map(len, rows)), "version": __version__}
        self.model_ = Model(
            encoder,
            labels,
            posterior.requires_grad_(False),
            self.likelihood,
            int(self.n_draws),
            int(self.random_state),
            info,
        )
        if X_dev is not None and y_dev is not None:
            self.training_log_["dev"] = self.evaluate(X_dev, y_dev).as_dict()
        return self

    def _check_parameters(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise InputError(
                    name, f"{value!r} is not known", f"use one of {', '.join(map(str, known))}"
                )
        for name, least in {"n_inducing": 1, "n_draws": 1, "random_state": 0}.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or not least <= int(value) < 2**63:
                raise InputError(
                    name, f"{value!r} is not possible", f"use a whole number, {least} or more"
                )
        amplitude, sd = self.amplitude, self.pairwise_sd
        if not (isinstance(amplitude, Real) and 0 < amplitude < np.inf) and amplitude != "auto":
            raise InputError(
                "amplitude", f"{amplitude!r} is no variance", "use a number above 0, or 'auto'"
            )
        if not (isinstance(sd, Real) and 0 <= sd < np.inf):
            raise InputError("pairwise_sd", f"{sd!r} is no deviation", "use a number, 0 or more")

    @contextmanager
    def _reporting(self, callback: Callback | None) -> Iterator[Callback]:
        """The callback to train with; while it lives, ``verbose`` makes the logger heard."""

        def report(info: StepInfo) -> bool | None:
            logger.info("step %d: bound %.2f", info.iteration + 1, info.elbo)
            return callback(info) if callback is not None else None

        heard = logger.hasHandlers() and logger.isEnabledFor(logging.INFO)
        if not self.verbose or heard:
            yield report
            return
        handler = logging.StreamHandler(sys.stderr)
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield report
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

    # -- predicting ----------------------------------------------------------------------------

    def predict(self, X: Iterable[Any]) -> list[list[str]]:
        """Labels of every token of every sequence."""
        model, X = self._ready(), _as_list(X)
        if self.decode == "viterbi":
            best = model.viterbi(X)
        else:
            best = [p.argmax(-1) for p in model.marginals(X, self.average)]
        return [model.labels.names(indices) for indices in best]

    def _ready(self) -> Model:
        """The fitted model, under the parameters as they are now."""
        check_is_fitted(self, "model_")
        self._check_parameters()
        self.model_.n_draws = int(self.n_draws)
        return self.model_

    def predict_single(self, x: Any) -> list[str]:
        """Labels of one sequence."""
        return self.predict([x])[0]

    def predict_marginals(self, X: Iterable[Any]) -> list[list[dict[str, float]]]:
        """For every token a dict from label to its probability."""
        model = self._ready()
        classes = model.labels.classes
        return [
            [dict(zip(classes, map(float, p), strict=True)) for p in sequence]
            for sequence in model.marginals(_as_list(X), self.average)
        ]

    def predict_marginals_single(self, x: Any) -> list[dict[str, float]]:
        """For every token of one sequence a dict from label to its probability."""
        return self.predict_marginals([x])[0]

    def sequence_log_probs(
        self, X: Iterable[Any], y: Iterable[Sequence[str]]
    ) -> list[float | None]:
        """log p(y | x) of each whole labelling, averaged over the posterior; None where a label was
        never seen in training."""
        model, X, y = self._ready(), _as_list(X), list(y)
        return model.log_probs(X, check_labels(X, y), self.average)

    def score(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> float:
        """Token accuracy."""
        X, y = _as_list(X), list(y)
        return 1.0 - metrics.token_error(check_labels(X, y), self.predict(X))

    def evaluate(self, X: Iterable[Any], y: Iterable[Sequence[str]]) -> metrics.Report:
        """Token error, span scores, NLL and calibration on labelled data."""
        X, y = _as_list(X), list(y)
        truth = check_labels(X, y)
        return metrics.evaluate(
            truth, self.predict(X), self.predict_marginals(X), self.sequence_log_probs(X, y)
        )

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the model to one file (safetensors and JSON); read it with ``structgp.load``."""
        check_is_fitted(self, "model_")
        params = {k: v for k, v in self.get_params(deep=False).items() if _is_plain(v)}
        params = {k: v.item() if isinstance(v, np.generic) else v for k, v in params.items()}
        self.model_.extra["params"] = params
        self.model_.save(path)


def load(path: str | Path) -> StructuredGPClassifier:
    """The fitted estimator in a file that ``save`` or ``structgp train`` wrote."""
    model = model_file.load(path)
    params = {"kernel": model.posterior.kernel} | model.extra.get("params", {})
    estimator = StructuredGPClassifier(**params)
    estimator.model_ = model
    estimator.classes_ = np.array(model.labels.classes)
    estimator.training_log_ = dict(model.info)
    model.posterior.requires_grad_(False)
    return estimator


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it: numbers, strings, and dicts of names of kernels."""
    if isinstance(value, dict):
        return all(isinstance(v, str) for v in value.values())
    return isinstance(value, str | int | float | bool | np.generic)


def _as_list(X: Iterable[Any]) -> list[Any]:
    """X with generators read out; what is no sequence at all stays for the encoder to name."""
    return [x if hasattr(x, "__len__") or not isinstance(x, Iterable) else list(x) for x in X]


def _log(
    history: History, posterior: Posterior, residual: float, relaxation: Relaxation | None
) -> dict[str, Any]:
    with torch.no_grad():
        return {
            "optimizer": history.optimizer,
            "reason": history.reason,
            "stopped": history.stopped,
            "steps": history.steps,
            "elbo": history.elbo,
            "fresh_elbo": history.fresh_elbo,
            "relaxation": None if relaxation is None else vars(relaxation),
            "kl_inducing": float(posterior.kl_inducing()),
            "kl_pairwise": float(posterior.kl_pairwise()),
            "amplitude_factor": float(posterior.log_amplitude.exp()),
            "pairwise_sd": float(posterior.pairwise_sd),
            "n_inducing": posterior.n_inducing,
            "inducing_residual": residual,
            "evaluations": history.evaluations,
            "seconds": history.seconds,
        }
