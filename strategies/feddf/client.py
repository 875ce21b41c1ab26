"""FedDF's client half: local training, as in FedAvg; pFedDF's fine-tunes after the last round."""

from typing import cast

from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task

from .config import FedDFConfig, PFedDFConfig


class FedDFClient(KDClient):
    """Cross-entropy on the local data; the distillation is the server's."""

    config_class = FedDFConfig


class PFedDFClient(FedDFClient):
    """Cross-entropy on the local data, and in the end a personal model: the last prototype, fine-tuned.

    That one stays at the client, in ``context.state`` or its ``state-dir``; see
    :class:`flwr_kd.PersonalState`.
    """

    config_class = PFedDFConfig

    def phase_finetune(self, task: Task) -> Answer:
        """Train on from the last prototype, measure, and keep the model; only numbers are sent.

        With ``finetune-epochs=0`` the model is the prototype itself, and there is no ``finetune-loss``.
        """
        config, metrics = cast(PFedDFConfig, task.config), {}
        self.load(task)
        if config.finetune_epochs:
            loss = self.train(task, self.objective(task), epochs=config.finetune_epochs)
            metrics["finetune-loss"] = loss
        metrics |= self.local_metrics(config.batch_size)
        self.state.save(self.model.state_dict())
        return Answer(num_examples=len(self.train_batches), metrics=metrics)
