"""The rules of the house, read off the source: what CONTRIBUTING.md promises about the layout."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "structgp"
MODULES = sorted(SOURCE.rglob("*.py"))
FAMILIES = {"Inducing", "Mixture", "Table", "FullTable", "Weights", "InducingBlock", "Block"}
COMPILED_BY_TRITON = "fused_kernels.py"
MOST_LINES = 50_000
"""A ratchet: lower it when the package gets shorter."""


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    return [(name_of(p), ast.parse(p.read_text(encoding="utf-8"))) for p in MODULES]


def families_of(tree: ast.Module) -> set[str]:
    """Names under which a module knows families of posteriors; the plan's options share those names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("structgp.gp"):
            found |= {alias.asname or alias.name for alias in node.names if alias.name in FAMILIES}
    return found


def test_nobody_asks_which_family_a_posterior_is_of():
    asked = []
    for name, tree in trees():
        if name.startswith("gp/families/"):
            continue
        known = families_of(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "isinstance",
                "issubclass",
                "type",
            ):
                words = set(re.findall(r"\w+", ast.unparse(node)))
                asked += [f"{name}:{node.lineno}"] if words & known else []
            if isinstance(node, ast.Compare) and re.search(r"\.name (==|!=|in)", ast.unparse(node)):
                told = ("'weights'", "'inducing'", "'table'", "'full table'", "'mixture'")
                asked += [f"{name}:{node.lineno}"] if any(w in ast.unparse(node) for w in told) else []
    assert asked == []


def test_auto_is_resolved_in_the_plan_alone():
    """What the encoder reads off the tokens themselves is its own business."""
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees()
        if not name.startswith("plan/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and "'auto'" in ast.unparse(node)
    ]
    assert [place for place in found if not place.startswith("data/vocabulary.py")] == []


def test_the_terms_of_the_bound_are_added_in_one_function():
    """Divergences are subtracted from an expected log-likelihood by ``lower_bound`` and nobody else."""
    added = []
    for name, tree in trees():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                    right = ast.unparse(node.right)
                    if re.search(r"divergence|\bkl\w*\(", right) and "expected" in ast.unparse(node.left):
                        added.append(f"{name}:{function.name}")
    assert added == ["inference/bound.py:lower_bound"]


@pytest.mark.parametrize("room", ["inference", "paper"])
def test_every_optimiser_goes_through_the_bound(room: str):
    for name, _ in trees():
        if not name.startswith(f"{room}/") or "def step(" not in (SOURCE / name).read_text("utf-8"):
            continue
        if name in ("inference/problem.py", "inference/loop.py"):
            continue
        text = (SOURCE / name).read_text("utf-8")
        assert re.search(r"lower_bound\(|problem\.bound\(|self\.then\.step\(", text), name


def test_no_two_modules_have_one_name():
    names = Counter(p.name for p in MODULES if p.name != "__init__.py")
    assert [name for name, n in names.items() if n > 1] == []


def test_the_map_of_modules_is_up_to_date():
    """CONTRIBUTING.md lists every module with the words of its docstring (``make map``)."""
    spec = importlib.util.spec_from_file_location("module_map", ROOT / "docs" / "_ext" / "module_map.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert text == module.with_map(text)
    assert all(f"`{name_of(p)}`" in text for p in MODULES if p.name != "__init__.py")


def test_pair_is_a_word_of_few_files():
    """Topology is known to structures alone."""
    word = re.compile(r"\bpair(s|wise|ed)?(?=_|\b)|(?<=_)pair(s|wise)?(?=_|\b)", re.IGNORECASE)
    with_it = []
    for path in MODULES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        names |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        names |= {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        if any(word.search(name) for name in names):
            with_it.append(name_of(path))
    assert len(with_it) <= 12, with_it
    assert not [name for name in with_it if name.split("/")[0] in ("gp", "inference", "paper")]


def function_lengths() -> dict[str, int]:
    found = {}
    for name, tree in trees():
        if name.endswith(COMPILED_BY_TRITON):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                found[f"{name}:{node.name}:{node.lineno}"] = node.end_lineno - node.lineno + 1
    return found


def test_functions_are_short():
    lengths = function_lengths()
    ordered = sorted(lengths.values())
    assert {name: n for name, n in lengths.items() if n > 60} == {}
    assert ordered[int(0.9 * len(ordered))] <= 22


def test_the_house_stays_small():
    lines = sum(len(p.read_text(encoding="utf-8").splitlines()) for p in MODULES)
    assert lines <= MOST_LINES
    entries = [p.name for p in SOURCE.iterdir() if p.is_file() or any(p.rglob("*.py"))]
    assert len(entries) <= 18, sorted(entries)
