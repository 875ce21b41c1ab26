"""The commands of ``docs/deploy.md`` run, and its tables name what exists.

A comment before a block says in which scenarios it runs, and where: ``<!-- run: tls auth on server, stays -->``.
Each machine has a home of its own, ``nodes`` are two machines, and ``everywhere`` is for variables. Without a place
everything runs on one machine. A block that stays runs in the background. The comment
``<!-- copy: tls ca.crt from server to user -->`` stands for a file that the reader copies.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_kd import registry
from flwr_kd.results import files
from tests.apps.applications import APPLICATIONS
from tests.processes import PROGRAMS, ROOT, Process, free_port, guarded, start_environment

TEXT = (ROOT / "docs" / "deploy.md").read_text("utf-8")
ALONE = ("insecure", "tls")
"""Scenarios of one test each. The fixture ``site`` runs ``auth``, which has TLS as well."""
MACHINES = {"": ["here"], "server": ["server"], "nodes": ["node-0", "node-1"], "user": ["user"]}
BLOCK = re.compile(
    r"<!-- run: (?P<scenarios>[a-z ]+?)(?: (?P<everywhere>everywhere)| on (?P<place>server|nodes|user))?"
    r"(?P<stays>, stays)? -->\n```bash\n(?P<code>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)
COPY = re.compile(
    r"<!-- copy: (?P<scenarios>[a-z ]+?) (?P<files>\S+\.\w+) from (?P<source>\w+) to (?P<places>[a-z ]+) -->"
)
NEEDED = ("bash", "curl", "openssl", "ssh-keygen")
needs_programs = pytest.mark.skipif(
    not (all(map(shutil.which, NEEDED)) and Path("/proc/self/stat").exists()),
    reason=f"the page's commands need {', '.join(NEEDED)}, and /proc to end the processes that they leave",
)
REFUSED = {
    "other CA": "CERTIFICATE_VERIFY_FAILED",
    "no key": "[code: 2001] SuperNode authentication is enabled",
    "unregistered key": "[code: 2004] Failed to activate SuperNode",
    "key in use": "[code: 2004] Failed to activate SuperNode",
}


class Scenario:
    """One of the page's scenarios, as a script whose machines are folders."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.port, self.out = free_port(), folder / "out"

    def values(self, machine: str) -> dict[str, str]:
        """Return the values that replace those of the page's variables."""
        home = self.folder / machine
        return {
            "SERVER": "localhost",
            "HOST": "127.0.0.1",
            "PORT": str(self.port),
            "KEYS": str(home / "keys"),
            "STATE": str(home / "state"),
            "DATA": str(home / "data"),
            "OUT": str(self.out),
            "NODE": machine[-1],
            "NODE_PORT": str(free_port(following=1)),
        }

    def script(self) -> str:
        """Return all commands of the page as one script. It ends after the last command that does not stay."""
        settings: dict[str, list[str]] = {machine: [] for group in MACHINES.values() for machine in group}
        lines = ["set -euo pipefail", "unset FLWR_HOME", "background=()"]
        lines += [f"mkdir -p {shlex.quote(str(self.folder / machine))}" for machine in settings]
        steps = [*BLOCK.finditer(TEXT), *COPY.finditer(TEXT)]
        for step in sorted(steps, key=lambda match: match.start()):
            if self.name not in step["scenarios"].split():
                continue
            if step.re is COPY:
                targets = [machine for place in step["places"].split() for machine in MACHINES[place]]
                for source in MACHINES[step["source"]]:
                    for target in targets:
                        keys = self.folder / target / "keys"
                        lines.append(
                            f"mkdir -p {keys}; cp {self.folder}/{source}/keys/{step['files']} {keys}/"
                        )
            elif step["everywhere"]:
                for machine, given in settings.items():
                    given.append(self.settings(step["code"], machine))
            else:
                for machine in MACHINES[step["place"] or ""]:
                    home = f"export HOME={shlex.quote(str(self.folder / machine))}"
                    block = "\n".join(["(", home, *settings[machine], step["code"] + ")"])
                    if step["stays"]:
                        log = self.folder / f"{len(lines):02}-{machine}.log"
                        block += f" > {shlex.quote(str(log))} 2>&1 &\nbackground+=($!)"
                    lines.append(block)
        return "\n".join(
            [*lines, "# Blocks that stay still run at the end.", 'kill -0 "${background[@]}"', ""]
        )

    def settings(self, code: str, machine: str) -> str:
        values = self.values(machine)

        def replaced(line: re.Match[str]) -> str:
            return f"{line[1]}={shlex.quote(values[line[1]])}"

        return re.sub(r"^(\w+)=\S+", replaced, code, flags=re.MULTILINE)

    def run(self) -> str:
        """Run the script to its end, without ending the blocks that stay; return its output."""
        file = self.folder / "script.sh"
        file.write_text(self.script())
        environment = {**start_environment(self.folder), "OMP_NUM_THREADS": "1"}
        process = Process(["bash", file], self.folder / "script.log", environment, cwd=ROOT)
        status: int | str = "it did not end"
        with suppress(TimeoutError):
            status = process.wait_alone()
        logs = sorted(self.folder.glob("*.log"))
        assert status == 0, "\n".join(
            [f"{status}", *(f"== {log.name}\n{log.read_text()[-3000:]}" for log in logs)]
        )
        return process.log

    def program(self, machine: str, name: str, *command: str) -> Process:
        """Start a program on one of the machines."""
        environment = {**start_environment(self.folder), "HOME": str(self.folder / machine)}
        del environment["FLWR_HOME"]
        return Process([PROGRAMS / command[0], *command[1:]], self.folder / f"{name}.log", environment)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenario]:
    """Yield the scenario with authenticated SuperNodes after its run, while its processes still run."""
    scenario = Scenario("auth", tmp_path_factory.mktemp("auth"))
    draw = np.random.default_rng(0)
    for node in MACHINES["nodes"]:
        for label, dark in (("healthy", 0), ("ill", 100)):
            folder = scenario.folder / node / "data" / label
            folder.mkdir(parents=True)
            for index in range(10):
                pixels = (dark + draw.integers(0, 100, (28, 28))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    with guarded(scenario.folder):
        scenario.run()
        yield scenario


def check(folder: Path, rounds: list[int]) -> None:
    """Check that all clients took part in each of these rounds of a result."""
    (run,) = files.load(folder).runs
    assert [(stats.participants, stats.failures) for stats in run.rounds] == [(2, 0)] * len(rounds)
    assert [stats.round for stats in run.rounds] == rounds


@needs_programs
@pytest.mark.flwr_run
@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_pages_commands_work(name: str, tmp_path: Path) -> None:
    scenario = Scenario(name, tmp_path)
    with guarded(tmp_path):
        printed = scenario.run()
    if name == "tls":
        check(scenario.out, [1])
        return
    check(tmp_path / "here" / "state" / "first", [1])
    check(tmp_path / "here" / "state" / "second", [2])
    assert '"status": "finished:completed"' in printed


@needs_programs
@pytest.mark.flwr_run
@pytest.mark.xdist_group("authenticated SuperNodes")
def test_the_pages_commands_work_with_authenticated_supernodes(site: Scenario) -> None:
    check(site.out, [1])
    kept = {path.name for path in (site.folder / "node-0" / "keys").iterdir()}
    assert kept == {"ca.crt", "node-0", "node-0.pub"}


@needs_programs
@pytest.mark.flwr_run
@pytest.mark.xdist_group("authenticated SuperNodes")
@pytest.mark.parametrize(("why", "expected"), REFUSED.items(), ids=REFUSED)
def test_a_supernode_is_refused(why: str, expected: str, site: Scenario, tmp_path: Path) -> None:
    keys, ca = site.folder / "node-0" / "keys", site.folder / "node-0" / "keys" / "ca.crt"
    key: Path | None = keys / "node-0"
    if why == "other CA":
        ca = tmp_path / "ca.crt"
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=flwr-kd CA"]
        made += ["-keyout", str(tmp_path / "ca.key"), "-out", str(ca)]
        subprocess.run(made, check=True, capture_output=True)
    elif why == "no key":
        key = None
    elif why == "unregistered key":
        key = tmp_path / "key"
        made = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)]
        subprocess.run(made, check=True)
    node = site.program(
        "node-0",
        why.replace(" ", "-"),
        "flower-supernode",
        f"--root-certificates={ca}",
        f"--superlink=localhost:{site.port}",
        f"--port={free_port()}",
        *([f"--auth-supernode-private-key={key}"] if key else []),
    )
    assert node.wait() == 1
    assert expected in node.log
    assert "Exit Code: 305" in node.log
    assert "SuperNode ID" not in node.log


def test_every_block_is_run() -> None:
    assert TEXT.count("\n```bash\n") == len(BLOCK.findall(TEXT)) > 10
    assert set(re.findall(r"^```(\w*)$", TEXT, flags=re.MULTILINE)) == {"", "bash"}
    assert TEXT.count("\n```") == 2 * TEXT.count("\n```bash\n")
    written = re.sub(
        r"<!-- (?:methods|results): .+? -->.*?<!-- end -->", "", TEXT, flags=re.DOTALL
    )  # by `make pages`
    assert written.count("<!--") == len(BLOCK.findall(TEXT)) + len(COPY.findall(TEXT))
    named = {
        name for step in (*BLOCK.finditer(TEXT), *COPY.finditer(TEXT)) for name in step["scenarios"].split()
    }
    assert named == {*ALONE, "auth"}


def section(title: str) -> str:
    return re.split(r"^#", TEXT.partition(f"# {title}\n")[2], flags=re.MULTILINE)[0]


def test_the_page_says_of_every_method_what_leaves_a_client() -> None:
    table = [line.split("|")[1] for line in section("What leaves a client").splitlines() if line[:2] == "| "]
    named = re.findall(r"`([^`]+)`", "".join(table))
    assert sorted(named) == sorted(registry.methods())


def test_the_pages_settings_are_those_of_every_app() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \| ", section("Settings"), flags=re.MULTILINE)
    listed: dict[str, object] = {}
    for names, defaults in rows:
        values = defaults.replace("`", "").split(", ")
        listed |= dict(zip(re.findall(r"`([^`]+)`", names), values, strict=False))
    listed = {
        name: tomllib.loads(f"x={value}")["x"]
        for name, value in listed.items()
        if all(name in app.settings for app in APPLICATIONS)
    }
    assert len(listed) >= 9
    for app in APPLICATIONS:
        assert {name: app.settings[name] for name in listed} == listed
