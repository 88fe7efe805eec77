"""Functions as likelihoods: every kind of function, and every way to go wrong."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from structgp.errors import InputError, LikelihoodError, StructgpWarning
from structgp.structures import BlackBox, Chain

S, V = 5, 3
LENGTHS = (4, 1, 0, 2, 3)


def latents(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    B, T = len(LENGTHS), max(LENGTHS)
    f = torch.randn(S, B, T, V, generator=generator, dtype=torch.float64).to(dtype)
    g = torch.randn(S, V, V, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(V, (B, T), generator=generator)
    return f, g, y, torch.arange(T) < torch.tensor(LENGTHS)[:, None]


def chain_of_one(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """The chain, for one sequence, in torch."""
    return Chain().log_prob(f[:, None], g, y[None], torch.ones(1, len(y), dtype=torch.bool))[:, 0]


def chain_in_numpy() -> Callable[..., Any]:
    # Defined inside, so that joblib sends the workers its code and not the name of this file.
    def chain(f: Any, g: Any, y: Any) -> Any:
        score = f[:, np.arange(len(y)), y].sum(1) + g[:, y[:-1], y[1:]].sum(1)
        alpha = f[:, 0]
        for t in range(1, len(y)):
            alpha = np.logaddexp.reduce(alpha[:, :, None] + g, axis=1) + f[:, t]
        return score - np.logaddexp.reduce(alpha, axis=1)

    return chain


def values_only(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
    assert not f.requires_grad
    return chain_of_one(f, g, y)


def chain_in_numpy_of_a_batch(f: Any, g: Any, y: Any, mask: Any) -> Any:
    one = chain_in_numpy()
    return np.stack([one(f[:, b, :n], g, y[b, :n]) for b, n in enumerate(mask.sum(1))], 1)


FUNCTIONS = {
    "torch with gradient": BlackBox(chain_of_one),
    "numpy": BlackBox(chain_in_numpy()),
    "torch, values only": BlackBox(values_only),
}
BATCHED = {
    "torch with gradient": BlackBox(Chain().log_prob, batched=True),
    "numpy": BlackBox(chain_in_numpy_of_a_batch, batched=True),
    "torch, values only": BlackBox(
        lambda f, g, y, mask: Chain().log_prob(f, g, y, mask).detach(), batched=True
    ),
}
each_kind = pytest.mark.parametrize(
    ("kind", "structure"),
    [*FUNCTIONS.items(), *BATCHED.items()],
    ids=[f"{form} {kind}" for form in ("single", "batched") for kind in FUNCTIONS],
)


@each_kind
def test_every_kind_is_told_and_gives_the_same_values(kind: str, structure: BlackBox) -> None:
    value = structure.log_prob(*latents())
    assert structure.probe(3) == structure.probe(7) == kind
    assert structure.has_gradient == (kind == "torch with gradient")
    assert structure.gradient_problem is None
    torch.testing.assert_close(value, Chain().log_prob(*latents()))
    assert (value[:, LENGTHS.index(0)] == 0).all()


@each_kind
def test_single_precision_goes_in_and_out(kind: str, structure: BlackBox) -> None:
    f, g, y, mask = latents(torch.float32)
    value = structure.log_prob(f, g, y, mask)
    assert value.dtype == torch.float32
    # The function itself computes in double precision.
    expected = Chain().log_prob(f.double(), g.double(), y, mask).float()
    torch.testing.assert_close(value, expected, rtol=1e-7, atol=1e-7)


@each_kind
def test_whatever_stands_at_padding_is_ignored(kind: str, structure: BlackBox) -> None:
    f, g, y, mask = latents()
    junk = torch.where(mask[..., None], f, torch.nan), g, torch.where(mask, y, -77), mask
    torch.testing.assert_close(structure.log_prob(*junk), structure.log_prob(f, g, y, mask))


@each_kind
def test_nothing_but_padding(kind: str, structure: BlackBox) -> None:
    f, g, y, mask = latents()
    assert (structure.log_prob(f, g, y, torch.zeros_like(mask)) == 0).all()
    assert structure.log_prob(f[:, :, :0], g, y[:, :0], mask[:, :0]).shape == (S, len(LENGTHS))


@pytest.mark.parametrize("structures", [FUNCTIONS, BATCHED], ids=["single", "batched"])
def test_a_gradient_that_is_carried_arrives(structures: dict[str, BlackBox]) -> None:
    results = []
    for structure in (structures["torch with gradient"], Chain()):
        f, g, y, mask = latents()
        value = structure.log_prob(f.requires_grad_(), g.requires_grad_(), y, mask)
        results.append(torch.autograd.grad(value.square().sum(), (f, g)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)
    for kind in ("numpy", "torch, values only"):
        f, g, y, mask = latents()
        value = structures[kind].log_prob(f.requires_grad_(), g.requires_grad_(), y, mask)
        assert not value.requires_grad


@pytest.mark.parametrize(
    ("function", "letter"),
    [
        (lambda f, g, y: chain_of_one(f, g.detach(), y), "g"),
        (lambda f, g, y: chain_of_one(f.detach(), g, y), "f"),
        (lambda f, g, y: chain_of_one(f, 2 * g - g.detach(), y), "g"),
        (lambda f, g, y: chain_of_one(f, g, y) + f[:, 0, 0].detach(), "f"),
    ],
)
def test_an_incomplete_or_wrong_gradient_is_not_used(function: Callable[..., Any], letter: str) -> None:
    structure = BlackBox(function)
    with pytest.warns(StructgpWarning, match=f"direction of {letter} .* only its values are used"):
        assert structure.probe(3) == "torch, values only"
    assert structure.gradient_problem is not None
    assert not structure.has_gradient  # and no second warning
    f, g, y, mask = latents()
    assert not structure.log_prob(f.requires_grad_(), g, y, mask).requires_grad


def test_a_backward_pass_that_raises_is_not_used() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, f: Tensor) -> Tensor:
            return f.sum((1, 2))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise RuntimeError("not\nwritten")

    structure = BlackBox(lambda f, g, y: Broken.apply(f) + g.sum((1, 2)))
    with pytest.warns(StructgpWarning, match="backward pass raised RuntimeError: not written"):
        assert not structure.has_gradient


@pytest.mark.parametrize("n_labels", [1, 2, 3, 4, 5, 20])
def test_any_number_of_labels_can_be_tried(n_labels: int) -> None:
    assert BlackBox(chain_of_one).probe(n_labels) == "torch with gradient"
    assert BlackBox(chain_in_numpy()).probe(n_labels) == "numpy"


def test_a_function_that_knows_one_number_of_labels() -> None:
    def of_three(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
        return chain_of_one(f + torch.tensor([0.1, 0.2, 0.3]), g, y)

    with pytest.raises(LikelihoodError, match="tried on 3 positions and 7 labels"):
        BlackBox(of_three).probe(7)
    structure = BlackBox(of_three)
    assert structure.log_prob(*latents()).isfinite().all()
    assert structure.has_gradient


def test_a_function_with_few_possible_labellings() -> None:
    """Only labellings of nothing but 2; the gradient is compared on one of them."""

    def constrained(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
        value = chain_of_one(f, g, y)
        return value if bool((y == 2).all()) else torch.full_like(value, -torch.inf)

    structure = BlackBox(constrained)
    assert structure.probe(12) == "torch with gradient"
    f, g, _, mask = latents()
    value = structure.log_prob(f, g, torch.where(mask.cumsum(1) > 1, 0, 2), mask)
    assert (value[:, [0, 3, 4]] == -torch.inf).all()
    assert value[:, 1].isfinite().all()


def test_a_function_that_is_always_impossible() -> None:
    assert BlackBox(lambda f, g, y: np.full(len(f), -np.inf)).probe(3) == "numpy"
    with pytest.warns(StructgpWarning, match="no labelling"):
        assert not BlackBox(lambda f, g, y: f.sum((1, 2)) - torch.inf).has_gradient


def test_the_trial_does_not_pass_on_warnings_of_wrong_attempts() -> None:
    def warns_of_tensors(f: Any, g: Any, y: Any) -> Any:
        if isinstance(f, Tensor):
            warnings.warn("no array", DeprecationWarning, stacklevel=1)
        return np.zeros(len(f))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert BlackBox(warns_of_tensors).probe(3) == "numpy"
    assert not caught


def test_what_a_numpy_function_is_handed() -> None:
    seen = []

    def record(f: Any, g: Any, y: Any) -> Any:
        assert isinstance(f, np.ndarray)
        seen.append((f, g, y))
        return np.zeros(len(f))

    f, g, y, mask = latents(torch.float32)
    structure = BlackBox(record)
    structure.probe(V)
    seen.clear()
    structure.log_prob(f, g, y, mask)
    assert [len(labels) for _, _, labels in seen] == [4, 1, 2, 3]
    for one_f, one_g, one_y in seen:
        assert one_f.shape == (S, len(one_y), V)
        assert one_g.shape == (S, V, V)
        assert (one_f.dtype, one_g.dtype, one_y.dtype) == (np.float64, np.float64, np.int64)
        for array in (one_f, one_g, one_y):
            assert array.flags.c_contiguous
            assert not array.flags.writeable


def test_a_batched_function_finds_zeros_at_padding() -> None:
    def looks(f: Any, g: Any, y: Any, mask: Any) -> Any:
        assert (f[:, ~mask] == 0).all()
        assert (y[~mask] == 0).all()
        return np.zeros(f.shape[:2])

    f, g, y, mask = latents()
    junk = torch.where(mask[..., None], f, torch.nan), g, torch.where(mask, y, -77), mask
    assert (BlackBox(looks, batched=True).log_prob(*junk) == 0).all()


def test_a_numpy_function_cannot_change_what_it_is_handed() -> None:
    def meddles(f: Any, g: Any, y: Any) -> Any:
        f = np.asarray(f)
        if len(y) == 4:
            f[:] = 0
        return np.zeros(len(f))

    f, g, y, mask = latents()
    with pytest.raises(LikelihoodError, match="ValueError: assignment destination is read-only"):
        BlackBox(meddles).log_prob(f, g, y, mask)
    assert f.numpy().flags.writeable
    assert torch.equal(f, latents()[0])


@pytest.mark.parametrize("grad", [True, False])
def test_what_a_torch_function_changes_is_its_own(grad: bool) -> None:
    def meddles(f: Tensor, g: Tensor, y: Tensor) -> Tensor:
        value = chain_of_one(f.clone(), g.clone(), y.clone())
        for x in (f, g, y):
            x.zero_()
        return value if grad else value.detach()

    structure = BlackBox(meddles)
    assert structure.has_gradient == grad
    given = latents()
    torch.testing.assert_close(structure.log_prob(*given), Chain().log_prob(*latents()))
    for now, before in zip(given, latents(), strict=True):
        assert torch.equal(now, before)


@pytest.mark.parametrize(
    "form", [list, tuple, np.float32, lambda v: v.astype(int), torch.from_numpy, lambda v: [*map(float, v)]]
)
def test_any_real_numbers_will_do(form: Callable[[Any], Any]) -> None:
    structure = BlackBox(lambda f, g, y: form(np.arange(len(f)) - 7.0))
    assert structure.probe(3) == "numpy"
    expected = torch.arange(S).double() - 7
    assert (structure.log_prob(*latents())[:, 0] == expected).all()


def test_a_list_of_tensors_carries_its_gradient() -> None:
    structure = BlackBox(lambda f, g, y: list(chain_of_one(f, g, y)))
    assert structure.has_gradient
    torch.testing.assert_close(structure.log_prob(*latents()), Chain().log_prob(*latents()))


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (lambda n: np.zeros((n, 1)), r"a numpy.ndarray of shape \(\d, 1\)"),
        (lambda n: torch.zeros(n, 1), r"a torch.Tensor of shape \(\d, 1\)"),
        (lambda n: 0.0, "one number"),
        (lambda n: np.float64(0), "one number"),
        (lambda n: np.zeros(n + 1), r"a numpy.ndarray of shape \(\d,\)"),
        (lambda n: [0.0] * (n + 1), r"a list of shape \(\d,\)"),
        (lambda n: None, "a NoneType"),
        (lambda n: "abcde"[:n], "a str"),
        (lambda n: ["0"] * n, "a list"),
        (lambda n: [[0.0], [0.0, 1.0]], "a list"),
        (lambda n: np.zeros(n, complex), "a numpy.ndarray of complex128"),
        (lambda n: torch.zeros(n, dtype=torch.complex64), "a torch.Tensor of torch.complex64"),
        (lambda n: np.zeros(n, object), "a numpy.ndarray of object"),
        (lambda n: np.zeros(n, bool), "a numpy.ndarray of bool"),
    ],
)
def test_anything_but_a_number_a_draw_is_an_error(result: Callable[[int], Any], got: str) -> None:
    with pytest.raises(LikelihoodError, match=rf"returned {got} where \(S,\) = \(4,\) real"):
        BlackBox(lambda f, g, y: result(len(f))).probe(V)
    # Also when it happens only later.
    late = BlackBox(lambda f, g, y: result(len(f)) if len(y) == 2 else np.zeros(len(f)))
    with pytest.raises(LikelihoodError, match=rf"returned {got} where \(S,\) = \(5,\)") as caught:
        late.log_prob(*latents())
    assert caught.value.sequence == 3


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_nan_and_infinity_are_errors(number: float, kind: str) -> None:
    def sometimes(f: Any, g: Any, y: Any) -> Any:
        value = 0 * f.sum(axis=(1, 2)) if kind == "torch" else np.zeros(len(f))
        if len(y) == 2:
            value[3] = number
        return value

    _, _, y, _ = latents()
    with pytest.raises(LikelihoodError, match=f"returned {number} for draw 3 of 5") as caught:
        BlackBox(sometimes).log_prob(*latents())
    assert caught.value.sequence == 3
    assert f"T = 2 and y = {y[3, :2].tolist()}" in str(caught.value)
    with pytest.raises(LikelihoodError, match=f"returned {number} for draw 0 of"):
        BlackBox(lambda f, g, y: np.full(len(f), number)).probe(V)


def test_minus_infinity_is_a_value() -> None:
    structure = BlackBox(lambda f, g, y: np.where(np.arange(len(f)) == 1, -np.inf, 0.0))
    value = structure.log_prob(*latents())
    assert (value[1, [0, 1, 3, 4]] == -torch.inf).all()
    assert (value[2] == 0).all()


def raises_on_two(f: Any, g: Any, y: Any) -> Any:
    if len(y) == 2:
        raise KeyError("no\nsuch label")
    return np.zeros(len(f))


def test_an_exception_says_on_which_sequence() -> None:
    with pytest.raises(LikelihoodError) as caught:
        BlackBox(raises_on_two).log_prob(*latents())
    error, y = caught.value, latents()[2]
    assert error.sequence == 3
    assert isinstance(error.__cause__, KeyError)
    assert error.place == "likelihood raises_on_two"
    assert r"raised KeyError: 'no\nsuch label'" in error.problem
    assert f"T = 2 and y = {y[3, :2].tolist()}" in error.problem
    assert "\n" not in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.sequence) == (str(error), 3)


def test_a_message_is_one_line_and_not_too_long() -> None:
    def wordy(f: Any, g: Any, y: Any) -> Any:
        if len(y) > 3:
            raise ValueError("first\n" + 1000 * "x")
        return np.zeros(len(f))

    f, g = torch.zeros(1, 1, 50, 2), torch.zeros(1, 2, 2)
    y = torch.zeros(1, 50, dtype=torch.int64)
    with pytest.raises(LikelihoodError, match=r"first x+\.\.\., with T = 50 and y = .*, \.\.\.\]"):
        BlackBox(wordy).log_prob(f, g, y, torch.ones_like(y, dtype=torch.bool))


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_pass(interrupt: type[BaseException]) -> None:
    def stops(f: Any, g: Any, y: Any) -> Any:
        raise interrupt

    with pytest.raises(interrupt):
        BlackBox(stops).probe(V)


def test_a_function_that_fails_with_everything() -> None:
    def nameless(f: Any, g: Any, y: Any) -> Any:
        return np.log(f.no_such_thing)

    with pytest.raises(LikelihoodError) as caught:
        BlackBox(partial(nameless)).probe(V)
    text = str(caught.value)
    assert text.startswith("likelihood nameless: ")
    assert "with torch tensors it raised AttributeError: 'Tensor'" in text
    assert "with NumPy arrays it raised AttributeError: 'numpy.ndarray'" in text
    assert isinstance(caught.value.__cause__, AttributeError)


def test_a_gradient_that_gets_lost_on_the_way_is_an_error() -> None:
    def forgetful(f: Tensor, g: Tensor, y: Tensor) -> Any:
        value = chain_of_one(f, g, y)
        return value.detach().numpy() if len(y) == 1 else value

    f, g, y, mask = latents()
    structure = BlackBox(forgetful)
    assert structure.log_prob(f, g, y, mask).isfinite().all()
    with pytest.raises(LikelihoodError, match="carries no gradient") as caught:
        structure.log_prob(f.requires_grad_(), g, y, mask)
    assert caught.value.sequence == 1


def test_errors_of_batched_functions() -> None:
    def odd(f: Any, g: Any, y: Any, mask: Any) -> Any:
        value = np.zeros(f.shape[:2])
        value[:, mask.sum(1) == 4] = np.nan
        return value

    f, g, y, mask = latents()
    order = [2, 1, 0]  # the first one is all padding
    with pytest.raises(LikelihoodError, match="returned nan for draw 0 of 5, with T = 4") as caught:
        BlackBox(odd, batched=True).log_prob(f[:, order], g, y[order], mask[order])
    assert caught.value.sequence == 2
    with pytest.raises(LikelihoodError, match=r"\(4,\) where \(S, B\) = \(4, 2\) real numbers"):
        BlackBox(lambda f, g, y, mask: np.zeros(len(f)), batched=True).probe(V)

    def raises(f: Any, g: Any, y: Any, mask: Any) -> Any:
        if mask.shape[1] == 4:
            raise ValueError("boom")
        return np.zeros(f.shape[:2])

    with pytest.raises(LikelihoodError, match="boom, with 4 sequences of T = 4 or less") as caught:
        BlackBox(raises, batched=True).log_prob(f, g, y, mask)
    assert caught.value.sequence is None


def test_a_pool_gives_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = BlackBox(chain_in_numpy()).log_prob(*latents())
    structure = BlackBox(chain_in_numpy(), n_jobs=2)
    assert torch.equal(structure.log_prob(*latents()), alone)
    # Fewer sequences than processes: the draws are shared out.
    f, g, y, mask = latents()
    assert torch.equal(structure.log_prob(f[:, :1], g, y[:1], mask[:1]), alone[:, :1])
    assert torch.equal(structure.log_prob(f[:1, :1], g[:1], y[:1], mask[:1]), alone[:1, :1])
    asked = []
    monkeypatch.setattr("joblib.effective_n_jobs", lambda n: asked.append(n) or 2)
    assert torch.equal(BlackBox(chain_in_numpy(), n_jobs=-1).log_prob(*latents()), alone)
    assert asked == [-1]


def test_a_pool_works_in_other_processes_with_one_thread_each() -> None:
    def process(f: Any, g: Any, y: Any) -> Any:
        import os

        assert not f.flags.writeable
        return np.full(len(f), float(os.getpid()) + (os.environ.get("OMP_NUM_THREADS") != "1") / 2)

    import os

    value = BlackBox(process, n_jobs=2).log_prob(*latents())
    used = value[:, [0, 1, 3, 4]].unique()
    assert float(os.getpid()) not in used
    assert (used == used.round()).all()


def test_an_exception_in_a_pool_says_on_which_sequence() -> None:
    def raises(f: Any, g: Any, y: Any) -> Any:
        if len(y) == 2:
            raise ValueError("boom")
        return np.zeros(len(f))

    with pytest.raises(LikelihoodError, match=r"raised ValueError: boom, with T = 2") as caught:
        BlackBox(raises, n_jobs=2).log_prob(*latents())
    assert caught.value.sequence == 3
    assert "ValueError: boom" in str(caught.value.__cause__)


def test_a_function_that_cannot_travel_to_a_pool() -> None:
    lock = threading.Lock()

    def locked(f: Any, g: Any, y: Any) -> Any:
        with lock:
            return np.zeros(len(f))

    assert (BlackBox(locked).log_prob(*latents()) == 0).all()
    with pytest.raises(LikelihoodError, match=r"in 2 processes: .*; pass n_jobs=1"):
        BlackBox(locked, n_jobs=2).log_prob(*latents())


def test_what_a_black_box_is_made_of() -> None:
    with pytest.raises(InputError, match="a int cannot be called"):
        BlackBox(3)  # type: ignore[arg-type]
    for n_jobs in (0, 1.5, "all"):
        with pytest.raises(InputError, match="n_jobs: must be an integer other than 0"):
            BlackBox(chain_of_one, n_jobs=n_jobs)  # type: ignore[arg-type]
    assert repr(BlackBox(chain_of_one)) == "BlackBox(chain_of_one, batched=False, n_jobs=None)"
