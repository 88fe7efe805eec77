"""Deprecations in packages that structgp uses are not for its users to read."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["structgp.api.estimator", "structgp.testing", "structgp.cli.fitting"])
def test_imports_are_quiet(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", f"import {name}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
