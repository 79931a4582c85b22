"""Group relative policy optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor

from nexus_lightning.bounds import setting
from nexus_lightning.objectives.policy_gradient import ClipSettings, PolicyGradient
from nexus_lightning.shares import Metric

#: Returns of a group whose standard deviation is smaller are equal.
MIN_SPREAD = 1e-6


@dataclass
class GRPOSettings(ClipSettings):
    """See ``conf/algorithm/grpo.yaml``."""

    group_size: int | None = setting(None, least=2)  # simulators that start from the same initial state; required


class GRPO(PolicyGradient):
    """PPO's clipped loss without a critic; an episode's advantage is its return against the other episodes from the
    same initial state (Shao et al. 2024, arXiv 2402.03300), the same for all its decisions."""

    task = "rl"
    settings_class = GRPOSettings
    arrays = ("chunk", "log_probs", "advantage", "executed?")
    every_decision_counts = False

    @classmethod
    def problems(cls, key: str, tenant: Any, head: Any) -> list[str]:
        """Whole groups of whole episodes."""
        settings, environment, execute = tenant.algorithm, tenant.environment, tenant.schema.execute
        size, where = settings.group_size, f"{key}.algorithm.group_size={settings.group_size}"
        problems = super().problems(key, tenant, head)
        if size is None or size < 2:
            problems.append(f"{where}: grpo compares episodes of one initial state; it must be at least 2")
        if environment is None or size is None or problems or settings.chunks_per_job is None:
            return problems
        if environment.num_envs % size:
            problems.append(f"{where}: must divide {key}.environment.num_envs={environment.num_envs}")
        tasks, horizon = len(environment.tasks), environment.simulator.get("horizon")
        if tasks > 1 and environment.num_envs // size % tasks:
            problems.append(
                f"{key}.environment.num_envs={environment.num_envs}: grpo with {tasks} tasks needs a "
                f"multiple of {size * tasks}, so that every rollout holds the tasks alike"
            )
        if isinstance(horizon, int) and settings.chunks_per_job * execute < horizon:
            problems.append(
                f"{key}.algorithm.chunks_per_job={settings.chunks_per_job}: grpo needs whole episodes; with "
                f"{key}.schema.execute={execute} and a horizon of {horizon} at least {-(-horizon // execute)}"
            )
        return problems

    @classmethod
    def group_size(cls, settings: GRPOSettings) -> int:
        """A setting."""
        assert settings.group_size is not None, "validated with the config"
        return settings.group_size

    @classmethod
    def advantage(cls, rollout: TensorDict, settings: GRPOSettings) -> tuple[Tensor, Tensor, Tensor]:
        """See :func:`group_advantages`; there is no value to learn."""
        del settings
        advantage, counts = group_advantages(rollout)
        return advantage, torch.zeros_like(advantage), counts

    @classmethod
    def rollout_metrics(cls, rollout: TensorDict, settings: GRPOSettings) -> dict[str, Metric]:
        """See :func:`group_metrics`."""
        del settings
        return group_metrics(rollout)


def group_advantages(rollout: TensorDict) -> tuple[Tensor, Tensor]:
    """GRPO's advantage ``[N, L, 1]`` and which decisions count.

    Episodes with one ``episode_seed`` (same task, same initial state) are a group; an episode's advantage is its return
    minus the group's mean, over the group's standard deviation. A group whose returns are all equal, or of which only
    one episode was finished, teaches nothing and is left out, as are episodes that the end of the rollout cut.
    """
    reward = cast(TensorDict, rollout["next"])["reward"].squeeze(-1)
    advantage, counts = torch.zeros_like(reward), torch.zeros_like(reward, dtype=torch.bool)
    for places, returns in finished_groups(rollout):
        spread = returns.std(unbiased=False)
        if spread < MIN_SPREAD:
            continue
        for place, value in zip(places, (returns - returns.mean()) / spread, strict=True):
            advantage[place] = value
            counts |= place
    return advantage.unsqueeze(-1), counts.unsqueeze(-1)


def group_metrics(rollout: TensorDict) -> dict[str, Metric]:
    """``groups`` with at least two finished episodes, and how many ``zero_spread_groups`` of them are left out."""
    spreads = [float(returns.std(unbiased=False)) for _, returns in finished_groups(rollout)]
    return {
        "groups": Metric(float(len(spreads)), "sum"),
        "zero_spread_groups": Metric(float(sum(spread < MIN_SPREAD for spread in spreads)), "sum"),
    }


def finished_groups(rollout: TensorDict) -> list[tuple[list[Tensor], Tensor]]:
    """Of every group with at least two finished episodes: where each is, bool ``[N, L]``, and their returns."""
    following = cast(TensorDict, rollout["next"])
    reward, done = following["reward"].squeeze(-1), following["done"].squeeze(-1)
    seeds = rollout["episode_seed"].squeeze(-1)
    # Number of the episode in its simulator: a decision after a done belongs to the next one.
    episode = done.long().cumsum(1) - done.long()
    groups: dict[int, list[tuple[Tensor, float]]] = {}
    for env in range(len(reward)):
        for number in range(int(episode[env].max()) + 1):
            rows = episode[env] == number
            if bool(done[env][rows].any()):
                place = torch.zeros_like(done)
                place[env] = rows
                groups.setdefault(int(seeds[env][rows][0]), []).append((place, float(reward[env][rows].sum())))
    return [
        ([place for place, _ in episodes], torch.tensor([value for _, value in episodes]))
        for episodes in groups.values()
        if len(episodes) > 1
    ]
