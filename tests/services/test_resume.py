"""A server that is killed in the middle of a workload goes on with it, bit for bit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading

import torch
from hydra.utils import instantiate
from served import JOBS, Ending, running, serve_config, state_of, toy_data, toy_sft, toy_spec

from nexus_lightning.services.master import Master

__all__ = ["serve_config", "toy_data"]  # fixtures


def _killed_in_its_third_job(config) -> None:
    """Child process: kill -9 after the third job, one job after the last payload."""
    torch.set_num_threads(1)
    master = Master(config)
    heard = master.runtime.tenancy.on_metrics

    def on_metrics(row, step):
        heard(row, step)
        if row.get("t/step") == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    master.runtime.tenancy.on_metrics = on_metrics

    def work():
        master.create_tenant("t", toy_spec())
        master.submit("t", {**toy_sft(), "workload_id": "w1"}, on_end=lambda end: os._exit(3))

    threading.Thread(target=work, daemon=True).start()
    master.run()


def test_a_killed_workload_goes_on_from_its_last_payload_and_ends_with_the_same_bits(serve_config):
    tiny = "backbone=tiny"
    config = serve_config(tiny, "trainer.checkpoint_every_n_jobs=2", keep_backbone=True)
    child = multiprocessing.get_context("fork").Process(target=_killed_in_its_third_job, args=[config])
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    work, end = {**toy_sft(), "workload_id": "w1"}, Ending()
    with running(config, instantiate(config.backbone)) as master:
        assert master.restore_tenant("t", toy_spec(), config.run_dir / "tenants" / "t") == {
            "policy_version": 2,
            "optimizer_steps": 8,
        }
        master.submit("t", work, resume=True, on_end=end)
        assert end.wait()["result"]["jobs"] == JOBS
        resumed, ids = state_of(master, "t"), [row["id"] for row in master.metrics("t")]
        assert ids == sorted(set(ids)), "the numbers of metrics go on"
        backbone = master.module.backbone
    whole = serve_config(tiny, "run_name=whole", keep_backbone=True)
    with running(whole, backbone) as master:
        end = Ending()
        master.create_tenant("t", toy_spec())
        master.submit("t", work, on_end=end)
        end.wait()
        assert state_of(master, "t") == resumed
    with running(whole, backbone) as master:  # killed between the end of a workload and the news of it
        end = Ending()
        master.restore_tenant("t", toy_spec())
        master.submit("t", work, resume=True, on_end=end)
        assert end.wait() == {"status": "completed", "result": {**end.value["result"], "jobs": JOBS}}
        assert state_of(master, "t") == resumed
