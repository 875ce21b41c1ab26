"""DaFKD: weights and a generator, distilled at the server by teachers whose weights depend on the sample."""

from typing import TYPE_CHECKING

from flwr_kd.formulas import Sent, Term
from flwr_kd.lazy import exports
from flwr_kd.registry import BATCH_NORM, Method, register

if TYPE_CHECKING:
    from .client import DaFKDClient
    from .config import DaFKDConfig
    from .functional import (
        Discriminator,
        build_discriminator,
        discriminator_loss,
        distillation_loss,
        domain_weights,
        gradient_penalty,
        sample_noise,
        teacher_logits,
    )
    from .messages import DiscriminatorScores
    from .strategy import DaFKD

__all__ = [
    "DaFKD",
    "DaFKDClient",
    "DaFKDConfig",
    "Discriminator",
    "DiscriminatorScores",
    "build_discriminator",
    "discriminator_loss",
    "distillation_loss",
    "domain_weights",
    "gradient_penalty",
    "sample_noise",
    "teacher_logits",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "client": ("DaFKDClient",),
        "config": ("DaFKDConfig",),
        "functional": (
            "Discriminator",
            "build_discriminator",
            "discriminator_loss",
            "distillation_loss",
            "domain_weights",
            "gradient_penalty",
            "sample_noise",
            "teacher_logits",
        ),
        "messages": ("DiscriminatorScores",),
        "strategy": ("DaFKD",),
    },
)

_SOURCE = "Wang et al. 2023, algorithm 1"
_BESIDE = (
    ("BatchNorm statistics", Term("B")),
    ("BatchNorm counters", Term("L", "int64")),
    ("BatchNorm counters of the generator", Term("J", "int64")),
)
WEIGHTS = tuple(
    Sent("train", way, "weights", (Term("W"), Term("G")), f"{_SOURCE}: model and generator", _BESIDE)
    for way in ("down", "up")
)
"""What is sent in both directions; ``fedhkd-dafkd`` has the same."""

register(
    Method(
        name="dafkd",
        strategy_path=f"{__name__}.strategy:DaFKD",
        client_path=f"{__name__}.client:DaFKDClient",
        config_path=f"{__name__}.config:DaFKDConfig",
        paper="Wang et al., DaFKD: Domain-aware Federated Knowledge Distillation, CVPR 2023",
        exchanged="weights, a generator of samples, scores of generated samples",
        leaves_client=(
            "its weights; a generator of samples that it has trained against its data; how much generated samples "
            "look like its own data"
        ),
        reaches_others="the global model, and the mean generator, which may imitate samples",
        global_model=True,
        sent=(*WEIGHTS, Sent("train", "up", "knowledge", (Term("Q"),), f"{_SOURCE}: D_k(x)")),
        public_at="synthetic",
        one_tensor="makes up samples of floating point with a generator, such as images or rows of numbers",
        sizes_path=f"{__name__}.messages:sizes",
        quick=("server-batches=1",),
        variants=BATCH_NORM,
        rules_path=f"{__name__}.rules:RULES",
    )
)
