"""FedDKC's ClientApp: a client whose model is its own, trained on its part of the data set."""

from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_kd.app import experiment
from flwr_kd.simulation import bundle_of, client_splits
from flwr_kd.strategies.feddkc import FedDKCClient


def client_fn(context: Context) -> Client:
    index, clients = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
    run = experiment(context, clients)
    # With data of your own, these two lines are what changes; in the same order for every message.
    samples = bundle_of(run).train
    train_rows, test_rows = client_splits(run)[index]
    return FedDKCClient(
        run.build_model(index),
        samples.subset(train_rows),
        samples.subset(test_rows),
        context=context,
    ).to_client()


app = ClientApp(client_fn=client_fn)
