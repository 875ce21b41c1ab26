"""FedDKC: FedGKT whose server refines the clients' knowledge, by KKR or SKR."""

from dataclasses import replace

from flwr_kd.registry import register

from .. import fedgkt
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
    register(
        replace(
            fedgkt.METHOD,
            name=f"feddkc-{_refinement}",
            strategy=FedDKC,
            client=FedDKCClient,
            paper=f"{_PAPER}, {_refinement.upper()}",
            fixed={"refinement": _refinement},
        )
    )
