"""Event log, statistics, progress display and banner."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from nexus_lightning.monitoring.banner import banner
from nexus_lightning.monitoring.events import EventLog, ServiceTimes, read_events
from nexus_lightning.monitoring.progress import NexusProgressBar, RunStatus, TenantStatus, status_line
from nexus_lightning.monitoring.stats import RunningMean, wilson_interval


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # z = 1.959964, z^2 = 3.841459. At the ends the interval is n / (n + z^2) long.
        (0, 10, 0.0, 3.841459 / 13.841459),
        (10, 10, 10 / 13.841459, 1.0),
        # centre 0.5, half = z / (1 + z^2/10) * sqrt(0.25/10 + z^2/400) = 1.416010 * 0.186020
        (5, 10, 0.236593, 0.763407),
        # (16 + z^2/2) / (20 + z^2) = 0.751661; half = z / 1.192073 * sqrt(0.008 + 0.002401) = 0.167681
        (16, 20, 0.583983, 0.919339),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval_by_hand(successes, n, low, high):
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=2e-5)


def test_wilson_interval_refuses_impossible_counts():
    with pytest.raises(ValueError, match="successes=3, n=2"):
        wilson_interval(3, 2)


def test_running_mean_forgets_a_nan():
    mean = RunningMean(window=2)
    for value in (float("nan"), 1.0, 3.0):
        mean.update(value)
    assert mean.value == 2.0


def test_utilisation_counts_overlapping_spans_once():
    times = ServiceTimes()
    times.add("actor", {"a": 1}, 6.0, 7.0)
    times.add("actor", {"a": 3, "b": 1}, 0.0, 4.0)
    times.add("actor", {"b": 1}, 2.0, 5.0)  # overlaps the one before, and arrives after a later one
    times.add("inference", {"a": 1}, 1.0, 2.0)
    assert times.union_s("actor") == 6.0
    assert times.utilisation(wall_s=10.0) == {"actor": 0.6, "inference": 0.1, "environment": 0.0}
    assert times.busy_s["actor"] == {"a": 1.0 + 3.0, "b": 1.0 + 3.0}
    times.add("actor", {"a": 1}, 0.0, 7.0)  # bridges everything
    assert times.union_s("actor") == 7.0


def test_union_equals_brute_force():
    import random

    rng = random.Random(0)
    times, covered = ServiceTimes(), set()
    for _ in range(300):
        start = rng.randrange(1000)
        end = start + rng.randrange(1, 20)
        times.add("actor", {"a": 1}, start, end)
        covered |= set(range(start, end))
        assert times.union_s("actor") == len(covered)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"service": "gpu"}, "service='gpu'"),
        ({"tenants": {}}, "tenants={}"),
        ({"end_s": 0.5}, "end_s=0.5"),
        ({"end_s": float("nan")}, "end_s=nan"),
    ],
)
def test_span_refuses_nonsense(tmp_path, change, message):
    events = EventLog(tmp_path / "events.jsonl")
    good = {"service": "actor", "tenants": {"a": 1}, "start_s": 1.0, "end_s": 2.0, "kind": "sft"}
    with pytest.raises(ValueError, match=message):
        events.span(**{**good, **change})
    events.close()
    assert [e["type"] for e in read_events(events.path)] == ["point"]


def test_event_log_resumes_after_the_last_recorded_time(tmp_path):
    path = tmp_path / "events.jsonl"
    events = EventLog(path)
    events.span("actor", {"a": 1}, 100.0, 150.0, kind="sft")
    events.point("quarantine", "a", loss=float("nan"), reason="loss is NaN", jobs=[1, 2])
    events.close()
    events.close()
    with path.open("a") as file:
        file.write('{"type": "span", "serv')  # torn by a kill

    resumed = EventLog(path)
    assert 150.0 <= resumed.now() < 160.0
    assert resumed.busy_seconds()["actor"] == {"a": 50.0}
    assert resumed.utilisation()["actor"] == pytest.approx(50 / 150, abs=0.02)
    with resumed.timed("inference", {"a": 2}, kind="act"):
        time.sleep(0.01)
    resumed.close()
    kinds = [e["kind"] for e in read_events(path)]
    assert kinds == ["start", "sft", "quarantine", "resume", "act"]
    assert read_events(path)[2]["values"] == {"loss": "nan", "reason": "loss is NaN", "jobs": [1, 2]}
    with pytest.raises(RuntimeError, match="closed"):
        resumed.point("late", None)


def test_event_log_takes_tensor_scalars_and_many_threads(tmp_path):
    import torch

    events = EventLog(tmp_path / "events.jsonl")

    def write():
        for i in range(200):
            events.span("inference", {"a": 1}, float(i), i + 0.5, kind="act")

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events.point("loss", "a", value=torch.tensor(0.5), ok=torch.tensor(True))
    with pytest.raises(TypeError, match="object"):
        events.point("bad", "a", value=object())
    events.close()
    recorded = read_events(events.path)
    assert len(recorded) == 1 + 800 + 1
    assert recorded[-1]["values"] == {"value": 0.5, "ok": True}


def test_event_log_is_readable_after_kill_9(tmp_path):
    path = tmp_path / "events.jsonl"
    script = (
        "import sys, time\nfrom nexus_lightning.monitoring.events import EventLog\n"
        "events = EventLog(sys.argv[1])\n"
        "while True:\n    events.span('actor', {'a': 1}, 0.0, events.now(), 'sft')\n    time.sleep(0.001)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], env={**os.environ, "PYTHONPATH": "."}) as process:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 2000):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    events = read_events(path)
    assert len(events) > 10 and events[0]["kind"] == "start"
    EventLog(path).close()
    assert [e["kind"] for e in read_events(path)][-1] == "resume"


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"type": "point"}) + "\nnonsense\n{}\n")
    with pytest.raises(ValueError, match=r"events.jsonl:2"):
        read_events(path)


def _status() -> RunStatus:
    tenants = {
        "libero": TenantStatus("sft", 9, 40, loss=0.2134, version=9),
        "maniskill": TenantStatus(
            "rl", 8, 60, loss=1.0, episode_return=0.31, success_rate=0.35, success_n=20, version=8
        ),
    }
    return RunStatus(tenants, {"ready": 2, "leased": 0}, inference_waiting=3)


def test_plain_line():
    assert status_line(_status(), 42.4) == (
        "[ 42s] jobs 17 | libero sft 9/40 loss 0.213 success - v9"
        " | maniskill rl 8/60 return 0.31 success 35% (n=20) v8 | queue ready 2, inference 3"
    )


def test_plain_lines_without_a_terminal(capsys):
    bar = NexusProgressBar(_status(), plain_every_s=0.05)
    bar.on_train_start()
    time.sleep(0.3)
    bar.on_train_end()
    bar.teardown()
    out = capsys.readouterr().out
    assert 2 <= out.count("\n") <= 10 and "\r" not in out and out.count("libero sft 9/40") == out.count("\n")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_terminal_shows_a_line_per_tenant_and_follows_joins(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    status = _status()
    status.max_jobs = 100
    bar = NexusProgressBar(status, refresh_s=0.02)
    bar.on_train_start()
    time.sleep(0.15)
    status.tenants["late"] = TenantStatus("sft", state="quarantined: loss is NaN")
    del status.tenants["libero"]
    bar.print("a message")
    time.sleep(0.15)
    bar.on_exception()
    text = terminal.getvalue()
    assert "8/100" in text and "libero sft 9/40" in text and "a message\n" in text
    assert "late sft 0 loss - success - v0 [quarantined" in text
    assert not any(t.name == "progress" for t in threading.enumerate())


def test_disabled_bar_is_silent(capsys):
    bar = NexusProgressBar(_status(), plain_every_s=0.01)
    bar.disable()
    bar.on_train_start()
    time.sleep(0.05)
    bar.on_train_end()
    assert capsys.readouterr().out == ""


def test_progress_bar_in_a_lightning_run(capsys, tmp_path):
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = Trainer(
        callbacks=[NexusProgressBar(_status())],
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
    )
    trainer.fit(BoringModel())
    assert "jobs 17 | libero sft 9/40" in capsys.readouterr().out


def test_banner_says_what_was_decided():
    text = banner(
        run_dir="outputs/run",
        seed=7,
        backbone={"name": "effnet_minilm", "parameters": 27_100_000, "fingerprint": "ab" * 32, "pretrained": True},
        device={"name": "cpu", "precision": "32-true", "reason": "no GPU found"},
        tenants=[
            {
                "name": "libero",
                "task": "sft",
                "head": "MLPHead",
                "trainable_parameters": 128_400,
                "memory": "3.6 MB",
                "state_dim": 8,
                "action_dim": 7,
                "chunk": 8,
                "execute": 8,
                "cameras": ("front", "wrist"),
                "source": "libero_object/6",
                "privileged": ("obj_pose",),
            }
        ],
        placement={"backbone": "whole on cpu"},
        queues={"in_flight": 2, "group": "8 requests or 5 ms"},
        resumed_from="last",
    )
    for part in (
        "outputs/run  (resumed from last)",
        "27.1 M parameters, frozen, pretrained, fingerprint abababababab\n",
        "cpu, 32-true (no GPU found)",
        "in_flight 2, group 8 requests or 5 ms",
        "128.4 k",
        "front, wrist",
        "privileged: obj_pose",
    ):
        assert part in text
