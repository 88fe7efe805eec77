"""What the tests of chains share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from structgp.structures.linear_chain import messages


@pytest.fixture(scope="module", params=["torch", "compiled"])
def loops(request: pytest.FixtureRequest) -> Iterator[str]:
    """All in torch operations, and all that can be in compiled loops, however small it is."""
    if request.param == "compiled" and messages.compiled_loops() is None:
        pytest.skip("numba is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "WORTH_COMPILING", 0 if request.param == "compiled" else float("inf"))
        yield request.param
