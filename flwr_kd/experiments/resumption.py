"""A comparison on its way: the runs that are finished, kept beside the result until it is whole.

While a comparison runs, its folder has ``.unfinished/``: itself a result, of those runs that are done, with their
last arrays. An interrupted comparison leaves it there, so that the same one goes on after the last whole run.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr_kd.experiments import saved_arrays
from flwr_kd.results import files
from flwr_kd.results.errors import ResultError, ResultExistsError
from flwr_kd.results.schema import Comparison, RunResult

__all__ = ["FOLDER", "Unfinished"]

FOLDER = ".unfinished"
"""Name of the folder inside a result's."""
_OF_RUNS = ("model", "seeds", "attacker_ids")
"""What a config says of single runs; the rest is shared by all of them."""


class Unfinished:
    """The finished runs of a comparison that is not whole yet.

    Parameters
    ----------
    directory : Path
        The result's folder; need not exist.
    config : mapping
        What the runs share, as :meth:`flwr_kd.Experiment.shared` tells it.
    models : mapping of str to str
        Each method's model.
    hyperparameters : mapping of str to mapping
        Each method's, as they travel.
    versions : mapping of str to str
        As from :func:`flwr_kd.results.provenance.versions`.
    command : str
        What goes on with it.

    Attributes
    ----------
    path : Path
        Where the finished runs are.
    runs : list of RunResult
        Those that are finished, in the order in which they were.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, Any],
        models: Mapping[str, str],
        hyperparameters: Mapping[str, Mapping[str, Any]],
        versions: Mapping[str, str],
        command: str,
    ) -> None:
        self.directory, self.path = directory, directory / FOLDER
        self.runs: list[RunResult] = []
        self._models, self._hyperparameters = models, hyperparameters
        self._now = Comparison(
            {name: value for name, value in config.items() if name not in _OF_RUNS},
            dict(versions),
            command,
            (),
        )

    def begin(self, *, resume: bool, force: bool) -> None:
        """Take up what is finished, or make sure that nothing is lost by beginning anew.

        Parameters
        ----------
        resume : bool
            Take the runs of an interrupted comparison that is there; without one, those of a whole result.
        force : bool
            What is there may be overwritten. With ``resume`` nothing is.

        Raises
        ------
        ResultExistsError
            Something is there, and neither was said.
        ResultError
            What is there is of other settings or versions, or cannot be read, or nothing can be written.
        """
        files.check_free(self.directory, force=force or resume)
        if resume:
            whole = (self.directory / files.FILE_NAME).exists()
            if (self.path / files.FILE_NAME).exists():
                self._take(self.path)
            elif whole:
                self._take(self.directory)
        elif self.path.exists():
            if not force:
                raise ResultExistsError(
                    f"{str(self.directory)!r} has an unfinished comparison; go on with --resume, begin anew with "
                    "--force, or choose another folder"
                )
            self.remove()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultError(f"out: cannot write to {str(self.directory)!r}: {error.strerror}") from None
        if self.runs and not (self.path / files.FILE_NAME).exists():
            saved_arrays.copy(self.directory, self.path)
            self._write()

    def find(self, method: str, seed: int) -> RunResult | None:
        """Return a run if it is finished."""
        return next((run for run in self.runs if (run.method, run.seed) == (method, seed)), None)

    def arrays_of(self, method: str, seed: int) -> Path:
        """Return the folder for a run's last arrays."""
        return saved_arrays.folder_of(self.path, method, seed)

    def add(self, run: RunResult) -> None:
        """Write down a run that has just finished, all of it or nothing."""
        self.runs.append(run)
        self._write()

    def finish(self, comparison: Comparison) -> Path:
        """Put the whole comparison in the place of an earlier result; return the file.

        In this order no result is ever beside another one's arrays.
        """
        saved_arrays.remove(self.directory)
        saved = files.save(comparison, self.directory, force=True)
        saved_arrays.move(self.path, self.directory)
        self.remove()
        return saved

    def remove(self) -> None:
        """Remove what is unfinished; the folder, too, if nothing else is there."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.directory.rmdir()

    def _write(self) -> None:
        config = {**self._now.config, "model": self._models_of_runs()}
        files.save(
            Comparison(config, self._now.versions, self._now.command, tuple(self.runs)), self.path, force=True
        )

    def _models_of_runs(self) -> dict[str, str]:
        return {run.method: self._models[run.method] for run in self.runs if run.method in self._models}

    def _take(self, directory: Path) -> None:
        found = files.load(directory)
        for what, there, here in (
            ("versions", found.versions, self._now.versions),
            ("config", found.config, self._now.config),
        ):
            self._same(directory, what, there, here, sorted({*there, *here} - set(_OF_RUNS)))
        models = found.config.get("model")
        for run in found.runs:
            if run.method not in self._models:
                raise ResultError(
                    f"{str(directory)!r} has runs of {run.method}, which would be lost: name it, too, choose "
                    "another folder, or begin anew with --force"
                )
            model = models.get(run.method) if isinstance(models, dict) else models
            wanted = {**self._hyperparameters[run.method], "model": self._models[run.method]}
            # As a result holds them, so that both sides went through the same conversion.
            now = RunResult(run.method, run.seed, (), wanted).hyperparameters
            was = {**run.hyperparameters, "model": model}
            self._same(directory, run.method, was, now, sorted({*was, *now}))
        self.runs = list(found.runs)

    def _same(
        self,
        directory: Path,
        what: str,
        there: Mapping[str, Any],
        here: Mapping[str, Any],
        names: Sequence[str],
    ) -> None:
        for name in names:
            if there.get(name) != here.get(name):
                raise ResultError(
                    f"{str(directory)!r} was made with another {name} ({what}): {there.get(name)!r} there, "
                    f"{here.get(name)!r} here; choose another folder, or begin anew with --force"
                )
