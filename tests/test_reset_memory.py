"""200 resets of the real simulators, each in a process of its own as in a run (CASES E5)."""

from __future__ import annotations

import pytest

from nexus_lightning.simulator import SimulatorProcess

SIMULATORS = {
    "maniskill_state": {"_target_": "envs.maniskill.ManiSkillSimulator", "task": "PullCube-v1", "obs": "state"},
    "maniskill_rgb": {
        "_target_": "envs.maniskill.ManiSkillSimulator",
        "task": "PushCube-v1",
        "obs": "rgb",
        "cameras": ["base_camera"],
        "image_size": 64,
    },
    "libero": {
        "_target_": "envs.libero.LiberoSimulator",
        "suite": "libero_object",
        "task_id": 6,
        "cameras": ["agentview"],
        "image_size": 128,
        "shadows": False,
    },
}
#: What a process may gain from the 50th to the 200th reset: caches that settle, not a scene per reset (tens of MB).
ALLOWED_BYTES = 64e6


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SIMULATORS)
def test_memory_stays_flat_over_200_resets_and_closing_frees_it(name):
    process = SimulatorProcess(SIMULATORS[name], name, 0)
    try:
        memory = []
        for seed in range(200):
            process.send("reset", {0: (seed % 50, SIMULATORS[name])}, ())
            process.receive(timeout_s=600)
            memory.append(process.memory_bytes)
    finally:
        process.close()
    print(f"{name}: {memory[0] / 1e6:.0f} MB, after 50: {memory[49] / 1e6:.0f}, after 200: {memory[-1] / 1e6:.0f}")
    assert memory[-1] - memory[49] < ALLOWED_BYTES
    assert not process.alive
