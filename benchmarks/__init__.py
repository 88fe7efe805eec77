"""Speed and memory of structgp and of its peers, side by side. See ``python -m benchmarks --help``."""

import structgp  # noqa: F401  before torch, whose threads it tells to sleep while they wait
