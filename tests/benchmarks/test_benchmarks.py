"""Each benchmark end to end, at sizes that take a second; and that what it prints is what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from benchmarks.__main__ import main
from benchmarks.record import Options, log_plot, table
from torch import Tensor

from benchmarks import answering, chain, clock, encoding, fit, growth, memory, small_fits


@pytest.fixture(autouse=True)
def threads_as_before() -> None:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def outcome(name: str, folder: Path) -> tuple[list[dict], str]:
    """Rows of the history and the table of a quick run; every plot is a drawing."""
    words = [name, "--quick", "--threads", "1", "--results", str(folder)]
    assert main(words) == 0
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    plots = list(folder.glob("*.svg"))
    assert plots
    for plot in plots:
        root = ElementTree.parse(plot).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert len(root.findall(".//{*}polyline")) >= 1
    return [json.loads(line) for line in lines], (folder / f"{name}.md").read_text()


def test_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(chain, "QUICK", ((2, 3, 5, 4),))
    rows, text = outcome("chain", tmp_path)
    assert [row["dtype"] for row in rows] == ["float64", "float32"]
    for row in rows:
        assert row["threads"] == 1
        assert row["fastest_peer"] in chain.PEERS
        assert set(row["seconds"]) >= {"structgp", "structgp, torch only", "plain loop"}
        assert all(seconds > 0 for seconds in row["seconds"].values())
        for name in row["absent"]:
            assert name in text
    assert text in capsys.readouterr().out
    again, _ = outcome("chain", tmp_path)
    assert again[: len(rows)] == rows
    assert len(again) == 2 * len(rows)


def test_only_the_peers_that_are_asked_for(tmp_path: Path) -> None:
    options = Options(quick=True, threads=1, peers=("plain loop",), results=tmp_path)
    row = chain.measured((2, 3, 5, 4), torch.float64, options, backward=False)
    assert set(row["ratios"]) == {"structgp, torch only", "plain loop"}
    assert row["absent"] == []


@pytest.mark.parametrize("name", ["torch_struct", "torchcrf"])
def test_peers_compute_the_same(name: str) -> None:
    pytest.importorskip(name)
    given = chain.inputs((3, 4, 6, 5), torch.float64, "cpu")
    (peer,) = (function for package, function in chain.PEERS.values() if package == name)
    calls = {n: chain.call_of(f, *given, True) for n, f in (("ours", chain.ours), ("peer", peer))}
    chain.check_equal(calls, (1e-12, 1e-12))


def test_results_that_differ_stop_the_benchmark() -> None:
    f, g, mask = chain.inputs((2, 3, 5, 4), torch.float64, "cpu")

    def wrong(f: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return chain.plain_loop(f, g, mask) + 1e-6

    calls = {"ours": chain.call_of(chain.ours, f, g, mask, False)}
    calls["wrong"] = chain.call_of(wrong, f, g, mask, False)
    with pytest.raises(AssertionError, match="wrong: results differ"):
        chain.check_equal(calls, (1e-9, 1e-9))


def test_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "CHAIN", {"S": 2, "B": 3, "T": 4, "V": 3})
    small = {"N": 6, "T": 3, "S": 4, "V": 2, "D": 5}
    fits = {"M" in size: growth.fit_seconds(size) for size in (small, small | {"M": 4})}
    assert all(fit["steps"] > 0 for fit in fits.values())
    monkeypatch.setattr(growth, "FIT", small)
    monkeypatch.setattr(growth, "fit_seconds", lambda size: fits["M" in size])
    rows, text = outcome("growth", tmp_path)
    kinds = ["chain S", "chain B", "chain T", "chain V"]
    kinds += ["fit N", "fit T", "fit S", "fit V", "fit D", "fit M"]
    assert list(growth.grouped(rows)) == kinds
    for kind, mine in growth.grouped(rows).items():
        assert mine[1]["size"] == 2 * mine[0]["size"]
        assert f"| {kind} | {mine[0]['size']} to {mine[1]['size']} |" in text


@pytest.mark.slow
def test_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycrfsuite")
    monkeypatch.setattr(fit, "QUICK_LINES", 8)
    cheap = {name: fit.METHODS[name] for name in ("crf", "structgp")}
    name = "paper-stochastic"
    monkeypatch.setattr(fit, "METHODS", cheap | {name: (fit.METHODS[name][0], (0.1,), ())})
    rows, text = outcome("fit", tmp_path)
    assert {row["method"] for row in rows} == {*cheap, name}
    last = {row["method"]: row["nll"] for row in rows}
    assert f"NLL {1.01 * max(last['crf'], last['structgp']):.4f}" in text


def test_first_to_reach_the_goal() -> None:
    def row(method: str, cpu: float, nll: float) -> dict:
        more = {"seconds": cpu, "limit": 0, "error": 1.0, "lines": 3}
        return {"method": method, "cpu_seconds": cpu, "nll": nll} | more

    rows = [row("crf", 8.0, 0.5), row("structgp", 1.0, 0.6), row("structgp", 2.0, 0.504)]
    rows += [row("structgp", 4.0, 0.4), row("gp-ess", 50.0, 0.7)]
    text = fit.tables(rows)
    assert "| crf | 8 | 0.5 | 1 | 8 | 4 |" in text
    assert "| structgp | 2 | 0.4 | 1 | 4 | 1 |" in text
    assert "| gp-ess | not reached | 0.7 | 1 | 50 |  |" in text


@pytest.mark.slow
def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "QUICK", (5,))
    (row,), text = outcome("memory", tmp_path)
    assert row["peak_bytes"] > row["bytes_before"] > 20 * 2**20
    assert f"| 5 | {row['peak_bytes'] / 2**20:.3g} |" in text
    grown = [{"sequences": n, "bytes_before": 10, "peak_bytes": 10 + 7 * n} for n in (10, 40)]
    assert "takes: 1.00" in memory.tables(grown)


def test_turns_are_medians_and_the_slow_sit_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    now = [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def work(name: str, seconds: float) -> None:
        calls.append(name)
        # The third round is disturbed.
        now[0] += seconds * (9 if len(calls) > 6 else 1)

    contestants = {"a": lambda: work("a", 1.0), "b": lambda: work("b", 3.0)}
    times = clock.take_turns(contestants, rounds=3, slow=2.0)
    assert "".join(calls) == "ab" + "ab" + "ba" + "a"
    assert times["a"].wall == (1.0, 1.0, 9.0)
    assert times["a"].seconds == 1.0
    assert times["b"].over(times["a"]) == 3.0
    assert clock.exponent([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("words", "told"), [(["speed"], "no benchmark speed"), (["fit", "--device", "cuda"], "for chain")]
)
def test_what_cannot_be_measured_is_told(words: list[str], told: str, capsys) -> None:
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2
    assert told in capsys.readouterr().err


def test_tables_and_plots() -> None:
    assert table(["a", ""], [[1.23456, "x"]]) == "| a |  |\n| --- | --- |\n| 1.23 | x |\n"
    svg = log_plot({"one": [(1, 10), (10, 100)], "none": []}, "x", "y", "T")
    root = ElementTree.fromstring(svg)
    (line,) = root.findall(".//{*}polyline")
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in line.get("points").split())
    assert x0 < x1
    assert y0 > y1


def test_encoding(tmp_path: Path) -> None:
    rows, text = outcome("encoding", tmp_path)
    assert len(rows) == 2 * len(encoding.FORMS) * len(encoding.QUICK) + len(encoding.QUICK_WIDTHS)
    assert {row["form"] for row in rows} == {*encoding.FORMS, "dense"}
    assert all(row["seconds"] > 0 for row in rows)
    assert "1,000, µs" in text
    for form in ("dicts", "columns", "sparse"):
        vocabulary = encoding.FeatureEncoder().fit(encoding.known(form, 1_000))
        assert max(vocabulary.n_sparse, sum(map(len, vocabulary.values))) == 1_000


def test_answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pycrfsuite")
    monkeypatch.setattr(answering, "QUICK", (6, 10))
    monkeypatch.setattr(answering, "FORMS", ("sparse",))
    monkeypatch.setattr(answering, "CRF_STEPS", 3)
    rows, _ = outcome("answering", tmp_path)
    assert [row["what"] for row in rows] == ["predict", "predict_marginals"]
    for row in rows:
        assert row["nll_auto"] == pytest.approx(row["nll_draws"], rel=0.1)
        assert row["of_crf"] > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes cannot be placed on cores here")
def test_cores_are_kept_busy_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, placed, start = [], [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *given: begun.append(start(*given)) or begun[-1])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: placed.append((pid, cores)))
    with small_fits.busy_cores(1):
        assert [other.poll() for other in begun] == [None]
    assert placed == [(begun[0].pid, {min(os.sched_getaffinity(0))})]
    assert begun[0].poll() is not None
