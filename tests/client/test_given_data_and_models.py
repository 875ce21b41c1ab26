"""What a client makes of the models and data sets it is given."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.learning.batches import DatasetError
from flwr_kd.strategies.fedavg import FedAvg, FedAvgClient
from flwr_kd.strategies.fedhkd import FedHKD, FedHKDClient
from flwr_kd.strategies.fedproto import FedProto, FedProtoClient
from flwr_kd.transport.inline_grid import InlineGrid
from flwr_kd.wording import begin_run

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, (X[:, 0] > 0).long())


def net(outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))


def context(node: int = 0) -> Context:
    return Context(1, node, {"partition-id": node}, RecordDict(), {})


def run(make: Any, strategy: Any, initial: Any = None, clients: int = 2, rounds: int = 1) -> Any:
    app = ClientApp(client_fn=lambda c: make(int(c.node_config["partition-id"]), c).to_client())
    arrays = ArrayRecord() if initial is None else ArrayRecord(initial.state_dict())
    return strategy.start(InlineGrid(app, clients), arrays, num_rounds=rounds, timeout=30)


class TestModels:
    def test_each_client_starts_from_the_model_as_it_was_given(self) -> None:
        shared, seen = net(), {}
        given = {name: value.clone() for name, value in shared.state_dict().items()}

        class Watched(FedProtoClient):
            def objective(self, task: Any) -> Any:
                state = self.model.state_dict()
                seen[task.server_round, self.context.node_id] = all(
                    torch.equal(state[n], given[n]) for n in given
                )
                return super().objective(task)

        run(
            lambda i, c: Watched(shared, DATA, context=c), FedProto(local_epochs=1, min_available_nodes=3),
            clients=3, rounds=2,
        )  # fmt: skip
        assert sorted(same for (number, _), same in seen.items() if number == 1) == [True] * 3
        assert not any(same for (number, _), same in seen.items() if number == 2)
        assert all(torch.equal(value, given[name]) for name, value in shared.state_dict().items())

    def test_a_model_that_cannot_be_copied_is_one_clients(self) -> None:
        model = net()
        model.lock = threading.Lock()  # type: ignore[assignment]
        assert FedAvgClient(model, DATA, context=context(0)).model.original is model
        FedAvgClient(model, DATA, context=context(0))
        with pytest.raises(ConfigError, match=r"model cannot be copied .*build it inside client_fn"):
            FedAvgClient(model, DATA, context=context(1))

    def test_one_output_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"model has one output, .* end it in Linear\(\.\.\., 2\)"):
            FedAvgClient(net(1), DATA, context=context())

    def test_reduced_precision_is_refused_when_the_client_is_built(self) -> None:
        with pytest.raises(ValueError, match=r"must be kept in float32 or float64, got torch.float16"):
            FedAvgClient(net().half(), DATA, context=context())

    @pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedhkd", "fedproto", "fedgkt", "ktpfl-weights"])
    @pytest.mark.parametrize(
        "dtypes", [(torch.float64, torch.float64), (torch.float32, torch.float64)], ids=str
    )
    def test_floating_dtypes(self, name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        method = registry.get(name)
        model, data = net().to(dtypes[0]), TensorDataset(X.to(dtypes[1]), DATA.tensors[1])
        strategy = method.strategy(min_available_nodes=2, local_epochs=1)
        initial = model if strategy.sends_weights else None
        result = run(
            lambda _, c: method.client(model, data, data, context=c, **method.client_options), strategy, initial,
            rounds=2,
        )  # fmt: skip
        assert [r.failures for r in result.rounds] == [0, 0]
        for array in result.arrays.to_torch_state_dict().values():
            assert array.dtype == dtypes[0]

    def test_a_model_of_two_floating_dtypes(self) -> None:
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2).double()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.last(self.first(x).relu().double())

        strategy = FedHKD(local_epochs=1, min_available_nodes=2)
        result = run(lambda _, c: FedHKDClient(Mixed(), DATA, context=c), strategy, Mixed(), rounds=2)
        assert [r.failures for r in result.rounds] == [0, 0]

    def test_precision(self) -> None:
        """Training is computed in bfloat16; the model, and what is measured, is not."""
        seen = []

        class Watched(FedHKDClient):
            def objective(self, task: Any) -> Any:
                loss = super().objective(task)

                def watched(*batch: Any) -> Any:
                    seen.append(self.model(batch[0]).dtype)
                    return loss(*batch)

                return watched

        strategies = [FedHKD(local_epochs=1, noise="none", min_available_nodes=2) for _ in range(2)]
        low, full = (
            run(lambda _, c, p=p: Watched(net(), DATA, DATA, context=c, precision=p), s, net(), rounds=2)
            for p, s in zip(("bfloat16", "float32"), strategies, strict=True)
        )
        assert set(seen) == {torch.bfloat16, torch.float32}
        assert [r.failures for r in low.rounds] == [0, 0]
        a, b = (
            torch.cat([value.flatten() for value in result.arrays.to_torch_state_dict().values()])
            for result in (low, full)
        )
        assert a.dtype == torch.float32
        assert not torch.equal(a, b)
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.01)
        with pytest.raises(ConfigError, match=r"precision must be one of float32, bfloat16, got 'float16'"):
            FedAvgClient(net(), DATA, context=context(), precision="float16")


class TestDataSets:
    def test_training_data_is_needed(self) -> None:
        nothing: Any = None
        with pytest.raises(DatasetError, match="train_set is None"):
            FedAvgClient(net(), nothing, context=context())

    def test_a_samplers_rows_are_the_clients_data(self) -> None:
        train, test = (
            DataLoader(DATA, batch_size=4, sampler=SubsetRandomSampler(r)) for r in ([3, 7, 9], [1])
        )
        client = FedProtoClient(net(), train, test, context=context())
        properties = client.get_properties({})
        assert (properties["num-examples"], properties["num-test-examples"]) == (3, 1)
        _, _, labels = client.extract(8)
        assert labels.tolist() == DATA.tensors[1][[3, 7, 9]].tolist()

    def test_a_sampler_without_fixed_rows_is_named_once_in_the_handshake(self, flower_log: list[str]) -> None:
        loader = DataLoader(DATA, batch_size=4, sampler=WeightedRandomSampler([1.0] * 40, 40))
        client = FedProtoClient(net(), loader, loader, context=context())
        begin_run()
        assert not flower_log
        client.get_properties({})
        assert client.get_properties({})["num-examples"] == 40
        assert len(client.extract(8)[2]) == 40
        (line,) = flower_log
        assert (
            "train_set (WeightedRandomSampler), test_set (WeightedRandomSampler): the sampler has no" in line
        )
        assert "torch.utils.data.Subset" in line

    def test_other_things_than_data_sets_are_refused_when_the_client_is_built(self) -> None:
        for given in ({"train": DATA, "test": DATA}, (X.numpy(), DATA.tensors[1].numpy()), (DATA, DATA)):
            with pytest.raises(DatasetError, match="a data set of samples is expected"):
                FedAvgClient(net(), given, context=context())  # type: ignore[arg-type]

    def test_numbers_of_the_data_set_follow_from_seed_client_and_round(self) -> None:
        class Noisy(TensorDataset):
            def __getitem__(self, index: int) -> Any:
                x, y = super().__getitem__(index)
                return x + float(torch.rand(())) + np.random.rand() + random.random(), y  # noqa: NPY002

        def losses(seed: int) -> list[float | None]:
            noisy = Noisy(*DATA.tensors)
            strategy = FedAvg(local_epochs=1, learning_rate=1e-12, seed=seed, min_available_nodes=2)
            make = lambda _, c: FedAvgClient(net(), noisy, noisy, context=c)  # noqa: E731
            return [r.train_loss for r in run(make, strategy, net(), rounds=2).rounds]

        random.seed(5)
        before = random.getstate()
        first = losses(0)
        assert random.getstate() == before
        assert first == losses(0) != losses(1)
        assert first[0] != first[1]


@pytest.mark.long  # torch.compile imports its compiler.
def test_a_compiled_models_arrays_keep_their_names() -> None:
    model: Any = torch.compile(net(), backend="eager")
    evaluated = []

    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        model.load_state_dict(arrays.to_torch_state_dict())
        evaluated.append(server_round)

    app = ClientApp(client_fn=lambda c: FedAvgClient(model, DATA, DATA, context=c).to_client())
    strategy = FedAvg(local_epochs=1, min_available_nodes=2)
    arrays = ArrayRecord(model.state_dict())
    result = strategy.start(InlineGrid(app, 2), arrays, num_rounds=1, timeout=30, evaluate_fn=evaluate)
    assert [r.failures for r in result.rounds] == [0]
    assert list(result.arrays) == list(arrays)
    assert evaluated == [0, 1]
    plain = run(lambda _, c: FedAvgClient(net(), DATA, DATA, context=c), FedAvg(local_epochs=1), net())
    for a, b in zip(result.arrays.values(), plain.arrays.values(), strict=True):
        assert (a.numpy() == b.numpy()).all()
