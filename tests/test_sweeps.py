"""W&B sweeps through wandb's own agent code to runs of train.py; Hydra multirun, Optuna and Slurm forms of the same."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from test_cli import FAST, folders
from test_cli import run as run_process

import train as train_py
from nexus_lightning.config import ConfigError, compose_config, hydra_overrides, register_configs, validate
from nexus_lightning.trainer import train

ROOT = Path(__file__).resolve().parent.parent
SWEEPS = sorted((ROOT / "conf" / "sweeps").glob("*.yaml"))
RUN_ID = "sweep0run"


def samples(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    """Every value of every parameter at least once, as W&B's server would send them (floats are drawn)."""
    choices = {}
    for name, parameter in sweep["parameters"].items():
        if "value" in parameter:
            choices[name] = [parameter["value"]]
        elif "values" in parameter:
            choices[name] = parameter["values"]
        else:
            choices[name] = [parameter["min"], (parameter["min"] * parameter["max"]) ** 0.5, parameter["max"]]
    longest = max(map(len, choices.values()))
    return [{name: values[i % len(values)] for name, values in choices.items()} for i in range(longest)]


@pytest.fixture
def agent(monkeypatch, tmp_path):
    """``agent(sweep, values, spawn)`` -> what wandb's own agent makes of a proposal: argv, or the process it starts."""
    wandb_agent = pytest.importorskip("wandb.wandb_agent")
    for name in [n for n in os.environ if n.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for name, value in (("SWEEP_ID", "s"), ("DIR", str(tmp_path)), ("RUN_ID", ""), ("SWEEP_PARAM_PATH", "")):
        monkeypatch.setenv(f"WANDB_{name}", value)  # the agent sets the last two: undone with the test

    class Recorded:
        last_sigterm_time = None

        def __init__(self, command, env, forward_signals):
            self.command, self.env = command, env

    def propose(sweep: dict[str, Any], values: dict[str, Any], spawn: bool = False) -> Any:
        if not spawn:
            monkeypatch.setattr(wandb_agent, "AgentProcess", Recorded)
        agent = wandb_agent.Agent(api=None, queue=None)
        agent._sweep_command = list(sweep["command"])
        arguments = {name: {"value": value} for name, value in values.items()}
        agent._command_run({"run_id": RUN_ID, "program": sweep["program"], "args": arguments})
        process = agent._run_processes[RUN_ID]
        return process if spawn else process.command

    return propose


def composed(overrides: list[str]):
    config = compose_config(ROOT / "conf", overrides)
    validate(config)
    return config


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_proposal_is_a_valid_command_line(path, agent):
    sweep = yaml.safe_load(path.read_text())
    assert re.fullmatch(r"eval/\w+/success_rate", sweep["metric"]["name"])
    for values in samples(sweep):
        command = agent(sweep, values)
        program = command.index("train.py")
        assert command[: program + 1] in (
            ["/usr/bin/env", "python", "train.py"],
            ["/usr/bin/env", "torchrun", "--standalone", "--nproc-per-node=2", "train.py"],
        )
        config = composed(command[program + 1 :])
        assert config.logger["wandb"]["mode"] == "online"
        assert sweep["metric"]["name"].split("/")[1] in config.tenants
        for name, value in values.items():
            if name.startswith("tenants."):
                _, tenant, *keys = name.split(".")
                node: Any = config.tenants[tenant]
                for key in keys:
                    node = node[key] if isinstance(node, dict) else getattr(node, key)
                assert node == value, name


def test_a_proposal_trains_and_its_run_goes_on_after_a_resume(agent, tmp_path, monkeypatch):
    """Offline, with the agent's own process and the id it gave; the resumed run continues that id."""
    sweep = yaml.safe_load((ROOT / "conf" / "sweeps" / "toy.yaml").read_text())
    values = samples(sweep)[0] | {
        "logger.wandb.mode": "offline",
        "tenants.toy.eval.episodes": 2,
        "tenants.toy.target_jobs": 1,
        "trainer.enable_progress_bar": False,
        "output_dir": str(tmp_path / "outputs"),
    }
    sweep["command"] += FAST
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # importing without bytecode takes twice as long
    monkeypatch.chdir(ROOT)
    process = agent(sweep, values, spawn=True)
    assert process.wait(timeout=300) == 0
    run_dir = (tmp_path / "outputs" / "latest").resolve()
    assert (run_dir / "wandb_run_id.txt").read_text().strip() == RUN_ID
    assert "lr: 0.0001" in (run_dir / "config.yaml").read_text()

    monkeypatch.delenv("WANDB_RUN_ID")
    monkeypatch.delenv("WANDB_SWEEP_PARAM_PATH")
    monkeypatch.delenv("WANDB_SWEEP_ID")
    values |= {"tenants.toy.target_jobs": 2, "ckpt_path": str(run_dir)}
    config = composed([f"{name}={value}" for name, value in values.items()])
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    summary = train(config)
    wandb.teardown()
    assert summary["run_dir"] == str(run_dir) and summary["tenants"]["toy"]["jobs_completed"] == 2
    assert (run_dir / "wandb_run_id.txt").read_text().strip() == RUN_ID
    folders = list((run_dir / "wandb").glob("offline-run-*"))
    assert folders and all(folder.name.endswith(RUN_ID) for folder in folders)


def multirun_lines() -> list[list[str]]:
    text = (ROOT / "conf" / "sweeps" / "README.md").read_text()
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("python train.py -m ")]
    return [line[3:] for line in lines]


@pytest.mark.parametrize("arguments", multirun_lines(), ids=" ".join)
def test_the_documented_multirun_lines_compose(arguments):
    """Each as Hydra's own sweeper splits it."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    overrides = OverridesParser.create().parse_overrides(hydra_overrides(arguments))
    batches = BasicSweeper.split_arguments(overrides, max_batch_size=None)
    jobs = [job for batch in batches for job in batch]
    assert len(jobs) > 1
    seen = [composed(list(job)) for job in jobs]
    assert len({str(config) for config in seen}) == len(jobs), "every run differs"


def test_a_trial_that_fails_is_told_and_the_next_one_runs(tmp_path):
    """Two refused, one quarantined, one good: exit code 1 at the end, and the good one has its run folder."""
    done = run_process(
        "train.py",
        "-m",
        "+tenants=[toy]",
        "tenants.toy.schema.execute=9,2",
        "tenants.toy.head.lr=1e38,1e-3",
        "tenants.toy.target_jobs=1",
        "tenants.toy.eval.episodes=0",
        "trainer.enable_progress_bar=false",
        *FAST,
        *folders(tmp_path),
    )
    assert done.returncode == 1, done.stderr
    told = re.findall(r"^trial (\d) has failed: .*execute=(\d) tenants.toy.head.lr=(\S+)", done.stderr, re.MULTILINE)
    assert told == [("0", "9", "1e+38"), ("1", "9", "0.001"), ("2", "2", "1e+38")]
    assert done.stderr.count("tenants.toy.schema.execute=9: must not exceed chunk=2") == 2
    assert "tenant toy was quarantined" in done.stderr and "Traceback" not in done.stderr
    ends = re.findall(r"^failed: .*execute=(\d) ", done.stderr, re.MULTILINE)
    assert ends == ["9", "9", "2"], "all of them again at the end"
    summaries = [json.loads(path.read_text()) for path in sorted((tmp_path / "outputs").glob("20*/summary.json"))]
    assert [bool(s["tenants"]["toy"]["quarantined"]) for s in summaries] == [True, False]


@pytest.mark.parametrize(
    ("sweeper", "expected"),
    [(None, train_py.TrialFailed), ("maximize", -math.inf), ("minimize", math.inf), ("run", SystemExit)],
)
def test_a_sweeper_hears_of_a_failed_trial(monkeypatch, stand_in, sweeper, expected):
    """Hydra's own by an exception; Optuna's would end the study at one, so it gets the worst value there is."""
    keys = {"direction": "minimize", "n_trials": 1, "n_jobs": 2, "study_name": None, "storage": None}
    stand_in("hydra_optuna_sweeper", "hydra/sweeper", "optuna", sampler={"seed": None}, params=None, **keys)
    mode = ["hydra.mode=RUN" if sweeper == "run" else "hydra.mode=MULTIRUN", "hydra.job.num=3"]
    search = ["+search=optuna", f"hydra.sweeper.direction={sweeper}"] if isinstance(expected, float) else []
    cfg = hydra_config("+tenants=[toy]", "seed=7", *search, *mode)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
    monkeypatch.setattr(train_py, "FAILED_TRIALS", [])
    for error, code in ((ConfigError(["no"]), 2), (train_py.Quarantined("tenant toy was quarantined: x"), 1)):
        monkeypatch.setattr(train_py, "run", lambda cfg, error=error: (_ for _ in ()).throw(error))
        if isinstance(expected, float):
            assert train_py.main(cfg) == expected
            continue
        with pytest.raises(expected) as raised:
            train_py.main(cfg)
        assert sweeper != "run" or raised.value.code == code
    assert len(train_py.FAILED_TRIALS) == (0 if sweeper == "run" else 2)
    assert all("seed=7" in trial for trial in train_py.FAILED_TRIALS)


def hydra_config(*overrides: str, directory: Path = ROOT / "conf", search: Path | None = None):
    register_configs()
    paths = [] if search is None else [f"hydra.searchpath=[file://{search}]"]
    with initialize_config_dir(str(directory), version_base="1.3"):
        return compose("config", overrides=[*paths, *overrides], return_hydra_config=True)


@pytest.fixture
def stand_in():
    """``stand_in(group, name)``: when the plugin is missing, a node with its keys in its place."""
    store = ConfigStore.instance()
    added = []

    def add(module: str, group: str, name: str, **keys: Any) -> None:
        if importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{module}"):
            return
        store.store(group=group, name=name, node={"_target_": f"hydra_plugins.{module}", **keys})
        added.append((group, name))

    yield add
    for group, name in added:
        node = store.repo
        for part in group.split("/"):
            node = node[part]
        del node[f"{name}.yaml"]


def test_optuna_searches_when_it_is_installed(stand_in):
    if not (
        importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper")
    ):
        with pytest.raises(MissingConfigException, match="hydra/sweeper/optuna"):
            hydra_config("+tenants=[toy]", "+search=optuna")
    keys = {"direction": "minimize", "n_trials": 1, "n_jobs": 2, "study_name": None, "storage": None}
    stand_in("hydra_optuna_sweeper", "hydra/sweeper", "optuna", sampler={"seed": None}, params=None, **keys)
    cfg = hydra_config("+tenants=[toy]", "+search=optuna")
    assert cfg.hydra.sweeper.direction == "maximize"
    for name in cfg.hydra.sweeper.params:
        composed(["+tenants=[toy]", f"{name}=2" if name.endswith("epochs") else f"{name}=0.001"])


def test_slurm_jobs_of_a_multirun_when_submitit_is_installed(stand_in):
    keys = ("submitit_folder", "nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "mem_gb", "timeout_min")
    stand_in("hydra_submitit_launcher", "hydra/launcher", "submitit_slurm", **dict.fromkeys(keys))
    cfg = hydra_config("+tenants=[toy]", "+launch=submitit", search=ROOT / "scripts" / "launch" / "hydra")
    assert cfg.hydra.launcher.tasks_per_node == 1 and "submitit" in cfg.hydra.launcher.submitit_folder


# ------------------------------------------------------------------------------------------------ launching many ranks


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def slurm(tmp_path):
    """A make-believe Slurm of 2 machines x 2 tasks: ``slurm(*arguments)`` runs slurm.sbatch and returns what it called.

    Its srun starts every task of the step here; python is replaced by a script that writes down what it was given.
    """
    calls = tmp_path / "calls"
    calls.mkdir()
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    executable(
        bin_dir / "srun",
        """#!/usr/bin/env bash
set -eu
[ "$1" = --kill-on-bad-exit=1 ] && shift
for i in 0 1 2 3; do SLURM_PROCID=$i SLURM_LOCALID=$((i % 2)) SLURM_NODEID=$((i / 2)) "$@"; done
""",
    )
    executable(bin_dir / "scontrol", f'#!/usr/bin/env bash\necho "$*" >> {calls}/scontrol\nprintf "node0\\nnode1\\n"\n')
    recorded = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID"
    python = executable(
        bin_dir / "python_of_the_run",
        f"""#!/usr/bin/env bash
for name in {recorded}; do echo "$name=${{!name}}"; done > {calls}/rank$RANK
printf '%s\\n' "$@" >> {calls}/rank$RANK
run={tmp_path}/outputs/4711${{SUFFIX:-}}
mkdir -p $run/checkpoints
echo "\\"interrupted\\": ${{INTERRUPTED:-false}}" > $run/summary.json
touch $run/checkpoints/last.ckpt
""",
    )

    def submit(*arguments: str, **environment: str) -> Path:
        variables = {
            **os.environ,
            "PATH": f"{bin_dir}:{os.environ['PATH']}",
            "PYTHON": str(python),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_NTASKS": "4",
            "SLURM_NNODES": "2",
            "OUTPUT_DIR": str(tmp_path / "outputs"),
            **environment,
        }
        command = ["bash", "scripts/launch/slurm.sbatch", *arguments]
        subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=60, capture_output=True)
        return calls

    return submit


def test_slurm_starts_every_rank_as_torchrun_would(slurm, tmp_path):
    calls = slurm("+tenants=[toy]", "placement=fsdp2")
    for rank in range(4):
        lines = (calls / f"rank{rank}").read_text().splitlines()
        assert lines[:5] == [
            f"RANK={rank}",
            f"LOCAL_RANK={rank % 2}",
            f"GROUP_RANK={rank // 2}",
            "WORLD_SIZE=4",
            "LOCAL_WORLD_SIZE=2",
        ]
        assert lines[5:8] == ["MASTER_ADDR=node0", "MASTER_PORT=24711", "TORCHELASTIC_RUN_ID=4711"]
        assert lines[8:] == ["train.py", "+tenants=[toy]", "placement=fsdp2", f"output_dir={tmp_path}/outputs"]
    assert "requeue" not in (calls / "scontrol").read_text()


def test_slurm_goes_on_where_a_signal_stopped_it(slurm, tmp_path):
    calls = slurm("+tenants=[toy]", INTERRUPTED="true")
    assert "requeue 4711" in (calls / "scontrol").read_text()
    slurm("+tenants=[toy]")  # what Slurm does with it: the same id again
    assert (calls / "rank3").read_text().splitlines()[-1] == f"ckpt_path={tmp_path}/outputs/4711"


def test_slurm_finds_the_folder_of_a_named_run(slurm, tmp_path):
    calls = slurm("+tenants=[toy]", "run_name=big", INTERRUPTED="true", SUFFIX="_big")
    assert "requeue 4711" in (calls / "scontrol").read_text()
    slurm("+tenants=[toy]", "run_name=big", SUFFIX="_big")
    assert (calls / "rank3").read_text().splitlines()[-1] == f"ckpt_path={tmp_path}/outputs/4711_big"
    assert (calls / "scontrol").read_text().count("requeue") == 1, "finished this time"


def test_the_batch_script_asks_slurm_for_a_grace_time():
    text = (ROOT / "scripts" / "launch" / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options["signal"].startswith("TERM@"), "to the ranks: B: would signal the shell alone"
    assert "requeue" in options and options["ntasks-per-node"] == options["gpus-per-node"]


@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "launch").glob("*.s*h")), ids=lambda path: path.name)
def test_launch_scripts_parse(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_torchrun_line_of_one_of_several_machines(tmp_path):
    torchrun = executable(tmp_path / "torchrun", '#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    given = {"TORCHRUN": str(torchrun), "RUN_ID": "big", "ENDPOINT": "node0:29400", "NODES": "2", "RANKS": "8"}
    command = ["bash", "scripts/launch/torchrun.sh", "+tenants=[libero,maniskill]", "placement=fsdp2"]
    done = subprocess.run(command, cwd=tmp_path.parent, env={**os.environ, **given}, capture_output=True, text=True)
    assert done.returncode != 0, "relative to where it is called from"
    command[1] = str(ROOT / command[1])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **given}, capture_output=True, text=True, check=True
    )
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(done.stdout.splitlines())
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_id, parsed.max_restarts) == ("2", "8", "big", 3)
    assert (parsed.rdzv_endpoint, parsed.rdzv_backend) == ("node0:29400", "c10d")
    assert [parsed.training_script, *parsed.training_script_args] == ["train.py", *command[2:]]
    del given["ENDPOINT"]
    missing = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True)
    assert missing.returncode != 0 and "host:port of one of the machines" in missing.stderr
