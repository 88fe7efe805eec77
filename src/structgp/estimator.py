"""The scikit-learn face of the library."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from gpytorch.kernels import Kernel
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from structgp import metrics
from structgp import model as model_file
from structgp._version import __version__
from structgp.data.encode import Block, FeatureEncoder
from structgp.data.labels import LabelEncoder, check_labels
from structgp.errors import InputError, StructgpWarning
from structgp.gp import CovarianceForm, Entropy, Posterior, Relaxation, WeightPosterior, contrasts
from structgp.inference import PRESETS, choose, takes_second_order
from structgp.kernels import has_weights
from structgp.kernels.blocks import KernelChoice, kernel_scales
from structgp.model import STRUCTURES, Model
from structgp.optimizers import LearnScales, Minibatch, Optimizer, SecondOrder, StepInfo
from structgp.parameters import check_parameters
from structgp.pilot import Pilot, run_pilot
from structgp.prior import choose_kernel, flat_tokens, pick_inducing
from structgp.structures import BlackBox, Differences, Structure, as_structure
from structgp.training import Callback, History, make_batches, train

logger = logging.getLogger("structgp")

Likelihood: TypeAlias = str | Structure | Callable[..., Any]

N_INDUCING = 1000
ENOUGH = 0.02
"""Share of the prior variance that inducing inputs may leave open, under a kernel that is known."""

CHEAP_DIFFERENCES = 400
"""Values a gradient may take, for each draw and sequence, for differences to be the way."""

_BATCH_TOKENS = {"functions": 1_000, "weights": 4_000}


class StructuredGPClassifier(BaseEstimator):
    """Sequence labelling with Gaussian-process potentials and a posterior over them.

    Each label has a latent function with a sparse GP prior over the features of a token, each pair of
    labels a Gaussian score; given those, a labelling is scored by ``likelihood``. ``fit`` finds the
    variational posterior; predictions average over it.

    Parameters
    ----------
    kernel : 'auto' (where the fit is second-order, 'relevance' on categorical and sparse features; else
        one weight a template on categorical features and normalised linear on sparse ones; RBF on
        dense ones), 'relevance' (linear, with a scale for each template and a relevance for each
        feature), 'linear', 'rbf', 'template', 'template-product', on dense features any GPyTorch kernel,
        or a dict from kind of feature ('categorical', 'sparse', 'dense') to one of these.
    likelihood : 'chain', the linear-chain structured softmax; 'piecewise', its piecewise
        pseudo-likelihood; a :class:`structgp.structures.Structure`; or any function
        ``log_prob(f, g, y)`` of one sequence, with f (S, T, V), g (S, V, V) and y (T,) indices into
        ``classes_``, that returns S log-probabilities, in torch or NumPy, with or without a gradient.
        With an attribute ``batched = True`` it is ``log_prob(f, g, y, mask)`` on (S, B, T, V),
        (S, V, V), (B, T), (B, T) and returns (S, B). See :mod:`structgp.testing`.
    predict_with : what reads drawn latent values as label probabilities: 'auto' (the likelihood itself
        if it offers marginals, else the chain), 'chain', or a structure.
    inference : 'auto' (second-order where the likelihood gives its curvature, else natural),
        'second-order', 'minibatch' (the same batch by batch, in weight space), 'natural', 'adam', 'sgd',
        'saga', 'lbfgs'; 'paper-batch' and 'paper-stochastic', with the number of draws, of inducing
        inputs, the gradient and the schedule that the paper states; or an optimiser from
        :mod:`structgp.optimizers`.
    gradient : of the expected log-likelihood: 'auto' ('pathwise' where the likelihood can be
        differentiated, else 'surrogate'), 'pathwise', 'pathwise-surrogate' (where each likelihood is
        dear), or from values alone 'score', 'control-variate' (the paper's), 'leave-one-out',
        'antithetic-orthogonal', 'sobol', 'surrogate-piecewise', 'surrogate-quadratic', 'surrogate'.
    n_gradient_draws : draws S a gradient is estimated from; None for what suits it.
    space : what the posterior is of. 'functions': values of the functions at inducing inputs, for any
        kernel. 'weights': one weight for each feature, where the kernel is 'relevance': no inducing
        inputs, time linear in the data, no correlations between weights. 'auto' is 'weights' where
        the second-order fit learns such a kernel, unless inducing inputs, a full covariance or a
        mixture are asked for.
    n_inducing : most inducing inputs M, picked from the training tokens (from 8,000 of them at random
        where there are more). If fewer reproduce them all, the model is the full GP. None for 1000, or
        as many as leave 2 % of the prior variance open if those are fewer, or what a preset has.
    n_components : K of the mixture that the posterior is.
    basis : 'label' gives each label a latent function; 'contrast' leaves out the direction in which all
        labels move alike, which says nothing: V - 1 functions, the same model, a higher bound. 'auto'
        is 'contrast' where the likelihood says that it ignores that direction, but for the paper's
        presets.
    covariance : of the inducing values of a function, 'full' or 'diagonal' (in whitened coordinates).
        'auto' is 'full', but for 'weights', which have none.
    pairwise_covariance : of the label-to-label scores, 'diagonal' or 'full'.
    entropy : of the mixture: 'auto' (exact for one component, else 'bhattacharyya'), 'jensen' (the
        paper's, looser).
    amplitude : prior variance of a latent value, where the kernel is chosen by name, before anything is
        learned on the bound; 'auto' gives every active feature a weight of variance 1.
    pairwise_sd : prior standard deviation of a label-to-label score; 0 leaves them out.
    learn_kernel : learn the kernel. Length-scales, and without the second-order fit template weights and
        the balance of blocks, on the evidence of a Gaussian relaxation before the fit; the rest as
        ``learn_scales`` says. False leaves the kernel as it is chosen, and 'auto' there is a fixed
        one. 'auto' is True, but for the paper's presets.
    learn_scales : what moves with the evidence bound during the fit: 'pairwise' (the label-to-label
        scale), True (the amplitude too), 'all' (the kernel too: its scales and relevances with
        'second-order', all its parameters with 'adam', 'lbfgs' and 'paper-batch') or False (nothing).
        'auto' is 'all' where the fit is second-order, else 'pairwise', or what a preset has.
    features : how a token given as a list of strings is read: 'columns' (place j is template j),
        'bag' (a set of attributes), or 'auto' (columns if every token has equally many). With dicts,
        'columns' lifts the limit on templates.
    n_draws : draws of the latent functions that a prediction averages over.
    average : 'draws', or 'mean' to plug in the posterior mean.
    decode : 'marginal' (the most probable label of each token) or 'viterbi' (the most probable
        whole labelling under the posterior mean).
    n_jobs : processes that share the sequences where the likelihood is a NumPy function of one
        sequence; -1 for one a core.
    device : where latent values are drawn and the likelihood is computed, 'cpu' or a torch device such
        as 'cuda'; kernel and posterior stay on the CPU.
    random_state : seed; equal seeds give equal fits.
    verbose : report every step through the logger 'structgp', to standard error if nothing
        else listens.

    Attributes
    ----------
    classes_ : labels seen in training, sorted.
    training_log_ : what the optimiser did and why: 'optimizer', 'reason', 'gradient', 'stopped', 'steps',
        'elbo' and 'fresh_elbo' (which bracket the optimum in expectation), 'relaxation' (evidence
        before and after, if the kernel's shape was learned so), 'pilot' (the first fit, on a part of the
        data), 'space', 'kernel_scales' (prior variance of a weight, by template), 'function_scales' (of the
        functions that labels are made of), 'effective_parameters', 'kl_inducing',
        'kl_pairwise', 'amplitude_factor', 'pairwise_sd', 'n_inducing', 'inducing_residual',
        'evaluations', 'seconds', and 'dev' if dev data was passed.
    model_ : the fitted :class:`structgp.model.Model`.

    Notes
    -----
    X is a list (or generator) of sequences; a sequence is a list of feature dicts, a list of lists of
    strings, or a 2-D dense or scipy-sparse array with one row a token. y is a list of lists of
    strings. In a dict, string values are templates, named by their key (beyond 64 keys: a bag of
    attributes); numbers and flags are numeric features; 1-D numpy arrays, such as word vectors, are dense
    features, of one length a key and with every token; lists and nested dicts are read as python-crfsuite
    reads them. Each kind has a kernel of its own, and the model is of their sum. A model read from a file
    has no 'steps' in its log, and as its ``kernel`` the fitted one if it was not given by name.

    Memory is O(V M) for a posterior of M weights; O(V M^2) for one of M inducing inputs, and O(V T^2) for a
    sequence of T tokens.
    """

    def __init__(
        self,
        kernel: KernelChoice = "auto",
        likelihood: Likelihood = "chain",
        predict_with: str | Structure = "auto",
        inference: str | Optimizer = "auto",
        gradient: str = "auto",
        n_gradient_draws: int | None = None,
        space: str = "auto",
        n_inducing: int | None = None,
        n_components: int = 1,
        basis: str = "auto",
        covariance: str = "auto",
        pairwise_covariance: CovarianceForm = "diagonal",
        entropy: Entropy = "auto",
        amplitude: float | str = "auto",
        pairwise_sd: float = 1.5,
        learn_kernel: bool | str = "auto",
        learn_scales: LearnScales | str = "auto",
        features: str = "auto",
        n_draws: int = 128,
        average: str = "draws",
        decode: str = "marginal",
        n_jobs: int = 1,
        device: str = "cpu",
        random_state: int = 0,
        verbose: bool = False,
    ) -> None:
        self.kernel = kernel
        self.likelihood = likelihood
        self.predict_with = predict_with
        self.inference = inference
        self.gradient = gradient
        self.n_gradient_draws = n_gradient_draws
        self.space = space
        self.n_inducing = n_inducing
        self.n_components = n_components
        self.basis = basis
        self.covariance = covariance
        self.pairwise_covariance = pairwise_covariance
        self.entropy = entropy
        self.amplitude = amplitude
        self.pairwise_sd = pairwise_sd
        self.learn_kernel = learn_kernel
        self.learn_scales = learn_scales
        self.features = features
        self.n_draws = n_draws
        self.average = average
        self.decode = decode
        self.n_jobs = n_jobs
        self.device = device
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
        check_parameters(self)
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
        structure = as_structure(self.likelihood, self.n_jobs)
        predictor = self._predictor(structure)
        if isinstance(structure, BlackBox):
            structure.probe(len(labels.classes))
        rows = encoder.transform(X)
        encoded = labels.transform(labels_of)
        lengths = [len(r) for r in rows]
        structure = self._with_differences(structure, encoder.blocks, lengths, len(labels.classes))
        generator = torch.Generator().manual_seed(int(self.random_state))
        tokens = flat_tokens(encoder, rows)
        on_bound = self._learns_on_bound(structure, encoder.blocks)
        kernel, relaxation = choose_kernel(
            copy.deepcopy(self.kernel),
            encoder.blocks,
            tokens,
            encoded,
            amplitude=self.amplitude,
            learn=self._setting("learn_kernel", True),
            on_bound=on_bound,
            generator=generator,
        )
        basis = self._basis(structure, encoded, len(labels.classes))
        space = self._space(kernel, on_bound)
        pairwise_sd = float(self.pairwise_sd)
        pilot = None
        if on_bound and space == "functions":
            pilot = run_pilot(
                kernel,
                encoder,
                rows,
                encoded,
                structure,
                n_labels=len(labels.classes),
                basis=basis,
                pairwise_sd=pairwise_sd,
                batch_tokens=_BATCH_TOKENS[space],
                generator=generator,
            )
        if pilot is not None:
            basis, pairwise_sd = pilot.basis, pilot.pairwise_sd
        common: dict[str, Any] = {
            "pairwise_sd": pairwise_sd,
            "n_components": self.n_components,
            "pairwise_covariance": self.pairwise_covariance,
            "basis": basis,
        }
        residual = 0.0
        posterior: Posterior
        if space == "weights":
            posterior = WeightPosterior(kernel, len(labels.classes), **common)
        else:
            most = self._setting("n_inducing", N_INDUCING)
            enough = ENOUGH if self.n_inducing is None and pilot is not None else 0.0
            chosen = pick_inducing(kernel, tokens, most, seed=self.random_state, enough=enough)
            form: CovarianceForm = "diagonal" if self.covariance == "diagonal" else "full"
            residual = chosen.residual
            posterior = Posterior(
                kernel, chosen.rows, len(labels.classes), covariance=form, **common
            )
        choice = choose(
            self.inference,
            structure,
            posterior,
            gradient=self.gradient,
            n_gradient_draws=self.n_gradient_draws,
            learn_scales=self._setting("learn_scales", "all" if on_bound else "pairwise"),
        )
        one_by_one = getattr(choice.optimizer, "one_sequence_a_batch", False)
        most_tokens = 1 if one_by_one else _BATCH_TOKENS[space]
        if isinstance(choice.optimizer, Minibatch):
            most_tokens = choice.optimizer.batch_tokens
        batches = make_batches(rows, encoded, encoder.pad_row, most_tokens)
        with self._reporting(callback) as report:
            history = train(
                posterior,
                structure,
                batches,
                choice.optimizer,
                choice.reason,
                estimator=choice.estimator,
                entropy=self.entropy,
                device=self.device,
                generator=generator,
                callback=report,
            )
        if history.stopped == "limit":
            warnings.warn(
                f"the {history.optimizer} optimiser stopped after {len(history.steps)} steps, before "
                "the bound settled; see training_log_",
                StructgpWarning,
                stacklevel=2,
            )
        posterior.round_factor()
        self.classes_ = np.array(labels.classes)
        kl = float(posterior.kl_inducing(self.entropy).detach())
        self.training_log_ = _log(
            history, posterior, kl, residual, relaxation, pilot, encoder.blocks
        )
        if isinstance(structure, Differences):
            self.training_log_ |= {"gradient": "differences", "evaluations": structure.n_values}
        info = {k: v for k, v in self.training_log_.items() if k != "steps"}
        info |= {"n_sequences": len(rows), "n_tokens": sum(map(len, rows)), "version": __version__}
        self.model_ = Model(
            encoder,
            labels,
            posterior.requires_grad_(False),
            self.likelihood if isinstance(self.likelihood, str) else "custom",
            int(self.n_draws),
            int(self.random_state),
            info,
            predictor=predictor,
        )
        if X_dev is not None and y_dev is not None:
            self.training_log_["dev"] = self.evaluate(X_dev, y_dev).as_dict()
        return self

    def _setting(self, name: str, usual: Any) -> Any:
        """The parameter ``name``, or if it is left open what the preset has, or what is usual."""
        value = getattr(self, name)
        if value is not None and value != "auto":
            return value
        inference = self.inference
        if isinstance(inference, str) and inference in PRESETS:
            return getattr(PRESETS[inference], name)
        return usual

    def _learns_on_bound(self, structure: Structure, blocks: Sequence[Block]) -> bool:
        """Whether the fit itself learns what each feature is worth."""
        if isinstance(self.inference, SecondOrder | Minibatch):
            learns = self.inference.learn_scales
        else:
            learns = self._setting("learn_scales", "all")
        if learns != "all" or not self._setting("learn_kernel", True):
            return False
        full = self.pairwise_covariance == "full"
        if takes_second_order(self.inference, structure, self.gradient, full):
            return True
        return structure.has_local_curvature and self._may_be_weights(blocks)

    def _may_be_weights(self, blocks: Sequence[Block]) -> bool:
        """Whether nothing stands against the second-order fit in weight space but what it asks of the
        likelihood."""
        return (
            (self.inference, self.gradient) == ("auto", "auto")
            and self.learn_scales in ("auto", "all")
            and self.learn_kernel in ("auto", True)
            and isinstance(self.kernel, str)
            and self.kernel in ("auto", "relevance")
            and self._needs_functions() is None
            and self.pairwise_covariance != "full"
            and all(block.kind != "dense" for block in blocks)
        )

    def _with_differences(
        self, structure: Structure, blocks: Sequence[Block], lengths: Sequence[int], n_labels: int
    ) -> Structure:
        """A likelihood that has only values, with differences for slopes where those are cheap and
        nothing asks for another way."""
        if not isinstance(structure, BlackBox) or structure.has_gradient:
            return structure
        # A long sequence takes many values for each of its many positions.
        length = sum(n * n for n in lengths) / max(1, sum(lengths))
        cheap = Differences.evaluations(length, n_labels) <= CHEAP_DIFFERENCES
        return Differences(structure) if cheap and self._may_be_weights(blocks) else structure

    def _needs_functions(self) -> str | None:
        """The parameter that asks for inducing inputs, if one does."""
        asked = {
            "space": self.space == "functions",
            "n_inducing": self.n_inducing is not None,
            "covariance": self.covariance == "full",
            "n_components": self.n_components > 1,
        }
        return next((name for name, wanted in asked.items() if wanted), None)

    def _space(self, kernel: Kernel, on_bound: bool) -> str:
        """'weights' or 'functions'; InputError if what is asked for does not go together."""
        other = self._needs_functions()
        possible = on_bound and has_weights(kernel)
        if self.space != "weights":
            return "weights" if possible and other is None else "functions"
        if other is not None:
            raise InputError(
                other, f"{getattr(self, other)!r} is not for space='weights'", "leave it out"
            )
        if not on_bound:
            raise InputError(
                "space",
                "'weights' is for the fit that learns the kernel in closed form, and another one is asked "
                "for (by inference, gradient, learn_scales or learn_kernel), or the likelihood has no "
                "curvature",
                "leave those at 'auto', or use space='functions'",
            )
        if not has_weights(kernel):
            raise InputError(
                "space",
                "'weights' needs a kernel that is linear in features that can be told apart",
                "use kernel='relevance' on categorical or sparse features, or space='functions'",
            )
        return "weights"

    def _basis(
        self, structure: Structure, labels: Sequence[np.ndarray], n_labels: int
    ) -> torch.Tensor | None:
        """The contrasts of the labels, or None for the labels themselves."""
        chosen = self._setting("basis", "contrast" if structure.ignores_shift else "label")
        if chosen == "label":
            return None
        if not structure.ignores_shift:
            raise InputError(
                "basis",
                f"'contrast' leaves out a direction that {_name_of(structure)} may depend on",
                "use 'auto' or 'label', or a structure whose ignores_shift is True",
            )
        counts = np.bincount(np.concatenate(list(labels)), minlength=n_labels)
        return contrasts(torch.from_numpy(counts))

    def _predictor(self, structure: Structure) -> Structure | None:
        """What predictions are asked of; None for the chain."""
        if isinstance(self.predict_with, Structure):
            chosen = self.predict_with
        elif self.predict_with == "chain" or not structure.has_marginals:
            return None
        else:
            chosen = structure
        if not chosen.has_marginals:
            raise InputError(
                "predict_with",
                f"{type(chosen).__name__} offers no marginals",
                "use 'chain', or a structure that does",
            )
        return None if type(chosen) in STRUCTURES.values() else chosen

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
            if not model.structure.has_decoder:
                name = type(model.structure).__name__
                raise InputError("decode", f"{name} offers no decoder", "use decode='marginal'")
            best = model.viterbi(X)
        else:
            best = [p.argmax(-1) for p in model.marginals(X, self.average)]
        return [model.labels.names(indices) for indices in best]

    def _ready(self) -> Model:
        """The fitted model, under the parameters as they are now."""
        check_is_fitted(self, "model_")
        check_parameters(self)
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
    if model.likelihood == "custom":
        warnings.warn(
            f"{path}: was fitted with a likelihood of its own, which a file does not keep: predictions "
            "are as they were with predict_with='chain', but set it again before another fit",
            StructgpWarning,
            stacklevel=2,
        )
    return estimator


def _name_of(structure: Structure) -> str:
    return repr(structure.inner) if isinstance(structure, Differences) else type(structure).__name__


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it: numbers, strings, and dicts of names of kernels."""
    if isinstance(value, dict):
        return all(isinstance(v, str) for v in value.values())
    return isinstance(value, str | int | float | bool | np.generic)


def _as_list(X: Iterable[Any]) -> list[Any]:
    """X with generators read out; what is no sequence at all stays for the encoder to name."""
    return [x if hasattr(x, "__len__") or not isinstance(x, Iterable) else list(x) for x in X]


def _log(
    history: History,
    posterior: Posterior,
    kl_inducing: float,
    residual: float,
    relaxation: Relaxation | None,
    pilot: Pilot | None,
    blocks: Sequence[Block],
) -> dict[str, Any]:
    before = None if pilot is None else pilot.history
    with torch.no_grad():
        return {
            "optimizer": history.optimizer,
            "reason": history.reason,
            "gradient": history.gradient,
            "stopped": history.stopped,
            "steps": history.steps,
            "elbo": history.elbo,
            "fresh_elbo": history.fresh_elbo,
            "relaxation": None if relaxation is None else vars(relaxation),
            "pilot": None if pilot is None else pilot.summary,
            "space": "weights" if isinstance(posterior, WeightPosterior) else "functions",
            "kernel_scales": kernel_scales(posterior.kernel, blocks),
            "function_scales": posterior.basis.square().sum(0).tolist(),
            "effective_parameters": float(posterior.effective_parameters()),
            "kl_inducing": kl_inducing,
            "kl_pairwise": float(posterior.kl_pairwise()),
            "amplitude_factor": float(posterior.log_amplitude.exp()),
            "pairwise_sd": float(posterior.pairwise_sd),
            "n_inducing": posterior.n_inducing,
            "inducing_residual": residual,
            "evaluations": history.evaluations + (before.evaluations if before else 0),
            "seconds": history.seconds + (before.seconds if before else 0.0),
        }
