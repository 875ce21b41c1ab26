"""The ClientApp: a client with its own model, trained on its own data and on public data."""

from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_kd import registry
from flwr_kd.experiments.run_config import client_data, common_test_data, public_options


def client_fn(context: Context) -> Client:
    method = registry.get(str(context.run_config["method"]))
    # Put your own model and data sets here. They must be the same for every message. Set public_set=... to the same
    # samples in the same order at every client, or leave it out if the server has them.
    model, train_set, test_set = client_data(context)
    public = public_options(context, method)
    common = common_test_data(context)
    return method.client(
        model, train_set, test_set, context=context, common_test_set=common, **public
    ).to_client()


app = ClientApp(client_fn=client_fn)
