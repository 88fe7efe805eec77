"""The code and the commands in README and in the pages of ``docs`` run, and print what the pages show."""

from __future__ import annotations

import importlib.util
import inspect
import multiprocessing
import multiprocessing.forkserver
import pkgutil
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

import structgp
from structgp import StructuredGPClassifier
from structgp.cli import main

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("run_page.py")
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
SHELL = {"tutorial.md"}
"""Pages whose commands are run. In the others it is checked that the options exist."""

SLOW = {
    "active.md",
    "coming-from-crfsuite.md",
    "constraints.md",
    "decisions.md",
    "going-on.md",
    "structures.md",
    "weights.md",
    "which-labels.md",
}

IMPORTED_ONCE = ["structgp.cli.showing"]


def _driver() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_page", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_page"] = module
    spec.loader.exec_module(module)
    return module


run_page = _driver()


def blocks(page: Path, language: str) -> list:
    return [b for b in run_page.blocks(page.read_text(encoding="utf-8")) if b.language == language]


def name(page: Path) -> str:
    return page.stem


@pytest.fixture(scope="module")
def processes() -> multiprocessing.context.BaseContext:
    """Processes that start with torch imported, where the system supports it: a page takes one second, its
    imports take three."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with pytest.MonkeyPatch.context() as patch:
        # As in conftest: with more threads than free cores a page takes four times as long.
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.forkserver.ensure_running()
    return context


RUN = [
    pytest.param(p, marks=pytest.mark.slow if p.name in SLOW else ()) for p in PAGES if blocks(p, "python")
]


@pytest.mark.parametrize("page", RUN, ids=name)
def test_page_runs(page: Path, tmp_path: Path, processes) -> None:
    arguments = {"PAGE": str(page), "FOLDER": str(tmp_path), "SHELL": page.name in SHELL}
    process = processes.Process(
        target=runpy.run_path, args=(str(DRIVER),), kwargs={"init_globals": arguments}
    )
    process.start()
    process.join()
    failure = tmp_path / "failure.txt"
    assert process.exitcode == 0, failure.read_text("utf-8") if failure.exists() else "it died"
    if page == README:
        assert (tmp_path / "tagger.sgp").exists()


def test_no_block_escapes() -> None:
    """All fences are of known kinds, and a block that is not run tells the reader why."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        kinds = set(re.findall(r"^ *```+([^`\n]*)$", text, re.MULTILINE))
        assert kinds <= {"python", "sh", "text", "json", "", "{toctree}", "{include} ../CHANGES.md"}, page
        for block in blocks(page, "python"):
            assert block.left_out == ("not run" in block.text), (page.name, block.line)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "sh")], ids=name)
def test_commands_and_options_exist(page: Path) -> None:
    for block in blocks(page, "sh"):
        for words in run_page.commands(block.text):
            command = main.commands[words[0]]
            known = {option for parameter in command.params for option in parameter.opts}
            assert {word for word in words if word.startswith("-")} <= known, words


def test_readme_has_the_commands() -> None:
    found = {words[0] for block in blocks(README, "sh") for words in run_page.commands(block.text)}
    assert found == {"demo", "train", "tag", "evaluate", "expect", "report", "label"}


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (page.name, target)


def test_every_command_is_in_the_help() -> None:
    with click.Context(main) as context:
        known = "calibrate convert demo describe evaluate expect label next report serve tag train"
        assert sorted(main.list_commands(context)) == known.split()


def test_every_command_and_option_is_in_the_reference() -> None:
    spec = importlib.util.spec_from_file_location(
        "command_reference", ROOT / "docs" / "_ext" / "command_reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PLACE in (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    sections = dict(
        zip(*[iter(re.split(r"^## (.*)$", module.reference(), flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    assert sorted(sections) == sorted(main.commands)
    for name, command in main.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.opts[-1] in sections[name], (name, parameter.opts)


def test_every_example_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    scripts = {p.name for p in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", page)) == scripts


def test_every_page_is_linked() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^([a-z-]+)$", index, re.MULTILINE))
    assert {p.stem for p in PAGES} - {"README", "index"} <= listed


def test_links_lead_somewhere() -> None:
    """In README and in the pages as files, for those who read them without the site."""
    for page in [*PAGES, *(ROOT / "docs" / "api").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
            assert (page.parent / link).exists(), (page.name, link)


def test_reference_has_every_method_and_name() -> None:
    reference = "".join(p.read_text("utf-8") for p in (ROOT / "docs" / "api").glob("*.md"))
    own = {
        name
        for name, member in inspect.getmembers(StructuredGPClassifier, inspect.isfunction)
        if not name.startswith("_") and member.__module__.startswith("structgp.")
    }
    documented = set(re.findall(r"StructuredGPClassifier\.(\w+)", reference))
    told = {name for name in documented if isinstance(getattr(StructuredGPClassifier, name), property)}
    assert own == documented - told
    for public in set(structgp.__all__) - {"__version__", *vars(structgp.errors)}:
        assert re.search(rf":: structgp\.(\w+\.)*{public}\b", reference), public


def test_names_in_the_pages_exist() -> None:
    """``structgp.room.name`` in the text of a page is a module, or something in one."""
    # results.md is written by ``python -m experiments page``.
    pages = {*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs" / "results.md"}
    text = "".join(page.read_text("utf-8") for page in sorted(pages))
    for dotted in re.findall(r"(?<![\w/.\"-])structgp(?:\.[A-Za-z_]+)+", text):
        pkgutil.resolve_name(dotted)


def test_errors_in_troubleshooting_are_those_of_the_code() -> None:
    source = "".join(p.read_text("utf-8") for p in (ROOT / "src" / "structgp").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # strings that continue on the next line
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([^`]+)`", page, re.MULTILINE)
    quoted = re.findall(r"^> (.*)$", page, re.MULTILINE)
    assert len(table) > 15
    assert len(quoted) > 3
    for message in [*table, *quoted]:
        # Cut out what varies: places, numbers, names in quotes, cells, labels.
        names = r"BIO|dense|dicts|RBFKernel|categorical|nan|but|QTY.* O"
        cut = rf"'[^']*'|\.\.\.|\d+|%x\[[^]]*\]|\b(?:{names})\b|\b[\w.\[\]]+: |;| and with"
        parts = [part.strip(" :,") for part in re.split(cut, message)]
        parts = [part for part in parts if len(part) > 9]
        assert parts, message
        for part in parts:
            assert part in source, (message, part)


def test_numbers_may_differ_a_little_and_words_may_not() -> None:
    assert not run_page.differs("a 0.50\n...\nend", "a 0.51\nb\nc\nend")
    assert run_page.differs("a 0.50", "a 0.60")
    assert run_page.differs("a 0.50", "b 0.50")
    assert run_page.differs("a", "a\nb")
    assert run_page.differs("a\n...\nend", "a\nb")
    assert run_page.differs("12 lines", "13 lines")


@pytest.mark.slow
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason=f"{package} is not installed: make docs installs it")
    words = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *words, str(ROOT / "docs"), str(tmp_path / "site")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    site = tmp_path / "site"
    assert "<math" in (site / "maths.html").read_text(encoding="utf-8")
    assert "predict_n_best" in (site / "api" / "estimator.html").read_text(encoding="utf-8")
    # No page loads anything from the network.
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'(?:src|<link[^>]*href)="(?:https?:)?//', text), page.name
