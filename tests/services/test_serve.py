"""A real server process over the network: three accounts at once, every route, kill -9, SIGTERM."""

from __future__ import annotations

import io
import re
import tarfile
import threading

import httpx
import numpy as np
import pytest
from serve_process import ServerProcess

from nexus_lightning.services.bodies import TOY_SCHEMA
from nexus_lightning.services.codec import MSGPACK, Message, decode, encode

SCHEMA = {**TOY_SCHEMA, "privileged": ["target_action"]}
HEAD = {"name": "mlp", "hidden_dim": 32, "lr": 1e-3, "lr_schedule": "constant"}
SFT = {"task": "sft", "dataset": {"name": "toy"}, "target_jobs": 8, "eval": {"episodes": 0}}
RL = {
    "task": "rl",
    "environment": {"name": "toy", "num_envs": 2, "reward": "tracking"},
    "algorithm": {"chunks_per_job": 6, "epochs": 2, "minibatch_size": 12},
    "eval": {"episodes": 0},
    "target_jobs": 6,
}
OBSERVATION = {
    "observation/state": np.zeros((2, 4), np.float32),
    "observation/image/camera": np.zeros((2, 3, 32, 32), np.uint8),
}


class Caller:
    """One account. Remembers which routes it has called, as OpenAPI writes them."""

    called: set[tuple[str, str]] = set()
    tests: set[str] = set()

    def __init__(self, url: str, token: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=90)

    def __call__(self, method: str, route: str, *ids, expect=(200, 201, 202, 204), arrays=None, headers=None, **more):
        Caller.called.add((method.lower(), route))
        left = iter(ids)
        url = re.sub(r"{\w+}", lambda _: str(next(left)), route)
        headers = dict(headers or {})
        if arrays is not None:
            more["content"] = encode(Message(more.pop("json", {}), arrays), MSGPACK)
            headers["Content-Type"] = MSGPACK
        answer = self.http.request(method, url, headers=headers, **more)
        assert answer.status_code in ((expect,) if isinstance(expect, int) else expect), (url, answer.text)
        if answer.headers.get("content-type") == MSGPACK:
            return decode(answer.content, MSGPACK)
        return answer.json() if answer.headers.get("content-type") == "application/json" else answer

    def end(self, ticket, status="completed"):
        """Of a future: its result."""
        for _ in range(10):
            shown = self("GET", "/v1/futures/{future_id}", ticket["future_id"], params={"wait_s": 30})
            if shown["status"] not in ("pending", "running"):
                break
        assert shown["status"] == status, shown
        return shown["result"] if status == "completed" else shown["error"]

    def create(self, name, **spec):
        body = {"name": name, "schema": SCHEMA, "head": HEAD, "seed": 3, **spec}
        return self("POST", "/v1/tenants", json=body)["tenant_id"]

    def weights(self, tenant_id):
        """Of the current version: the head's file in the payload, and the version."""
        exported = self.end(self("POST", ONE + "/export", tenant_id))
        answer = self("GET", ONE + "/payloads/{version}", tenant_id, exported["policy_version"])
        with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
            name = next(name for name in tar.getnames() if name.endswith("/head.safetensors"))
            return tar.extractfile(name).read(), exported["policy_version"]


ONE = "/v1/tenants/{tenant_id}"


def follow(caller, tenant_id, rows):
    """Returns when the tenant has so many rows of metrics."""
    with caller.http.stream("GET", f"/v1/tenants/{tenant_id}/metrics") as events:
        for line in events.iter_lines():
            rows -= line.startswith("data:")
            if rows == 0:
                return


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ServerProcess(tmp_path_factory.mktemp("server")).start()
    yield server
    assert server.stop() == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text(), server.log.read_text()


@pytest.fixture(autouse=True)
def _ran(request):
    yield
    Caller.tests.add(request.node.name)


@pytest.fixture(scope="module")
def root(server):
    return Caller(server.url, server.operator_token)


@pytest.fixture(scope="module")
def people(server, root):
    made = {
        name: root("POST", "/v1/operator/tokens", json={"owner": name}) for name in ("alice", "bob", "carol", "dan")
    }
    root("DELETE", "/v1/operator/tokens/{token_id}", made.pop("dan")["token_id"])
    return {name: Caller(server.url, token["token"]) for name, token in made.items()}


def test_two_train_and_one_evaluates_at_the_same_time_and_each_sees_its_own(server, root, people):
    alice, bob, carol = people.values()
    ids = {one: caller.create("arm") for one, caller in zip("abc", people.values(), strict=True)}
    sft = alice("POST", ONE + "/workloads", ids["a"], json=SFT, headers={"Nexus-Seq": "1"})
    rl = bob("POST", ONE + "/workloads", ids["b"], json=RL, headers={"Nexus-Seq": "1"})
    body = {"environment": {"name": "toy"}, "episodes": 6, "num_envs": 2}
    evaluation = carol("POST", ONE + "/evaluate", ids["c"], json=body)
    predictions = {}

    def predict(name, caller, tenant_id):
        meta = {"instructions": ["push"] * 2}
        route = ONE + "/inference/predict"
        predictions[name] = [caller("POST", route, tenant_id, json=meta, arrays=OBSERVATION).arrays for _ in range(12)]

    threads = [
        threading.Thread(target=predict, args=(n, people[p], ids[n])) for n, p in zip("abc", people, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one["action"].shape == (2, 2, 2) for given in predictions.values() for one in given)
    assert len(predictions) == 3
    measured = carol.end(evaluation)
    assert measured["n"] == 6 and measured["policy_version"] == 0 and measured["ci_low"] <= measured["success_rate"]
    assert alice.end(sft)["jobs"] == 8 and bob.end(rl)["jobs"] == 6
    for name, caller in zip("abc", people.values(), strict=True):
        assert [t["tenant_id"] for t in caller("GET", "/v1/tenants")["tenants"]] == [ids[name]]
        for other in set("abc") - {name}:
            caller("GET", ONE, ids[other], expect=404)
            caller("POST", ONE + "/export", ids[other], expect=404)
        caller("GET", "/v1/operator/overview", expect=403)
    bob("GET", "/v1/futures/{future_id}", sft["future_id"], expect=404)
    assert alice("GET", ONE, ids["a"])["policy_version"] == 8
    assert carol("GET", ONE, ids["c"])["policy_version"] == 0, "nobody trained it"
    losses = alice("GET", ONE + "/metrics", ids["a"], params={"follow": "false"})
    assert sum("train/loss" in row["metrics"] for row in losses) == 8
    overview = root("GET", "/v1/operator/overview")
    assert {t["owner"] for t in overview["tenants"]} == {"alice", "bob", "carol"}
    of = {t["tenant_id"]: t for t in overview["tenants"]}
    assert [of[ids[n]]["jobs"].get("completed", 0) for n in "abc"] == [8, 6, 0], "also when the workload is over"
    assert overview["stats"]["jobs_by_state"]["completed"] == 14
    assert [e["n"] for e in of[ids["c"]]["evaluations"]] == [6], "one that was asked for, too"
    assert overview["stats"]["inference"]["shared_backbone_calls"] > 0, "rows of several tenants in one pass"
    text = root("GET", "/metrics").text
    shared = float(re.search(r"^nexus_inference_shared_backbone_calls (.+)$", text, re.M)[1])
    assert shared > 0 and f'nexus_policy_version{{tenant="{ids["a"]}"}} 8.0' in text


def test_low_level_verbs_queue_and_sessions(people):
    bob, post = people["bob"], "POST"
    low = bob.create("low", head={**HEAD, "log_std_init": -0.7})
    environment = {"name": "toy"}
    batch = {**OBSERVATION, "action": np.zeros((2, 2, 2), np.float32)}
    text = {"instructions": ["push"] * 2}

    def train(verb, meta=None, arrays=None, wait=True, **more):
        ticket = bob(post, f"{ONE}/training/{verb}", low, json=meta or {}, arrays=arrays or {}, **more)
        return bob.end(ticket) if wait else ticket

    train("forward_backward", text, batch, wait=False, headers={"Nexus-Seq": "1"})
    train("optim_step", {"lr": 0.01}, wait=False, headers={"Nexus-Seq": "2"})
    loss = train("train_batch", text, batch)["loss:mean"]
    assert np.isfinite(loss) and train("save")["policy_version"] == 2
    params = train("export_params", wait=False)
    bob.end(params)
    weights = bob("GET", "/v1/futures/{future_id}/data", params["future_id"]).arrays
    assert train("load", {"version": 2})["policy_version"] == 3
    assert train("load", {}, weights)["policy_version"] == 4
    assert bob("GET", ONE + "/payloads", low)["payloads"]

    def direct(path, meta=None, arrays=None):
        return bob(post, f"{ONE}/{path}", low, json=meta or {}, **({} if arrays is None else {"arrays": arrays}))

    before = direct("inference/predict", text, OBSERVATION).arrays
    bob.end(direct("inference/load_weights", {"version": 2}))
    assert np.array_equal(direct("inference/predict", text, OBSERVATION).arrays["action"], before["action"])
    rollout = direct("inference/rollout", {"environment": environment, "episodes": 2, "num_envs": 2})
    assert len(bob.end(rollout)["success"]) == 2
    rows = bob("GET", "/v1/futures/{future_id}/data", rollout["future_id"]).arrays
    assert set(rows["episode"]) == {0, 1} and len(rows["reward"]) == len(rows["chunk"])

    direct("queue/queue_put", {"partition_id": "mine"}, batch)
    take = {"partition_id": "mine", "fields": ["action"], "task_name": "me"}
    meta = direct("queue/queue_get_meta", take)
    assert np.array_equal(direct("queue/queue_get", meta).arrays["action"], batch["action"])
    direct("queue/queue_clear", {"partition_id": "mine"})
    job = direct("scheduler/reserve", {"sample_count": 2, "metadata": {"instructions": "push"}})["job"]
    direct("queue/queue_put", {"partition_id": job["partition_id"]}, batch)
    direct("scheduler/mark", {"job_id": job["job_id"], "state": "ready"})
    assert bob.end(direct("training/train_job", {"job_id": job["job_id"]}))["policy_version"] == 5
    for verb in ("complete", "fail"):
        job = direct("scheduler/reserve", {"sample_count": 1})["job"]
        direct("scheduler/mark", {"job_id": job["job_id"], "state": "ready"})
        leased = direct("scheduler/lease_next")["job"]
        assert leased["job_id"] == job["job_id"]
        more = {"reason": "x"} if verb == "fail" else {}
        direct(f"scheduler/{verb}", {"job_id": job["job_id"], "lease_id": leased["lease_id"], **more})

    long = direct("workloads", {**SFT, "target_jobs": 100_000})
    control = ONE + "/workloads/{workload_id}"
    for action in ("pause", "resume", "cancel"):
        bob(post, f"{control}/{action}", low, long["workload_id"])
    bob.end(long, "cancelled")
    assert bob("GET", control, low, long["workload_id"])["status"] == "cancelled"
    waiting = bob(post, ONE + "/export", low, headers={"Nexus-Seq": "1000"})
    listed = bob(post, "/v1/futures/retrieve", json={"future_ids": [waiting["future_id"], long["future_id"]]})
    assert [f["status"] for f in listed["futures"]] == ["pending", "cancelled"]
    assert bob("DELETE", "/v1/futures/{future_id}", waiting["future_id"])["status"] == "cancelled"

    root = "/v1/environments/sessions"
    session = bob(post, root, json={"environment": environment, "tenant_id": low})["session_id"]
    one = root + "/{session_id}"
    start = bob(post, one + "/reset", session, json={"seed": 3})
    assert start.arrays["state"].shape == (4,)
    action = np.zeros(2, np.float32)
    steps = [bob(post, one + "/step", session, json={"request_seq": 1}, arrays={"action": action}) for _ in range(2)]
    assert np.array_equal(steps[0].arrays["state"], steps[1].arrays["state"]), "one step, answered twice"
    actions = {"actions": np.zeros((3, 2), np.float32)}
    assert bob(post, one + "/batch_step", session, json={"request_seq": 2}, arrays=actions).meta["steps"] <= 3
    bob(post, one + "/close", session)
    bob(post, one + "/reset", session, json={"seed": 3}, expect=410)
    bob("DELETE", ONE, low)
    bob("GET", ONE, low, expect=404)


def test_bad_input_is_the_callers_error_on_the_real_master_too(people):
    """Well-formed bodies whose content cannot be: never a 5xx, never an error of the server's, nobody else changed."""
    alice, bob = people["alice"], people["bob"]
    victim, tenant = alice.create("victim"), bob.create("clumsy", head={**HEAD, "log_std_init": -0.7})
    before = alice.weights(victim)
    state, image = OBSERVATION["observation/state"], OBSERVATION["observation/image/camera"]
    action = np.zeros((2, 2, 2), np.float32)
    nan, inf = np.float32("nan"), np.float32("inf")
    observations = [
        {},
        {"observation/state": state},
        {"observation/image/camera": image},
        {**OBSERVATION, "observation/state": state * nan},
        {**OBSERVATION, "observation/state": state + inf},
        {**OBSERVATION, "observation/state": state[:, :3]},
        {**OBSERVATION, "observation/state": state[0]},
        {**OBSERVATION, "observation/state": state[:0]},
        {**OBSERVATION, "observation/state": np.zeros((2, 4), bool)},
        {**OBSERVATION, "observation/state": np.zeros((2, 4), np.uint64)},
        {**OBSERVATION, "observation/state": np.full((2, 4), 1e300)},
        {**OBSERVATION, "observation/state": np.zeros((), np.float32)},
        {**OBSERVATION, "observation/image/camera": image.astype(np.float64)},
        {**OBSERVATION, "observation/image/camera": image[:, :1]},
        {**OBSERVATION, "observation/image/camera": image[:1]},
        {**OBSERVATION, "observation/image/camera": image[..., :7]},
        {**OBSERVATION, "observation/image/camera": np.zeros((2, 3, 0, 32), np.uint8)},
        {**OBSERVATION, "observation/image/other": image},
        {**OBSERVATION, "observation/image": image},
        {**OBSERVATION, "observation": image},
        {**OBSERVATION, "observation/state/deep": state},
    ]
    texts = [[], ["push"], ["push"] * 3, ["", ""], ["x" * 2000] * 2, ["\0", "\u202e"]]
    calls = [("inference/predict", {"instructions": ["push"] * 2}, given) for given in observations]
    calls += [("inference/predict", {"instructions": given}, OBSERVATION) for given in texts]
    calls += [
        ("inference/predict", {"instructions": ["push"] * 2, **more}, OBSERVATION)
        for more in ({"deterministic": False}, {"policy_version": 9}, {"policy_version": 2**53}, {"seed": 2**62})
    ]
    batches = [{**given, "action": action} for given in observations] + [
        {**OBSERVATION, **given}
        for given in (
            {},
            {"action": action * nan},
            {"action": action[:, :1]},
            {"action": action[..., :1]},
            {"action": action[:1]},
            {"action": action.astype(np.int8)},
            {"action": np.full_like(action, 1e38)},
            {"action": action, "is_pad": np.ones((2, 2), bool)},
            {"action": action, "is_pad": np.ones((2, 9), bool)},
            {"action": action, "advantage": np.ones(2, np.float32)},
        )
    ]
    for verb in ("train_batch",):  # forward_backward reads the same batches
        calls += [(f"training/{verb}", {"instructions": ["push"] * 2}, given) for given in batches]
        calls += [(f"training/{verb}", {"instructions": given}, {**OBSERVATION, "action": action}) for given in texts]
        rl = {"instructions": ["push"] * 2, "loss": "ppo"}
        columns = {name: np.full(2, nan) for name in ("advantage", "value_target", "state_value")}
        chunk = {"chunk": action, "log_probs": action}
        calls += [
            (f"training/{verb}", {**rl, "loss": "nothing"}, {**OBSERVATION, "action": action}),
            (f"training/{verb}", {**rl, "loss_options": {"clip_epsilon": "x"}}, {**OBSERVATION, **chunk}),
            (f"training/{verb}", {**rl, "loss_options": {"_target_": "os.system"}}, {**OBSERVATION, **chunk}),
            (f"training/{verb}", {**rl, "loss_options": {"gamma": "${oc.env:HOME}"}}, {**OBSERVATION, **chunk}),
            (f"training/{verb}", {**rl, "loss_options": {"epochs": -1, "minibatch_size": 0}}, {**OBSERVATION, **chunk}),
            (f"training/{verb}", rl, {**OBSERVATION, **chunk, **columns}),
            (f"training/{verb}", rl, {**OBSERVATION, "chunk": action}),
        ]
    calls += [("training/optim_step", {"lr": lr}, None) for lr in (0.0, 10.0)]
    calls += [("training/load", {"version": 77}, None), ("training/load", {}, None)]
    calls += [
        ("training/load", {}, given)
        for given in ({"nothing": state}, {"head.log_std": state}, {"normalizer.state_offset": np.full(4, nan)})
    ]
    calls += [("training/train_job", {"job_id": "nothing"}, None), ("inference/load_weights", {"version": 77}, None)]
    toy = [{"name": "toy", "horizon": -1}, {"name": "toy", "horizon": "x"}]
    for asked in (None, {"name": "no"}, {"name": "libero"}, *toy):
        asked = {} if asked is None else {"environment": asked}
        calls += [(path, {"episodes": 1, **asked}, None) for path in ("evaluate", "inference/rollout")]
    calls += [
        ("evaluate", {"episodes": 1, "environment": {"name": "toy"}, "policy_version": 99}, None),
        ("inference/rollout", {"episodes": 10_000, "environment": {"name": "toy"}}, None),
        ("queue/queue_put", {"partition_id": "p"}, {"a": state, "b": state[:1]}),
        ("queue/queue_put", {"partition_id": "p"}, {"a": np.zeros((), np.float32)}),
        ("queue/queue_put", {"partition_id": "p"}, {"a": state, "a/b": state}),
        ("queue/queue_put", {"partition_id": f"{victim}/own/p"}, {"a": state}),
        ("queue/queue_put", {}, {"a": state}),
        ("queue/queue_get_meta", {"partition_id": "q", "fields": ["a"], "task_name": "t"}, None),
        ("scheduler/complete", {"job_id": "x", "metadata": {"job_id": "y"}}, None),
        ("workloads", {"task": "sft"}, None),
        ("workloads", {"task": "sft", "target_jobs": 1}, None),
        ("workloads", {"task": "sft", "target_jobs": 1, "dataset": {"name": "toy", "repo_id": "../../etc"}}, None),
        ("workloads", {"task": "sft", "target_jobs": 1, "dataset": {"name": "toy", "batch_size": -3}}, None),
        ("workloads", {"task": "sft", "target_jobs": 1, "dataset": {"name": "toy", "batch_size": "x"}}, None),
        ("workloads", {"task": "sft", "target_jobs": 1, "dataset": {"name": "toy", "episodes": 0}}, None),
        ("workloads", {"task": "rl", "target_jobs": 1, "environment": {"name": "toy"}}, None),
        ("workloads", {"task": "rl", "target_jobs": 1, "environment": {"name": "toy"}, "algorithm": {"x": 1}}, None),
        ("workloads", {**RL, "algorithm": {**RL["algorithm"], "name": "no"}}, None),
        ("workloads", {**RL, "algorithm": {**RL["algorithm"], "epochs": -1}}, None),
        ("workloads", {**RL, "algorithm": {**RL["algorithm"], "gamma": 1e300}}, None),
        ("workloads", {**RL, "environment": {"name": "toy", "num_envs": 256}}, None),
        ("workloads", {**SFT, "eval": {"episodes": -1}}, None),
        ("workloads", {**SFT, "eval": {"every_n_jobs": 0}}, None),
        ("workloads", {**SFT, "features": {"reuse": "x"}}, None),
        ("workloads", {"task": "eval", "eval": {"episodes": 1}}, None),
    ]
    wrong, waiting = [], {}
    for number, (path, meta, arrays) in enumerate(calls, 1):
        more = {} if arrays is None else {"arrays": dict(arrays)}
        found = bob("POST", f"{ONE}/{path}", tenant, json=dict(meta), expect=(200, 202, *range(400, 500)), **more)
        if isinstance(found, dict) and "future_id" in found:
            waiting[found["future_id"]] = (path, meta, {n: (a.dtype.name, a.shape) for n, a in (arrays or {}).items()})
        if len(waiting) == 40 or number == len(calls):  # executed while the next ones are sent
            for future_id, call in waiting.items():
                found = bob("GET", "/v1/futures/{future_id}", future_id, params={"wait_s": 60})
                if found["error"] is not None and found["error"]["category"] != "user":
                    wrong.append((call, found["error"]))
            waiting = {}
    for name, spec in enumerate(
        [
            {"head": {"name": "no"}},
            {"head": {**HEAD, "hidden_dim": 10**9}},
            {"head": {**HEAD, "hidden_dim": -1}},
            {"head": {**HEAD, "hidden_dim": "x"}},
            {"head": {**HEAD, "_target_": "os.system"}},
            {"head": {**HEAD, "kind": "x"}},
            {"head": {**HEAD, "lr": -1.0}},
            {"head": {**HEAD, "betas": [2, 2]}},
            {"head": {**HEAD, "lr_schedule": "cosine", "warmup_steps": -5}},
            {"schema": {**SCHEMA, "chunk": 0}},
            {"schema": {**SCHEMA, "chunk": 10**6}},
            {"schema": {**SCHEMA, "cameras": ["../x"]}},
            {"schema": {**SCHEMA, "cameras": "camera"}},
            {"schema": {**SCHEMA, "state_dim": -1}},
            {"schema": {**SCHEMA, "image_size": -1}},
            {"schema": {**SCHEMA, "prompt": "{0.__class__}"}},
            {"schema": {**SCHEMA, "prompt": "${oc.env:HOME}"}},
            {"schema": {**SCHEMA, "unknown": 1}},
            {"schema": {}},
        ]
    ):
        body = {"name": f"n{name}", "schema": SCHEMA, "head": HEAD, **spec}
        refused = bob("POST", "/v1/tenants", json=body, expect=422)
        assert refused["error"]["details"], spec
    assert not wrong, wrong
    assert alice.weights(victim) == before


def test_killed_in_the_middle_a_workload_ends_as_if_it_had_not_been(server, root, people):
    alice = people["alice"]
    whole, cut = alice.create("whole"), alice.create("cut")
    work = {**SFT, "target_jobs": 24}
    assert alice.end(alice("POST", ONE + "/workloads", whole, json=work))["jobs"] == 24
    first = alice("POST", ONE + "/workloads", cut, json=work, headers={"Nexus-Seq": "1"})
    lost = alice("POST", ONE + "/export", cut, headers={"Nexus-Seq": "3"})
    follow(alice, cut, rows=5)
    server.kill()
    server.start()
    again = alice("POST", ONE + "/workloads", cut, json=work, headers={"Nexus-Seq": "1"})
    assert again["future_id"] == first["future_id"], "the retry is the same request"
    alice("POST", ONE + "/workloads", cut, json=SFT, headers={"Nexus-Seq": "1"}, expect=409)
    error = alice.end(lost, "failed")
    assert error["type"] == "server_restarted" and error["retryable"]
    restored = alice("GET", ONE, cut)["restored"]
    assert 0 < restored["policy_version"] < 24 and f"version {restored['policy_version']}" in error["message"]
    follow(alice, cut, rows=10)
    reached = alice("GET", ONE, cut)["policy_version"]
    assert server.stop() == 0, "SIGTERM: the running job ends, payloads are saved"
    server.start()
    assert alice("GET", ONE, cut)["restored"]["policy_version"] >= reached, "a clean stop loses no job"
    result = alice.end(first)
    assert (result["jobs"], result["policy_version"]) == (24, 24)
    assert len(alice("GET", ONE + "/workloads", cut)["workloads"]) == 1
    assert alice.weights(cut) == alice.weights(whole)
    assert alice("GET", ONE, whole)["policy_version"] == 24, "of the others nothing is lost"


def test_no_route_was_left_out(root, people):
    """Runs last in this module; without the others it has nothing to look at."""
    if len(Caller.tests) < 4:
        pytest.skip("the other tests of this module have not run here")
    people["carol"]("GET", "/v1/capabilities")
    root("GET", "/v1/operator/tokens")
    assert {row["action"] for row in root("GET", "/v1/operator/audit")["audit"]} >= {"create_token", "create_tenant"}
    for path in ("/", "/healthz", "/readyz"):
        root("GET", path)
    operations = {(m, p) for p, methods in root.http.get("/openapi.json").json()["paths"].items() for m in methods}
    assert Caller.called == operations
