"""The apps, unchanged, give the numbers of the simulation on SuperNodes."""

from __future__ import annotations

import pytest

from tests.apps.applications import FEDHKD, App, same_as_simulated, slow_but
from tests.superlink import Deployment


@pytest.mark.flwr_run
@pytest.mark.parametrize("app", slow_but([FEDHKD]))
def test_a_run_on_supernodes_gives_the_numbers_of_the_simulation(app: App, deployment: Deployment) -> None:
    same_as_simulated(app, deployment.submit(app.folder, app.run_config()).result())
