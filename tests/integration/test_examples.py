"""The examples do what they claim."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch

from structgp.structures import Chain
from structgp.testing import likelihood_checks

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NOISY, UNALIGNED = example("noisy_annotators"), example("unaligned")
CONFUSION = NOISY.uniform_confusion(3)


def every_labelling(T: int = 4, V: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(2, T, V, generator=generator, dtype=torch.float64)
    g = torch.randn(2, V, V, generator=generator, dtype=torch.float64)
    y = torch.tensor(list(itertools.product(range(V), repeat=T)))
    every = f[:, None].expand(-1, len(y), -1, -1)
    return f, g, y, Chain().log_prob(every, g, y, torch.ones_like(y, dtype=torch.bool))


@pytest.mark.parametrize("check", likelihood_checks(NOISY.Annotator(CONFUSION)), ids=str)
def test_annotator_keeps_the_rules(check) -> None:
    check()


@pytest.mark.parametrize(
    "check", likelihood_checks(UNALIGNED.log_prob_of_summary, normalised=False), ids=str
)
def test_summary_keeps_the_rules(check) -> None:
    check()


def test_annotator_sums_over_true_labels() -> None:
    f, g, y, chain = every_labelling()
    confusion = torch.from_numpy(CONFUSION)
    for seen in y[[0, 7, 40]]:
        expected = torch.logsumexp(chain + confusion[y, seen].log().sum(-1), 1)
        found = NOISY.Annotator(CONFUSION)(f.numpy(), g.numpy(), seen.numpy())
        torch.testing.assert_close(torch.from_numpy(found), expected)


def test_summary_sums_over_labellings() -> None:
    f, g, y, chain = every_labelling()
    short = [torch.unique_consecutive(labels).tolist() for labels in y]
    for n in (0, 7, 40):
        same = [i for i, labels in enumerate(short) if labels == short[n]]
        expected = chain[:, same].logsumexp(1)
        torch.testing.assert_close(UNALIGNED.log_prob_of_summary(f, g, y[n]), expected)


@pytest.mark.slow
def test_noisy_annotators() -> None:
    nll = NOISY.main(["--quick"])
    assert nll["annotator"] < nll["chain"]


@pytest.mark.slow
def test_unaligned() -> None:
    errors = UNALIGNED.main(["--quick"])
    assert errors["summaries"] < min(errors["commonest label"], errors["chain, summaries spread evenly"])


def test_all_examples_are_run() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    for file in (ROOT / "examples").glob("[a-z]*.py"):
        assert f'example("{file.stem}")' in here, file.name


@pytest.mark.slow
def test_constraints_and_masks() -> None:
    found = example("constraints_and_masks").main()
    assert found["broken rules, free"] > 0
    assert found["broken rules, BIO"] == 0
    assert found["error of the rest, one known"] < found["error of the rest"]
    assert found["error, missing summed over"] < found["error, whole lines alone"]


def test_richer_answers() -> None:
    found = example("richer_answers").main()
    assert 0 < found["right at once"] < found["right among ten"] <= found["lines"]
    assert found["exact"] < found["bounds"] < found["covers"]
    # They are of 128 draws, under which the probability has a standard deviation of .4: somewhat over two
    # standard errors.
    assert abs(found["counted"] - found["exact"]) < 0.087


@pytest.mark.slow
def test_uncertainty() -> None:
    found = example("uncertainty").main()
    assert found["model after 60"] < found["model after 15"]
    for n in (15, 60):
        parts = found[f"data after {n}"] + found[f"model after {n}"]
        assert parts == pytest.approx(found[f"total after {n}"])
    assert found["share of errors"] > 0.15  # a tenth at random


@pytest.mark.slow
def test_active_learning() -> None:
    found = example("active_learning").main(["--quick", "--seeds", "1"])
    assert found["random"][0] == found["batch"][0]
    assert max(found["batch"][-1], found["random"][-1]) < found["random"][0]
    # Which error is lower after so few lines depends on the seed; what is chosen does not.
    assert found["told, batch"] > found["told, random"]


@pytest.mark.slow
def test_going_on() -> None:
    found = example("going_on").main()
    assert found["comments, weight 20"] > found["comments"]
    assert found["bounds apart"] == pytest.approx(0, abs=1e-6)
    assert found["NLL, warm"] == pytest.approx(found["NLL, cold"], abs=0.1)
    assert found["weight, warm"] == found["weight before"]
    assert found["error, three parts"] < found["error, one part"]
    assert found["apart after a break"] < 1e-6
    assert not found["file left"]
    assert found["dev NLL"] < 2.4  # log 11: all labels equally probable


def test_why_this_label() -> None:
    found = example("why_this_label").main()
    assert found["three parts"] == pytest.approx(found["log-odds"])
    assert found["features"] == pytest.approx(found["unary"])
    assert found["witnesses"] == 3  # those that speak most for a label have it
    assert found["goes on"] > 0 > found["begins again"]


def test_features() -> None:
    found = example("features").main()
    assert found["with vectors"] < found["words alone"]
    assert found["right of the CRFsuite file"] == 1
    assert found["Wapiti"] < 0.5


def test_report(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    found = example("report").main(["-o", str(page)])
    text = page.read_text(encoding="utf-8")
    assert len(text) == found["bytes"]
    assert f"{100 * found['error']:.1f}" in text
    assert "U12:%x[0,2]" in text
