"""Simulators behind HTTP: the bits are the local ones, a step is carried out once, what is lost is never continued."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from envs.remote import EpisodeLost, RemoteSimulator
from envs.toy import ToySimulator
from nexus_lightning.environment import SimulatorEnv, check_tenant_env
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.services import environment_server
from nexus_lightning.services.codec import MSGPACK, Message, decode, encode
from nexus_lightning.services.environment_server import EnvironmentServer, GymnasiumAdapter, Sessions
from nexus_lightning.services.errors import (
    ConnectionLost,
    Gone,
    InvalidRequest,
    NotReady,
    SessionLost,
    Unauthorized,
    error_from_json,
)
from nexus_lightning.simulator import ContractError, Simulator, StepResult, execute_chunk

SCHEMA = TenantSchema(cameras=("camera",), image_size=32, state_dim=4, action_dim=2, chunk=3, execute=3, gripper="none")


class Counting(Simulator):
    """FAKE. State: seed, steps. Counts the steps of all instances; ``gate`` holds every step until it is set."""

    gripper = "none"
    image_orientation = "upright"
    steps = 0
    gate = None
    error = ValueError
    drift = 0.0
    inside = 0
    most_inside = 0

    def __init__(self, horizon=20, raise_at=None):
        self.horizon, self.raise_at = horizon, raise_at

    def reset(self, seed):
        self.seed, self.count = seed, 0

    def step(self, action):
        Counting.steps += 1
        Counting.inside += 1
        Counting.most_inside = max(Counting.most_inside, Counting.inside)
        if Counting.gate is not None:
            Counting.gate.wait(10)
        Counting.inside -= 1
        self.count += 1
        if self.count == self.raise_at:
            raise self.error("the gripper broke")
        return StepResult(float(action[0]) + Counting.drift, False, False, self.count >= self.horizon)

    def observe(self):
        return {"image": {}, "state": np.array([self.seed, self.count], np.float32), "instruction": "count"}


@pytest.fixture(autouse=True)
def _fresh_counting():
    Counting.steps, Counting.gate, Counting.drift = 0, None, 0.0
    Counting.inside = Counting.most_inside = 0


class Running:
    """A server in threads of this process."""

    def __init__(self, token=None, port=0, **options):
        factories = {"toy": "envs.toy:ToySimulator", "count": f"{__name__}:Counting"}
        self.sessions = Sessions(factories, threads=True, **options)
        self.server = EnvironmentServer(self.sessions, token, ("127.0.0.1", port))
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def post(self, path, meta=None, arrays=None, token=None):
        """One request; the message, or the typed error raised."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {"Content-Type": MSGPACK, **({"Authorization": f"Bearer {token}"} if token else {})}
        connection.request(
            "POST", environment_server.ROOT + path, encode(Message(meta or {}, arrays or {}), MSGPACK), headers
        )
        response = connection.getresponse()
        answer = decode(response.read(), response.headers["Content-Type"])
        connection.close()
        if response.status != 200:
            raise error_from_json(answer.meta, response.status)
        return answer

    def open(self, **environment):
        return self.post("", {"environment": environment}).meta["session_id"]

    def stop(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server():
    running = Running()
    yield running
    running.stop()


def chunks(count, length=3, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, length, 2)).astype(np.float32)


# ---- the bits of the local simulator ----


def test_results_are_those_of_the_local_simulator(server):
    local, remote = ToySimulator(reward="tracking"), RemoteSimulator(server.url, "toy", {"reward": "tracking"})
    assert remote.gripper == "none"
    for seed in (3, 4):
        local.reset(seed), remote.reset(seed)
        done = False
        for actions in chunks(10, seed=seed):
            mine, theirs = execute_chunk(local, actions), remote.execute(actions)
            assert mine.reward == theirs.reward and mine.executed.tolist() == theirs.executed.tolist()
            assert (mine.success, mine.terminated, mine.truncated) == (
                theirs.success,
                theirs.terminated,
                theirs.truncated,
            )
            seen, there = local.observe(), remote.observe()
            assert seen["state"].tobytes() == there["state"].tobytes() and seen["instruction"] == there["instruction"]
            assert seen["image"]["camera"].tobytes() == there["image"]["camera"].tobytes()
            if done := mine.terminated or mine.truncated:
                break
        assert done
    remote.close()
    assert len(server.sessions) == 0


def test_the_environment_of_a_tenant_works_on_it(server):
    def env(simulator):
        return SimulatorEnv(simulator, SCHEMA, Normalizer(SCHEMA), num_envs=2, tenant="remote", inline=True)

    remote = env(
        {"_target_": "envs.remote.RemoteSimulator", "url": server.url, "name": "toy", "arguments": {"horizon": 7}}
    )
    local = env({"_target_": "envs.toy.ToySimulator", "horizon": 7})
    check_tenant_env(remote)
    policy_chunks = torch.randn(4, 2, 3, 2, generator=torch.Generator().manual_seed(0))

    def roll_out(env):
        env.set_episodes([5, 6])
        td = env.reset()
        for chunk in policy_chunks:
            td = env.step(td.set(("vla_action", "chunk"), chunk.clone()))["next"]
            yield td.clone()

    for mine, theirs in zip(roll_out(local), roll_out(remote), strict=True):
        for key, value in mine.items(True, True):
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, theirs[key]), key
    remote.close()


def test_configured_like_any_other_simulator(compose, monkeypatch):
    from nexus_lightning.config import validate

    monkeypatch.delenv("NEXUS_ENV_TOKEN", raising=False)
    with pytest.raises(ValueError, match="token_env=NEXUS_ENV_TOKEN: this environment variable is not set"):
        validate(compose("+tenants=[toy_remote]"))
    monkeypatch.setenv("NEXUS_ENV_TOKEN", "secret")
    validate(compose("+tenants=[toy_remote]"))
    with pytest.raises(ValueError, match="image_orientation=upright: the schema says rotated_180"):
        validate(compose("+tenants=[toy_remote]", "tenants.toy_remote.schema.image_orientation=rotated_180"))
    monkeypatch.delenv("NEXUS_ENV_TOKEN")


# ---- once ----


def test_a_request_seq_is_carried_out_once(server):
    session = server.open(name="count")
    server.post(f"/{session}/reset", {"seed": 1})
    actions = {"actions": np.ones((3, 2), np.float32)}
    first = server.post(f"/{session}/batch_step", {"request_seq": 1}, actions)
    again = server.post(f"/{session}/batch_step", {"request_seq": 1}, actions)
    assert encode(first, MSGPACK) == encode(again, MSGPACK) and Counting.steps == 3
    with pytest.raises(Exception, match="other actions"):
        server.post(f"/{session}/batch_step", {"request_seq": 1}, {"actions": np.zeros((3, 2), np.float32)})
    for seq in (3, 7):
        with pytest.raises(Exception, match=f"request_seq={seq} after 1"):
            server.post(f"/{session}/batch_step", {"request_seq": seq}, actions)
    assert Counting.steps == 3
    single = server.post(f"/{session}/step", {"request_seq": 2}, {"action": np.ones(2, np.float32)})
    assert single.meta["reward"] == 1.0 and single.arrays["state"].tolist() == [1.0, 4.0]


def test_the_same_request_while_the_first_is_still_running(server):
    session = server.open(name="count")
    server.post(f"/{session}/reset", {"seed": 1})
    Counting.gate = threading.Event()
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(server.post, f"/{session}/step", {"request_seq": 1}, {"action": np.ones(2, np.float32)})
            for _ in range(4)
        ]
        while Counting.steps == 0:
            time.sleep(0.01)
        Counting.gate.set()
        answers = {encode(call.result(), MSGPACK) for call in calls}
    assert len(answers) == 1 and Counting.steps == 1


def test_sessions_step_in_parallel(server):
    ids = [server.open(name="count") for _ in range(3)]
    for session in ids:
        server.post(f"/{session}/reset", {"seed": 1})
    Counting.gate = threading.Event()
    with ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(server.post, f"/{session}/step", {"request_seq": 1}, {"action": np.ones(2, np.float32)})
            for session in ids
        ]
        deadline = time.monotonic() + 10
        while Counting.most_inside < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        Counting.gate.set()
        for call in calls:
            call.result()
    assert Counting.most_inside == 3


class Dropping:
    """FAKE. A connection that loses the answer of the first ``drop`` requests after they were carried out."""

    def __init__(self, connection, drop):
        self.connection, self.drop = connection, drop

    def request(self, *args):
        self.connection.request(*args)

    def getresponse(self):
        response = self.connection.getresponse()
        if self.drop:
            self.drop -= 1
            response.read()
            self.connection.close()
            raise ConnectionResetError("the answer was lost")
        return response

    def close(self):
        self.connection.close()


def test_a_lost_answer_is_asked_for_again(server):
    remote = RemoteSimulator(server.url, "count")
    remote.reset(1)
    remote._connection = Dropping(remote._connection, drop=2)
    result = remote.execute(np.full((3, 2), 0.5, np.float32))
    assert result.reward == 1.5 and Counting.steps == 3 and remote.observe()["state"].tolist() == [1.0, 3.0]
    assert remote._rebuilds == 0


# ---- lost ----


def lose(running, remote):
    """Its process dies, as far as a session in a thread can."""
    running.sessions._sessions[remote._session].worker.pipe.close()


def test_a_session_lost_in_the_middle_is_rebuilt_from_its_seed(server):
    remote, local = RemoteSimulator(server.url, "toy"), ToySimulator()
    remote.reset(3), local.reset(3)
    actions = chunks(3)
    for k in range(3):
        assert remote.execute(actions[k]).reward == execute_chunk(local, actions[k]).reward
        old = remote._session
        lose(server, remote)
    result = remote.execute(actions[0])
    assert result.reward == execute_chunk(local, actions[0]).reward and remote._session != old
    assert remote.observe()["state"].tobytes() == local.observe()["state"].tobytes()
    assert remote._rebuilds == 3
    lose(server, remote)
    remote.reset(4), local.reset(4)
    assert remote.observe()["state"].tobytes() == local.observe()["state"].tobytes()


def test_an_episode_that_cannot_be_brought_back_is_lost(server):
    remote = RemoteSimulator(server.url, "count", max_rebuilds=2)
    remote.reset(1)
    remote.execute(np.ones((2, 2), np.float32))
    Counting.drift = 0.25  # chance, as far as this test needs it
    lose(server, remote)
    with pytest.raises(EpisodeLost, match="seed 1: chunk 0 carried out again ends otherwise"):
        remote.execute(np.ones((2, 2), np.float32))
    remote.reset(2)  # the next episode is a new start
    assert remote.execute(np.ones((1, 2), np.float32)).reward == 1.25


def test_losses_without_end_are_reported(server):
    remote = RemoteSimulator(server.url, "count", max_rebuilds=2)
    remote.reset(1)
    remote.execute(np.ones((2, 2), np.float32))
    send, tries = remote._send, []

    def unlucky(actions):
        tries.append(1)
        lose(server, remote)
        return send(actions)

    remote._send = unlucky
    with pytest.raises(EpisodeLost, match="max_rebuilds=2"):
        remote.execute(np.ones((2, 2), np.float32))
    assert len(tries) == 3


def test_a_server_restarted_in_the_middle():
    first = Running()
    remote, local = RemoteSimulator(first.url, "toy"), ToySimulator()
    remote.reset(3), local.reset(3)
    actions = chunks(2)
    assert remote.execute(actions[0]).reward == execute_chunk(local, actions[0]).reward
    remote._connection.close()
    first.stop()
    later = []

    def restart():
        time.sleep(0.3)
        later.append(Running(port=first.port))

    thread = threading.Thread(target=restart)
    thread.start()
    result = remote.execute(actions[1])  # asks until the server is there again
    thread.join()
    assert result.reward == execute_chunk(local, actions[1]).reward
    assert remote.observe()["state"].tobytes() == local.observe()["state"].tobytes()
    remote.close()
    later[0].stop()
    remote.retry_s = 0.1
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1"):
        remote.reset(1)


def test_a_lease_runs_out(server):
    remote = RemoteSimulator(server.url, "count", lease_s=100.0)
    other = server.open(name="count")
    remote.reset(1)
    remote.execute(np.ones((2, 2), np.float32))
    old, now = remote._session, time.monotonic()
    assert server.sessions.expire(now + 50) == []
    assert server.sessions.expire(now + 101) == [old]  # `other` has the server's 600 s
    with pytest.raises(SessionLost):
        server.post(f"/{old}/reset", {"seed": 1})
    assert remote.execute(np.ones((2, 2), np.float32)).reward == 2.0
    assert remote.observe()["state"].tolist() == [1.0, 4.0] and remote._session not in (old, other)
    Counting.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(remote.execute, np.ones((1, 2), np.float32))
        while Counting.inside == 0:
            time.sleep(0.01)
        assert server.sessions.expire(now + 10_000) == [other], "a session that is being used is not closed"
        Counting.gate.set()
        call.result()
    remote.close()


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, EOFError])
def test_a_simulator_that_raises_says_so(server, monkeypatch, error):
    monkeypatch.setattr(Counting, "error", error)
    remote = RemoteSimulator(server.url, "count", {"raise_at": 2})
    remote.reset(1)
    with pytest.raises(Exception, match=r"(?s)Traceback.*the gripper broke") as caught:
        remote.execute(np.ones((3, 2), np.float32))
    assert not isinstance(caught.value, Gone | EpisodeLost) and len(server.sessions) == 0
    remote.reset(1)  # in a new session


class Wrong(Counting):
    """FAKE. From its second step on ``what`` is ``value``, of the step or of the observation."""

    what, value = "", None

    def step(self, action):
        result = super().step(action)
        if self.count == 2 and hasattr(result, self.what):
            setattr(result, self.what, self.value)
        return result

    def observe(self):
        seen = super().observe()
        return {**seen, self.what: self.value} if self.count >= 2 and self.what in seen else seen


@pytest.mark.parametrize(
    ("what", "value", "says"),
    [
        ("reward", float("nan"), "reward: nan: expected one finite number"),
        ("success", None, "success: None: expected a bool"),
        ("truncated", 1.0, "truncated: 1.0: expected a bool"),
        ("state", np.array([1, np.inf], np.float32), r"state: \[1.0, inf\]: expected finite numbers"),
        ("state", np.ones(1, np.float32), r"observation: {'state': \(1,\)}: expected {'state': \(2,\)}, as at the"),
        ("image", {"new": np.zeros((3, 8, 8), np.uint8)}, r"'image new': \(3, 8, 8\)}: expected {'state': \(2,\)}"),
        ("image", {"new": np.zeros((3, 8, 8))}, r"image 'new': float64 \(3, 8, 8\): expected uint8 \(3, H, W\)"),
        ("instruction", "", "instruction: '': expected words"),
    ],
)
def test_a_simulator_that_breaks_its_contract_says_how_and_ends_its_session(server, monkeypatch, what, value, says):
    monkeypatch.setattr(Wrong, "what", what)
    monkeypatch.setattr(Wrong, "value", value)
    server.sessions.factories["wrong"] = f"{__name__}:Wrong"
    schema = replace(SCHEMA, cameras=(), state_dim=2)
    config = {"_target_": "envs.remote.RemoteSimulator", "url": server.url, "name": "wrong"}
    env = SimulatorEnv(config, schema, Normalizer(schema), tenant="blue", inline=True)
    try:
        td = env.reset().set(("vla_action", "chunk"), torch.zeros(1, 3, 2))
        broke = r"tenant 'blue': simulator 0 \(envs.remote.RemoteSimulator\) broke its contract: http://.*Wrong broke"
        with pytest.raises(ContractError, match=rf"{broke} its contract: .*{says}"):
            env.step(td)
        assert len(server.sessions) == 0
    finally:
        env.close()


@pytest.mark.parametrize(
    ("meta", "rewards", "says"),
    [
        ({"success": None}, [0.0], "success: None: expected a bool"),
        ({"terminated": "no"}, [0.0], "terminated: 'no': expected a bool"),
        ({}, [np.nan], "reward: nan: expected one finite number"),
        ({}, [], r"rewards: float64 \(0,\): expected one for each executed of 2 actions"),
        ({}, [0.0] * 3, r"rewards: float64 \(3,\): expected one for each executed of 2 actions"),
        ({}, [0.0], r"executed: \[True, False\]"),
    ],
)
def test_a_server_of_somebody_else_is_not_believed(server, monkeypatch, meta, rewards, says):
    remote = RemoteSimulator(server.url, "count")
    remote.reset(1)
    whole = {"success": False, "terminated": False, "truncated": False, "instruction": "count", **meta}
    answer = Message(whole, {"rewards": np.array(rewards), "state": np.zeros(2, np.float32)})
    monkeypatch.setattr(remote, "_request", lambda *args, **kwargs: answer)
    with pytest.raises(ContractError, match=says):
        remote.execute(np.zeros((2, 2), np.float32))
    monkeypatch.undo()
    remote.close()


def test_a_gymnasium_environment_is_held_to_the_contract():
    class Env:  # FAKE
        action_space = SimpleNamespace(low=-np.ones(1), high=np.ones(1), shape=(1,), dtype=np.float32)
        unwrapped = SimpleNamespace(instruction="go")
        given = (np.zeros(2), 0.0, False, False, {})

        def step(self, action):
            return self.given

    env = Env()
    adapter = GymnasiumAdapter(env)
    for given, says in [
        ((np.zeros(2), float("nan"), False, False, {}), "reward: nan"),
        ((np.zeros(2), 0.0, None, False, {}), "terminated: None"),
        ((np.zeros(2), 0.0, False, False, {"is_success": float("nan")}), "info's success: nan"),
    ]:
        env.given = given
        with pytest.raises(environment_server.ContractBroken, match=says):
            adapter.step(np.zeros(1))


def test_one_that_failed_before_it_was_asked_says_why():
    worker = environment_server.Worker(f"{__name__}:Counting", {"no_such": 1}, threads=True)
    worker._join(10)  # its thread has ended and closed its end of the pipe
    with pytest.raises(Exception, match=r"(?s)the simulator raised.*no_such"):
        worker.call("describe", 0, timeout_s=10)


# ---- what is refused ----


def test_requests_are_checked(server):
    session = server.open(name="count")
    action = {"action": np.ones(2, np.float32)}
    with pytest.raises(Exception, match="reset first"):
        server.post(f"/{session}/step", {"request_seq": 1}, action)
    server.post(f"/{session}/reset", {"seed": 1})
    for meta, arrays, says in [
        ({}, action, "request_seq=None"),
        ({"request_seq": 0}, action, "request_seq=0"),
        ({"request_seq": 1}, {}, "'action' is missing"),
        ({"request_seq": 1}, {"action": np.ones((2, 2), np.float32)}, "1 dims"),
        ({"request_seq": 1}, {"action": np.full(2, np.nan, np.float32)}, "not finite"),
        ({"request_seq": 1}, {"action": np.ones(2, np.int32)}, "float32"),
    ]:
        with pytest.raises(InvalidRequest, match=says):
            server.post(f"/{session}/step", meta, arrays)
    with pytest.raises(InvalidRequest, match="seed"):
        server.post(f"/{session}/reset", {"seed": "x"})
    with pytest.raises(InvalidRequest, match=r"choose one of count, toy"):
        server.open(name="libero")
    with pytest.raises(InvalidRequest, match=r"(?s)cannot be built.*no_such"):
        server.open(name="count", no_such=1)
    with pytest.raises(InvalidRequest, match="lease_s"):
        server.post("", {"environment": {"name": "count"}, "lease_s": 0})
    with pytest.raises(Gone, match="unknown"):
        server.post("/nobody/reset", {"seed": 1})
    server.post(f"/{session}/close")
    server.post(f"/{session}/close")  # a lost answer to it is no problem


def test_there_is_room_for_so_many(server):
    server.sessions.max_sessions = 2
    first, _ = server.open(name="count"), server.open(name="count")
    with pytest.raises(NotReady, match="2 sessions"):
        server.open(name="count")
    remote = []
    thread = threading.Thread(target=lambda: remote.append(RemoteSimulator(server.url, "count")))
    thread.start()  # asks until there is room
    time.sleep(0.1)
    server.post(f"/{first}/close")
    thread.join(10)
    assert len(remote) == 1


def test_only_with_the_token():
    running = Running(token="nxl-s3cret")
    try:
        for token in (None, "", "nxl-s3cre", "nxl-s3cret2", "falsch"):
            with pytest.raises(Unauthorized):
                running.post("", {"environment": {"name": "count"}}, token=token)
        running.post("", {"environment": {"name": "count"}}, token="nxl-s3cret")
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=5)
        connection.request("GET", "/healthz")
        assert json.loads(connection.getresponse().read()) == {"status": "ok", "sessions": 1}
        connection.close()
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"Content-Type": "text/html"}, b"<html>", 415),
        ({"Content-Type": "application/json"}, b"[1]", 422),
        ({"Content-Type": "application/json"}, b"[" * 100_000, 422),
        ({"Content-Type": MSGPACK}, b"\xc1", 422),
        ({"Content-Type": MSGPACK}, b"\x81\xa6arrays\x81\xa1x\x90", 422),
        ({"Content-Type": MSGPACK}, b"\xdf\xff\xff\xff\xff", 422),
        ({"Content-Length": "99999999999"}, b"", 413),
        ({"Content-Length": "-5"}, b"", 422),
        ({"Transfer-Encoding": "chunked"}, b"", 422),
    ],
)
def test_hostile_bodies(server, headers, body, status):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.putrequest("POST", environment_server.ROOT)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(body)
    response = connection.getresponse()
    assert response.status == status and json.loads(response.read())["error"]["type"]
    connection.close()


def test_json_is_enough(server):
    """What curl can do."""

    def post(path, body):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request(
            "POST", environment_server.ROOT + path, json.dumps(body), {"Content-Type": "application/json"}
        )
        return json.loads(connection.getresponse().read())

    session = post("", {"environment": {"name": "count"}})["session_id"]
    assert post(f"/{session}/reset", {"seed": 5})["state"] == [5.0, 0.0]
    answer = post(f"/{session}/batch_step", {"request_seq": 1, "actions": [[1, 2], [3, 4]]})
    assert answer["rewards"] == [1.0, 3.0] and answer["steps"] == 2 and answer["truncated"] is False


def test_gymnasium_environments_are_simulators():
    import gymnasium

    sim = GymnasiumAdapter(gymnasium.make("Pendulum-v1"))
    sim.reset(3)
    start = sim.observe()
    assert start["instruction"] == "Pendulum-v1" and start["state"].shape == (3,) and start["image"] == {}
    sim.step(np.array([1.0], np.float32))
    plain = gymnasium.make("Pendulum-v1")
    observation, _ = plain.reset(seed=3)
    assert observation.tobytes() == start["state"].tobytes()
    assert plain.step(np.array([2.0], np.float32))[0].tobytes() == sim.observe()["state"].tobytes()
    with pytest.raises(ValueError, match="only a Box"):
        GymnasiumAdapter(gymnasium.make("CartPole-v1"))


# ---- on its own ----

ALONE = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "nexus_lightning", "tensordict", "torchrl", "hydra", "lightning"):
            raise ImportError(name + " is not installed here")

sys.meta_path.insert(0, Blocker())
"""

TASK = '''
import os
import numpy as np

try:
    import torch
except ImportError:
    pass
else:
    raise SystemError("the blocker does not work")

class Task:
    """FAKE. No import of the project."""
    horizon = 6
    def reset(self, seed):
        self.x, self.n = np.float32(seed), 0
        with open("pid", "w") as file: file.write(str(os.getpid()))
    def step(self, action):
        self.x += action[0]; self.n += 1
        if action[1] > 0.9: os._exit(3)
        class Step: reward, success, terminated, truncated = float(self.x), False, False, self.n >= 6
        return Step
    def observe(self):
        return {"image": {}, "state": np.array([self.x, self.n], np.float32), "instruction": "go"}
'''


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The one file, copied alone to another folder, in an interpreter that refuses our packages."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copy(environment_server.__file__, folder / "server.py")
    (folder / "task.py").write_text(TASK)
    (folder / "sitecustomize.py").write_text(ALONE)
    (folder / "token").write_text("alone-secret\n")
    process = subprocess.Popen(
        [sys.executable, "server.py", "--simulator", "task:Task", "--port", "0", "--token-file", "token"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    url = process.stdout.readline().split()[-1]
    yield url, process, folder / "pid"
    process.kill()
    process.wait()


def test_the_one_file_runs_alone(alone, monkeypatch):
    url, process, pid_file = alone
    monkeypatch.setenv("ENV_SERVER_TOKEN", "alone-secret")
    remote = RemoteSimulator(url, token_env="ENV_SERVER_TOKEN")
    remote.reset(2)
    half = np.full((2, 2), 0.5, np.float32)
    assert remote.execute(half).reward == 2.5 + 3.0
    pid = int(pid_file.read_text())
    assert pid != process.pid
    os.kill(pid, signal.SIGKILL)
    assert remote.execute(half).reward == 3.5 + 4.0
    assert int(pid_file.read_text()) != pid and remote.observe()["state"].tolist() == [4.0, 4.0]
    with pytest.raises(EpisodeLost, match="max_rebuilds"):
        remote.execute(np.ones((1, 2), np.float32))  # ends its process every time
    monkeypatch.setenv("ENV_SERVER_TOKEN", "wrong")
    with pytest.raises(Unauthorized):
        RemoteSimulator(url, token_env="ENV_SERVER_TOKEN")


def test_sigterm_ends_server_and_simulators(alone, monkeypatch):
    url, process, pid_file = alone
    monkeypatch.setenv("ENV_SERVER_TOKEN", "alone-secret")
    remote = RemoteSimulator(url, token_env="ENV_SERVER_TOKEN")
    remote.reset(2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert not Path(f"/proc/{pid_file.read_text()}").exists()


def test_old_python_can_read_it():
    import ast

    ast.parse(Path(environment_server.__file__).read_text(), feature_version=(3, 8))


def test_strangers_are_not_served_without_a_token(capsys):
    with pytest.raises(SystemExit):
        environment_server.main(["--simulator", "task:Task", "--host", "0.0.0.0"])
    assert "--token-file" in capsys.readouterr().err
