"""The semi-Markov chain against the enumeration of all labellings, and against the chain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from structgp.answers.spans import Boundaries
from structgp.errors import InputError
from structgp.evaluation.metrics import chunks
from structgp.structures import Layout, Rules
from structgp.structures.linear_chain.chain import ChainProgram
from structgp.structures.segments import span_messages as messages
from structgp.structures.segments.ages import recursion
from structgp.structures.segments.segments import Segments
from structgp.structures.segments.semi_markov import SegmentsProgram, by_end
from structgp.structures.segments.span_scheme import SpanScheme
from structgp.structures.semirings import LOG, MAX, KMax, Sampling

pytestmark = pytest.mark.usefixtures("loops")

CLOSE = 1e-8

SCHEMES = (
    ("B-x", "I-x", "O"),
    ("O", "B-x", "I-x", "B-y"),
    ("B-x", "I-x", "E-x", "S-x"),
    ("B-x", "L-x", "U-x", "O"),
    ("I-x", "I-y", "O"),
    ("B", "I"),
    ("a", "b", "c"),
    ("a", "b", "O"),
    ("O",),
)

generated = settings(max_examples=40, deadline=None, derandomize=True)


def read_spans(labels: list[str]) -> list[tuple[int, int, str]]:
    """Runs of equal labels if none has a prefix, else as conlleval reads them."""
    if any(label[0] in "BI" for label in labels) or set(labels) <= {"O"}:
        return chunks(labels)
    if any("-" in label for label in labels):
        return chunks(labels)
    found, t = [], 0
    for label, run in groupby(labels):
        n = len(list(run))
        found += [(t, t + n, label)] if label != "O" else []
        t += n
    return found


@dataclass(frozen=True)
class Every:
    """All N labellings of n positions. y (N, n); what is on in each: node (N, n, V), next (N, n-1, V, V),
    length (N, K, L+1), how often, ends (N, n, K, L+1), span (N, n, L, K)."""

    y: np.ndarray
    node: np.ndarray
    next: np.ndarray
    length: np.ndarray
    ends: np.ndarray
    span: np.ndarray


@cache
def every(classes: tuple[str, ...], n: int, L: int) -> Every:
    V = len(classes)
    y = np.array(list(product(range(V), repeat=n)), dtype=int).reshape(V**n, n)
    node = (y[:, :, None] == np.arange(V)).astype(float)
    following = node[:, :-1, :, None] * node[:, 1:, None, :]
    kinds = sorted({kind for label in classes for *_, kind in chunks([label])})
    ends, span = np.zeros((len(y), n, len(kinds), L + 1)), np.zeros((len(y), n, L, len(kinds)))
    for i, row in enumerate(y):
        for first, stop, kind in read_spans([classes[v] for v in row]):
            k, size = kinds.index(kind), stop - first
            ends[i, stop - 1, k, min(size - 1, L)] = 1
            if size <= L:
                span[i, first, size - 1, k] = 1
    return Every(y, node, following, ends.sum(1), ends, span)


@dataclass(frozen=True)
class Case:
    classes: tuple[str, ...]
    scores: tuple[Tensor, ...]  # nan at padding
    lengths: tuple[int, ...]
    rules: Rules | None

    @property
    def mask(self) -> Tensor:
        return torch.arange(self.scores[0].shape[2]) < torch.tensor(self.lengths)[:, None]

    @property
    def scheme(self) -> SpanScheme:
        return SpanScheme.of(self.classes)

    @property
    def program(self) -> SegmentsProgram:
        return SegmentsProgram(Layout(self.mask), self.rules, scheme=self.scheme)

    def tables(self, oracles: ModuleType, known: Tensor | None = None) -> Any:
        """Draw, example, its length, all labellings, their scores (-inf where not allowed), log Z and
        probabilities."""
        f, g, h, *rest = (x.numpy() for x in self.scores)
        for s, b in product(range(len(f)), range(f.shape[1])):
            n, L = self.lengths[b], h.shape[-1] - 1
            all_ = every(self.classes, n, L)
            tables = g[s] if g.ndim == 3 else g[s, b, : max(n - 1, 0)]
            parts = [(f[s, b, :n], all_.node), (tables, all_.next), (h[s], all_.length)]
            if rest:
                parts.append((rest[0][s, b, :n], all_.span))
            score = np.zeros(len(all_.y))
            for x, on in parts:
                with np.errstate(invalid="ignore"):
                    score = score + np.where(on > 0, x * on, 0).reshape(len(score), -1).sum(-1)
            if self.rules is not None:
                rules = self.rules.follows, self.rules.starts, self.rules.ends
                allowed = np.array([oracles.obeys(z, *rules) for z in all_.y], dtype=bool)
                score = np.where(allowed, score, -np.inf)
            top = score.max()
            if top == -np.inf:
                yield s, b, n, all_, score, -np.inf, np.zeros(len(score))
                continue
            log_z = top + np.log(np.exp(score - top).sum())
            yield s, b, n, all_, score, log_z, np.exp(score - log_z)


def make(
    seed: int,
    lengths: tuple[int, ...],
    classes: tuple[str, ...],
    L: int = 2,
    apart: bool = False,
    has_segment: bool = False,
    size: float = 1.0,
    bans: float = 0.0,
) -> Case:
    """``bans`` : share of the scores that are -inf, and of what rules forbid."""
    rng = np.random.default_rng(seed)
    S, B, T, V = 2, len(lengths), max(1, *lengths), len(classes)
    K = len(SpanScheme.of(classes).inside)
    mask = np.arange(T) < np.array(lengths)[:, None]

    def scores(*shape: int) -> np.ndarray:
        return np.where(rng.random(shape) < bans / 2, -np.inf, size * rng.normal(size=shape))

    f = np.where(mask[..., None], scores(S, B, T, V), np.nan)
    g = scores(S, V, V)
    if apart:
        g = np.where(mask[:, 1:, None, None], scores(S, B, T - 1, V, V), np.nan)
    found = [f, g, scores(S, K, L + 1)]
    if has_segment:
        last = np.arange(T)[:, None] + np.arange(L)
        fits = last[None] < np.array(lengths)[:, None, None]
        found.append(np.where(fits[..., None], scores(S, B, T, L, K), np.nan))
    rules = None
    if bans:
        rules = Rules(*(torch.tensor(rng.random(shape) >= bans) for shape in ((V, V), V, V)))
    return Case(classes, tuple(map(torch.tensor, found)), lengths, rules)


cases = st.builds(
    make,
    st.integers(0, 2**16),
    st.lists(st.integers(0, 5), min_size=1, max_size=2).map(tuple),
    st.sampled_from(SCHEMES),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 40.0, 300.0]),
    st.sampled_from([0.0, 0.2]),
)


def mean(p: np.ndarray, on: np.ndarray) -> np.ndarray:
    return np.tensordot(p, on, 1)


# -- which spans there are -----------------------------------------------------------------------------


@pytest.mark.parametrize("classes", SCHEMES)
def test_spans_of_known_labels(classes: tuple[str, ...]) -> None:
    scheme = SpanScheme.of(classes)
    y = every(classes, 4, 4)
    ends, kind, first = scheme.spans(torch.tensor(y.y), torch.ones(y.y.shape, dtype=torch.bool))
    found = np.zeros_like(y.ends)
    for i, t in ends.nonzero().tolist():
        found[i, t, kind[i, t], t - first[i, t]] += 1
    np.testing.assert_array_equal(found, y.ends)


def test_the_scheme_is_that_of_the_answers_about_spans() -> None:
    for classes in SCHEMES:
        if classes[0] != "a":
            scheme, boundaries = SpanScheme.of(classes), Boundaries.of(classes)
            assert torch.equal(scheme.inside, boundaries.inside)
            assert torch.equal(scheme.parts, boundaries.parts)
    runs, plain = SpanScheme.runs(3), SpanScheme.of(["a", "b", "c"])
    assert torch.equal(runs.inside, plain.inside)
    assert torch.equal(runs.parts, plain.parts)


def test_schemes_that_make_no_sense() -> None:
    yes = torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(InputError, match="two types"):
        SpanScheme(yes, yes)
    with pytest.raises(InputError, match="not parted"):
        SpanScheme(torch.eye(2) > 0, ~yes)
    with pytest.raises(InputError, match="shapes"):
        SpanScheme(yes, yes[:1])
    f, g, h = make(0, (3,), ("a", "b")).scores
    with pytest.raises(InputError, match="types"):
        Segments(SpanScheme.runs(2)).marginals(f, g, h[:, :1], torch.ones(1, 3, dtype=torch.bool))


# -- every answer --------------------------------------------------------------------------------------


@generated
@given(cases)
def test_totals_under_every_semiring(oracles: ModuleType, case: Case) -> None:
    program, scores = case.program, case.scores
    log_z, best = program.log_partition(scores), program.log_partition(scores, MAX)
    three = program.log_partition(scores, KMax(3))
    drawn = program.log_partition(scores, Sampling(torch.Generator()))
    for s, b, _, _, score, expected, _ in case.tables(oracles):
        for found in (log_z, drawn):
            assert float(found[s, b]) == pytest.approx(expected, rel=1e-10, abs=CLOSE)
        largest = np.append(np.sort(score)[::-1], [-np.inf] * 3)[:3]
        assert float(best[s, b]) == pytest.approx(largest[0], rel=1e-12, abs=CLOSE)
        np.testing.assert_allclose(three[:, s, b], largest, rtol=1e-12, atol=CLOSE)


@generated
@given(cases)
def test_marginals(oracles: ModuleType, case: Case) -> None:
    """Of labels, transitions, lengths and spans; 0 at padding and where nothing is allowed."""
    program = case.program
    node, following, length, *rest = program.marginals(case.scores)
    spans, alone = program.spans(case.scores), program.node_marginals(case.scores)
    torch.testing.assert_close(alone, node, rtol=0, atol=1e-12)
    assert len(rest) == len(case.scores) - 3
    for found in rest:
        torch.testing.assert_close(found, spans, rtol=0, atol=1e-12)
    for s, b, n, all_, *_, p in case.tables(oracles):
        np.testing.assert_allclose(node[s, b, :n], mean(p, all_.node), rtol=0, atol=CLOSE)
        np.testing.assert_allclose(
            following[s, b, : max(n - 1, 0)], mean(p, all_.next)[: max(n - 1, 0)], rtol=0, atol=CLOSE
        )
        np.testing.assert_allclose(length[s, b], mean(p, all_.length), rtol=0, atol=CLOSE)
        np.testing.assert_allclose(spans[s, b, :n], mean(p, all_.span), rtol=0, atol=CLOSE)
        assert not node[s, b, n:].any()
        assert not following[s, b, max(n - 1, 0) :].any()
        assert not spans[s, b, n:].any()


@generated
@given(cases, st.sampled_from([1, 2, 30]))
def test_best_labellings(oracles: ModuleType, case: Case, n_best: int) -> None:
    program = case.program
    decoded = program.decode(case.scores)
    labels, log_probs = program.n_best(case.scores, n_best)
    for s, b, n, all_, score, log_z, _ in case.tables(oracles):
        there = int(min(n_best, (score > -np.inf).sum()))
        assert (log_probs[s, b, there:] == -torch.inf).all()
        assert not decoded[s, b, n:].any()
        if not there:
            continue
        own = score - log_z
        expected = np.sort(own)[::-1][:there]
        np.testing.assert_allclose(log_probs[s, b, :there], expected, rtol=1e-10, atol=CLOSE)
        found = [tuple(y) for y in labels[s, b, :there].tolist()]
        assert len(set(found)) == there
        where = {(*y, *[0] * (labels.shape[-1] - n)): i for i, y in enumerate(all_.y.tolist())}
        np.testing.assert_allclose([own[where[y]] for y in found], expected, rtol=1e-10, atol=CLOSE)
        assert own[where[tuple(decoded[s, b].tolist())]] == pytest.approx(expected[0], abs=CLOSE)


@generated
@given(cases)
def test_entropy(oracles: ModuleType, case: Case) -> None:
    found = case.program.entropy(case.scores)
    for s, b, *_, p in case.tables(oracles):
        expected = -(p[p > 0] * np.log(p[p > 0])).sum()
        assert float(found[s, b]) == pytest.approx(expected, abs=CLOSE)


@generated
@given(cases, st.integers(0, 2**16), st.sampled_from([0.0, 0.5]))
def test_log_prob(oracles: ModuleType, case: Case, seed: int, missing: float) -> None:
    """Of labels of which some may be missing or forbidden; never nan, nor is its gradient."""
    rng = np.random.default_rng(seed)
    y = rng.integers(len(case.classes), size=case.mask.shape)
    y[rng.random(y.shape) < missing] = -1
    leaves = [x.clone().requires_grad_() for x in case.scores]
    value = case.program.log_prob(leaves, torch.tensor(y))
    for s, b, n, all_, score, log_z, _ in case.tables(oracles):
        agree = np.array([oracles.agrees(z, y[b, :n]) for z in all_.y], dtype=bool)
        expected = -np.inf
        if log_z > -np.inf and (score[agree] > -np.inf).any():
            top = score[agree].max()
            expected = top + np.log(np.exp(score[agree] - top).sum()) - log_z
        assert float(value[s, b].detach()) == pytest.approx(expected, rel=1e-10, abs=CLOSE)
    for grad in torch.autograd.grad(value.sum(), leaves, allow_unused=True):
        assert grad is None or not grad.isnan().any()
    for semiring in (LOG, MAX, KMax(2)):
        total = case.program.log_partition(leaves, semiring)
        for grad in torch.autograd.grad(total.sum(), leaves, allow_unused=True):
            assert grad is None or not grad.isnan().any()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("has_segment", [False, True])
def test_gradients(apart: bool, has_segment: bool) -> None:
    case = make(1, (4, 4), SCHEMES[1], 2, apart, has_segment)
    leaves = tuple(x.nan_to_num(0).requires_grad_() for x in case.scores)
    weight = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=torch.float64)
    y = torch.tensor([[1, 2, 2, 3], [0, -1, 2, -1]])
    assert torch.autograd.gradcheck(
        lambda *scores: (weight * case.program.log_prob(scores, y)).sum(), leaves, atol=1e-7, fast_mode=True
    )


@pytest.mark.parametrize("classes", [SCHEMES[0], SCHEMES[6]])
@pytest.mark.parametrize("bans", [0.0, 0.25])
def test_labellings_are_drawn_as_often_as_they_are_probable(
    classes: tuple[str, ...], bans: float, oracles: ModuleType
) -> None:
    """12,000 of each draw, within four standard errors, and four more of what is rare."""
    for seed in range(3, 100):
        case = make(seed, (3, 1, 2), classes, bans=bans, has_segment=True)
        if all(log_z > -np.inf for *_, log_z, _ in case.tables(oracles)):
            break
    n = 12_000
    scores = [x.repeat_interleave(n, 0) for x in case.scores]
    drawn = case.program.sample(scores, torch.Generator().manual_seed(0)).view(2, n, 3, 3).numpy()
    for s, b, length, *_, p in case.tables(oracles):
        assert not drawn[s, :, b, length:].any()
        index = drawn[s, :, b, :length] @ 3 ** np.arange(length)[::-1]
        share = np.bincount(index, minlength=len(p)) / n
        assert (np.abs(share - p) <= 4 * np.sqrt(p * (1 - p) / n) + 4 / n).all()
        assert not share[p == 0].any()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("has_segment", [False, True])
def test_variances(oracles: ModuleType, apart: bool, has_segment: bool) -> None:
    case = make(8, (5, 1, 3), SCHEMES[1], 3, apart, has_segment)
    basis = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    node, following, length, *rest = case.program.variances(case.scores)
    along = case.program.variances(case.scores, basis)[0]
    expected = [torch.zeros_like(x) for x in (node, following, length, *rest, along)]
    for _, b, n, all_, *_, p in case.tables(oracles):
        at_node, at_next, at_end, at_span = (
            torch.tensor(mean(p, x)) for x in (all_.node, all_.next, all_.ends, all_.span)
        )
        m = max(n - 1, 0)
        bend = (at_next - at_next.square())[:m] / 2
        expected[0][b, :n] += (at_node - at_node.square()) / 2
        expected[1][b] += torch.cat([bend, bend.new_zeros((4 - m, 4, 4))]) if apart else bend.sum(0)
        expected[2][b] += (at_end - at_end.square()).sum(0) / 2
        if has_segment:
            expected[3][b, :n] += (at_span - at_span.square()) / 2
        expected[-1][b, :n] += (at_node @ basis.square() - (at_node @ basis).square()) / 2
    for found, true in zip((node, following, length, *rest, along), expected, strict=True):
        torch.testing.assert_close(found, true, rtol=0, atol=CLOSE)


# -- the chain, and numbers that are far apart ---------------------------------------------------------


@pytest.mark.parametrize("classes", SCHEMES)
@pytest.mark.parametrize("apart", [False, True])
def test_without_scores_of_spans_it_is_the_chain(classes: tuple[str, ...], apart: bool) -> None:
    case = make(3, (5, 2, 4), classes, 3, apart)
    f, g, h = case.scores
    nothing, chain = (f, g, 0 * h), ChainProgram(Layout(case.mask))
    program = case.program
    torch.testing.assert_close(program.log_partition(nothing), chain.log_partition((f, g)))
    for one, other in zip(program.marginals(nothing), chain.marginals((f, g)), strict=False):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert torch.equal(program.decode(nothing), chain.decode((f, g)))
    torch.testing.assert_close(program.entropy(nothing), chain.entropy((f, g)))
    for one, other in zip(program.variances(nothing), chain.variances((f, g)), strict=False):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    y = torch.zeros(case.mask.shape, dtype=torch.int64)
    torch.testing.assert_close(program.log_prob(nothing, y), chain.log_prob((f, g), y))


@pytest.mark.parametrize("size", [1.0, 20.0, 200.0, 2000.0])
def test_long_sequences_are_those_of_log_space(size: float) -> None:
    case = make(4, (40, 7, 25), SCHEMES[1], 6, size=size, has_segment=size < 200, bans=0.02)
    case = replace(case, rules=None)
    for by_position in (True, False):
        given = (*by_end(case.scores), case.mask, case.scheme, by_position, True, False)
        found, careful = messages.expectations(*given), messages._by_recursion(*given)
        for name in ("log_z", "node", "next", "length", "ends"):
            one, other = getattr(found, name), getattr(careful, name)
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-9)


def test_a_message_that_underflows_and_is_needed_after_all() -> None:
    """The only span that may begin is improbable at each of its tokens, but all else is worse at the last
    two of them."""
    classes, T = ("B-x", "I-x", "O"), 12
    f = torch.zeros(1, 1, T, 3, dtype=torch.float64)
    f[..., 1] = -110
    f[..., 0] = -torch.inf
    f[:, :, 0, 1] = -torch.inf
    f[:, :, 3, 0] = -110
    f[:, :, -2:, 1:] = torch.tensor([0.0, -650])
    g, h = f.new_zeros((1, 3, 3)), f.new_zeros((1, 1, 9))
    g[:, 2, 1] = -torch.inf
    h[..., :-1] = -torch.inf
    mask, scheme = torch.ones(1, T, dtype=torch.bool), SpanScheme.of(classes)
    found = messages.expectations(f, g, h, mask, scheme)
    torch.testing.assert_close(found.log_z, f.new_full((1, 1), -770))
    torch.testing.assert_close(found.log_z, recursion(f, g, h, mask, scheme, LOG))
    torch.testing.assert_close(found.length[..., -1], f.new_ones((1, 1, 1)))
    torch.testing.assert_close(found.node[0, 0, 3:, :2].sum(), f.new_full((), 9))


def test_single_precision() -> None:
    case = make(5, (5, 3), SCHEMES[1], 3, has_segment=True)
    single = [x.float().requires_grad_() for x in case.scores]
    value = case.program.log_partition(single)
    torch.testing.assert_close(value.double(), case.program.log_partition(case.scores), rtol=0, atol=1e-4)
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(value.sum(), single))


# -- the likelihood ------------------------------------------------------------------------------------


def test_the_likelihood_asks_the_program() -> None:
    case = make(6, (4, 2), SCHEMES[0], 2, has_segment=True, bans=0.2)
    structure, program, mask = Segments(case.scheme, case.rules), case.program, case.mask
    *scores, segment = case.scores
    y = torch.tensor([[0, 1, -1, 2], [-1, 0, 0, 0]])
    every_ = (f, g, h, segment) = *scores, segment
    pairs = [
        (structure.log_prob(f, g, h, y, mask, segment), program.log_prob(every_, y)),
        (structure.log_prob(f, g, h, y, mask), program.log_prob(scores, y)),
        (structure.marginals(f, g, h, mask, segment), program.node_marginals(every_)),
        (structure.spans(f, g, h, mask, segment), program.spans(every_)),
        (structure.decode(f, g, h, mask, segment), program.decode(every_)),
        (structure.entropy(f, g, h, mask, segment), program.entropy(every_)),
        *zip(structure.n_best(f, g, h, mask, 3, segment), program.n_best(every_, 3), strict=True),
        (
            structure.sample(f, g, h, mask, torch.Generator().manual_seed(1), segment),
            program.sample(every_, torch.Generator().manual_seed(1)),
        ),
    ]
    for one, other in pairs:
        assert torch.equal(one, other)
    for flag in ("marginals", "decoder", "n_best", "local_curvature"):
        assert getattr(structure, f"has_{flag}")
    with pytest.raises(NotImplementedError, match="spans"):
        program.walk(scores)
    # The walk of the likelihood is the chain with the same probabilities of neighbours.
    (node, step), (alone, both, _) = structure.walk(f, g, h, mask), program.marginals(scores)
    assert torch.equal(node, alone)
    torch.testing.assert_close(node[:, :, :-1, :, None] * step, both)


def test_local_curvature_is_the_diagonal_of_second_derivatives() -> None:
    """Of labels, and of spans in scores that each has for itself; less what missing labels leave."""
    case = make(7, (4, 4), SCHEMES[0], 2, has_segment=True, apart=True)
    structure, mask = Segments(case.scheme), case.mask
    f, g, h, segment = (x.nan_to_num(0)[:1] for x in case.scores)
    y = torch.tensor([[0, 1, 2, 2], [0, -1, -1, 2]])
    found = structure.local_curvature(f, g, h, y, mask, segment=segment)
    for part, place in ((found.node, 0), (found.next, 1), (found.segment, 3)):

        def value(x: Tensor, place: int = place) -> Tensor:
            given = [f, g, h, segment]
            given[place] = x
            total = recursion(*by_end(given), mask, case.scheme, LOG)
            known = (y >= 0) & mask
            others = torch.arange(3) != y[..., None]
            told = given[0].masked_fill(others & known[..., None], -torch.inf)
            return (recursion(*by_end([told, *given[1:]]), mask, case.scheme, LOG) - total).sum()

        x = [f, g, h, segment][place]
        hessian = torch.autograd.functional.hessian(value, x).reshape(x.numel(), x.numel())
        expected = -hessian.diagonal().view_as(x)[0]
        torch.testing.assert_close(part, expected.clamp(min=0), rtol=0, atol=CLOSE)
    assert found.length.shape == (2, 1, 3)
    assert (found.length >= 0).all()
