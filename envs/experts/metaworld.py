"""MetaWorld's own scripted policies as experts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

from envs.metaworld import MetaWorldSimulator


def make_metaworld_expert(simulator: MetaWorldSimulator) -> Iterator[np.ndarray]:
    """Actions (float32 ``[4]`` in [-1, 1]) for the episode that ``simulator`` has just reset to, without end.

    They read object poses and the goal, so they are for recording demonstrations only.
    """
    from metaworld.policies import ENV_POLICY_MAP

    policy = ENV_POLICY_MAP[simulator.task]()
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Constant(s) may be too high": the environment clips, and so do we
            action = policy.get_action(simulator.raw_observation)
        yield np.clip(action, -1.0, 1.0).astype(np.float32)
