"""Runs on a Ray cluster of two nodes, runs beside it, and what is said about nodes that lack something."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from flwr_kd import registry
from flwr_kd.checks import ConfigError, DataError
from flwr_kd.experiments import ray_cluster, ray_pool
from flwr_kd.experiments.data import digest_of
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.experiments.runner import run
from flwr_kd.results.schema import RoundResult, RunResult
from tests.processes import Process, free_port, guarded, start_environment

SMALL: dict[str, Any] = {"clients": 4, "rounds": 2, "limit": 200, "device": "cpu"}
METHOD = "fedproto"


def numbers(result: RunResult) -> list[RoundResult]:
    return [replace(each, seconds=0.0) for each in result.rounds]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a head with one CPU and a node with two; return the address."""
    folder = tmp_path_factory.mktemp("cluster")
    # Paths of Ray's sockets must be short.
    session = tempfile.mkdtemp(prefix="fk-")
    environment = {**start_environment(folder), "OMP_NUM_THREADS": "1"}
    common = ["--block", "--disable-usage-stats", "--object-store-memory=80000000"]
    # Any free ports: Ray's own choice has a fixed range, and another Ray may use it.
    common += ["--min-worker-port=0", "--max-worker-port=0"]
    port, client_port, *agents = (free_port() for _ in range(4))
    head = ["--head", f"--port={port}", f"--ray-client-server-port={client_port}", f"--temp-dir={session}"]

    def start(name: str, agent: int, *words: str) -> Process:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common]
        process = Process([*command, f"--dashboard-agent-listen-port={agent}"], folder / name, environment)
        process.wait_for_log("Ray runtime started")
        return process

    with guarded(folder):
        first = start("head", agents[0], *head, "--include-dashboard=false", "--num-cpus=1")
        (address,) = first.wait_for_log(r"--address='([^']+)'").groups()
        start("node", agents[1], f"--address={address}", "--num-cpus=2")
        yield address
    shutil.rmtree(session, ignore_errors=True)


@pytest.fixture
def keeper(cluster: str) -> Iterator[Callable[[int], None]]:
    """Return a function that starts another user's actor with that many CPUs, which must outlive the test."""

    class Keeper:
        def here(self) -> bool:
            return True

    def hold(cpus: int) -> None:
        ray.init(cluster, log_to_driver=False, namespace="keeper")
        actor = ray.remote(num_cpus=cpus)(Keeper)
        ray.get(actor.options(name="keeper", lifetime="detached").remote().here.remote())
        ray.shutdown()

    yield hold
    ray.init(cluster, log_to_driver=False, namespace="keeper")
    actor = ray.get_actor("keeper")
    assert ray.get(actor.here.remote())
    ray.kill(actor)
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray cluster")
class TestOnACluster:
    """With two nodes on this machine."""

    def test_a_run_has_the_numbers_of_one_in_process_and_leaves_the_cluster_as_it_was(
        self, cluster: str, keeper: Callable[[int], None], tmp_path: Path
    ) -> None:
        keeper(0)
        method = registry.get(METHOD)
        # All three CPUs, so that both nodes take part.
        experiment = Experiment(**SMALL, ray_address=cluster, workers=3)
        result = run(method, experiment, checkpoint_dir=tmp_path)
        assert numbers(result) == numbers(run(method, Experiment(**SMALL, backend="inline")))
        assert not ray.is_initialized()
        assert not list(tmp_path.rglob(".node-check*"))

    def test_a_run_of_its_own_is_not_disturbed(self, cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_ADDRESS", cluster)
        method = registry.get(METHOD)
        result = run(method, Experiment(**SMALL, backend="ray", workers=1))
        assert numbers(result) == numbers(run(method, Experiment(**SMALL, backend="inline")))

    def test_workers_that_find_no_place_are_an_error(
        self, cluster: str, keeper: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keeper(2)
        monkeypatch.setenv("RAY_ADDRESS", cluster)
        monkeypatch.setattr(ray_pool, "_PLACE_SECONDS", 2.0)
        with pytest.raises(SimulationError, match=r"no room for workers=2, each with 1 CPU.*1 CPU are free"):
            run(registry.get(METHOD), Experiment(**SMALL, ray_address="auto"))

    def test_more_workers_than_cpus_are_refused(self, cluster: str) -> None:
        with pytest.raises(
            ConfigError, match="workers must be at most the number of the Ray cluster's CPUs, 3; got 4"
        ):
            run(registry.get(METHOD), Experiment(**SMALL, ray_address=cluster, workers=4))


@pytest.mark.parametrize("by_variable", [False, True])
def test_an_address_where_nothing_listens_is_refused_at_once(
    by_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address if by_variable else "127.0.0.1:1")
    experiment = Experiment(**SMALL, ray_address="auto" if by_variable else address)
    with pytest.raises(ConfigError, match=rf"nothing listens at {address} .*ray start --head"):
        run(registry.get(METHOD), experiment)
    assert not ray.is_initialized()


@pytest.mark.parametrize("address", ["foo", "ray://host:10001", "host:", ":6379", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="ray-address must be auto or HOST:PORT, got "):
        Experiment(**SMALL, ray_address=address)


@pytest.mark.parametrize("backend", ["inline", "processes"])
def test_an_address_beside_another_backend_is_refused(backend: str) -> None:
    with pytest.raises(ConfigError, match=rf'needs backend="ray" or auto, got {backend}'):
        Experiment(**SMALL, backend=backend, ray_address="auto")


# ---------------------------------------------------------------------- what nodes have

NODES = {"id-1": "one (10.0.0.1, id-1)", "id-2": "two (10.0.0.2, id-2)"}


@pytest.fixture
def second_node(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says what the second of two nodes answers; the first is this machine."""

    def answers(change: Callable[[Any], Any], *, versions: bool = False) -> None:
        def ask(nodes: Any, function: Any, *arguments: Any, seconds: Any = None) -> list[tuple[str, Any]]:
            here = function(*arguments)
            about_versions = function is not ray_cluster.look_at_node
            there = change(here) if about_versions == versions else here
            return list(zip(NODES.values(), (here, there), strict=True))

        nodes = [
            {
                "NodeID": key,
                "NodeManagerHostname": "host",
                "NodeManagerAddress": "10.0.0.1",
                "Alive": True,
                "Resources": {"CPU": 1},
            }
            for key in NODES
        ]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray_cluster, "ask_each", ask)

    return answers


def check(tmp_path: Path, **options: Any) -> None:
    ray_cluster.check_nodes("fedavg", Experiment(**SMALL, **options), str(tmp_path))


def test_nodes_that_have_all_pass(second_node: Callable[..., None], tmp_path: Path) -> None:
    second_node(lambda answer: answer)
    check(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "versions", "text"),
    [
        (lambda _: ModuleNotFoundError("No module flwr_kd"), True, "No module flwr_kd. Install flwr-kd=="),
        (lambda had: {**had, "torch": "1.0"}, True, r"other versions than this machine: torch 1\.0, here "),
        (lambda had: {**had, "shares": False}, False, "does not share folder {folder}, .*out="),
        (lambda had: {**had, "digest": "0"}, False, "data set digits: the samples, .* not those of this "),
        (lambda _: DataError("no file train.csv"), False, "data set digits: no file train.csv; put the same files"),
    ],
)  # fmt: skip
def test_a_node_that_lacks_something_is_named(
    change: Callable[[Any], Any],
    versions: bool,
    text: str,
    second_node: Callable[..., None],
    tmp_path: Path,
) -> None:
    second_node(change, versions=versions)
    with pytest.raises(
        ConfigError, match=r"^node two \(10\.0\.0\.2, id-2\) .*" + text.format(folder=tmp_path)
    ):
        check(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_counts_as_shared_by_the_file_that_another_machine_wrote(tmp_path: Path) -> None:
    experiment, token = Experiment(**SMALL), tmp_path / "token"
    look = ray_cluster.look_at_node
    assert look("fedavg", experiment, None)["shares"]
    assert not look("fedavg", experiment, str(token))["shares"]
    token.touch()
    assert look("fedavg", experiment, str(token)) == {"shares": True, "digest": digest_of(experiment)}


def test_the_digest_follows_samples_their_division_and_public_data() -> None:
    base = Experiment(**SMALL)
    others = [
        replace(base, seed=1),
        replace(base, partition="iid"),
        replace(base, limit=150),
        replace(base, clients=3),
    ]
    digests = [digest_of(each) for each in (base, *others)] + [digest_of(base, public=True)]
    assert len(set(digests)) == len(digests)
    assert digest_of(Experiment(**{**SMALL, "rounds": 9, "workers": 3})) == digests[0]
