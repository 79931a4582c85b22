"""Sessions of the inference queue rest between rollouts and after an evaluation: nobody waits for them."""

from __future__ import annotations

from dataclasses import replace

from nexus_lightning.inference.transport import Transport
from nexus_lightning.trainer import train


def test_rollouts_and_evaluations_rest_when_they_end(compose, monkeypatch):
    rested = []

    class Watched(Transport):
        def rest(self, session):
            super().rest(session)
            rested.append(session)
            assert session not in self.expected and session.answered_s is None, "it would be waited for"

    monkeypatch.setattr("nexus_lightning.inference.server.Transport", Watched)
    config = compose("+tenants=[toy]", "trainer.enable_progress_bar=false")
    config.backbone = {"_target_": "fakes.FakeBackbone"}
    tenant = config.tenants["toy"]
    tenant.eval = replace(tenant.eval, episodes=2, every_n_jobs=None, at_start=False, video=False)
    tenant.target_jobs = 2
    assert train(config)["tenants"]["toy"]["eval"]["n"] == 2
    rollouts = [session for session in rested if session is rested[0]]
    assert len(rollouts) == 2 and len(rested) == 3, "two rollouts of one session, one evaluation of another"
