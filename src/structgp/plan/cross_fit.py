"""Tables beyond a chain, learned from sequences that the chain has not seen.

The links of ``chain() + same("word")`` tell something where the features of single tokens leave doubt. On
training data they leave next to none, because weights of rare words have taken in the labels that these
words have there; links learned in a joint fit are then too strong for new sequences. So the chain is fitted
without links to all sequences but a part, and the links are learned from that part, with scores of a chain
that has not seen it; each part is left out once. The model is the chain fitted to all sequences, with these
links.

On three parts of the TRAINING announcements of fold 0 of ``experiments.seminars``, fitted to the other two
with a data weight of 8, the NLL of the third is .0350, .0372 and .0394 without links, .0339, .0378 and
.0379 with links learned like this, and .0362, .0391 and .0385 with links of a joint fit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from structgp.answers.ask import Asked, Model, Question
from structgp.data.encode import FeatureSplit
from structgp.data.examples import Examples
from structgp.data.shards import ShardedExamples
from structgp.gp import Posterior, Table
from structgp.inference import SecondOrder
from structgp.inference.distributed import ALONE, Processes
from structgp.inference.loop import make_batches
from structgp.inference.table_fit import GivenScores, fit_tables
from structgp.plan import held_out
from structgp.plan.choices import FEWEST_SEQUENCES, Choice
from structgp.plan.held_out import Fold, shorter
from structgp.plan.learning_curve import Curve
from structgp.plan.options import Options
from structgp.plan.resolve import Plan
from structgp.plan.run import BATCH_TOKENS
from structgp.plan.start import Start, start_of
from structgp.plan.trials import Candidate, Predictions, joined
from structgp.structures import Declared, Rules, Spec, structure_for

logger = logging.getLogger("structgp.held_out.links")

N_PARTS = 3
"""Number of parts that are left out, one at a time: as many as cross-validation has folds."""

N_DRAWS = 16
"""Number of draws of the chain's scores: as many as stand for the posterior in a fit."""

MOST_NUMBERS = 1 << 27
"""Largest number of scores in all draws, which stay in memory: a gigabyte. Where there would be more, there
are fewer draws."""

ENOUGH = 20_000
"""Number of left-out tokens, about, that are enough to tell what to expect of the model: as many as a fold
of cross-validation is fitted to."""


def chain_within(plan: Plan, examples: Examples | ShardedExamples, together: Processes) -> Plan | None:
    """The plan of the chain whose fit the structure's further tables can be added to; None where there is
    no such chain, or the structure has to be fitted as a whole."""
    if not isinstance(examples, Examples) or type(plan.structure.value) is not Declared:
        return None
    if not plan.spec.is_linked_chain:
        return None
    rules = examples.constraints
    as_a_whole = (
        not plan.has_weights,
        plan.has_dense,
        not isinstance(plan.optimizer.value, SecondOrder),
        together.size > 1,
        examples.given is not None,
        rules is not None and bool(rules.more),
        examples.n_sequences < FEWEST_SEQUENCES,
        plan.transition_sd == 0,
    )
    if any(as_a_whole):
        return None
    own = Spec(plan.spec.templates[:2])
    fitted = structure_for(own, None if rules is None else Rules.of(rules), examples.labels.classes, True)
    structure = replace(plan.structure, value=fitted)
    split = FeatureSplit(examples.encoder, own)
    return replace(plan, spec=own, split=split, structure=structure, program=None)


def choose(
    options: Options, plan: Plan, examples: Examples, together: Processes = ALONE
) -> tuple[Plan, dict[str, Any] | None, CrossFit | None]:
    """``held_out.choose``. If the structure is a chain with further tables, that is done for the chain
    alone, and then the tables are learned."""
    chain = chain_within(plan, examples, together)
    if chain is None:
        return *held_out.choose(options, plan, examples, together), None
    began = time.monotonic()
    chain, found = held_out.choose(options, chain, examples.as_chains(), together)
    cross_fit = CrossFit(options, plan, chain, examples)
    tables = cross_fit.tables(range(len(cross_fit.parts)))
    names = ", ".join(tables)
    told = Choice("from left-out sequences", f"on training data, tokens leave little for {names} to tell")
    settled = {name: getattr(chain, name) for name in ("data_weight", "spread", "tails", "threshold")}
    plan, cross_fit.learned = replace(plan, **settled, tables=told), tables
    if found is not None:
        found = cross_fit.expected(found)
        found["seconds"] = time.monotonic() - began
    return plan, found, cross_fit


def begin(
    options: Options, plan: Plan, examples: Examples, generator: torch.Generator, together: Processes
) -> tuple[Start, dict[str, Any] | None]:
    """The start of a fit, with everything settled that training data have to tell; and what
    cross-validation has found, for the log."""
    plan, found, cross_fit = choose(options, plan, examples, together)
    if cross_fit is None:
        return start_of(options, plan, examples, generator), found
    return cross_fit.start(plan, generator), found


@dataclass(frozen=True)
class Part:
    """Sequences that are left out. fold : leaves them out of its fits. model : fitted to the other
    sequences, with further tables that are still at their prior. data : the left-out sequences that have
    tuples of these tables."""

    fold: Fold
    model: Model
    data: list[GivenScores]


class CrossFit:
    """Fits of the chain to all sequences but a part. chain : their plan. learned : the further tables."""

    learned: Mapping[str, Any]

    def __init__(self, options: Options, plan: Plan, chain: Plan, examples: Examples) -> None:
        self.options, self.plan, self.chain, self.examples = options, plan, chain, examples
        self.seed = int(options.random_state)
        there = [i for i, rows in enumerate(examples.rows) if len(rows)]
        order = np.random.default_rng(self.seed).permutation(there)
        n_draws = MOST_NUMBERS // (examples.n_tokens * examples.n_labels) // 2 * 2
        self.n_draws = max(2, min(N_DRAWS, n_draws))
        self.parts = []
        for n, part in enumerate(np.array_split(order, min(N_PARTS, len(order))), 1):
            logger.info("learning tables from left-out sequences: fit %d to the others", n)
            self.parts.append(self._part(n, sorted(part.tolist())))

    def _part(self, n: int, index: list[int]) -> Part:
        left_out = self.examples.part(index)
        chains = self.examples.as_chains()
        rest = chains.part(sorted(set(range(len(chains.rows))) - set(index)))
        options = replace(self.options, random_state=(self.seed + n) % 2**63)
        fold = Fold(options, shorter(self.chain), rest, left_out)
        candidate = Candidate(self.chain.data_weight.value or 1.0, self.chain.shape, self.chain.tails)
        model = self._with(fold.fitted(candidate), self._new_tables())
        linked = [i for i, links in enumerate(left_out.links or ()) if any(map(len, links.tuples[1:]))]
        return Part(fold, model, self._given(model, left_out.part(linked)) if linked else [])

    def _new_tables(self) -> dict[str, Any]:
        """The further tables at their prior."""
        split, numbered = self.plan.split, list(enumerate(self.plan.spec.templates))[2:]
        sd = self.plan.transition_sd
        return {t.name: Table(split.sizes(k), sd, t.symmetric) for k, t in numbered}

    def _with(self, model: Model, tables: Mapping[str, Any]) -> Model:
        """A chain's model with further tables."""
        blocks = {name: model.posterior[name] for name in ("node", "next")}
        posterior = Posterior({**blocks, **tables}).requires_grad_(False)
        changed = {"spec": self.plan.spec, "own": self.plan.split.own}
        return replace(model, posterior=posterior, spread=self.chain.spread.value, **changed)

    def _given(self, model: Model, examples: Examples) -> list[GivenScores]:
        """Draws of a chain's scores on examples that have further tuples."""
        data = examples.rows, examples.y, examples.encoder.pad_row, BATCH_TOKENS["weights"]
        found, draws = [], model.draws(self.n_draws)
        for batch in make_batches(*data, examples.weights):
            batch = examples.as_graphs(batch)
            scores = draws.potentials(self.plan.structure.value, batch).scores
            given = (*scores[:2], *[None] * (len(scores) - 2))
            found.append(GivenScores(self.plan.structure.value, batch, given))
        return found

    def tables(self, which: Sequence[int]) -> dict[str, Any]:
        """The further tables, learned from some of the parts. Every sequence counts once: the data weight
        is for scores that were learned on the same sequences."""
        tables, data = self._new_tables(), [given for k in which for given in self.parts[k].data]
        optimizer = self.chain.optimizer.value
        assert isinstance(optimizer, SecondOrder)
        logger.info("learning tables from left-out sequences: %s", ", ".join(tables))
        generator = torch.Generator().manual_seed(self.seed)
        fit_tables(tables, data, generator, learn=bool(optimizer.learn_scales))
        return tables

    def start(self, plan: Plan, generator: torch.Generator) -> Start:
        """The start of the fit to all sequences, in which the chain alone is fitted and the tables stay as
        they are. plan : as ``choose`` has settled it."""
        chains = self.examples.as_chains()
        chain = start_of(self.options, self.chain, chains, generator)
        whole = Posterior({**dict(chain.posterior.items()), **self.learned})
        return replace(chain, posterior=whole, plan=plan, within=chain)

    def expected(self, found: dict[str, Any]) -> dict[str, Any]:
        """What to expect of the model, in place of what cross-validation found for the chain: each part is
        judged with tables that were learned from the other parts, until ``ENOUGH`` tokens have been judged.
        The threshold of spans stays the chain's: these fits have more data than the folds that gave the
        threshold, and would expect a higher F1 for that reason alone."""
        judged: list[Predictions] = []
        fitted: list[int] = []
        n_tokens = 0
        for k, part in enumerate(self.parts):
            if n_tokens >= ENOUGH:
                break
            fold, rest = part.fold, [n for n in range(len(self.parts)) if n != k]
            model = self._with(part.model, self.tables(rest))
            question = Question(held_out.ANSWER_DRAWS, None, self.chain.device.value)
            asked = Asked(model, question, fold.left_out.rows, fold.left_out.links)
            judged.append(Predictions(*fold.judge(asked.marginals(), fold.judged).T))
            fitted.append(fold.examples.n_tokens)
            n_tokens += fold.n_judged
        if not n_tokens:
            return found
        at, told = joined(judged), found["learning_curve"]
        shrinks = Curve(told["slope"], told["error"]).shrinks(
            float(np.mean(fitted)), self.examples.n_tokens
        )
        return found | {
            "token_nll": shrinks * at.loss,
            "token_error": shrinks * (1 - at.mean("right")),
            "learning_curve": told | {"nll_of_folds": at.loss},
            "confidence": at.mean("confidence"),
            "accuracy": at.mean("right"),
            "verdict": at.verdict,
            "error_ratio": list(at.error_ratio),
            "n_tokens": n_tokens,
            "n_folds": len(judged),
        }
