"""The scheduler's journal: what kill -9 leaves, what a restart takes over, and what a disk that is full does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import tempfile
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant
from test_jobs import TENANTS, SchedulerMachine, ready, run_threads

from nexus_lightning.checkpoint import read_payload, resolve_payload
from nexus_lightning.queues.jobs import INTERRUPTED, Job, JobState, Scheduler
from nexus_lightning.queues.journal import FORMAT, Journal, JournalError
from nexus_lightning.trainer import train


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "jobs.sqlite"


@pytest.fixture
def opened(path):
    """``opened()`` -> a journal on ``path``; the one before it is closed, like that of a process that died."""
    journals: list[Journal] = []

    def open_() -> Journal:
        for journal in journals:
            journal.close()
        journals.append(Journal(path))
        return journals[-1]

    yield open_
    for journal in journals:
        journal.close()


def rows(path: Path) -> dict[str, dict]:
    """job id -> the job as the file has it, read by plain sqlite3."""
    with closing(sqlite3.connect(path)) as db:
        return {job_id: json.loads(text) for job_id, text in db.execute("SELECT job_id, job FROM jobs")}


def train_one(scheduler: Scheduler, tenant: str) -> Job:
    leased = scheduler.lease_next({tenant: 0}, timeout_s=0, deadline_s=60)
    assert leased is not None
    return scheduler.complete(leased.job_id, lease_id=leased.lease_id, policy_version=1)


class JournalledMachine(SchedulerMachine):
    """The scheduler's own random test, on a journal that must hold exactly what the scheduler says after every step."""

    def build(self, **arguments) -> Scheduler:
        self.folder = tempfile.TemporaryDirectory()
        self.journal = Journal(Path(self.folder.name) / "jobs.sqlite")
        return Scheduler(**arguments, journal=self.journal)

    @invariant()
    def the_file_says_the_same(self) -> None:
        if not hasattr(self, "journal"):
            return
        saved = self.journal.read(10_000)
        assert saved.in_flight == sorted(self.scheduler._jobs.values(), key=lambda job: job.created_seq)
        assert saved.ended == self.scheduler.history
        assert saved.seq == self.scheduler.state_dict()["seq"]
        assert saved.tenants.keys() == TENANTS.keys()
        for tenant in TENANTS:
            ended = {
                state: count for state, count in self.scheduler.counts()[tenant].items() if JobState(state).terminal
            }
            assert {state: saved.tenants[tenant]["ended"].get(state, 0) for state in ended} == ended

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.journal.close()
            self.folder.cleanup()


JournalledMachine.TestCase.settings = settings(
    max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestJournalledMachine = JournalledMachine.TestCase


def work_until_killed(path: Path, acknowledged) -> None:
    """A process that trains jobs of two tenants from two threads and says, after each call, what it was promised."""
    scheduler = Scheduler(journal=Journal(path))
    for tenant in ("a", "b"):
        scheduler.register(tenant, "sft", max_in_flight=3)
    lock = threading.Lock()

    def say(job: Job) -> None:
        with lock:
            os.write(acknowledged.fileno(), f"{job.job_id} {job.state.value}\n".encode())

    def work(tenant: str) -> None:
        while True:
            while (job := scheduler.reserve(tenant, 2)) is not None:
                say(job)
                say(scheduler.mark(job.job_id, JobState.READY))
            leased = scheduler.lease_next({tenant: 0}, timeout_s=1, deadline_s=60)
            assert leased is not None
            say(leased)
            say(scheduler.complete(leased.job_id, lease_id=leased.lease_id))

    for tenant in ("a", "b"):
        threading.Thread(target=work, args=(tenant,), daemon=True).start()
    threading.Event().wait()


def test_kill_9_loses_nothing_that_was_acknowledged(path, opened):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work_until_killed, args=(path, sender))
    process.start()
    sender.close()
    said = b""
    while said.count(b"\n") < 200:
        said += os.read(receiver.fileno(), 4096)
    os.kill(process.pid, signal.SIGKILL)
    while more := os.read(receiver.fileno(), 65536):
        said += more
    receiver.close()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    promised = [line.split() for line in said.decode().splitlines()]

    scheduler = Scheduler(journal=opened())
    for tenant in ("a", "b"):
        scheduler.register(tenant, "sft", max_in_flight=3)
    for job_id, state in promised:
        assert state in scheduler.get(job_id).timestamps, f"{job_id}: {state} was acknowledged and is gone"
    completed = {job_id for job_id, state in promised if state == "completed"}
    assert completed and all(scheduler.get(job_id).state == JobState.COMPLETED for job_id in completed)
    # a thread may have been killed between the commit and its word: at most one transition each
    counts = [scheduler.completed(tenant) for tenant in ("a", "b")]
    assert len(completed) <= sum(counts) <= len(completed) + 2
    ended = scheduler.history
    assert {(job.state, job.reason) for job in ended} <= {(JobState.COMPLETED, ""), (JobState.FAILED, INTERRUPTED)}
    assert sum(scheduler.leased_samples(tenant) for tenant in ("a", "b")) == 2 * sum(counts), "no unfinished lease"
    new = scheduler.reserve("a", 1)
    assert new is not None and new.created_seq > max(job.created_seq for job in ended)
    assert new.job_id not in {job.job_id for job in ended}


def test_a_restart_takes_over_counters_sequences_and_shares(opened):
    before = Scheduler(journal=opened())
    before.register("a", "sft", target_jobs=2, weight=2)
    before.register("b", "rl", max_in_flight=2)
    done = ready(before, "a", samples=5)
    train_one(before, "a")
    lost = [ready(before, "b", samples=7, version=0), before.reserve("b", 3, behavior_policy_version=0)]
    leased = before.lease_next({"b": 0}, 0, 60)
    assert leased is not None and before.leased_samples("b") == 7
    old = {tenant: before._tenants[tenant] for tenant in ("a", "b")}

    ended: list[Job] = []
    after = Scheduler(on_terminal=ended.append, journal=opened())
    assert [job.job_id for job in after.history] == [done.job_id, *(job.job_id for job in lost)]
    assert after.get(done.job_id).metadata == {"policy_version": 1}
    for job in lost:
        assert (after.get(job.job_id).state, after.get(job.job_id).reason) == (JobState.FAILED, "interrupted")
        assert after.get(job.job_id).lease_id is None
    assert ended == [], "their partitions died with the process"
    after.register("a", "sft", target_jobs=2, weight=2)
    after.register("b", "rl", max_in_flight=2)
    assert after.completed("a") == 1 and after.leased_samples("a") == 5
    assert after.counts()["b"]["failed"] == 2 and after.leased_samples("b") == after.in_flight("b") == 0
    assert [after._tenants[t].share_offset for t in "ab"] == [old[t].share_offset for t in "ab"]
    assert not {after._tenants[t].policy_key for t in "ab"} & {old[t].policy_key for t in "ab"}
    job = ready(after, "a")
    assert job.created_seq > lost[1].created_seq and job.ready_seq > leased.ready_seq
    assert after.reserve("a", 1) is None, "one of the two was done before the restart"

    # a third process finds the same: what the second one did is in the file too
    third = Scheduler(journal=opened())
    third.register("b", "rl")
    assert third.counts()["b"]["failed"] == 2 and third.get(job.job_id).reason == "interrupted"
    assert third.counts().keys() == {"b"}


def test_a_tenant_that_left_starts_anew_after_a_restart(opened):
    before = Scheduler(journal=opened())
    before.register("t", "sft")
    ready(before, "t")
    train_one(before, "t")
    before.unregister("t")
    after = Scheduler(journal=opened())
    after.register("t", "sft")
    assert after.completed("t") == 0 and len(after.history) == 1


def test_counters_of_a_checkpoint_have_the_last_word(opened):
    """Weights are those of the checkpoint: jobs that were completed after it must be trained again."""
    before = Scheduler(journal=opened())
    before.register("t", "sft", target_jobs=3)
    ready(before, "t", samples=5)
    train_one(before, "t")
    checkpoint = json.loads(json.dumps(before.state_dict()))
    for _ in range(2):
        ready(before, "t", samples=5)
        last = train_one(before, "t")
    assert not before.wants_more("t")

    def resumed(state: dict | None) -> Scheduler:
        scheduler = Scheduler(journal=opened())
        scheduler.register("t", "sft", target_jobs=3)
        if state is not None:
            scheduler.load_state_dict(state)
        return scheduler

    after = resumed(checkpoint)
    assert after.completed("t") == 1 and after.leased_samples("t") == 5
    new = after.reserve("t", 1)
    assert new is not None and new.created_seq > last.created_seq, "but sequence numbers never go back"
    assert resumed(None).completed("t") == 1, "and the journal has it from there"


def test_a_tenant_that_the_checkpoint_does_not_know_starts_fresh(opened):
    """It joined after the checkpoint and its weights died with the process, whatever the journal counted."""
    before = Scheduler(journal=opened())
    before.register("old", "sft")
    ready(before, "old", samples=5)
    train_one(before, "old")
    checkpoint = before.state_dict()
    before.register("new", "sft")
    ready(before, "new", samples=5)
    train_one(before, "new")
    after = Scheduler(journal=opened())
    for tenant in ("new", "old"):
        after.register(tenant, "sft")
    assert after.completed("new") == 1
    after.load_state_dict(checkpoint)
    assert after.completed("new") == after.leased_samples("new") == 0 and after.completed("old") == 1
    assert after._tenants["new"].share == after._tenants["old"].share == 5, "and crowds nobody out"


def test_history_is_bounded_but_counters_are_not(opened):
    before = Scheduler(journal=opened(), history=2)
    before.register("t", "sft")
    jobs = [ready(before, "t") and train_one(before, "t") for _ in range(5)]
    after = Scheduler(journal=opened(), history=2)
    after.register("t", "sft")
    assert [job.job_id for job in after.history] == [job.job_id for job in jobs[-2:]] and after.completed("t") == 5


def test_concurrent_threads_write_every_transition(path, opened):
    scheduler = Scheduler(journal=opened())
    tenants = ("a", "b", "c")
    for tenant in tenants:
        scheduler.register(tenant, "sft", target_jobs=30)

    def produce(tenant: str) -> None:
        while scheduler.wants_more(tenant):
            if scheduler.wait_for_room(tenant, 0.05) and (job := scheduler.reserve(tenant, 2)):
                scheduler.mark(job.job_id, JobState.READY)

    def consume() -> None:
        while not scheduler.targets_met():
            job = scheduler.lease_next(dict.fromkeys(tenants, 0), timeout_s=0.05, deadline_s=60)
            if job is not None:
                scheduler.complete(job.job_id, lease_id=job.lease_id)

    run_threads(*(lambda t=t: produce(t) for t in tenants), consume, consume)
    expected = {job.job_id: job for job in scheduler.history}
    opened().close()
    found = rows(path)
    assert {job_id: Job(**row) for job_id, row in found.items()} == expected and len(found) == 90


def test_a_full_disk_is_one_clear_error_and_nothing_goes_on(path, opened):
    journal = opened()
    scheduler = Scheduler(journal=journal)
    scheduler.register("t", "sft", max_in_flight=10**6)
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count={pages + 2}")
    kept = []
    with pytest.raises(JournalError, match="disk is full") as caught:
        while True:
            kept.append(scheduler.reserve("t", 1, metadata={"note": "x" * 500}))
    assert kept and str(path) in str(caught.value) and "tenant 't'" in str(caught.value)
    with pytest.raises(JournalError, match="disk is full"):
        scheduler.mark(kept[0].job_id, JobState.READY)
    for call in (
        lambda: scheduler.reserve("t", 1),
        lambda: scheduler.lease_next({"t": 0}, timeout_s=5, deadline_s=60),
        lambda: scheduler.lease_stage(JobState.NEEDS_ADVANTAGES, 60),
        lambda: scheduler.fail_all("t", "because"),
    ):
        with pytest.raises(JournalError) as again:
            call()
        assert str(again.value) == str(caught.value), "every later call says what went wrong first"
    after = Scheduler(journal=opened())
    assert {job.job_id for job in after.history} == {job.job_id for job in kept}, "all that was acknowledged is there"


def test_metadata_that_json_cannot_hold_names_the_job(opened):
    scheduler = Scheduler(journal=opened())
    scheduler.register("t", "sft")
    with pytest.raises(JournalError, match=r"tenant 't', job .* becoming reserved: .*not JSON serializable"):
        scheduler.reserve("t", 1, metadata={"tensor": object()})


def test_one_owner_at_a_time(path):
    first = Journal(path)
    context = multiprocessing.get_context("fork")
    result = context.SimpleQueue()

    def second() -> None:
        try:
            Journal(path)
        except JournalError as error:
            result.put(str(error))
        else:
            result.put("opened")

    process = context.Process(target=second)
    process.start()
    assert "is another run using this folder" in result.get()
    process.join(10)
    first.close()
    Journal(path).close()


def test_a_file_that_is_no_journal_is_refused(path):
    path.write_text("this is not a database, and it is longer than a header of one hundred bytes ... " * 3)
    with pytest.raises(JournalError, match="file is not a database"):
        Journal(path)
    path.unlink()
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version={FORMAT + 1}")
    with pytest.raises(JournalError, match=f"has format {FORMAT + 1}"):
        Journal(path)
    with pytest.raises(JournalError, match="unable to open database file"):
        Journal(path / "missing" / "jobs.sqlite")


def test_after_close_nothing_is_accepted(opened):
    journal = opened()
    scheduler = Scheduler(journal=journal)
    scheduler.register("t", "sft")
    journal.close()
    journal.close()
    with pytest.raises(JournalError, match="is closed"):
        scheduler.reserve("t", 1)


def test_a_run_keeps_its_journal_and_resumes_from_the_checkpoint(compose, tmp_path):
    """Jobs that the journal saw after the last checkpoint are trained again: their weights are gone."""

    def config(**changes):
        built = compose("+tenants=[toy_sft]", "trainer.enable_progress_bar=false", "queues.training.journal=true")
        built.backbone = {"_target_": "fakes.FakeBackbone"}
        tenant = built.tenants["toy_sft"]
        tenant.eval = replace(tenant.eval, episodes=0)
        tenant.environment = None if tenant.dataset.record is None else tenant.environment
        tenant.dataset.record.episodes, tenant.dataset.record.workers = 4, 1
        tenant.target_jobs = 4
        built.trainer.max_jobs, built.ckpt_path = changes.get("max_jobs"), changes.get("ckpt_path")
        return built

    stopped = train(config(max_jobs=2))
    path = Path(stopped["run_dir"]) / "jobs.sqlite"
    states = [row["state"] for row in rows(path).values()]
    assert states.count("completed") == 2 and set(states) <= {"completed", "failed", "reserved", "ready"}

    # one more job is trained and recorded, then the process dies before its checkpoint
    journal = Journal(path)
    scheduler = Scheduler(journal=journal)
    scheduler.register("toy_sft", "sft")
    ready(scheduler, "toy_sft")
    train_one(scheduler, "toy_sft")
    assert scheduler.completed("toy_sft") == 3
    journal.close()

    resumed = train(config(ckpt_path=stopped["run_dir"]))
    assert resumed["tenants"]["toy_sft"]["jobs_completed"] == 4
    payload = read_payload(resolve_payload(Path(resumed["run_dir"]) / "tenants" / "toy_sft"))
    assert payload.state["policy_version"] == 4
    found = rows(path)
    assert sum(row["state"] == "completed" for row in found.values()) == 2 + 1 + 2, "the lost one is still on record"
    assert len({row["created_seq"] for row in found.values()}) == len(found)
    with closing(sqlite3.connect(path)) as db:
        counters = json.loads(db.execute("SELECT value FROM counters WHERE name = 'tenant/toy_sft'").fetchone()[0])
    assert counters["ended"]["completed"] == 4
