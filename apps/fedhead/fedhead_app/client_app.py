"""FedHEAD's ClientApp: a client that trains on its data, and distils when it leads its sector."""

from flwr.app import Context
from flwr.client import Client
from flwr.clientapp import ClientApp

from flwr_kd.experiments.run_config import client_data, common_test_data
from flwr_kd.strategies.fedhead import FedHEADClient


def client_fn(context: Context) -> Client:
    # Put your own model and data sets here. They must be the same for every message.
    model, train_set, test_set = client_data(context)
    common = common_test_data(context)
    return FedHEADClient(model, train_set, test_set, context=context, common_test_set=common).to_client()


app = ClientApp(client_fn=client_fn)
