"""Tenants that come and go in a live run: nothing of the others changes, nothing of them stays."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from served import (
    JOBS,
    Ending,
    losses_of,
    running,
    serve_config,
    serving,
    state_of,
    toy_data,
    toy_sft,
    toy_spec,
)

from nexus_lightning.queues.jobs import Scheduler
from nexus_lightning.services.errors import Conflict, NotFound
from nexus_lightning.services.spec import EntryConfig

__all__ = ["serve_config", "serving", "toy_data"]  # fixtures


def test_a_tenant_that_comes_trains_fails_and_leaves_changes_no_bit_of_another(serve_config):
    """And one that joins late ends as one that was there from the start."""
    config = serve_config()
    config.registry.heads["nan"] = EntryConfig({"_target_": "served.NaNHead", "lr": 0.01, "hidden_dim": 16})
    with running(config) as master:
        alone, beside, failing, late = Ending(), Ending(), Ending(), Ending()
        master.create_tenant("alone", toy_spec())
        master.submit("alone", toy_sft(), on_end=alone)
        assert alone.wait()["status"] == "completed"
        expected = state_of(master, "alone"), losses_of(master, "alone")
        assert expected[0]["counters"] == (JOBS, JOBS, 4 * JOBS, JOBS) and len(expected[1]) == JOBS
        master.create_tenant("b", toy_spec())
        master.submit("b", toy_sft(), on_end=beside)
        master.create_tenant("a", toy_spec(head={"name": "nan"}, seed=9))
        master.submit("a", toy_sft(), on_end=failing)
        failed = failing.wait()
        assert failed["status"] == "failed" and "NonFiniteLoss" in failed["error"]["message"]
        assert failed["result"]["jobs"] == 1 and master.describe("a")["state"] == "failed"
        slot = weakref.ref(master.runtime.slots["a"])
        master.create_tenant("late", toy_spec())
        master.submit("late", toy_sft(), on_end=late)
        master.delete_tenant("a")
        for name, end in (("b", beside), ("late", late)):
            assert end.wait()["result"]["jobs"] == JOBS
            assert (state_of(master, name), losses_of(master, name)) == expected
        gc.collect()
        assert slot() is None, gc.get_referrers(slot())
        with pytest.raises(NotFound, match="unknown"):
            master.describe("a")


def test_an_actor_that_waits_for_jobs_wakes_for_a_call_at_once():
    scheduler = Scheduler()
    waiting = threading.Thread(target=lambda: scheduler.lease_next({}, timeout_s=600.0, deadline_s=1.0))
    waiting.start()
    assert scheduler.lease_next({}, timeout_s=0.0, deadline_s=1.0) is None
    scheduler.wake()
    waiting.join(30)
    assert not waiting.is_alive()


def test_an_idle_run_starts_empty_wakes_for_a_call_and_ends_when_asked(serving):
    with serving() as master:
        assert master.runtime.call(lambda: torch.is_grad_enabled()).result(30) is True
        assert master.ready and master.runtime.slots == {} and master.trainer.strategy.optimizers == []
        with pytest.raises(ZeroDivisionError):
            master.runtime.call(lambda: 1 / 0).result(30)
        assert master.ready, "an exception of a call is that call's alone"
    assert not master.ready


def test_a_tenant_works_again_with_its_policy_and_a_fresh_optimizer(serving):
    with serving() as master:
        master.create_tenant("t", toy_spec())
        first, second = Ending(), Ending()
        master.submit("t", toy_sft(target_jobs=2), on_end=first)
        first.wait()
        slot, before = master.runtime.slots["t"], state_of(master, "t")
        assert before["counters"] == (2, 2, 8, 2)
        normalizer = {k: v.clone() for k, v in slot.normalizer.state_dict().items()}
        assert float(normalizer["state_offset"].abs().sum()) > 0, "statistics of its first dataset"
        optimizer = slot.optimizer
        master.submit("t", toy_sft(target_jobs=3), on_end=second)
        with pytest.raises(Conflict, match="active"):
            master.submit("t", toy_sft())
        assert second.wait()["result"]["jobs"] == 3
        assert slot.optimizer is not optimizer and master.trainer.strategy.optimizers == [slot.optimizer]
        assert state_of(master, "t")["counters"] == (5, 3, 12, 3)
        assert all(torch.equal(v, normalizer[k]) for k, v in slot.normalizer.state_dict().items())
        member, queue = master.runtime.members["t"], master.runtime.queue
        left = (member.producers, member.reader, member.evaluator, member.dataset, queue.partitions("t"))
        assert not any(left) and queue.used_bytes("t") == 0


def test_rl_pause_cancel_and_evaluation_of_a_live_tenant(serving):
    algorithm = {"name": "ppo", "chunks_per_job": 6, "epochs": 1, "minibatch_size": 12, "value_warmup_jobs": 1}
    environment = {"name": "toy", "num_envs": 2, "reward": "tracking"}
    with serving() as master:
        master.create_tenant("rl", toy_spec(max_in_flight=1))
        end, evaluated = Ending(), Ending()
        work = {"task": "rl", "environment": environment, "algorithm": algorithm, "target_jobs": 100_000}
        master.submit("rl", {**work, "eval": {"episodes": 2, "at_start": True, "video": False}}, on_end=end)
        rows = master.wait_metrics("rl", 0, 60)
        while not any("train/loss" in row["metrics"] for row in rows):
            rows = master.wait_metrics("rl", rows[-1]["id"], 60)
        master.pause("rl")
        paused = master.describe("rl")
        assert paused["state"] == "paused" and paused["policy_version"] >= 1
        master.evaluate("rl", {"episodes": 3, "first_seed": 50}, evaluated)
        result = evaluated.wait()["result"]
        assert result["n"] == 3 and result["policy_version"] == paused["policy_version"]
        assert master.describe("rl")["policy_version"] == paused["policy_version"], "nothing trains while it is paused"
        master.resume("rl")
        master.wait_metrics("rl", master.metrics("rl")[-1]["id"], 60)
        master.cancel("rl")
        assert end.wait()["status"] == "cancelled"
        assert master.describe("rl")["state"] == "idle" and not master.runtime.members["rl"].producers
        with pytest.raises(Conflict, match="no workload"):
            master.cancel("rl")
