"""``python -m structgp``."""

from structgp.cli import main

main()
