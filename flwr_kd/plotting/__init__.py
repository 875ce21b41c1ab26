"""Pictures of results, one module for each: ``plot`` writes the picture, ``figure`` returns it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["PICTURES", "REPORT", "picture_file", "remove_pictures"]

PICTURES = (
    "curves",
    "client-curves",
    "tsne",
    "landscape",
    "samples",
    "coefficients",
    "classes",
    "sweep",
    "clients",
    "communication",
    "optimum",
)
"""The pictures of a result; each is the name of its module."""
REPORT = "report.html"
"""Name of the file of ``flwr-kd report`` in a result's folder."""


def picture_file(directory: Path, picture: str) -> Path:
    """Return where a picture of a result is, in the result's folder.

    >>> picture_file(Path("runs/a"), "curves").as_posix()
    'runs/a/curves.png'
    """
    return directory / f"{picture}.png"


def remove_pictures(directory: Path) -> None:
    """Remove all pictures and the report in a result's folder, which show the numbers of an earlier result."""
    for picture in PICTURES:
        picture_file(directory, picture).unlink(missing_ok=True)
    (directory / REPORT).unlink(missing_ok=True)
