"""FedDKC's hyper-parameters."""

import math
from dataclasses import dataclass

from flwr_kd.checks import ConfigError
from flwr_kd.config import hyper
from flwr_kd.wording import assignment

from ..fedgkt.config import SERVER_ORDER, FedGKTConfig


@dataclass(frozen=True, kw_only=True)
class FedDKCConfig(FedGKTConfig):
    """FedDKC (section 4.1); the paper prints neither T nor E nor ε.

    T = 0.12 and E = 3.2 bits are those of FedDKC in the public code of FedICT, a later paper by the first author.
    They are for 10 classes: with 8 or fewer T, and with 9 or fewer E, must be set.
    """

    server_order: str = hyper("client-by-client", **SERVER_ORDER)
    refinement: str = hyper("kkr", "how the clients' logits are refined", choices=("kkr", "skr"))
    target_peak: float = hyper(
        0.12,
        "T of KKR, the refined largest probability, in (1/C, 1); the default is the first author's for 10 classes",
        gt=0,
        lt=1,
    )
    target_entropy: float = hyper(
        3.2,
        "E of SKR, the refined entropy in bits, in (0, log2 C); the default is the first author's for 10 classes",
        gt=0,
    )
    entropy_tolerance: float = hyper(1e-3, "ε of SKR: the entropy is within ε/2 of E", gt=0)

    def check_classes(self, num_classes: int) -> None:
        """Refuse T or E, whichever is used, outside the range for C classes; the text has a value that fits."""
        # Imported here: this module must not need PyTorch.
        from .functional import check_entropy, check_peak

        try:
            if self.refinement == "kkr":
                check_peak(self.target_peak, num_classes)
            else:
                check_entropy(self.target_entropy, num_classes)
        except ValueError as error:
            raise ConfigError(f"target-{error}{self._hint(num_classes)}") from None

    def _hint(self, num_classes: int) -> str:
        """Return the value that is for C classes what the default is for 10: T = 1.2/C, E = 0.963 log2 C."""
        if num_classes < 2:
            return ""
        if self.refinement == "kkr":
            name, value = "target_peak", 1.2 / num_classes
        else:
            name, value = "target_entropy", 3.2 * math.log(num_classes, 10)
        default = type(self).__dataclass_fields__[name].default
        fitting = assignment(name, float(f"{value:.3g}"))
        return f"; {fitting} is for {num_classes} classes what the default {default} is for 10"
