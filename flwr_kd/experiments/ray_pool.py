"""The workers of a Ray simulation: room for them is reserved before it begins, and watched while it runs."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import ray
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend import raybackend
from flwr.simulation.ray_transport.ray_actor import BasicActorPool
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flwr_kd.experiments.errors import SimulationError
from flwr_kd.wording import option

__all__ = ["Room", "Watch", "gpu_share", "replaced"]

_PLACE_SECONDS = 60.0
"""Seconds for placing workers on nodes; also for placing them again where their node was lost."""
_ASK_SECONDS = 2.0
_ANSWER_SECONDS = 30.0
"""Seconds after which a Ray that does not answer has ended. After 60 it would end this process, in C++."""
_LOOK_SECONDS = 1.0


def gpu_share(workers: int, gpus: int) -> float:
    """Return the part of a GPU for each worker, so that all find a place; 0 without GPUs.

    A worker's part lies on one GPU, and Ray counts in ten-thousandths.

    >>> gpu_share(2, 1), gpu_share(3, 2), gpu_share(1, 8), gpu_share(2, 0)
    (0.5, 0.5, 1.0, 0.0)
    """
    if gpus < 1:
        return 0.0
    return math.floor(10**4 / math.ceil(workers / gpus)) / 10**4


@contextmanager
def replaced(module: Any, name: str, value: object) -> Iterator[None]:
    """Give a module another attribute within a block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


class Room:
    """Room for the workers, reserved on Ray's nodes.

    Parameters
    ----------
    workers : int
        Each has one CPU.
    gpus : float
        The part of a GPU that each has.
    """

    def __init__(self, workers: int, gpus: float) -> None:
        bundle = {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}
        self.workers, self.bundle = workers, bundle
        self.group = placement_group([bundle] * workers, strategy="SPREAD")
        self.closed = threading.Event()
        self.lost: str | None = None
        self._actors: list[Any] = []
        self._asking, self._closing = threading.Lock(), threading.Lock()
        self._placed = time.monotonic()
        self._node = ray.get_runtime_context().get_node_id()

    def wait(self, stopping: threading.Event) -> None:
        """Wait until the room is reserved.

        Raises
        ------
        SimulationError
            If it is not within a minute: other programs use the CPUs or GPUs.
        """
        end = time.monotonic() + _PLACE_SECONDS
        while not self.group.wait(_LOOK_SECONDS) and not stopping.is_set():
            if time.monotonic() > end:
                free, needed = ray.available_resources(), _shown(self.bundle)  # type: ignore[no-untyped-call]
                raise SimulationError(
                    f"Ray has no room for workers={self.workers}, each with {needed}, within {_PLACE_SECONDS:g} s: "
                    f"{_shown(free)} are free now. Wait until other programs on the cluster have ended, or use "
                    f"fewer workers, for example {option('workers', max(int(free.get('CPU', 0)), 1))}"
                )
        self._placed = time.monotonic()

    def problem(self) -> str | None:
        """Ask Ray why the workers can no longer work; None if they can, or the room is closed."""
        with self._asking:
            if self.closed.is_set():
                return None
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
            if not any(node["Alive"] and node["NodeID"] == self._node for node in nodes):
                self.lost = "Ray's node on this machine has ended"
            elif placement_group_table(self.group)["state"] == "CREATED":
                self._placed = time.monotonic()
            elif time.monotonic() - self._placed > _PLACE_SECONDS:
                self.lost = f"nodes have ended, and the others have no room for workers={self.workers}"
        return self.lost

    def close(self) -> None:
        """End the workers, and nothing else that runs on Ray.

        Flower's own way ends in an error by design, and is repeated for a worker that was restarted: Ray would
        print these errors.
        """
        with self._closing:
            if self.closed.is_set():
                return
            self.closed.set()
            # Ray must not be shut down while it is asked. One that does not answer is not waited for.
            if not self._asking.acquire(timeout=_ASK_SECONDS):
                return
            try:
                for actor in self._actors:
                    ray.kill(actor, no_restart=True)
                remove_placement_group(self.group)
            finally:
                self._asking.release()

    @contextmanager
    def given_to_flower(self) -> Iterator[None]:
        """Let Flower's simulation use this room.

        Flower has no option for it. Its pool has as many actors as fit into the whole cluster, also where others
        use it, and its threads are at most as many as this machine's cores and four.
        """
        pool, threads = functools.partial(_Pool, self), functools.partial(ThreadPoolExecutor, self.workers)
        with replaced(raybackend, "BasicActorPool", pool), replaced(vce_api, "ThreadPoolExecutor", threads):
            yield

    def start(self, create: Callable[..., Any]) -> Any:
        """Start a worker in the room."""
        actor = create(scheduling_strategy=PlacementGroupSchedulingStrategy(self.group))
        self._actors.append(actor)
        return actor


class _Pool(BasicActorPool):
    """Flower's pool of actors, in a room. Its threads never wait for an actor that is gone."""

    def __init__(
        self,
        room: Room,
        actor_type: Any,
        client_resources: dict[str, int | float],
        actor_kwargs: dict[str, Any],
    ) -> None:
        super().__init__(actor_type, client_resources, actor_kwargs)
        self._room, self.actors_capacity = room, room.workers
        self.create_actor_fn = lambda: room.start(
            lambda **place: actor_type.options(**client_resources, **place).remote(**actor_kwargs)
        )

    def terminate_all_actors(self) -> None:
        self._room.close()

    def fetch_result_and_return_actor_to_pool(self, future: Any) -> Any:
        try:
            while not self._room.closed.is_set():
                if ray.wait([future], timeout=_LOOK_SECONDS)[0]:
                    return super().fetch_result_and_return_actor_to_pool(future)
        except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
            # The client ended its process, or Ray has ended, and then not only this client has failed.
            if self._room.problem() is not None:
                self._room.closed.wait()
            raise
        raise RuntimeError("the simulation has ended")


class Watch:
    """Asks a room in a thread of its own whether Ray still runs, since one that has ended may never answer.

    Parameters
    ----------
    room : Room
        Whose workers are waited for.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._answered = time.monotonic()
        threading.Thread(target=self._ask, daemon=True, name="flwr-kd-ray-watch").start()

    def check(self) -> None:
        """Raise SimulationError if the workers can no longer work."""
        if self._room.closed.is_set():
            return
        problem = self._room.lost
        if problem is None and time.monotonic() - self._answered > _ANSWER_SECONDS:
            problem = f"Ray has not answered for {_ANSWER_SECONDS:g} s"
        if problem is not None:
            raise SimulationError(f"the simulation cannot go on: {problem}")

    def _ask(self) -> None:
        while not self._room.closed.wait(_ASK_SECONDS):
            try:
                self._room.problem()
            except Exception as error:
                logging.getLogger("flwr").debug("Ray does not answer: %s", error)
                continue
            self._answered = time.monotonic()


def _shown(resources: dict[str, float]) -> str:
    return " and ".join(
        f"{resources.get(name, 0):g} {name}"
        for name in ("CPU", "GPU")
        if resources.get(name) or name == "CPU"
    )
