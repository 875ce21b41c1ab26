"""A run that goes on after the round of a checkpoint."""

from __future__ import annotations

from logging import WARNING
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord
from flwr.common.logger import log

from flwr_kd.checks import ConfigError
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint
from flwr_kd.text import first_line

if TYPE_CHECKING:
    from flwr_kd.server.run import Run

__all__ = ["restore"]


def restore(run: Run) -> tuple[int, ArrayRecord | None] | None:
    """Read the checkpoint into a run and its strategy; see :meth:`flwr_kd.server.run.Run.load_checkpoint`."""
    strategy = run.strategy
    if strategy.checkpoint_dir is None:
        return None
    checkpoint = Checkpoint.load(strategy.checkpoint_dir, type(strategy).__name__)
    if checkpoint is None:
        return None
    if (checkpoint.config, checkpoint.seed) != (strategy.config.to_wire(), strategy.seed):
        log(
            WARNING,
            "the checkpoint was written with other hyper-parameters or another seed: %s, seed %d",
            checkpoint.config,
            checkpoint.seed,
        )
    path = strategy.checkpoint_dir / CHECKPOINT
    if 0 < strategy.num_rounds < checkpoint.server_round:
        raise ConfigError(
            f"{path} is a checkpoint of round {checkpoint.server_round}, and num_rounds is "
            f"{strategy.num_rounds}: it is the number of the last round, those before the checkpoint included"
        )
    restored = checkpoint.global_arrays(strategy.template, path)
    try:
        strategy.load_state_arrays(checkpoint.state)
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be used: {first_line(error)}") from None
    run.resumed_partitions, run.steps.taken = checkpoint.partitions, checkpoint.steps
    run.key, run.personal.trained = checkpoint.run or run.key, dict(checkpoint.trained)
    return checkpoint.server_round, restored
