"""python -m experiments table1|resample|optimum|large|profile|ablation|page ...: the paper's tables and
figures.

The other experiments are separate modules, and are run as in python -m experiments.folds.
"""

from __future__ import annotations

import sys

from experiments import ablation, large, optimum, page, profile, resample, table1
from structgp import StructgpError

TABLES = {
    "table1": table1.main,
    "resample": resample.main,
    "optimum": optimum.main,
    "large": large.main,
    "profile": profile.main,
    "ablation": ablation.main,
    "page": page.main,
}


def main() -> int:
    name, words = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    if name not in TABLES:
        print(__doc__)
        return 0 if name in ("-h", "--help") else 2
    return TABLES[name](words)


# Worker processes import this file again under another name.
if __name__ == "__main__":
    try:
        sys.exit(main())
    except StructgpError as error:
        sys.exit(f"experiments: {error}")
