"""The ClientApp: a client whose model is its own, trained on its part of the data set, and on public data."""

from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_kd import registry
from flwr_kd.app import experiment
from flwr_kd.simulation import bundle_of, client_options, client_splits


def client_fn(context: Context) -> Client:
    index, clients = (int(context.node_config[name]) for name in ("partition-id", "num-partitions"))
    method = registry.get(str(context.run_config["method"]))
    run = experiment(context, clients)
    # With data of your own, these three lines are what changes. The third is then public = {"public_set": ...}: the
    # same samples in the same order at every client, for every message; none where the server has them.
    samples = bundle_of(run).train
    train_rows, test_rows = client_splits(run)[index]
    public = {} if context.run_config["public-data"] == "server" else client_options(method, run)
    return method.client(
        run.build_model(index),
        samples.subset(train_rows),
        samples.subset(test_rows),
        context=context,
        **public,
    ).to_client()


app = ClientApp(client_fn=client_fn)
