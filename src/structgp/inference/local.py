"""The posterior of the weights of one batch, out of that of all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, maximum

from structgp.inference.weight_sites import Site


@dataclass(frozen=True)
class Local:
    """precision, linear, sd : (F, R); prior_sd : (F,)."""

    precision: Tensor
    linear: Tensor
    sd: Tensor
    prior_sd: Tensor

    @staticmethod
    def of(precision: Tensor, linear: Tensor, index: Tensor, prior_sd: Tensor) -> Local:
        """precision, linear : (M, R), what all sites together say; index, prior_sd : (F,)."""
        here = precision[index].clamp_(min=0).add_(prior_sd.square().reciprocal()[:, None])
        return Local(here, linear[index], here.rsqrt(), prior_sd)

    @property
    def prior_precision(self) -> Tensor:
        """(F, 1)."""
        return self.prior_sd.square().reciprocal()[:, None]

    def without(self, site: Site) -> tuple[Tensor, Tensor]:
        """Precision and mean (F, R) of what is left when a site is taken out."""
        precision = maximum(self.precision - site.precision, self.prior_precision)
        return precision, (self.linear - site.linear) / precision

    def divergence(self, known: tuple[Tensor, Tensor] | None) -> float:
        """From the prior, less the expectation of what was known at the start, a precision and a linear
        term (F, R), up to a constant."""
        mean = self.linear * self.sd.square()
        square = mean.square() + self.sd.square()
        kl = float(0.5 * (self.prior_precision * square).sum() - self.sd.log().sum())
        if known is None:
            return kl
        precision, linear = known
        return kl - float((linear * mean - 0.5 * precision * square).sum())
