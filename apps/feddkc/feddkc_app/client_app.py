"""The ClientApp: a client that trains on its part of the data set, or on its own data."""

from flwr.app import Context

from flwr_kd import KDClient, client_app
from flwr_kd.experiments.run_config import chosen_method, client_data, common_test_data

from . import METHODS


def build(context: Context) -> KDClient:
    method = chosen_method(context, METHODS)
    # Put your own model and data sets here. They must be the same for every message.
    model, train_set, test_set = client_data(context)
    common = common_test_data(context)
    return method.client(model, train_set, test_set, context=context, common_test_set=common)


app = client_app(build)
