"""FedDKC: FedGKT whose server refines the clients' knowledge, by KKR or SKR."""

from flwr_kd import registry

from .client import FedDKCClient
from .config import FedDKCConfig
from .functional import check_kernel, entropy_bits, refine_entropy, refine_peak
from .strategy import FedDKC

__all__ = [
    "FedDKC",
    "FedDKCClient",
    "FedDKCConfig",
    "check_kernel",
    "entropy_bits",
    "refine_entropy",
    "refine_peak",
]

_PAPER = "Wu et al., Exploring the Distributed Knowledge Congruence (FedDKC), ACM TIST 2022"

for _refinement in ("kkr", "skr"):
    registry.register(
        registry.Method(
            name=f"feddkc-{_refinement}",
            strategy=FedDKC,
            client=FedDKCClient,
            paper=f"{_PAPER}, {_refinement.upper()}",
            exchanged="features, logits and labels of every sample",
            global_model=False,
            heterogeneous=True,
            fixed={"refinement": _refinement},
            model="resnet2,resnet4,resnet6,resnet10,resnet12",
            simulated=("send-test-features=true",),
            server_device=True,
        )
    )
