"""What every structure must do, whatever it computes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

import structgp.structures
from structgp.errors import InputError
from structgp.structures import BlackBox, ByValues, Chain, Differences, Piecewise, Structure, as_structure

S, V = 2, 3
LENGTHS = (4, 1, 3)


@dataclass(frozen=True)
class Entry:
    """How to make a structure, and whether its probabilities sum to 1 over all labellings (a
    pseudo-likelihood's do not)."""

    make: Callable[[], Structure]
    normalized: bool = True


def softmax_at_each_position(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """One sequence, f (S, T, V); the pairwise values count for nothing."""
    return f.log_softmax(-1)[:, torch.arange(len(y)), y].sum(-1) + 0 * g.sum((1, 2))


STRUCTURES = {
    "BlackBox": Entry(lambda: BlackBox(softmax_at_each_position)),
    "ByValues": Entry(lambda: ByValues(BlackBox(softmax_at_each_position))),
    "Chain": Entry(Chain),
    "Differences": Entry(lambda: Differences(Chain())),
    "Piecewise": Entry(Piecewise, normalized=False),
}

each_structure = pytest.mark.parametrize("entry", STRUCTURES.values(), ids=STRUCTURES.keys())


def latents(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    B, T = len(LENGTHS), max(LENGTHS)
    f = torch.randn(S, B, T, V, generator=generator, dtype=torch.float64)
    g = torch.randn(S, V, V, generator=generator, dtype=torch.float64)
    y = torch.randint(V, (B, T), generator=generator)
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    return f, g, y, mask


def offers(structure: Structure, method: str) -> bool:
    return getattr(type(structure), method) is not getattr(Structure, method)


def test_every_exported_structure_has_an_entry() -> None:
    exported = {
        name
        for name in structgp.structures.__all__
        if inspect.isclass(part := getattr(structgp.structures, name))
        and issubclass(part, Structure)
        and not inspect.isabstract(part)
    }
    declared = {"Declared", "Segments"}  # of other scores than f and g: test_declared, test_segments
    assert exported - declared == set(STRUCTURES)


@each_structure
def test_log_prob_is_one_number_a_draw_and_sequence(entry: Entry) -> None:
    f, g, y, mask = latents()
    value = entry.make().log_prob(f, g, y, mask)
    assert value.shape == (S, len(LENGTHS))
    assert value.dtype == f.dtype
    assert (value <= 0).all()


@each_structure
def test_probabilities_sum_to_one(entry: Entry, oracles: ModuleType) -> None:
    if not entry.normalized:
        pytest.skip("not a normalised likelihood")
    f, g, _, _ = latents()
    for n in range(1, 5):
        y = torch.tensor(oracles.labellings(n, V))
        every = f[:, :1, :n].expand(-1, len(y), -1, -1)
        value = entry.make().log_prob(every, g, y, torch.ones_like(y, dtype=torch.bool))
        torch.testing.assert_close(value.exp().sum(-1), torch.ones(S, dtype=f.dtype))


@each_structure
def test_padding_and_batching_change_nothing(entry: Entry) -> None:
    f, g, y, mask = latents()
    together = entry.make().log_prob(f, g, y, mask)
    for b, n in enumerate(LENGTHS):
        alone = entry.make().log_prob(f[:, [b], :n], g, y[[b], :n], mask[[b], :n])
        torch.testing.assert_close(together[:, [b]], alone)
    junk = torch.where(mask[..., None], f, 1e3), g, torch.where(mask, y, 77), mask
    torch.testing.assert_close(entry.make().log_prob(*junk), together)


@each_structure
def test_labels_have_no_order(entry: Entry) -> None:
    f, g, y, mask = latents()
    order = torch.tensor([2, 0, 1])
    renamed = f[..., order], g[:, order][..., order], order.argsort()[y], mask
    torch.testing.assert_close(entry.make().log_prob(*renamed), entry.make().log_prob(f, g, y, mask))


@each_structure
def test_gradients(entry: Entry) -> None:
    f, g, y, mask = latents()
    f.requires_grad_()
    g.requires_grad_()
    if isinstance(entry.make(), ByValues):
        pytest.skip("answers, and is not trained with")
    assert entry.make().has_gradient
    assert torch.autograd.gradcheck(lambda f, g: entry.make().log_prob(f, g, y, mask), (f, g))


@each_structure
def test_marginals_are_sums_of_probabilities(entry: Entry, oracles: ModuleType) -> None:
    structure = entry.make()
    assert structure.has_marginals == offers(structure, "marginals")
    if not structure.has_marginals:
        pytest.skip("offers no marginals")
    f, g, _, mask = latents()
    marginals = structure.marginals(f, g, mask)
    assert (marginals[:, ~mask] == 0).all()
    for b, n in enumerate(LENGTHS):
        y = torch.tensor(oracles.labellings(n, V))
        every = f[:, [b], :n].expand(-1, len(y), -1, -1)
        prob = structure.log_prob(every, g, y, torch.ones_like(y, dtype=torch.bool)).exp()
        on = torch.nn.functional.one_hot(y, V).double()
        expected = torch.einsum("sn,ntv->stv", prob, on)
        torch.testing.assert_close(marginals[:, b, :n], expected)


@each_structure
def test_decoded_labelling_is_the_most_probable(entry: Entry, oracles: ModuleType) -> None:
    structure = entry.make()
    assert structure.has_decoder == offers(structure, "decode")
    if not structure.has_decoder:
        pytest.skip("offers no decoder")
    f, g, _, mask = latents()
    decoded = structure.decode(f, g, mask)
    assert (decoded[:, ~mask] == 0).all()
    for b, n in enumerate(LENGTHS):
        y = torch.tensor(oracles.labellings(n, V))
        every = f[:, [b], :n].expand(-1, len(y), -1, -1)
        best = structure.log_prob(every, g, y, torch.ones_like(y, dtype=torch.bool)).argmax(-1)
        assert (decoded[:, b, :n] == y[best]).all()


@each_structure
def test_curvature_is_symmetric_and_positive(entry: Entry) -> None:
    structure = entry.make()
    assert structure.has_curvature == offers(structure, "curvature")
    if not structure.has_curvature:
        pytest.skip("offers no curvature")
    f, g, y, mask = latents()
    B, T = mask.shape
    curvature = structure.curvature(f, g, y, mask)
    assert curvature.node.shape == (B, V, T, T)
    assert curvature.next.shape == (len(mask), V, V)
    torch.testing.assert_close(curvature.node, curvature.node.mT)
    assert torch.linalg.eigvalsh(curvature.node).min() > -1e-12
    outside = ~(mask[:, :, None] & mask[:, None, :])
    assert (curvature.node.movedim(1, -1)[outside] == 0).all()


def test_a_structure_needs_log_prob_only() -> None:
    class Independent(Structure):
        """A softmax at each position."""

        def log_prob(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            picked = f.log_softmax(-1).gather(-1, y.expand(len(f), -1, -1)[..., None])[..., 0]
            return torch.where(mask, picked, 0).sum(-1)

    f, g, y, mask = latents()
    structure = Independent()
    # No pairwise scores: the chain is a softmax at each position.
    chain = Chain().log_prob(f, torch.zeros_like(g), y, mask)
    torch.testing.assert_close(structure.log_prob(f, g, y, mask), chain)
    assert structure.has_gradient
    for offer in ("has_curvature", "has_marginals", "has_decoder"):
        assert not getattr(structure, offer)
        assert getattr(Chain(), offer)
    for method, arguments in (
        ("marginals", (f, g, mask)),
        ("decode", (f, g, mask)),
        ("curvature", (f, g, y, mask)),
    ):
        with pytest.raises(NotImplementedError, match="Independent offers no"):
            getattr(structure, method)(*arguments)


def test_a_structure_without_log_prob_cannot_be_made() -> None:
    class Nothing(Structure):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Nothing()  # type: ignore[abstract]


@pytest.mark.parametrize(("name", "kind"), [("chain", Chain), ("piecewise", Piecewise)])
def test_a_name_stands_for_a_structure(name: str, kind: type[Structure]) -> None:
    assert type(as_structure(name)) is kind


def test_a_structure_stands_for_itself() -> None:
    structure = Chain()
    assert as_structure(structure, n_jobs=2) is structure


def test_a_function_stands_for_a_black_box() -> None:
    structure = as_structure(softmax_at_each_position, n_jobs=2)
    assert isinstance(structure, BlackBox)
    assert structure.function is softmax_at_each_position
    assert not structure.batched
    assert structure.n_jobs == 2


def test_a_callable_says_that_it_takes_batches() -> None:
    class Batched:
        batched = True

        def __call__(self, f: Tensor, g: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            return Chain().log_prob(f, g, y, mask)

    structure = as_structure(Batched())
    assert isinstance(structure, BlackBox)
    assert structure.batched
    expected = Chain().log_prob(*latents())
    torch.testing.assert_close(structure.log_prob(*latents()), expected)


@pytest.mark.parametrize("likelihood", [Chain, Piecewise, dict])
def test_a_class_is_no_likelihood(likelihood: type) -> None:
    with pytest.raises(InputError, match=f"pass an instance, as {likelihood.__name__}"):
        as_structure(likelihood)


@pytest.mark.parametrize("likelihood", ["chian", None, 3, torch.zeros(2)])
def test_what_is_no_likelihood(likelihood: object) -> None:
    with pytest.raises(InputError, match="'chain', 'piecewise', a Spec, a Structure or a function"):
        as_structure(likelihood)
