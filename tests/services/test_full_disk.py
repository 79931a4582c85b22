"""A server whose disk takes no more writes or gives back damaged payloads: the Master on the toy tenant."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import socket
import sys
import threading
import time

import pytest
from served import ROOT, Ending, running, serve_config, serving, state_of, toy_data, toy_sft, toy_spec

from nexus_lightning import checkpoint
from nexus_lightning.monitoring import lines
from nexus_lightning.monitoring.events import EventLog, read_events
from nexus_lightning.run import tenancy
from nexus_lightning.services import master as master_module
from nexus_lightning.services.errors import Conflict, NotFound, future_error_to_json
from nexus_lightning.services.metrics import MetricLog
from nexus_lightning.services.store import Store

__all__ = ["serve_config", "serving", "toy_data"]  # fixtures


class Disk:
    """Refuses payloads (their flush) and lines while ``full``; counts what it refused."""

    def __init__(self, monkeypatch) -> None:
        self.full, self.payloads, self.lines = True, 0, 0
        flush, write = checkpoint.fsync_folder, os.write

        def payload(folder):
            if self.full:
                self.payloads += 1
                (folder / "head.safetensors").write_bytes(b"half")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            flush(folder)

        class Os:
            def __getattr__(self, name):
                return getattr(os, name)

            def write(_, descriptor, data):
                if self.full:
                    self.lines += 1
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(descriptor, data)

        monkeypatch.setattr(checkpoint, "fsync_folder", payload)
        monkeypatch.setattr(lines, "os", Os())


def wait_for(condition, timeout_s=30.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_the_run_goes_on_while_the_disk_is_full_and_writes_everything_when_there_is_room(
    serve_config, monkeypatch, caplog
):
    monkeypatch.setattr(tenancy, "SAVE_AGAIN_S", 0.3)
    monkeypatch.setattr(master_module, "WRITE_AGAIN_S", 0.05)
    config = serve_config("trainer.checkpoint_every_n_jobs=1")
    with running(config) as master:
        for name in ("a", "b"):
            master.create_tenant(name, toy_spec(name=name))
        first, end = Ending(), Ending()
        master.submit("a", toy_sft(target_jobs=2), on_end=first)
        assert first.wait()["status"] == "completed" and master.alarms() == []
        folder = config.run_dir / "tenants" / "a"
        before = sorted(path.name for path in folder.iterdir())
        low = {"task": "sft", "dataset": {"name": "toy"}, "target_jobs": 5, "eval": {"episodes": 0}}

        started = threading.Event()
        heard = master.runtime.tenancy.on_metrics

        def on_metrics(row, step):
            heard(row, step)
            started.set()

        master.runtime.tenancy.on_metrics = on_metrics
        master.submit("a", low, on_end=end)
        assert started.wait(60)
        disk = Disk(monkeypatch)
        assert end.wait()["status"] == "completed", "a full disk does not end the workload"
        assert end.value["result"]["jobs"] == 5
        wait_for(lambda: master.runtime.events.problem is not None)
        told = "\n".join(master.alarms())
        assert "payload of tenant a" in told and "No space left" in told and "metrics of tenant a" in told
        assert "events.jsonl" in told
        assert len(master.metrics("a")) == len({row["id"] for row in master.metrics("a")}) >= 7, "readable from memory"
        owed = master.runtime.tenancy.unsaved()["a"]
        assert master.runtime.members["a"].saved[1] < master.runtime.slots["a"].policy_version == 7
        tries = owed.tries
        wait_for(lambda: owed.tries > tries)  # also while nobody trains
        assert not list(folder.glob(".tmp*")), "nothing half written is left"
        assert set(before) <= {path.name for path in folder.iterdir()}

        failed = Ending()
        master.submit("b", toy_sft(), on_end=failed)  # its first payload has to be there before it starts
        error = failed.wait()["error"]
        assert (error["type"], error["category"], error["retryable"]) == ("storage_full", "server", True)
        with pytest.raises(OSError, match="was not saved to"):
            master.export("a")
        assert future_error_to_json(OSError(errno.ENOSPC, "x"))["type"] == "storage_full"

        disk.full = False
        wait_for(lambda: not master.alarms())
        assert checkpoint.read_payload(folder).version == 7
        again = Ending()
        master.submit("b", toy_sft(target_jobs=1), on_end=again)
        assert again.wait()["status"] == "completed"
        rows = [json.loads(line)["id"] for line in (config.run_dir / "metrics" / "a.jsonl").read_text().splitlines()]
        assert rows == [row["id"] for row in master.metrics("a")]
    said = [r.getMessage() for r in caplog.records if "was not saved" in r.getMessage() and "'a'" in r.getMessage()]
    assert len(said) == 1 and disk.payloads > 2, "one message, however often it is tried"
    kinds = [event["kind"] for event in read_events(config.run_dir / "events.jsonl") if event["type"] == "point"]
    assert kinds.count("join") == 2, "events of the meantime are there"
    assert not [thread for thread in threading.enumerate() if thread.name == "unwritten"]


def test_a_stopping_server_tries_once_more_and_says_what_it_could_not_save(serve_config, monkeypatch):
    monkeypatch.setattr(tenancy, "SAVE_AGAIN_S", 1000.0)
    config = serve_config()
    with running(config) as master:
        master.create_tenant("a", toy_spec())
        end = Ending()
        master.submit("a", toy_sft(target_jobs=3), on_end=end)
        wait_for(lambda: master.runtime.slots["a"].policy_version > 0)
        disk = Disk(monkeypatch)
        end.wait()
        assert list(master.runtime.tenancy.unsaved()) == ["a"]
        disk.full = False
    assert not master.runtime.tenancy.unsaved(), "tried at the stop, whatever the pause"
    assert checkpoint.read_payload(config.run_dir / "tenants" / "a").version == 3


def test_a_workload_goes_on_after_a_restart_on_a_full_disk(serve_config, monkeypatch):
    config, work = serve_config("trainer.checkpoint_every_n_jobs=1"), {**toy_sft(target_jobs=30), "workload_id": "w1"}
    with running(config) as master:
        master.create_tenant("a", toy_spec())
        master.submit("a", work)
        wait_for(lambda: master.runtime.slots["a"].jobs_completed > 1)
    assert not checkpoint.read_payload(config.run_dir / "tenants" / "a").state["ended"]
    disk = Disk(monkeypatch)
    with running(config) as master:
        assert master.restore_tenant("a", toy_spec())["policy_version"] > 1
        end = Ending()
        master.submit("a", work, resume=True, on_end=end)
        assert end.wait()["status"] == "completed" and end.value["result"]["jobs"] == 30
        assert list(master.runtime.tenancy.unsaved()) == ["a"]
        disk.full = False
    assert checkpoint.read_payload(config.run_dir / "tenants" / "a").version == 30


def test_a_quarantined_tenant_leaves_the_run_also_when_its_error_cannot_be_written(serving, monkeypatch, caplog):
    with serving() as master:
        master.create_tenant("a", toy_spec())
        end = Ending()
        master.submit("a", toy_sft(target_jobs=10**6), on_end=end)
        wait_for(lambda: master.runtime.slots["a"].jobs_completed > 0)
        (master.runtime.run_dir / "errors").write_text("in the way of the folder")
        master.runtime.shared.quarantine("a", "loss is NaN", "Traceback: the details")
        assert end.wait()["status"] == "failed" and end.value["error"]["message"] == "loss is NaN"
    assert "the details" in caplog.text and "cannot be written" in caplog.text


# ------------------------------------------------------------------------------------------------- damaged payloads


def test_a_tenant_comes_back_from_its_newest_intact_payload(serve_config, caplog):
    config = serve_config("trainer.checkpoint_every_n_jobs=1", "trainer.keep_payloads=4")
    work, folder = {**toy_sft(target_jobs=4), "workload_id": "w1"}, config.run_dir / "tenants" / "a"
    with running(config) as master:
        master.create_tenant("a", toy_spec())
        end = Ending()
        master.submit("a", work, on_end=end)
        end.wait()
        whole = state_of(master, "a")
    newest = checkpoint.resolve_payload(folder)
    damaged = [path for path in checkpoint.list_payloads(folder) if path.name.startswith("v00000004")]
    assert newest in damaged
    for path in damaged:
        file = path / "optimizer.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    with running(config) as master:
        restored = master.restore_tenant("a", toy_spec())
        assert restored == {"policy_version": 3, "optimizer_steps": 12, "damaged": len(damaged)}
        assert newest.name in caplog.text and "goes on from v00000003" in caplog.text
        assert master.payload_path("a", 3).name == "v00000003"
        with pytest.raises(NotFound, match=r"version 4 is damaged; intact are: .*v00000003"):
            master.payload_path("a", 4)
        end = Ending()
        master.submit("a", work, resume=True, on_end=end)
        assert end.wait()["result"]["jobs"] == 4 and state_of(master, "a") == whole, "the bits of an undamaged run"
        assert checkpoint.is_intact(master.payload_path("a", 4))
    events = [e for e in read_events(config.run_dir / "events.jsonl") if e.get("kind") == "damaged_payload"]
    assert len(events) == 1 and events[0]["values"]["used"] == "v00000003"
    assert any(newest.name in line for line in events[0]["values"]["damaged"])

    for path in checkpoint.list_payloads(folder)[1:]:
        (path / "manifest.json").write_text("{")
    (checkpoint.list_payloads(folder)[0] / "state.json").write_text("{")
    with running(config) as master:
        with pytest.raises(Conflict, match="cannot be read"):
            master.restore_tenant("a", toy_spec())
        assert [p["name"] for p in master.payloads("a")] == [checkpoint.list_payloads(folder)[0].name]
        with pytest.raises(NotFound, match="intact are: none"):
            master.payload_path("a", 4)
        with pytest.raises(NotFound, match="unknown"):
            master.payloads("nobody")


def test_a_tenant_above_todays_limits_comes_back_within_them(serve_config):
    config = serve_config("limits.max_priority=1", "limits.max_weight=4", "trainer.checkpoint_every_n_jobs=1")
    spec, work = toy_spec(priority=1, weight=4.0), {**toy_sft(target_jobs=50), "workload_id": "w1"}
    with running(config) as master:
        master.create_tenant("a", spec)
        master.submit("a", work)
        wait_for(lambda: master.runtime.slots["a"].jobs_completed > 1)
    lower = serve_config("limits.max_priority=0", "limits.max_weight=2")
    with running(lower) as master:
        assert master.restore_tenant("a", spec)["policy_version"] > 0
        end = Ending()
        master.submit("a", work, resume=True, on_end=end)
        assert end.wait()["status"] == "completed"
        assert (master.runtime.slots["a"].spec.config.priority, master.runtime.slots["a"].spec.config.weight) == (
            0,
            2.0,
        )


# ---------------------------------------------------------------------------------------------------- files of lines


def test_lines_wait_for_room_up_to_a_bound_and_those_beyond_it_are_counted(tmp_path, monkeypatch):
    file = lines.LineFile(tmp_path / "a.jsonl", max_bytes=30)
    file.add("before")
    file.flush()
    disk = Disk(monkeypatch)
    for i in range(5):
        file.add(f"line {i} abcd")
        file.flush()
    assert "No space" in file.problem and file.lost == 2
    disk.full = False
    file.add("lost, there is no room in memory")
    file.flush()
    file.add("after")
    file.close()
    assert file.path.read_text().splitlines() == ["before", *(f"line {i} abcd" for i in range(3)), "after"]
    assert file.problem is None and file.lost == 3
    with pytest.raises(FileNotFoundError):
        lines.LineFile(tmp_path / "no" / "folder")


def test_the_event_log_outlives_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("nexus_lightning.monitoring.events.FLUSH_EVERY_S", 0.02)
    events = EventLog(tmp_path / "events.jsonl")
    disk = Disk(monkeypatch)
    events._lines.max_bytes = 400
    for i in range(10):
        events.span("actor", {"t": 1}, i, i + 1, kind="sft")
    wait_for(lambda: disk.lines > 3)
    assert events._flusher.is_alive() and "No space" in events.problem and events.busy_seconds()["actor"] == {"t": 10.0}
    disk.full = False
    wait_for(lambda: events.problem is None)
    events.point("later", None)
    events.close()
    found = read_events(events.path)
    spans, lost = [e for e in found if e["type"] == "span"], [e for e in found if e.get("kind") == "events_lost"]
    assert 0 < len(spans) < 10 and [e["values"]["count"] for e in lost] == [10 - len(spans)]
    assert found[-1]["kind"] == "later"


def test_metrics_outlive_a_full_disk(tmp_path, monkeypatch):
    log = MetricLog(tmp_path / "t.jsonl", history=50)
    log.add({"loss": 0.0})
    disk = Disk(monkeypatch)
    assert [log.add({"loss": float(i)}) for i in range(1, 4)] == [2, 3, 4]
    assert "No space" in log.problem and len(log.rows()) == 4 and len(log.path.read_text().splitlines()) == 1
    log._file.max_bytes = 1  # what memory cannot keep for the file either
    log.add({"loss": 4.0})
    disk.full = False
    log.flush()
    assert log.problem is None
    log.close()
    again = MetricLog(log.path, history=50)
    assert [row["id"] for row in again.rows()] == [1, 2, 3, 4, 5], "the file is made anew from the rows in memory"
    again.close()


# ------------------------------------------------------------------------------------------------ the run folder


def test_a_second_server_is_refused_before_it_touches_the_folder_of_the_first(serve_config, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("serve_script", ROOT / "scripts" / "serve.py")
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve_script", script)
    spec.loader.exec_module(script)
    monkeypatch.setattr("nexus_lightning.services.store.LOCK_TIMEOUT_S", 0.05)
    config = serve_config()
    store = Store(config.run_dir / "services")
    files = {"config.yaml": b"of the first\n", "events.jsonl": b'{"type": "point"}\n{"half'}
    for name, content in files.items():
        (config.run_dir / name).write_bytes(content)
    config.limits.max_tenants = 3
    with socket.create_server(("127.0.0.1", 0)) as address:
        assert script.serve(config, address) == 2
    assert "another server" in capsys.readouterr().err
    assert {name: (config.run_dir / name).read_bytes() for name in files} == files
    store.close()


def test_local_users_read_nothing_of_a_run_folder(serving):
    with serving() as master:
        assert master.runtime.run_dir.stat().st_mode & 0o077 == 0
