"""The scripts of scripts/examples against a real server process, with the tiny backbone."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "scripts" / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from serve_process import ServerProcess

    server = ServerProcess(tmp_path_factory.mktemp("examples")).start()
    yield server
    assert server.stop() == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text(), server.log.read_text()


@pytest.fixture(scope="module")
def token(server):
    from nexus_lightning.client import NexusClient

    with NexusClient(server.url, server.operator_token) as operator:
        return operator.create_token("alice")["token"]


@pytest.fixture
def script(server, token, monkeypatch, capsys):
    """``script(name, *arguments)`` -> what it prints; run here, because imports of torch take longer than it does."""
    monkeypatch.setenv("NEXUS_URL", server.url)
    monkeypatch.setenv("NEXUS_TOKEN", token)
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            assert not end.code, capsys.readouterr().out
        return capsys.readouterr().out

    yield run
    sys.modules.pop("sft_client", None)


@pytest.fixture(scope="module")
def trained(server, token, tmp_path_factory):
    """What the sft example prints and where its payload is: a process of its own, which imports no torch."""
    folder = tmp_path_factory.mktemp("exported")
    out = subprocess.run(
        [sys.executable, "scripts/examples/sft_client.py", "--jobs", "2", "--episodes", "2", "--out", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NEXUS_URL": server.url, "NEXUS_TOKEN": token, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stdout + out.stderr + server.log.read_text()
    return out.stdout, folder


def test_sft(trained):
    from nexus_lightning.checkpoint import read_payload

    out, folder = trained
    assert "trained 2 jobs, policy version 2" in out and "of 2" in out
    (payload,) = folder.iterdir()
    assert read_payload(payload).manifest["policy_version"] == 2, "the policy is usable here"


def test_rl_in_simulators_of_the_clients(script):
    from nexus_lightning.services.environment_server import EnvironmentServer, Sessions

    sessions = Sessions({"toy": "envs.toy:ToySimulator"}, threads=True)
    with EnvironmentServer(sessions, None) as environments:
        thread = threading.Thread(target=environments.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        url = "http://{}:{}".format(*environments.server_address[:2])
        out = script("external_env_client", "--environment", url, "--iterations", "2", "--num-envs", "3")
        assert len(sessions) == 0, "the client closes what it opened"
        environments.shutdown()
        thread.join()
    versions = [int(found) for found in re.findall(r"policy version (\d+)", out)]
    assert len(versions) == 2 and versions == sorted(versions) and versions[0] >= 4


def test_a_custom_algorithm_is_the_built_in_one_bit_for_bit(script, server, trained):
    (folder,) = [path.parent.parent for path in server.folder.glob("data/**/meta/info.json")]
    out = script("custom_sft_client", str(folder))
    assert re.search(r"\d+ tensors, 0 differ from the built-in algorithm's: \[\]", out), out
    assert len(re.findall(r"loss \d+\.\d+", out)) == 6
