"""Numbers of parameters that clients and server have."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import ArrayRecord

from flwr_kd.models import count_parameters
from flwr_kd.models.generator import build_generator
from flwr_kd.server.parameters import parameters_of
from flwr_kd.server.records import RoundStats
from flwr_kd.strategies.dafkd.functional import build_discriminator
from flwr_kd.strategies.fedgen.functional import build_feature_generator
from flwr_kd.testing.federation import CLASSES, FEATURES, SHAPE, Federation, small_model

MODEL = count_parameters(small_model())
GENERATOR = count_parameters(build_feature_generator((FEATURES,), num_classes=CLASSES, hidden=16, seed=0))
MADE = count_parameters(build_generator(SHAPE, num_classes=0, latent_dim=100, seed=0))
JUDGE = count_parameters(build_discriminator((FEATURES,), seed=0))


def counts(name: str, *settings: str, **options: Any) -> dict[str, float]:
    strategy, _ = Federation(name, **options).run(rounds=1, settings=settings)
    return parameters_of(strategy)


@pytest.mark.parametrize(
    ("name", "settings", "held", "server"),
    [
        # As in FedHKD's tables: FedProx counts the model twice, MOON three times, FedGen adds its generator.
        ("fedavg", (), MODEL, MODEL),
        ("fedprox", (), 2 * MODEL, MODEL),
        ("moon", (), 3 * MODEL, MODEL),
        ("moon", ("previous-models=3",), 5 * MODEL, MODEL),
        ("fedgen", ("generator-hidden=16",), MODEL + GENERATOR, MODEL + GENERATOR),
        ("fedhkd", (), MODEL, MODEL),
        ("fedproto", (), MODEL, 0),
        ("fedmd", (), MODEL, 0),
        ("dafkd", ("noise-dim=100",), MODEL + MADE + JUDGE, MODEL + MADE),
        ("fedamp", (), 2 * MODEL, 4 * MODEL),
        ("fedfomo", ("models=2",), 4 * MODEL, 4 * MODEL),
    ],
)
def test_each_model_counts_whole(name: str, settings: tuple[str, ...], held: int, server: int) -> None:
    assert counts(name, *settings) == {"trained": MODEL, "held": held, "server": server}


def test_of_heterogeneous_models_it_is_the_mean() -> None:
    fed = Federation("fedproto", clients=2)
    fed.models = ["mlp", "lenet"]
    strategy, _ = fed.run(rounds=1)
    mean = (MODEL + count_parameters(small_model("lenet"))) / 2
    assert parameters_of(strategy) == {"trained": mean, "held": mean, "server": 0}


def test_frozen_parameters_are_held_and_statistics_are_no_parameters() -> None:
    model = small_model("resnet8")
    model.head.requires_grad_(False)
    fed = Federation("fedavg", clients=2)
    client_fn = fed.client_fn

    def with_model(context: Any) -> Any:
        client = client_fn(context)
        client.numpy_client.model.load_state_dict(model.state_dict())
        client.numpy_client.model.head.requires_grad_(False)
        return client

    fed.models, fed.pool, fed.client_fn = ["resnet8"] * 2, None, with_model  # type: ignore[method-assign]
    fed.initial = lambda: ArrayRecord(model.state_dict())  # type: ignore[method-assign]
    strategy, _ = fed.run(rounds=1)
    frozen = count_parameters(model.head)
    whole = count_parameters(model)
    assert sum(value.numel() for value in model.state_dict().values()) > whole
    assert parameters_of(strategy) == {"trained": whole - frozen, "held": whole, "server": whole}


def test_clients_that_name_nothing_are_left_out() -> None:
    fed = Federation("fedavg", clients=2)
    client_fn = fed.client_fn

    def silent(context: Any) -> Any:
        client = client_fn(context)
        properties = client.numpy_client.get_properties

        def get_properties(config: Any) -> Any:
            return {key: value for key, value in properties(config).items() if "parameters" not in key}

        client.numpy_client.get_properties = get_properties
        return client

    fed.client_fn = silent  # type: ignore[method-assign]
    strategy, _ = fed.run(rounds=1)
    assert parameters_of(strategy) == {"server": MODEL}


def test_round_trips_are_the_usable_replies_of_all_phases() -> None:
    def trips(name: str, **options: Any) -> list[int | None]:
        _, result = Federation(name).run(rounds=2, **options)
        return [stats.round_trips for stats in result.rounds]

    assert trips("fedavg") == [4, 4]
    assert trips("fedavg", fraction_train=0.5) == [2, 2]
    assert trips("fedmd") == [8, 8]
    assert RoundStats(1).round_trips is None
