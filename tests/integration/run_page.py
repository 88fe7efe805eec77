"""Runs the blocks of one page in order, in a folder of its own. ``test_docs.py`` starts it with the globals
PAGE, FOLDER and SHELL.

A ``python`` block is executed. If SHELL is true, so are the lines of ``sh`` blocks that begin with
``structgp``. A ``text`` block right below is compared with the output: numbers with a decimal point may
differ a little, and a line of three dots stands for any lines. A block that begins with
``# not run: REASON`` is skipped.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

NOT_RUN = re.compile(r"# not run: \w+( \w+)+")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"([-+]?\d+\.\d+)")
ABSOLUTE, RELATIVE = 0.03, 0.05
"""Tolerances for a number on the page."""


class Block(NamedTuple):
    language: str
    text: str
    line: int
    shown: str | None
    """The output according to the page, None if it shows none."""

    @property
    def left_out(self) -> bool:
        return NOT_RUN.match(self.text) is not None


def blocks(page: str) -> list[Block]:
    found = list(_FENCE.finditer(page))
    made = []
    for here, after in zip_longest(found, found[1:]):
        follows = after is not None and after[1] == "text" and after.start() == here.end() + 1
        line = page.count("\n", 0, here.start(2)) + 1
        made.append(Block(here[1], here[2], line, after[2] if follows and after else None))
    return made


def commands(text: str) -> Iterator[list[str]]:
    """The words of every ``structgp`` command."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("structgp "):
            yield shlex.split(line, comments=True)[1:]


def run_command(words: list[str]) -> str:
    from click.testing import CliRunner

    from structgp.cli import main

    target = None
    if ">" in words:
        cut = words.index(">")
        words, target = words[:cut], words[cut + 1]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    if result.exit_code:
        raise AssertionError(f"structgp {shlex.join(words)}: {result.stderr}")
    if target is None:
        return result.stdout
    Path(target).write_text(result.stdout, encoding="utf-8")
    return ""


def differs(shown: str, printed: str) -> bool:
    """True if the output is not what the page shows."""
    lines, at = [line.rstrip() for line in printed.strip("\n").splitlines()], 0
    anywhere = False
    for wanted in shown.strip("\n").splitlines():
        if wanted.strip() == "...":
            anywhere = True
            continue
        while anywhere and at < len(lines) and not _alike(wanted, lines[at]):
            at += 1
        if at >= len(lines) or not _alike(wanted, lines[at]):
            return True
        at, anywhere = at + 1, False
    return at < len(lines) and not anywhere


def _alike(wanted: str, line: str) -> bool:
    a, b = (_NUMBER.split(" ".join(text.split())) for text in (wanted, line))
    if a[::2] != b[::2]:
        return False
    return all(
        abs(float(x) - float(y)) <= max(ABSOLUTE, RELATIVE * abs(float(x)))
        for x, y in zip(a[1::2], b[1::2], strict=True)
    )


def run(page: Path, shell: bool) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.left_out or block.language not in ("python", "sh"):
            continue
        printed = io.StringIO()
        place = f"{page.name}:{block.line}"
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
        elif shell:
            for words in commands(block.text):
                printed.write(run_command(words))
        else:
            continue
        if block.shown is not None and differs(block.shown, printed.getvalue()):
            raise AssertionError(f"{place}: shown\n{block.shown}\nbut printed\n{printed.getvalue()}")


def main(page: Path, folder: Path, shell: bool) -> None:
    """Runs the page; writes the traceback of a failure to ``failure.txt``."""
    import torch

    import structgp.api.estimator  # noqa: F401  (before its imports can warn)

    torch.set_num_threads(1)
    os.chdir(folder)
    warnings.simplefilter("error")
    try:
        run(page, shell)
    except BaseException:
        (folder / "failure.txt").write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(1)


if "PAGE" in globals():
    given = globals()
    main(Path(given["PAGE"]), Path(given["FOLDER"]), given["SHELL"])
