"""FedDKC's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.checks import ConfigError
from flwr_kd.config import hyper

from ..fedgkt.config import SERVER_ORDER, FedGKTConfig


@dataclass(frozen=True, kw_only=True)
class FedDKCConfig(FedGKTConfig):
    """FedDKC (section 4.1); the paper prints neither T nor E nor ε, these are ours."""

    server_order: str = hyper("client-by-client", **SERVER_ORDER)
    refinement: str = hyper("kkr", "how the clients' logits are refined", choices=("kkr", "skr"))
    target_peak: float = hyper(0.6, "T of KKR, the refined largest probability, in (1/C, 1)", gt=0, lt=1)
    target_entropy: float = hyper(1.5, "E of SKR, the refined entropy in bits, in (0, log2 C)", gt=0)
    entropy_tolerance: float = hyper(1e-3, "ε of SKR: the entropy is within ε/2 of E", gt=0)

    def check_classes(self, num_classes: int) -> None:
        """Refuse T or E, whichever is used, outside the range for C classes."""
        # Imported here: this module must not need PyTorch.
        from .functional import check_entropy, check_peak

        try:
            if self.refinement == "kkr":
                check_peak(self.target_peak, num_classes)
            else:
                check_entropy(self.target_entropy, num_classes)
        except ValueError as error:
            raise ConfigError(f"target-{error}") from None
