"""The scikit-learn interface of the library."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from structgp.answers import model_file
from structgp.answers.ask import Asked, Model
from structgp.api.fitted import Fitted, read_as
from structgp.api.hearing import heard, logger
from structgp.api.memory import Memory
from structgp.data.annotations import Annotations
from structgp.data.examples import Examples, as_list, read_examples
from structgp.data.labels import as_label_lists
from structgp.data.odd_labels import warn_of_odd_labels
from structgp.data.shards import ShardedExamples, Shards, read_sharded
from structgp.errors import InputError, StructgpWarning
from structgp.inference import StepInfo
from structgp.inference.distributed import ALONE, Processes
from structgp.inference.loop import Callback
from structgp.inference.votes import weigh_votes
from structgp.plan.cross_fit import begin
from structgp.plan.decisions import adopt, declared
from structgp.plan.grow_posterior import can_go_on, start_from
from structgp.plan.label_cost import warn_of_labels
from structgp.plan.options import Options, answer_draws, check_class_weight, to_json
from structgp.plan.part_check import warn_of_part
from structgp.plan.programs import graph_of, refuse_graph
from structgp.plan.resolve import Plan, as_before, check_together, going_on, plan_lines, resolve
from structgp.plan.run import Fit, check_dev, check_shards
from structgp.plan.start import start_of
from structgp.plan.usefulness import numbers_in_bounds
from structgp.plan.word_choice import parts_stay, parts_wanted, taken_apart, warn_of_parts


class StructuredGPClassifier(Fitted, BaseEstimator):
    """Sequence labelling with Gaussian-process potentials and a posterior over them.

    Each label has a score per token (node score), a latent function of the token's features with a GP
    prior; each pair of neighbouring labels has a transition score with a Gaussian prior. Given these
    scores, ``structure`` defines the probability of a labelling. ``fit`` finds the variational posterior;
    predictions average over it.

    Parameters
    ----------
    structure : 'chain', the linear-chain structured softmax; 'piecewise', its piecewise pseudo-likelihood;
        :func:`structgp.chain`, whose transitions may depend on features; a
        :class:`structgp.structures.Structure`; or any function ``log_prob(f, g, y)`` of one sequence, with
        f (S, T, V), g (S, V, V) and y (T,) indices into ``classes_``, that returns S log-probabilities, in
        torch or NumPy, with or without a gradient. With an attribute ``batched = True`` it is ``log_prob(f,
        g, y, mask)`` on (S, B, T, V), (S, V, V), (B, T), (B, T) and returns (S, B). Answers are computed
        from the values of the function; :class:`structgp.Custom` can name another structure that answers in
        its place, and the number of processes that call it. See :mod:`structgp.testing`.
    kernel : 'auto' (if the fit is second-order: 'relevance' on categorical and sparse features, and on
        dense ones 'linear+rbf', or 'linear' for 32 or more dense columns beside other features; otherwise
        one weight per template on categorical features, normalised linear on sparse and RBF on dense ones),
        'relevance' (linear, with one scale per template and one relevance per feature), 'linear', 'rbf',
        'template', 'template-product'; on dense features also 'rbf-ard' (one length-scale per column),
        'matern', 'linear+rbf', 'linear+rbf-ard', 'linear+matern' and any GPyTorch kernel; or a dict that
        maps kinds of features ('categorical', 'sparse', 'dense') to one of these.
    prior : :class:`structgp.Prior`: amplitude, transition_sd, learn_kernel, data_weight.
    posterior : 'weights' (one weight per feature: for the kernel 'relevance', and, with a full covariance,
        for any kernel on dense features), 'inducing' (values at inducing inputs, for any kernel),
        :class:`structgp.Weights`, :class:`structgp.Inducing` or :class:`structgp.Mixture`. 'auto' is
        'weights' where the second-order fit learns such a kernel.
    inference : 'auto' (second-order where the structure gives its curvature, else natural; minibatch on
        shards, and for weights from 100,000 tokens on), 'second-order', 'minibatch' (second-order batch by
        batch, for weights), 'natural', 'adam', 'saga', 'lbfgs'; 'paper-batch' and 'paper-stochastic', with
        the draws, inducing inputs, gradient and schedule that the paper states; or an optimiser, such as
        :class:`structgp.SecondOrder`, whose fields name the gradient estimator, its draws, and what moves
        with the bound (``learn_scales``).
    features : how a token given as a list of strings is read: 'columns' (position j is template j), 'bag'
        (a set of attributes), or 'auto' (columns if all tokens have the same number of strings). With
        dicts, 'columns' lifts the limit on templates.
    word_parts : the feature whose values are split into parts: prefixes and suffixes of up to four
        characters and the word's shape become features too, so that what is learned from words in training
        carries over to unseen ones. 'auto' finds the feature that is the token's word
        (``structgp.data.find_words``), if there is one; None leaves words whole; or the name of a feature
        with string values.
    constraints : constraints on labellings: 'BIO' or 'IOBES', or {'forbidden': [(label, next label), ...]},
        or {'allowed': [...]}; None in place of a label is the beginning or the end of a sequence. With the
        names of templates, rules on the tuples of any structure, such as {'forbidden': {'parent': [(label,
        label), ...], 'cites': [...]}} (``structgp.data.rules``). No prediction breaks the constraints, and
        the structure is fitted under them. 'auto' adopts BIO, IOBES, BILOU or IO if the labels are written
        in that scheme and every training labelling obeys it; the plan says so. None: no constraints.
    class_weight : None, or a dict from label to a factor: predictions are as if that label were that many
        times as frequent as in training. 'balanced': as if all labels were equally frequent.
    decode : the criterion by which predicted labels are chosen: 'f1' (the highest expected span F1),
        'accuracy' (the highest expected number of correct tokens), 'sequence' (the most probable whole
        labelling), 'cost' (the lowest expected cost, see ``costs``). 'auto' is 'f1' where labels are spans
        (B-X, I-X, O and the like), else 'accuracy'.
    costs : with decode='cost', a dict {true label: {predicted label: cost}}, in which an error that is not
        named costs 1 and a correct label 0; or a (V, V) array ordered as ``classes_``, row = true.
    n_draws : number of draws of the potentials that an answer averages over; 0 plugs in the posterior mean.
        'auto' is 512 for ``chain()`` with tables of links (``same``, ``edges``) and 128 otherwise. For a
        chain without links, probabilities of single labels, and labels chosen by them, are computed by a
        quicker method of the same accuracy (``structgp.answers.local_points``).
    device : where fits and answers are computed: 'cpu', a torch device such as 'cuda', or 'auto', the GPU
        if there is one. The fitted model itself is kept in main memory.
    random_state : seed; equal seeds give equal fits.
    warm_start : if True, a fit starts from the posterior of the earlier fit, and keeps its features and
        labels.
    verbose : if True, report the plan and every step through the logger 'structgp', or on standard error if
        nothing listens to that logger.

    Fields of option objects have nested names, as in scikit-learn:
    ``set_params(prior__transition_sd=1.0)``.

    Attributes
    ----------
    classes_ : labels seen in training, sorted.
    training_log_ : what the fit did and why: 'plan' (every choice with its reason), 'optimizer', 'reason',
        'gradient', 'stopped', 'steps', 'trace' (number and bound of some steps), 'elbo' and 'fresh_elbo'
        (which bracket the optimum in expectation), 'relaxation' (evidence before and after, if the kernel's
        shape was learned that way), 'pilot' (the first fit, on a part of the data), 'held_out' (figures on
        held-out training data, if the data weight was chosen by them), 'posterior' (weights or inducing),
        'covariance', 'covariance_rank', 'covariance_reason', 'kernel_scales' (prior variance of a weight,
        by template), 'function_scales', 'effective_parameters', 'kl_inducing', 'kl_transitions',
        'length_scales' (of the kernel on dense features, in the units of the columns: one number if all
        columns share one after scaling, else a list), 'shape' (how it was learned: 'bound', 'regression'),
        'amplitude_factor', 'transition_sd', 'template_sds' (prior sd of a score, for every template except
        the nodes), 'n_inducing', 'inducing_residual', 'evaluations', 'seconds', 'foreseen' (how long the
        fit was expected to take, for a function of values alone), 'log_z' for structures beyond the chain
        (lower and upper bounds on log Z, 'low' and 'high', if the tree-reweighted bound replaces it, else
        None), 'dev' if dev data was passed, and 'vectors' in a model from a file that was trained with word
        vectors (numbers of training tokens with and without one).
    model_ : the fitted :class:`structgp.answers.ask.Model`.

    Notes
    -----
    X is a list (or generator) of sequences; a sequence is a list of feature dicts, a list of lists of
    strings, or a 2-D array, torch tensor or scipy-sparse matrix with one row per token. y is a list of
    lists of strings. In a dict, string values are templates, named by their key (beyond 64 keys: a bag of
    attributes); numbers and flags are numeric features; 1-D arrays or tensors, such as word vectors, are
    dense features: every token must have them, with one length per key; lists and nested dicts are read as
    python-crfsuite reads them. Each kind of feature has its own kernel, and the model uses their sum. A
    model read from a file has no 'steps' in its log; its ``kernel`` is the fitted kernel, unless the kernel
    was given by name.

    Memory is O(V M) for a posterior of M weights; O(V F^2) for F weights of dense features; O(V M^2) for
    a posterior of M inducing inputs, or O(V M r) if its covariances are low-rank; and O(V T^2) for a
    sequence of T tokens."""

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters; with ``deep``, also the fields of option objects, such as
        ``prior__transition_sd``."""
        found: dict[str, Any] = super().get_params(deep=False)
        for name, value in list(found.items()) if deep else []:
            if _is_option(value):
                found |= {f"{name}__{f.name}": getattr(value, f.name) for f in fields(value)}
        return found

    def set_params(self, **params: Any) -> StructuredGPClassifier:
        """Sets parameters; a nested name replaces the option object with a changed copy."""
        nested = {key: params.pop(key) for key in list(params) if "__" in key}
        super().set_params(**params)
        for key, value in nested.items():
            name, _, own = key.partition("__")
            option: Any = getattr(self, name, None)
            if not _is_option(option) or own not in {f.name for f in fields(option)}:
                problem = f"{name} is {option!r}, which has no field {own!r}"
                raise ValueError(f"Invalid parameter {key!r}: {problem}")
            setattr(self, name, replace(option, **{own: value}))
        return self

    def fit(
        self,
        X: Iterable[Any] | Shards,
        y: Iterable[Sequence[str | None]] | Annotations | None = None,
        X_dev: Iterable[Any] | None = None,
        y_dev: Iterable[Sequence[str]] | None = None,
        *,
        sample_weight: Any = None,
        early_stopping: bool = False,
        callback: Callback | None = None,
        checkpoint: str | Path | None = None,
        together: Processes = ALONE,
    ) -> StructuredGPClassifier:
        """Fits the posterior. A label may be None: the likelihood then sums over its possible values. Dev
        data is scored at the end, and the scores are stored in ``training_log_['dev']``.

        y may be :class:`structgp.Annotations`, the labels of several annotators. The true labels are then
        summed over, and the reliability of each annotator is learned with the rest (``annotators_``).

        X may be :class:`structgp.data.shards.Shards`, which hold labels too: data too large for memory is
        then read batch by batch, with 'minibatch' inference.

        ``sample_weight`` : (N,), how often each sequence counts; 0 leaves it out. ``early_stopping`` : stop
        when the likelihood of the dev data has not risen for two steps, and keep the best step.
        ``callback`` : called with every :class:`structgp.inference.StepInfo`; if it returns True, the fit
        stops and keeps the current state; within it, :meth:`so_far` returns a model that can be asked.
        ``checkpoint`` : a file for the state of the fit, from which an equal call resumes if this one is
        killed; it is removed when the fit is done. ``together`` : the processes that share the sequences
        (``inference.distributed.joined``); all of them make the same call with all the data, and end with
        the same fit."""
        options = self._options()
        if early_stopping is not False or X_dev is not None or y_dev is not None:
            check_dev(X_dev, y_dev, early_stopping)
        dev = None if X_dev is None or y_dev is None else (as_list(X_dev), as_label_lists(y_dev, "y_dev"))
        before = getattr(self, "model_", None) if self.warm_start else None
        if isinstance(X, Shards):
            check_shards(y, sample_weight, early_stopping, before is not None)
            refuse_graph(options, "shards")
            examples: Examples | ShardedExamples = read_sharded(X, declared(options))
            plan = resolve(options, examples, together)
        else:
            if y is None:
                raise InputError("y", "no labels", "pass one list of labels per sequence, or shards")
            X, y = as_list(X), y if isinstance(y, Annotations) else as_label_lists(y)
            examples, plan, before = self._read(options, X, y, sample_weight, before, together)
        if together.size > 1:
            check_together(together, plan)
        plan, examples = adopt(options, plan, examples)
        warn_of_odd_labels(examples)
        warn_of_labels(plan, examples)
        extras: dict[str, Any] = {"dev": dev, "early_stopping": early_stopping, "checkpoint": checkpoint}
        if isinstance(X, list) and isinstance(y, list) and isinstance(examples, Examples):
            extras["memory"] = Memory.of(X, y, examples)
        return self._run(options, examples, plan, before, callback, together=together, **extras)

    def _read(
        self,
        options: Options,
        X: list[Any],
        y: Any,
        weights: Any,
        before: Model | None,
        together: Processes,
    ) -> tuple[Examples, Plan, Model | None]:
        """The data as examples, the plan of the fit, and the model to start from: ``before``, or None with
        a warning if the fit cannot start from it."""
        given: dict[str, Any] = {"features": self.features, "constraints": declared(options)}
        given["word_parts"] = parts_wanted(options)
        given |= {"weights": weights, "spec": graph_of(options)}
        known: dict[str, Any] = {}
        if before is not None:
            known = {"encoder": before.encoder, "classes": before.labels.classes}
        examples = read_examples(X, y, **given, **known, stacklevel=5)
        plan = resolve(options, examples, together)
        same_parts = before is None or parts_stay(options, before.encoder)
        if before is not None and not same_parts:  # other options may still split the same feature
            same_parts = taken_apart(read_examples(X, y, **given).encoder) == taken_apart(before.encoder)
        if before is not None and not (same_parts and can_go_on(plan, before, examples)):
            reason = "the earlier fit had other labels, other columns, other parts of words or another "
            reason += "kind of posterior; this one starts from the prior"
            if examples.split is not None:
                reason = f"fits of {plan.spec} always start from the prior"
            warnings.warn(f"warm_start: {reason}", StructgpWarning, stacklevel=3)
            before, examples = None, read_examples(X, y, **given)
            plan = resolve(options, examples, together)
        return examples, plan, before

    def partial_fit(
        self,
        X: Iterable[Any],
        y: Iterable[Sequence[str | None]],
        classes: Sequence[str] | None = None,
        *,
        sample_weight: Any = None,
        remember: bool = True,
        callback: Callback | None = None,
    ) -> StructuredGPClassifier:
        """Learns from more data. New features and labels are added to the model; new labels come last in
        ``classes_``. The first call is a fit; its ``classes`` may name labels that occur only later.

        remember : whether the estimator keeps all data, up to 20,000 tokens, and fits them together. Up to
        3,000 tokens the result equals that of one fit; beyond, the data weight is chosen anew only now and
        then. If data are not kept (remember=False, more data, or a model from a file, which holds no data),
        the posterior so far becomes the prior for the new data, and earlier data are known through that
        posterior alone. This needs a posterior of weights (``training_log_['posterior']``); a warning is
        given if it makes predictions worse, as far as the new data tell. Earlier data then say nothing
        about a new label that the first call did not name, not even that it did not occur in them."""
        options = self._options()
        refuse_graph(options, "partial_fit")
        if isinstance(X, Shards):
            raise InputError("partial_fit", "shards are fitted as a whole", "use fit, or pass X and y")
        if isinstance(y, Annotations):
            remedy = "use fit with all of them, or pass one labelling"
            raise InputError("partial_fit", "annotations are fitted as a whole", remedy)
        before, X, y = getattr(self, "model_", None), as_list(X), [] if y is None else as_label_lists(y)
        given: dict[str, Any] = {"features": self.features, "constraints": declared(options)}
        given["word_parts"] = parts_wanted(options)
        known: dict[str, Any] = {"classes": [] if classes is None else [str(label) for label in classes]}
        if before is not None:
            known = {"encoder": before.encoder, "classes": before.labels.classes}
            if isinstance(options.structure, str) and before.spec.is_chain:
                options = replace(options, structure=before.spec)  # even if the new data suggest another
        examples = read_examples(X, y, weights=sample_weight, **given, **known)
        warn_of_odd_labels(examples, before and before.info["label_counts"])
        new = Memory.of(X, y, examples) if remember else None
        if before is None:
            plan, examples = adopt(options, resolve(options, examples), examples)
            return self._run(options, examples, plan, None, callback, memory=new)
        whole = new and new.after(getattr(self, "memory_", None))
        if whole:
            known["encode_anew"] = True  # the feature with the words is looked for in all data
            examples = read_examples(whole.X, whole.y, weights=whole.weights, **given, **known)
            plan, examples = adopt(options, resolve(options, examples), examples, before.info)
            settled = None if whole.is_to_be_weighed(examples.n_tokens) else before.info
            self._run(options, examples, plan, None, callback, settled=settled, memory=whole)
            self.model_ = replace(self.model_, extra=dict(before.extra))
            return self
        warn_of_parts(options, before.encoder, stacklevel=2)
        plan, examples = adopt(
            options, going_on(options, examples, before.posterior), examples, before.info
        )
        warn_of_part(options, as_before(plan, options, before.info), before, examples)
        return self._run(options, examples, plan, before, callback, seen_before=before)

    def _run(
        self,
        options: Options,
        examples: Examples | ShardedExamples,
        plan: Plan,
        before: Model | None,
        callback: Callback | None,
        *,
        settled: Mapping[str, Any] | None = None,
        memory: Memory | None = None,
        **extras: Any,
    ) -> StructuredGPClassifier:
        """The steps common to all fits: the initial posterior, the optimiser, the fitted attributes.

        settled : log of an earlier fit whose data weight, spread and threshold are kept. memory : the data
        to remember for ``partial_fit``."""

        def report(info: StepInfo) -> bool | None:
            logger.info("step %d: bound %.2f", info.iteration + 1, info.elbo)
            return callback is not None and callback(info)

        if self.class_weight is not None:
            check_class_weight(self.class_weight, examples.labels.classes)
        generator, found = torch.Generator().manual_seed(int(self.random_state)), None
        if isinstance(examples, Examples) and examples.given is not None:
            examples, extras["confusions"] = weigh_votes(examples)
        with heard() if self.verbose else nullcontext(), numbers_in_bounds():
            if before is None and settled is None and isinstance(examples, Examples):
                start, found = begin(options, plan, examples, generator, extras.get("together", ALONE))
            elif before is None:
                plan = plan if settled is None else as_before(plan, options, settled)
                start = start_of(options, plan, examples, generator)
            else:
                assert isinstance(examples, Examples)
                start = start_from(as_before(plan, options, before.info), before, examples)
            earlier = settled if before is None else before.info
            ratio = None if earlier is None else earlier.get("error_ratio")
            fit = Fit(options, examples, start, generator, held_out=found, error_ratio=ratio, **extras)
            is_heard = logger.isEnabledFor(logging.INFO)
            for line in plan_lines(start.plan.to_json()) if is_heard else ():
                logger.info(line)
            self._fitting = fit
            try:
                self.model_, self.training_log_ = fit.run(report if is_heard else callback)
            finally:
                del self._fitting
            between = self.training_log_.get("log_z")
            if is_heard and between is not None:
                told = "log Z of a training example is between %.2f and %.2f, on average over %d of them"
                logger.info(told, between["low"], between["high"], between["n_examples"])
        self.classes_, self.memory_ = np.array(examples.labels.classes), memory
        if memory is not None and settled is None and isinstance(examples, Examples):
            self.memory_ = replace(memory, weighed=examples.n_tokens)
        if fit.dev is not None:
            self.training_log_["dev"] = self.evaluate(*fit.dev).as_dict()
        return self

    @property
    def held_out_(self) -> dict[str, Any] | None:
        """The performance to expect on new data, estimated on held-out training data: 'held_out' in the
        log. None if the data weight was not chosen by cross-validation."""
        check_is_fitted(self, "model_")
        found: dict[str, Any] | None = self.training_log_.get("held_out")
        return found

    def so_far(self) -> StructuredGPClassifier:
        """A fitted estimator with the current posterior, for use within the ``callback`` of a ``fit``. It
        can be asked like any other; the fit continues unaffected. Cost: a copy of the posterior."""
        if not hasattr(self, "_fitting"):
            raise InputError("so_far", "no fit is going on", "call it in the callback of a fit")
        found = copy.copy(self)
        fit: Fit = found.__dict__.pop("_fitting")
        found.classes_ = np.array(fit.examples.labels.classes)
        found.training_log_, found.model_ = {}, fit.model_now()
        return found

    def ask(self, X: Iterable[Any]) -> Asked:
        check_is_fitted(self, "model_")
        return super().ask(X)

    def report(
        self,
        X: Iterable[Any],
        y: Iterable[Any] | None,
        path: str | Path,
        *,
        words: Sequence[Sequence[str]] | None = None,
        name: str = "data",
        model_name: str = "model",
    ) -> None:
        """Writes an HTML page with the model's answers about X to ``path``.

        y : the true labels, to compare the answers with; None if there are none. words : the text to show
        for each token, by default its feature 'word', 'token', 'form' or 'text', or else its first string
        feature. name, model_name : names of the data and the model in the page's title. ``structgp report``
        does the same for files."""
        from structgp.report import write_page

        check_is_fitted(self, "model_")
        write_page(self, as_list(X), y, path, words=words, name=name, model_name=model_name)

    def save(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Writes the model to one file (safetensors and JSON); read it with ``structgp.load``. ``extra`` :
        JSON values to keep with it, in ``model_.extra``."""
        check_is_fitted(self, "model_")
        kept = self.model_.extra | (extra or {}) | {"params": to_json(self.get_params(deep=False))}
        n_draws = answer_draws(self.n_draws, self.model_.spec)
        model_file.save(replace(self.model_, extra=kept, n_draws=n_draws), path)


def _is_option(value: Any) -> bool:
    """True if the value is an option object, whose fields are parameters."""
    params = getattr(value, "__dataclass_params__", None)
    return params is not None and params.frozen and not isinstance(value, type)


def load(path: str | Path, structure: Any = None) -> StructuredGPClassifier:
    """The fitted estimator from a file written by ``save`` or ``structgp train``. ``structure`` : your own
    function or :class:`Structure`, if one answers for the model, since a file holds no code; 'chain' makes
    the chain answer in its place."""
    return read_as(StructuredGPClassifier, path, structure)
