"""A comparison on its way: the runs that are finished, kept beside the result until it is whole.

While a comparison runs, its folder has ``.unfinished/``: a result of the runs that are finished, with their last
arrays, and a folder for the run that is under way. An interrupted comparison leaves it in place, so that the same
command can continue after the last complete round.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr_kd.experiments import saved_arrays
from flwr_kd.experiments.run_folder import RunFolder
from flwr_kd.results import files
from flwr_kd.results.errors import ResultError, ResultExistsError
from flwr_kd.results.schema import Comparison, RunResult
from flwr_kd.wording import option

__all__ = ["FOLDER", "Unfinished", "is_there"]

FOLDER = ".unfinished"
"""Name of the folder inside a result's."""
_RUNS = "runs"
_OF_RUNS = ("model", "seeds", "attacker_ids", "target")
"""Keys of a config that depend on its runs, or change none of them. All others must be the same when a comparison
is resumed."""


def is_there(directory: Path) -> bool:
    """Return whether a folder has a result, or a comparison that goes on."""
    return (directory / files.FILE_NAME).exists() or (directory / FOLDER / files.FILE_NAME).exists()


class Unfinished:
    """The finished runs of a comparison that is not whole yet.

    Parameters
    ----------
    directory : Path
        The result's folder; need not exist.
    config : mapping
        What the runs share, as from :meth:`flwr_kd.Experiment.shared`.
    methods : mapping of str to str
        The method of each run's name, which is its label or the method itself.
    models : mapping of str to str
        Each name's model.
    hyperparameters : mapping of str to mapping
        Each name's, as they travel.
    versions : mapping of str to str
        As from :func:`flwr_kd.results.provenance.versions`.
    command : str
        The command line that gives the result again.

    Attributes
    ----------
    path : Path
        Where the finished runs are.
    runs : list of RunResult
        The finished runs, in the order in which they ended.
    commands : str
        The commands that have made the runs, those of comparisons that went on included.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Mapping[str, Any],
        methods: Mapping[str, str],
        models: Mapping[str, str],
        hyperparameters: Mapping[str, Mapping[str, Any]],
        versions: Mapping[str, str],
        command: str,
    ) -> None:
        self.directory, self.path = directory, directory / FOLDER
        self.runs: list[RunResult] = []
        self.commands = command
        self._begun: list[tuple[str, int]] = []
        self._methods, self._models, self._hyperparameters = methods, models, hyperparameters
        self._now = Comparison(
            {name: value for name, value in config.items() if name not in _OF_RUNS},
            dict(versions),
            command,
            (),
        )

    def check_free(self, *, resume: bool, force: bool) -> None:
        """Refuse a folder with a result or an interrupted comparison, if neither option is given."""
        files.check_free(self.directory, force=force or resume, ways=("force", "resume"))
        if self.path.exists() and not (resume or force):
            raise ResultExistsError(
                f"{str(self.directory)!r} has an unfinished comparison; go on with {option('resume')}, "
                f"begin anew with {option('force')}, or choose another folder"
            )

    def begin(self, *, resume: bool, force: bool) -> None:
        """Read the finished runs, or check that starting again loses nothing.

        Parameters
        ----------
        resume : bool
            Continue with the runs of an interrupted comparison in the folder or, if there is none, of a result.
        force : bool
            Whether a result or an interrupted comparison may be overwritten. Ignored with ``resume``.

        Raises
        ------
        ResultExistsError
            If the folder has a result or an interrupted comparison, and neither option is given.
        ResultError
            If the runs in the folder are of other settings or versions or cannot be read, or if the folder cannot
            be written to.
        """
        self.check_free(resume=resume, force=force)
        if resume:
            whole = (self.directory / files.FILE_NAME).exists()
            if (self.path / files.FILE_NAME).exists():
                self._continue(self.path)
            elif whole:
                self._continue(self.directory)
            else:
                raise ResultError(
                    f"{option('resume')}: {str(self.directory)!r} has no comparison to go on with; leave "
                    f"{option('resume')} out to begin one, or name the folder of another"
                )
        elif self.path.exists():
            self.remove()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResultError(f"out: cannot write to {str(self.directory)!r}: {error.strerror}") from None
        if self.runs and not (self.path / files.FILE_NAME).exists():
            saved_arrays.copy(self.directory, self.path)
        self._write()

    def find(self, name: str, seed: int) -> RunResult | None:
        """Return a run if it is finished."""
        return next((run for run in self.runs if (run.name, run.seed) == (name, seed)), None)

    def arrays_of(self, name: str, seed: int) -> Path:
        """Return the folder for a run's last arrays."""
        return saved_arrays.folder_of(self.path, name, seed)

    def folder_of(self, name: str, seed: int) -> RunFolder:
        """Return the folder that a run has while it is under way."""
        return RunFolder(self.path / _RUNS / f"{name}-seed{seed}")

    def begin_run(self, name: str, seed: int) -> None:
        """Note that a run begins, and with which settings: it goes on with the same only."""
        if (name, seed) not in self._begun:
            self._begun.append((name, seed))
            self._write()

    def add(self, run: RunResult) -> None:
        """Save a run that has just finished, all of it or nothing, and remove what it needed to go on."""
        self.runs.append(run)
        self._begun = [begun for begun in self._begun if begun != (run.name, run.seed)]
        self._write()
        shutil.rmtree(self.folder_of(run.name, run.seed).path, ignore_errors=True)

    def interrupted(self) -> list[tuple[str, int, int]]:
        """Return name, seed and last complete round of each run that was interrupted after its first."""
        rounds = ((*begun, self.folder_of(*begun).last_round) for begun in self._begun)
        return [run for run in rounds if run[2]]

    def finish(self, comparison: Comparison) -> Path:
        """Replace an earlier result by the whole comparison, and return the result's file.

        Earlier arrays are removed first and new ones are moved last, so that no result is ever beside the arrays of
        another one.
        """
        saved_arrays.remove(self.directory)
        saved = files.save(comparison, self.directory, force=True)
        saved_arrays.move(self.path, self.directory)
        self.remove()
        return saved

    def remove(self) -> None:
        """Remove the unfinished runs, and the result's folder if it is then empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.directory.rmdir()

    def _write(self) -> None:
        runs = (*self.runs, *(self._planned(name, seed) for name, seed in self._begun))
        names = {run.name for run in runs}
        config = {
            **self._now.config,
            "model": {name: self._models[name] for name in self._models if name in names},
        }
        files.save(Comparison(config, self._now.versions, self.commands, runs), self.path, force=True)

    def _planned(self, name: str, seed: int, **more: Any) -> RunResult:
        """Return a run without rounds, as it is planned; the values are converted as a result converts them."""
        method = self._methods[name]
        label = "" if name == method else name
        return RunResult(method, seed, (), {**self._hyperparameters[name], **more}, label=label)

    def _continue(self, directory: Path) -> None:
        saved = files.load(directory)
        for what, before, now in (
            ("versions", saved.versions, self._now.versions),
            ("config", saved.config, self._now.config),
        ):
            names = sorted({*before, *now} - set(_OF_RUNS))
            self._check_same(directory, what, before, now, names)
        models = saved.config.get("model")
        for run in saved.runs:
            if run.name not in self._models:
                raise ResultError(
                    f"{str(directory)!r} has runs of {run.name}, which would be lost: add it to the methods, "
                    f"choose another folder, or begin anew with {option('force')}"
                )
            model = models.get(run.name) if isinstance(models, dict) else models
            # Both sides went through the same conversion.
            wanted = self._planned(run.name, run.seed, model=self._models[run.name])
            before = {**run.hyperparameters, "model": model, "method": run.method}
            now = {**wanted.hyperparameters, "method": wanted.method}
            self._check_same(directory, run.name, before, now, sorted({*before, *now}))
        if saved.command:
            known = f" && {saved.command}".endswith(f" && {self.commands}")
            self.commands = saved.command if known else f"{saved.command} && {self.commands}"
        self.runs = [run for run in saved.runs if run.rounds]
        self._begun = [(run.name, run.seed) for run in saved.runs if not run.rounds]

    def _check_same(
        self,
        directory: Path,
        what: str,
        before: Mapping[str, Any],
        now: Mapping[str, Any],
        names: Sequence[str],
    ) -> None:
        for name in names:
            if before.get(name) != now.get(name):
                raise ResultError(
                    f"{str(directory)!r} was made with another {name} ({what}): {before.get(name)!r} there, "
                    f"{now.get(name)!r} here; choose another folder, or begin anew with {option('force')}"
                )
