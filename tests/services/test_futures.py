"""The command log of a tenant: order, one execution, deadlines, results, restart. Functions stand in for the master."""

from __future__ import annotations

import asyncio
import errno
import random
import sqlite3
import threading
import time

import pytest

from nexus_lightning.services.errors import Conflict, FutureCancelled, Gone, InvalidRequest, NotFound, QuotaExceeded
from nexus_lightning.services.futures import Futures, Outcome, Request
from nexus_lightning.services.store import Store


class Log:
    """Futures over a store in a folder, with one tenant of each of two owners."""

    def __init__(self, folder, **settings) -> None:
        self.folder, self.settings = folder, {"max_in_flight": 100, "max_result_bytes": 1 << 20, "grace_s": 60.0}
        self.settings |= settings
        self.store = Store(folder)
        if not self.store.owners():
            for one in "ab":
                self.store.add_owner(f"o{one}", one, "tenant")
                self.store.add_tenant(f"t{one}", f"o{one}", "arm", {})
        self.offset_s = 0.0
        self.futures = Futures(self.store, clock=self.now, **self.settings)
        self.left = {one: self.futures.open_tenant(f"t{one}", f"o{one}") for one in "ab"}
        self.done: list = []

    def now(self) -> float:
        return time.time() + self.offset_s

    def advance(self, seconds: float) -> None:
        self.offset_s += seconds
        with self.futures._wake:
            self.futures._wake.notify()

    def accept(self, seq, run=None, *, digest=None, tenant="ta", **settings):
        def note(request: Request):
            self.done.append(request.seq)
            return Outcome({"seq": request.seq})

        return self.futures.accept(tenant, seq, "verb", digest or f"d{seq}", run or note, **settings)["future_id"]

    def ended(self, future_id, owner="oa"):
        [shown] = asyncio.run(self.futures.wait(owner, [future_id], 20.0))
        assert shown["status"] in ("completed", "failed", "cancelled"), shown
        return shown

    def close(self) -> None:
        self.futures.close()
        self.store.close()


@pytest.fixture
def log(tmp_path):
    log = Log(tmp_path)
    yield log
    log.close()


def test_executed_in_order_of_numbers_not_of_arrival(log):
    last = [log.accept(seq) for seq in (3, 5, 2, 4)]
    assert log.done == []
    assert log.futures.show("oa", last[0])["queue_state"] == "waiting_for_seq_1"
    log.accept(1)
    assert log.ended(last[1])["result"] == {"seq": 5}
    assert log.done == [1, 2, 3, 4, 5] and log.futures.next_seq("ta") == 6


def test_the_same_request_runs_once_and_other_content_is_a_conflict(log):
    first = log.accept(1)
    assert log.ended(first)["status"] == "completed"
    assert log.accept(1) == first, "after its end"
    waiting = log.accept(3)
    assert log.accept(3) == waiting, "before its start"
    with pytest.raises(Conflict, match="other content"):
        log.accept(1, digest="else")
    with pytest.raises(Conflict, match="other content"):
        log.accept(3, digest="else")
    log.accept(2)
    log.ended(waiting)
    assert log.done == [1, 2, 3]


def test_many_senders_of_one_request_get_one_execution(log):
    found = []
    threads = [threading.Thread(target=lambda: found.append(log.accept(1))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.ended(found[0])
    assert len(set(found)) == 1 and log.done == [1]


def test_any_interleaving_of_senders_and_repetitions_gives_each_tenants_order_once(log):
    rng, futures, lock = random.Random(0), {}, threading.Lock()
    done = {"ta": [], "tb": []}
    sent = [(tenant, seq) for tenant in done for seq in range(1, 41) for _ in range(rng.randrange(1, 4))]
    rng.shuffle(sent)

    def run(request):
        done[request.tenant_id].append(request.seq)
        return Outcome({"seq": request.seq})

    def work():
        while True:
            with lock:
                if not sent:
                    return
                tenant, seq = sent.pop()
            future = log.accept(seq, run, tenant=tenant)
            with lock:
                futures.setdefault((tenant, seq), set()).add(future)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for tenant, owner in (("ta", "oa"), ("tb", "ob")):
        for seq in range(1, 41):
            [future] = futures[tenant, seq]
            assert log.ended(future, owner)["result"] == {"seq": seq}
    assert done == {"ta": list(range(1, 41)), "tb": list(range(1, 41))}


def test_without_a_number_the_lowest_free_one_is_taken(log):
    log.accept(2)
    assert log.futures.next_seq("ta") == 1
    futures = [log.accept(None) for _ in range(2)]
    assert log.ended(futures[1])["seq"] == 3 and log.done == [1, 2, 3]


def test_a_gap_that_is_not_filled_ends_with_its_reason_and_blocks_nobody(log):
    late = log.accept(3, gap_by_s=log.now() + 100)
    filled = log.accept(2, tenant="tb", gap_by_s=log.now() + 100)
    other = log.accept(1, tenant="tb")
    assert log.ended(other, "ob")["status"] == "completed"
    log.ended(filled, "ob")
    log.advance(101)
    error = log.ended(late)["error"]
    assert (error["type"], error["category"], error["retryable"]) == ("sequence_gap", "user", True)
    assert "waited for 1" in error["message"]
    for seq in (1, 2, 4):
        last = log.accept(seq)
    log.ended(last)
    assert log.done == [1, 2, 1, 2, 4], "3 is used up and nobody waits for it"
    assert log.accept(3) == late


def test_a_deadline_ends_what_waits_and_what_runs(log):
    block, started, stopped = threading.Event(), threading.Event(), []

    def slow(request):
        started.set()
        assert block.wait(60)
        return Outcome({}, b"late")

    running = log.accept(1, slow, deadline_s=log.now() + 100)
    waiting = log.accept(2, deadline_s=log.now() + 100)
    assert started.wait(60)
    log.advance(101)
    error = log.ended(running)["error"]
    assert error["type"] == "deadline_exceeded" and "did not end" in error["message"]
    assert "did not start" in log.ended(waiting)["error"]["message"]
    later = log.accept(3)
    assert log.done == [], "3 must wait for the end of 1, whatever its future says"
    block.set()
    log.ended(later)
    assert log.done == [3]
    assert not log.store.result_path(running).exists(), "the late result is thrown away"
    long = log.accept(4, lambda request: None, long=True, cancel=lambda: stopped.append(1), deadline_s=log.now() + 100)
    log.ended(log.accept(5))
    log.advance(101)
    assert log.ended(long)["status"] == "failed"
    while not stopped:
        time.sleep(0.01)


def test_a_long_request_lets_the_next_start_and_ends_later(log):
    long = log.accept(1, lambda request: None, long=True)
    log.ended(log.accept(2))
    assert log.futures.show("oa", long)["status"] == "running"
    log.futures.complete(long, Outcome({"jobs": 4}))
    log.futures.fail(long, RuntimeError("a second end is ignored"))
    assert log.ended(long)["result"] == {"jobs": 4}


def test_failures_are_told_apart_and_do_not_stop_the_log(log):
    def wrong(request):
        raise InvalidRequest("action: [B, T, A]", ["got [B]"])

    def broken(request):
        raise ZeroDivisionError("/home/secret/path")

    user, server = log.ended(log.accept(1, wrong))["error"], log.ended(log.accept(2, broken))["error"]
    assert (user["category"], user["type"], user["details"]) == ("user", "invalid_request", ["got [B]"])
    assert server["category"] == "server" and server["retryable"] and "secret" not in str(server)
    assert log.ended(log.accept(3))["status"] == "completed"


def test_cancel(log):
    block, stopped = threading.Event(), []
    running = log.accept(1, lambda request: block.wait(20) and Outcome())
    waiting = log.accept(2)
    assert log.futures.cancel("oa", waiting)["status"] == "cancelled"
    while log.futures.show("oa", running)["status"] != "running":
        time.sleep(0.01)
    with pytest.raises(Conflict, match="cannot be taken back"):
        log.futures.cancel("oa", running)
    block.set()
    assert log.ended(running)["status"] == "completed"
    assert log.futures.cancel("oa", running)["status"] == "completed", "an end is an end"

    def stop():
        stopped.append(1)
        log.futures.fail(long, FutureCancelled("stopped", category="user", reason="cancelled"))

    long = log.accept(3, lambda request: None, long=True, cancel=stop)
    while log.futures.show("oa", long)["status"] != "running":
        time.sleep(0.01)
    assert log.futures.cancel("oa", long)["status"] == "cancelled" and stopped == [1]
    assert log.done == [], "the cancelled 2 never ran"


def test_only_the_owner_reads(log):
    future = log.accept(1)
    log.ended(future)
    for call in (log.futures.show, log.futures.cancel, log.futures.read_data):
        with pytest.raises(NotFound) as foreign:
            call("ob", future)
        with pytest.raises(NotFound) as unknown:
            call("ob", "f" + "0" * 32)
        assert foreign.value.message.replace(future, "") == unknown.value.message.replace("f" + "0" * 32, "")


def test_results_are_kept_until_read_and_for_a_grace_time(log):
    unread = log.accept(1)
    read = log.accept(2, lambda request: Outcome({"x": 1}, b"arrays"))
    while log.futures.show("oa", read)["status"] != "completed":
        time.sleep(0.01)
    log.advance(1000)
    assert log.ended(read)["data_bytes"] == 6
    log.advance(1000)
    assert log.futures.read_data("oa", read) == b"arrays", "a status is not the arrays"
    assert log.futures.read_data("oa", read) == b"arrays", "again, in the grace time"
    assert log.futures.show("oa", unread)["result"] == {"seq": 1}, "nobody has read it"
    log.advance(61)
    end_s = time.monotonic() + 60
    while log.store.result_path(read).exists() and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not log.store.result_path(read).exists()
    with pytest.raises(Gone):
        log.futures.show("oa", read)
    assert log.accept(2, lambda request: Outcome()) == read, "its number stays used"
    assert log.futures.show("oa", unread)["result"] == {"seq": 1}


def test_quotas_count_one_owner_alone(tmp_path):
    log = Log(tmp_path, max_in_flight=2, max_result_bytes=10)
    try:
        first = [log.accept(seq) for seq in (2, 3)]
        with pytest.raises(QuotaExceeded, match="2 requests"):
            log.accept(4)
        assert log.accept(2) == first[0], "a repetition is not a new request"
        log.ended(log.accept(1, lambda request: Outcome({}, b"x" * 11), tenant="tb"), "ob")
        with pytest.raises(QuotaExceeded, match="11 bytes"):
            log.accept(2, tenant="tb")
        for future in first:
            log.futures.cancel("oa", future)
        log.ended(log.accept(1))
        large = log.accept(9, body_bytes=11)
        with pytest.raises(QuotaExceeded, match="11 bytes"):
            log.accept(10)
        log.futures.cancel("oa", large)
        log.accept(10)
    finally:
        log.close()


def test_waiting_for_many_wakes_at_the_first_end_and_leaves_nothing_behind(log):
    waiting = [log.accept(seq) for seq in range(2, 60)]

    async def main():
        calls = [log.futures.wait("oa", waiting[i:], 20.0) for i in range(40)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        while sum(map(len, log.futures._waiters.values())) < sum(len(waiting[i:]) for i in range(40)):
            await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
        log.accept(1)
        return await asyncio.gather(*tasks)

    found = asyncio.run(main())
    assert all(any(one["status"] == "completed" for one in shown) for shown in found)
    assert log.futures._waiters == {}
    [shown] = asyncio.run(log.futures.wait("oa", [log.accept(100)], 0.05))
    assert shown["status"] == "pending" and log.futures._waiters == {}, "a wait that ran out"


def test_a_restart_goes_on_with_workloads_and_ends_the_rest_as_retryable(tmp_path):
    log = Log(tmp_path)
    done = log.accept(1)
    log.ended(done)
    long = log.accept(2, lambda request: None, long=True, workload=("w1", {"task": "sft"}))
    lost = log.accept(4)
    later = log.accept(5, workload=("w2", {"task": "rl"}))
    while log.futures.show("oa", long)["status"] != "running":
        time.sleep(0.01)
    log.close()

    log = Log(tmp_path)
    try:
        rows = {row["future_id"]: row | {"tenant_id": "ta"} for row in log.left["a"]}
        assert list(rows) == [long, lost, later] and rows[long]["status"] == "running"
        assert log.futures.next_seq("ta") == 3
        ran = []
        for future, row in rows.items():
            request = None
            if row["workload_id"]:
                request = Request(future, "ta", row["seq"], row["verb"], lambda r: ran.append(r.seq), long=True)
            log.futures.recover(request, row, "the server restarted")
        error = log.ended(lost)["error"]
        assert (error["type"], error["category"], error["retryable"]) == ("server_restarted", "server", True)
        assert log.accept(2) == long and log.accept(4) == lost, "retries find what they sent before the restart"
        assert log.futures.show("oa", later)["queue_state"] == "waiting_for_seq_3"
        log.accept(3)
        log.futures.complete(long, Outcome({"jobs": 9}))
        assert log.ended(long)["result"] == {"jobs": 9}
        while 5 not in ran:
            time.sleep(0.01)
        assert ran == [2, 5] and log.done == [3]
    finally:
        log.close()


class FullDisk:
    """In the place of a function of the store: fails ``times`` times as on a full disk, then is itself again."""

    def __init__(self, monkeypatch, store, name, times, error=None) -> None:
        self.left, self.real = times, getattr(store, name)
        self.error = error or sqlite3.OperationalError("database or disk is full")
        monkeypatch.setattr(store, name, self)

    def __call__(self, *args, **kwargs):
        if self.left > 0:
            self.left -= 1
            raise self.error
        return self.real(*args, **kwargs)


@pytest.mark.parametrize("name", ["end", "write_result"])
def test_an_end_that_cannot_be_written_is_tried_again_and_the_future_ends_once(
    tmp_path, monkeypatch, caplog, name, data=b"arrays"
):
    monkeypatch.setattr("nexus_lightning.services.futures.FIRST_RETRY_S", 100.0)
    log = Log(tmp_path)
    ends, error = [], OSError(errno.ENOSPC, "No space left on device") if name == "write_result" else None
    log.futures.on_end = lambda request, status, seconds: ends.append((request.seq, status))
    full = FullDisk(monkeypatch, log.store, name, 1, error)

    def train(request):
        log.done.append(request.seq)
        return Outcome({"policy_version": request.seq}, data if request.seq == 1 else None)

    try:
        first = log.accept(1, train, body_bytes=7)
        while log.futures.unsaved == 0:
            time.sleep(0.01)
        assert log.ended(log.accept(2, train))["result"] == {"policy_version": 2}, "the next number goes on"
        start = time.monotonic()
        [shown] = asyncio.run(log.futures.wait("oa", [first], 0.2))
        assert (shown["status"], shown["queue_state"]) == ("running", "saving_result")
        assert time.monotonic() - start >= 0.2, "a long poll waits for it"
        assert log.futures.cancel("oa", first)["status"] == "running", "its end is decided"
        assert log.accept(1, train) == first and log.futures.in_flight("oa") == 1 and ends == [(2, "completed")]
        full.left = 1
        log.advance(101)  # fails once more, and waits twice as long
        while log.futures._unsaved[first].end.tries < 2:
            time.sleep(0.01)
        log.advance(201)
        shown = log.ended(first)
        assert (shown["status"], shown["result"], shown["error"]) == ("completed", {"policy_version": 1}, None)
        assert log.futures.read_data("oa", first) == data
        assert ends == [(2, "completed"), (1, "completed")] and log.done == [1, 2]
        assert log.futures.in_flight("oa") == log.futures.unsaved == 0 and log.futures._bytes["oa"] == len(data)
        said = [r.getMessage() for r in caplog.records if first in r.getMessage() and r.levelname == "ERROR"]
        assert len(said) == 1 and "tried again" in said[0], "once, not at every try"
    finally:
        log.close()
    log = Log(tmp_path)
    assert log.left["a"] == [], "nothing to be executed again"
    log.close()


def test_an_end_that_waits_for_the_disk_is_written_at_the_close_or_goes_with_its_tenant(tmp_path, monkeypatch):
    monkeypatch.setattr("nexus_lightning.services.futures.FIRST_RETRY_S", 100.0)
    log = Log(tmp_path)
    full = FullDisk(monkeypatch, log.store, "end", 3)
    one, two = log.accept(1), log.accept(1, tenant="tb")
    cancelled = log.accept(5)
    while log.futures.unsaved < 2:
        time.sleep(0.01)
    shown = log.futures.cancel("oa", cancelled)
    assert (shown["status"], shown["queue_state"]) == ("pending", "saving_result")
    for seq in (2, 3, 4):
        log.ended(log.accept(seq))
    log.futures.close_tenant("tb")
    assert log.futures.unsaved == 2 and log.futures.in_flight("ob") == 0
    with pytest.raises(NotFound):
        log.futures.show("ob", two)
    assert full.left == 0
    log.close()
    log = Log(tmp_path)
    assert log.futures.show("oa", one)["result"] == {"seq": 1} and log.done == []
    assert log.futures.show("oa", cancelled)["status"] == "cancelled"
    assert log.left["a"] == []
    log.close()
