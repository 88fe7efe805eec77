"""Fits that go on from others: part by part, from where the last one ended, until dev data says stop."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from benchmarks.generate import Generated, generate
from torch import Tensor

import structgp
import structgp.inference.loop
from structgp import Custom, Inducing, InputError, Mixture, Prior, StructgpWarning, StructuredGPClassifier
from structgp.answers.ask import Model, Question
from structgp.data.batch import Batch
from structgp.data.examples import read_examples
from structgp.gp import Posterior, Table, Weights
from structgp.gp.kernels import RelevanceKernel, weight_variances
from structgp.inference import Minibatch, Problem, SecondOrder
from structgp.inference.loop import PATIENCE, Watch
from structgp.inference.minibatch import known_value
from structgp.plan.grow_posterior import carried_over

K, P, V = 6, 3, 3
Sequences = list[Any]


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(24, n_labels=V, n_values=K, n_templates=P, mean_length=4, strength=2.0, seed=1)


@pytest.fixture(scope="module")
def made_once(data: Generated) -> dict[int, StructuredGPClassifier]:
    """Fits of the first so many sequences."""
    return {n: StructuredGPClassifier(n_draws=4).fit(data.X[:n], data.y[:n]) for n in (16, 24)}


@pytest.fixture
def fitted(made_once: dict[int, StructuredGPClassifier]) -> StructuredGPClassifier:
    """A fit of everything, one's own."""
    return copy.deepcopy(made_once[24])


@pytest.fixture
def begun(made_once: dict[int, StructuredGPClassifier]) -> StructuredGPClassifier:
    """A fit of the first 16 sequences, one's own."""
    return copy.deepcopy(made_once[16])


def dicts(X: Sequences) -> Sequences:
    return [[dict(zip("abc", token, strict=True)) for token in x] for x in X]


def bag(X: Sequences) -> Sequences:
    return [[{f"{p}={v}" for p, v in enumerate(token)} for token in x] for x in X]


def sparse(X: Sequences) -> Sequences:
    found = []
    for x in X:
        rows = np.zeros((len(x), 2 * K * P))
        for t, token in enumerate(x):
            for p, value in enumerate(token):
                rows[t, 2 * (p * K + int(value[1:]))] = 1.0
        found.append(scipy.sparse.csr_matrix(rows))
    return found


def mixed(X: Sequences) -> Sequences:
    return [[{"a": a, "size": 1 + int(b[1:]) / K, "c": [c]} for a, b, c in x] for x in X]


def dense(X: Sequences) -> Sequences:
    return [np.array([[int(v[1:]) / K for v in token] for token in x]) for x in X]


def beside(X: Sequences) -> Sequences:
    """A template, and a vector of two numbers."""
    return [[{"a": a, "vector": np.array([int(v[1:]) / K for v in rest])} for a, *rest in x] for x in X]


FORMS = {"columns": list, "dicts": dicts, "bag": bag, "sparse": sparse, "mixed": mixed}
each_form = pytest.mark.parametrize("form", FORMS)
some_forms = pytest.mark.parametrize("form", ["columns", "sparse", "mixed"])


def split(data: Generated) -> tuple[list[int], list[int]]:
    """Sequences without a certain value, and those with it."""
    rare = f"v{K - 1}"
    later = [i for i, x in enumerate(data.X) if any(rare in token for token in x)]
    first = [i for i in range(len(data.X)) if i not in later]
    assert len(first) > 5
    assert len(later) > 5
    return first, later


def pick(items: Sequences, index: list[int]) -> Sequences:
    return [items[i] for i in index]


def state(model: StructuredGPClassifier) -> dict[str, Tensor]:
    return dict(model.model_.posterior.state_dict())


def same(one: StructuredGPClassifier, other: StructuredGPClassifier) -> bool:
    a, b = state(one), state(other)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- a posterior in a larger world -------------------------------------------------------------------


def gaussian(model: Model, posterior: Posterior, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Means (T, V) and covariances (T, V, T, V) of the labels' scores on one sequence."""
    x, mask = torch.from_numpy(rows)[None], torch.ones(1, len(rows), dtype=torch.bool)
    with torch.no_grad():
        node = posterior.node
        mean, covariance = node.gaussian(node.conditional(x, mask, node.prior_factor()))
        basis = node.basis
        return (mean @ basis.T)[0, 0], torch.einsum("rtu,vr,wr->tvuw", covariance[0, 0], basis, basis)


@each_form
def test_old_tokens_and_labels_are_as_they_were(form: str, data: Generated) -> None:
    """Where no value that was seldom has become common: whatever else is new."""
    change = FORMS[form]
    first, later = split(data)
    model = StructuredGPClassifier(n_draws=4).fit(change(pick(data.X, first)), pick(data.y, first)).model_
    X = change(pick(data.X, later)[:1])
    y = [["new"] * len(data.y[later[0]])]
    examples = read_examples(X, y, encoder=model.encoder, classes=model.labels.classes)
    assert examples.labels.classes == ["L0", "L1", "L2", "new"]
    after = carried_over(model, examples)
    for part, was in zip(after.node.kernel.modules(), model.posterior.node.kernel.modules(), strict=False):
        if isinstance(part, RelevanceKernel) and isinstance(was, RelevanceKernel) and was.rare:
            assert part.seldom.sum() >= was.seldom.sum(), "nothing that was seldom is common now"
    assert isinstance(model.posterior.node, Weights)
    old = change(pick(data.X, first))
    for before, now in zip(model.encoder.transform(old), examples.encoder.transform(old), strict=True):
        mean, covariance = gaussian(model, model.posterior, before)
        new_mean, new_covariance = gaussian(model, after, now)
        torch.testing.assert_close(new_mean[:, :V], mean)
        torch.testing.assert_close(new_covariance[:, :V, :, :V], covariance)
        # Of the new label nothing is known: its mean is 0, and no other label's tells anything of it.
        assert not new_mean[:, V:].any()
        assert not new_covariance[:, :V, :, V:].any()
    (mean, sd), (old_mean, old_sd) = (q["next"].constant_scores() for q in (after, model.posterior))
    torch.testing.assert_close(mean[:V, :V], old_mean)
    torch.testing.assert_close(sd[:V, :V], old_sd)
    assert not mean[V:].any()
    assert not mean[:, V:].any()
    torch.testing.assert_close(sd[V:], torch.full((1, V + 1), after["next"].prior_sd).double())
    assert after["next"].prior_sd == pytest.approx(model.posterior["next"].prior_sd)


def test_new_labels_are_as_wide_as_old_ones(data: Generated, fitted: StructuredGPClassifier) -> None:
    model = fitted.model_
    y = [["new"] * len(data.y[0]), ["other"] * len(data.y[1])]
    examples = read_examples(data.X[:2], y, encoder=model.encoder, classes=model.labels.classes)
    basis = carried_over(model, examples).node.basis
    assert basis.shape == (V + 2, V + 1)
    widths = basis.square().sum(1)
    torch.testing.assert_close(widths[V:], widths[:V].mean().expand(2))
    assert not basis[V, V - 1 + 1 :].any()
    assert not basis[:V, V - 1 :].any()


def test_the_amplitude_comes_along(data: Generated, fitted: StructuredGPClassifier) -> None:
    model = fitted.model_
    with torch.no_grad():
        model.posterior.node.log_amplitude.fill_(0.7)
    examples = read_examples(data.X[:1], data.y[:1], encoder=model.encoder, classes=model.labels.classes)
    assert float(carried_over(model, examples).node.log_amplitude.detach()) == pytest.approx(0.7)


# -- parts that are one whole ------------------------------------------------------------------------


def orthogonal(cases: ModuleType, tokens: list[int], labels: list[int]) -> Problem:
    """One feature a token, and no constant: weights that the data never bind together."""
    kernel = RelevanceKernel([4]).double()
    with torch.no_grad():
        kernel.log_scale.copy_(torch.tensor([0.3, -200.0]))
        kernel.log_relevance.copy_(torch.tensor([0.5, -0.5, 0.0, 1.0]))
    node = Weights(kernel.requires_grad_(False), (V,))
    q = Posterior({"node": node, "next": Table((V, V))})
    x, y = torch.tensor(tokens).double()[:, None, None], torch.tensor(labels)[:, None]
    mask = torch.ones(len(tokens), 1, dtype=torch.bool)
    batch = Batch(x, y, mask, torch.arange(len(tokens)))
    return Problem(q, cases.Regression(V), [batch])


PARTS = [([0, 0, 1, 2], [0, 1, 2, 1]), ([0, 1, 1], [2, 2, 0]), ([3], [1])]


def test_part_by_part_is_all_at_once_where_that_is_exact(cases: ModuleType) -> None:
    """Under a quadratic likelihood and with weights that do not meet, in however many parts."""
    quiet = Minibatch(learn_scales=False, steps=100, tolerance=1e-9)
    whole = orthogonal(cases, *([n for piece in part for n in piece] for part in zip(*PARTS, strict=True)))
    cases.finish(SecondOrder(learn_scales=False, tolerance=1e-9), whole)
    going = orthogonal(cases, *PARTS[0])
    cases.finish(quiet, going)
    for part in PARTS[1:]:
        following = orthogonal(cases, *part)
        following.posterior.load_state_dict(going.posterior.state_dict())
        cases.finish(Minibatch(goes_on=True, learn_scales=False, steps=100), following)
        going = following
    one, other = (cases.numbers(p.posterior) for p in (going, whole))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    # And it is regression: of each weight, by hand.
    tokens, labels = (np.array([n for piece in part for n in piece]) for part in zip(*PARTS, strict=True))
    prior = weight_variances(whole.posterior.node.kernel).numpy()[:4]
    table, noise = whole.structure.table.numpy(), whole.structure.noise
    for d in range(4):
        targets = table[labels[tokens == d]]
        precision = 1 / prior[d] + len(targets) / noise
        mean = targets.sum(0) / noise / precision
        found = going.posterior.node.m[:, d].detach().numpy() * prior[d] ** 0.5
        np.testing.assert_allclose(found, mean, atol=1e-3)


def test_the_bound_of_a_part_is_of_its_own_data(cases: ModuleType) -> None:
    """The divergence is from the posterior before: with nothing learned yet, none."""
    first = orthogonal(cases, *PARTS[0])
    cases.finish(Minibatch(learn_scales=False), first)
    second = orthogonal(cases, *PARTS[1])
    second.posterior.load_state_dict(first.posterior.state_dict())
    before = cases.numbers(second.posterior)
    optimizer = Minibatch(goes_on=True, learn_scales=False, n_draws=2000)
    start = optimizer.start(second, torch.Generator().manual_seed(0))
    known = known_value(second.posterior, start) - start.known_at_start
    assert known == pytest.approx(float(second.posterior.divergence().detach()))
    start, info = optimizer.step(second, start)
    now, divergence = cases.numbers(second.posterior), 0.0
    for block in ("node", "next"):
        old_sd, new_sd = (q[f"{block}.factor"] for q in (before, now))
        away = (now[f"{block}.m"] - before[f"{block}.m"]) ** 2
        kl = (old_sd / new_sd).log() + (new_sd**2 + away) / (2 * old_sd**2) - 0.5
        divergence += float(kl.sum())
    assert info.elbo == pytest.approx(float(start.values[0]) - divergence, abs=1e-6)


def test_a_model_goes_on_with_a_bound_that_two_draws_agree_on(
    begun: StructuredGPClassifier, data: Generated
) -> None:
    log = begun.partial_fit(data.X[16:], data.y[16:]).training_log_
    assert log["elbo"] < 0
    assert log["elbo"] == pytest.approx(log["fresh_elbo"], abs=4)


def test_what_new_data_says_nothing_about_stays(data: Generated) -> None:
    """Without learning: weights of features that do not come stay where they were, to the last bit but
    for rounding."""
    first, _ = split(data)
    model = StructuredGPClassifier(n_draws=4).fit(pick(data.X, first), pick(data.y, first)).model_
    X = [[("v0", "v0", f"v{K - 1}")] * 2]
    examples = read_examples(X, [["L0", "L1"]], encoder=model.encoder, classes=model.labels.classes)
    q = carried_over(model, examples)
    before = q.snapshot()
    batches = structgp.inference.loop.make_batches(examples.rows, examples.y, examples.encoder.pad_row, 500)
    problem = Problem(q, structgp.structures.Chain(), batches)
    optimizer = Minibatch(goes_on=True, learn_scales=False)
    going = optimizer.start(problem, torch.Generator().manual_seed(0))
    for _ in range(3):
        going, _ = optimizer.step(problem, going)
    touched = problem.conditional(0)[0].compact[0]
    free = torch.ones(q.node.n_values, dtype=torch.bool)
    free[touched] = False
    assert 5 < int(free.sum()) < q.node.n_values
    for name in ("m", "factor"):
        now, was = getattr(q.node, name).detach(), before[f"node.{name}"]
        torch.testing.assert_close(now[..., free], was[..., free], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(now[..., ~free], was[..., ~free], atol=1e-4)
    # Of a transition that does not come, only that is learned.
    assert not torch.allclose(q["next"].m.detach()[:V], before["next.m"][:V], atol=1e-4)


def test_what_was_known_moves_along_where_the_kernel_learns(data: Generated) -> None:
    """The posterior is the prior times what was known and what each batch says, after that too."""
    model = StructuredGPClassifier(n_draws=4).fit(data.X[:12], data.y[:12]).model_
    examples = read_examples(data.X[12:], data.y[12:], encoder=model.encoder, classes=model.labels.classes)
    q = carried_over(model, examples)
    batches = structgp.inference.loop.make_batches(examples.rows, examples.y, examples.encoder.pad_row, 20)
    problem = Problem(q, structgp.structures.Chain(), batches)
    optimizer = Minibatch(goes_on=True, learning_rounds=1)
    going = optimizer.start(problem, torch.Generator().manual_seed(0))
    basis = q.node.basis.clone()
    while not going.learned:
        going, _ = optimizer.step(problem, going)
    assert not torch.allclose(q.node.basis, basis, rtol=1e-2)
    assert going.known is not None
    for k, block in enumerate(q.blocks):
        precision, linear = (x.clone() for x in going.known[k])
        for i in range(len(batches)):
            index = problem.conditional(i)[k].compact[0]
            site = going.sites[i][k].at(going.scale[k])
            precision[index] += site.precision
            linear[index] += site.linear
        torch.testing.assert_close(precision, going.precision[k])
        torch.testing.assert_close(linear, going.linear[k])
        if block is q.node:
            prior = q.node.prior_factor().square()[:, None]
            mean = q.node.m.T.detach() * prior.sqrt()
            torch.testing.assert_close(mean, linear / (1 / prior + precision))


# -- partial_fit -------------------------------------------------------------------------------------


@some_forms
def test_in_two_parts_about_as_well_as_in_one(form: str, data: Generated) -> None:
    change = FORMS[form]
    first, later = split(data)
    X = change(data.X)
    whole = StructuredGPClassifier(n_draws=16).fit(X, data.y)
    parts = StructuredGPClassifier(n_draws=16)
    for index in (first, later):
        assert parts.partial_fit(pick(X, index), pick(data.y, index)) is parts
    p, q = (np.concatenate(m.model_.ask(X).marginals()) for m in (whole, parts))
    assert np.abs(p - q).mean() < 0.1
    alone = StructuredGPClassifier(n_draws=16).fit(pick(X, first), pick(data.y, first))
    assert np.abs(p - q).mean() < np.abs(p - np.concatenate(alone.model_.ask(X).marginals())).mean()
    nll = [-np.mean([float(v or 0) for v in m.sequence_log_probs(X, data.y)]) for m in (parts, alone)]
    assert nll[0] < nll[1]


def test_the_first_call_is_a_fit(data: Generated, fitted: StructuredGPClassifier) -> None:
    one = fitted
    seen: list[Any] = []
    other = StructuredGPClassifier(n_draws=4).partial_fit(data.X, data.y, callback=seen.append)
    assert same(one, other)
    assert seen == one.training_log_["steps"]
    named = StructuredGPClassifier(n_draws=4).partial_fit(data.X, data.y, ["L1", "L0", "L2"])
    assert same(one, named)


@pytest.mark.parametrize("classes", [["new", "L0", "new"], np.array(["L0", "new"])], ids=type)
def test_labels_still_to_come(classes: Any, data: Generated) -> None:
    model = StructuredGPClassifier(n_draws=4).partial_fit(data.X, data.y, classes)
    assert model.classes_.tolist() == ["L0", "L1", "L2", "new"]
    assert model.training_log_["optimizer"] == "second-order"
    p = np.concatenate(model.model_.ask(data.X).marginals())
    assert (p[:, 3] < p.max(1)).all()
    assert (p[:, 3] > 0).all()
    assert model.model_.info["label_counts"]["new"] == 0
    model.partial_fit(data.X[:1], [["new"] * len(data.X[0])], classes=["ignored"])
    assert model.classes_.tolist() == ["L0", "L1", "L2", "new"]


def test_the_first_call_with_classes_is_the_fit_that_was_asked_for(data: Generated) -> None:
    model = StructuredGPClassifier(n_draws=4, inference="natural", prior=Prior(learn_kernel=False))
    model.partial_fit(data.X, data.y, ["L0", "new"], callback=lambda info: True)
    assert model.training_log_["optimizer"] == "natural"


def test_new_labels_come_last_and_are_predicted(data: Generated, fitted: StructuredGPClassifier) -> None:
    model = fitted.set_params(n_draws=16)
    X = [[("w0", "w0", "w0")] * 3] * 6
    model.partial_fit(X + data.X[:8], [["A new one"] * 3] * 6 + data.y[:8])
    assert model.classes_.tolist() == ["L0", "L1", "L2", "A new one"]
    assert model.predict(X[:1]) == [["A new one"] * 3]
    assert "A new one" not in {label for y in model.predict(data.X) for label in y}
    assert model.score(data.X, data.y) > 0.6


def test_columns_that_move(data: Generated) -> None:
    """New columns before, between and behind the old ones: the same as the same features in dicts."""
    X = [[("v2", "v2", "v2"), ("v3", "v3", "v3")], [("v3", "v2", "v3")]] * 8
    y = [["A", "B"], ["B"]] * 8
    new = [[("v0", "v5", "v1"), ("v2", "v3", "v2")]] * 6
    z = [["B", "A"]] * 6
    model = StructuredGPClassifier(n_draws=0).fit(sparse(X), y)
    assert len(model.model_.encoder.columns) == 6
    before = model.model_.posterior.node.m.clone()
    model.partial_fit(sparse(new), z)
    assert len(model.model_.encoder.columns) == 9
    assert model.model_.posterior.node.m.shape[-1] == before.shape[-1] + 3
    other = StructuredGPClassifier(n_draws=0).fit(bag(X), y)
    other.partial_fit(bag(new), z)
    for a, b in zip(
        model.model_.ask(sparse(X[:2] + new[:1]), Question(0)).marginals(),
        other.model_.ask(bag(X[:2] + new[:1]), Question(0)).marginals(),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=0.02)
    assert model.score(sparse(X), y) == 1


def test_columns_of_which_none_was_seen_before() -> None:
    nothing = [scipy.sparse.csr_matrix((3, 8))] * 2
    model = StructuredGPClassifier(n_draws=8).fit(nothing, [["A", "B", "A"]] * 2)
    some = scipy.sparse.csr_matrix(np.eye(3, 8))
    model.partial_fit([some] * 4, [["B", "A", "B"]] * 4)
    assert model.predict([some]) == [["B", "A", "B"]]


def test_many_calls_add_up(data: Generated) -> None:
    model = StructuredGPClassifier(n_draws=8)
    for n in range(0, 24, 6):
        model.partial_fit(data.X[n : n + 6], data.y[n : n + 6], remember=False)
        model.model_.extra.setdefault("mine", n)
    whole = StructuredGPClassifier(n_draws=8).fit(data.X, data.y)
    for name in ("n_sequences", "n_tokens", "label_counts"):
        assert model.model_.info[name] == whole.model_.info[name], name
    assert model.model_.extra["mine"] == 0
    assert model.training_log_["optimizer"] == "minibatch"
    assert model.score(data.X, data.y) > whole.score(data.X, data.y) - 0.1


def test_going_on_after_a_file(begun: StructuredGPClassifier, data: Generated, tmp_path: Path) -> None:
    model = begun.set_params(n_draws=8)
    model.save(tmp_path / "model")
    loaded = structgp.load(tmp_path / "model")
    for one in (model, loaded):
        one.partial_fit(data.X[16:], data.y[16:], remember=False)
    assert same(model, loaded)
    assert loaded.predict_marginals(data.X) == model.predict_marginals(data.X)
    assert loaded.model_.info["n_sequences"] == 24
    loaded.save(tmp_path / "again")
    assert structgp.load(tmp_path / "again").predict_marginals(data.X) == model.predict_marginals(data.X)


def test_weights_in_a_later_part(data: Generated, fitted: StructuredGPClassifier) -> None:
    X, y = [[("x", "x", "x")], [("x", "x", "x")]], [["L0"], ["L1"]]
    for label, weight in {"L0": [30, 1], "L1": [1, 30]}.items():
        model = copy.deepcopy(fitted).set_params(n_draws=16)
        model.partial_fit(X, y, sample_weight=weight)
        assert model.predict_marginals(X[:1])[0][0][label] > 0.5
    assert model.model_.info["label_counts"]["L1"] == 30 + sum(y.count("L1") for y in data.y)


def test_a_callback_ends_a_later_part(begun: StructuredGPClassifier, data: Generated) -> None:
    model = begun.set_params(n_draws=8)
    model.partial_fit(data.X[16:], data.y[16:], callback=lambda info: True)
    assert model.training_log_["stopped"] == "interrupted"
    assert len(model.training_log_["steps"]) == 1


@pytest.mark.parametrize(
    ("change", "parameters"),
    [(dense, {}), (dense, {"posterior": "inducing"}), (list, {"posterior": Inducing(n_inducing=5)})],
)
def test_functions_do_not_go_on(change: Any, parameters: Any, data: Generated) -> None:
    X = change(data.X[:8])
    model = StructuredGPClassifier(n_draws=4, **parameters).partial_fit(X, data.y[:8])
    before = state(model)
    with pytest.raises(InputError, match=r"^partial_fit: the model has dense features, or inducing inputs"):
        model.partial_fit(X, data.y[:8], remember=False)
    assert state(model).keys() == before.keys()


def test_likelihoods_that_cannot_go_on(data: Generated, fitted: StructuredGPClassifier) -> None:
    model = fitted

    def softmax(f: Any, g: Any, y: Any) -> Any:
        return f.log_softmax(-1)[:, torch.arange(len(y)), y].sum(-1) + 0 * g.sum((-1, -2))

    with pytest.raises(InputError, match=r"^partial_fit: softmax offers no curvature"):
        model.set_params(structure=softmax).partial_fit(data.X, data.y, remember=False)

    def shifts(f: Any, g: Any, y: Any) -> Any:
        f = np.asarray(f)
        return -np.square(f - np.eye(f.shape[-1])[np.asarray(y)]).sum((1, 2))

    custom = Custom(shifts, predict_with="chain")
    with pytest.raises(
        InputError, match=r"^partial_fit: shifts may depend on a direction that was left out"
    ):
        model.set_params(structure=custom).partial_fit(data.X, data.y, remember=False)


def test_a_part_of_nothing(data: Generated, fitted: StructuredGPClassifier) -> None:
    model = fitted
    for nothing in ([], [[]]):
        with pytest.raises(InputError, match=r"^X: no tokens"):
            model.partial_fit(nothing, nothing)


# -- warm starts -------------------------------------------------------------------------------------

WARM: dict[str, tuple[Any, dict[str, Any]]] = {
    "weights": (list, {}),
    "columns": (sparse, {}),
    "functions": (list, {"posterior": "inducing"}),
    "dense": (dense, {}),
    "dense beside templates": (beside, {}),
    "dense functions": (dense, {"posterior": "inducing"}),
    "diagonal": (dense, {"posterior": Inducing(covariance="diagonal")}),
    "low-rank": (dense, {"posterior": Inducing(covariance="low-rank", rank=3)}),
    "full transitions": (list, {"posterior": Inducing(n_inducing=8, transition_covariance="full")}),
}


@pytest.mark.parametrize("name", WARM)
def test_the_second_fit_begins_where_the_first_ended(name: str, data: Generated) -> None:
    change, parameters = WARM[name]
    X, y = change(data.X[:12]), data.y[:12]
    model = StructuredGPClassifier(n_draws=4, warm_start=True, **parameters)
    first = model.fit(X, y).training_log_
    second = model.fit(X, y).training_log_
    assert second["trace"][0][1] > first["elbo"] - 0.02 * 12 - 1
    assert second["trace"][0][1] > first["trace"][0][1] - 0.02 * 12  # the tolerance of a fit
    assert len(second["steps"]) <= len(first["steps"])
    assert model.model_.info["n_sequences"] == 12, "a fit is of its own data"


def test_a_cold_one_begins_anew(data: Generated) -> None:
    model = StructuredGPClassifier(n_draws=4).fit(data.X[:12], data.y[:12])
    before = state(model)
    model.fit(data.X[:12], data.y[:12])
    assert all(torch.equal(before[k], v) for k, v in state(model).items())


@some_forms
def test_a_warm_start_with_new_features_and_labels(form: str, data: Generated) -> None:
    change = FORMS[form]
    first, _ = split(data)
    X, y = change(data.X), [["new", *labels[1:]] for labels in data.y]
    model = StructuredGPClassifier(n_draws=8, warm_start=True)
    model.fit(pick(X, first), pick(data.y, first))
    model.fit(X, y)
    assert model.classes_.tolist() == ["L0", "L1", "L2", "new"]
    assert model.score(X, y) > 0.6
    cold = StructuredGPClassifier(n_draws=8).fit(X, y)
    assert model.model_.posterior.node.n_values == cold.model_.posterior.node.n_values
    assert model.training_log_["elbo"] > cold.training_log_["elbo"] - 0.1 * len(X)


def test_labels_that_do_not_come_again_stay(data: Generated) -> None:
    model = StructuredGPClassifier(n_draws=4, warm_start=True).fit(data.X, data.y)
    kept = [i for i, y in enumerate(data.y) if "L2" not in y]
    model.fit(pick(data.X, kept), pick(data.y, kept))
    assert model.classes_.tolist() == ["L0", "L1", "L2"]


COLD: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "components": (list, {}, {"posterior": Mixture(n_components=2)}),
    "inducing inputs": (list, {}, {"posterior": Inducing(n_inducing=4)}),
    "functions": (list, {}, {"posterior": "inducing"}),
    "fixed kernel": (list, {}, {"prior": Prior(learn_kernel=False)}),
    "weights": (list, {"posterior": "inducing"}, {"posterior": "weights"}),
    "dense functions": (dense, {}, {"posterior": "inducing"}),
    "dense weights": (dense, {"posterior": "inducing"}, {"posterior": "weights"}),
    "diagonal": (dense, {"posterior": "inducing"}, {"posterior": Inducing(covariance="diagonal")}),
    "low-rank": (dense, {"posterior": "inducing"}, {"posterior": Inducing(covariance="low-rank")}),
    "full transitions": (
        dense,
        {"inference": "natural"},
        {"posterior": Inducing(transition_covariance="full")},
    ),
    "fewer components": (
        dense,
        {"posterior": Mixture(n_components=2)},
        {"posterior": Mixture(n_components=1)},
    ),
}


@pytest.mark.parametrize("name", COLD)
def test_where_it_cannot_go_on_it_says_so_and_is_a_fresh_fit(name: str, data: Generated) -> None:
    change, first, second = COLD[name]
    X, y = change(data.X[:8]), data.y[:8]
    stop = {"callback": lambda info: info.iteration == 1}
    model = StructuredGPClassifier(n_draws=4, warm_start=True, **first).fit(X, y, **stop)
    with pytest.warns(StructgpWarning, match=r"^warm_start: .*starts from the prior") as caught:
        model.set_params(**second).fit(X[2:], y[2:], **stop)
    assert caught[0].filename == __file__
    fresh = StructuredGPClassifier(n_draws=4, **(first | second)).fit(X[2:], y[2:], **stop)
    assert same(model, fresh)
    assert model.model_.encoder == fresh.model_.encoder


def test_functions_with_new_labels_begin_anew(data: Generated) -> None:
    model = StructuredGPClassifier(n_draws=4, warm_start=True, posterior="inducing")
    model.fit(data.X[:8], data.y[:8])
    y = [["A", *labels[1:]] for labels in data.y[:8]]
    with pytest.warns(StructgpWarning, match="other labels"):
        model.fit(data.X[:8], y)
    assert model.classes_.tolist() == ["A", "L0", "L1", "L2"], "sorted, as in any fit"


def test_functions_at_columns_that_moved_begin_anew(data: Generated) -> None:
    """Inducing inputs hold the old ids."""
    first, _ = split(data)
    X = sparse(data.X)
    model = StructuredGPClassifier(n_draws=4, warm_start=True, posterior="inducing")
    model.fit(pick(X, first), pick(data.y, first))
    with pytest.warns(StructgpWarning, match="other columns"):
        model.fit(X, data.y)
    model.fit(pick(X, first), pick(data.y, first))  # all of them known


def test_another_likelihood_begins_anew(data: Generated) -> None:
    """Contrasts leave out what it may depend on."""

    def shifts(f: Any, g: Any, y: Any) -> Any:
        f = np.asarray(f)
        return -np.square(f - np.eye(f.shape[-1])[np.asarray(y)]).sum((1, 2))

    model = StructuredGPClassifier(n_draws=4, warm_start=True).fit(data.X[:6], data.y[:6])
    with pytest.warns(StructgpWarning, match="starts from the prior"):
        model.set_params(structure=Custom(shifts, predict_with="chain")).fit(
            data.X[:6], data.y[:6], callback=lambda info: True
        )
    assert model.model_.posterior.node.has_own_functions


# -- early stopping ----------------------------------------------------------------------------------


def scripted() -> Posterior:
    """Its amplitude counts the steps."""
    return Posterior({"node": Table((2,)), "next": Table((2, 2))})


@pytest.mark.parametrize(
    ("losses", "stops_after", "best"),
    [
        ([3.0, 2.0, 2.5, 2.4, 0.0], 4, 2),
        ([3.0, 2.0, 2.5, 1.0, 1.5, 1.2, 0.0], 6, 4),
        ([1.0, 1.0, 1.0], 3, 1),
        ([3.0, 2.0, 1.0], None, 3),
        ([float("nan"), 2.0, 3.0, 3.0], 4, 2),
    ],
)
def test_patience(losses: list[float], stops_after: int | None, best: int) -> None:
    assert PATIENCE == 2
    posterior, script = scripted(), iter(losses)
    watch, stopped = Watch(posterior, lambda: next(script)), None
    for n in range(1, len(losses) + 1):
        with torch.no_grad():
            posterior.node.log_amplitude.fill_(float(n))
        if watch.enough():
            stopped = n
            break
    assert stopped == stops_after
    watch.restore()
    assert float(posterior.node.log_amplitude.detach()) == best


def test_nothing_to_go_back_to() -> None:
    posterior = scripted()
    with torch.no_grad():
        posterior.node.log_amplitude.fill_(2.0)
    watch = Watch(posterior, lambda: float("nan"))
    assert [watch.enough(), watch.enough()] == [False, True]
    watch.restore()
    assert float(posterior.node.log_amplitude.detach()) == 2


def wrong(y: list[list[str]]) -> list[list[str]]:
    """Labels that a fit brings nearer only at first."""
    return [["L0"] * len(labels) for labels in y]


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What each look at the dev data found."""
    found: list[float] = []
    plain = Watch.enough

    def enough(self: Watch) -> bool:
        found.append(self.loss())
        return plain(self)

    monkeypatch.setattr(Watch, "enough", enough)
    return found


@pytest.mark.parametrize("parameters", [{}, {"posterior": "inducing"}, {"inference": "minibatch"}])
def test_the_best_is_kept(parameters: Any, data: Generated, losses: list[float]) -> None:
    X, y, X_dev, y_dev = data.X[:16], data.y[:16], data.X[16:], wrong(data.y[16:])
    model = StructuredGPClassifier(n_draws=16, **parameters)
    model.fit(X, y, X_dev, y_dev, early_stopping=True)
    found = [v for v in model.sequence_log_probs(X_dev, y_dev) if v is not None]
    assert -np.mean(found) == pytest.approx(min(losses), abs=1e-5)
    assert len(losses) == len(model.training_log_["steps"])
    best = int(np.argmin(losses))
    assert len(losses) == best + 1 + PATIENCE
    assert model.training_log_["stopped"] == "interrupted"
    # What is told of the bound is told of what was kept.
    plain = StructuredGPClassifier(n_draws=16, **parameters)
    plain.fit(X, y, callback=lambda info: info.iteration == best)
    assert same(model, plain)
    if parameters.get("inference") is None:  # minibatches go on drawing
        assert model.training_log_["fresh_elbo"] == plain.training_log_["fresh_elbo"]


def test_a_fit_that_goes_on_improving_is_the_whole_fit(
    data: Generated, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structgp.inference.loop, "PATIENCE", 100)
    model = StructuredGPClassifier(n_draws=16)
    dev = iter(data.X[16:]), iter(data.y[16:])
    model.fit(data.X[:16], data.y[:16], *dev, early_stopping=True)
    assert model.training_log_["stopped"] == "converged"
    assert len(losses) == len(model.training_log_["steps"])
    assert model.training_log_["dev"]["n_sequences"] == 8


def test_dev_labellings_that_can_never_be_do_not_end_it(data: Generated, losses: list[float]) -> None:
    rules = {"forbidden": [("L0", "L1"), (None, "L2")]}
    ok = [i for i, y in enumerate(data.y) if not _breaks(y)]
    bad = next(i for i, y in enumerate(data.y) if _breaks(y))
    dev = [*ok[-3:], bad]
    y_dev = [*pick(data.y, ok[-3:]), data.y[bad]]
    y_dev[0] = ["never seen", *y_dev[0][1:]]
    model = StructuredGPClassifier(n_draws=8, constraints=rules)
    train = pick(data.X, ok[:-3]), pick(data.y, ok[:-3])
    model.fit(*train, pick(data.X, dev), y_dev, early_stopping=True)
    assert np.isfinite(losses).all()
    assert len(losses) > PATIENCE


def _breaks(y: list[str]) -> bool:
    return y[0] == "L2" or ("L0", "L1") in pairwise(y)


def test_early_stopping_needs_dev_data(data: Generated) -> None:
    with pytest.raises(InputError, match=r"^early_stopping: there is no dev data to stop by; pass"):
        StructuredGPClassifier().fit(data.X, data.y, early_stopping=True)


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_flags_are_flags(value: Any, data: Generated) -> None:
    with pytest.raises(InputError, match=r"^warm_start: .* is not known; use one of True, False"):
        StructuredGPClassifier(warm_start=value).fit(data.X, data.y)
    with pytest.raises(InputError, match=r"^early_stopping: must be True or False, got"):
        StructuredGPClassifier().fit(data.X, data.y, data.X, data.y, early_stopping=value)
    StructuredGPClassifier(n_draws=2, warm_start=np.False_).fit(  # type: ignore[arg-type]
        data.X, data.y, early_stopping=np.False_, callback=lambda info: True
    )


def test_a_callback_still_has_its_say(data: Generated) -> None:
    model = StructuredGPClassifier(n_draws=4)
    data_twice = data.X, data.y, data.X, data.y
    model.fit(*data_twice, early_stopping=True, callback=lambda info: True)
    assert len(model.training_log_["steps"]) == 1
