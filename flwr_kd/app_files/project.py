"""A Flower App as a set of files."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from flwr_kd.app_files.traits import Traits
from flwr_kd.checks import ConfigError
from flwr_kd.files import write_atomically
from flwr_kd.registry import Method
from flwr_kd.text import shown

__all__ = ["PUBLISHER", "AppProject"]

PUBLISHER = "your-flower-account"
"""What stands for the account on Flower Hub until the app's author writes it."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_PUBLISHER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_LONGEST = 200
_IGNORED = "__pycache__/\n.venv/\n*.fab\n"


@dataclass(frozen=True, kw_only=True)
class AppProject:
    """A Flower App of one method, or of several between which the setting ``method`` chooses.

    Parameters
    ----------
    name : str
        The project's name and its folder's: a letter, then letters, digits and hyphens, at most 32 in all.
    methods : tuple of Method
        At least one; the first is the default. They must have the same defaults.
    title : str
        For headings; the methods' names if empty.
    description : str
        At most 200 characters; made from the methods if empty.
    publisher : str
        The account on Flower Hub.
    place : str
        The folder as in ``flwr run``; ``name`` if empty.

    Raises
    ------
    ConfigError
        If a value is not allowed, or the methods have different defaults.

    Examples
    --------
    >>> from flwr_kd import registry
    >>> project = AppProject(name="my-fedproto", methods=(registry.get("fedproto"),))
    >>> sorted(project.files())[-3:]
    ['my_fedproto_app/client_app.py', 'my_fedproto_app/server_app.py', 'pyproject.toml']
    >>> AppProject(name="my_app", methods=project.methods)
    Traceback (most recent call last):
    flwr_kd.ConfigError: name must be a letter, then letters, digits and hyphens, 32 at most, got 'my_app'
    """

    name: str
    methods: tuple[Method, ...]
    title: str = ""
    description: str = ""
    publisher: str = PUBLISHER
    place: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name must be a letter, then letters, digits and hyphens, 32 at most, got {shown(self.name)}"
            )
        if not _PUBLISHER.fullmatch(self.publisher):
            raise ConfigError(
                "publisher must be an account's name: letters, digits, dots, hyphens and underscores, got "
                f"{shown(self.publisher)}"
            )
        if not self.methods:
            raise ConfigError("methods must be at least one method, got none")
        names = [method.name for method in self.methods]
        defaults = {
            "title": " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names),
            "place": self.name,
        }
        for field, default in defaults.items():
            object.__setattr__(self, field, getattr(self, field) or default)
        object.__setattr__(self, "description", self.description or self._described())
        if len(self.description) > _LONGEST or "\n" in self.description:
            raise ConfigError(
                f"description must be one line of at most {_LONGEST} characters, got {len(self.description)}"
            )
        # It checks whether the methods fit together.
        _ = self.traits

    @functools.cached_property
    def traits(self) -> Traits:
        """What the methods need."""
        return Traits(self.methods)

    def _described(self) -> str:
        sent = self.methods[0].exchanged if len(self.methods) == 1 else "federated knowledge distillation"
        text = f"{self.title}: {sent}"
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"

    @property
    def package(self) -> str:
        """The name of the Python package; it has an ending that keeps it apart from other packages' names."""
        base = self.name.replace("-", "_")
        return base if base.endswith("_app") else f"{base}_app"

    def files(self) -> dict[str, str]:
        """Return the app's files by their path, with ``/``.

        Only types that Flower Hub accepts: Python, TOML, Markdown, ``LICENSE`` and ``.gitignore``.
        """
        from flwr_kd.app_files import code, page, settings

        texts: dict[str, Callable[[AppProject], str]] = {
            "pyproject.toml": settings.project_file,
            "README.md": page.page,
            f"{self.package}/__init__.py": code.package,
            f"{self.package}/server_app.py": code.server_app,
            f"{self.package}/client_app.py": code.client_app,
        }
        return {
            ".gitignore": _IGNORED,
            "LICENSE": files("flwr_kd.app_files").joinpath("LICENSE").read_text(encoding="utf-8"),
            **{path: text(self) for path, text in texts.items()},
        }

    def write(self, folder: Path) -> None:
        """Write the files into a folder that is empty or does not exist yet.

        Raises
        ------
        ConfigError
            If the folder has anything in it, or is a file.
        """
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{str(folder)!r} exists already: name a folder that is new or empty")
        for path, text in self.files().items():
            write_atomically(folder / path, text.encode("utf-8"), mode=0o666, sync=False)
