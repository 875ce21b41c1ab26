"""FedDF's server half: the mean of the models, then distillation of all of them into it."""

from __future__ import annotations

from typing import Any, cast

import torch
from flwr.app import ArrayRecord
from torch import nn
from torch.utils.data import DataLoader, Dataset

from flwr_kd.ensemble import ServerDistiller
from flwr_kd.seeding import derive_seed
from flwr_kd.strategy import KDStrategy, Node, Reply

from .config import FedDFConfig


class FedDF(KDStrategy):
    """FedDF (Lin et al., NeurIPS 2020): the server distils the clients' models on unlabelled public data.

    Parameters
    ----------
    config : FedDFConfig, optional
        The hyper-parameters.
    model : nn.Module or (extractor, head)
        Of the architecture of ``initial_arrays``; logits ``[B, C]``.
    public_data : Dataset or DataLoader
        Map-style, of inputs as the clients' are, of pairs or of dicts; labels are not looked at.
    device : str or torch.device
        Where the server distils; ``"auto"``: CUDA, else MPS, else CPU.
    input_key : str, optional
        Key of the inputs in dict items, where it cannot be guessed.
    **options
        See :class:`flwr_kd.strategy.KDStrategy`.

    Attributes
    ----------
    round_trips : int
        Between clients and server in this run: one per client and round that answered (FedHEAD's Table 1).

    Raises
    ------
    ConfigError, DatasetError
        If an option or a hyper-parameter is not allowed, or the public data is not what the model takes.
    """

    config_class = FedDFConfig

    def __init__(
        self,
        config: FedDFConfig | None = None,
        *,
        model: nn.Module | tuple[nn.Module, nn.Module],
        public_data: Dataset[Any] | DataLoader[Any],
        device: str | torch.device = "auto",
        input_key: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(config, **options)
        self.distiller = ServerDistiller(model, public_data, device=device, input_key=input_key)
        self.round_trips = 0

    def begin(self, nodes: list[Node]) -> None:
        """Refuse a server's model that is not the clients'."""
        self.distiller.check(self.template)
        self.round_trips = 0

    def aggregate_phase(
        self, phase: str, server_round: int, replies: list[Reply], arrays: ArrayRecord | None
    ) -> ArrayRecord | None:
        """Average the models, weighted by sample counts, and distil the ensemble of all into the mean."""
        config = cast(FedDFConfig, self.config)
        models, weights = [reply.arrays for reply in replies], [reply.num_examples for reply in replies]
        self.round_trips += len(replies)
        distilled = self.distiller.distil(
            self.template,
            models,
            weights,
            [str(reply.node) for reply in replies],
            config,
            epochs=config.server_epochs,
            server_round=server_round,
            seed=derive_seed(self.seed, "server", server_round),
            average=config.average,
        )
        return self.template.record(distilled)
