"""scripts/play.py: every kind of actions on light tenants, the check of the contract, the video."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.toy import ToySimulator
from nexus_lightning.evaluation import evaluate
from nexus_lightning.policy import load_policy
from nexus_lightning.simulator import Simulator, StepResult
from nexus_lightning.trainer import train
from scripts.play import main, play_episode

ROOT = Path(__file__).resolve().parent.parent
needs_pusht = pytest.mark.skipif(
    importlib.util.find_spec("gym_pusht") is None, reason="pip install 'nexus-lightning[gymnasium]'"
)


class Counter(Simulator):
    """FAKE. Pays the number of the step, succeeds at step 2, terminated at step 4."""

    gripper = "none"

    def reset(self, seed):
        self.steps = 0

    def step(self, action):
        self.steps += 1
        self.seen = action
        return StepResult(float(self.steps), self.steps == 2, self.steps == 4, False)

    def render_frame(self):
        return np.full((8, 8, 3), self.steps, np.uint8)


def test_an_episode_ends_where_the_simulator_says():
    frames = []
    sim = Counter()
    episode = play_episode(sim, lambda simulator, seed: iter(np.full((9, 1), 7.0)), 5, frames)
    assert episode == {"seed": 5, "success": True, "episode_return": 10.0, "episode_length": 4, "end": "terminated"}
    assert [f[0, 0, 0] for f in frames] == [0, 1, 2, 3, 4], "the start and every control step"
    assert sim.seen.tolist() == [1.0], "clipped"


def test_an_expert_may_give_up():
    episode = play_episode(Counter(), lambda simulator, seed: iter(np.zeros((1, 1))), 0, None)
    assert (episode["episode_length"], episode["success"], episode["end"]) == (1, False, "no more actions")


def test_random_is_reproducible_and_makes_a_video(tmp_path, capsys):
    import imageio.v3 as iio

    video = tmp_path / "toy.mp4"
    episodes = main(["tenant=toy", "actions=random", "episodes=2", "seed=3", f"video={video}"])
    assert [e["seed"] for e in episodes] == [3, 4] and {e["episode_length"] for e in episodes} <= set(range(1, 13))
    assert episodes[1:] == main(["tenant=toy", "seed=4"]), "an episode does not depend on those before it"
    assert len(iio.imread(video)) == sum(e["episode_length"] + 1 for e in episodes)
    shown = capsys.readouterr().out
    assert "toy seed 3: return" in shown and "success" in shown and f"video: {video}" in shown


def test_zero_stands_still_and_the_expert_wins():
    assert main(["tenant=toy_sft", "actions=zero"])[0]["success"] is False
    assert [e["success"] for e in main(["tenant=toy_sft", "actions=expert", "episodes=5"])] == [True] * 5


def test_env_check_and_changes_of_the_tenant(capsys):
    episodes = main(["tenant=toy", "env_check=true", "actions=zero", "tenants.toy.environment.simulator.horizon=3"])
    assert episodes[0]["episode_length"] == 3 and episodes[0]["end"] == "truncated"
    assert "its environment keeps the contract" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"tenant 'toy': schema and simulator disagree: state_dim=5"):
        main(["tenant=toy", "env_check=true", "tenants.toy.schema.state_dim=5"])


def test_a_payload_acts_as_in_evaluation(compose, tmp_path):
    config = compose("+tenants=[toy]", "trainer.enable_progress_bar=false", "tenants.toy.target_jobs=2")
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    config.tenants["toy"].eval = replace(config.tenants["toy"].eval, episodes=0)
    folder = Path(train(config)["run_dir"]) / "tenants" / "toy"
    played = main(["tenant=toy", "actions=payload", f"payload={folder}", "episodes=6"])
    result = evaluate(load_policy(folder), list(range(6)))
    assert tuple(e["success"] for e in played) == result.successes
    assert sum(e["episode_return"] for e in played) / 6 == pytest.approx(result.episode_return, rel=1e-5)
    assert sum(e["episode_length"] for e in played) / 6 == result.episode_length
    with pytest.raises(SystemExit, match=r"its schema differs from that of tenant=toy: action_dim: 2 != 3"):
        main(["tenant=toy", "actions=payload", f"payload={folder}", "tenants.toy.schema.action_dim=3"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "tenant=<name> is required"),
        (["tenant=toy", "actions=fly"], "actions=fly: choose one of zero, random, expert, payload"),
        (["tenant=toy", "actions=payload"], "actions=payload needs a folder"),
        (["tenant=toy", "payload=x"], "actions=payload needs a folder"),
        (["tenant=toy", "actions=expert"], "tenant=toy: actions=expert needs dataset.record.expert"),
        (["tenant=toys"], "tenant=toys"),
        (["tenant=toy", "epsiodes=3"], "epsiodes"),
        (["tenant=toy", "tenants.toy.environment=null"], "it has no environment to play in"),
    ],
)
def test_wrong_words_end_with_one_message(words, expected):
    with pytest.raises(SystemExit, match=expected):
        main(words)


def test_from_the_command_line():
    command = [sys.executable, "scripts/play.py", "tenant=toy", "actions=random", "episodes=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "toy seed 1: return" in done.stdout and done.stdout.strip().splitlines()[-1].startswith(
        "toy random: success"
    )


@needs_pusht
@pytest.mark.parametrize("tenant", ["pusht", "pusht_sft"])
def test_the_pusht_tenants(tenant, tmp_path):
    words = [f"tenant={tenant}", "env_check=true", f"tenants.{tenant}.environment.simulator.horizon=5"]
    (episode,) = main([*words, f"video={tmp_path}/pusht.mp4"])
    assert episode["episode_length"] == 5 and 0 <= episode["episode_return"] <= 5
    assert (tmp_path / "pusht.mp4").stat().st_size > 1000


def test_a_simulator_that_breaks_its_contract_is_named(monkeypatch):
    """Played with whatever actions: the result of every step, and what a policy would be shown."""

    def observe(self, observe=ToySimulator.observe):
        seen = observe(self)
        return {**seen, "state": seen["state"][:1]} if self._steps >= 4 else seen

    def step(self, action, step=ToySimulator.step):
        result = step(self, action)
        result.reward = float("nan")
        return result

    named = r"error: tenant 'toy': simulator 0 \(envs.toy.ToySimulator\) broke its contract: "
    monkeypatch.setattr(ToySimulator, "observe", observe)
    with pytest.raises(
        SystemExit, match=rf"{named}state_dim=4: .*float32 \(1,\).*\(4 steps after the reset with seed 0\)"
    ):
        main(["tenant=toy", "actions=zero"])
    monkeypatch.setattr(ToySimulator, "step", step)
    with pytest.raises(SystemExit, match=f"{named}reward: nan: expected one finite number"):
        main(["tenant=toy", "actions=zero"])
