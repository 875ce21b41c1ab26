"""FedMD's hyper-parameters."""

from dataclasses import dataclass

from flwr_kd.checks import ConfigError
from flwr_kd.config import global_model, hyper
from flwr_kd.public_data.config import PublicKnowledgeConfig
from flwr_kd.wording import assignment


@dataclass(frozen=True, kw_only=True)
class FedMDConfig(PublicKnowledgeConfig):
    """FedMD with the values of KT-pFL's comparison (its appendix B.2)."""

    global_model: str = global_model()
    warmup_epochs: int = hyper(
        0,
        "passes over the labelled public data before a client's first training; FedMD's transfer learning",
        ge=0,
    )
    warmup_head: str = hyper(
        "model",
        "the classifier of that training: the model's, or own: one of its own for the public data's classes, which "
        "is then dropped",
        choices=("model", "own"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_epochs and self.public_at != "clients":
            raise ConfigError(
                f"warmup-epochs must be 0 where public-at={self.public_at}: labels are not sent, "
                f"got {self.warmup_epochs}"
            )

    def check_public_labels(self, highest: int, classes: int) -> None:
        """Refuse the initial training of the model's classifier on labels that it does not have."""
        if self.warmup_epochs and self.warmup_head == "model" and highest >= classes:
            raise ConfigError(
                f"warmup-epochs={self.warmup_epochs} trains the model's classifier of {classes} classes on public "
                f"data, whose labels go up to {highest}: set {assignment('warmup_head', 'own')}, which trains one "
                "of its own, or choose public data of the same classes"
            )

    def check_unlabelled(self) -> None:
        """Refuse the initial training, which learns the labels of public data."""
        if self.warmup_epochs:
            raise ConfigError(
                "warmup-epochs must be 0 with classes: public data has no labels then, got "
                f"{self.warmup_epochs}"
            )
