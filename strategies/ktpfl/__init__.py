"""KT-pFL: every client learns its own mixture of all clients' soft predictions, or models."""

from typing import TYPE_CHECKING, Any

from flwr_kd.formulas import weights
from flwr_kd.lazy import exports
from flwr_kd.public_data.formula import predictions_sent
from flwr_kd.registry import BATCH_NORM, Method, Variant, register

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


def _register(name: str, what: str, coefficients: str, **variants: Variant) -> None:
    fixed: dict[str, Any] = {"coefficients": coefficients}
    register(
        Method(
            name=name,
            strategy_path=f"{__name__}.strategy:KTpFL",
            client_path=f"{__name__}.client:KTpFLClient",
            config_path=f"{__name__}.config:KTpFLConfig",
            paper=f"{_PAPER}; {what}" if what else _PAPER,
            exchanged="soft predictions on public data, a mixture for each client",
            leaves_client="its soft predictions of public samples",
            reaches_others="a mixture of all predictions",
            benchmarks=("accuracy", "picture", "overhead", "scale") if name == "ktpfl" else (),
            global_model=False,
            # As in figure 1. Algorithm 1 also distributes the matrix; by its text only the server needs it.
            # Figure 5 counts public data that is at the server, and sent: public-at=server, another formula.
            sent=predictions_sent("KT-pFL, figure 1, step 5; equation 2", "KT-pFL, figure 1, step 3"),
            sizes_path="flwr_kd.public_data.formula:sizes",
            public_at="clients",
            heterogeneous=True,
            fixed=fixed,
            variants=variants,
            rules_path="flwr_kd.public_data.rules:RULES",
        )
    )


_register("ktpfl", "", "learned", uint8=Variant(("precision=uint8",)))
_register("sim-pfl", "coefficients from cosine similarity", "cosine")
_register("topk-pfl", "the same, of the K most similar clients", "top-k")
register(
    Method(
        name="ktpfl-weights",
        strategy_path=f"{__name__}.strategy:KTpFLWeights",
        client_path=f"{__name__}.client:KTpFLWeightsClient",
        config_path=f"{__name__}.config:KTpFLWeightsConfig",
        paper=f"{_PAPER}; appendix C, models instead of predictions",
        exchanged="weights, a mixture for each client",
        leaves_client="its weights",
        reaches_others="a mixture of all weights",
        benchmarks=(),
        global_model=False,
        takes_multi_label=True,
        sent=(
            weights("train", "up", "KT-pFL, appendix C: after uploading local model parameters"),
            weights("distill", "down", "KT-pFL, appendix C, equation 10"),
        ),
        variants=BATCH_NORM,
    )
)
