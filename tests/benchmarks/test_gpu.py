"""benchmarks/gpu.py in its quick mode, on a machine without a GPU."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def arguments(gpu: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Namespace:
    given = Namespace(data_dir=None, device="cpu", quick=True, workers=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "DEBIAN_FASHION_MNIST", Path("/nowhere"))
        patch.setattr(gpu, "SAMPLES", {"cnn": 90})
        patch.setattr(gpu, "TEST", 20)
        folder, what = gpu.data_folder(given, tmp_path_factory.mktemp("data"))
    assert what == "random images of fashion-mnist's shape, which is not on this machine"
    with gzip.open(folder / "t10k-images-idx3-ubyte.gz") as file:
        assert len(file.read()) == 16 + 20 * 28 * 28
    return Namespace(**{**vars(given), "data_dir": folder})


@pytest.mark.parametrize("part", ["bare-cnn", "inline-cnn"])
def test_rates_of_rounds(part: str, gpu: ModuleType, arguments: Namespace) -> None:
    result = gpu.measure(part, arguments)
    # Of 64 samples two clients train on 75 % each, for two epochs.
    assert result["samples_per_second"] == pytest.approx(2 * 48 / result["seconds_per_round"][0], rel=0.1)
    assert len(result["seconds_per_round"]) == 1


def test_stacked_clients_make_the_steps_of_a_loop(gpu: ModuleType) -> None:
    result = gpu.stacked(3, torch.device("cpu"), quick=True)
    assert result["largest_difference_of_weights"] < 1e-5
    assert result["speedup"] > 0
    assert (result["clients"], result["batch_size"]) == (3, 2)


@pytest.mark.slow
def test_a_part_without_time_is_ended_and_says_so(
    gpu: ModuleType, arguments: Namespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "slow.py"
    script.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(gpu, "__file__", str(script))
    begun = time.monotonic()
    assert gpu.run_part("bare-cnn", arguments, tmp_path, 0.5) == {"error": "not done after 0 s"}
    assert time.monotonic() - begun < 300
    script.write_text("raise SystemExit('no such GPU')\n")
    assert gpu.run_part("bare-cnn", arguments, tmp_path, 60.0) == {"error": "no such GPU"}


@pytest.mark.slow
@pytest.mark.program
def test_the_command_writes_json_that_names_device_and_data(tmp_path: Path) -> None:
    command = [str(ROOT / "benchmarks" / "gpu.sh"), "--quick", "--device", "cpu"]
    options = ["--parts", "stacked-10,bare-cnn", "--json", str(tmp_path / "gpu.json")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "gpu.json").read_text())
    assert (result["device"], result["gpu"], result["quick"]) == ("cpu", None, True)
    assert "fashion-mnist" in result["data"]
    assert list(result["parts"]) == ["stacked-10", "bare-cnn"]
    assert result["parts"]["stacked-10"]["clients"] == 10
    assert result["parts"]["bare-cnn"]["samples_per_second"] > 0
    wrong = subprocess.run([*command, "--parts", "bare"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "unknown part 'bare'" in wrong.stderr


@pytest.mark.slow
@pytest.mark.ray
def test_ray_is_measured(arguments: Namespace, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--quick", "--device", "cpu"]
    options = ["--data-dir", str(arguments.data_dir), "--parts", "ray-cnn", "--part-seconds", "400"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["parts"]["ray-cnn"]["workers"] == 2
