"""What a caller is told while a run goes on: its beginning, phases, rounds and end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.common.logger import log

from flwr_kd.checks import ConfigError, Scalar
from flwr_kd.server.records import KDResult, RoundStats
from flwr_kd.text import first_line

if TYPE_CHECKING:
    from flwr_kd.server.run import Run

__all__ = ["Callback", "Callbacks", "PhaseStats", "RunInfo"]


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run when its rounds begin.

    Attributes
    ----------
    name : str
        The method's name, or the label of its row in a comparison; the strategy's class where it runs by itself.
    seed : int
        Seed of every random choice.
    key : str
        The run's own name, 16 hexadecimal digits. A run that is resumed keeps it.
    first_round, num_rounds : int
        The round with which it begins, above 1 if it is resumed, and the last one.
    clients : int
        Number of clients that are connected.
    hyperparameters : mapping of str to bool, int, float or str
        The method's, by their names in kebab-case.
    settings : mapping
        What the methods of a comparison share, such as ``dataset``; empty for a strategy that runs by itself.
    """

    name: str
    seed: int
    key: str
    first_round: int
    num_rounds: int
    clients: int
    hyperparameters: Mapping[str, Scalar]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, first_round: int, clients: int) -> RunInfo:
        """Return what is known of a strategy's run."""
        strategy = run.strategy
        return cls(
            name=type(strategy).__name__,
            seed=strategy.seed,
            key=run.key,
            first_round=first_round,
            num_rounds=strategy.num_rounds,
            clients=clients,
            hyperparameters=strategy.config.to_wire(),
        )


@dataclass
class PhaseStats:
    """Statistics of one phase of a round.

    Attributes
    ----------
    server_round : int
        From 1.
    phase : str
        One of the strategy's phases.
    asked, usable : int
        Number of clients that were sent a message, and of replies that were used: none where they were too few.
    bytes_down, bytes_up : int
        Bytes of arrays and payloads, over all clients.
    seconds : float
        Wall clock, from the selection of the clients to the aggregate.
    """

    server_round: int
    phase: str
    asked: int = 0
    usable: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0


class Callback:
    """Base of what follows a run; each method does nothing by default.

    A callback is given to a strategy, to :func:`flwr_kd.run` or to :func:`flwr_kd.compare` as one of ``callbacks``.
    It is called in the server's process, in the order of the list. Nothing that it does may change the run.

    An error of a callback does not end the run: the callback's first error is logged as a warning with its place,
    and a second warning after the run says how many of its calls failed. A callback whose ``on_start`` fails is not
    called again. :class:`KeyboardInterrupt` ends the run. Use a strategy's ``on_round`` for a function whose errors
    must end it.

    Examples
    --------
    >>> class Accuracies(Callback):
    ...     def __init__(self) -> None:
    ...         self.values: list[float | None] = []
    ...     def on_round(self, stats: RoundStats) -> None:
    ...         self.values.append(stats.local_accuracy)
    >>> seen = Accuracies()
    >>> Callbacks([seen]).on_round(RoundStats(1, local_accuracy=0.5))
    >>> seen.values
    [0.5]
    """

    def on_start(self, run: RunInfo) -> None:
        """Take note that the rounds begin: the clients are connected, and nothing has been sent to train."""

    def on_phase(self, stats: PhaseStats) -> None:
        """Take note of a phase that is over."""

    def on_round(self, stats: RoundStats) -> None:
        """Take note of a round that is over, also of a void one."""

    def on_end(self, result: KDResult, error: BaseException | None) -> None:
        """Take note of the end of a run whose ``on_start`` was called.

        Parameters
        ----------
        result : KDResult
            The rounds of this process so far; where the run was resumed, without those before.
        error : BaseException or None
            What ended the run before its last round, if anything did.
        """


class Callbacks(Callback):
    """Several callbacks as one: calls each in turn, and keeps the run from their errors.

    Parameters
    ----------
    callbacks : iterable of Callback
        In the order in which they are called.
    name : str
        In place of the strategy's class in :class:`RunInfo`, if not empty.
    settings : mapping
        ``settings`` of :class:`RunInfo`.

    Raises
    ------
    ConfigError
        If one is no :class:`Callback`.
    """

    def __init__(
        self, callbacks: Iterable[Callback] = (), *, name: str = "", settings: Mapping[str, Any] | None = None
    ) -> None:
        self._callbacks = tuple(callbacks)
        self._name, self._settings = name, dict(settings or {})
        # By position: a callback need not be hashable.
        self._left_out: set[int] = set()
        self._errors: dict[int, int] = {}
        for callback in self._callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(
                    f"callbacks must be objects of classes that derive from flwr_kd.Callback, got {callback!r}; a "
                    "function of a round's statistics is given as on_round"
                )

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def __len__(self) -> int:
        return len(self._callbacks)

    def on_start(self, run: RunInfo) -> None:
        """Call ``on_start`` of each."""
        self._errors = {}
        run = replace(run, name=self._name or run.name, settings={**self._settings, **run.settings})
        self._left_out = {index for index in range(len(self)) if not self._call(index, "on_start", run)}

    def on_phase(self, stats: PhaseStats) -> None:
        """Call ``on_phase`` of each."""
        self._call_all("on_phase", stats)

    def on_round(self, stats: RoundStats) -> None:
        """Call ``on_round`` of each."""
        self._call_all("on_round", stats)

    def on_end(self, result: KDResult, error: BaseException | None) -> None:
        """Call ``on_end`` of each, and say which had errors."""
        self._call_all("on_end", result, error)
        for index, count in self._errors.items():
            log(
                WARNING,
                "callback %s: %d of its calls failed in this run; what it keeps is not complete",
                type(self._callbacks[index]).__name__,
                count,
            )

    @contextmanager
    def around(self, run: RunInfo, result: KDResult) -> Iterator[None]:
        """Call ``on_start`` and ``on_end`` around a run's rounds."""
        self.on_start(run)
        try:
            yield
        except BaseException as error:
            self.on_end(result, error)
            raise
        self.on_end(result, None)

    @contextmanager
    def phase(self, name: str, of: RoundStats) -> Iterator[PhaseStats]:
        """Measure a phase, and call ``on_phase`` after it. The block fills in ``asked`` and ``usable``."""
        begun, down, up = time.monotonic(), of.bytes_down, of.bytes_up
        stats = PhaseStats(of.server_round, name)
        yield stats
        stats.bytes_down, stats.bytes_up = of.bytes_down - down, of.bytes_up - up
        stats.seconds = time.monotonic() - begun
        self.on_phase(stats)

    def _call_all(self, hook: str, *values: object) -> None:
        for index in range(len(self)):
            if index not in self._left_out:
                self._call(index, hook, *values)

    def _call(self, index: int, hook: str, *values: object) -> bool:
        """Call one method of one callback; return whether it had no error."""
        callback = self._callbacks[index]
        try:
            getattr(callback, hook)(*values)
        except Exception as error:
            self._errors[index] = self._errors.get(index, 0) + 1
            if self._errors[index] == 1:
                log(
                    WARNING,
                    "callback %s failed in %s, and the run goes on%s: %s: %s",
                    type(callback).__name__,
                    hook,
                    " without it" if hook == "on_start" else "",
                    type(error).__name__,
                    first_line(error),
                )
            return False
        return True
