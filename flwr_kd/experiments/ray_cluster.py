"""A Ray cluster that runs already: how a run connects to it, and what each of its nodes must have.

Nothing is sent to the nodes but the clients' names, arrays and settings: each has flwr-kd installed and reads the
data from its own disk, or from a folder that all of them share.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flwr_kd import registry
from flwr_kd.checks import ConfigError
from flwr_kd.experiments.data import digest_of
from flwr_kd.experiments.errors import SimulationError
from flwr_kd.experiments.experiment import Experiment
from flwr_kd.text import first_line
from flwr_kd.wording import option

__all__ = ["ask_each", "check_nodes", "connect", "look_at_node"]

_REACH_SECONDS = 5.0
_VERSION_SECONDS = 180.0
"""Seconds in which each node imports flwr-kd, PyTorch and Flower, from a cold disk."""
_PACKAGES = ("flwr-kd", "flwr", "torch", "numpy")
"""The numbers depend on their versions."""


def connect(address: str, workers: int, variables: Mapping[str, str]) -> None:
    """Connect this process to a cluster.

    Parameters
    ----------
    address : str
        ``HOST:PORT`` or ``auto``.
    workers : int
        Number of CPUs that it must have.
    variables : mapping
        The workers' environment.

    Raises
    ------
    ConfigError
        If there is no cluster at this address, or it has too few CPUs.
    SimulationError
        If Ray refuses the connection, for example because it has another version.
    """
    _reach(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
    paths = ["${PYTHONPATH}", *sys.path, os.environ.get("PYTHONPATH", "")]
    environment = {**variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        ray.init(
            address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": environment}
        )
    except ConnectionError as error:
        raise ConfigError(f"ray-address={address}: {first_line(error)}; {_start_hint()}") from error
    except Exception as error:
        raise SimulationError(
            f"ray-address={address}: Ray refused the connection: {first_line(error)}"
        ) from error
    cpus = int(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    if workers > cpus:
        raise ConfigError(
            f"workers must be at most the number of the Ray cluster's CPUs, {cpus}; got {workers}"
        )


def _reach(address: str) -> None:
    """Raise ConfigError at once where nothing listens. Ray would try again for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray-address: nothing listens at {address} ({error}); {_start_hint()}") from None


def _start_hint() -> str:
    return (
        "start a cluster with `ray start --head`, or let the run start Ray on this machine: "
        f"leave {option('ray_address', 'ADDRESS')} out"
    )


# ---------------------------------------------------------------------- nodes


def check_nodes(method: str, experiment: Experiment, state_dir: str | None) -> None:
    """Check that each node of the cluster has what a run needs, before it begins.

    Parameters
    ----------
    method : str
        A name of the registry.
    experiment : Experiment
        Whose data each node loads.
    state_dir : str, optional
        The folder for personal models, which all nodes share.

    Raises
    ------
    ConfigError
        If a node lacks flwr-kd or has other versions, lacks the method, cannot load the data or has other files, or
        does not share the folder. It names the node.
    """
    nodes = {
        node["NodeID"]: f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:8]})"
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"] and node["Resources"].get("CPU")
    }
    look = _look_at_versions()
    expected = look(_PACKAGES)
    for node, answer in ask_each(nodes, look, _PACKAGES, seconds=_VERSION_SECONDS):
        _check_versions(node, answer, expected)
    with _token(state_dir) as token:
        # The node of this machine is asked as well: it may be another container.
        answers = ask_each(nodes, look_at_node, method, experiment, token)
        digest = digest_of(experiment, public=registry.get(method).public_at == "clients")
        for node, answer in answers:
            _check_answer(node, answer, experiment, state_dir, digest)


def ask_each(
    nodes: Mapping[str, str], function: Callable[..., Any], *arguments: Any, seconds: float | None = None
) -> list[tuple[str, Any]]:
    """Call a function on each node, and return their names with its results, or with what it raised.

    Parameters
    ----------
    nodes : mapping
        Names for errors, by Ray's id.
    function : callable
        A node must be able to import it, unless it is made by another function.
    *arguments : object
        For the function.
    seconds : float, optional
        Time after which a node that has not answered counts as one that raises TimeoutError; no bound if None.
    """
    # Each call has a process of its own, which ends after it: loaded data would stay in memory.
    remote = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(function)
    calls = {}
    for node in nodes:
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        calls[node] = remote.options(scheduling_strategy=place).remote(*arguments)
    done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=seconds)
    answers: list[tuple[str, Any]] = []
    for node, name in nodes.items():
        try:
            if calls[node] not in done:
                raise TimeoutError(f"no answer within {seconds:g} s")
            answers.append((name, ray.get(calls[node])))
        except Exception as error:
            answers.append((name, error))
    return answers


def _look_at_versions() -> Callable[[tuple[str, ...]], dict[str, str]]:
    # Inside a function, so that Ray sends it by value: a node may lack flwr-kd.
    def look(packages: tuple[str, ...]) -> dict[str, str]:
        import importlib
        from importlib.metadata import PackageNotFoundError, version

        from flwr_kd.results.provenance import versions

        made_with = {}
        for name in packages:
            module = importlib.import_module(name.replace("-", "_"))
            try:
                made_with[name] = str(getattr(module, "__version__", None) or version(name))
            except PackageNotFoundError:
                made_with[name] = "an unknown version"
        commit = versions().get("commit")
        return {**made_with, "commit": commit} if commit else made_with

    return look


def _check_versions(node: str, answer: Any, expected: dict[str, str]) -> None:
    if isinstance(answer, Exception):
        raise ConfigError(
            f"node {node} of the Ray cluster cannot import what the clients need: {_cause(answer)}. Install "
            + " ".join(f"{name}=={expected[name]}" for name in _PACKAGES)
            + " there, in the environment in which `ray start` runs"
        )
    # An installation from a wheel has no commit.
    common = [name for name in expected if name in answer]
    other = [
        f"{name} {answer[name]}, here {expected[name]}" for name in common if answer[name] != expected[name]
    ]
    if other:
        raise ConfigError(
            f"node {node} of the Ray cluster has other versions than this machine: {'; '.join(other)}. Numbers "
            "depend on them: install the same versions on each node"
        )


def look_at_node(method: str, experiment: Experiment, token: str | None) -> dict[str, Any]:
    """Return what this machine has: the ``digest`` of the data, and whether it ``shares`` and may write a folder.

    Parameters
    ----------
    method : str
        A name of the registry.
    experiment : Experiment
        Whose data is loaded.
    token : str, optional
        A file that another machine has just written into the folder.

    Raises
    ------
    ConfigError, DataError
        If the method is not installed, or the data cannot be loaded.
    """
    shares = token is None or (Path(token).is_file() and os.access(Path(token).parent, os.W_OK))
    public = registry.get(method).public_at == "clients"
    return {"digest": digest_of(experiment, public=public), "shares": shares}


def _check_answer(node: str, answer: Any, experiment: Experiment, state_dir: str | None, digest: str) -> None:
    where = f"folder {experiment.data_dir}" if experiment.data_dir else f"data set {experiment.dataset}"
    put = f"put the same files on each node, or set {option('data_dir', 'FOLDER')} to a shared folder"
    if isinstance(answer, Exception):
        raise ConfigError(f"node {node} of the Ray cluster, {where}: {_cause(answer)}; {put}")
    if not answer["shares"]:
        raise ConfigError(
            f"node {node} of the Ray cluster does not share folder {state_dir}, or may not write there. It has the "
            f"clients' personal models: set {option('out', 'FOLDER')} to a folder that all nodes share"
        )
    if answer["digest"] != digest:
        raise ConfigError(
            f"node {node} of the Ray cluster, {where}: the samples, or their division among the clients, are not "
            f"those of this machine; {put}"
        )


def _cause(error: Exception) -> str:
    """Return one line about an error that a task raised; Ray puts a traceback around it."""
    cause = getattr(error, "cause", None)
    return first_line(cause if isinstance(cause, Exception) else error)


@contextmanager
def _token(folder: str | None) -> Iterator[str | None]:
    """Write a file into a folder, by which other nodes see whether it is theirs as well."""
    if folder is None:
        yield None
        return
    file = Path(folder).absolute() / f".node-check-{uuid.uuid4().hex}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    try:
        yield str(file)
    finally:
        with suppress(OSError):
            file.unlink()
