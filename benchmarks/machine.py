"""What benchmarks say of the machine that they ran on; not one itself."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
