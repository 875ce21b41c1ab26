"""Hyper-parameters of methods that distil an ensemble of models into one."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import TypeVar

from flwr_kd.config import MethodConfig, StepDecayConfig, hyper

__all__ = ["AVERAGES", "BATCHNORMS", "DistillationConfig", "DistillationConfigT", "StudentConfig"]

AVERAGES = ("logits", "probabilities")
"""What the ensemble averages over its teachers; see :func:`flwr_kd.distillation.teachers.soft_labels`."""

BATCHNORMS = ("train", "eval", "re-estimated")
"""What a student's BatchNorm normalises by; see :func:`flwr_kd.distillation.student.distil_student`."""


@dataclass(frozen=True, kw_only=True)
class StudentConfig(MethodConfig):
    """Methods in which a model learns from an ensemble, at the server or at a client."""

    distill_batchnorm: str = hyper(
        "train",
        "BatchNorm of the student in a distillation: a batch's statistics, which move the running ones; the "
        "running ones of the models' mean; or those estimated anew on the distillation samples before it",
        choices=BATCHNORMS,
    )


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(StudentConfig, StepDecayConfig):
    """Methods that distil an ensemble of models into one; the defaults are those of FedHEAD's appendix H.1.

    Batch size, optimiser, learning rate and weight decay apply to local training and to distillation alike.
    """

    local_epochs: int = hyper(20, "n_l, passes over the client's training data per round", ge=1)
    batch_size: int = hyper(128, "samples per batch, in training and distillation", ge=1)
    optimizer: str = hyper("adam", "optimiser of training and distillation", choices=("adam", "sgd"))
    lr_decay: float = hyper(1.0, "factor on the learning rate every lr-decay-every rounds", gt=0, le=1)
    weight_decay: float = hyper(1e-4, "L2 penalty of the optimiser", ge=0)
    patience: int = hyper(5, "epochs without a lower validation loss after which a distillation stops", ge=1)
    validation_share: float = hyper(
        0.1, "share of the distillation samples held out for the validation loss", ge=0, lt=1
    )
    keep: str = hyper(
        "last",
        "the weights that a distillation keeps: those of the last epoch, or of the lowest validation loss",
        choices=("last", "best"),
    )


DistillationConfigT = TypeVar(
    "DistillationConfigT", bound=DistillationConfig, default=DistillationConfig, covariant=True
)
"""The config class of a method that distils."""
