"""How often the data count: what the weight means, how it is chosen, and where it is not."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.special
import torch
from benchmarks.generate import Generated, generate

import structgp
from structgp import (
    Adam,
    Custom,
    Inducing,
    InputError,
    Minibatch,
    Mixture,
    Prior,
    SecondOrder,
    StructuredGPClassifier,
)
from structgp.answers.ask import Asked
from structgp.data.batch import flat_tokens
from structgp.data.examples import Examples, read_examples
from structgp.data.shards import read_sharded, write
from structgp.gp.kernels import RelevanceKernel, active_features, covariance
from structgp.gp.kernels.kernel_json import describe, rebuild
from structgp.gp.kernels.relevance import HEAVY_TAILS, LIGHT_TAILS
from structgp.inference import Problem
from structgp.inference.checkpoint import Checkpoint
from structgp.inference.distributed import Processes
from structgp.plan import choices, held_out, start, trials
from structgp.plan.held_out import Fold, Folds
from structgp.plan.learning_curve import Curve
from structgp.plan.options import Options
from structgp.plan.resolve import as_before, resolve
from structgp.plan.start import start_of
from structgp.plan.trials import (
    BySpread,
    Candidate,
    Predictions,
    interpolated,
    lowest,
    lowest_weight,
    narrowest_timid,
    penalised,
    search,
)
from structgp.structures import Chain

choosing = pytest.mark.held_out


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(6, n_labels=2, mean_length=5, n_templates=2, n_values=9, strength=4.0, seed=3)


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Two folds and two weights, 2 and 1."""
    with pytest.MonkeyPatch.context() as patch:
        cut_into(2, patch)
        patch.setattr(trials, "LARGEST_WEIGHT", trials.USUAL_WEIGHT)
        yield


@pytest.fixture(scope="module")
def examples(data: Generated) -> Examples:
    return read_examples(data.X, data.y)


@pytest.fixture(scope="module")
def chosen(data: Generated) -> StructuredGPClassifier:
    """The default fit, with the real chooser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_out, "choose", CHOOSE)
        return StructuredGPClassifier(n_draws=8).fit(data.X, data.y)


CHOOSE = held_out.choose
"""As it was when this module was imported, before any fixture."""


def same(one: StructuredGPClassifier, other: StructuredGPClassifier) -> bool:
    a, b = (e.model_.posterior.state_dict() for e in (one, other))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def weight_of(model: StructuredGPClassifier) -> float:
    value: float = model.training_log_["plan"]["data_weight"]["value"]
    return value


def predictions(loss: float, n: int = 4, confidence: float = 0.8) -> Predictions:
    """Right in 80 %."""
    return Predictions(np.full(n, 5.0), np.full(n, 5 * loss), np.full(n, 5 * confidence), np.full(n, 4.0))


def judged(*nll: float) -> Predictions:
    """Of sequences of one token, with these losses."""
    ones = np.ones(len(nll))
    return Predictions(ones, np.array(nll), ones, ones)


def bold(found: Predictions) -> Predictions:
    """The same, surer than they are right."""
    return replace(found, right=0.5 * found.tokens)


def timid(found: Predictions, doubt: float = 0.5) -> Predictions:
    """The same, all right and yet with so many errors expected."""
    return replace(found, confidence=found.tokens - doubt / len(found.tokens))


# -- what the weight means ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters",
    [{}, {"posterior": "inducing"}, {"inference": Minibatch(learning_rounds=1, tolerance=100.0)}],
)
def test_it_multiplies_like_sample_weights(parameters: dict[str, Any], data: Generated) -> None:
    times = np.array([1.0, 2, 1, 1, 1, 0.5])

    def fit(weight: float, sample_weight: Any) -> StructuredGPClassifier:
        model = StructuredGPClassifier(prior=Prior(data_weight=weight), n_draws=4, **parameters)
        return model.fit(data.X, data.y, sample_weight=sample_weight)

    assert same(fit(2, times), fit(1, 2 * times))
    assert not same(fit(2, times), fit(1, times))


def test_the_pilot_counts_as_the_fit_does(monkeypatch: pytest.MonkeyPatch, data: Generated) -> None:
    monkeypatch.setattr("structgp.plan.pilot.TOKENS", 10)
    dense = [np.random.default_rng(len(x)).normal(size=(len(x), 2)) for x in data.X]
    one = StructuredGPClassifier(prior=Prior(data_weight=4), posterior="inducing").fit(dense, data.y)
    other = StructuredGPClassifier(prior=Prior(data_weight=1), posterior="inducing")
    other.fit(dense, data.y, sample_weight=np.full(6, 4.0))
    assert one.training_log_["pilot"] is not None
    assert same(one, other)


def test_tolerances_are_per_counted_sequence(cases: Any) -> None:
    """A round that changes the bound by 1 nat ends a fit of 6 sequences that count 10 times each, but not
    one of 6 that count once."""
    problem = cases.make_problem(cases.Regression(3), n_sequences=6)
    assert (problem.n_sequences, problem.n_counted) == (6, 6.0)
    batches = [replace(b, weight=torch.full((len(b),), 10.0)) for b in problem.batches]
    heavy = Problem(problem.posterior, problem.structure, batches)
    assert (heavy.n_sequences, heavy.n_counted) == (6, 60.0)
    for one, converged in ((problem, False), (heavy, True)):
        optimizer = SecondOrder(4, tolerance=1 / 30, learn_scales=False)
        cases.finish(replace(optimizer, tolerance=1e-6), one)
        state = optimizer.start(one, torch.Generator().manual_seed(0))
        _, info = optimizer.step(one, replace(state, iteration=1, elbo=0.0))
        _, info = optimizer.step(one, replace(state, iteration=1, elbo=info.elbo + 1))
        assert info.converged == converged


# -- how it is chosen ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "weight", "tries"),
    [
        ({1: 0.4, 2: 0.5, 8: 0.6}, 1.0, [1, 2, 8]),
        ({1: 0.6, 2: 0.5, 8: 0.7}, 2**1.25, [1, 2, 8]),  # slopes -.1 at 2^.5 and .1 at 2^2
        ({1: 0.9, 8: 0.6, 32: 0.8}, 2**2.75, [1, 8, 32]),  # slopes -.1 at 2^1.5 and .1 at 2^4
        ({1: 0.9, 8: 0.5, 32: 0.45, 128: 0.4}, 128.0, [1, 8, 32, 128]),
    ],
)
def test_search_and_parabola(
    losses: dict[int, float], weight: float, tries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "LARGEST_WEIGHT", 128.0)
    n, (tried,) = search(lambda candidate, k: {1.0: predictions(losses[int(candidate.data_weight)])})
    assert n == 0
    assert list(tried) == tries
    assert lowest_weight({w: p[1.0].loss for w, p in tried.items()}) == pytest.approx(weight, rel=2e-3)


@pytest.mark.parametrize(
    ("losses", "tries"),
    [
        ({8: 0.6, 32: 0.5, 128: 0.55}, [8, 32, 128]),
        ({1: 0.7, 8: 0.6, 32: 0.65}, [1, 8, 32]),
        ({1: 0.4, 2: 0.5, 8: 0.6, 32: 0.65}, [1, 2, 8, 32]),
    ],
)
def test_larger_weights_come_first_where_confidence_is_too_low(
    losses: dict[int, float], tries: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "LARGEST_WEIGHT", 128.0)
    _, (tried,) = search(lambda c, k: {1.0: predictions(losses[int(c.data_weight)], confidence=0.7)})
    assert list(tried) == tries


@pytest.mark.parametrize("spread", [0.0, 1.0], ids=["clearly worse", "not clearly worse"])
def test_of_several_shapes_the_best_one_goes_on(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is clearly worse under the first weight is not tried under a second one."""
    monkeypatch.setattr(trials, "LARGEST_WEIGHT", 128.0)
    losses = {("a", 1): 0.5, ("a", 8): 0.6, ("b", 1): 0.7, ("b", 8): 0.4, ("b", 32): 0.45}
    variants = [Candidate(shape=SimpleNamespace(name=name)) for name in "ab"]  # type: ignore[arg-type]

    def predict(candidate: Candidate, k: int) -> dict[float, Predictions]:
        name = candidate.told["shape"]
        found = predictions(losses[name, int(candidate.data_weight)])
        nll = found.nll + spread * np.array([2.0, -2, 2, -2]) * (name == "a")
        return {1.0: replace(found, nll=nll)}

    n, tried = search(predict, variants)
    assert n == 1
    assert [list(found) for found in tried] == [[1, 8] if spread else [8], [1, 8, 32]]


def test_what_is_clearly_worse_after_a_fold_goes_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it would predict of the others is as much worse per token than what the best does."""
    monkeypatch.setattr(trials, "LARGEST_WEIGHT", 128.0)
    asked: list[tuple[float, int]] = []

    def predict(candidate: Candidate, k: int) -> dict[float, Predictions]:
        asked.append((candidate.data_weight, k))
        worse = {1.0: 0.2, 2.0: 0.1, 8.0: 0.0, 32.0: 0.1}[candidate.data_weight]
        nll = 4 * (worse + np.array([0.3, 0.5, 0.4, 0.6]) + 0.1 * k)
        nll += np.array([3.0, -3, 3, -3]) * (candidate.data_weight == 32)  # not clearly worse
        return {1.0: Predictions(np.full(4, 4.0), nll, np.full(4, 3.6), np.full(4, 3.0))}

    _, (tried,) = search(predict, n_folds=3)
    assert sorted(asked) == [(1.0, 0), *((w, k) for w in (8.0, 32.0) for k in range(3))]
    assert {w: round(p[1.0].loss, 9) for w, p in tried.items()} == {1.0: 0.75, 8.0: 0.55, 32.0: 0.65}
    assert all(len(p[1.0].tokens) == 12 for p in tried.values())


def test_folds_that_are_taken_from_another_trial_stay_possible() -> None:
    """A trial may be worse, and right more often: elsewhere all tokens cannot be right and some more."""
    tokens = np.full(3, 40.0)
    theirs, mine = (
        Predictions(tokens, loss * tokens, 0.9 * tokens, p * tokens, np.ones(3), np.full(3, p))
        for loss, p in ((0.5, 0.8), (0.1, 1.0))
    )
    found = mine.moved(mine, theirs)
    assert (found.nll == 0).all()
    assert (found.right == tokens).all()
    assert (found.confidence == 0.9 * tokens).all()
    assert (found.unseen_doubt == found.unseen).all()
    assert all(np.isfinite(found.error_ratio))
    assert found.moved(theirs, mine).loss == pytest.approx(0.4)


def cut_into(n: int, patch: pytest.MonkeyPatch) -> None:
    """So many folds, however few the data."""
    for name in ("N_FOLDS", "MOST_FOLDS"):
        patch.setattr(held_out, name, n)


def test_few_sequences_have_to_tell_more_clearly() -> None:
    """By Student's t: nothing from one sequence, and of two they have to be further apart than of 20."""
    for n in (2, 20):
        times = float(scipy.special.stdtrit(n - 1, 1 - 1 / trials.ONE_IN))
        away = np.where(np.arange(n) % 2, 1.0, -1.0)  # standard error of the mean 1 / sqrt(n - 1)
        for share, worse in ((0.95, False), (1.05, True)):
            nll = 1 + away + share * times / (n - 1) ** 0.5
            found = [Predictions(np.ones(n), x, np.ones(n), np.ones(n)) for x in (nll, np.ones(n))]
            assert found[0].is_clearly_worse(found[1]) == worse
    assert not judged(9.0).is_clearly_worse(judged(1.0))
    alone = np.array([5.0, 0, 0, 0])  # nor where one of four has tokens that count
    found = [Predictions(alone, loss * alone, alone, alone) for loss in (9.0, 1.0)]
    assert not found[0].is_clearly_worse(found[1])


def test_far_weights_have_to_be_clearly_better() -> None:
    """A tenth of a standard error for each factor 4 from the usual weight, under the same spread."""
    nll = {1.0: [1.0, 3, 2, 2], 2.0: [2.0, 2, 2, 2], 8.0: [1.0, 2, 1, 2], 32.0: [1.0, 2, 1, 1]}
    tried = {w: {1.0: judged(*x)} for w, x in nll.items()}
    # Differences from the usual weight: -1, 1, 0, 0; -1, 0, -1, 0; and -1, 0, -1, -1.
    errors = {1.0: 2**0.5 / 4, 2.0: 0.0, 8.0: 1 / 4, 32.0: 0.75**0.5 / 4}
    steps = {1.0: 0.5, 2.0: 0.0, 8.0: 1.0, 32.0: 2.0}
    for weight, loss in penalised(tried)[1.0].items():
        assert loss == pytest.approx(tried[weight][1.0].loss + 0.1 * steps[weight] * errors[weight])


def test_narrower_draws_have_to_be_better_by_a_standard_error() -> None:
    """For each factor 4 in their variance, beyond the narrowest ones that are no surer than right."""
    clearly, hardly = judged(0.0, 2, 2, 2), judged(0.0, 3, 2, 2)
    for is_timid in (False, True):
        for narrow, spread in ((clearly, 0.5), (hardly, 0.5 if is_timid else 1.0)):
            tried = {2.0: {1.0: bold(judged(2.0, 2, 2, 2)), 0.5: (timid if is_timid else bold)(narrow)}}
            assert lowest(tried) == (2.0, spread)
    wide, narrow = bold(judged(2.0, 2, 2, 2)), bold(clearly)
    error = 3**0.5 / 4  # of differences -2, 0, 0, 0
    losses = penalised({2.0: {1.0: wide, 0.5: narrow, 0.25: narrow}})
    assert losses[0.5][2.0] == pytest.approx(1.5 + error)
    assert losses[0.25][2.0] == pytest.approx(1.5 + 2 * error)
    losses = penalised({2.0: {1.0: wide, 0.5: timid(judged(2.0, 2, 2, 2)), 0.25: narrow}})
    assert losses[1.0][2.0] == losses[0.5][2.0] == 2
    assert losses[0.25][2.0] == pytest.approx(1.5 + error)


def test_tokens_that_are_all_right_do_not_vouch_for_certainty() -> None:
    """Unless they leave half an error to be expected."""
    at = judged(2.0, 2, 2, 2)
    assert narrowest_timid({1.0: timid(at), 0.5: timid(at, 0.6), 0.25: timid(at, 0.4), 0.1: at}) == 0.5
    assert narrowest_timid({1.0: at, 0.5: at}) == 1.0


def test_tails_are_kept_with_the_weight_that_was_chosen_for_them(examples: Examples) -> None:
    plan = resolve(Options(), examples)
    info = {"plan": {"tails": {"value": 8.0}, "data_weight": {"value": 3.0}}}
    assert as_before(plan, Options(), info).tails == 8.0
    assert as_before(plan, Options(), {}).tails is None
    assert as_before(plan, Options(prior=Prior(data_weight=1.0)), info).tails is None


def test_larger_weights_are_not_tried_without_errors_to_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "LARGEST_WEIGHT", 2048.0)
    asked = []

    def predict(candidate: Candidate, fold: int) -> BySpread:
        asked.append(candidate.data_weight)
        loss = 1 / candidate.data_weight
        return {1.0: timid(judged(loss, loss, loss), 17 * loss)}  # half an error at 32, fewer beyond

    search(predict)
    assert max(asked) == 128


@choosing
def test_the_spread_is_the_models_and_a_number_is_kept(data: Generated, tmp_path: Path) -> None:
    model = StructuredGPClassifier(prior=Prior(data_weight=2, spread=0.5), n_draws=8).fit(data.X, data.y)
    assert model.model_.spread == 0.5
    assert model.training_log_["plan"]["spread"] == {"value": 0.5, "reason": "asked for"}
    wide = StructuredGPClassifier(prior=Prior(data_weight=2), n_draws=8).fit(data.X, data.y)
    assert same(model, wide)
    assert wide.model_.spread == 1.0
    model.save(tmp_path / "model")
    again = structgp.load(tmp_path / "model")
    assert again.predict_marginals(data.X) == model.predict_marginals(data.X)
    assert again.predict_marginals(data.X) != wide.predict_marginals(data.X)
    tried = StructuredGPClassifier(prior=Prior(spread=0.5), n_draws=8).fit(data.X, data.y).held_out_
    assert tried is not None
    assert {t["spread"] for t in tried["tried"]} == {0.5}
    more = again.set_params(prior=Prior()).partial_fit(data.X[:2], data.y[:2])
    assert more.model_.spread == 0.5


def test_figures_between_two_weights() -> None:
    tried = {1.0: predictions(0.6), 4.0: predictions(0.4), 16.0: predictions(0.5)}
    assert interpolated(tried, 2.0).loss == pytest.approx(0.5)
    assert interpolated(tried, 8.0).loss == pytest.approx(0.45)
    for weight, found in tried.items():
        assert interpolated(tried, weight).loss == pytest.approx(found.loss)
    assert interpolated({1.0: predictions(0.6)}, 1.0).loss == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("sure", "right", "words"),
    [
        ([8, 8, 8, 8], [9, 9, 9, 9], "Confidence is too low: 80% sure on average, right in 90%."),
        ([9, 9, 9, 9], [8, 8, 8, 8], "Confidence is too high: 90% sure on average, right in 80%."),
        ([8, 8, 8, 8], [8.1] * 4, "Confidence fits: 80% sure on average, right in 81%."),
        ([8, 8, 8, 8], [10, 10, 10, 6], "Confidence fits: 80% sure on average, right in 90%."),
    ],
)
def test_the_verdict_knows_its_error(sure: list[float], right: list[float], words: str) -> None:
    found = Predictions(np.full(4, 10.0), np.zeros(4), np.array(sure), np.array(right))
    assert found.verdict == words


def test_features_that_a_fold_lacks_are_like_unseen_ones(data: Generated, examples: Examples) -> None:
    """A part keeps the whole encoder; its prior is that of an encoder that knows the part alone."""
    rest = [0, 2, 3]
    own = read_examples([data.X[i] for i in rest], [data.y[i] for i in rest])
    kernels = []
    for found in (examples.part(rest), own):
        start = start_of(Options(), resolve(Options(), found), found, torch.Generator())
        tokens = flat_tokens(found.encoder.transform(data.X[1:2]))
        kernels.append(covariance(start.posterior.node.kernel, tokens, tokens))
    torch.testing.assert_close(*kernels)
    assert own.encoder.values != examples.encoder.values


def test_what_a_fold_lacks_stays_at_its_prior(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    fold = Fold(Options(), resolve(Options(), examples), examples.part([1]), examples.part([0]))
    models: list[Any] = []
    monkeypatch.setattr(held_out, "Asked", lambda model, *rest: models.append(model) or Asked(model, *rest))
    fold.predict(Candidate(4.0), (1.0,))
    node = models[0].posterior.node
    found = torch.unique(active_features(node.kernel, torch.from_numpy(examples.rows[1])).place)
    absent = torch.ones(node.n_values, dtype=torch.bool)
    absent[found[found >= 0]] = False
    assert 0 < absent.sum() < node.n_values - 3
    assert (node.m[:, absent] == 0).all()
    assert (node.factor[:, absent] == 1).all()
    assert (node.kernel.log_relevance[absent[:-1]] == 0).all()
    assert not (node.m[:, ~absent] == 0).all()


def test_errors_per_expected_error() -> None:
    tokens = np.full(50, 20.0)
    wrong = np.random.default_rng(0).poisson(2.0, size=50).astype(float)
    ratio, error = Predictions(tokens, tokens, np.full(50, 16.0), tokens - wrong).error_ratio
    assert ratio == pytest.approx((wrong.sum() + 0.5) / 200.5)
    assert error == pytest.approx(0.1, rel=0.3)  # of a hundred errors
    more = Predictions(tokens, tokens, np.full(50, 16.0), tokens - wrong, np.ones(50), np.full(50, 0.5))
    assert more.error_ratio[0] == pytest.approx((wrong.sum() + 50.5) / 225.5)
    ratio, error = Predictions(tokens, tokens, np.full(50, 16.0), tokens).error_ratio
    assert 0 < ratio < 0.01
    assert error > 1  # none: it may be anything small


@choosing
def test_losses_are_those_of_refits_with_sample_weights(
    data: Generated, examples: Examples, chosen: StructuredGPClassifier
) -> None:
    """The same folds by hand, through the public API."""
    options = Options()
    parts = list(held_out._parts(options, resolve(options, examples), examples))
    assert sorted(i for left_out, *_ in parts for i in left_out) == list(range(6))
    assert chosen.held_out_ is not None
    for tried in (t for t in chosen.held_out_["tried"] if t["spread"] in (1.0, 0.5)):
        losses = []
        for left_out, rest, is_needed in parts:
            assert is_needed
            # Which feature is a word is decided on all data, and there none is.
            prior = Prior(data_weight=1.0, spread=tried["spread"])
            model = StructuredGPClassifier(prior=prior, n_draws=256, word_parts=None)
            weights = np.full(len(rest), tried["data_weight"])
            model.fit([data.X[i] for i in rest], [data.y[i] for i in rest], sample_weight=weights)
            for i in left_out:
                p = model.predict_marginals([data.X[i]])[0]
                losses += [-np.log(q[label]) for q, label in zip(p, data.y[i], strict=True) if label in q]
        assert np.mean(losses) == pytest.approx(tried["token_nll"], rel=0.1)
        assert len(losses) == chosen.held_out_["n_tokens"]


def test_the_choice_is_the_lowest_and_has_its_reason(chosen: StructuredGPClassifier) -> None:
    found, plan = chosen.held_out_, chosen.training_log_["plan"]["data_weight"]
    assert found is not None
    spread = chosen.model_.spread
    assert spread == chosen.training_log_["plan"]["spread"]["value"]
    losses = {t["data_weight"]: t["token_nll"] for t in found["tried"] if t["spread"] == spread}
    assert min(losses) <= plan["value"] == lowest_weight(losses) <= max(losses)
    assert plan["reason"].startswith("predicts left-out training data best: ")
    curve = found["learning_curve"]
    assert min(losses.values()) <= curve["nll_of_folds"] < max(losses.values())
    assert found["token_nll"] == pytest.approx(curve["nll_of_folds"] * 2 ** -curve["slope"], rel=0.1)
    assert found["token_error"] <= 1 - found["accuracy"]
    assert found["verdict"].startswith("Confidence ")
    assert found["n_folds"] == held_out.N_FOLDS


@choosing
def test_nothing_else_changes(data: Generated, chosen: StructuredGPClassifier, tmp_path: Path) -> None:
    """The fit is that with the weight as a number; the folds call nobody, write nothing, and leave all
    random numbers alone."""
    before = torch.get_rng_state()
    prior = Prior(data_weight=weight_of(chosen), spread=chosen.model_.spread)
    number = StructuredGPClassifier(prior=prior, n_draws=8)
    assert same(number.fit(data.X, data.y), chosen)
    assert number.held_out_ is None
    steps: list[Any] = []
    again = StructuredGPClassifier(n_draws=8)
    again.fit(data.X, data.y, callback=steps.append, checkpoint=tmp_path / "checkpoint")
    assert same(again, chosen)
    assert len(steps) == len(chosen.training_log_["steps"])
    assert torch.equal(before, torch.get_rng_state())
    one, other = ({k: v for k, v in m.held_out_.items() if k != "seconds"} for m in (again, chosen))  # type: ignore[union-attr]
    assert one == other
    assert not list(tmp_path.iterdir())


@choosing
def test_a_fit_that_was_cut_off_goes_on_with_the_same_weight(
    data: Generated, chosen: StructuredGPClassifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("structgp.plan.run.Checkpoint", partial(Checkpoint, seconds=0.0))

    def die(info: Any) -> None:
        if info.iteration == 2:
            raise KeyboardInterrupt

    path = tmp_path / "checkpoint"
    with pytest.raises(KeyboardInterrupt):
        StructuredGPClassifier(n_draws=8).fit(data.X, data.y, callback=die, checkpoint=path)
    assert path.exists()
    steps: list[Any] = []
    model = StructuredGPClassifier(n_draws=8)
    model.fit(data.X, data.y, callback=steps.append, checkpoint=path)
    assert steps[0].iteration > 0
    assert same(model, chosen)


@choosing
def test_dense_features(data: Generated) -> None:
    dense = [np.eye(9)[[int(token[0][1:]) for token in x]] for x in data.X]
    model = StructuredGPClassifier(n_draws=8).fit(dense, data.y)
    log, found = model.training_log_, model.held_out_
    assert log["posterior"] == "weights"
    assert found is not None
    tried = ((t["shape"], t["data_weight"], t["token_nll"]) for t in found["tried"])
    losses: dict[Any, float] = {}
    for shape, weight, loss in tried:
        losses[shape, weight] = min(loss, losses.get((shape, weight), np.inf))
    assert set(losses) >= {(shape, w) for shape in ("bound", "regression") for w in (1.0, 8.0)}
    chosen = "bound" if log["pilot"] else "regression"
    assert log["plan"]["shape"]["value"] == chosen
    assert (log["relaxation"] is None) == (chosen == "bound")
    best = min(losses, key=lambda tried: losses[tried])
    assert best[0] == chosen
    assert losses[best] <= found["learning_curve"]["nll_of_folds"] < max(losses.values())


@choosing
def test_labels_that_a_fold_lacks_and_missing_ones_are_not_judged() -> None:
    X = [[["a"], ["b"]], [["a"], ["b"]], [["a"], ["c"]], [["a"], ["b"]], [["a"], ["b"]]]
    y = [["A", "B"], ["A", "B"], ["A", "C"], ["A", None], ["A", "B"]]
    model = StructuredGPClassifier(n_draws=4).fit(X, y)
    assert model.held_out_ is not None
    assert model.held_out_["n_tokens"] == 8
    apart = StructuredGPClassifier(n_draws=4).fit([[[v]] for v in "abcde"], [[v] for v in "ABCDE"])
    assert apart.held_out_ is None
    assert apart.training_log_["plan"]["data_weight"]["reason"].startswith("no label occurs in two parts")


@choosing
@pytest.mark.parametrize("by_weight", [False, True])
def test_the_first_fold_has_something_to_judge(by_weight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where labels of a fold occur nowhere else, or its sequences do not count."""
    cut_into(3, monkeypatch)
    order = np.random.default_rng(0).permutation(9)
    first, letters = set(order[:3].tolist()), "AB"
    X = [[[v, v.lower()] for v in letters] for _ in order]
    y = [[f"{v}{i}" if i in first and not by_weight else v for v in letters] for i in range(9)]
    weights = np.array([float(i not in first) for i in range(9)]) if by_weight else None
    model = StructuredGPClassifier(n_draws=4).fit(X, y, sample_weight=weights)
    assert model.held_out_ is not None
    assert model.held_out_["n_tokens"] == 12


def test_smaller_training_sets_are_cut_into_more_folds(
    examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the most from half as many tokens on as are enough; into no more than there are sequences."""
    monkeypatch.setattr(held_out, "N_FOLDS", 3)
    monkeypatch.setattr(held_out, "MOST_FOLDS", 6)
    n, plan = sum(len(rows) for rows in examples.rows), resolve(Options(), examples)
    for enough, wanted in ((n, 3), (4 * n // 3, 4), (2 * n, 6), (9 * n, 6)):
        monkeypatch.setattr(held_out, "CHEAP", (enough, 10 * n))
        folds = Folds(Options(), plan, examples).folds
        assert len(folds) == wanted
        assert sum(len(fold.left_out.rows) for fold in folds) == len(examples.rows)


def test_how_many_folds(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve(Options(), examples)
    cut_into(5, monkeypatch)
    assert len(Folds(Options(), plan, examples).folds) == 5
    assert len(Folds(Options(), plan, examples.part([0, 1, 2])).folds) == 3
    monkeypatch.setattr(held_out, "CHEAP", (6, 5))
    monkeypatch.setattr(held_out, "COSTLY", (1000, 5))
    few = Folds(Options(), plan, examples)
    assert len(few.folds) < 5
    left_out = [sum(len(rows) for rows in fold.left_out.rows) for fold in few.folds]
    assert sum(left_out) >= 6 > sum(left_out[:-1])
    inducing = Options(posterior="inducing")
    assert len(Folds(inducing, resolve(inducing, examples), examples).folds) == 5
    for fold in few.folds:
        lengths = [len(rows) for rows in fold.examples.rows]
        assert 5 <= sum(lengths) < 5 + max(lengths)
    firsts = {
        tuple(Folds(Options(random_state=n), plan, examples).folds[0].left_out.rows[0][0]) for n in range(6)
    }
    assert len(firsts) > 1


def test_a_second_look_at_the_spread_of_dense_features(
    data: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folds beyond those that have left out enough are asked where the best spread was not taken."""
    cut_into(3, monkeypatch)
    monkeypatch.setattr(held_out, "DENSE", (1, 1_000))
    dense = read_examples([np.eye(9)[[int(token[0][1:]) for token in x]] for x in data.X], data.y)
    plan = resolve(Options(), dense)
    folds = Folds(Options(), plan, dense)
    assert [len(folds.folds), len(folds.further)] == [1, 2]
    asked: list[tuple[Fold, list[float]]] = []

    def predict(fold: Fold, _: Candidate, spreads: list[float]) -> list[np.ndarray]:
        asked.append((fold, spreads))
        return [np.array([[1.0, 2 * spread, 1, 1, 0, 0]] * len(fold.left_out.rows)) for spread in spreads]

    monkeypatch.setattr(Fold, "predict", predict)
    found = {1.0: judged(0.2, 0.2), 0.5: judged(0.1, 0.1)}
    assert folds.look_again(Candidate(), found, 0.5) is None  # which is the best already
    assert not asked
    again, further = folds.look_again(Candidate(), found, 1.0), folds.further
    assert again is not None
    assert [spreads for _, spreads in asked] == [[1.0, 0.5]] * 2
    assert [fold for fold, _ in asked] == folds.folds[1:]
    assert not further
    n = sum(len(fold.left_out.rows) for fold, _ in asked)
    assert {spread: p.nll.tolist() for spread, p in again.items()} == {
        1.0: [0.2, 0.2] + [2.0] * n, 0.5: [0.1, 0.1] + [1.0] * n
    }  # fmt: skip
    assert folds.look_again(Candidate(), found, 1.0) is None  # nobody is left to ask
    sparse = read_examples(data.X, data.y)
    assert not Folds(Options(), resolve(Options(), sparse), sparse).further


def test_long_sequences_are_not_judged_by_a_handful_of_them(
    examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "CHEAP", (1, 1_000))
    plan = resolve(Options(), examples)
    assert [len(fold.left_out.rows) for fold in Folds(Options(), plan, examples).folds] == [3]  # all of it
    monkeypatch.setattr(held_out, "FEWEST_LEFT_OUT", 1)
    assert [len(fold.left_out.rows) for fold in Folds(Options(), plan, examples).folds] == [1]


def test_transitions_with_features_need_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    X = [[["a", "x"]], [["b", "x"]], [["a", "x"], ["b", "y"]]]
    y = [["A"], ["B"], ["A", "B"]]
    cut_into(5, monkeypatch)
    found = read_examples(X, y)
    options = Options(structure=structgp.chain(["1"]))
    folds = Folds(options, resolve(options, found), found)
    assert len(folds.folds) == 2  # not the one that leaves out the only transition
    CHOOSE(options, resolve(options, found), found)


def test_the_shape_of_a_kernel_is_learned_once_in_a_fold(
    examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And fits begin as if it had been learned by each of them."""
    asked: list[Any] = []
    learn = start.learn_kernel
    monkeypatch.setattr(start, "learn_kernel", lambda *given: asked.append(given) or learn(*given))
    options = Options(kernel="template", posterior="inducing")
    plan = resolve(options, examples)
    rest, left_out = examples.part([0, 1, 2, 3]), examples.part([4, 5])
    fold = Fold(options, plan, rest, left_out)
    found = [fold.predict(Candidate(weight), (1.0,))[0] for weight in (1.0, 2.0)]
    assert len(asked) == 1
    alone = Fold(options, plan, rest, left_out).predict(Candidate(2.0), (1.0,))[0]
    assert len(asked) == 2
    np.testing.assert_array_equal(found[1], alone)


def test_trials_of_a_kernel_that_is_not_learned_are_brief(examples: Examples) -> None:
    for learns in (True, False):
        options = Options(kernel="template", prior=Prior(learn_kernel=learns))
        optimizer = held_out.shorter(resolve(options, examples)).optimizer.value
        assert isinstance(optimizer, SecondOrder)
        assert optimizer.brief is not learns


@pytest.mark.parametrize(("N", "most"), [(900, 1_000), (1_500, 1_500), (9_000, 1_000)])
def test_where_that_is_cheap_every_token_may_be_an_inducing_input(N: int, most: int) -> None:
    assert choices.n_inducing_of(Inducing(), None, SecondOrder(), 2, N).value == most
    assert choices.n_inducing_of(Inducing(n_inducing=7), None, SecondOrder(), 2, N).value == 7
    assert choices.n_inducing_of(Inducing(), None, Adam(), 2, N).value == 1_000


def test_folds_have_the_inducing_inputs_of_the_plan(
    examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fit cannot afford all tokens, folds do not have all of theirs either."""
    monkeypatch.setattr(choices, "N_INDUCING", 3)
    monkeypatch.setattr(choices, "ALL_TOKENS_WORK", 0.0)
    options = Options(kernel="template", posterior="inducing")
    plan = resolve(options, examples)
    begun = start.start_of(options, plan, examples.part([0, 1, 2, 3]), torch.Generator())
    assert begun.posterior.node.n_values == plan.n_inducing.value == 3


def test_a_fit_to_half_of_a_fold(examples: Examples) -> None:
    """The same sequences left out; labels that the half lacks do not count in either fit."""
    plan = resolve(Options(), examples)
    fold = Fold(Options(), plan, examples.part([0, 1, 2, 3]), examples.part([4, 5]))
    half = fold.half()
    assert half is not None
    assert half.left_out is fold.left_out
    assert 0.5 <= half.examples.n_tokens / fold.examples.n_tokens < 1
    assert Fold(Options(), plan, examples.part([0]), examples.part([1])).half() is None
    folds = Folds(Options(), plan, examples)
    for k in range(len(folds.folds)):
        folds.predict((0.5,), Candidate(2.0), k)
    asked = [fold.half() for fold in folds.folds]
    few = [half.predict(Candidate(2.0), (0.5,))[0] for half in asked if half is not None]
    many = [fold.predict(Candidate(2.0), (0.5,))[0] for fold in folds.folds]
    curve = folds.curve(Candidate(2.0), 0.5)
    assert curve is not None
    both = (Predictions(*np.concatenate(sums).T) for sums in (few, many))
    counts = [
        np.mean([part.examples.n_tokens for part in parts if part is not None])
        for parts in (asked, folds.folds)
    ]
    assert curve == Curve.through(*both, *counts)  # type: ignore[arg-type, call-arg]


def test_folds_answer_as_the_model_will(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 joint draws would raise the loss."""
    plan, asked = resolve(Options(), examples), []
    monkeypatch.setattr(
        held_out,
        "Asked",
        lambda model, question, *rest: asked.append(question) or Asked(model, question, *rest),
    )
    for n_draws, local in (("auto", True), (8, False)):
        options = Options(n_draws=n_draws)
        Fold(options, plan, examples.part([1, 2]), examples.part([0])).predict(Candidate(), (1.0,))
        assert asked[-1].local == local


def test_sequences_count_by_their_weights(data: Generated) -> None:
    times = np.array([1.0, 0, 1, 1, 1, 3])
    found = read_examples(data.X, data.y, weights=times)
    folds = Folds(Options(), resolve(Options(), found), found)
    total = sum(folds.predict((1.0,), Candidate(), k)[1.0].tokens.sum() for k in range(len(folds.folds)))
    assert total == sum(len(x) * t for x, t in zip(data.X, times, strict=True))


# -- where it is not chosen ----------------------------------------------------------------------------


def by_hand(f: Any, g: Any, y: Any) -> Any:
    scores = f[:, np.arange(len(y)), y].sum(-1)
    return scores - np.log(np.exp(f).sum(-1)).sum(-1)


class Mine(Chain):
    pass


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"inference": "paper-batch"}, "as in the paper"),
        ({"inference": "natural"}, "the natural fit is not repeated to choose it"),
        ({"inference": "minibatch"}, "the minibatch fit is not repeated to choose it"),
        ({"posterior": Mixture(2)}, "the posterior is a mixture"),
        ({"structure": by_hand}, choices.OWN),
        ({"structure": Mine()}, choices.OWN),
        ({"structure": Custom("chain", predict_with=Mine())}, choices.OWN),
        ({"prior": Prior(data_weight=3)}, "asked for"),
    ],
)
def test_reasons(parameters: dict[str, Any], reason: str, examples: Examples) -> None:
    found = resolve(Options(**parameters), examples).data_weight
    assert found.reason == reason
    assert found.value == (3.0 if reason == "asked for" else 1.0)


def test_few_sequences_and_much_data(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = resolve(Options(), examples.part([0, 1, 2, 3])).data_weight.reason
    assert reason == "there are fewer than 5 sequences"
    monkeypatch.setattr(choices, "MANY_TOKENS", 10)
    assert resolve(Options(), examples).data_weight.value is None  # all weights are still fitted at once
    monkeypatch.setattr(choices, "BATCHWISE_TOKENS", 10)
    for together in (Processes(), Processes(0, 2)):
        found = resolve(Options(), examples, together).data_weight
        assert (found.value, found.reason) == (1.0, "there is much data")


def test_shards(data: Generated, tmp_path: Path) -> None:
    found = read_sharded(write(list(zip(data.X, data.y, strict=True)), tmp_path / "shards"), None)
    assert resolve(Options(), found).data_weight == choices.Choice(1.0, "the data is on disk")
    assert resolve(Options(prior=Prior(data_weight=1)), found).data_weight.value == 1.0
    with pytest.raises(InputError, match=r"^data_weight: 2 is given, and sequences on disk count once"):
        resolve(Options(prior=Prior(data_weight=2)), found)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "much", None])
def test_impossible_weights(value: Any) -> None:
    with pytest.raises(InputError, match=r"^data_weight: must be a number above 0, got"):
        Options(prior=Prior(data_weight=value))


# -- afterwards -----------------------------------------------------------------------------------------


@choosing
def test_fits_that_go_on_keep_it(data: Generated, chosen: StructuredGPClassifier) -> None:
    for method in ("fit", "partial_fit"):
        model = copy.deepcopy(chosen).set_params(warm_start=True)
        forgets = {"remember": False} if method == "partial_fit" else {}
        getattr(model, method)(data.X, data.y, **forgets)
        plan = model.training_log_["plan"]["data_weight"]
        assert plan == {"value": weight_of(chosen), "reason": "as in the earlier fit"}
        assert model.held_out_ is None
        model.set_params(prior=Prior(data_weight=2.0))
        getattr(model, method)(data.X, data.y)
        assert weight_of(model) == 2.0
    old = copy.deepcopy(chosen).set_params(warm_start=True)
    del old.model_.info["plan"]["data_weight"]  # a model of an earlier version
    assert weight_of(old.fit(data.X, data.y)) == 1.0


def test_the_file_keeps_it(data: Generated, chosen: StructuredGPClassifier, tmp_path: Path) -> None:
    chosen.save(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model")
    assert loaded.held_out_ == chosen.held_out_
    assert loaded.prior == Prior()
    assert loaded.predict_marginals(data.X) == chosen.predict_marginals(data.X)
    told = str(structgp.describe(loaded))
    assert told == str(structgp.describe(chosen))
    assert chosen.held_out_ is not None
    assert chosen.held_out_["verdict"] in told
    assert f"data weight   {weight_of(chosen)} (predicts left-out" in told


def test_a_trial_that_goes_astray_is_not_chosen(
    examples: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    folds = held_out.Folds(Options(n_draws=4), resolve(Options(n_draws=4), examples), examples)

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.linalg.LinAlgError("no factor")

    monkeypatch.setattr(held_out, "start_of", fail)
    found = trials.joined([folds.predict((1.0,), Candidate(8.0), k)[1.0] for k in range(len(folds.folds))])
    assert np.isfinite(found.loss)
    assert found.loss > 100
    assert held_out.sums_of(np.full((2, 3), np.nan), np.array([0, 1]), np.ones(2, bool))[1] > 1000


def test_tails_stay_with_the_model() -> None:
    kernel = RelevanceKernel([4], sparse=True, tails=8.0)
    assert rebuild(describe(kernel)).tails == 8.0


@choosing
def test_tails_are_chosen_where_all_features_are_one_group(data: Generated) -> None:
    X = [[{f"{token[0]}": 1.0} for token in x] for x in data.X]
    model = StructuredGPClassifier(n_draws=4).fit(X, data.y)
    assert model.held_out_ is not None
    losses = {(t["tails"], t["data_weight"]): t["token_nll"] for t in model.held_out_["tried"]}
    assert {tails for tails, _ in losses} == {HEAVY_TAILS, LIGHT_TAILS}
    chosen = min(losses, key=lambda tried: losses[tried])[0]
    assert model.training_log_["plan"]["tails"]["value"] == chosen
    assert model.model_.posterior.node.kernel.tails == chosen


def test_tails_of_the_plan_are_those_of_the_kernel(examples: Examples) -> None:
    plan, generator = resolve(Options(), examples), torch.Generator().manual_seed(0)
    for tails, found in ((None, LIGHT_TAILS), (5.0, 5.0)):
        start = start_of(Options(), replace(plan, tails=tails), examples, generator)
        assert start.posterior.node.kernel.tails == found


def test_labels_that_the_fit_has_not_seen_are_counted_apart() -> None:
    p = np.array([[0.7, 0.3, 0.0], [0.6, 0.4, 0.0], [0.2, 0.8, 0.0], [0.5, 0.5, 0.0]])
    y, judged = np.array([0, 2, 0, -1]), np.array([True, False, True, False])
    found = held_out.sums_of(p, y, judged)
    assert found == pytest.approx([2, -np.log(0.7) - np.log(0.2), 1.5, 1, 1, 0.4])


@choosing
def test_trials_under_other_tails_begin_where_the_first_round_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit as if they had begun anew: the first round knows nothing of tails."""
    X = [scipy.sparse.csr_array(np.eye(6)[[i % 6, (i + 2) % 6, (5 * i) % 6]]) for i in range(24)]
    y = [["A" if v else "B" for v in np.argmax(x.toarray(), 1) % 2] for x in X]

    def tried() -> tuple[list[dict[str, Any]], int]:
        rounds = []
        step = SecondOrder.step
        with monkeypatch.context() as patch:
            patch.setattr(SecondOrder, "step", lambda *given: rounds.append(0) or step(*given))
            found = StructuredGPClassifier().fit(X, y).held_out_["tried"]
        return found, len(rounds)

    shared, few = tried()
    assert len({trial["tails"] for trial in shared}) == 2
    monkeypatch.setattr("structgp.plan.first_round.FirstRound.read", lambda *_: None)
    apart, many = tried()
    assert shared == apart
    assert few < many
