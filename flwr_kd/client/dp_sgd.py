"""DP-SGD in local training (Abadi et al., CCS 2016): each sample's gradient is clipped, and their sum gets noise.

Opacus computes and clips the gradients per sample. The noise is not Opacus': it comes from the operating system's
cryptographic source, as multiples of a step (:mod:`flwr_kd.secret_noise`), and in a simulation from the run's seed.

It works where the loss is a mean over samples of what depends on that sample alone, and where nothing else that
leaves the client depends on the training samples: see :attr:`flwr_kd.KDClient.dp_sgd`.

Batches are those of every training here: a shuffled pass, in which each sample is in one batch. That gives no
amplification by sampling; :mod:`flwr_kd.update_privacy` counts accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flwr_kd.checks import ConfigError
from flwr_kd.client.private_update import noisy
from flwr_kd.inputs import joined
from flwr_kd.text import first_line

if TYPE_CHECKING:
    from flwr_kd.client.client import KDClient
    from flwr_kd.client.task import Task

__all__ = ["dp_sgd_refusal", "private_steps"]

_TRAINING = {"objective", "phase_train", "train", "knowledge"}
"""Methods of a client that decide what training samples decide."""


def dp_sgd_refusal(client: KDClient[Any], config: Any) -> str | None:
    """Return why a client cannot train by DP-SGD as a config asks; None if it can, or need not.

    The model is tried on a sample, so that one without a gradient for each sample is found before it trains.

    Parameters
    ----------
    client : KDClient
        With its model and training samples.
    config : MethodConfig
        It has ``dp-sgd-clip``.
    """
    if not config.dp_sgd_clip:
        return None
    return _unfit(client, config) or _tried(client, config)


def _unfit(client: KDClient[Any], config: Any) -> str | None:
    """Return why a client cannot train by DP-SGD, as far as classes and settings tell."""
    asked = f"dp-sgd-clip={config.dp_sgd_clip:g}"
    if not _has_dp_sgd(type(client)):
        return (
            f"{asked} does not work with {type(client).__name__}, whose loss or messages depend on samples in "
            "other ways than a mean of cross-entropies: set dp-sgd-clip=0, or use a method such as fedavg"
        )
    if client.precision != "float32":
        return f"{asked} needs precision=float32, got {client.precision}"
    try:
        from opacus.grad_sample import GradSampleModule
    except ImportError as error:
        return f"{asked} needs Opacus ({first_line(error)}): pip install 'flwr-kd[dp]'"
    wrong = GradSampleModule.validate(client.model)
    if wrong:
        return f"{asked} does not work with this model. Opacus: {first_line(wrong[0])}"
    return None


def _tried(client: KDClient[Any], config: Any) -> str | None:
    """Return why the gradients of a batch of two cannot be told apart; None if they can."""
    if not len(client.train_batches):
        return None
    asked, x = f"dp-sgd-clip={config.dp_sgd_clip:g}", client.to_device(client.train_batches.example())
    model, training = client.model, client.model.training
    gpus = [client.device] if client.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=gpus), _hooked(model.train()):
            model(joined([x, x])).sum().backward()
            counts = {
                name: _count(getattr(parameter, "grad_sample", None))
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
    except Exception as error:  # Opacus' hooks and a user's module may raise anything.
        return f"{asked} does not work with this model. Opacus: {first_line(error)}"
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)
    wrong = next((name for name, count in counts.items() if count != len(x) * 2), None)
    if wrong is None:
        return None
    return (
        f"{asked} does not work with this model: {wrong} has no gradient for each sample, because the model does "
        "not use it on a batch [B, ...]. If it looks up positions that the model makes itself, give them as an "
        "input of each sample, such as position_ids; if it is not used, freeze it (requires_grad=False)"
    )


def _count(gradients: Any) -> int:
    """Return the number of samples whose gradients Opacus has of a parameter; 0 if it has none."""
    parts = gradients if isinstance(gradients, list) else [gradients]
    sizes = {len(part) if isinstance(part, Tensor) else 0 for part in parts}
    return min(sizes, default=0) if len(sizes) == 1 else 0


def _has_dp_sgd(kind: type) -> bool:
    """Return whether a class says that DP-SGD protects it, and no class below that has changed what is trained."""
    for parent in kind.__mro__:
        if "dp_sgd" in vars(parent):
            return bool(vars(parent)["dp_sgd"])
        if _TRAINING & vars(parent).keys():
            return False
    return False


@contextmanager
def private_steps(
    client: KDClient[Any],
    task: Task[Any],
    optimizer: torch.optim.Optimizer,
) -> Iterator[torch.optim.Optimizer]:
    """Let an optimiser take steps of DP-SGD inside the block, if the config asks for it.

    Parameters
    ----------
    client : KDClient
        Whose model is trained; Opacus' hooks are on it inside the block only.
    task : Task
        Its config has ``dp-sgd-clip`` and ``dp-sgd-noise``.
    optimizer : Optimizer
        Over the model's parameters. The gradient of the client's :meth:`~flwr_kd.KDClient.penalty` is added after
        the noise in the phase ``train``.

    Yields
    ------
    Optimizer
        The one to step with.

    Raises
    ------
    ConfigError
        If the client cannot train so.
    """
    if not task.config.dp_sgd_clip:
        yield optimizer
        return
    refusal = _unfit(client, task.config)
    if refusal is not None:
        raise ConfigError(refusal)
    with _hooked(client.model):
        yield _stepping(client, task, optimizer)


@contextmanager
def _hooked(model: nn.Module) -> Iterator[None]:
    """Let Opacus compute gradients per sample inside the block, and leave the model as it was."""
    from opacus.grad_sample import GradSampleModule

    owners: list[Any] = [*model.modules(), *model.parameters()]
    before = [set(vars(owner)) for owner in owners]
    hooked = GradSampleModule(model)
    try:
        yield
    finally:
        hooked.to_standard_module()
        # Opacus leaves lists of activations and gradients per sample.
        for owner, names in zip(owners, before, strict=True):
            for name in set(vars(owner)) - names:
                del vars(owner)[name]


def _stepping(
    client: KDClient[Any], task: Task[Any], optimizer: torch.optim.Optimizer
) -> torch.optim.Optimizer:
    from opacus.optimizers import DPOptimizer

    generator = task.generator("dp-sgd-noise") if client.reproducible_noise else None

    class Steps(DPOptimizer):  # type: ignore[misc]
        """Opacus' optimiser with the noise of this package."""

        def add_noise(self) -> None:
            """Add the noise to the sum of the clipped gradients."""
            std = self.noise_multiplier * self.max_grad_norm
            for parameter in self.params:
                total = parameter.summed_grad
                parameter.grad = (_noisy(total, std, generator) if std else total).view_as(parameter)

    config = task.config
    steps: torch.optim.Optimizer = Steps(
        optimizer,
        noise_multiplier=config.dp_sgd_noise,
        max_grad_norm=config.dp_sgd_clip,
        expected_batch_size=min(config.batch_size, len(client.train_batches)),
    )
    # A copy is adapted to the client without the method's own terms.
    penalty = client.penalty(task) if task.phase == "train" else None
    if penalty is not None:
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        steps.attach_step_hook(lambda _: _add_gradient(penalty, trained))  # type: ignore[attr-defined]
    return steps


def _noisy(total: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
    changed = noisy(total.detach().cpu().double().numpy(), std, generator)
    return torch.from_numpy(changed).to(total)


def _add_gradient(penalty: Callable[[], Tensor], parameters: list[nn.Parameter]) -> None:
    for parameter, gradient in zip(parameters, torch.autograd.grad(penalty(), parameters), strict=True):
        assert parameter.grad is not None
        parameter.grad += gradient
