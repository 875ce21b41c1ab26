"""Checkpoints on a full or broken disk, and a server that is killed while it writes one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context
from flwr.clientapp import ClientApp

from flwr_kd.checks import ConfigError
from flwr_kd.server.checkpoint import CHECKPOINT, Checkpoint
from flwr_kd.transport.inline_grid import InlineGrid
from tests.server.federations import in_a_process

SERVERS = """
    import os, signal, sys
    from pathlib import Path
    from flwr_kd.testing import Federation
    from flwr_kd import InlineGrid

    folder, when = Path(sys.argv[1]), ""
    writes = 0
    real = os.fsync

    def fsync(handle):
        global writes
        if when == "writing" and "checkpoint" in os.readlink(f"/proc/self/fd/{handle}") and "probe" not in \\
                os.readlink(f"/proc/self/fd/{handle}"):
            writes += 1
            if writes == 2:
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        real(handle)

    def between(stats):
        if when == "between" and stats.server_round == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync
    for when in sys.argv[2:]:
        child = os.fork()
        if not child:
            fed = Federation("fedhkd")
            fed.strategy(checkpoint_dir=folder / when, on_round=between).start(
                InlineGrid(fed.app(), 4), fed.initial(), num_rounds=3
            )
            os._exit(0)
        print(when, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


KILLED = {"writing": 1, "between": 2}


@pytest.fixture(scope="module")
def killed_servers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the checkpoints of two servers, which were killed in different moments."""
    folder = tmp_path_factory.mktemp("killed")
    done = in_a_process(SERVERS, folder, *KILLED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{when} {-signal.SIGKILL}" for when in KILLED], done.stderr
    return folder


@pytest.mark.program
@pytest.mark.xdist_group("killed servers")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the checkpoint's file by /proc")
@pytest.mark.parametrize(("when", "last"), KILLED.items())
def test_a_killed_process_leaves_a_whole_checkpoint(
    when: str, last: int, federation: Any, numbers: Any, killed_servers: Path
) -> None:
    """SIGKILL with half of round 2's checkpoint written, or after it: the last whole one is read."""
    folder = killed_servers / when
    assert len(list(folder.iterdir())) == (2 if when == "writing" else 1)
    found = Checkpoint.load(folder, "FedHKD")
    assert found is not None
    assert found.server_round == last
    fed = federation("fedhkd")
    _, expected = fed.run(rounds=3)
    _, result = fed.run(rounds=3, checkpoint_dir=folder, resume=True)
    assert numbers(result) == numbers(expected)[last:]
    # What the broken-off write left is gone.
    assert [path.name for path in folder.iterdir()] == [CHECKPOINT]


@pytest.mark.parametrize("place", ["file", "proc"])
def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_round_1(
    place: str, federation: Any, tmp_path: Path
) -> None:
    fed = federation("fedavg")
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "checkpoints" if place == "file" else Path("/proc/checkpoints")
    asked: list[int] = []

    def client_fn(context: Context) -> Any:
        asked.append(1)
        raise AssertionError

    with pytest.raises(
        ConfigError, match=r"checkpoint_dir must be a folder that can be written to: .*checkpoints"
    ):
        fed.strategy(checkpoint_dir=folder).start(
            InlineGrid(ClientApp(client_fn=client_fn), 4), fed.initial(), num_rounds=1
        )
    assert not asked


FULL_DISK = """
    import resource, signal, sys
    from pathlib import Path
    from flwr_kd.testing import Federation
    from flwr_kd import InlineGrid

    fed = Federation("fedavg")

    def fill(stats):
        # From now on no file may grow beyond 100 bytes, as on a disk that is full.
        if stats.server_round == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        if stats.server_round == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    for rounds in sys.argv[2:]:
        result = fed.strategy(checkpoint_dir=Path(sys.argv[1], rounds), on_round=fill).start(
            InlineGrid(fed.app(), 4), fed.initial(), num_rounds=int(rounds)
        )
        print([r.participants for r in result.rounds])
        print("== the end of a run", file=sys.stderr, flush=True)
"""


@pytest.mark.slow
@pytest.mark.program
def test_a_disk_that_is_full_costs_a_warning(tmp_path: Path) -> None:
    """Two runs: one ends with the disk still full, the other after there is space again."""
    done = in_a_process(FULL_DISK, tmp_path, 3, 4)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([4] * rounds) for rounds in (3, 4)]
    *logs, _ = done.stderr.split("== the end of a run")
    for rounds, last, log in zip((3, 4), (1, 4), logs, strict=True):
        for number in (2, 3):
            assert log.count(f"round {number}: no checkpoint could be written ([Errno 27]") == 1
        folder = tmp_path / str(rounds)
        assert [path.name for path in folder.iterdir()] == [CHECKPOINT]
        found = Checkpoint.load(folder, "FedAvg")
        assert found is not None
        assert found.server_round == last


@pytest.mark.parametrize("damage", ["empty", "half", "text"])
def test_a_checkpoint_that_cannot_be_read_is_refused(damage: str, federation: Any, tmp_path: Path) -> None:
    fed = federation("fedavg")
    fed.run(rounds=1, checkpoint_dir=tmp_path)
    file = tmp_path / CHECKPOINT
    data = file.read_bytes()
    file.write_bytes({"empty": b"", "half": data[: len(data) // 2], "text": b"no checkpoint " * 9}[damage])
    with pytest.raises(ConfigError, match=rf"{CHECKPOINT} cannot be read"):
        fed.run(rounds=2, checkpoint_dir=tmp_path, resume=True)
