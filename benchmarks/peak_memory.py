"""How much memory this process has had since it began to count, from Linux' /proc."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def begin() -> int:
    """Forget the peak so far, for example that of the imports; return the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def peak() -> int:
    """Return the most bytes that were resident since :func:`begin`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def of_program(words: Sequence[str], **environment: str) -> dict[str, Any]:
    """Run a Python program in a process of its own, and return the JSON of its last line."""
    # Large blocks go back to the system when they are freed: the peak is then what was held.
    given = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20), **environment}
    done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True, env=given)
    return dict(json.loads(done.stdout.splitlines()[-1]))
