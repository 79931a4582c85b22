"""The doctor's checks, and the parts of scripts/setup.sh that can be tried without installing anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nexus_lightning import doctor

ROOT = Path(__file__).resolve().parent.parent
DEBIAN_12 = {"ID": "debian", "VERSION_ID": "12", "VERSION_CODENAME": "bookworm"}


# ------------------------------------------------------------------------------------------------ doctor
@pytest.mark.parametrize("name", ["python", "disk", "memory", "cores", "weights"])
def test_cheap_checks_are_structured(name):
    check = doctor.CHECKS[name]()
    assert check.name == name and check.status in ("OK", "WARN", "FAIL") and check.detail
    assert bool(check.fix) == (check.status != "OK")


def test_every_check_has_a_fix():
    assert all(doctor.fix(name) for name in doctor.CHECKS)
    with pytest.raises(ValueError, match="choose one of python"):
        doctor.fix("coffee")


def test_missing_vulkan_driver_gives_the_install_line(monkeypatch, tmp_path):
    """CASES E4: an environment without any Vulkan driver."""
    monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "none.json"))
    monkeypatch.setenv("VK_ICD_FILENAMES", str(tmp_path / "none.json"))
    monkeypatch.setattr(doctor, "os_release", lambda: DEBIAN_12)
    check = doctor.check_vulkan()
    assert check.status == "FAIL"
    assert "scripts/setup.sh --system" in check.fix
    assert "-t bookworm-backports mesa-vulkan-drivers libvulkan1" in check.fix


def test_old_mesa_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "probe", lambda code: (False, "failed to find a rendering device"))
    monkeypatch.setattr(doctor, "mesa_version", lambda: "22.3.6")
    assert "22.3.6 (too old: 23.1 or newer is needed)" in doctor.check_vulkan().detail


def test_wrong_egl_device_gives_the_fix(monkeypatch):
    """CASES E4: a wrong EGL device id fails before any run, with what to type."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "99")
    check = doctor.check_gl()
    assert check.status == "FAIL" and "MUJOCO_GL=egl" in check.detail
    assert "unset MUJOCO_EGL_DEVICE_ID" in check.fix and "libosmesa6" in check.fix


def test_require_raises_with_the_fix(monkeypatch):
    monkeypatch.setitem(doctor.CHECKS, "gl", lambda: doctor.Check("gl", "FAIL", "no display", doctor.fix("gl")))
    with pytest.raises(RuntimeError, match=r"gl: no display\. Fix: .*libosmesa6"):
        doctor.require("gl")
    assert doctor.require("python").status == "OK"
    with pytest.raises(ValueError, match="no check named 'vulcan'"):
        doctor.require("vulcan")


def test_probe_survives_a_crash_a_hang_and_a_question():
    assert doctor.probe("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)") == (False, "crashed with signal 11")
    assert doctor.probe("import time; time.sleep(60)", timeout_s=1)[1] == "no answer after 1 s"
    worked, detail = doctor.probe("input('path? ')")
    assert not worked and "EOF" in detail


def test_packages_are_compared_with_the_lock(tmp_path):
    lock = tmp_path / "requirements.lock"
    lock.write_text("numpy==0.0.1\n")
    assert "numpy" in doctor.check_packages(lock).detail and doctor.check_packages(lock).status == "WARN"
    lock.write_text("no-such-package-here==1.0\n")
    assert doctor.check_packages(lock).status == "FAIL"
    assert doctor.check_packages(tmp_path / "absent").status == "WARN"


def test_libero_import_never_asks(monkeypatch, tmp_path):
    """CASES E6: no configuration file, no standard input, no question."""
    pytest.importorskip("libero")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    assert doctor.check_libero().status == "OK"


def test_report_json_and_exit_code(monkeypatch, tmp_path, capsys):
    path = tmp_path / "doctor.json"
    assert doctor.main(["python", "--json", str(path)]) == 0
    monkeypatch.setitem(doctor.CHECKS, "disk", lambda: doctor.Check("disk", "FAIL", "0 GB free", "free some"))
    assert doctor.main(["python", "disk", "--json", str(path)]) == 1
    assert [entry["status"] for entry in json.loads(path.read_text())] == ["OK", "FAIL"]
    assert "fix: free some" in capsys.readouterr().out


def test_script_runs_by_path():
    script = [sys.executable, str(ROOT / "scripts" / "doctor.py"), "cores", "python"]
    shown = subprocess.run(script, capture_output=True, text=True, cwd="/", check=True).stdout
    assert "OK    python" in shown and shown.endswith("everything that is needed works\n")


# ------------------------------------------------------------------------------------------------ setup.sh
def fake(folder: Path, name: str, text: str) -> None:
    """An executable shell script ``name`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def setup(*arguments: str, path: Path, home: Path, **env: str) -> subprocess.CompletedProcess:
    """Run scripts/setup.sh with ``path`` in front of the system's folders and nothing of this machine's pyenv."""
    clean = {"PATH": f"{path}:/usr/bin:/bin", "HOME": str(home), **env}
    command = ["bash", str(ROOT / "scripts" / "setup.sh"), *arguments]
    return subprocess.run(command, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["scripts/setup.sh", ".ci/run"])
def test_shell_syntax(name):
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
    assert os.access(ROOT / name, os.X_OK)


def test_finder_passes_over_a_failing_shim(tmp_path):
    """pyenv's shim ``python3.12`` exists and fails when 3.12 is installed but not active."""
    fake(tmp_path / "shims", "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    fake(tmp_path / "shims", "python3", "exit 1")
    fake(tmp_path / "pyenv/versions/3.12.7/bin", "python3.12", f'exec {sys.executable} "$@"')
    found = setup("--find-python", path=tmp_path / "shims", home=tmp_path, PYENV_ROOT=str(tmp_path / "pyenv"))
    assert found.returncode == 0, found.stderr
    # A machine with a real /usr/bin/python3.12 rightly finds that one first.
    assert found.stdout.strip() in (str(tmp_path / "pyenv/versions/3.12.7/bin/python3.12"), "/usr/bin/python3.12")


def test_finder_looks_under_home_and_asks_uv(tmp_path):
    fake(tmp_path / ".pyenv/versions/3.12.1/bin", "python3.12", f'exec {sys.executable} "$@"')
    assert "3.12" in setup("--find-python", path=tmp_path / "empty", home=tmp_path).stdout
    fake(tmp_path / "bin", "uv", f"echo {sys.executable}")
    assert setup("--find-python", path=tmp_path / "bin", home=tmp_path / "nowhere").stdout.strip()


def test_finder_takes_no_other_version(tmp_path):
    if Path("/usr/bin/python3.12").exists():
        pytest.skip("this machine's system Python is 3.12")
    fake(tmp_path / "bin", "python3.12", "exit 1")
    fake(tmp_path / "bin", "uv", "exit 2")
    missing = setup("--find-python", path=tmp_path / "bin", home=tmp_path)
    assert missing.returncode == 1 and "no Python 3.12" in missing.stderr


def machine(tmp_path: Path, *, installed: str, candidate: str, user: int = 1000) -> dict[str, str]:
    """Fake package tools: ``installed`` is a shell case pattern of package names, ``candidate`` is apt's Mesa."""
    tools = tmp_path / "tools"
    answer = 'case "$3" in *Version*) echo 25.0.7-2;; *) echo installed;; esac'
    fake(tools, "dpkg-query", f'case "$4" in {installed}) {answer};; *) exit 1;; esac')
    compare = 'exec awk -v a="$2" -v b="$4" \'BEGIN { exit !(a + 0 >= b + 0) }\''
    fake(tools, "dpkg", compare)
    fake(tools, "apt-get", f"echo apt-get $* >>{tmp_path}/apt.log")
    fake(tools, "apt-cache", f'[ $# = 1 ] || printf "%s:\\n  Installed: x\\n  Candidate: {candidate}\\n" "$2"')
    fake(tools, "id", f"echo {user}")
    (tmp_path / "os-release").write_text('ID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n')
    (tmp_path / "apt/sources.list.d").mkdir(parents=True)
    return {"NEXUS_APT_DIR": str(tmp_path / "apt"), "NEXUS_OS_RELEASE": str(tmp_path / "os-release")}


def test_system_complete_calls_no_apt(tmp_path):
    env = machine(tmp_path, installed="*", candidate="25.0.7-2", user=0)
    done = setup("--system", path=tmp_path / "tools", home=tmp_path, **env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "apt.log").exists()


def test_system_as_user_prints_the_lines(tmp_path):
    env = machine(tmp_path, installed="lib*", candidate="25.0.7-2")
    stopped = setup("--system", path=tmp_path / "tools", home=tmp_path, **env)
    assert stopped.returncode == 1
    assert "\nsudo apt-get install -y -q --no-install-recommends ffmpeg\n" in stopped.stderr
    assert "mesa-vulkan-drivers\n" in stopped.stderr and "backports" not in stopped.stderr
    assert not (tmp_path / "apt.log").exists()


DEB822 = """# a comment
Types: deb deb-src
URIs: mirror:/somewhere/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /keys/debian.gpg

Types: deb
URIs: mirror:/somewhere/security
Suites: bookworm-security
Components: main
"""
ONE_LINE = """deb-src mirror:/somewhere/debian bookworm main
deb [arch=amd64 signed-by=/keys/debian.gpg] mirror:/some/debian bookworm main contrib
deb mirror:/somewhere/security bookworm-security main
"""


@pytest.mark.parametrize(
    ("file", "source", "entry"),
    [
        (
            "sources.list.d/debian.sources",
            DEB822,
            "Types: deb\nURIs: mirror:/somewhere/debian\nSuites: bookworm-backports\nComponents: main\n"
            "Signed-By: /keys/debian.gpg\nEOF\n",
        ),
        (
            "sources.list",
            ONE_LINE,
            "EOF'\ndeb [arch=amd64 signed-by=/keys/debian.gpg] mirror:/some/debian bookworm-backports main contrib\n"
            "EOF\n",
        ),
    ],
)
def test_old_mesa_comes_from_backports_of_the_machines_own_source(tmp_path, file, source, entry):
    env = machine(tmp_path, installed="libe*|libgl*|libv*|ffmpeg", candidate="22.3.6-1")
    (tmp_path / "apt" / file).write_text(source)
    stopped = setup("--system", path=tmp_path / "tools", home=tmp_path, **env)
    assert stopped.returncode == 1
    assert entry in stopped.stderr
    assert "-t bookworm-backports libosmesa6 mesa-vulkan-drivers\n" in stopped.stderr


def test_no_source_to_derive_from_says_so(tmp_path):
    env = machine(tmp_path, installed="lib*|ffmpeg", candidate="22.3.6-1")
    stopped = setup("--system", path=tmp_path / "tools", home=tmp_path, **env)
    assert stopped.returncode == 1
    assert "22.3.6-1, and SAPIEN needs 23.1 or newer" in stopped.stderr


def test_system_as_root_installs_what_is_missing(tmp_path):
    env = machine(tmp_path, installed="lib*", candidate="25.0.7-2", user=0)
    done = setup("--system", path=tmp_path / "tools", home=tmp_path, **env)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "apt.log").read_text().splitlines() == [
        "apt-get update -q",
        "apt-get install -y -q --no-install-recommends ffmpeg",
        "apt-get install -y -q --no-install-recommends mesa-vulkan-drivers",
    ]
