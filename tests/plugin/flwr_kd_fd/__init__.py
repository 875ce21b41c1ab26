"""FD: mean logits per class instead of weights."""

from flwr_kd.formulas import PER_CLASS, Sent, Term
from flwr_kd.registry import Method, register

_SOURCE = "Jeong et al. 2018, algorithm 1"

register(
    Method(
        name="fd",
        strategy_path=f"{__name__}.strategy:FD",
        client_path=f"{__name__}.client:FDClient",
        config_path=f"{__name__}.config:FDConfig",
        rules_path=f"{__name__}.rules:RULES",
        paper="Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and "
        "Augmentation under Non-IID Private Data, NeurIPS workshop 2018; FD without augmentation",
        exchanged="mean logits per class",
        global_model=False,
        heterogeneous=True,
        sizes_path=f"{__name__}.messages:sizes",
        sent=(
            Sent("train", "down", "knowledge", (Term("K·C"),), _SOURCE, PER_CLASS, when="later"),
            Sent("train", "up", "knowledge", (Term("K·C"),), _SOURCE, PER_CLASS),
        ),
    )
)
