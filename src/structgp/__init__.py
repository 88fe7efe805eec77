"""structgp: Bayesian structured prediction with Gaussian processes."""

from structgp._version import __version__
from structgp.errors import InputError, ModelFileError, StructgpError, StructgpWarning
from structgp.estimator import StructuredGPClassifier, load

__all__ = [
    "InputError",
    "ModelFileError",
    "StructgpError",
    "StructgpWarning",
    "StructuredGPClassifier",
    "__version__",
    "load",
]
