"""FedDF's client half: local training, as in FedAvg; pFedDF's fine-tunes after the last round."""

from flwr_kd.client.client import KDClient
from flwr_kd.client.task import Answer, Task

from .config import FedDFConfig, PFedDFConfig


class FedDFClient(KDClient[FedDFConfig]):
    """Trains on cross-entropy on the local data; the server distils."""

    config_class = FedDFConfig
    dp_sgd = True


class PFedDFClient(KDClient[PFedDFConfig]):
    """Trains on cross-entropy on the local data; at the end it fine-tunes the last prototype to a personal model.

    The personal model stays at the client, in ``context.state`` or its ``state-dir``; see
    :class:`flwr_kd.PersonalState`.
    """

    config_class = PFedDFConfig
    dp_sgd = True

    def phase_finetune(self, task: Task[PFedDFConfig]) -> Answer:
        """Fine-tune the last prototype, measure it, and keep it; only metrics are sent.

        With ``finetune-epochs=0`` the model is the prototype itself, and there is no ``finetune-loss``.
        """
        config, metrics = task.config, {}
        self.load(task)
        if config.finetune_epochs:
            loss = self.train(task, self.objective(task), epochs=config.finetune_epochs)
            metrics["finetune-loss"] = loss
        metrics |= self.local_metrics(config.batch_size)
        self.state.save(self.model.state_dict())
        return Answer(num_examples=len(self.train_batches), metrics=metrics)
