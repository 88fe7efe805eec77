"""What the command line imports: nothing large before a command starts its work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from structgp.api import active
from structgp.cli import flags, main
from structgp.data.formats import FORMATS
from structgp.data.sources import reader_arguments
from structgp.plan import options

LARGE = ("torch", "sklearn", "gpytorch", "scipy", "numba", "numpy")

# Runs a command and then says which large packages were imported, whatever the command printed.
SCRIPT = f"""
import atexit, sys
atexit.register(lambda: print("\\nimported", *(m for m in {LARGE!r} if m in sys.modules)))
from structgp.cli import main
main(prog_name="structgp")
"""


def run(*words: str, **environment: str) -> tuple[int, str, set[str]]:
    """Status, all that was printed, and the large packages that were imported."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, env=os.environ | environment
    )
    printed, _, imported = done.stdout.rpartition("imported")
    return done.returncode, printed + done.stderr, set(imported.split())


@pytest.mark.parametrize("name", ["", *main.commands])
def test_help_imports_nothing_large(name: str) -> None:
    status, printed, imported = run(*([name] if name else []), "--help")
    assert status == 0
    assert "Usage:" in printed
    assert imported == set()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--version"], "version"),
        (["tug"], "No such command 'tug'"),
        (["tag"], "Missing option"),
        (["train", "a", "b", "-o", "m", "--inference", "magic"], "'magic' is not one of"),
        (["tag", "-m", "nothing-here"], "nothing-here: no such file"),
        (["tag", "-m", "nothing-here", "-n", "2", "--decode", "f1"], "--decode: cannot be combined"),
        (["tag", "-m", "nothing-here", "--encoding", "klingon"], "unknown encoding"),
        (["evaluate", "-m", "m", "t", "--against", "crf"], "--against: needs the training file"),
    ],
)
def test_slips_are_reported_before_anything_large_is_imported(words: list[str], says: str) -> None:
    status, printed, imported = run(*words)
    assert status == (0 if words == ["--version"] else 2)
    assert says in printed
    assert imported == set()


def test_train_refuses_paths_early(tmp_path) -> None:
    for paths, says in ((["one"], "TEMPLATE and TRAIN"), (["no", "such"], "no: cannot be read")):
        status, printed, imported = run("train", *paths, "-o", str(tmp_path / "model"))
        assert (status, imported) == (2, set())
        assert says in printed
    assert list(tmp_path.iterdir()) == []


def test_completion_imports_nothing_large() -> None:
    asked = {"_STRUCTGP_COMPLETE": "bash_complete", "COMP_WORDS": "structgp t", "COMP_CWORD": "1"}
    status, printed, imported = run(**asked)
    assert status == 0
    assert {"plain,train", "plain,tag"} <= set(printed.split())
    assert imported == set()


def test_import_of_the_package_is_light() -> None:
    code = f"import sys, structgp; print([m for m in {LARGE!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_tagging_needs_no_scikit_learn() -> None:
    code = "import sys, structgp.cli.tagging; print('sklearn' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_names_that_options_know_without_importing_are_the_right_ones() -> None:
    assert reader_arguments.FORMATS == flags.FORMATS
    assert (*FORMATS,) == reader_arguments.DOCUMENTS == flags.DOCUMENTS
    assert options.INFERENCE == flags.INFERENCE
    assert tuple(active.STRATEGIES) == flags.STRATEGIES


def test_the_collector_rests_during_imports_alone() -> None:
    """And leaves what they made alone; a second time, with torch there, nothing is changed."""
    script = (
        "import gc, sys\nfrom structgp.cli.group import importing\n"
        "for _ in range(2):\n    with importing():\n        during = gc.isenabled()\n        import torch\n"
        "    print(during, gc.isenabled(), gc.get_freeze_count())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    (during, after, kept), again = (line.split() for line in done.stdout.splitlines())
    assert (during, after) == ("False", "True")
    assert int(kept) > 10_000
    assert again == ["True", "True", kept]
