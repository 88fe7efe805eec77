"""The scikit-learn face of the library."""

from __future__ import annotations

import copy
import hashlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from structgp import __version__
from structgp.answers import model_file
from structgp.answers.model import STRUCTURES, Model
from structgp.api.parameters import check_class_weight, check_parameters, device_of
from structgp.api.questions import Answers, as_list
from structgp.data.batch import Batch
from structgp.data.examples import Examples, read_examples
from structgp.data.labels import check_all_labelled
from structgp.data.shards import ShardedExamples, Shards, read_sharded
from structgp.errors import InputError, StructgpWarning
from structgp.gp import Entropy, Posterior
from structgp.gp.kernels.block_sum import KernelChoice
from structgp.inference import LearnScales, Minibatch, Optimizer, StepInfo
from structgp.inference.checkpoint import Checkpoint
from structgp.inference.distributed import ALONE, Together, local_device
from structgp.inference.loop import Callback, History, Watch, make_batches, train
from structgp.plan.choose_optimizer import Choice, check_alone, check_together, choose
from structgp.plan.fit_log import fit_log
from structgp.plan.grow_posterior import carried_over
from structgp.plan.parameter_values import plain, told_apart
from structgp.plan.posterior_family import setting
from structgp.plan.sharded_fit import check_possible, sharded_choice, sharded_start, sites_beside
from structgp.plan.start import BATCH_TOKENS, Start, can_go_on, likelihood_of, name_of, start_of
from structgp.structures import Differences, Structure

logger = logging.getLogger("structgp")

Likelihood: TypeAlias = str | Structure | Callable[..., Any]

LATER_LEARNING_ROUNDS = 1
"""How often the kernel moves in a ``partial_fit`` after the first."""


class StructuredGPClassifier(Answers, BaseEstimator):
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
    inference : 'auto' (second-order where the likelihood gives its curvature, else natural; minibatch on
        shards, and for weights from 50,000 tokens on),
        'second-order', 'minibatch' (the same batch by batch, in weight space), 'natural', 'adam', 'sgd',
        'saga', 'lbfgs'; 'paper-batch' and 'paper-stochastic', with the number of draws, of inducing
        inputs, the gradient and the schedule that the paper states; or an optimiser from
        :mod:`structgp.inference`.
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
    covariance : of the inducing values of a function: 'full'; 'low-rank', whose precision is a diagonal and
        ``covariance_rank`` directions more; or 'diagonal' (in whitened coordinates). 'auto' is the first
        of them that takes at most 512 MB and 2e12 multiplications a round,
        and none at all for 'weights', which have no correlations.
    covariance_rank : how many directions 'low-rank' has, at most M; None for 64.
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
    device : where all of a fit and of the answers is computed: 'cpu', a torch device such as 'cuda', or
        'auto', the GPU where there is one. The fitted model itself is kept in main memory.
    random_state : seed; equal seeds give equal fits.
    verbose : report every step through the logger 'structgp', to standard error if nothing
        else listens.
    constraints : on labellings: 'BIO' or 'IOBES', or {'forbidden': [(label, next label), ...]}, or
        {'allowed': [...]}; None in a pair is the beginning or the end of a sequence. No prediction breaks
        them, and the chain is fitted under them.
    class_weight : None, or a dict from label to a factor: predictions are as if that label were so many
        times as frequent as it was in training. 'balanced': as if all labels were equally frequent.
    warm_start : a fit starts from the posterior of the one before, whose features and labels it keeps.
    early_stopping : stop when the likelihood of the dev data has not risen for two steps, and keep the
        best; needs dev data.

    Attributes
    ----------
    classes_ : labels seen in training, sorted.
    training_log_ : what the optimiser did and why: 'optimizer', 'reason', 'gradient', 'stopped', 'steps',
        'trace' (number and bound of each step, of some where they are many), 'elbo' and 'fresh_elbo'
        (which bracket the optimum in expectation), 'relaxation' (evidence before and after, if the
        kernel's shape was learned so), 'pilot' (the first fit, on a part of the data), 'space',
        'covariance', 'covariance_rank' and 'covariance_reason' (the form that was picked, and why),
        'kernel_scales' (prior variance of a weight, by template), 'function_scales' (of the
        functions that labels are made of), 'effective_parameters', 'kl_inducing',
        'kl_pairwise', 'amplitude_factor', 'pairwise_sd', 'n_inducing', 'inducing_residual',
        'evaluations', 'seconds', and 'dev' if dev data was passed.
    model_ : the fitted :class:`structgp.answers.model.Model`.

    Notes
    -----
    X is a list (or generator) of sequences; a sequence is a list of feature dicts, a list of lists of
    strings, or a 2-D dense or scipy-sparse array with one row a token. y is a list of lists of
    strings. In a dict, string values are templates, named by their key (beyond 64 keys: a bag of
    attributes); numbers and flags are numeric features; 1-D numpy arrays, such as word vectors, are dense
    features, of one length a key and with every token; lists and nested dicts are read as python-crfsuite
    reads them. Each kind has a kernel of its own, and the model is of their sum. A model read from a file
    has no 'steps' in its log, and as its ``kernel`` the fitted one if it was not given by name.

    Memory is O(V M) for a posterior of M weights; O(V M^2) for one of M inducing inputs, or O(V M r) if
    its covariances are low-rank; and O(V T^2) for a sequence of T tokens.
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
        covariance_rank: int | None = None,
        pairwise_covariance: str = "diagonal",
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
        constraints: str | dict[str, Any] | None = None,
        class_weight: str | dict[str, float] | None = None,
        warm_start: bool = False,
        early_stopping: bool = False,
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
        self.covariance_rank = covariance_rank
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
        self.constraints = constraints
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.early_stopping = early_stopping

    # -- fitting -------------------------------------------------------------------------------

    def fit(
        self,
        X: Iterable[Any] | Shards,
        y: Iterable[Sequence[str | None]] | None = None,
        X_dev: Iterable[Any] | None = None,
        y_dev: Iterable[Sequence[str]] | None = None,
        *,
        sample_weight: Any = None,
        callback: Callback | None = None,
        checkpoint: str | Path | None = None,
        together: Together = ALONE,
    ) -> StructuredGPClassifier:
        """Fits the posterior. A label may be None: what it was is summed over. Dev data is scored at the
        end, into ``training_log_['dev']``, and with ``early_stopping`` after every step.

        X may be :class:`structgp.data.shards.Shards`, which hold labels too: data that is too much for
        memory is then read batch by batch, with 'minibatch' inference.

        ``sample_weight`` : (N,), how often each sequence counts; 0 leaves it out. ``callback`` is
        called with every :class:`structgp.inference.StepInfo`; if it returns True the fit stops there
        and what has been reached is kept; in it, :meth:`so_far` gives what there is to ask.
        ``checkpoint`` : a file that the state of the fit is kept in, from which an equal call goes on
        if this one is killed; it is gone when the fit is done.
        ``together`` : the processes that share the sequences (``inference.distributed.joined``); all of
        them make the same call with all the data, and have the same fit.
        """
        check_parameters(self)
        if isinstance(X, Shards):
            has_model = hasattr(self, "model_")
            check_possible(self, has_model, y=y, sample_weight=sample_weight)
            check_alone(together)
            return self._fit_shards(X, X_dev, y_dev, callback, checkpoint)
        if y is None:
            raise InputError("y", "no labels", "pass one list of labels a sequence, or shards as X")
        return self._fit(X, y, X_dev, y_dev, sample_weight, callback, checkpoint, together=together)

    def _fit(
        self,
        X: Iterable[Any],
        y: Iterable[Any],
        X_dev: Iterable[Any] | None = None,
        y_dev: Iterable[Any] | None = None,
        sample_weight: Any = None,
        callback: Callback | None = None,
        checkpoint: str | Path | None = None,
        classes: Sequence[str] = (),
        together: Together = ALONE,
    ) -> StructuredGPClassifier:
        """``classes`` : labels that are still to come."""
        self._check_dev(X_dev, y_dev)
        X, y = as_list(X), list(y)
        dev = None if X_dev is None or y_dev is None else (as_list(X_dev), list(y_dev))
        before = getattr(self, "model_", None) if self.warm_start else None
        examples = self._examples(X, y, sample_weight, before, classes)
        check_class_weight(self.class_weight, examples.labels.classes)
        structure = likelihood_of(self, examples)
        if before is not None and not can_go_on(self, before, examples, structure):
            before, examples = None, self._examples(X, y, sample_weight, None)
            structure = likelihood_of(self, examples)
        predictor = self._predictor(structure)
        generator = torch.Generator().manual_seed(int(self.random_state))
        start = start_of(self, examples, structure, generator, before)
        posterior = start.posterior

        def chosen(n_tokens: int) -> Choice:
            return choose(
                self.inference,
                structure,
                posterior,
                gradient=self.gradient,
                n_gradient_draws=self.n_gradient_draws,
                learn_scales=setting(
                    self, "learn_scales", "all" if start.on_bound else "transitions"
                ),
                n_tokens=n_tokens,
            )

        choice = chosen(examples.n_tokens if together.size == 1 and examples.in_many_parts else 0)
        check_together(together, choice.optimizer, posterior)
        kept = self._checkpoint(checkpoint, examples, choice)
        other = self._checkpoint(checkpoint, examples, chosen(0))
        if kept is not None and other is not None and other.is_there and not kept.is_there:
            # Several processes have begun it.
            choice, kept = chosen(0), other
        watch = self._watch(examples, posterior, predictor, dev)
        with self._reporting(callback) as report, self._asked(examples, posterior, predictor):
            history = self._train(
                examples, structure, posterior, choice, generator, report, kept, watch, together
            )
        self._end(examples, structure, predictor, history, start, kept, dev, together)
        return self

    def _fit_shards(
        self,
        shards: Shards,
        X_dev: Iterable[Any] | None,
        y_dev: Iterable[Any] | None,
        callback: Callback | None,
        checkpoint: str | Path | None,
    ) -> StructuredGPClassifier:
        """The same with the data on disk."""
        self._check_dev(X_dev, y_dev)
        dev = None if X_dev is None or y_dev is None else (as_list(X_dev), list(y_dev))
        examples = read_sharded(shards, self.constraints)
        check_class_weight(self.class_weight, examples.labels.classes)
        structure = likelihood_of(self, examples)
        predictor = self._predictor(structure)
        generator = torch.Generator().manual_seed(int(self.random_state))
        start = sharded_start(self, examples, structure)
        choice = sharded_choice(self, structure, start.posterior)
        kept = self._checkpoint(checkpoint, examples, choice)
        with (
            sites_beside(choice, shards, checkpoint) as choice,
            self._reporting(callback) as report,
            self._asked(examples, start.posterior, predictor),
        ):
            history = self._train(
                examples, structure, start.posterior, choice, generator, report, kept
            )
            self._end(examples, structure, predictor, history, start, kept, dev)
        return self

    def _end(
        self,
        examples: Examples | ShardedExamples,
        structure: Structure,
        predictor: Structure | None,
        history: History,
        start: Start,
        kept: Checkpoint | None,
        dev: tuple[list[Any], list[Any]] | None,
        together: Together = ALONE,
    ) -> None:
        """What is left to do when the optimiser is done."""
        if history.stopped == "limit":
            warnings.warn(
                f"the {history.optimizer} optimiser stopped after {len(history.steps)} steps, before "
                "the bound settled; see training_log_",
                StructgpWarning,
                stacklevel=4,
            )
        self._keep(examples, structure, start.posterior, predictor, history, start)
        if kept is not None and together.is_first:
            kept.remove()
        if dev is not None:
            self.training_log_["dev"] = self.evaluate(*dev).as_dict()

    @contextmanager
    def _asked(
        self,
        examples: Examples | ShardedExamples,
        posterior: Posterior,
        predictor: Structure | None,
    ) -> Iterator[None]:
        """While it lives, ``so_far`` has an answer."""
        self._fitting = examples, posterior, predictor
        try:
            yield
        finally:
            del self._fitting

    def so_far(self) -> StructuredGPClassifier:
        """Within the ``callback`` of a ``fit``: a fitted estimator with the posterior as it is now, to be
        asked like any other. The fit goes on undisturbed. Cost: a copy of the posterior."""
        if not hasattr(self, "_fitting"):
            raise InputError("so_far", "no fit is going on", "call it in the callback of a fit")
        examples, posterior, predictor = self._fitting
        found = copy.copy(self)
        del found._fitting
        found.classes_ = np.array(examples.labels.classes)
        found.training_log_ = {}
        counts = dict(zip(examples.labels.classes, examples.label_counts.tolist(), strict=True))
        info = {
            "label_counts": counts,
            "n_sequences": examples.n_sequences,
            "n_tokens": examples.n_tokens,
        }
        found.model_ = self._model(examples, copy.deepcopy(posterior), predictor, info, {})
        return found

    def partial_fit(
        self,
        X: Iterable[Any],
        y: Iterable[Sequence[str | None]],
        classes: Sequence[str] | None = None,
        *,
        sample_weight: Any = None,
        callback: Callback | None = None,
    ) -> StructuredGPClassifier:
        """Learns from more data, with what has been learned so far as the prior: the data before are not
        needed again. New features and new labels are taken in; new labels come last in ``classes_``.

        For posteriors of weights (``training_log_['space']``). The first call is a fit; ``classes`` may
        then name labels that are still to come. Of a new label that it did not name, earlier data say
        nothing: not even that it did not come in them.
        """
        check_parameters(self)
        if isinstance(X, Shards):
            raise InputError(
                "partial_fit", "shards, which are fitted as a whole", "use fit, or pass X and y"
            )
        before = getattr(self, "model_", None)
        if before is None:
            names = () if classes is None else [str(label) for label in classes]
            return self._fit(X, y, sample_weight=sample_weight, callback=callback, classes=names)
        return self._go_on(before, X, y, sample_weight, callback)

    def _go_on(
        self,
        before: Model,
        X: Iterable[Any],
        y: Iterable[Any],
        sample_weight: Any,
        callback: Callback | None,
    ) -> StructuredGPClassifier:
        if before.posterior.node.name != "weights":
            raise InputError(
                "partial_fit",
                "the model is of functions at inducing inputs, not of weights",
                "use categorical or sparse features and the default fit, or fit all data with warm_start",
            )
        examples = self._examples(as_list(X), list(y), sample_weight, before)
        structure = likelihood_of(self, examples)
        predictor = self._predictor(structure)
        fits = before.posterior.node.has_own_functions or structure.ignores_shift
        if not structure.has_local_curvature or not fits:
            lacks = "may depend on what was left out" if not fits else "offers no curvature"
            raise InputError("partial_fit", f"{name_of(structure)} {lacks}", "fit all data at once")
        generator = torch.Generator().manual_seed(int(self.random_state))
        start = Start(carried_over(before, examples), on_bound=True)
        goes_on = Minibatch(goes_on=True, learning_rounds=LATER_LEARNING_ROUNDS)
        choice = choose(goes_on, structure, start.posterior)
        with (
            self._reporting(callback) as report,
            self._asked(examples, start.posterior, predictor),
        ):
            history = self._train(examples, structure, start.posterior, choice, generator, report)
        self._keep(examples, structure, start.posterior, predictor, history, start, before)
        return self

    # -- the parts of a fit --------------------------------------------------------------------------

    def _check_dev(self, X_dev: Any, y_dev: Any) -> None:
        if (X_dev is None) != (y_dev is None):
            given, missing = ("y_dev", "X_dev") if X_dev is None else ("X_dev", "y_dev")
            raise InputError(missing, f"missing where {given} is given", "pass both or neither")
        if self.early_stopping and X_dev is None:
            raise InputError(
                "early_stopping", "there is no dev data to stop by", "pass X_dev and y_dev to fit"
            )

    def _examples(
        self,
        X: Sequence[Any],
        y: Sequence[Any],
        sample_weight: Any,
        before: Model | None,
        classes: Sequence[str] = (),
    ) -> Examples:
        return read_examples(
            X,
            y,
            features=self.features,
            weights=sample_weight,
            constraints=self.constraints,
            encoder=None if before is None else before.encoder,
            classes=classes if before is None else before.labels.classes,
        )

    def _train(
        self,
        examples: Examples | ShardedExamples,
        structure: Structure,
        posterior: Posterior,
        choice: Choice,
        generator: torch.Generator,
        report: Callback,
        checkpoint: Checkpoint | None = None,
        watch: Watch | None = None,
        together: Together = ALONE,
    ) -> History:
        one_by_one = getattr(choice.optimizer, "one_sequence_a_batch", False)
        space = "weights" if posterior.node.name == "weights" else "functions"
        most_tokens = 1 if one_by_one else BATCH_TOKENS[space]
        if isinstance(choice.optimizer, Minibatch):
            paced = choice.optimizer.paced(examples.n_tokens)
            choice, most_tokens = replace(choice, optimizer=paced), paced.batch_tokens or 1
        batches: Sequence[Batch]
        if isinstance(examples, ShardedExamples):
            batches = examples.batches(most_tokens)
        else:
            batches = make_batches(
                examples.rows,
                examples.y,
                examples.encoder.pad_row,
                most_tokens,
                examples.weights,
                together,
            )
        return train(
            posterior,
            structure,
            batches,
            choice.optimizer,
            choice.reason,
            estimator=choice.estimator,
            entropy="jensen" if self.entropy == "jensen" else "bhattacharyya",
            device=local_device(device_of(self.device)),
            generator=generator,
            callback=report,
            checkpoint=checkpoint,
            watch=watch,
            together=together,
        )

    def _keep(
        self,
        examples: Examples | ShardedExamples,
        structure: Structure,
        posterior: Posterior,
        predictor: Structure | None,
        history: History,
        start: Start,
        before: Model | None = None,
    ) -> None:
        """The fitted attributes."""
        posterior.round_factor()
        self.classes_ = np.array(examples.labels.classes)
        kl = float(posterior.node.kl().detach())
        log = fit_log(history, posterior, kl, start, examples.encoder.blocks)
        if isinstance(structure, Differences):
            log |= {"gradient": "differences", "evaluations": structure.n_values}
        counts = dict(zip(examples.labels.classes, examples.label_counts.tolist(), strict=True))
        seen = {"n_sequences": examples.n_sequences, "n_tokens": examples.n_tokens}
        if before is not None:
            for label, count in before.info["label_counts"].items():
                counts[label] += count
            seen = {name: count + before.info[name] for name, count in seen.items()}
        self.training_log_ = log
        info = {k: v for k, v in log.items() if k != "steps"}
        info |= seen | {"label_counts": counts, "version": __version__}
        extra = {} if before is None else before.extra
        self.model_ = self._model(examples, posterior, predictor, info, extra)

    def _model(
        self,
        examples: Examples | ShardedExamples,
        posterior: Posterior,
        predictor: Structure | None,
        info: dict[str, Any],
        extra: dict[str, Any],
    ) -> Model:
        return Model(
            examples.encoder,
            examples.labels,
            posterior.requires_grad_(False),
            self.likelihood if isinstance(self.likelihood, str) else "custom",
            int(self.n_draws),
            int(self.random_state),
            info,
            extra,
            predictor=predictor,
            constraints=examples.constraints,
        )

    def _checkpoint(
        self, path: str | Path | None, examples: Examples | ShardedExamples, choice: Choice
    ) -> Checkpoint | None:
        if path is None:
            return None
        if not Path(path).absolute().parent.is_dir():
            raise InputError(
                str(path),
                "cannot be written (No such file or directory)",
                "create its folder first",
            )
        # An optimiser that is no dataclass may have a name and no values that can be told.
        optimizer = choice.optimizer if is_dataclass(choice.optimizer) else choice.optimizer.name
        told = told_apart(self.get_params(deep=False))
        plain = told, examples.labels.classes, optimizer, choice.estimator.name, examples.digest
        return Checkpoint(path, hashlib.sha256(repr(plain).encode()).hexdigest())

    def _watch(
        self,
        examples: Examples,
        posterior: Posterior,
        predictor: Structure | None,
        dev: tuple[list[Any], list[Any]] | None,
    ) -> Watch | None:
        """What looks at the dev data after each step, where that decides when to stop."""
        if not self.early_stopping or dev is None:
            return None
        X, truth = dev[0], check_all_labelled(*dev)
        if not any(y and set(y) <= set(examples.labels.classes) for y in truth):
            raise InputError(
                "y_dev",
                "every sequence has a label that training never saw: there is nothing to stop by",
                "pass dev data with the labels of the training data",
            )

        def nll() -> float:
            posterior_now = copy.deepcopy(posterior)
            model = self._model(examples, posterior_now, predictor, {}, {})
            # Labels never seen and labellings that are forbidden say nothing of one step or another.
            found = model.log_probs(X, truth, self.average)
            log_probs = [v for v in found if v is not None and v > -np.inf]
            return -sum(log_probs) / max(1, len(log_probs))

        return Watch(posterior, nll)

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
        if self.constraints is not None and type(chosen) not in STRUCTURES.values():
            raise InputError(
                "constraints", f"{name_of(chosen)} does not know them", "use predict_with='chain'"
            )
        return None if type(chosen) in STRUCTURES.values() else chosen

    @contextmanager
    def _reporting(self, callback: Callback | None) -> Iterator[Callback]:
        """The callback to train with; while it lives, ``verbose`` makes the logger heard."""

        def report(info: StepInfo) -> bool | None:
            logger.info("step %d: bound %.2f", info.iteration + 1, info.elbo)
            return callback is not None and callback(info)

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

    def _ready(self) -> Model:
        check_is_fitted(self, "model_")
        check_parameters(self)
        check_class_weight(self.class_weight, self.model_.labels.classes)
        self.model_.n_draws = int(self.n_draws)
        self.model_.shift = self._shift()
        self.model_.device = device_of(self.device)
        return self.model_

    def _shift(self) -> torch.Tensor | None:
        """(V,) log of the class weights."""
        if self.class_weight is None:
            return None
        classes = self.model_.labels.classes
        if isinstance(self.class_weight, str):
            counts = np.array([self.model_.info["label_counts"].get(c, 0) for c in classes])
            weights = counts.sum() / (len(classes) * np.where(counts > 0, counts, 1))
        else:
            weights = np.array([float(self.class_weight.get(c, 1.0)) for c in classes])
        return torch.from_numpy(np.log(weights))

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes the model to one file (safetensors and JSON); read it with ``structgp.load``."""
        check_is_fitted(self, "model_")
        self.model_.extra["params"] = plain(self.get_params(deep=False))
        model_file.save(self.model_, path)


def load(path: str | Path) -> StructuredGPClassifier:
    """The fitted estimator in a file that ``save`` or ``structgp train`` wrote."""
    model = model_file.load(path)
    params = {"kernel": model.posterior.node.kernel} | model.extra.get("params", {})
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
