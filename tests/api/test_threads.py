"""Eight threads ask one fitted model different questions, and get the answers of one thread."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from threading import Barrier
from typing import Any

import pytest
from benchmarks.generate import Generated, generate

from structgp import StructuredGPClassifier
from structgp.answers.ask import KEPT_DRAWS

THREADS = 8


@pytest.fixture(scope="module")
def data() -> Generated:
    return generate(30, n_labels=3, mean_length=6, n_templates=2, n_values=8, strength=2.0, seed=0)


@pytest.fixture(scope="module", params=["weights", "inducing"])
def fitted(request: pytest.FixtureRequest, data: Generated) -> StructuredGPClassifier:
    return StructuredGPClassifier(posterior=request.param).fit(data.X[:20], data.y[:20])


def questions(fitted: StructuredGPClassifier, data: Generated) -> list[Callable[[], Any]]:
    """Each with settings of its own: draws, class weights, labels that are known."""
    X, known = data.X[20:], [[y[0], *[None] * (len(y) - 1)] for y in data.y[20:]]

    def asked(**parameters: Any) -> StructuredGPClassifier:
        return copy.copy(fitted).set_params(**parameters)

    many, few, mean = asked(n_draws=64), asked(n_draws=6), asked(n_draws=0)
    heavy = asked(class_weight={"L0": 5.0}, n_draws=32)
    return [
        lambda: many.predict_marginals(X),
        lambda: few.predict_marginals(X, known),
        lambda: mean.predict_n_best(X[:4], 3),
        lambda: heavy.predict_marginals(X),
        lambda: asked(class_weight="balanced", n_draws=16).predict(X, known),
        lambda: asked(n_draws=10).predict_spans(X[:4]),
        lambda: many.sequence_log_probs(X, known),
        lambda: [u.tolist() for u in few.predict_uncertainty(X).model],
    ]


def test_eight_threads_get_the_answers_of_one(fitted: StructuredGPClassifier, data: Generated) -> None:
    asked = questions(fitted, data)
    assert len(asked) == THREADS
    alone = [ask() for ask in asked]
    assert alone[0] != alone[3], "settings that make a difference"
    fresh = pickle.loads(pickle.dumps(fitted))
    assert not fresh.model_._kept, "draws are not copied"
    together, barrier = questions(fresh, data), Barrier(THREADS)

    def run(n: int) -> list[Any]:
        barrier.wait()
        # Each thread begins with another question.
        order = [(n + k) % THREADS for k in range(THREADS)]
        found = {k: together[k]() for k in order}
        return [found[k] for k in range(THREADS)]

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(run, range(THREADS)):
            assert found == alone


def test_asking_changes_nothing(fitted: StructuredGPClassifier, data: Generated) -> None:
    before = fitted.model_
    fields = {name: value for name, value in vars(before).items() if name != "_kept"}
    for ask in questions(fitted, data):
        ask()
    assert fitted.model_ is before
    assert all(vars(before)[name] is value for name, value in fields.items())
    assert len(before._kept) <= KEPT_DRAWS
    with pytest.raises(FrozenInstanceError):
        before.n_draws = 3  # type: ignore[misc]


def test_data_is_encoded_once_for_each_need(
    fitted: StructuredGPClassifier, data: Generated, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = fitted.model_.encoder
    plain, seen = type(encoder).transform, []

    def transform(self: Any, X: Any, **how: Any) -> Any:
        seen.append((len(X), how.get("apart", True)))
        return plain(self, X, **how)

    monkeypatch.setattr(type(encoder), "transform", transform)
    fitted.evaluate(data.X[20:], data.y[20:])
    # With unknown values told apart for whole labellings; before that quickly, where labels need no more.
    assert seen in ([(10, True)], [(10, False), (10, True)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_answers_after_its_parent_has() -> None:
    """In a process of its own, whose torch has two threads."""
    program = """
import os, signal, torch
torch.set_num_threads(2)
import structgp
model = structgp.StructuredGPClassifier(n_draws=0).fit([[{"w": "a"}, {"w": "b"}]] * 2, [["A", "B"]] * 2)
torch.randn(3_000_000).exp().sum(), model.predict([[{"w": "a"}]])
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends the child where it waits for threads that it does not have
    torch.randn(3_000_000).exp().sum(), model.predict([[{"w": "a"}]])
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    free = {name: value for name, value in os.environ.items() if not name.startswith("OMP_NUM")}
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=free, timeout=120)
    assert found.returncode == 0
