"""The first fit on a part of the data, and inducing inputs that are enough under what it learned."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.generate import generate
from gpytorch.kernels import RBFKernel, ScaleKernel
from torch import Tensor

from structgp import Inducing, SecondOrder, StructuredGPClassifier
from structgp.data.batch import flat_tokens
from structgp.data.encode import FeatureEncoder
from structgp.data.examples import Examples
from structgp.data.labels import LabelEncoder
from structgp.gp import Posterior, choose_inducing, contrasts
from structgp.gp.kernels import RelevanceKernel, covariance
from structgp.gp.kernels.block_sum import BlockSumKernel
from structgp.gp.kernels.build import build_kernel
from structgp.plan import pilot
from structgp.plan import start as starting
from structgp.plan.options import Options
from structgp.plan.pilot import Pilot, run_pilot
from structgp.plan.resolve import resolve
from structgp.plan.start import learn_kernel, pick_inducing

V = 3
TOKENS = 60


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pilot of 60 tokens, where it would be one of 600."""
    monkeypatch.setattr(pilot, "TOKENS", TOKENS)


class Data:
    """Sequences of about five tokens, encoded; the last has none."""

    def __init__(self, n: int) -> None:
        made = generate(n, n_labels=V, mean_length=5, n_templates=2, n_values=8, seed=2)
        self.X, self.y = [*made.X, []], [*made.y, []]
        self.encoder = FeatureEncoder().fit(self.X)
        self.rows = self.encoder.transform(self.X)
        self.encoded = LabelEncoder(list(made.chain.labels))
        self.labels = self.encoded.transform(self.y)
        self.tokens = flat_tokens(self.rows)

    def kernel(self) -> RelevanceKernel:
        made = build_kernel("relevance", self.encoder.blocks, self.tokens)
        assert isinstance(made, RelevanceKernel)
        return made.requires_grad_(False)

    @property
    def basis(self) -> Tensor:
        return contrasts(torch.from_numpy(np.bincount(np.concatenate(self.labels), minlength=V)))


def run(
    data: Data,
    kernel: RelevanceKernel,
    *,
    basis: Tensor | None,
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> Pilot | None:
    examples = Examples(data.encoder, data.encoded, data.rows, data.labels, None, None)
    generator = generator or torch.Generator().manual_seed(seed)
    tokens = flat_tokens(data.rows)
    return run_pilot(kernel, examples, tokens, resolve(Options(), examples), basis, generator)


def state(kernel: RelevanceKernel) -> list[Tensor]:
    return [p.detach().clone() for p in kernel.parameters()]


# -- the pilot ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("few")
def test_none_where_there_is_little_data() -> None:
    """As long as the pilot would be most of it. Then nothing is touched, random numbers included."""
    long = Data(40)
    lengths = np.cumsum([len(r) for r in long.rows])
    limit = pilot.WORTH_IT * TOKENS
    assert lengths[-1] > 2 * limit
    last = int(np.flatnonzero(lengths <= limit)[-1])
    for n, there in ((last + 1, False), (last + 2, True)):
        data = Data(40)
        data.rows, data.labels = data.rows[:n], data.labels[:n]
        kernel, generator = data.kernel(), torch.Generator().manual_seed(7)
        before, numbers = state(kernel), generator.get_state()
        found = run(data, kernel, basis=None, generator=generator)
        assert (found is not None) == there
        assert torch.equal(generator.get_state(), numbers) != there
        same = [torch.equal(a, b) for a, b in zip(before, state(kernel), strict=True)]
        assert all(same) != there


@pytest.mark.usefixtures("few")
def test_learns_in_place_and_says_what_else_it_learned() -> None:
    data = Data(40)
    kernel = data.kernel()
    parameters = list(kernel.parameters())
    before = state(kernel)
    found = run(data, kernel, basis=data.basis)
    assert found is not None
    for p, now, old in zip(parameters, kernel.parameters(), before, strict=True):
        assert p is now
        assert not torch.equal(p, old)
        assert p.isfinite().all()
    # As many sequences as it takes to have so many tokens, and no more.
    assert TOKENS <= found.tokens < TOKENS + max(map(len, data.rows))
    assert found.tokens < len(data.tokens) / 2
    assert found.basis is not None
    lengths = found.basis.norm(dim=0)
    torch.testing.assert_close(found.basis, data.basis * lengths, rtol=1e-9, atol=1e-12)
    assert ((lengths - 1).abs() > 1e-3).all()
    assert found.transition_sd > 0
    assert abs(found.transition_sd - 1.5) > 1e-3
    assert found.history.optimizer == "second-order"
    assert np.isfinite(found.history.elbo)


@pytest.mark.usefixtures("few")
def test_labels_stay_labels() -> None:
    data = Data(40)
    found = run(data, data.kernel(), basis=None)
    assert found is not None
    assert found.basis is None


@pytest.mark.usefixtures("few")
def test_equal_seeds_give_equal_pilots() -> None:
    """To the last bit; other seeds take other sequences."""
    data = Data(40)
    kernels = [data.kernel() for _ in range(3)]
    pilots = [
        run(data, kernel, basis=data.basis, seed=seed)
        for kernel, seed in zip(kernels, (0, 0, 1), strict=True)
    ]
    states = [state(kernel) for kernel in kernels]
    one, again, other = pilots
    assert one is not None
    assert again is not None
    assert other is not None
    assert torch.equal(one.basis, again.basis)  # type: ignore[arg-type]
    assert (one.transition_sd, one.tokens) == (again.transition_sd, again.tokens)
    assert one.history.steps == again.history.steps
    assert all(torch.equal(a, b) for a, b in zip(states[0], states[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(states[0], states[2], strict=True))


@pytest.mark.usefixtures("few")
def test_the_classifier_starts_from_its_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the fit learns the kernel: its basis, its scores' scale, and inducing inputs that are enough
    under its kernel, unless their number was asked for."""
    data, seen, started = Data(40), [], []

    def watched(kernel: Any, *given: Any, **options: Any) -> Pilot | None:
        found = run_pilot(kernel, *given, **options)
        seen.append(copy.deepcopy((found, kernel)))
        return found

    def start(blocks: Any) -> Posterior:
        started.append((blocks["node"].basis.clone(), blocks["next"].prior_sd))
        return Posterior(blocks)

    monkeypatch.setattr(starting, "run_pilot", watched)
    monkeypatch.setattr(starting, "Posterior", start)
    monkeypatch.setattr(starting, "ENOUGH", 0.2)
    X, y = data.X[:-1], data.y[:-1]
    fitted = StructuredGPClassifier(n_draws=8, posterior="inducing").fit(X, y)
    ((found, kernel),) = seen
    assert found is not None
    ((basis, transition_sd),) = started
    assert torch.equal(basis, found.basis)
    assert transition_sd == found.transition_sd
    chosen, _ = pick_inducing(kernel, data.tokens, 1000, seed=0, enough=0.2)
    assert torch.equal(fitted.model_.posterior.node.inducing, chosen)
    everything, _ = pick_inducing(kernel, data.tokens, 1000, seed=0)
    assert len(chosen) < len(everything)
    asked = StructuredGPClassifier(n_draws=8, posterior=Inducing(n_inducing=1000)).fit(X, y)
    assert len(seen) == 2
    assert asked.model_.posterior.node.n_values == len(everything)
    for changes in ({"inference": SecondOrder(learn_scales="transitions")}, {"inference": "natural"}):
        StructuredGPClassifier(n_draws=8, posterior=Inducing(n_inducing=5), **changes).fit(X, y)
    assert len(seen) == 2


# -- the kernel it starts from -----------------------------------------------------------------------


def test_relevances_are_left_for_the_fit() -> None:
    """Beside a part whose shape the relaxation learns, they stay, and stay within sight."""
    rng = np.random.default_rng(0)
    X = [[{"a": f"v{rng.integers(3)}", "size": float(rng.normal())} for _ in range(6)] for _ in "1234"]
    encoder = FeatureEncoder().fit(X)
    rows, y = encoder.transform(X), [rng.integers(0, 2, 6) for _ in X]
    tokens, choice = flat_tokens(rows), {"categorical": "relevance", "sparse": "rbf"}
    made = build_kernel(choice, encoder.blocks, tokens)
    kernel, relaxation = learn_kernel(made, tokens, y, True, torch.Generator().manual_seed(0))
    assert relaxation is not None
    assert isinstance(kernel, BlockSumKernel)
    columns, numbers = kernel.kernels
    assert isinstance(columns, RelevanceKernel)
    assert isinstance(numbers, ScaleKernel)
    assert all((p == 0).all() for p in columns.parameters())
    assert not any(p.requires_grad for p in columns.parameters())


# -- enough inducing inputs ----------------------------------------------------------------------------


def rbf_rows() -> tuple[RBFKernel, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return RBFKernel().double(), torch.randn(60, 2, generator=generator, dtype=torch.float64)


def left_open(kernel: Any, rows: Tensor, chosen: list[int]) -> float:
    """Share of the trace that the chosen rows leave, from the definition."""
    with torch.no_grad():
        K = covariance(kernel, rows, rows).numpy()
    if not chosen:
        return 1.0
    K_xz, K_zz = K[:, chosen], K[np.ix_(chosen, chosen)]
    return float((K - K_xz @ np.linalg.solve(K_zz, K_xz.T)).trace() / K.trace())


@pytest.mark.parametrize("enough", [0.7, 0.3, 0.1, 0.01, 1e-4])
def test_ends_at_the_first_choice_that_is_enough(enough: float) -> None:
    kernel, rows = rbf_rows()
    whole = choose_inducing(kernel, rows, len(rows)).index.tolist()
    found = choose_inducing(kernel, rows, len(rows), enough=enough)
    chosen = found.index.tolist()
    assert chosen == whole[: len(chosen)]
    assert len(chosen) < len(whole)
    assert left_open(kernel, rows, chosen) <= enough < left_open(kernel, rows, chosen[:-1])
    assert found.residual == pytest.approx(left_open(kernel, rows, chosen), rel=1e-6)
    picked, residual = pick_inducing(kernel, rows, len(rows), seed=0, enough=enough)
    assert torch.equal(picked, rows[found.index])
    assert residual == found.residual


def test_no_more_than_the_most() -> None:
    kernel, rows = rbf_rows()
    assert len(choose_inducing(kernel, rows, 3, enough=0.01).index) == 3
    nothing = choose_inducing(kernel, rows, len(rows), enough=0.0)
    assert torch.equal(nothing.index, choose_inducing(kernel, rows, len(rows)).index)


def test_enough_is_a_share_of_the_variance() -> None:
    """A kernel a hundred times as large has the same inducing inputs."""
    inner, rows = rbf_rows()
    kernel, found = ScaleKernel(inner).double(), []
    for scale in (1.0, 100.0):
        kernel.outputscale = scale
        found.append(choose_inducing(kernel, rows, len(rows), enough=0.1).index)
    assert torch.equal(*found)
    assert len(found[0]) > 3
