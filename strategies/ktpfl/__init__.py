"""KT-pFL: every client learns its own mixture of all clients' soft predictions, or models."""

from typing import TYPE_CHECKING, Any

from flwr_kd.lazy import exports
from flwr_kd.registry import Method, register

if TYPE_CHECKING:
    from .client import KTpFLClient, KTpFLWeightsClient
    from .config import KTpFLConfig, KTpFLWeightsConfig
    from .functional import coefficient_gradient, knowledge_loss, personal_targets, project_simplex
    from .strategy import CoefficientMatrix, KTpFL, KTpFLWeights

__all__ = [
    "CoefficientMatrix",
    "KTpFL",
    "KTpFLClient",
    "KTpFLConfig",
    "KTpFLWeights",
    "KTpFLWeightsClient",
    "KTpFLWeightsConfig",
    "coefficient_gradient",
    "knowledge_loss",
    "personal_targets",
    "project_simplex",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("KTpFLClient", "KTpFLWeightsClient"),
        "config": ("KTpFLConfig", "KTpFLWeightsConfig"),
        "functional": ("coefficient_gradient", "knowledge_loss", "personal_targets", "project_simplex"),
        "strategy": ("CoefficientMatrix", "KTpFL", "KTpFLWeights"),
    },
)

_PAPER = "Zhang et al., Parameterized Knowledge Transfer for Personalized Federated Learning (KT-pFL), NeurIPS 2021"


def _register(name: str, what: str, coefficients: str) -> None:
    fixed: dict[str, Any] = {"coefficients": coefficients}
    register(
        Method(
            name=name,
            strategy_path=f"{__name__}.strategy:KTpFL",
            client_path=f"{__name__}.client:KTpFLClient",
            config_path=f"{__name__}.config:KTpFLConfig",
            paper=f"{_PAPER}; {what}" if what else _PAPER,
            exchanged="soft predictions on public data",
            global_model=False,
            public_at="clients",
            heterogeneous=True,
            fixed=fixed,
        )
    )


_register("ktpfl", "", "learned")
_register("sim-pfl", "coefficients from cosine similarity", "cosine")
_register("topk-pfl", "the same, of the K most similar clients", "top-k")
register(
    Method(
        name="ktpfl-weights",
        strategy_path=f"{__name__}.strategy:KTpFLWeights",
        client_path=f"{__name__}.client:KTpFLWeightsClient",
        config_path=f"{__name__}.config:KTpFLWeightsConfig",
        paper=f"{_PAPER}; appendix C, models instead of predictions",
        exchanged="weights",
        global_model=False,
    )
)
