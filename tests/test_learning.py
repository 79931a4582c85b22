"""Runs that must learn, not only run."""

from __future__ import annotations

import pytest

from nexus_lightning.trainer import train


def test_the_toy_reaches_its_ceiling(compose):
    """PPO from scratch; an oracle wins every episode, the untrained policy about a third."""
    config = compose("+tenants=[toy]", "tenants.toy.eval.every_n_jobs=null", "trainer.enable_progress_bar=false")
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    summary = train(config)["tenants"]["toy"]
    assert summary["eval_first"]["success_rate"] < 0.6
    assert summary["eval"]["success_rate"] >= 0.9 and summary["eval"]["n"] == 40


@pytest.mark.slow
@pytest.mark.sim
@pytest.mark.timeout(1500)
def test_pushcube_from_images_and_its_blind_control(compose, tmp_path):
    """60 scripted demonstrations, proprioception, frozen pretrained features: 16 of 20 unseen seeds at least.

    And seeing matters: the same run with the image features set to zero is worse.
    """

    def run(*overrides: str) -> dict:
        config = compose(
            "experiment=pushcube_sft",
            "trainer.enable_progress_bar=false",
            "tenants.maniskill_sft.eval.video=false",
            "tenants.maniskill_sft.eval.num_envs=2",
            f"data_dir={tmp_path}/data",
            *overrides,
        )
        return train(config)["tenants"]["maniskill_sft"]["eval"]

    seeing, blind = run(), run("backbone.blind=true")
    assert seeing["n"] == blind["n"] == 20
    assert seeing["success_rate"] >= 16 / 20, seeing
    assert blind["success_rate"] < seeing["success_rate"] - 0.1, (blind, seeing)
