"""FedAlign: FedAvg with clients that align the spectrum of their model's last block with that of its slim part."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import averaging
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .block import Block, find_block
    from .client import FedAlignClient
    from .config import FedAlignConfig
    from .functional import alignment_loss, largest_singular_values, lipschitz_difference
    from .strategy import FedAlign

__all__ = [
    "Block",
    "FedAlign",
    "FedAlignClient",
    "FedAlignConfig",
    "alignment_loss",
    "find_block",
    "largest_singular_values",
    "lipschitz_difference",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "block": ("Block", "find_block"),
        "client": ("FedAlignClient",),
        "config": ("FedAlignConfig",),
        "functional": ("alignment_loss", "largest_singular_values", "lipschitz_difference"),
        "strategy": ("FedAlign",),
    },
)

register(
    Method(
        name="fedalign",
        strategy_path=f"{__name__}.strategy:FedAlign",
        client_path=f"{__name__}.client:FedAlignClient",
        config_path=f"{__name__}.config:FedAlignConfig",
        paper="Mendieta et al., Local Learning Matters: Rethinking Data Heterogeneity in Federated Learning, "
        "CVPR 2022",
        exchanged="weights",
        leaves_client="its weights",
        reaches_others="the mean of all weights",
        global_model=True,
        takes_multi_label=True,
        one_tensor="aligns the model's last block of convolutions or Linear layers, which it finds with one tensor",
        sent=averaging("Mendieta et al. 2022, section 4: as FedAvg"),
        variants=BATCH_NORM,
    )
)
