"""structgp: Bayesian structured prediction with Gaussian processes."""

from structgp._version import __version__

__all__ = ["__version__"]
