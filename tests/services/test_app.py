"""The HTTP layer over FakeMaster (a stand-in that trains nothing): routes, ownership, order, errors, documents."""

from __future__ import annotations

import io
import json
import sqlite3
import tarfile
import time

import numpy as np
import pytest

from nexus_lightning.services.bodies import TOY_SCHEMA
from nexus_lightning.services.codec import MSGPACK, SAFETENSORS, Message, decode, encode
from nexus_lightning.services.errors import InvalidRequest, NexusError, NotFound, NotReady, error_from_json

SPEC = {"name": "arm", "schema": TOY_SCHEMA, "head": {"name": "mlp"}}
SFT = {"task": "sft", "dataset": {"name": "toy"}, "target_jobs": 4}
BATCH = {"observation/state": np.zeros((2, 4), np.float32), "action": np.ones((2, 2, 2), np.float32)}


def send(client, path, meta=None, arrays=None, kind=MSGPACK, **headers):
    body = encode(Message(meta or {}, arrays or {}), kind)
    return client.post(path, content=body, headers={"Content-Type": kind, **headers})


def create(client, name="arm"):
    answer = client.post("/v1/tenants", json={**SPEC, "name": name})
    assert answer.status_code == 201, answer.text
    return answer.json()["tenant_id"]


def result(client, answer, status="completed"):
    """Of a 202: waits for the end."""
    assert answer.status_code == 202, answer.text
    shown = client.get(f"/v1/futures/{answer.json()['future_id']}", params={"wait_s": 20}).json()
    assert shown["status"] == status, shown
    return shown["result"] if status == "completed" else shown["error"]


@pytest.fixture
def served(serve):
    return serve()


def test_create_is_idempotent_and_transactional(served):
    answers = [served.alice.post("/v1/tenants", json=SPEC) for _ in range(2)]
    assert [a.status_code for a in answers] == [201, 200]
    assert answers[0].json()["tenant_id"] == answers[1].json()["tenant_id"]
    assert answers[0].json()["loss"] is None, "a value that JSON has not becomes null"
    assert served.alice.post("/v1/tenants", json={**SPEC, "seed": 3}).status_code == 409
    assert create(served.bob) != answers[0].json()["tenant_id"], "names are per owner"
    for error, status in ((InvalidRequest("head: too large"), 422), (NexusError("boom"), 500)):
        served.master.fail_create = error
        assert served.alice.post("/v1/tenants", json={**SPEC, "name": "other"}).status_code == status
    served.master.fail_create = None
    assert [t["name"] for t in served.alice.get("/v1/tenants").json()["tenants"]] == ["arm"]
    create(served.alice, "other")
    listed = served.root.get("/v1/tenants").json()["tenants"]
    assert len(listed) == 3, "an operator sees all"


def test_quota_of_tenants_and_deletion(serve):
    served = serve(max_tenants_per_owner=1)
    first = create(served.alice)
    refused = served.alice.post("/v1/tenants", json={**SPEC, "name": "b"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (403, "quota_exceeded")
    waiting = served.alice.post(f"/v1/tenants/{first}/training/save", headers={"Nexus-Seq": "9"}).json()
    assert served.alice.delete(f"/v1/tenants/{first}").status_code == 204
    for path in (f"/v1/tenants/{first}", f"/v1/futures/{waiting['future_id']}"):
        assert served.alice.get(path).status_code == 404
    assert served.alice.delete(f"/v1/tenants/{first}").status_code == 404
    assert create(served.alice) != first


def test_pipelined_calls_equal_awaited_ones_and_retries_run_once(served):
    one, two = create(served.alice, "one"), create(served.alice, "two")
    for _ in range(2):
        for path in ("forward_backward", "optim_step"):
            result(served.alice, send(served.alice, f"/v1/tenants/{one}/training/{path}", {}, _arrays(path)))
    calls = list(enumerate(["forward_backward", "optim_step"] * 2, 1))
    answers = {}
    for seq, path in reversed(calls * 2):  # backwards and everything twice
        url, number = f"/v1/tenants/{two}/training/{path}", {"Nexus-Seq": str(seq)}
        answer = send(served.alice, url, {}, _arrays(path), SAFETENSORS, **number)
        assert answers.setdefault(seq, answer.json()["future_id"]) == answer.json()["future_id"]
    ids = list(answers.values())
    while any(f["status"] != "completed" for f in _retrieve(served.alice, ids)):
        pass
    assert np.array_equal(served.master.tenants[one]["weights"], served.master.tenants[two]["weights"])
    assert served.master.tenants[two]["policy_version"] == 2
    conflict = send(served.alice, f"/v1/tenants/{two}/training/save", {}, **{"Nexus-Seq": "1"})
    assert conflict.status_code == 409 and "next free number is 5" in conflict.text
    same = send(served.alice, f"/v1/tenants/{two}/training/forward_backward", {}, BATCH, **{"Nexus-Seq": "1"})
    assert same.json()["future_id"] == answers[1], "the same content in the other form is the same request"


def _arrays(path):
    return BATCH if path == "forward_backward" else {}


def _retrieve(client, ids):
    return client.post("/v1/futures/retrieve", json={"future_ids": ids, "wait_s": 1.0}).json()["futures"]


def test_workload_pause_cancel_and_end(served):
    tenant = create(served.alice)
    path = f"/v1/tenants/{tenant}/workloads"
    body = {"task": "sft", "dataset": {"name": "toy"}, "target_jobs": 4}
    first = served.alice.post(path, json=body).json()
    assert first["workload_id"].startswith("w")
    assert result(served.alice, served.alice.post(path, json=body), "failed")["type"] == "conflict"
    one = f"{path}/{first['workload_id']}"
    assert served.alice.post(one + "/pause").status_code == 200 and served.master.tenants[tenant]["paused"]
    assert served.alice.post(one + "/resume").status_code == 200 and not served.master.tenants[tenant]["paused"]
    evaluated = served.alice.post(f"/v1/tenants/{tenant}/evaluate", json={"episodes": 3})
    assert result(served.alice, evaluated)["n"] == 3, "while the workload runs"
    served.master.end_workload(tenant, result={"jobs": 4})
    assert served.alice.get(one).json()["result"] == {"jobs": 4}
    assert served.alice.post(one + "/pause").status_code == 409
    second = served.alice.post(path, json=body).json()
    while served.master.tenants[tenant]["workload"] is None:
        time.sleep(0.01)
    cancelled = served.alice.post(f"{path}/{second['workload_id']}/cancel")
    assert cancelled.json()["status"] == "cancelled"
    assert served.alice.post(f"{path}/{second['workload_id']}/cancel").json()["status"] == "cancelled"
    listed = served.alice.get(path).json()["workloads"]
    assert [w["status"] for w in listed] == ["completed", "failed", "cancelled"]
    assert served.alice.get(f"{path}/w{'0' * 32}").status_code == 404
    third = served.alice.post(path, json=body).json()
    while served.master.tenants[tenant]["workload"] is None:
        time.sleep(0.01)
    served.master.end_workload(tenant, "failed", error="loss is NaN in job 3")
    error = served.alice.get(f"/v1/futures/{third['future_id']}?wait_s=20").json()["error"]
    assert error["message"] == "loss is NaN in job 3" and error["category"] == "user"


def test_arrays_in_and_out(served):
    tenant = create(served.alice)
    result(served.alice, send(served.alice, f"/v1/tenants/{tenant}/training/train_batch", {"options": {}}, BATCH))
    exported = send(served.alice, f"/v1/tenants/{tenant}/training/export_params")
    assert result(served.alice, exported) == {}
    data = f"/v1/futures/{exported.json()['future_id']}/data"
    for accept, kind in (("*/*", MSGPACK), (SAFETENSORS, SAFETENSORS)):
        answer = served.alice.get(data, headers={"Accept": accept})
        assert answer.headers["content-type"] == kind
        weights = decode(answer.content, kind).arrays["head/weight"]
        assert np.array_equal(weights, served.master.tenants[tenant]["weights"])
    result(served.alice, send(served.alice, f"/v1/tenants/{tenant}/training/load", {}, {"head/weight": weights + 1}))
    assert np.array_equal(served.master.tenants[tenant]["weights"], weights + 1)
    state = {"observation/state": np.zeros((3, 4), np.float32)}
    path = f"/v1/tenants/{tenant}/inference/predict"
    answer = send(served.alice, path, {"instructions": ["x"] * 3}, state)
    assert decode(answer.content, MSGPACK).arrays["action"].shape == (3, 4)
    assert send(served.alice, path, {"instructions": ["x"]}, state).status_code == 422
    rollout = send(served.alice, f"/v1/tenants/{tenant}/inference/rollout", {"episodes": 2})
    assert result(served.alice, rollout) == {"episodes": 2}
    assert served.alice.get(f"/v1/futures/{rollout.json()['future_id']}/data").status_code == 200
    empty = served.alice.get(f"/v1/futures/{'f' * 33}/data")
    assert empty.status_code == 404


def test_queue_and_scheduler_answer_directly_and_in_order(served):
    tenant = create(served.alice)
    root = f"/v1/tenants/{tenant}"
    put = {"partition_id": "p/1"}
    assert send(served.alice, f"{root}/queue/queue_put", put, BATCH).json() == put
    meta = served.alice.post(
        f"{root}/queue/queue_get_meta", json={"partition_id": "p/1", "fields": ["action"], "task_name": "train"}
    ).json()
    rows = send(served.alice, f"{root}/queue/queue_get", {"metadata": meta["metadata"]})
    assert np.array_equal(decode(rows.content, MSGPACK).arrays["action"], BATCH["action"])
    assert served.alice.post(f"{root}/queue/queue_clear", json=put).json() == {"rows": 1}
    gone = served.alice.post(f"{root}/queue/queue_clear", json=put)
    assert (gone.status_code, gone.json()["error"]["type"]) == (404, "not_found")
    job = served.alice.post(f"{root}/scheduler/reserve", json={"sample_count": 2}).json()["job"]
    mark = {"job_id": job["job_id"], "state": "ready"}
    assert served.alice.post(f"{root}/scheduler/mark", json=mark).json()["job"]["state"] == "ready"
    lease = [served.alice.post(f"{root}/scheduler/lease_next", headers={"Nexus-Seq": "7"}).json() for _ in range(2)]
    assert lease[0]["job"]["job_id"] == job["job_id"] and lease[0] == lease[1], "a retry gets the lease it lost"
    assert served.alice.post(f"{root}/scheduler/lease_next").json() == {"job": None}
    for verb, more in (("complete", {}), ("fail", {"reason": "x"})):
        done = served.alice.post(f"{root}/scheduler/{verb}", json={"job_id": job["job_id"], **more})
        assert done.status_code == 200


def test_payload_is_a_tar_with_equal_bytes(served):
    tenant = create(served.alice)
    exported = result(served.alice, served.alice.post(f"/v1/tenants/{tenant}/export"))
    assert exported["policy_version"] == 0 and exported["files"][:2] == ["head.safetensors", "manifest.json"]
    answers = [served.alice.get(exported["url"]).content for _ in range(2)]
    assert answers[0] == answers[1]
    with tarfile.open(fileobj=io.BytesIO(answers[0])) as tar:
        names = ["head.safetensors", "manifest.json", "processors/policy.json"]
        assert tar.getnames() == [f"v00000000/{name}" for name in names]
        assert tar.extractfile("v00000000/head.safetensors").read() == b"weights of " + tenant.encode()
    assert served.alice.get(f"/v1/tenants/{tenant}/payloads").json()["payloads"][0]["policy_version"] == 0
    assert served.alice.get(f"/v1/tenants/{tenant}/payloads/5").status_code == 404
    assert served.root.get(exported["url"]).status_code == 403, "weights are the owner's alone"


def test_metrics_as_list_and_as_events_that_resume(served, monkeypatch):
    tenant = create(served.alice)
    path = f"/v1/tenants/{tenant}/metrics"
    waits = []

    def wait_metrics(tenant_id, after, timeout_s):
        """Nothing, then one row, then the tenant is gone."""
        waits.append(after)
        if len(waits) == 2:
            served.master.log(tenant, loss=0.1)
        elif len(waits) == 3:
            raise NotFound("tenant: unknown")
        return served.master.metrics(tenant_id, after)

    monkeypatch.setattr(served.master, "wait_metrics", wait_metrics)
    for loss in (1.0, float("nan"), 0.25):
        served.master.log(tenant, loss=loss)
    rows = served.alice.get(path, params={"follow": "false", "after": 1}).json()
    assert [row["id"] for row in rows] == [2, 3] and rows[0]["metrics"]["loss"] is None
    answer = served.alice.get(path, headers={"Last-Event-ID": "2"})
    events = [event for event in answer.text.split("\n\n") if event.startswith("id:")]
    assert [event.splitlines()[0] for event in events] == ["id: 3", "id: 4"]
    assert json.loads(events[1].splitlines()[1].removeprefix("data: "))["metrics"] == {"loss": 0.1}
    assert waits == [3, 3, 4] and served.service._streams.total() == 0
    owner = served.service.accounts.authenticate(served.alice.headers["Authorization"]).owner_id
    served.service._streams[owner] = 8
    assert served.alice.get(path).status_code == 403
    assert served.alice.get(path, params={"follow": "false"}).status_code == 200


def test_sessions_of_environments(serve):
    served = serve(max_sessions=2)
    root = "/v1/environments/sessions"
    body = {"environment": {"name": "toy"}}
    opened = [served.alice.post(root, json=body).json()["session_id"] for _ in range(2)]
    assert served.alice.post(root, json=body).status_code == 403
    one = f"{root}/{opened[0]}"
    assert decode(served.alice.post(one + "/reset", json={"seed": 1}).content, MSGPACK).arrays["state"].shape == (4,)
    for verb, arrays in (("step", {"action": np.zeros(2)}), ("batch_step", {"actions": np.zeros((3, 2))})):
        assert send(served.alice, f"{one}/{verb}", {"request_seq": 1}, arrays).status_code == 200
    assert served.alice.post(one + "/close").status_code == 200
    lost = served.alice.post(one + "/reset", json={"seed": 1})
    assert (lost.status_code, lost.json()["error"]["type"]) == (410, "session_lost")
    assert served.alice.post(f"{root}/{opened[1]}/reset", json={"seed": 666}).status_code == 410
    assert served.alice.post(root, json=body).status_code == 200, "lost ones do not count"
    tenant = create(served.bob)
    assert served.alice.post(root, json={**body, "tenant_id": tenant}).status_code == 404


def test_accounts_over_http(served):
    made = served.root.post("/v1/operator/tokens", json={"owner": "carol"})
    assert made.status_code == 201
    served.tokens["carol"] = made.json()["token"]
    carol = served.client("carol")
    assert carol.get("/v1/tenants").json() == {"tenants": []}
    listed = served.root.get("/v1/operator/tokens")
    assert {t["owner"] for t in listed.json()["tokens"]} == {"root", "alice", "bob", "carol"}
    assert "nxl_" not in listed.text and "digest" not in listed.text
    assert served.root.delete(f"/v1/operator/tokens/{made.json()['token_id']}").status_code == 204
    refused = carol.get("/v1/tenants")
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    actions = [row["action"] for row in served.root.get("/v1/operator/audit").json()["audit"]]
    assert actions == ["create_token", "revoke_token"]
    tenant = create(served.alice)
    seen = served.root.get("/v1/operator/overview").json()
    assert [(t["tenant_id"], t["owner"]) for t in seen["tenants"]] == [(tenant, "alice")]
    for path, body in ((f"/v1/tenants/{tenant}/workloads", SFT), (f"/v1/tenants/{tenant}/training/save", {})):
        assert served.root.post(path, json=body).status_code == 403, "an operator does not train what others own"
    for path in ("/v1/operator/overview", "/v1/operator/tokens", "/v1/operator/audit", "/metrics"):
        assert served.alice.get(path).status_code == 403 and served.nobody.get(path).status_code == 401


def test_an_operator_pauses_cancels_and_deletes_what_others_own_and_the_audit_log_tells(served):
    tenant = create(served.alice)
    path = f"/v1/tenants/{tenant}/workloads"
    ticket = served.alice.post(path, json=SFT).json()
    one, mine = f"{path}/{ticket['workload_id']}", served.master.tenants[tenant]
    while mine["workload"] is None:
        time.sleep(0.01)
    for action in ("pause", "resume", "cancel"):
        foreign = served.bob.post(f"{one}/{action}")
        unknown = served.bob.post(f"{one}/{action}".replace(tenant, "t" + "0" * 32))
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.json()["error"]["message"].replace(tenant, "t" + "0" * 32) == unknown.json()["error"]["message"]
    assert served.bob.delete(f"/v1/tenants/{tenant}").status_code == 404 and mine["workload"] is not None
    assert served.root.post(one + "/pause").status_code == 200 and mine["paused"]
    assert served.root.post(one + "/resume").status_code == 200 and not mine["paused"]
    assert served.root.post(one + "/cancel").json()["status"] == "cancelled" and mine["workload"] is None
    error = served.alice.get(f"/v1/futures/{ticket['future_id']}").json()["error"]
    assert (error["type"], error["message"]) == ("cancelled", "cancelled by the operator root"), (
        "its owner sees by whom"
    )
    waits = served.alice.post(path, json=SFT, headers={"Nexus-Seq": "9"}).json()  # has not started
    assert served.root.post(f"{path}/{waits['workload_id']}/cancel").json()["status"] == "cancelled"
    error = served.alice.get(f"/v1/futures/{waits['future_id']}").json()["error"]
    assert error["message"] == "cancelled by the operator root"
    assert served.root.delete(f"/v1/tenants/{tenant}").status_code == 204
    assert served.alice.get(f"/v1/tenants/{tenant}").status_code == 404 and not served.master.tenants
    own = create(served.root)
    assert served.root.delete(f"/v1/tenants/{own}").status_code == 204
    rows = [(r["action"], r["target"], r["outcome"]) for r in served.root.get("/v1/operator/audit").json()["audit"]]
    assert rows == [
        ("create_tenant", tenant, "ok"),
        *((f"{a}_workload", ticket["workload_id"], "ok, of alice") for a in ("pause", "resume", "cancel")),
        ("cancel_workload", waits["workload_id"], "ok, of alice"),
        ("delete_tenant", tenant, "ok, of alice"),
        ("create_tenant", own, "ok"),
        ("delete_tenant", own, "ok"),
    ]


class FullDisk:
    """A SQLite connection whose commits fail as on a full disk while ``full``."""

    def __init__(self, db) -> None:
        self.db, self.full = db, True

    def __getattr__(self, name):
        return getattr(self.db, name)

    def execute(self, sql, *values):
        if sql == "COMMIT" and self.full:
            raise sqlite3.OperationalError("database or disk is full")
        return self.db.execute(sql, *values)


def test_a_full_disk_is_told_as_507_and_everything_goes_on_when_there_is_room(served):
    tenant, doomed = create(served.alice), create(served.alice, "doomed")
    done = served.alice.post(f"/v1/tenants/{tenant}/training/save").json()
    result_path = f"/v1/futures/{done['future_id']}"
    while served.service.futures.in_flight(served.service.store.owners()[1]["owner_id"]):
        time.sleep(0.01)
    disk = served.service.store._db = FullDisk(served.service.store._db)
    calls = [
        ("POST", "/v1/tenants", {**SPEC, "name": "more"}),
        ("POST", f"/v1/tenants/{tenant}/workloads", SFT),
        ("POST", f"/v1/tenants/{tenant}/training/save", {}),
        ("DELETE", f"/v1/tenants/{doomed}", None),
    ]
    for method, path, body in calls:
        answer = served.alice.request(method, path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["retryable"]) == (507, "storage_full", True), answer.text
        assert answer.headers["retry-after"] == "5"
        assert "database" not in error["message"], "what the disk said is the operator's"
    assert [t["name"] for t in served.alice.get("/v1/tenants").json()["tenants"]] == ["arm", "doomed"]
    assert served.alice.get(result_path).json()["status"] == "completed", "what is there can be read"
    ready = served.nobody.get("/readyz")
    assert ready.status_code == 503 and "1 writes to the disk fail" in ready.json()["error"]["message"]
    overview = served.root.get("/v1/operator/overview").json()
    assert overview["alarms"] == ["services.sqlite: database or disk is full"]
    assert b"nexus_alarms 1.0" in served.root.get("/metrics").content
    assert served.nobody.get("/healthz").status_code == 200
    state = {"observation/state": np.zeros((3, 4), np.float32)}
    predicted = send(served.alice, f"/v1/tenants/{tenant}/inference/predict", {"instructions": ["x"] * 3}, state)
    assert predicted.status_code == 200, "it needs no disk"

    disk.full = False
    for (method, path, body), status in zip(calls, (201, 202, 202, 204), strict=True):
        assert served.alice.request(method, path, json=body).status_code == status
    time.sleep(1.1)  # one probe a second
    assert served.nobody.get("/readyz").status_code == 200
    assert served.root.get("/v1/operator/overview").json()["alarms"] == []
    served.master.alarm_lines = ["payload of tenant t1: No space left on device"]
    assert served.nobody.get("/readyz").status_code == 503, "told at once"
    assert served.root.get("/v1/operator/overview").json()["alarms"] == served.master.alarm_lines


def test_a_server_starts_on_a_full_disk_and_loses_nobody(serve, monkeypatch):
    served = serve()
    tenant = create(served.alice)
    ticket = served.alice.post(f"/v1/tenants/{tenant}/workloads", json=SFT).json()
    served.alice.post(f"/v1/tenants/{tenant}/training/save", headers={"Nexus-Seq": "5"})
    while served.service.store.request(ticket["future_id"])["status"] != "running":
        time.sleep(0.01)
    served.close()

    def full(*args, **kwargs):
        raise sqlite3.OperationalError("database or disk is full")

    for name in ("set_tenant", "drop_tenant", "end", "start"):
        monkeypatch.setattr(f"nexus_lightning.services.store.Store.{name}", full)
    again = serve()
    described = again.service.describe(again.service.accounts.authenticate(_bearer(again, "alice")), tenant)
    assert described["restored"]["policy_version"] == 7 and described["state"] == "idle"
    assert again.service.futures.unsaved == 1, "that the save was cut off is told once there is room"


def _bearer(served, name):
    return f"Bearer {served.tokens[name]}"


@pytest.mark.parametrize("step", ["set_tenant", "drop_tenant"])
def test_a_deletion_that_a_full_disk_cuts_off_goes_on_with_the_next_call(served, monkeypatch, step):
    tenant, real = create(served.alice), getattr(served.service.store, step)

    def full(*args):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(served.service.store, step, full)
    assert served.alice.delete(f"/v1/tenants/{tenant}").status_code == 507
    seen = served.alice.get(f"/v1/tenants/{tenant}").status_code
    assert seen == (200 if step == "set_tenant" else 404), "all of it or nothing, for whoever looks"
    if step == "drop_tenant":
        refused = served.alice.post("/v1/tenants", json=SPEC)
        assert refused.status_code == 409 and f"delete {tenant} again" in refused.text
        assert served.bob.delete(f"/v1/tenants/{tenant}").status_code == 404
    monkeypatch.setattr(served.service.store, step, real)
    assert served.alice.delete(f"/v1/tenants/{tenant}").status_code == 204
    assert served.alice.delete(f"/v1/tenants/{tenant}").status_code == 404 and not served.master.tenants
    create(served.alice)


def test_a_creation_that_a_full_disk_cuts_off_leaves_nothing_and_can_be_made_again(served, monkeypatch):
    def full(*args):
        raise sqlite3.OperationalError("database or disk is full")

    for names in (["set_tenant"], ["set_tenant", "drop_tenant"]):
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(served.service.store, name, full)
            assert served.alice.post("/v1/tenants", json=SPEC).status_code == 507
        assert not served.master.tenants and served.alice.get("/v1/tenants").json() == {"tenants": []}
    create(served.alice)
    assert len(served.service.store.tenants()) == 1


def test_prometheus_counts_per_tenant_and_forgets_deleted_ones(served):
    tenant = create(served.alice)
    result(served.alice, served.alice.post(f"/v1/tenants/{tenant}/training/save"))
    text = served.root.get("/metrics").text
    assert f'nexus_requests_total{{status="completed",tenant="{tenant}",verb="save"}} 1.0' in text
    assert f'nexus_policy_version{{tenant="{tenant}"}} 0.0' in text and "nexus_http_seconds_bucket" in text
    served.nobody.request("BREW", f"/{tenant}")
    served.alice.delete(f"/v1/tenants/{tenant}")
    text = served.root.get("/metrics").text
    assert tenant not in text and 'method="other",route="unmatched"' in text


def test_limits_of_rate_and_in_flight(serve):
    served = serve(requests_per_s=0.001, max_in_flight=1)
    answers = [served.alice.get("/v1/tenants") for _ in range(2)]
    assert [a.status_code for a in answers] == [200, 429]
    error = error_from_json(answers[1].json())
    assert error.retryable and 500 < error.retry_after_s <= 1000
    assert int(answers[1].headers["retry-after"]) == round(error.retry_after_s)
    served.service.accounts._rate = 1e6
    tenant = create(served.bob)
    send(served.bob, f"/v1/tenants/{tenant}/training/save", **{"Nexus-Seq": "2"})
    refused = send(served.bob, f"/v1/tenants/{tenant}/training/save", **{"Nexus-Seq": "3"})
    assert refused.json()["error"]["type"] == "quota_exceeded"
    filled = send(served.bob, f"/v1/tenants/{tenant}/training/save", **{"Nexus-Seq": "2"})
    assert filled.status_code == 202, "a repetition is answered at the bound"


def test_bodies_are_cut_off_at_the_limit(served):
    tenant = create(served.alice)
    path = f"/v1/tenants/{tenant}/training/forward_backward"
    read = []

    def endless():
        for _ in range(64):
            read.append(1)
            yield b"x" * (1 << 16)

    for content in (b"x" * ((1 << 20) + 1), endless()):
        answer = served.alice.post(path, content=content, headers={"Content-Type": MSGPACK})
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "too_large")
    assert served.nobody.post(path, content=endless()).status_code == 401
    assert served.alice.post(path, content=b"x", headers={"Content-Type": "text/plain"}).status_code == 415


def test_starting_and_stopping_say_so(served):
    tenant = create(served.alice)
    assert served.nobody.get("/readyz").json() == {"status": "ready"}
    served.master.ready = False
    refused = served.alice.get(f"/v1/tenants/{tenant}")
    assert refused.status_code == 503 and refused.json()["error"]["retryable"]
    assert served.nobody.get("/readyz").status_code == 503 and served.nobody.get("/healthz").status_code == 200
    served.master.ready = True

    def broken(timeout_s):
        raise TimeoutError("the loop does not answer")

    served.master.ping = broken
    served.service._probe = None
    assert served.nobody.get("/readyz").status_code == 503
    served.service.stop()
    assert served.alice.post("/v1/tenants", json=SPEC).status_code == 503


def test_a_slow_call_of_one_does_not_delay_another(served):
    slow, quick = create(served.alice), create(served.bob)
    served.master.gate.clear()
    held = [send(served.alice, f"/v1/tenants/{slow}/training/save").json()["future_id"] for _ in range(30)]
    served.master._call = lambda verb, tenant_id, *values: served.master.tenants[tenant_id]
    result(served.bob, send(served.bob, f"/v1/tenants/{quick}/training/save"))
    assert served.alice.get(f"/v1/futures/{held[0]}").json()["status"] == "running"
    served.master.gate.set()
    assert result(served.alice, send(served.alice, f"/v1/tenants/{slow}/training/save"))


def test_a_restart_brings_back_what_it_can_and_says_what_it_cannot(serve):
    served = serve()
    tenant, broken = create(served.alice), create(served.alice, "broken")
    path = f"/v1/tenants/{tenant}/workloads"
    body = {"task": "sft", "dataset": {"name": "toy"}, "target_jobs": 4}
    first = served.alice.post(path, json=body, headers={"Nexus-Seq": "1"}).json()
    lost = send(served.alice, f"/v1/tenants/{tenant}/training/save", **{"Nexus-Seq": "3"}).json()
    while served.master.tenants[tenant]["workload"] is None:
        time.sleep(0.01)
    workload_id = served.alice.get(path).json()["workloads"][0]["workload_id"]
    assert served.alice.post(f"{path}/{workload_id}/pause").status_code == 200
    session = served.alice.post("/v1/environments/sessions", json={"environment": {"name": "toy"}}).json()["session_id"]
    half = "t" + "1" * 32
    served.service.store.add_tenant(half, served.service.store.owners()[1]["owner_id"], "half", SPEC)
    gone = create(served.alice, "gone")
    served.alice.post(f"/v1/tenants/{gone}/training/save")

    def stopped(tenant_id):
        raise NotReady("the server stops")

    served.master.delete_tenant = stopped
    assert served.alice.delete(f"/v1/tenants/{gone}").status_code == 503
    assert served.alice.get(f"/v1/tenants/{gone}").status_code == 404, "it is not used again"
    tokens = served.tokens
    served.close()

    served = serve()
    served.tokens = tokens
    assert ("delete", gone) in served.master.calls, "the deletion was ended"
    assert gone not in [row["tenant_id"] for row in served.service.store.tenants()]
    alice = served.client("alice")
    again = alice.post(path, json=body, headers={"Nexus-Seq": "1"}).json()
    assert again["future_id"] == first["future_id"], "the client's retry finds the request of before"
    while ("submit", tenant, "sft", True) not in served.master.calls:
        time.sleep(0.01)
    assert served.master.tenants[tenant]["paused"], "as it was before"
    assert alice.post(f"{path}/{workload_id}/resume").status_code == 200 and not served.service.store.paused()
    served.master.end_workload(tenant, result={"jobs": 4})
    assert alice.get(f"/v1/futures/{first['future_id']}?wait_s=20").json()["result"] == {"jobs": 4}
    error = alice.get(f"/v1/futures/{lost['future_id']}").json()["error"]
    assert error["type"] == "server_restarted" and error["retryable"] and "policy version 7" in error["message"]
    assert alice.get(f"/v1/tenants/{tenant}").json()["restored"]["policy_version"] == 7
    shown = alice.get(f"/v1/tenants/{broken}").json()
    assert shown["state"] == "lost" and "secret" not in json.dumps(shown)
    assert alice.post(f"/v1/tenants/{broken}/export").status_code == 409
    assert alice.delete(f"/v1/tenants/{broken}").status_code == 204
    assert alice.get(f"/v1/tenants/{half}").status_code == 404, "its creation never ended: nobody was told its id"
    assert alice.post(f"/v1/environments/sessions/{session}/reset", json={"seed": 0}).status_code == 410


def test_openapi_is_complete(served):
    schema = served.nobody.get("/openapi.json").json()
    operations = [(m, p, o) for p, ms in schema["paths"].items() for m, o in ms.items()]
    ids = [o["operationId"] for _, _, o in operations]
    assert len(set(ids)) == len(ids) > 45
    for method, path, operation in operations:
        if not path.startswith(("/v1", "/metrics")):
            continue
        assert operation["summary"] and operation["security"] == [{"token": []}], path
        assert "#/components/schemas/ErrorAnswer" in json.dumps(operation["responses"]["4XX"]), path
        assert ("requestBody" in operation) == (method == "post"), path
    for name in ("TenantSpec", "Workload", "Predict", "Future", "ErrorAnswer", "NewToken"):
        assert name in schema["components"]["schemas"]
    predict = schema["paths"]["/v1/tenants/{tenant_id}/inference/predict"]["post"]
    assert set(predict["requestBody"]["content"]) == {"application/json", MSGPACK, SAFETENSORS}
    examples = [s.get("example") for s in schema["components"]["schemas"].values() if s.get("example")]
    assert len(examples) > 15
    assert json.dumps(schema).count("$ref") > 30 and served.nobody.get("/docs").status_code == 200


def test_the_page_may_load_nothing_from_elsewhere(served):
    answer = served.nobody.get("/")
    assert answer.status_code == 200 and "connect-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("path", ["/nothing", "/v1/tenants/x/nothing"])
def test_unknown_routes_use_the_error_form(served, path):
    assert served.alice.get(path).json()["error"]["type"] == "not_found"
    wrong = served.alice.put("/v1/tenants")
    assert wrong.status_code == 405 and wrong.json()["error"]["message"] == "Method Not Allowed"
