"""One fit, from its plan to the fitted model and its log."""

from __future__ import annotations

import copy
import hashlib
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from structgp import __version__
from structgp.answers.annotators import Annotators
from structgp.answers.ask import Model
from structgp.answers.confusions import Confusions
from structgp.data.batch import Batch
from structgp.data.examples import Examples
from structgp.data.labels import all_labelled
from structgp.data.shards import ShardedExamples
from structgp.errors import InputError, StructgpWarning
from structgp.gp.kernels.build import kernel_scales
from structgp.inference import Minibatch, Optimizer, SecondOrder
from structgp.inference.annotated import Annotated
from structgp.inference.batch_sites import remove_sites
from structgp.inference.checkpoint import Checkpoint, Keeper
from structgp.inference.distributed import ALONE, Processes
from structgp.inference.loop import Callback, History, Watch, make_batches, train
from structgp.plan.decisions import settle_threshold
from structgp.plan.foreseen import in_processes
from structgp.plan.options import Options, answer_draws, fingerprint
from structgp.plan.programs import bracket_of
from structgp.plan.resolve import Plan, all_at_once
from structgp.plan.start import Start
from structgp.plan.usefulness import warn_of_useless
from structgp.structures import Chain, Differences
from structgp.threads import one_torch_thread

BATCH_TOKENS = {"weights": 4_000, "inducing": 1_000}
"""Tokens per batch, about, by family of the posterior."""

TIMES_ON_GPU = 16
"""Factor by which batches are larger on a GPU, where launches cost more than the work of a small batch."""

MOST_OPEN_VARIANCE = 0.25
"""Variance of a score that inducing inputs may leave open without a warning: with a curvature of at most
1/4, some 3 hundredths of a nat per token and function. Not chosen on data."""

TRACE_POINTS = 400
"""Largest number of steps whose bound a model file keeps: evenly spaced, the first and the last among
them."""

Dev = tuple[list[Any], list[Any]]


def check_dev(X_dev: Any, y_dev: Any, early_stopping: Any) -> None:
    """InputError for dev data that is not whole, and for early stopping without it."""
    if (X_dev is None) != (y_dev is None):
        given, missing = ("y_dev", "X_dev") if X_dev is None else ("X_dev", "y_dev")
        raise InputError(missing, f"missing where {given} is given", "pass both or neither")
    if not isinstance(early_stopping, bool | np.bool_):
        problem = f"must be True or False, got {early_stopping!r}"
        raise InputError("early_stopping", problem, "leave it out, or pass True")
    if early_stopping and X_dev is None:
        raise InputError("early_stopping", "there is no dev data to stop by", "pass X_dev and y_dev to fit")


def check_shards(y: Any, sample_weight: Any, early_stopping: bool, goes_on: bool) -> None:
    """InputError for arguments that do not go with data on disk."""
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise InputError(name, "given beside shards, which hold tokens and labels", "leave it out")
    if early_stopping:
        problem = "is for data in memory: on shards a step is one batch of many"
        raise InputError("early_stopping", problem, "stop with a callback, or leave it out")
    if goes_on:
        problem = "a fit on shards starts from nothing: their features are numbered anew"
        raise InputError("warm_start", problem, "use warm_start=False, or go on from a checkpoint")


FEW_FEATURES = 100
"""Number of dense features up to which one torch thread is quicker than two (``experiments.vectors``)."""


@dataclass(frozen=True)
class Fit:
    """What goes into one fit. seen_before : the model of earlier data, which count too. dev : data to
    score. early_stopping : whether their likelihood decides when to stop. checkpoint : file for the state
    of the fit. held_out : what cross-validation has found, for the log. error_ratio : that of an earlier
    fit's cross-validation. confusions : what is known of annotators, moved in place by the fit."""

    options: Options
    examples: Examples | ShardedExamples
    start: Start
    generator: torch.Generator
    seen_before: Model | None = None
    dev: Dev | None = None
    early_stopping: bool = False
    checkpoint: str | Path | None = None
    together: Processes = ALONE
    held_out: dict[str, Any] | None = None
    confusions: Confusions | None = None
    error_ratio: Sequence[float] | None = None

    def run(self, callback: Callback | None) -> tuple[Model, dict[str, Any]]:
        """Fits the posterior in place; returns the model and the log."""
        kept, plan = (None, self.start.plan) if self.checkpoint is None else self._kept()
        left = self.start.open_variance
        with in_processes(plan, self.examples) as foreseen:
            history = self.train(plan, callback, kept)
        self.start.posterior.to("cpu")
        if history.stopped == "limit":
            warnings.warn(
                f"the {history.optimizer} optimiser stopped after {len(history.steps)} steps, before "
                "the bound settled; see training_log_",
                StructgpWarning,
                stacklevel=4,
            )
        # The value before the fit counts too: the fit may shrink a kernel that its inducing inputs cannot
        # follow.
        left = max(left, self.start.open_variance)
        if left > MOST_OPEN_VARIANCE:
            warnings.warn(
                f"the {self.start.plan.n_inducing.value} inducing inputs of the smooth kernel leave a "
                f"variance of {left:.2g} per score open, and predictions are less sure than they could be; "
                "posterior=Inducing(n_inducing=...) takes more of them, kernel='linear' needs none",
                StructgpWarning,
                stacklevel=4,
            )
        if history.stopped == "converged":
            warn_of_useless(self.start.posterior, plan.split.node, self.examples, history)
        for block in self.start.posterior.blocks:
            block.round_factor()
        plan = settle_threshold(plan, self.model({}), self.examples)
        log = self._log(history, plan) | {"foreseen": None if foreseen is None else foreseen.to_json()}
        if kept is not None and self.together.is_first:
            kept.remove()
            if isinstance(plan.optimizer.value, Minibatch):  # after the checkpoint, which needs them
                remove_sites(f"{self.checkpoint}.sites")
        info = {k: v for k, v in log.items() if k != "steps"}
        threshold = plan.threshold and plan.threshold.value
        model = self.model(info | {"version": __version__, "threshold": threshold})
        if isinstance(self.examples, Examples) and self.examples.split is not None:
            log["log_z"] = model.info["log_z"] = bracket_of(model, self.examples)
        return model, log

    def train(
        self,
        plan: Plan,
        callback: Callback | None = None,
        kept: Keeper | None = None,
        on_fresh_draws: bool = True,
    ) -> History:
        """Fits the posterior in place, without warnings; it stays on the device where it was."""
        fit = self
        if self.start.within is not None:
            assert isinstance(self.examples, Examples)
            chains = self.examples.as_chains()
            fit, plan = replace(self, start=self.start.within, examples=chains), self.start.within.plan
        few = fit.start.dense is None or fit.start.dense.n_features <= FEW_FEATURES
        small = plan.has_weights and few and type(plan.structure.value) is Chain
        sites = self._sites(plan) if self._keeps_sites_on_disk(plan) else nullcontext(plan)
        with one_torch_thread() if small else nullcontext(), sites as plan:
            return train(
                fit.start.posterior,
                plan.structure.value,
                fit._batches(plan),
                self._optimizer(plan),
                plan.optimizer.reason,
                estimator=plan.gradient.value,
                entropy=plan.entropy.value,  # type: ignore[arg-type]
                device=plan.device.value,
                generator=self.generator,
                callback=callback,
                checkpoint=kept,
                watch=self._watch(self.dev) if self.early_stopping and self.dev else None,
                together=self.together,
                on_fresh_draws=on_fresh_draws,
            )

    def model_now(self) -> Model:
        """The model with a copy of the posterior as it is now. Cost: that copy."""
        return self.model({}, copy.deepcopy(self.start.posterior).to("cpu"))

    def model(self, info: dict[str, Any], posterior: Any = None) -> Model:
        """The model, with the counts of the data in its ``info``, including those of ``seen_before``."""
        examples, posterior = self.examples, self.start.posterior if posterior is None else posterior
        counts = dict(zip(examples.labels.classes, examples.label_counts.tolist(), strict=True))
        seen: dict[str, Any] = {"n_sequences": examples.n_sequences, "n_tokens": examples.n_tokens}
        if self.seen_before is not None:
            for label, count in self.seen_before.info["label_counts"].items():
                counts[label] += count
            seen = {name: count + self.seen_before.info[name] for name, count in seen.items()}
        plan = self.start.plan
        threshold = plan.threshold and plan.threshold.value
        decide = {
            "decode": plan.decode.value,
            "error_ratio": self.error_ratio if self.held_out is None else self.held_out["error_ratio"],
        }
        if self.seen_before is not None:
            seen["length_quartiles"] = self.seen_before.info.get("length_quartiles", [])
        elif isinstance(examples, Examples):
            seen["length_quartiles"] = _quartiles([len(rows) for rows in examples.rows if len(rows)])
        return Model(
            examples.encoder,
            examples.labels,
            posterior.requires_grad_(False),
            self.start.plan.spec,
            answer_draws(self.options.n_draws, self.start.plan.spec),
            int(self.options.random_state),
            {"threshold": threshold} | info | seen | decide | {"label_counts": counts},
            {} if self.seen_before is None else dict(self.seen_before.extra),
            predictor=self.start.plan.predictor,
            constraints=examples.constraints,
            spread=self.start.plan.spread.value,
            own={} if isinstance(examples, ShardedExamples) or not examples.split else examples.split.own,
            annotators=self._annotators(),
        )

    def _annotators(self) -> Annotators | None:
        """What is known of annotators now, where there are several."""
        examples, known = self.examples, self.confusions
        if known is None or not isinstance(examples, Examples) or examples.given is None:
            return None
        return Annotators.of(known, examples.given, examples.labels.classes)

    def _optimizer(self, plan: Plan) -> Optimizer:
        """The plan's optimiser; where labels are those of annotators, one that learns what these are worth
        too."""
        optimizer, known = plan.optimizer.value, self.confusions
        if known is None or not isinstance(self.examples, Examples) or self.examples.given is None:
            return optimizer
        assert isinstance(optimizer, SecondOrder)
        return Annotated(optimizer, self.examples.given, known, plan.data_weight.value or 1.0)

    def _batches(self, plan: Plan) -> Sequence[Batch]:
        optimizer, examples = plan.optimizer.value, self.examples
        most_tokens = BATCH_TOKENS["weights" if plan.has_weights else "inducing"]
        if torch.device(plan.device.value).type == "cuda" and plan.has_weights:
            most_tokens *= TIMES_ON_GPU
        if getattr(optimizer, "one_sequence_a_batch", False):
            most_tokens = 1
        if isinstance(optimizer, Minibatch):
            most_tokens = optimizer.batch_tokens or 1
        if isinstance(examples, ShardedExamples):
            return examples.batches(most_tokens)
        if plan.split.next is not None:  # a table of scores for each token
            most_tokens = max(1, most_tokens // examples.n_labels)
        if examples.split is not None and any(examples.split.views[1:]):
            most_tokens = max(1, most_tokens // examples.n_labels)
        labels = examples.y if examples.evidence is None else examples.evidence
        data = examples.rows, labels, examples.encoder.pad_row, most_tokens
        # With minibatches, all processes have all batches, and each visits some (``inference.rounds``).
        together = ALONE if isinstance(optimizer, Minibatch) else self.together
        batches = make_batches(*data, plan.sequence_weights(examples), together, examples.n_layers)
        return [plan.split(b) if examples.split is None else examples.as_graphs(b) for b in batches]

    def _watch(self, dev: Dev) -> Watch:
        """Early stopping by the likelihood of the dev data, which is computed after each step."""
        X = dev[0]
        truth = all_labelled(self.model_now().ask(X).labels_given(dev[1]))
        if not any(y and set(y) <= set(self.examples.labels.classes) for y in truth):
            problem = "every sequence has a label that training never saw: there is nothing to stop by"
            raise InputError("y_dev", problem, "pass dev data with the labels of the training data")

        def nll() -> float:
            # Unseen labels and forbidden labellings tell nothing about one step or another.
            found = self.model_now().ask(X).log_probs(truth)
            log_probs = [v for v in found if v is not None and v > -np.inf]
            return -sum(log_probs) / max(1, len(log_probs))

        return Watch(self.start.posterior, nll)

    def _kept(self) -> tuple[Checkpoint, Plan]:
        """The checkpoint, and the plan of the fit that it belongs to: one begun by several processes has no
        minibatches."""
        assert self.checkpoint is not None
        if not Path(self.checkpoint).absolute().parent.is_dir():
            problem = "cannot be written (No such file or directory)"
            raise InputError(str(self.checkpoint), problem, "create its folder first")
        plan, shared = self.start.plan, all_at_once(self.start.plan, self.options)
        kept, other = (Checkpoint(self.checkpoint, self._fingerprint(p)) for p in (plan, shared))
        return (other, shared) if other.is_there and not kept.is_there else (kept, plan)

    def _fingerprint(self, plan: Plan) -> str:
        """Identifies this fit: by its options, data, optimiser and gradient estimator."""
        optimizer = plan.optimizer.value
        parts = (
            fingerprint(self.options),
            self.early_stopping,
            self.examples.labels.classes,
            # An optimiser that is not a dataclass may have a name and no values to compare.
            optimizer if is_dataclass(optimizer) else optimizer.name,
            plan.gradient.value.name,
            (plan.data_weight.value, plan.tails, plan.shape and plan.shape.name),
            self.examples.digest,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _keeps_sites_on_disk(self, plan: Plan) -> bool:
        """True on shards, and where several processes share a checkpoint, from which another number of
        processes may go on."""
        optimizer = plan.optimizer.value
        if not isinstance(optimizer, Minibatch) or optimizer.sites_folder is not None:
            return False
        shares = self.together.size > 1 and self.checkpoint is not None
        return shares or isinstance(self.examples, ShardedExamples)

    @contextmanager
    def _sites(self, plan: Plan) -> Iterator[Plan]:
        """The plan with its sites on disk: beside the checkpoint, where they stay if the fit is cut off, or
        in the shards' folder, in a temporary folder per process that is removed after training."""
        optimizer = plan.optimizer.value
        assert isinstance(optimizer, Minibatch)
        with ExitStack() as stack:
            folder = f"{self.checkpoint}.sites"
            if self.checkpoint is None:
                assert isinstance(self.examples, ShardedExamples)
                beside = self.examples.shards.folder
                try:
                    made = tempfile.TemporaryDirectory(prefix=".sites-", dir=beside)
                except OSError as error:
                    problem = f"the sites of the fit cannot be written there ({error.strerror})"
                    remedy = "name a checkpoint in another place: they are kept beside it"
                    raise InputError(str(beside), problem, remedy) from error
                folder = stack.enter_context(made)
            placed = replace(optimizer, sites_folder=folder)
            yield replace(plan, optimizer=replace(plan.optimizer, value=placed))

    def _log(self, history: History, plan: Plan) -> dict[str, Any]:
        """``training_log_``."""
        start, pilot = self.start, self.start.pilot
        named = ("optimizer", "reason", "gradient", "stopped", "steps", "elbo", "fresh_elbo")
        log = {"plan": plan.to_json()} | {name: getattr(history, name) for name in named}
        steps, n = history.steps, len(history.steps)
        kept = np.unique(np.linspace(0, n - 1, min(n, TRACE_POINTS)).round().astype(int))
        log["trace"] = [[steps[i].iteration + 1, float(steps[i].elbo)] for i in kept]
        log["evaluations"] = history.evaluations + (pilot.history.evaluations if pilot else 0)
        if isinstance(plan.structure.value, Differences):
            log |= {"gradient": "differences", "evaluations": plan.structure.value.n_values}
        return log | {
            "relaxation": None if start.relaxation is None else vars(start.relaxation),
            "pilot": None if pilot is None else pilot.summary,
            "held_out": self.held_out,
            "posterior": "weights" if plan.has_weights else "inducing",
            "covariance": plan.covariance.value,
            "covariance_rank": plan.rank,
            "covariance_reason": plan.covariance.reason,
            "inducing_residual": start.residual,
            "seconds": history.seconds + (pilot.history.seconds if pilot else 0.0),
            "kernel_scales": kernel_scales(start.posterior.node.kernel, plan.split.node.blocks),
            "length_scales": None if start.dense is None else start.dense.typical_lengths(),
            "shape": None if start.plan.shape is None else start.plan.shape.name,
            **start.posterior.summary(plan.entropy.value),  # type: ignore[arg-type]
        }


def _quartiles(lengths: list[int]) -> list[int]:
    """Three lengths that occur and part the sequences into quarters, about."""
    return [int(q) for q in np.quantile(lengths, [0.25, 0.5, 0.75], method="inverted_cdf")]
