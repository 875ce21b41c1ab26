"""Hyper-parameters of methods on public data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transfer
from public_rounds import Turned, X, bare, rows_of

from flwr_kd.checks import ConfigError
from flwr_kd.public_data.config import PublicKnowledgeConfig


class TestConfig:
    def test_the_paper_s_values(self) -> None:
        """Appendix B.2."""
        config = PublicKnowledgeConfig()
        assert (config.temperature, config.distill_weight, config.distill_epochs) == (10, 1, 1)
        assert (config.batch_size, config.public_batch_size, config.public_samples) == (128, 256, 3000)
        assert (config.local_epochs, config.learning_rate, config.distill_learning_rate) == (20, 0.01, 0.01)
        assert (config.optimizer, config.momentum, config.weight_decay, config.lr_decay) == ("sgd", 0, 0, 1)
        assert (config.public_at, config.precision, config.reduction) == ("clients", "float32", "sum")

    def test_adam_with_the_rate_of_sgd_is_doubted(self) -> None:
        adam = PublicKnowledgeConfig(optimizer="adam")
        (line,) = adam.doubts()
        assert line.startswith("distill-learning-rate=0.01 is a rate for SGD: with optimizer=adam")
        for changes in ({"distill_learning_rate": 0.001}, {"distill_epochs": 0}, {"optimizer": "sgd"}):
            assert not replace(adam, **changes).doubts()

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"public_at": "cloud"}, r"public-at must be one of clients, server, got 'cloud'"),
            ({"public_samples": 0}, r"public-samples must be >= 1, got 0"),
            ({"public_batch_size": 0}, r"public-batch-size must be >= 1"),
            ({"temperature": 0.0}, r"temperature must be > 0, got 0.0"),
            ({"temperature": float("inf")}, r"temperature must be finite"),
            ({"distill_epochs": -1}, r"distill-epochs must be >= 0, got -1"),
            ({"distill_learning_rate": 0.0}, r"distill-learning-rate must be > 0, got 0.0"),
            ({"distill_weight": -1.0}, r"distill-weight must be >= 0, got -1.0"),
            ({"reduction": "median"}, r"reduction must be one of sum, mean, got 'median'"),
            ({"precision": "int8"}, r"precision must be one of float32, float16, uint8, got 'int8'"),
            ({"local_epochs": 0}, r"local-epochs must be >= 1, got 0"),
        ],
    )
    def test_what_is_out_of_range(self, changes: Mapping[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            PublicKnowledgeConfig(**changes)

    def test_they_reach_the_clients(self) -> None:
        run = bare(temperature=3.0, precision="float16", public_samples=4)
        run.start(1, kind=Turned)
        for n, call in run.grid.of(1, "train").items():
            mirror = transfer.Mirror(run.models[n], run.train[n], run.test[n])
            mirror.take(call.kept)
            x = X[rows_of(run, 1)[0]].double()
            np.testing.assert_allclose(call.came()["predictions"], mirror.predict(x, 3.0), atol=1e-3)
