"""What a result was made with: versions, commit, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

__all__ = ["commit_of", "versions"]

_PACKAGES = ("flwr-kd", "flwr", "torch", "torchvision", "ray", "numpy")
_CHECKOUT = Path(__file__).resolve().parents[2]
# What a benchmark writes is no code: after its first file the rest would be of another commit.
_CODE = ("flwr_kd", "strategies", "benchmarks", ":(exclude)benchmarks/results")


def versions() -> dict[str, str]:
    """Return what the numbers depend on: versions of packages and Python, the commit, the machine.

    Returns
    -------
    dict of str to str
        ``flwr-kd``, ``flwr``, ``torch``, ``torchvision``, ``ray``, ``numpy`` (those that are installed),
        ``python``, ``machine`` (system and processor type, such as "Linux x86_64"), ``processor`` (its name,
        if the system reports one), ``cores``; and ``commit`` in a checkout of flwr-kd, see :func:`commit_of`.

    Examples
    --------
    >>> "flwr" in versions() and "machine" in versions()
    True
    """
    made_with: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            made_with[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    made_with["python"] = platform.python_version()
    made_with["machine"] = f"{platform.system()} {platform.machine()}".strip()
    made_with["processor"] = _processor()
    made_with["cores"] = str(os.cpu_count())
    if commit := commit_of(_CHECKOUT):
        made_with["commit"] = commit
    return made_with


def _processor() -> str:
    """Return the processor's name if the system reports one, else its type."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit_of(checkout: Path) -> str | None:
    """Return the commit of a checkout of flwr-kd, with ``+changes`` if its code was changed since.

    None if the folder is no checkout, for example because flwr-kd was installed from a wheel, or if git fails.
    """
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
