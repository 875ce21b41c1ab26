"""Smoke test of the installed wheel, run outside the checkout."""

import json
import subprocess
import tempfile
from pathlib import Path

import flwr_kd
from flwr_kd import registry

assert "site-packages" in str(flwr_kd.__file__), flwr_kd.__file__
names = list(registry.methods())
printed = subprocess.run(["flwr-kd", "methods", "--json"], check=True, capture_output=True, text=True).stdout
assert [row["name"] for row in json.loads(printed)] == names, printed
with tempfile.TemporaryDirectory() as folder:
    command = ["flwr-kd", "compare", *names, "--backend", "inline", "--clients", "3", "--rounds", "2"]
    command += ["--seeds", "0", "--limit", "200", "--set", "local-epochs=1", "--out", f"{folder}/out"]
    subprocess.run(command, check=True)
    result = json.loads(Path(folder, "out", "result.json").read_text())
    assert [run["method"] for run in result["runs"]] == names
    assert Path(folder, "out", "curves.png").stat().st_size > 0
refused = subprocess.run(["flwr-kd", "simulate", "fedhdk"], capture_output=True, text=True)
assert refused.returncode == 2, refused.returncode
assert len(refused.stderr.splitlines()) == 1, refused.stderr
print(f"smoke test: {', '.join(names)} run from the wheel")
