"""The store: what is on disk before an answer, and after kill -9."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from nexus_lightning.services import store as store_module
from nexus_lightning.services.metrics import MetricLog
from nexus_lightning.services.store import Store, StoreError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.add_owner("o1", "alice", "tenant")
    store.add_tenant("t1", "o1", "arm", {"head": {"name": "mlp"}})
    yield store
    store.close()


def test_only_one_server_per_folder_and_only_its_own_format(store, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "LOCK_TIMEOUT_S", 0.05)
    with pytest.raises(StoreError, match="another server"):
        Store(tmp_path)
    store.close()
    db = sqlite3.connect(tmp_path / "services.sqlite")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="format 99"):
        Store(tmp_path)


def test_files_are_private(store, tmp_path):
    for path in (tmp_path, *tmp_path.glob("services.sqlite*")):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "services.sqlite-wal").exists()


def test_a_transaction_that_meets_a_full_disk_is_undone_and_the_next_one_goes_on(store):
    """SQLite's own limit of pages gives the error of a full disk."""
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            store.add_tenant("t2", "o1", "second", {"text": "x" * 100_000})
    assert "full" in store.problem and [t["tenant_id"] for t in store.tenants()] == ["t1"]
    store._db.execute("PRAGMA max_page_count = 100000")
    store.add_tenant("t2", "o1", "second", {"text": "x" * 100_000})
    assert store.problem is None and len(store.tenants()) == 2


def test_a_number_is_used_once_and_an_end_is_final(store):
    store.accept("f1", "t1", 1, "train_batch", "d", None)
    with pytest.raises(sqlite3.IntegrityError):
        store.accept("f2", "t1", 1, "train_batch", "d", None)
    store.end("f1", "completed", result={"loss": 1.0})
    store.end("f1", "failed", error={"type": "x"})
    row = store.request("f1")
    assert (row["status"], row["result"], row["error"]) == ("completed", {"loss": 1.0}, None)


def test_names_are_free_again_after_deletion_but_ids_are_not(store):
    with pytest.raises(sqlite3.IntegrityError):
        store.add_tenant("t2", "o1", "arm", {})
    store.accept("f1", "t1", 1, "export_params", "d", None, workload=("w1", {}))
    store.write_result("f1", b"x")
    store.end("f1", "completed", data_bytes=1)
    store.drop_tenant("t1")
    assert store.tenants() == [] and store.request("f1") is None and not store.result_path("f1").exists()
    store.add_tenant("t2", "o1", "arm", {})
    with pytest.raises(sqlite3.IntegrityError):
        store.add_tenant("t1", "o1", "other", {})


def test_delivered_results_lose_their_content_and_keep_their_row(store):
    store.accept("f1", "t1", 1, "export_params", "d", None)
    store.write_result("f1", b"x")
    store.end("f1", "completed", result={"a": 1}, data_bytes=1)
    assert store.drop_delivered(1e12) == []
    store.deliver(["f1"], 5.0)
    store.deliver(["f1"], 9.0)  # the first time counts
    assert store.drop_delivered(5.0) == []
    assert [row["future_id"] for row in store.drop_delivered(6.0)] == ["f1"]
    row = store.request("f1")
    assert row["dropped"] and row["result"] is None and not store.result_path("f1").exists()
    assert store.drop_delivered(1e12) == []


def test_audit_keeps_the_newest_rows(store, monkeypatch):
    monkeypatch.setattr(store_module, "AUDIT_ROWS", 5)
    for i in range(12):
        store.audit("o1", "create_tenant", f"t{i}", "ok")
    assert [row["target"] for row in store.audit_rows()] == [f"t{i}" for i in range(7, 12)]


def test_check_writes_nothing(store):
    before = (store.folder / "services.sqlite-wal").stat().st_size
    store.check()
    assert store.audit_rows() == []
    assert (store.folder / "services.sqlite-wal").stat().st_size > before, "the disk was asked"


def test_kill_9_loses_nothing_that_was_returned(tmp_path):
    """A process writes, says so after each call, and kills itself in the middle."""
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from nexus_lightning.services.store import Store
store = Store(Path({str(tmp_path)!r}))
store.add_owner("o1", "alice", "tenant")
store.add_tenant("t1", "o1", "arm", {{}})
for seq in range(1, 21):
    store.accept(f"f{{seq}}", "t1", seq, "verb", "d", None)
    if seq % 2:
        store.write_result(f"f{{seq}}", b"x" * seq)
        store.end(f"f{{seq}}", "completed", data_bytes=seq)
print("all", flush=True)
os.kill(os.getpid(), 9)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "all\n" and result.returncode == -9, result.stderr
    store = Store(tmp_path)
    rows = store.requests("t1")
    assert [row["seq"] for row in rows] == list(range(1, 21))
    assert [row["status"] for row in rows] == ["completed", "pending"] * 10
    assert all(store.result_path(r["future_id"]).stat().st_size == r["data_bytes"] for r in rows if r["seq"] % 2)
    store.close()


def test_a_tenants_metrics_do_not_grow_for_ever(tmp_path):
    log = MetricLog(tmp_path / "t.jsonl", history=5)
    for i in range(23):
        assert log.add({"loss": float(i)}) == i + 1
        assert len(log.path.read_text().splitlines()) < 10
    log.close()
    again = MetricLog(log.path, history=5)
    assert [row["metrics"]["loss"] for row in again.rows()] == [18.0, 19.0, 20.0, 21.0, 22.0]
    assert again.add({"loss": 23.0}) == 24, "the numbers go on"
    again.close()
