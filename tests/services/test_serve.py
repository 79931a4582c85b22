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


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = ServerProcess(tmp_path_factory.mktemp("server")).start()
    yield server
    assert server.stop() == 0, server.log.read_text()
    assert "Traceback" not in server.log.read_text(), server.log.read_text()


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
    assert overview["stats"]["inference"]["shared_backbone_calls"] > 0, "rows of several tenants in one pass"
    text = root("GET", "/metrics").text
    shared = float(re.search(r"^nexus_inference_shared_backbone_calls (.+)$", text, re.M)[1])
    assert shared > 0 and f'nexus_policy_version{{tenant="{ids["a"]}"}} 8.0' in text


def test_killed_in_the_middle_a_workload_ends_as_if_it_had_not_been(server, root, people):
    alice = people["alice"]
    whole, cut = alice.create("whole"), alice.create("cut")
    work = {**SFT, "target_jobs": 20}
    assert alice.end(alice("POST", ONE + "/workloads", whole, json=work))["jobs"] == 20
    first = alice("POST", ONE + "/workloads", cut, json=work, headers={"Nexus-Seq": "1"})
    lost = alice("POST", ONE + "/export", cut, headers={"Nexus-Seq": "3"})
    with alice.http.stream("GET", f"/v1/tenants/{cut}/metrics") as events:
        rows = 0
        for line in events.iter_lines():
            rows += line.startswith("data:")
            if rows == 5:
                break
    server.kill()
    server.start()
    again = alice("POST", ONE + "/workloads", cut, json=work, headers={"Nexus-Seq": "1"})
    assert again["future_id"] == first["future_id"], "the retry is the same request"
    alice("POST", ONE + "/workloads", cut, json=SFT, headers={"Nexus-Seq": "1"}, expect=409)
    error = alice.end(lost, "failed")
    assert error["type"] == "server_restarted" and error["retryable"]
    restored = alice("GET", ONE, cut)["restored"]
    assert 0 < restored["policy_version"] < 20 and f"version {restored['policy_version']}" in error["message"]
    result = alice.end(first)
    assert (result["jobs"], result["policy_version"]) == (20, 20)
    assert len(alice("GET", ONE + "/workloads", cut)["workloads"]) == 1
    assert alice.weights(cut) == alice.weights(whole)
    assert alice("GET", ONE, whole)["policy_version"] == 20, "of the others nothing is lost"
    root("GET", "/v1/operator/overview")
