"""FedDKC: FedGKT whose server refines the clients' knowledge, by KKR or SKR."""

from dataclasses import replace
from typing import TYPE_CHECKING

from flwr_kd.lazy import exports
from flwr_kd.registry import register

from .. import fedgkt

if TYPE_CHECKING:
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

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("FedDKCClient",),
        "config": ("FedDKCConfig",),
        "functional": ("check_kernel", "entropy_bits", "refine_entropy", "refine_peak"),
        "strategy": ("FedDKC",),
    },
)

_PAPER = "Wu et al., Exploring the Distributed Knowledge Congruence (FedDKC), ACM TIST 2022"

# The targets fit the few classes of short runs; the defaults need ten.
for _refinement, _target in (("kkr", "target-peak=0.6"), ("skr", "target-entropy=1.5")):
    register(
        replace(
            fedgkt.METHOD,
            name=f"feddkc-{_refinement}",
            strategy_path=f"{__name__}.strategy:FedDKC",
            client_path=f"{__name__}.client:FedDKCClient",
            config_path=f"{__name__}.config:FedDKCConfig",
            paper=f"{_PAPER}, {_refinement.upper()}",
            exchanged="features, logits and labels of every sample, refined at the server",
            benchmarks=("accuracy", "picture", "scale") if _refinement == "skr" else ("accuracy",),
            quick=(*fedgkt.METHOD.quick, _target),
            variants={},
            rules_path=f"{__name__}.rules:RULES",
            fixed={"refinement": _refinement},
        )
    )
