"""FedDKC's server half: FedGKT on refined logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flwr_kd.checks import ConfigError

from ..fedgkt import FedGKT
from .config import FedDKCConfig
from .functional import Kernel, check_kernel, refine_entropy, refine_peak


class FedDKC(FedGKT[FedDKCConfig]):
    """FedDKC (Wu et al., ACM TIST 2022): the clients' logits are refined to one peak (KKR) or entropy (SKR).

    Algorithms 1 and 2. The messages are FedGKT's.

    Parameters
    ----------
    config : FedDKCConfig, optional
        The hyper-parameters.
    kernel : callable, optional
        σ of KKR, in place of the linear one, which has a closed form; see
        :func:`~flwr_kd.strategies.feddkc.refine_peak`.
    **options
        See :class:`~flwr_kd.strategies.fedgkt.FedGKT`.

    Raises
    ------
    ConfigError
        If an option or a hyper-parameter is not allowed, or the kernel violates a condition of section 5.1.
    """

    config_class = FedDKCConfig

    def __init__(
        self, config: FedDKCConfig | None = None, *, kernel: Kernel | None = None, **options: Any
    ) -> None:
        super().__init__(config, **options)
        if kernel is not None:
            if self.config.refinement != "kkr":
                raise ConfigError("a kernel belongs to refinement=kkr, got refinement=skr")
            try:
                check_kernel(kernel)
            except ValueError as error:
                raise ConfigError(str(error)) from None
        self.kernel = kernel

    def targets(self, logits: Tensor) -> Tensor:
        """Return the refined knowledge of a client's logits ``[N, C]`` (algorithm 2)."""
        config = self.config
        if config.refinement == "kkr":
            return refine_peak(logits, config.target_peak, kernel=self.kernel).float()
        return refine_entropy(logits, config.target_entropy, tolerance=config.entropy_tolerance).float()
