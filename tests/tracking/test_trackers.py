"""The trackers, each written to for real and read back: TensorBoard's files, MLflow's database, W&B offline."""

from __future__ import annotations

import dataclasses
import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flwr_kd import ConfigError, RoundStats, RunInfo
from flwr_kd.server.records import KDResult
from flwr_kd.tracking import (
    LogChoice,
    MLflowLog,
    RunLog,
    TensorBoardLog,
    WandbLog,
    chosen_logs,
    numbers_of,
    open_logs,
    settings_of,
)
from flwr_kd.wording import Interface, speaking
from tests.processes import wait_for

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("trackers")]

INFO = RunInfo(
    name="fedhkd",
    seed=3,
    key="0123456789abcdef",
    first_round=1,
    num_rounds=3,
    clients=4,
    hyperparameters={"gamma": 0.5, "noise": "none", "batch-size": 8, "reproducible-noise": True},
    settings={"dataset": "digits", "limit": None, "attackers": 0, "classes": ("a", "b")},
)
ROUNDS = [
    RoundStats(1, local_accuracy=0.5, bytes_up=10, bytes_down=20, seconds=0.5, participants=4),
    RoundStats(
        2, local_accuracy=0.625, train_loss=1.5, bytes_up=11, seconds=0.25, participants=3, failures=1
    ),
    RoundStats(3, local_accuracy=0.75, common_accuracy=0.25, train_loss=float("nan"), bytes_up=12, void=True),
]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the trackers' packages off the network and out of the user's files."""
    monkeypatch.chdir(tmp_path)
    settings = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONFIG_DIR": str(tmp_path / "wandb-config"),
        "WANDB_CACHE_DIR": str(tmp_path / "wandb-cache"),
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)


def follow(log: RunLog, info: RunInfo, rounds: list[RoundStats], error: BaseException | None = None) -> None:
    log.on_start(info)
    for stats in rounds:
        log.on_round(stats)
    log.on_end(KDResult(), error)


def test_numbers_are_those_that_were_measured() -> None:
    assert numbers_of(ROUNDS[1]) == {
        "local_accuracy": 0.625, "train_loss": 1.5, "bytes_up": 11.0, "bytes_down": 0.0, "seconds": 0.25,
        "bytes_knowledge": 0.0,
        "participants": 3.0, "available": 0.0, "failures": 1.0, "void": 0.0,
    }  # fmt: skip
    third = numbers_of(ROUNDS[2])
    assert (third["common_accuracy"], third["void"], "train_loss" in third) == (0.25, 1.0, False)


def test_settings_have_what_the_runs_share_and_the_hyper_parameters() -> None:
    assert settings_of(INFO) == {
        "dataset": "digits", "attackers": 0, "classes": "('a', 'b')", "gamma": 0.5, "noise": "none",
        "batch-size": 8, "reproducible-noise": True, "method": "fedhkd", "seed": 3, "rounds": 3, "clients": 4,
    }  # fmt: skip
    # FedMD's is that of what is sent, and the other that of training.
    both = dataclasses.replace(
        INFO, hyperparameters={"precision": "float16"}, settings={"precision": "float32"}
    )
    settings = settings_of(both)
    assert (settings["precision"], settings["shared.precision"]) == ("float16", "float32")


def tensorboard_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def points(events: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_files_read_back(tmp_path: Path) -> None:
    follow(TensorBoardLog(tmp_path / "tb"), INFO, ROUNDS)
    events = tensorboard_of(tmp_path / "tb" / "fedhkd-seed3")
    for name in {name for stats in ROUNDS for name in numbers_of(stats)}:
        expected = [(s.server_round, numbers_of(s)[name]) for s in ROUNDS if name in numbers_of(s)]
        assert points(events, name) == expected, name
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert plugin.plugin_name == "hparams"
    assert b"gamma" in plugin.content
    assert "_hparams_/session_end_info" in events.summary_metadata
    (text,) = events.Tensors("settings/text_summary")
    assert b"noise: none" in text.tensor_proto.string_val[0]


def test_a_run_that_goes_on_or_begins_anew_hides_its_rounds_of_before(tmp_path: Path) -> None:
    log, folder = TensorBoardLog(tmp_path), tmp_path / "fedhkd-seed3"
    follow(log, INFO, ROUNDS[:2], KeyboardInterrupt())
    assert "_hparams_/session_end_info" not in tensorboard_of(folder).summary_metadata
    again = dataclasses.replace(ROUNDS[1], local_accuracy=0.875)
    follow(log, dataclasses.replace(INFO, first_round=2), [again, ROUNDS[2]])
    assert points(tensorboard_of(folder), "local_accuracy") == [(1, 0.5), (2, 0.875), (3, 0.75)]
    follow(log, dataclasses.replace(INFO, key="f" * 16), ROUNDS[:1])
    assert points(tensorboard_of(folder), "local_accuracy") == [(1, 0.5)]


def test_mlflow_database_read_back(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    log = MLflowLog(uri)
    assert log.place == f"mlflow ui --backend-store-uri {uri}"
    follow(log, INFO, ROUNDS[:2], KeyboardInterrupt())
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("flwr-kd")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("fedhkd, seed 3", "KILLED")
    assert run.data.params == {name: str(value) for name, value in settings_of(INFO).items()}
    # Resumed, it is the same run in MLflow; another one is another.
    follow(MLflowLog(uri), dataclasses.replace(INFO, first_round=3), ROUNDS[2:])
    follow(MLflowLog(uri), dataclasses.replace(INFO, key="f" * 16), ROUNDS[:1], ValueError("broken"))
    other, run = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert (run.info.status, other.info.status) == ("FINISHED", "FAILED")
    for name in {name for stats in ROUNDS for name in numbers_of(stats)}:
        history = sorted((each.step, each.value) for each in client.get_metric_history(run.info.run_id, name))
        assert history == [(s.server_round, numbers_of(s)[name]) for s in ROUNDS if name in numbers_of(s)], (
            name
        )


def test_a_uri_that_cannot_be_used_is_an_error_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r'log="mlflow:nonsense://x" cannot be used: .*nonsense'):
        MLflowLog("nonsense://x")


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file: after a header of 7 bytes that of LevelDB's log, in blocks of 32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if 0 < -at % 32768 < 7:
            at += -at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def test_wandb_offline_read_back(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    log = WandbLog("proj", group="mine", folder=tmp_path / "w")
    assert log.place == "project proj, offline: wandb sync sends the runs"
    follow(log, INFO, ROUNDS)
    (file,) = (tmp_path / "w" / "wandb").glob("offline-run-*/run-0123456789abcdef.wandb")

    def whole() -> list[Any]:
        found = [wandb_internal_pb2.Record.FromString(data) for data in wandb_records(file.read_bytes())]
        return found if any(record.WhichOneof("record_type") == "exit" for record in found) else []

    # W&B's own process writes it, and may still do so after the run has ended.
    records = wait_for(whole, "W&B's file is written to its end")
    (run,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.display_name, run.run_id) == (
        "proj", "mine", "fedhkd, seed 3", INFO.key
    )  # fmt: skip
    config = {update.key: update.value_json for update in run.config.update}
    assert (config["gamma"], config["dataset"]) == ("0.5", '"digits"')
    history = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or item.nested_key[0]: float(item.value_json) for item in items})
    assert [row["_step"] for row in history] == [1, 2, 3]
    for row, stats in zip(history, ROUNDS, strict=True):
        assert numbers_of(stats).items() <= row.items()


def test_wandb_without_a_key_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setattr(wandb, "setup", lambda: type("S", (), {"settings": wandb.Settings(mode="online")}))
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(wandb, "login", lambda **given: asked.append(given))
    with (
        speaking(Interface.COMMAND),
        pytest.raises(ConfigError, match=r"--log wandb has no API key: run `wandb login`, or set WANDB_MODE"),
    ):
        WandbLog()
    # It neither waits at a prompt nor for a network.
    assert asked == [{"prompt": False, "verify": False}]


@pytest.mark.parametrize("kind", [TensorBoardLog, MLflowLog, WandbLog])
def test_a_package_that_is_not_there_is_an_error_with_the_command(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == kind.package else real(name, *a)
    )
    with pytest.raises(ConfigError, match=rf'{kind.package}, which is not installed: pip install "flwr-kd\['):
        chosen_logs([kind.package])
    with pytest.raises(ConfigError, match="not installed"):
        kind("somewhere")


def test_a_folder_of_the_name_is_no_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wandb_of_nobody").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(WandbLog, "package", "wandb_of_nobody")
    with pytest.raises(ConfigError, match="not installed"):
        chosen_logs(["wandb"])


def test_several_are_separated_by_commas_which_paths_may_have() -> None:
    assert chosen_logs(["tensorboard:/a,b/c, mlflow:sqlite:////x.db,wandb", "wandb"]) == [
        LogChoice("tensorboard", "/a,b/c"),
        LogChoice("mlflow", "sqlite:////x.db"),
        LogChoice("wandb", ""),
    ]


def test_the_places_if_none_or_one_is_named(tmp_path: Path) -> None:
    result = tmp_path / "runs" / "mine"
    own, named = open_logs(chosen_logs(["tensorboard", "tensorboard:tb"]), result)
    assert isinstance(own, TensorBoardLog)
    assert isinstance(named, TensorBoardLog)
    assert (own.folder, named.folder) == (result / "tensorboard", tmp_path / "tb" / "mine")
    folders = {
        log.folder
        for directory in ("runs/a/x", "runs/b/x", "own/x", tmp_path.parent / "x")
        for log in open_logs(chosen_logs(["tensorboard:tb"]), Path(directory))
        if isinstance(log, TensorBoardLog)
    }
    outside = Path(*(tmp_path.parent / "x").parts[1:])
    assert folders == {tmp_path / "tb" / name for name in ("a/x", "b/x", "own/x", outside)}
    (on_server,) = open_logs(chosen_logs([f"tensorboard:{tmp_path}/tb"]), Path("/h/runs/7"), home=Path("/h"))
    assert isinstance(on_server, TensorBoardLog)
    assert on_server.folder == tmp_path / "tb" / "7"
    (mlflow,) = open_logs(chosen_logs(["mlflow"]), result, home=tmp_path / "home")
    assert mlflow.place.endswith(f"sqlite:///{tmp_path / 'home' / 'mlflow.db'}")
    assert (tmp_path / "home" / "mlflow.db").exists()
