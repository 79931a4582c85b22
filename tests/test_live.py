"""A run that is going takes orders: tenants join, pause, leave and come back with a resume; nothing stays of one that
has left."""

from __future__ import annotations

import gc
import json
import stat
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from test_runs import FAKE, state_of

from models.heads.mlp import ChunkMLPHead
from nexus_lightning import demonstrations, trainer
from nexus_lightning.config import ConfigError
from nexus_lightning.run.live import SOCKET, ask
from nexus_lightning.run.runtime import Runtime
from nexus_lightning.trainer import train


class PatientHead(ChunkMLPHead):
    """Leaves time for orders (a test double)."""

    def loss(self, features, state, actions, is_pad):
        time.sleep(0.005)
        return super().loss(features, state, actions, is_pad)


@pytest.fixture
def toy(compose, tmp_path, monkeypatch):
    """``toy(overrides...)`` -> config of a small silent run on the fake backbone, with data of its own."""
    monkeypatch.setattr(trainer, "write_report", lambda run_dir: None)

    def build(*overrides: str):
        config = compose(*overrides, "trainer.enable_progress_bar=false", f"data_dir={tmp_path}/data")
        config.backbone = dict(FAKE)
        for tenant in config.tenants.values():
            tenant.eval = replace(tenant.eval, episodes=2, every_n_jobs=None, at_start=False, video=False)
            tenant.target_jobs = 3
            if tenant.dataset is not None:
                tenant.dataset.record.workers, tenant.dataset.record.episodes = 1, 4
        return config

    return build


def during(config, act):
    """Train ``config``; ``act(run_dir, runtime)`` is called in a thread once the run takes orders."""
    runtimes, init = [], Runtime.__init__

    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        runtimes.append(self)

    def wait_and_act():
        while not (runtimes and (runtimes[0].run_dir / SOCKET).exists()):
            time.sleep(0.02)
        try:
            return act(runtimes[0].run_dir, runtimes[0])
        finally:
            runtimes[0].schedule.interrupted = True  # whatever it found, the run ends

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(Runtime, "__init__", remember)
        done = pool.submit(wait_and_act)
        summary = train(config)
        return summary, done.result(60)


def host(toy, **changes):
    """A tenant that trains until it is sent away."""
    config = toy("+tenant@tenants.host=toy_sft", *changes.pop("overrides", ()))
    config.tenants["host"].head["_target_"] = f"{__name__}.PatientHead"
    config.tenants["host"].target_jobs = 100_000
    config.tenants["host"].head["lr_schedule"] = "constant"
    return config


def order(run_dir, verb, tenant=None, config=None):
    extra = {} if config is None else {"config": asdict(config)}
    return ask(run_dir, verb=verb, tenant=tenant, **extra)


def states(run_dir):
    return {row["tenant"]: row["state"] for row in ask(run_dir, verb="list")}


def test_orders_to_a_live_run(toy, monkeypatch):
    guests = toy("+tenants=[toy,toy_sft,toy_offline]").tenants
    for name in ("toy_sft", "toy_offline"):
        guests[name].dataset.root = None
    written, write = [], demonstrations._write
    monkeypatch.setattr(demonstrations, "_write", lambda *args: written.append(args[1]) or write(*args))

    def act(run_dir, runtime):
        assert stat.S_IMODE((run_dir / SOCKET).stat().st_mode) == 0o600
        free = runtime.shared.admission.free
        with ThreadPoolExecutor(2) as pool:  # one dataset that nobody has recorded yet
            list(pool.map(lambda name: order(run_dir, "join", name, guests["toy_offline"]), ("a", "b")))
        order(run_dir, "join", "rl", guests["toy"])
        assert set(states(run_dir)) == {"host", "a", "b", "rl"} and runtime.shared.admission.free < free
        with pytest.raises(ConfigError, match=r"tenants\.a: is there already"):
            order(run_dir, "join", "a", guests["toy_sft"])
        wrong = replace(guests["toy_sft"], weight=-1.0)
        with pytest.raises(ConfigError, match=r"tenants\.c\.weight=-1\.0"):
            order(run_dir, "join", "c", wrong)
        with pytest.raises(ConfigError, match=r"'nobody' is not in this run; there are host, [ab]"):
            order(run_dir, "leave", "nobody")
        order(run_dir, "pause", "host")
        jobs = runtime.slots["host"].jobs_completed
        assert states(run_dir)["host"] == "paused"
        time.sleep(0.2)
        assert runtime.slots["host"].jobs_completed == jobs, "nothing of it trains"
        order(run_dir, "resume", "host")
        order(run_dir, "evaluate", "host")
        while not runtime.slots["host"].evaluations or runtime.slots["host"].jobs_completed == jobs:
            time.sleep(0.02)
        while any(runtime.slots[name].jobs_completed < 3 for name in ("a", "b", "rl")):
            time.sleep(0.02)
        for name in ("a", "b", "rl", "host"):
            order(run_dir, "leave", name)
        assert runtime.shared.admission.held == {}
        return jobs

    summary, jobs = during(host(toy), act)
    assert jobs >= 0 and summary["tenants"] == {}, "everybody has left: the run is over"
    run_dir = Path(summary["run_dir"])
    assert not (run_dir / SOCKET).exists()
    assert len(written) == 2, "host's recording, and one for both guests"
    for name in ("a", "b", "rl", "host"):
        assert (run_dir / "tenants" / name / "latest").is_file(), "its policy was saved when it left"
    with pytest.raises(ConnectionError, match="no run is going in"):
        order(run_dir, "list")


@pytest.mark.parametrize("task", ["toy_sft", "toy", "toy_offline"])
def test_nothing_stays_of_a_tenant_that_has_left(toy, task):
    guest = toy(f"+tenants=[{task}]").tenants[task]

    def act(run_dir, runtime):
        order(run_dir, "join", "guest", guest)
        while runtime.slots["guest"].jobs_completed < 3:
            time.sleep(0.02)
        member = runtime.members["guest"]
        things = [member, member.slot, member.slot.head, member.slot.optimizer, member.slot.normalizer]
        things += [*member.producers, member.evaluator, member.evaluator.env, member.reader]
        things = [thing for thing in things if thing is not None]
        left = {f"{k} {type(thing).__name__}": weakref.ref(thing) for k, thing in enumerate(things)}
        del member, things
        order(run_dir, "leave", "guest")
        gc.collect()
        stays = {name for name, reference in left.items() if reference() is not None}
        names = {
            "served": "guest" in runtime.served.tenants(),
            "queue": bool(runtime.queue.partitions("guest")),
            "scheduler": runtime.scheduler.registered("guest"),
            "slots": "guest" in runtime.slots or "guest" in runtime.members,
            "module": "guest" in runtime.module.heads or "guest" in runtime.module.objectives,
            "status": "guest" in runtime.tenancy.status.tenants,
        }
        order(run_dir, "leave", "host")
        return stays, {name for name, there in names.items() if there}

    _, found = during(host(toy), act)
    assert found == (set(), set())


def test_tenants_that_joined_come_back_and_those_that_left_stay_away(toy):
    late = toy("+tenants=[toy_sft]").tenants["toy_sft"]
    late.target_jobs = 6
    late.max_in_flight = 1
    together = ["+tenant@tenants.gone=toy_sft"]

    def act(run_dir, runtime):
        order(run_dir, "leave", "gone")
        order(run_dir, "join", "late", late)
        while runtime.slots["late"].jobs_completed < 2:
            time.sleep(0.005)
        runtime.schedule.interrupted = True

    stopped, _ = during(host(toy, overrides=together), act)
    assert set(stopped["tenants"]) == {"host", "late"} and 2 <= stopped["tenants"]["late"]["jobs_completed"] <= 6
    again = host(toy, overrides=[*together, f"ckpt_path={stopped['run_dir']}"])

    def leave_when_done(run_dir, runtime):
        while runtime.slots["late"].jobs_completed < 6:
            time.sleep(0.005)
        order(run_dir, "leave", "host")

    resumed, _ = during(again, leave_when_done)
    assert set(resumed["tenants"]) == {"late"} and resumed["tenants"]["late"]["jobs_completed"] == 6
    alone = toy("+tenant@tenants.late=toy_sft")
    alone.tenants["late"] = late
    assert state_of(resumed["run_dir"], "late") == state_of(train(alone)["run_dir"], "late"), "as if nothing had been"


def test_the_command_line(toy, tmp_path, capsys):
    from scripts import tenants

    errors = [
        ([], "choose one of list, join"),
        (["fly"], "choose one of list, join"),
        (["leave", f"run={tmp_path}"], "error: tenant: give the name"),
        (["list"], "error: run: give the run's folder"),
        (["join", f"run={tmp_path}", "+tenants=[toyy]"], "toyy"),
        (["join", f"run={tmp_path}"], "nobody joins"),
        (["pause", f"run={tmp_path}", "tenant=a", "seed=3"], "seed=3: only join takes overrides"),
    ]
    for arguments, words in errors:
        with pytest.raises(SystemExit) as ended:
            tenants.main(arguments)
        assert words in str(ended.value.code) + capsys.readouterr().err, arguments
        assert ended.value.code != 0 and ended.value.code != 1
    with pytest.raises(SystemExit) as ended:
        tenants.main(["list", f"run={tmp_path}"])
    assert ended.value.code == 1 and f"no run is going in {tmp_path}" in capsys.readouterr().err

    def act(run_dir, runtime):
        data = [f"tenants.late.dataset.record.{key}=1" for key in ("workers", "episodes")]
        tenants.main(["join", f"run={run_dir}", "+tenant@tenants.late=toy_sft", "tenants.late.target_jobs=1", *data])
        rows = tenants.main(["list", f"run={run_dir}"])
        tenants.main(["leave", f"run={run_dir}", "tenant=late"])
        tenants.main(["leave", f"run={run_dir}", "tenant=host"])
        return rows

    _, rows = during(host(toy), act)
    assert {row["tenant"] for row in rows} == {"host", "late"}
    said = capsys.readouterr().out
    assert "tenant late has joined" in said and "leave: tenant host" in said
    printed = said[said.index("[\n") : said.index("\n]") + 2]
    assert json.loads(printed) == rows


def test_a_socket_at_the_end_of_a_long_path(tmp_path):
    from nexus_lightning.run.live import LiveServer

    class Nobody:
        class tenancy:
            members: dict = {}

    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)
    (folder / SOCKET).write_text("left by a run that was killed")
    server = LiveServer(folder, Nobody())
    try:
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(ask(folder, verb="list"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert answers == [[], [], []]
        with pytest.raises(ConfigError, match="verb: choose one of"):
            ask(folder, verb="__class__")
        with pytest.raises(ConfigError):
            ask(folder, verb="join", tenant="x", config=None)
    finally:
        server.close()
    assert not (folder / SOCKET).exists()
