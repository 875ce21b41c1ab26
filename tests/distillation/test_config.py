"""Every method that distils hands its config's `distill-batchnorm` to the student, at a leader or at the server."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import ArrayRecord

from flwr_kd import registry
from flwr_kd.distillation.config import BATCHNORMS, StudentConfig
from flwr_kd.testing.federation import Federation, numbers, small_model

# The servers of FedHyb¹ and FedHyb² only average; the code of the other two is FedHyb's and DaFKD's.
NO_CODE_OF_THEIR_OWN = ("fedhyb-1", "fedhyb-2", "fedhyb-3", "fedhkd-dafkd")
DISTILLING = [
    name
    for name, method in registry.methods().items()
    if issubclass(method.config_class, StudentConfig) and name not in NO_CODE_OF_THEIR_OWN
]

LATE = ("server-learning-rate=0.1", "discriminator-rounds=0", "generator-rounds=0")
"""DaFKD's: a rate at which two steps change something, and nothing else to train."""


class Normed(Federation):
    """Clients whose models have BatchNorm."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 2)
        self.models = ["mlp-bn"] * 2

    def initial(self) -> ArrayRecord:
        arrays = super().initial()
        return ArrayRecord(small_model("mlp-bn").state_dict()) if arrays else arrays

    def result(self, batchnorm: str) -> list[tuple[object, ...]]:
        options = (
            {}
            if self.method.heterogeneous or self.method.name == "fedhead"
            else {"model": small_model("mlp-bn")}
        )
        # DaFKD distils from its second round on.
        late = self.method.name == "dafkd"
        settings = [f"distill-batchnorm={batchnorm}", *(LATE if late else [])]
        strategy, result = self.run(2 if late else 1, settings=settings, **options)
        state = [(name, value.tobytes()) for name, value in sorted(strategy.state_arrays().items())]
        return [*numbers(result), *state]


def test_which_methods_distil() -> None:
    assert {"feddf", "pfeddf", "fedhead", "fedhead-plus", "fedhyb", "fedhyb-star", "dafkd"} == set(DISTILLING)


@pytest.mark.parametrize("name", DISTILLING)
def test_the_modes_lead_to_different_models(name: str) -> None:
    results = [Normed(name).result(batchnorm) for batchnorm in BATCHNORMS]
    for i, one in enumerate(results):
        assert all(one != other for other in results[:i])


def test_running_statistics_of_the_clients_stay_in_eval_mode() -> None:
    """They are the mean of the clients', as FedAvg has them; in training mode the public data moves them."""

    def statistics(name: str, *settings: str) -> np.ndarray:
        federation = Normed(name)
        options = {"model": small_model("mlp-bn")} if name == "feddf" else {}
        _, result = federation.run(1, settings=["weight-decay=0", "lr-decay=1", *settings], **options)
        return next(value.numpy() for key, value in result.arrays.items() if key.endswith("running_mean"))

    fedavg = statistics("fedavg")
    np.testing.assert_array_equal(statistics("feddf", "distill-batchnorm=eval"), fedavg)
    for batchnorm in ("train", "re-estimated"):
        assert np.abs(statistics("feddf", f"distill-batchnorm={batchnorm}") - fedavg).max() > 1e-3
