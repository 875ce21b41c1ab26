"""FedHyb's ClientApp: a client that trains on its part of the data set, and distils itself into sub-networks."""

from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_kd.app import experiment
from flwr_kd.simulation import bundle_of, client_splits
from flwr_kd.strategies.fedhyb import FedHybClient


def client_fn(context: Context) -> Client:
    index, clients = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
    run = experiment(context, clients)
    # With data of your own, these two lines are what changes.
    samples = bundle_of(run).train
    train_rows, test_rows = client_splits(run)[index]
    return FedHybClient(
        run.build_model(),
        samples.subset(train_rows),
        samples.subset(test_rows),
        context=context,
    ).to_client()


app = ClientApp(client_fn=client_fn)
