"""What a result was made with: versions, commit, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["versions"]

_PACKAGES = ("flwr-kd", "flwr", "torch", "torchvision", "ray", "numpy")
_CODE = ("flwr_kd", "strategies", "benchmarks")


def versions() -> dict[str, str]:
    """Return what the numbers depend on: versions of packages and Python, the commit, the machine.

    Returns
    -------
    dict of str to str
        ``flwr-kd``, ``flwr``, ``torch``, ``torchvision``, ``ray``, ``numpy`` (those that are installed),
        ``python``, ``machine`` (system and processor type, such as "Linux x86_64"), ``processor`` (its name,
        where the system tells it), ``cores``; and ``commit``, of a checkout of flwr-kd, with ``+changes`` where
        its code was changed since.

    Examples
    --------
    >>> "flwr" in versions() and "machine" in versions()
    True
    """
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["python"] = platform.python_version()
    found["machine"] = f"{platform.system()} {platform.machine()}".strip()
    found["processor"] = _processor()
    found["cores"] = str(os.cpu_count())
    if commit := _commit(Path(__file__).resolve().parents[1]):
        found["commit"] = commit
    return found


def _processor() -> str:
    """Return the processor's name, where the system tells it; else its type."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit(checkout: Path) -> str | None:
    """Return the commit of a checkout; None where it is none, as where flwr-kd was installed from a wheel."""
    if not (checkout / ".git").exists():
        return None

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(checkout), *words], capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *_CODE)
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
