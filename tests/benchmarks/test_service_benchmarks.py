"""The benchmarks of the services, made small: what they promise holds there too."""

from __future__ import annotations

import pytest
from benchmarks.browser import find

from benchmarks import labelling_page, serving


@pytest.mark.slow
def test_serving_under_load(capsys):
    serving.main(["--clients", "8", "--seconds", "12"])
    told = capsys.readouterr().out
    assert "errors and wrong answers: none" in told
    assert "refused: no token 401, another Host 421, malformed 400, oversized 413, slow 408" in told
    assert told.endswith("told to end: exit status 0\n")


@pytest.mark.slow
def test_accepting_during_a_fit(capsys):
    labelling_page.main(["--pool", "600", "--labelled", "25", "--accepted", "3", "--pause", "0.1"])
    told = capsys.readouterr().out
    assert told.count("refit with") == 3
    assert "over HTTP: 3 accepted" in told
    assert find() is None or "in the browser: 3 accepted" in told


def test_answers_are_compared_to_the_last_digit_but_one():
    assert serving.same({"p": [0.5, "A"]}, {"p": [0.500001, "A"]})
    assert not serving.same({"p": [0.5, "A"]}, {"p": [0.5001, "A"]})
    assert not serving.same({"p": [0.5, "A"]}, {"p": [0.5, "B"]})
    assert not serving.same([1.0], [1.0, 2.0])
