"""The C library's settings: made once, and not where the user has made others."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from flwr_kd.learning import allocator


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in (*allocator.SETTINGS, "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    allocator.keep_freed_memory.cache_clear()
    yield monkeypatch
    allocator.keep_freed_memory.cache_clear()


@pytest.mark.usefixtures("plain")
def test_glibc_takes_the_settings() -> None:
    glibc = sys.platform == "linux" and "glibc" in os.confstr("CS_GNU_LIBC_VERSION")  # type: ignore[operator]
    assert allocator.keep_freed_memory() == glibc


@pytest.mark.parametrize("name", [*allocator.SETTINGS, "GLIBC_TUNABLES"])
def test_the_users_own_settings_stay(plain: pytest.MonkeyPatch, name: str) -> None:
    plain.setenv(name, "1")
    assert not allocator.keep_freed_memory()


def test_another_system(plain: pytest.MonkeyPatch) -> None:
    plain.setattr(sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()


def test_another_c_library(plain: pytest.MonkeyPatch) -> None:
    plain.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()
