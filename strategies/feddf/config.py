"""FedDF's hyper-parameters, and pFedDF's."""

from dataclasses import dataclass

from flwr_kd.config import hyper
from flwr_kd.distillation.config import AVERAGES, DistillationConfig


@dataclass(frozen=True, kw_only=True)
class FedDFConfig(DistillationConfig):
    """FedDF with the values of FedHEAD's comparison (its appendix H.1)."""

    server_epochs: int = hyper(20, "n_g, maximum passes over the public data per round", ge=1)
    average: str = hyper(
        "probabilities",
        "what is averaged over the teachers: their probabilities, weighted by samples (FedHEAD's comparison), or "
        "their logits, unweighted (FedDF's own paper)",
        choices=AVERAGES,
    )


@dataclass(frozen=True, kw_only=True)
class PFedDFConfig(FedDFConfig):
    """pFedDF: FedDF's values and its own paper's average, and epochs of fine-tuning.

    KT-pFL's paper says "several" of their number.
    """

    average: str = hyper(
        "logits",
        "what is averaged over the teachers: their probabilities, weighted by samples (FedHEAD's comparison), or "
        "their logits, unweighted (FedDF's own paper)",
        choices=AVERAGES,
    )
    finetune_epochs: int = hyper(20, "passes over the client's training data after the last round", ge=0)

    def planned_steps(self, phase: str, samples: int) -> int:
        """Return the steps of a client's training, or of its fine-tuning."""
        return (self.finetune_epochs if phase == "finetune" else self.local_epochs) * self.batches(samples)
