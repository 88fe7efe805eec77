"""What the README tells people to type works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from structgp.cli import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), names)
    assert names["careful"].training_log_["gradient"] == "differences"
    shown = capsys.readouterr().out
    assert "QTY" in shown
    assert "NAME" in shown
    assert (tmp_path / "tagger.sgp").exists()


def test_commands_and_options_exist() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("structgp ")]
    assert {words[1] for words in commands} == {"train", "tag", "evaluate", "next", "report"}
    for words in commands:
        command = main.commands[words[1]]
        known = {name for parameter in command.params for name in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= known, words


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_command_is_in_the_help() -> None:
    with click.Context(main) as context:
        assert sorted(main.list_commands(context)) == [
            "demo",
            "evaluate",
            "next",
            "report",
            "tag",
            "train",
        ]
