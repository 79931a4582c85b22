"""The scheduler: state machine as a whole (property-based), admission, order, staleness, leases, threads."""

import json
import threading
import time

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from nexus_lightning.queues.jobs import RECOVERY_JOBS, IllegalTransition, Job, JobState, LeaseLost, Scheduler

TENANTS = {
    "sft_a": dict(task_type="sft", max_in_flight=3, weight=1.0),
    "sft_b": dict(task_type="sft", max_in_flight=2, weight=2.0, target_jobs=4),
    "rl": dict(task_type="rl", priority=1, max_in_flight=2, max_policy_staleness=1),
    "offline": dict(task_type="offline_rl", max_in_flight=2, max_policy_staleness=3),
}
LEASED_STATES = (JobState.COMPUTING_ACTOR_FORWARD, JobState.COMPUTING_ADVANTAGES, JobState.LEASED)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ready(scheduler: Scheduler, tenant: str, samples: int = 8, version: int | None = None) -> Job:
    """A READY job of any task type."""
    job = scheduler.reserve(tenant, samples, behavior_policy_version=version)
    assert job is not None
    if job.task_type == "rl":
        scheduler.mark(job.job_id, JobState.NEEDS_ADVANTAGES)
        scheduler.lease_stage(JobState.NEEDS_ADVANTAGES, 60, tenant_id=tenant)
    return scheduler.mark(job.job_id, JobState.READY)


class SchedulerMachine(RuleBasedStateMachine):
    """Random producers and consumers; after each step the promises of the Scheduler docstring are checked."""

    reserved = Bundle("reserved")
    stage_leases = Bundle("stage_leases")
    leases = Bundle("leases")
    any_job = Bundle("any_job")

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.ended_calls: list[str] = []
        self.scheduler = self.build(on_terminal=lambda job: self.ended_calls.append(job.job_id), clock=self.clock)
        for name, rules in TENANTS.items():
            self.scheduler.register(name, **rules)
        self.versions = dict.fromkeys(TENANTS, 0)
        self.model: dict[str, Job] = {}
        self.seen_ended: dict[str, Job] = {}
        self.leased_samples = dict.fromkeys(TENANTS, 0)
        self.known: dict[str, int] = {}  # versions that the scheduler has been told
        self.window: dict[str, int] = {}  # of paced tenants; too few steps here for one to recover

    def bound(self, tenant: str) -> int:
        rules = TENANTS[tenant]
        bound = min(rules["max_in_flight"], rules.get("max_policy_staleness", 99) + 1)
        return min(bound, self.window.get(tenant, bound))

    def build(self, **arguments) -> Scheduler:
        return Scheduler(**arguments)

    def ready_jobs(self) -> list[Job]:
        jobs = [self.scheduler.get(job_id) for job_id in self.model]
        return [job for job in jobs if job.state == JobState.READY]

    @rule(target=reserved, tenant=st.sampled_from(sorted(TENANTS)), samples=st.integers(1, 9), lag=st.integers(0, 2))
    def reserve(self, tenant: str, samples: int, lag: int):
        before, done = self.scheduler.in_flight(tenant), self.scheduler.completed(tenant)
        rules = TENANTS[tenant]
        version = None if rules["task_type"] == "sft" else max(0, self.versions[tenant] - lag)
        job = self.scheduler.reserve(tenant, samples, behavior_policy_version=version)
        covered = done + before >= rules.get("target_jobs", 10**6)
        behind = 0 if version is None else self.known.get(tenant, version) - version
        too_old = "max_policy_staleness" in rules and behind + before > rules["max_policy_staleness"]
        assert self.scheduler.bound(tenant) == self.bound(tenant)
        assert (job is None) == (before >= self.bound(tenant) or covered or too_old)
        if job is None:
            return multiple()
        assert job.job_id not in self.model, "an id was used twice"
        assert all(part in job.partition_id for part in (job.job_id, tenant, job.task_type))
        self.model[job.job_id] = job
        return job.job_id

    @rule(job_id=consumes(reserved), optional=st.booleans())
    def produce(self, job_id: str, optional: bool) -> None:
        job = self.scheduler.get(job_id)
        if job.state.terminal:
            return
        first = JobState.NEEDS_ACTOR_FORWARD if optional else JobState.NEEDS_ADVANTAGES
        self.scheduler.mark(job_id, JobState.READY if job.task_type == "sft" else first)

    @rule(target=stage_leases, state=st.sampled_from([JobState.NEEDS_ACTOR_FORWARD, JobState.NEEDS_ADVANTAGES]))
    def lease_stage(self, state: JobState):
        job = self.scheduler.lease_stage(state, deadline_s=5)
        return multiple() if job is None else job

    @rule(job=consumes(stage_leases))
    def finish_stage(self, job: Job) -> None:
        after = JobState.NEEDS_ADVANTAGES if job.state == JobState.COMPUTING_ACTOR_FORWARD else JobState.READY
        self.with_lease(job, lambda: self.scheduler.mark(job.job_id, after, lease_id=job.lease_id))

    @rule(target=leases, names=st.sets(st.sampled_from(sorted(TENANTS)), min_size=1))
    def lease_next(self, names: set[str]):
        self.scheduler.expire()
        candidates = [job for job in self.ready_jobs() if job.tenant_id in names]
        stale = {
            job.job_id
            for job in candidates
            if job.behavior_policy_version is not None
            and self.versions[job.tenant_id] - job.behavior_policy_version > job.max_policy_staleness
        }
        fresh = [job for job in candidates if job.job_id not in stale]
        shares = {t: self.scheduler.leased_samples(t) / TENANTS[t].get("weight", 1.0) for t in TENANTS}
        leased = self.scheduler.lease_next({n: self.versions[n] for n in names}, timeout_s=0, deadline_s=5)
        self.known |= {job.tenant_id: self.versions[job.tenant_id] for job in candidates}
        for tenant in {job.tenant_id for job in candidates if job.job_id in stale}:
            self.window[tenant] = max(1, self.bound(tenant) // 2)
        for job_id in stale:
            assert self.scheduler.get(job_id).state == JobState.DROPPED
            assert self.scheduler.get(job_id).reason == "policy_stale"
        if not fresh:
            assert leased is None
            return multiple()
        expected = min(fresh, key=lambda job: (-job.priority, shares[job.tenant_id], job.ready_seq))
        assert leased is not None and leased.job_id == expected.job_id
        assert leased.ready_seq == min(job.ready_seq for job in fresh if job.tenant_id == leased.tenant_id)
        return leased

    @rule(job=consumes(leases))
    def complete(self, job: Job) -> None:
        def finish() -> None:
            self.scheduler.complete(job.job_id, lease_id=job.lease_id)
            self.versions[job.tenant_id] += 1

        self.with_lease(job, finish)

    @rule(job=leases)
    def renew(self, job: Job) -> None:
        now = self.scheduler.get(job.job_id)
        if now.state.terminal:
            assert not self.scheduler.renew(job, 5)
        elif job.lease_id in (now.lease_id, now.expired_lease_id):
            assert self.scheduler.renew(job, 5)
            held = self.scheduler.get(job.job_id)
            assert (held.state, held.lease_id) == (JobState.LEASED, job.lease_id)
            assert held.lease_deadline == self.clock.now + 5
            assert held.ready_seq == now.ready_seq
        else:
            with pytest.raises(LeaseLost):
                self.scheduler.renew(job, 5)

    def with_lease(self, job: Job, act) -> None:
        """``act`` works exactly as long as the lease is the current one."""
        now = self.scheduler.get(job.job_id)
        if now.state.terminal:
            with pytest.raises(IllegalTransition):
                act()
        elif now.lease_id != job.lease_id:
            with pytest.raises(LeaseLost):
                act()
            assert self.scheduler.get(job.job_id).state == now.state
        else:
            act()

    @precondition(lambda self: self.model)
    @rule(data=st.data(), how=st.sampled_from(["fail", "drop"]))
    def give_up(self, data, how: str) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.model)))
        before = self.scheduler.get(job_id)
        after = getattr(self.scheduler, how)(job_id, "because")
        assert after.state.terminal and (not before.state.terminal or after == before)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), state=st.sampled_from(list(JobState)))
    def illegal_marks_change_nothing(self, data, state: JobState) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.model)))
        before = self.scheduler.get(job_id)
        if before.state.terminal or state in (*LEASED_STATES, JobState.RESERVED) or state.terminal:
            with pytest.raises(ValueError, match=rf"(?s){before.state}.*cannot become {state}"):
                self.scheduler.mark(job_id, state)
            assert self.scheduler.get(job_id) == before

    @rule(seconds=st.sampled_from([1.0, 6.0]), expire=st.booleans())
    def pass_time(self, seconds: float, expire: bool) -> None:
        self.clock.now += seconds
        due = {j for j in self.model if (d := self.scheduler.get(j).lease_deadline) is not None and d <= self.clock.now}
        if expire:
            returned = self.scheduler.expire()
            assert {job.job_id for job in returned} == due
            assert all(job.state not in LEASED_STATES and job.lease_id is None for job in returned)

    @rule(tenant=st.sampled_from(["sft_a", "offline"]))
    def leave_and_come_back(self, tenant: str) -> None:
        self.scheduler.unregister(tenant)
        self.scheduler.register(tenant, **TENANTS[tenant])
        self.known.pop(tenant, None)
        self.window.pop(tenant, None)
        assert self.scheduler.in_flight(tenant) == self.scheduler.completed(tenant) == 0
        # A late joiner starts at the least share; the machine restarts everybody's to keep its own model simple.
        self.restart_shares()

    def restart_shares(self) -> None:
        for registration in self.scheduler._tenants.values():
            registration.share_offset, registration.leased_samples = 0.0, 0
        for job_id in self.model:
            job = self.scheduler.get(job_id)
            if job.state == JobState.LEASED:
                self.scheduler.fail(job_id, "restart of shares")

    @invariant()
    def promises(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        jobs = [self.scheduler.get(job_id) for job_id in self.model]
        for tenant, rules in TENANTS.items():
            in_flight = [job for job in jobs if job.tenant_id == tenant and not job.state.terminal]
            assert len(in_flight) == self.scheduler.in_flight(tenant) <= rules["max_in_flight"]
            if "target_jobs" in rules:
                assert self.scheduler.completed(tenant) + len(in_flight) <= rules["target_jobs"]
            assert sum(self.scheduler.counts()[tenant][s.value] for s in JobState if not s.terminal) == len(in_flight)
        held = [job.lease_id for job in jobs if job.lease_id is not None]
        assert len(held) == len(set(held)) == sum(job.state in LEASED_STATES for job in jobs)
        for tenant in (None, *TENANTS):
            ready_now = [job for job in jobs if job.state == JobState.READY and tenant in (None, job.tenant_id)]
            assert self.scheduler.depth(tenant) == len(ready_now)
        for job in jobs:
            if job.state.terminal:
                assert self.seen_ended.setdefault(job.job_id, job) == job, "an ended job changed"
        assert sorted(self.ended_calls) == sorted(self.seen_ended), "partition cleared exactly once per ended job"


SchedulerMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


def test_offline_data_cannot_flood_and_rl_goes_first() -> None:
    """Q1."""
    scheduler = Scheduler()
    scheduler.register("sft", "sft", max_in_flight=16)
    scheduler.register("rl", "rl", priority=1, max_in_flight=2)
    while scheduler.reserve("sft", 4) is not None:
        pass
    assert scheduler.in_flight("sft") == 16
    for job_id in list(scheduler._jobs):
        scheduler.mark(job_id, JobState.READY)
    ready(scheduler, "rl", version=0)
    leased = scheduler.lease_next({"sft": 0, "rl": 0}, timeout_s=0, deadline_s=60)
    assert leased is not None and leased.tenant_id == "rl"


def test_admission_is_paced_by_the_staleness_bound() -> None:
    """Q2: a slow tenant with a tight bound loses no job to staleness as long as one job raises the version by one."""
    scheduler = Scheduler()
    scheduler.register("rl", "rl", max_in_flight=8, max_policy_staleness=1)
    version = 0
    for _ in range(10):
        while scheduler.wait_for_room("rl", 0):
            ready(scheduler, "rl", version=version)
        leased = scheduler.lease_next({"rl": version}, timeout_s=0, deadline_s=60)
        assert leased is not None
        scheduler.complete(leased.job_id, lease_id=leased.lease_id)
        version += 1
    assert scheduler.counts()["rl"]["dropped"] == 0 and scheduler.completed("rl") == 10


def test_drops_are_counted_per_tenant() -> None:
    """Q2: versions that jump (an update from elsewhere) drop jobs, visibly."""
    cleared = []
    scheduler = Scheduler(on_terminal=lambda job: cleared.append((job.partition_id, job.reason)))
    scheduler.register("slow", "rl", max_in_flight=2, max_policy_staleness=1)
    scheduler.register("other", "sft")
    jobs = [ready(scheduler, "slow", version=0), ready(scheduler, "slow", version=2)]
    leased = scheduler.lease_next({"slow": 2, "other": 0}, timeout_s=0, deadline_s=60)
    assert leased is not None and leased.job_id == jobs[1].job_id
    assert cleared == [(jobs[0].partition_id, "policy_stale")]
    assert scheduler.counts()["slow"]["dropped"] == scheduler.dropped("slow") == 1 and scheduler.dropped("other") == 0
    assert not scheduler.wait_for_room("slow", 0), "but fewer may be in flight now"
    scheduler.complete(leased.job_id)
    assert scheduler.wait_for_room("slow", 0)


def test_a_tenant_that_keeps_missing_its_bound_is_paced() -> None:
    """Q2: half as many in flight after a drop, one more after RECOVERY_JOBS jobs in time; others are not concerned."""
    scheduler = Scheduler()
    scheduler.register("slow", "rl", max_in_flight=8, max_policy_staleness=9)
    scheduler.register("other", "rl", max_in_flight=8, max_policy_staleness=9)
    version = 0

    def jump() -> None:
        """All room is taken, then versions come from elsewhere: everything is dropped, once."""
        nonlocal version
        while scheduler.wait_for_room("slow", 0):
            ready(scheduler, "slow", version=version)
        version += 10
        assert scheduler.lease_next({"slow": version}, 0, 60) is None and scheduler.in_flight("slow") == 0

    def in_time(jobs: int) -> None:
        for _ in range(jobs):
            ready(scheduler, "slow", version=version)
            leased = scheduler.lease_next({"slow": version}, 0, 60)
            scheduler.complete(leased.job_id, lease_id=leased.lease_id)

    bounds = [scheduler.bound("slow")]
    for _ in range(4):
        jump()
        bounds.append(scheduler.bound("slow"))
    assert bounds == [8, 4, 2, 1, 1] and scheduler.dropped("slow") == 8 + 4 + 2 + 1
    in_time(RECOVERY_JOBS - 1)
    assert scheduler.bound("slow") == 1
    state = json.loads(json.dumps(scheduler.state_dict()))
    in_time(1)
    assert scheduler.bound("slow") == 2
    jump()
    in_time(7 * RECOVERY_JOBS)
    assert scheduler.bound("slow") == 8
    in_time(RECOVERY_JOBS)
    assert scheduler.bound("slow") == 8 and scheduler.bound("other") == 8

    resumed = Scheduler()
    resumed.register("slow", "rl", max_in_flight=8, max_policy_staleness=9)
    resumed.load_state_dict(state)
    assert resumed.bound("slow") == 1, "a resumed run goes on at the same pace"


def test_what_is_foreseeably_stale_is_not_rolled_out() -> None:
    """A version that was read before the actor moved on is refused before anybody simulates with it."""
    scheduler = Scheduler()
    scheduler.register("t", "rl", max_in_flight=4, max_policy_staleness=1)
    ready(scheduler, "t", version=0)
    leased = scheduler.lease_next({"t": 0}, 0, 60)
    scheduler.complete(leased.job_id, policy_version=1)
    assert scheduler.reserve("t", 1, behavior_policy_version=0) is not None, "one behind, nothing ahead"
    assert scheduler.reserve("t", 1, behavior_policy_version=0) is None, "one behind, one ahead"
    assert scheduler.reserve("t", 1, behavior_policy_version=1) is not None
    assert scheduler.dropped("t") == 0


def test_jobs_that_add_several_versions_count_as_many() -> None:
    scheduler = Scheduler()
    scheduler.register("t", "rl", max_in_flight=8, max_policy_staleness=7)
    assert scheduler.bound("t") == 8
    ready(scheduler, "t", version=0)
    leased = scheduler.lease_next({"t": 0}, 0, 60)
    scheduler.complete(leased.job_id, policy_version=3)
    assert scheduler.bound("t") == 3, "a third job has two ahead of it: 6 versions"
    version = 3
    for _ in range(6):
        while scheduler.wait_for_room("t", 0):
            ready(scheduler, "t", version=version)
        leased = scheduler.lease_next({"t": version}, 0, 60)
        assert leased is not None
        version += 3
        scheduler.complete(leased.job_id, policy_version=version)
    assert scheduler.dropped("t") == 0 and scheduler.completed("t") == 7


def test_dead_consumer_loses_nothing_and_trains_nothing_twice() -> None:
    """Q3."""
    clock = Clock()
    scheduler = Scheduler(clock=clock)
    scheduler.register("t", "sft")
    first, second = ready(scheduler, "t"), ready(scheduler, "t")
    dead = scheduler.lease_next({"t": 0}, 0, deadline_s=10)
    assert dead is not None and dead.job_id == first.job_id
    clock.now = 10.0
    alive = scheduler.lease_next({"t": 0}, 0, deadline_s=10)
    assert alive is not None and alive.job_id == first.job_id, "an expired job keeps its place before the second"
    assert alive.metadata["lease_expirations"] == 1
    with pytest.raises(LeaseLost, match="tenant 't'"):
        scheduler.complete(dead.job_id, lease_id=dead.lease_id)
    with pytest.raises(LeaseLost):
        scheduler.fail(dead.job_id, "late", lease_id=dead.lease_id)
    scheduler.complete(alive.job_id, lease_id=alive.lease_id)
    with pytest.raises(IllegalTransition, match="is completed and cannot become completed"):
        scheduler.complete(dead.job_id, lease_id=dead.lease_id)
    assert scheduler.completed("t") == 1 and scheduler.leased_samples("t") == first.sample_count
    assert scheduler.get(second.job_id).state == JobState.READY


def test_a_holder_at_work_keeps_its_lease() -> None:
    """By renewing it in time, or late, as long as nobody else has leased the job."""
    clock = Clock()
    scheduler = Scheduler(clock=clock)
    scheduler.register("t", "sft")
    ready(scheduler, "t")
    job = scheduler.lease_next({"t": 0}, 0, deadline_s=10)
    assert job is not None
    clock.now = 8.0
    assert scheduler.renew(job, deadline_s=10)
    clock.now = 17.0
    assert scheduler.expire() == [] and scheduler.get(job.job_id).lease_deadline == 18.0
    clock.now = 18.0
    assert [returned.state for returned in scheduler.expire()] == [JobState.READY]
    assert scheduler.leased_samples("t") == 0
    assert scheduler.renew(job, deadline_s=10), "late, but nobody else has it"
    again = scheduler.get(job.job_id)
    assert (again.state, again.lease_id, again.lease_deadline) == (JobState.LEASED, job.lease_id, 28.0)
    assert scheduler.leased_samples("t") == job.sample_count and scheduler.depth("t") == 0
    clock.now = 30.0
    other = scheduler.lease_next({"t": 0}, 0, deadline_s=10)
    assert other is not None and other.job_id == job.job_id
    with pytest.raises(LeaseLost):
        scheduler.renew(job, deadline_s=10)
    scheduler.complete(other.job_id, lease_id=other.lease_id)
    assert not scheduler.renew(job, deadline_s=10) and not scheduler.renew(other, deadline_s=10)
    assert scheduler.completed("t") == 1


def test_a_tenant_in_anothers_place_starts_fresh() -> None:
    """C5."""
    scheduler = Scheduler()
    scheduler.register("t", "sft", target_jobs=1)
    old = ready(scheduler, "t")
    leased = scheduler.lease_next({"t": 0}, 0, 60)
    assert leased is not None
    scheduler.complete(leased.job_id)
    assert scheduler.targets_met()
    scheduler.unregister("t")
    scheduler.register("t", "sft", target_jobs=1)
    assert scheduler.completed("t") == 0 and scheduler.leased_samples("t") == 0 and not scheduler.targets_met()
    assert set(scheduler.counts()["t"].values()) == {0}
    new = scheduler.reserve("t", 1)
    assert new is not None and new.job_id != old.job_id and new.policy_key != old.policy_key


def test_quarantine_fails_everything_and_lets_the_run_end() -> None:
    ended = []
    scheduler = Scheduler(on_terminal=ended.append)
    scheduler.register("bad", "sft", target_jobs=5)
    scheduler.register("good", "sft", target_jobs=0)
    a, b = ready(scheduler, "bad"), scheduler.reserve("bad", 1)
    assert b is not None and not scheduler.targets_met()
    scheduler.fail_all("bad", "loss is NaN")
    assert [job.reason for job in ended] == ["loss is NaN"] * 2
    assert scheduler.targets_met() and not scheduler.wants_more("bad") and scheduler.reserve("bad", 1) is None
    with pytest.raises(IllegalTransition, match="loss is NaN") as caught:
        scheduler.mark(b.job_id, JobState.READY)
    assert caught.value.job.state.terminal
    assert scheduler.fail(a.job_id, "again").reason == "loss is NaN"
    assert len(ended) == 2


def test_fair_share_follows_the_weights_and_late_joiners_do_not_crowd_out() -> None:
    scheduler = Scheduler()
    versions = {"light": 0, "heavy": 0}
    scheduler.register("light", "sft", weight=1)
    scheduler.register("heavy", "sft", weight=3)

    def train(rounds: int) -> list[str]:
        order = []
        for _ in range(rounds):
            for tenant in versions:
                while scheduler.wait_for_room(tenant, 0):
                    ready(scheduler, tenant)
            job = scheduler.lease_next(versions, 0, 60)
            assert job is not None
            scheduler.complete(job.job_id)
            order.append(job.tenant_id)
        return order

    order = train(40)
    assert order.count("heavy") == 30 and order.count("light") == 10
    versions["late"] = 0
    scheduler.register("late", "sft", weight=1)
    assert 7 <= train(40).count("late") <= 9


def test_priorities_and_fifo_inside_a_tenant() -> None:
    scheduler = Scheduler()
    scheduler.register("low", "sft", max_in_flight=3)
    scheduler.register("high", "sft", priority=5, max_in_flight=3)
    made = [scheduler.reserve("low", 1) for _ in range(3)]
    for job in (made[2], made[0], made[1]):
        scheduler.mark(job.job_id, JobState.READY)
    ready(scheduler, "high", samples=1000)
    order = [scheduler.lease_next({"low": 0, "high": 0}, 0, 60) for _ in range(4)]
    assert [job.tenant_id for job in order] == ["high", "low", "low", "low"]
    assert [job.job_id for job in order[1:]] == [made[i].job_id for i in (2, 0, 1)], "ready order, not creation order"


def test_task_types_have_their_own_paths() -> None:
    scheduler = Scheduler()
    scheduler.register("rl", "rl")
    scheduler.register("off", "offline_rl")
    scheduler.register("sft", "sft")
    rl, off, sft = (scheduler.reserve(t, 1) for t in ("rl", "off", "sft"))
    with pytest.raises(IllegalTransition, match="reserved and cannot become ready: mark"):
        scheduler.mark(rl.job_id, JobState.READY)
    with pytest.raises(IllegalTransition):
        scheduler.mark(sft.job_id, JobState.NEEDS_ADVANTAGES)
    assert scheduler.mark(off.job_id, JobState.READY, rows=3).metadata == {"rows": 3}
    scheduler.mark(rl.job_id, JobState.NEEDS_ACTOR_FORWARD)
    with pytest.raises(IllegalTransition, match="use lease_stage"):
        scheduler.mark(rl.job_id, JobState.COMPUTING_ACTOR_FORWARD)
    with pytest.raises(IllegalTransition, match="only a leased job"):
        scheduler.complete(rl.job_id)
    assert scheduler.lease_stage(JobState.NEEDS_ACTOR_FORWARD, 60, tenant_id="off") is None
    assert scheduler.lease_stage(JobState.NEEDS_ACTOR_FORWARD, 60).job_id == rl.job_id
    assert scheduler.lease_stage(JobState.NEEDS_ACTOR_FORWARD, 60) is None, "leased once"


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        (dict(task_type="eval"), "evaluation makes no jobs"),
        (dict(task_type="sft", max_in_flight=0), "max_in_flight=0"),
        (dict(task_type="sft", weight=0), "weight=0"),
        (dict(task_type="sft", target_jobs=-1), "target_jobs=-1"),
        (dict(task_type="rl", max_policy_staleness=-1), "max_policy_staleness=-1"),
    ],
)
def test_bad_registrations_name_tenant_key_and_value(rules: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        Scheduler().register("bob", **rules)
    assert "'bob'" in str(caught.value)


def test_unknown_names_and_double_registration() -> None:
    scheduler = Scheduler(history=1)
    scheduler.register("t", "sft")
    with pytest.raises(ValueError, match="registered already"):
        scheduler.register("t", "sft")
    with pytest.raises(ValueError, match="'x' is not registered"):
        scheduler.reserve("x", 1)
    with pytest.raises(ValueError, match="sample_count=0"):
        scheduler.reserve("t", 0)
    assert not scheduler.wants_more("x")
    old, new = scheduler.reserve("t", 1), scheduler.reserve("t", 1)
    scheduler.fail(old.job_id, "a")
    scheduler.fail(new.job_id, "b")
    assert [job.job_id for job in scheduler.history] == [new.job_id]
    with pytest.raises(ValueError, match="older than the last 1"):
        scheduler.get(old.job_id)
    assert scheduler.counts()["t"]["failed"] == 2


def test_resume_carries_counters_not_jobs() -> None:
    def fresh() -> Scheduler:
        scheduler = Scheduler()
        scheduler.register("a", "sft", target_jobs=2)
        scheduler.register("b", "sft")
        return scheduler

    before = fresh()
    done = ready(before, "a", samples=5)
    before.complete(before.lease_next({"a": 0}, 0, 60).job_id)
    ready(before, "b", samples=7)
    assert before.lease_next({"b": 0}, 0, 60) is not None
    state = json.loads(json.dumps(before.state_dict()))
    after = fresh()
    after.load_state_dict(state | {"tenants": state["tenants"] | {"gone": state["tenants"]["a"]}})
    assert after.completed("a") == 1 and after.in_flight("b") == 0 and "gone" not in after.counts()
    assert after.leased_samples("a") == 5 and after.leased_samples("b") == 0, "an unfinished lease is not charged"
    job = after.reserve("a", 1)
    assert job is not None and job.created_seq > done.created_seq and job.job_id != done.job_id
    assert after.reserve("a", 1) is None, "one of the two was done before"
    with pytest.raises(ValueError, match="in flight"):
        after.load_state_dict(state)


def test_a_tenant_that_sits_a_run_out_keeps_its_counters() -> None:
    def fresh(*names: str) -> Scheduler:
        scheduler = Scheduler()
        for name in names:
            scheduler.register(name, "sft", target_jobs=2)
        return scheduler

    def work(scheduler: Scheduler, name: str, samples: int) -> None:
        ready(scheduler, name, samples=samples)
        scheduler.complete(scheduler.lease_next({name: 0}, 0, 60).job_id)

    def saved(scheduler: Scheduler) -> dict:
        return json.loads(json.dumps(scheduler.state_dict()))

    first = fresh("a", "b")
    work(first, "a", 4)
    work(first, "b", 4)
    second = fresh("a")
    second.load_state_dict(saved(first))
    work(second, "a", 96)
    third = fresh("a", "b")
    third.load_state_dict(saved(second))
    assert third.completed("a") == 2 and third.completed("b") == 1
    shares = saved(third)["tenants"]
    assert shares["b"]["share_offset"] + shares["b"]["leased_samples"] == 100, "it does not catch up what it sat out"


def run_threads(*targets) -> None:
    errors = []

    def guarded(target) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "blocked"
    assert not errors


def test_threads_train_every_job_once() -> None:
    ended, trained, lock = [], [], threading.Lock()
    scheduler = Scheduler(on_terminal=lambda job: ended.append(job.job_id))
    tenants = ("a", "b", "c")
    for tenant in tenants:
        scheduler.register(tenant, "sft", target_jobs=40)

    def produce(tenant: str) -> None:
        while scheduler.wants_more(tenant):
            if scheduler.wait_for_room(tenant, 0.05) and (job := scheduler.reserve(tenant, 2)):
                scheduler.mark(job.job_id, JobState.READY)

    def consume() -> None:
        while not scheduler.targets_met():
            job = scheduler.lease_next(dict.fromkeys(tenants, 0), timeout_s=0.05, deadline_s=60)
            if job is not None:
                with lock:
                    trained.append(job.job_id)
                scheduler.complete(job.job_id, lease_id=job.lease_id)

    run_threads(*(lambda t=t: produce(t) for t in tenants), consume, consume, consume)
    assert len(trained) == len(set(trained)) == 120 and sorted(ended) == sorted(trained)


def test_lease_next_waits_wakes_and_times_out() -> None:
    scheduler = Scheduler()
    scheduler.register("t", "sft", max_in_flight=1)
    start = time.monotonic()
    assert scheduler.lease_next({"t": 0}, timeout_s=0.05, deadline_s=60) is None
    assert time.monotonic() - start >= 0.05
    job = scheduler.reserve("t", 1)
    got = []
    waiter = threading.Thread(target=lambda: got.append(scheduler.lease_next({"t": 0}, 20, 60)))
    waiter.start()
    scheduler.mark(job.job_id, JobState.READY)
    waiter.join(10)
    assert got[0].job_id == job.job_id
    room = []
    waiter = threading.Thread(target=lambda: room.append(scheduler.wait_for_room("t", 20)))
    waiter.start()
    scheduler.complete(job.job_id)
    waiter.join(10)
    assert room == [True]


@pytest.mark.parametrize("end", ["complete", "fail", "fail_all", "unregister"])
def test_room_wakes_the_tenants_own_producers(end: str) -> None:
    """Whatever ends a job of a tenant, or its stay, ends the wait of its producer at once and nobody else's."""
    scheduler = Scheduler()
    scheduler.register("t", "sft", max_in_flight=1)
    scheduler.register("other", "sft", max_in_flight=1)
    assert scheduler.reserve("other", 1) is not None
    job = ready(scheduler, "t")
    scheduler.lease_next({"t": 0}, 0, 60)
    answers: dict[str, bool] = {}

    def wait(tenant: str) -> None:
        answers[tenant] = scheduler.wait_for_room(tenant, 20)

    waiters = {tenant: threading.Thread(target=wait, args=(tenant,), daemon=True) for tenant in ("t", "other")}
    for tenant, waiter in waiters.items():
        waiter.start()
        while not scheduler._tenants[tenant].room._waiters:
            time.sleep(0.001)
    {
        "complete": lambda: scheduler.complete(job.job_id),
        "fail": lambda: scheduler.fail(job.job_id, "because"),
        "fail_all": lambda: scheduler.fail_all("t", "because"),
        "unregister": lambda: scheduler.unregister("t"),
    }[end]()
    waiters["t"].join(10)
    assert answers == {"t": end in ("complete", "fail")}
    scheduler.close()
    waiters["other"].join(10)
    assert answers["other"] is False


def test_a_returned_lease_keeps_its_place_among_many() -> None:
    """READY jobs are looked at in order of ready_seq, also after several leases came back in another order."""
    clock = Clock()
    scheduler = Scheduler(clock=clock)
    scheduler.register("t", "sft", max_in_flight=6)
    jobs = [ready(scheduler, "t") for _ in range(6)]
    for deadline in (9, 5, 7):
        assert scheduler.lease_next({"t": 0}, 0, deadline) is not None
    for now in (5, 7, 9):
        clock.now = now
        assert len(scheduler.expire()) == 1
    order = [scheduler.lease_next({"t": 0}, 0, 60).job_id for _ in jobs]
    assert order == [job.job_id for job in jobs]


def test_where_and_actor_versions_leave_other_jobs_alone() -> None:
    scheduler = Scheduler()
    scheduler.register("a", "sft", max_in_flight=3)
    scheduler.register("b", "sft", priority=1)
    first, second = ready(scheduler, "a"), ready(scheduler, "a")
    ready(scheduler, "b")
    assert scheduler.lease_next({}, 0, 60) is None and scheduler.lease_next({"x": 0}, 0, 60) is None
    leased = scheduler.lease_next({"a": 0}, 0, 60, where=lambda job: job.job_id != first.job_id)
    assert leased is not None and leased.job_id == second.job_id
    assert scheduler.lease_next({"a": 0, "b": 0}, 0, 60, where=lambda job: False) is None
    assert scheduler.depth() == 2 and scheduler.depth("a") == scheduler.depth("b") == 1 and scheduler.depth("x") == 0


def test_close_wakes_everybody_and_lets_jobs_end() -> None:
    scheduler = Scheduler()
    scheduler.register("t", "sft", max_in_flight=1)
    job = ready(scheduler, "t")
    scheduler.lease_next({"t": 0}, 0, 60)
    answers = {}
    waiters = [
        threading.Thread(target=lambda: answers.update(lease=scheduler.lease_next({"t": 0}, 20, 60))),
        threading.Thread(target=lambda: answers.update(room=scheduler.wait_for_room("t", 20))),
    ]
    for waiter in waiters:
        waiter.start()
    scheduler.close()
    for waiter in waiters:
        waiter.join(10)
    assert answers == {"lease": None, "room": False}
    assert scheduler.reserve("t", 1) is None and not scheduler.wants_more("t")
    assert scheduler.complete(job.job_id).state == JobState.COMPLETED


def test_on_terminal_runs_outside_the_lock_and_its_errors_propagate() -> None:
    scheduler = Scheduler()
    scheduler.register("t", "sft")

    def other_thread_gets_in(job: Job) -> None:
        answer = []
        thread = threading.Thread(target=lambda: answer.append(scheduler.depth()), daemon=True)
        thread.start()
        thread.join(5)
        assert answer == [0]
        raise KeyError(job.reason)

    scheduler.on_terminal = other_thread_gets_in
    job = scheduler.reserve("t", 1)
    with pytest.raises(KeyError, match="why"):
        scheduler.fail(job.job_id, "why")
    assert scheduler.counts()["t"]["failed"] == 1
