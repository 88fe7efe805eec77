"""GPStruct against importance sampling in the space of all weights, which knows nothing of contrasts, of
coordinates or of sites, and against the variational posterior."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from experiments.methods.design import LinearFeatures
from experiments.methods.ess import GPStruct
from experiments.methods.ess_sites import fit_sites, prior_sites
from experiments.methods.latent import Coordinates, LatentChain
from scipy.optimize import minimize
from scipy.sparse import csr_array

from structgp import Prior, StructuredGPClassifier
from structgp.data.batch import pad
from structgp.data.labels import LabelEncoder
from structgp.errors import InputError
from structgp.gp import contrasts
from structgp.inference import SecondOrder

pytestmark = pytest.mark.slow

V, D = 2, 6


@pytest.fixture(scope="module")
def toy():
    """Forty tokens of two templates with three values each, and ten more to predict."""
    made = generate(9, n_labels=V, mean_length=6, n_templates=2, n_values=3, seed=3)
    tokens = [token for x in made.X for token in x]
    labels = [label for y in made.y for label in y]
    cut = [0, 7, 8, 20, 29, 40, 50]
    X = [tokens[a:b] for a, b in pairwise(cut)]
    y = [labels[a:b] for a, b in pairwise(cut)]
    assert sum(map(len, X[:5])) == 40
    return one_hot(X), y


def one_hot(X):
    """As matrices, whose columns are the weights of the reference."""
    names = [f"v{k}" for k in range(3)]
    return [np.array([[float(token[j] == v) for j in range(2) for v in names] for token in x]) for x in X]


# --- the reference ---------------------------------------------------------------------------


def log_joint(rows, X, y, sd=1.0, transition_sd=1.0):
    """(S,) log prior and likelihood of rows (S, D V + V V): weights of every label, then scores, in units
    of their prior deviations."""
    w, g = sd * rows[:, : D * V].reshape(-1, D, V), transition_sd * rows[:, D * V :].reshape(-1, V, V)
    total = -0.5 * (rows**2).sum(1)
    for x, path in zip(X, y, strict=True):
        f = np.einsum("td,sdv->stv", x, w)
        ahead, score = f[:, 0], f[:, 0, path[0]]
        for t in range(1, len(path)):
            ahead = np.log(np.exp(ahead[:, :, None] + g).sum(1)) + f[:, t]
            score = score + g[:, path[t - 1], path[t]] + f[:, t, path[t]]
        total += score - np.log(np.exp(ahead).sum(1))
    return total


def marginals_of(rows, x):
    """(S, T, V) by listing every labelling."""
    w, g = rows[:, : D * V].reshape(-1, D, V), rows[:, D * V :].reshape(-1, V, V)
    f = np.einsum("td,sdv->stv", x, w)
    T = len(x)
    paths = np.array(np.meshgrid(*[range(V)] * T, indexing="ij")).reshape(T, -1).T
    score = f[:, np.arange(T), paths].sum(-1) + g[:, paths[:, :-1], paths[:, 1:]].sum(-1)
    p = np.exp(score - score.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return np.stack([p @ (paths == v) for v in range(V)], -1)


@pytest.fixture(scope="module")
def reference(toy):
    return importance_sampling(toy)


def importance_sampling(toy, sd=1.0, transition_sd=1.0):
    """Draws around the mode, wider than the curvature there says, and their weights."""
    X, y = toy
    prior = sd, transition_sd
    paths = [[int(label[1:]) for label in labels] for labels in y[:5]]
    size = D * V + V * V

    def slope(row, h=1e-4):
        steps = h * np.eye(size)
        both = log_joint(np.concatenate([row + steps, row - steps]), X[:5], paths, *prior)
        return (both[:size] - both[size:]) / (2 * h)

    start = np.zeros(size)
    mode = minimize(
        lambda r: -log_joint(r[None], X[:5], paths, *prior)[0], start, jac=lambda r: -slope(r)
    ).x
    bend = np.stack([(slope(mode - 1e-3 * e) - slope(mode + 1e-3 * e)) / 2e-3 for e in np.eye(size)])
    root = np.linalg.cholesky(np.linalg.inv((bend + bend.T) / 2))
    rng = np.random.default_rng(0)
    n, wider = 60_000, 1.15
    eps = rng.standard_normal((n, size))
    rows = mode + wider * eps @ root.T
    log_weight = log_joint(rows, X[:5], paths, *prior) + 0.5 * (eps**2).sum(1)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    assert 1 / (weight**2).sum() > 0.2 * n  # so that 12,000 draws would say as much
    return rows, weight


def expected_difference(reference, X, sd=1.0):
    """E[f_1 - f_0] of every token, and its standard deviation."""
    rows, weight = reference
    w = sd * rows[:, : D * V].reshape(-1, D, V)
    f = (w[..., 1] - w[..., 0]) @ np.concatenate(X).T
    mean = weight @ f
    return mean, np.sqrt(weight @ (f - mean) ** 2)


# --- the sampler against it ------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fit", pytest.param("prior", marks=pytest.mark.slow)])
def fitted(request, toy):
    X, y = toy
    # Many chains cost little more than one.
    n, thin = (300, 2) if request.param == "fit" else (1800, 8)
    return GPStruct(n, n_chains=64, thin=thin, around=request.param).fit(X[:5], y[:5])


@pytest.mark.slow
def test_chains_agree(fitted):
    log = fitted.training_log_
    assert log["rhat"] < 1.05
    assert log["rhat_median"] <= log["rhat"]
    assert log["rhat_likelihood"] < 1.05
    assert len(fitted.weights_) == log["n_samples"] == len(fitted.transitions_)


def test_means_and_spreads_are_those_of_importance_sampling(fitted, reference, toy):
    X, _ = toy
    mean, sd = expected_difference(reference, X[:5])
    f = np.concatenate(X[:5]) @ fitted.weights_.numpy() @ fitted.basis_.numpy().T
    difference = f[..., 1] - f[..., 0]
    # Standard errors are about 0.01 of a deviation, of the reference and of the samples.
    assert np.abs(difference.mean(0) - mean).max() < 0.08 * sd.max()
    np.testing.assert_allclose(difference.std(0), sd, rtol=0.08)
    rows, weight = reference
    g = weight @ rows[:, D * V :]
    np.testing.assert_allclose(fitted.transitions_.mean(0).numpy().ravel(), g, atol=0.08)


def test_predictions_are_those_of_importance_sampling(fitted, reference, toy):
    X, _ = toy
    rows, weight = reference
    few = slice(0, 8_000)
    truth = np.einsum("s,stv->tv", weight[few] / weight[few].sum(), marginals_of(rows[few], X[5]))
    (found,) = fitted.predict_marginals([X[5]])
    np.testing.assert_allclose([list(p.values()) for p in found], truth, atol=0.012)
    best = [fitted.classes_[v] for v in truth.argmax(1)]
    assert fitted.predict([X[5]]) == [best]


def test_predictions_are_near_those_of_the_variational_posterior(toy, fitted):
    X, y = toy
    sparse = [csr_array(x) for x in X]
    variational = StructuredGPClassifier(
        kernel="linear",
        n_draws=1024,
        prior=Prior(amplitude=2.0, transition_sd=1.0, learn_kernel=False),
        inference=SecondOrder(learn_scales=False),
    ).fit(sparse[:5], y[:5])
    theirs = variational.predict_marginals([sparse[5]])[0]
    ours = fitted.predict_marginals([X[5]])[0]
    far = [abs(a[label] - b[label]) for a, b in zip(ours, theirs, strict=True) for label in a]
    # The posterior of 40 tokens is nearly Gaussian, but its factors are not independent.
    assert max(far) < 0.04


def variational_mean(model, X):
    """E[f_1 - f_0] of every token."""
    fitted = model.model_
    rows = fitted.encoder.transform(X)
    batch = pad(rows, None, fitted.encoder.pad_row, range(len(X)))
    with torch.no_grad():
        f = fitted.draws(0).potentials(fitted.structure, batch).f
    return (f[0, ..., 1] - f[0, ..., 0])[batch.mask].numpy()


@pytest.mark.slow
def test_means_are_those_of_the_variational_posterior_where_that_is_accurate(toy):
    """Under narrow priors the likelihood is nearly quadratic, and scores say next to nothing of weights:
    then the posterior is Gaussian and factorises, as q does."""
    X, y = toy
    sd, transition_sd, n_chains = 0.3, 0.1, 48
    sampled = GPStruct(300, n_chains=n_chains, thin=2, variance=sd**2, transition_sd=transition_sd)
    sampled.fit(X[:5], y[:5])
    assert sampled.training_log_["rhat"] < 1.05
    f = np.concatenate(X[:5]) @ sampled.weights_.numpy() @ sampled.basis_.numpy().T
    by_chain = (f[..., 1] - f[..., 0]).reshape(n_chains, -1, 40).mean(1)
    mean, error = by_chain.mean(0), by_chain.std(0, ddof=1) / n_chains**0.5
    reference = importance_sampling(toy, sd, transition_sd)
    truth, spread = expected_difference(reference, X[:5], sd)
    of_truth = spread * (reference[1] ** 2).sum() ** 0.5
    optimizer = SecondOrder(n_draws=1024, tolerance=1e-4, max_rounds=60, learn_scales=False)
    variational = StructuredGPClassifier(
        kernel="linear",
        inference=optimizer,
        prior=Prior(amplitude=2 * sd**2, transition_sd=transition_sd, learn_kernel=False),
        posterior="inducing",
    )
    sparse = [csr_array(x) for x in X[:5]]
    found = variational_mean(variational.fit(sparse, y[:5]), sparse)
    # Errors are some hundredths of a deviation, and the means up to two and a half.
    assert error.max() < 0.04 * spread.max()
    assert np.abs(truth).max() > 2 * spread.max()
    assert (np.abs(mean - truth) < 4 * np.hypot(error, of_truth)).all()
    assert (np.abs(found - truth) < 4 * of_truth + 0.01 * spread).all()
    assert (np.abs(found - mean) < 4 * error + 0.01 * spread).all()


# --- its parts -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts():
    made = generate(8, n_labels=3, mean_length=5, n_templates=2, n_values=5, seed=0)
    labels = LabelEncoder().fit(made.y)
    y = labels.transform(made.y)
    tokens = LinearFeatures().fit(made.X).transform(made.X)
    basis = contrasts(torch.from_numpy(np.bincount(np.concatenate(y))))
    return tokens, LatentChain.of(tokens, y, basis), Coordinates.of(tokens.features, 1.3)


@pytest.mark.parametrize("wide", [False, True])
def test_coordinates_are_those_of_the_kernel(wide):
    x = np.random.default_rng(0).normal(size=(5, 9) if wide else (9, 5))
    x[:, 0] = x[:, 1]
    found = Coordinates.of(csr_array(x), 2.0)
    kernel = 4 * x @ x.T
    np.testing.assert_allclose(found.phi @ found.phi.T, kernel, atol=1e-9)
    new = np.random.default_rng(1).normal(size=(3, x.shape[1]))
    h = found.phi @ torch.randn(found.phi.shape[1], 2, dtype=torch.float64)
    np.testing.assert_allclose(
        new @ (found.directions @ found.inverse(h)).numpy(),
        4 * new @ x.T @ np.linalg.pinv(kernel) @ h.numpy(),
        atol=1e-8,
    )


def test_sites_leave_the_posterior_as_it_is(parts):
    _, chain, coordinates = parts
    generator = torch.Generator().manual_seed(0)
    sites = fit_sites(chain, coordinates, 0.7, generator)
    R = coordinates.phi.shape[1]
    z = torch.randn(6, R, 2, generator=generator, dtype=torch.float64)
    g = torch.randn(6, 3, 3, generator=generator, dtype=torch.float64)
    h = coordinates.phi @ z
    exact = chain.log_prob(h, g) - 0.5 * (z.square().sum((1, 2)) + (g / 0.7).square().sum((1, 2)))
    # The Gaussian of the sites has precision I + phi^T W phi in z, and the mean of the sites.
    dz = z - coordinates.inverse(sites.mean)
    dh, dg = h - sites.mean, g - sites.transition_mean
    square = dz.square().sum((1, 2)) + (sites.precision * dh.square()).sum((1, 2))
    square = square + (dg / sites.transition_sd).square().sum((1, 2))
    found = sites.ratio(chain, dh, dg) - 0.5 * square
    assert torch.allclose(found - found[0], exact - exact[0], atol=1e-8)
    for c, factor in enumerate(sites.factor):
        phi = coordinates.phi
        inside = torch.eye(R, dtype=torch.float64) + phi.T @ (sites.precision[:, c, None] * phi)
        expected = phi @ torch.linalg.inv(inside) @ phi.T
        assert torch.allclose(factor @ factor.T, expected, atol=1e-9)


def test_draws_have_the_covariance_of_the_factor(parts):
    _, chain, coordinates = parts
    sites = prior_sites(coordinates, chain.basis, 0.5)
    dh, dg = sites.draw(20_000, torch.Generator().manual_seed(0))
    kernel = coordinates.phi @ coordinates.phi.T
    for c in range(2):
        assert torch.allclose(dh[..., c].T.cov(), kernel, atol=0.05 * float(kernel.max()))
    assert torch.allclose(dg.std(0), torch.full((3, 3), 0.5).double(), atol=0.02)
    assert torch.equal(sites.ratio(chain, dh[:3], dg[:3]), chain.log_prob(dh[:3], dg[:3]))


def test_order_and_company_of_sequences_do_not_matter(toy):
    X, y = toy
    model = GPStruct(120, n_chains=2, thin=5).fit(X[:5], y[:5])
    together = model.predict_marginals([X[5], [], X[0]])
    assert together[1] == []
    assert model.predict([]) == []
    assert model.predict([[]]) == [[]]
    (alone,) = model.predict_marginals([X[5]])
    for dist, same in zip(together[0], alone, strict=True):
        assert dist == pytest.approx(same)
    assert model.predict([X[5], [], X[0]])[2] == model.predict([X[0]])[0]
    assert model.score(X, y) == pytest.approx(
        np.mean(
            [a == b for p, q in zip(model.predict(X), y, strict=True) for a, b in zip(p, q, strict=True)]
        )
    )


def test_equal_seeds_give_equal_fits(toy):
    X, y = toy
    one, same = (GPStruct(60, n_chains=2, thin=5).fit(X[:5], y[:5]) for _ in "ab")
    assert torch.equal(one.weights_, same.weights_)


def test_mistakes_are_named(toy, monkeypatch):
    X, y = toy
    with pytest.raises(InputError, match="not fitted yet"):
        GPStruct().predict(X)
    for wrong in (
        {"around": "x"},
        {"variance": 0.0},
        {"transition_sd": -1.0},
        {"n_chains": 0},
        {"thin": 0},
    ):
        with pytest.raises(InputError, match=next(iter(wrong))):
            GPStruct(**wrong).fit(X, y)
    with pytest.raises(InputError, match="n_iterations: 50 is too few; give 60 or more"):
        GPStruct(50).fit(X, y)
    monkeypatch.setattr("experiments.methods.latent.LARGEST_RANK", 3)
    with pytest.raises(InputError, match="too many for a full Gaussian process"):
        GPStruct().fit(X, y)
