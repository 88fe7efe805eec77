"""The examples do what they claim, and the page on likelihoods runs as it stands."""

from __future__ import annotations

import importlib.util
import itertools
import re
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


def test_page_on_likelihoods_runs(capsys) -> None:
    page = (ROOT / "docs" / "likelihoods.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(code, "likelihoods.md", "exec"), names)
    assert "second-order differences" in capsys.readouterr().out


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
    errors = NOISY.main(["--quick"])
    assert errors["annotator"] < errors["chain"]


@pytest.mark.slow
def test_unaligned() -> None:
    errors = UNALIGNED.main(["--quick"])
    assert errors["summaries"] < min(
        errors["commonest label"], errors["chain, summaries spread evenly"]
    )
