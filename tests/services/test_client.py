"""The client against the real HTTP server (uvicorn), whose master is a FAKE; faults are put between the two."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

from nexus_lightning.client import (
    ConnectionLost,
    FutureCancelled,
    FutureFailed,
    FutureTimeout,
    Message,
    NexusClient,
    NexusError,
)
from nexus_lightning.client.__main__ import main
from nexus_lightning.services.errors import (
    Conflict,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    NotReady,
    RateLimited,
    SessionLost,
    Unauthorized,
)

SCHEMA = {"state_dim": 4, "action_dim": 2, "chunk": 2, "execute": 2}


@pytest.fixture
def server(serve, monkeypatch):
    from client_server import Server

    monkeypatch.setattr("nexus_lightning.client.http.FIRST_PAUSE_S", 0.01)
    running = Server(serve())
    yield running
    running.stop()


@pytest.fixture
def client(server):
    return server.client()


@pytest.fixture
def tenant(client):
    return client.create_tenant("arm", SCHEMA, "mlp")


def batch(value, rows=2):
    observation = {"state": np.zeros((rows, 4), np.float32)}
    return observation, ["go"] * rows, np.full((rows, 2, 2), value, np.float32)


def end_soon(master, tenant_id, status="completed", **outcome):
    """Ends the tenant's workload a moment after it began to run."""

    def end():
        while master.tenants[tenant_id]["on_end"] is None:
            time.sleep(0.01)
        time.sleep(0.1)
        master.end_workload(tenant_id, status, **outcome)

    return in_thread(end, 0.0)


def in_thread(function, delay_s=0.1):
    def run():
        time.sleep(delay_s)
        function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


# ---- verbs ----


def test_a_tenant_from_beginning_to_end(server, client):
    assert client.capabilities()["backbone"] == "fake"
    tenant = client.create_tenant("arm", SCHEMA, {"name": "mlp", "lr": 0.1}, seed=1)
    assert client.create_tenant("arm", SCHEMA, {"name": "mlp", "lr": 0.1}, seed=1) is tenant
    with pytest.raises(Conflict, match="another spec"):
        client.create_tenant("arm", SCHEMA, "mlp")
    with pytest.raises(InvalidRequest, match="choose mlp"):
        client.create_tenant("other", SCHEMA, "transformer")
    assert client.tenant("arm") is tenant is client.tenant(tenant.tenant_id)
    assert [t["name"] for t in client.list_tenants()] == ["arm"]
    with pytest.raises(NotFound, match="'nobody'"):
        client.tenant("nobody")

    workload = tenant.train("sft", dataset="toy", target_jobs=3)
    assert tenant.workload().workload_id == workload.workload_id and not workload.done()
    while workload.status()["status"] != "running":
        time.sleep(0.01)
    workload.pause(), tenant.resume()
    with pytest.raises(FutureTimeout, match="running"):
        workload.result(timeout=0.05)
    thread = end_soon(server.master, tenant.tenant_id, result={"jobs": 3, "policy_version": 3})
    assert workload.result(timeout=10) == {"jobs": 3, "policy_version": 3} == workload.result()
    thread.join()

    assert tenant.evaluate(4, environment="toy").result()["n"] == 4
    rolled = tenant.rollout(2, environment="toy").result()
    assert isinstance(rolled, Message) and rolled.meta == {"episodes": 2} and rolled.arrays["reward"].tolist() == [1, 1]
    observation, texts, action = batch(1.0)
    assert tenant.train_batch(observation, texts, action, options={"lr": 0.5}).result()["policy_version"] == 1
    assert tenant.predict(observation, texts)["action"].tolist() == [[-0.5] * 4] * 2
    assert tenant.export_params().result()["head/weight"].tolist() == [-0.5] * 4
    assert tenant.save().result() == {"policy_version": 1}
    tenant.load({"head/weight": np.full(4, 2.0, np.float32)}).result()
    assert tenant.predict(observation, texts)["action"][0, 0] == 2.0
    assert tenant.load(1).result() and tenant.load_weights(1).result()
    with pytest.raises(FutureFailed, match="version 9") as caught:
        tenant.load(9).result()
    assert caught.value.category == "user" and caught.value.reason == "not_found"

    tenant.delete()
    with pytest.raises(NotFound):
        tenant.describe()


def test_a_payload_comes_home(client, tenant, tmp_path):
    found = tenant.export().result()
    assert found["policy_version"] == 0 and tenant.payloads()[0]["name"] == "v00000000"
    folder = tenant.download(0, tmp_path)
    assert folder == tmp_path / "v00000000"
    assert (folder / "head.safetensors").read_bytes() == b"weights of " + tenant.tenant_id.encode()


def test_queue_and_scheduler(tenant):
    job = tenant.reserve(4)["job"]
    tenant.queue_put({"action": np.ones((4, 2), np.float32)}, partition_id="p")
    assert tenant.mark(job["job_id"], "ready")["job"]["state"] == "ready"
    metadata = tenant.queue_get_meta("p", ["action"], "train", 4)["metadata"]
    assert tenant.queue_get(metadata)["action"].shape == (4, 2)
    assert tenant.lease_next()["job"]["job_id"] == job["job_id"]
    assert tenant.train_job(job["job_id"]).result() == {"policy_version": 0}
    tenant.complete(job["job_id"], 1), tenant.queue_clear("p"), tenant.fail(job["job_id"], "no reason")
    with pytest.raises(NotFound, match="partition p"):
        tenant.queue_clear("p")
    assert tenant.lease_next() == {"job": None}  # the number of the refused request is no gap


def test_environment_sessions(server, client):
    with client.open_session("toy", seed=1) as session:
        assert session.reset(3).arrays["state"].shape == (4,)
        client.faults.plan = ["lost"]
        assert session.step(np.zeros(2)).meta["reward"] == 1.0
        first, second = client.faults.sent[-2:]
        assert first.content == second.content, "the same request_seq again"
        assert session.batch_step(np.zeros((3, 2))).meta["reward"] == 1.0
        with pytest.raises(SessionLost):
            session.reset(666)


def test_metrics_and_their_stream(server, client, tenant):
    for i in range(3):
        server.master.log(tenant.tenant_id, loss=float(i))
    assert [row["id"] for row in tenant.metrics(after=1)] == [2, 3]
    rows = tenant.stream_metrics()
    assert [next(rows)["id"] for _ in range(3)] == [1, 2, 3]
    thread = in_thread(lambda: server.master.log(tenant.tenant_id, loss=9.0))
    assert next(rows)["metrics"] == {"loss": 9.0}
    thread.join()
    rows.close()
    client.faults.plan = ["refused", httpx.Response(503, json=NotReady("starting").to_json())]
    assert next(tenant.stream_metrics(after=3))["id"] == 4
    with pytest.raises(NotFound):
        next(client.create_tenant("gone", SCHEMA, "mlp").__class__(tenant.transport, "t0", "x").stream_metrics())


def test_the_operators_verbs(server):
    root, alice = server.client("root"), server.client("alice")
    made = root.create_token("carol")
    assert made["token"].startswith("nxl_") and "token" not in root.list_tokens()[-1]
    NexusClient(server.url, made["token"]).list_tenants()
    root.revoke_token(made["token_id"])
    with pytest.raises(Unauthorized):
        NexusClient(server.url, made["token"]).list_tenants()
    assert {row["verb"] if "verb" in row else row["action"] for row in root.audit()} >= {"create_token"}
    assert "stats" in root.overview()
    with pytest.raises(Forbidden):
        alice.overview()


def test_an_operator_stops_and_deletes_what_others_own_by_name_or_id(server, capsys, monkeypatch):
    """As a library, then from a shell."""
    root, alice, bob = (server.client(name) for name in ("root", "alice", "bob"))
    theirs = alice.create_tenant("shared-name", SCHEMA, "mlp")
    also = bob.create_tenant("shared-name", SCHEMA, "mlp")
    only = bob.create_tenant("of-bob", SCHEMA, "mlp")
    with pytest.raises(Conflict, match=rf"several accounts.*{theirs.tenant_id} \(of alice\)"):
        root.tenant("shared-name")
    works = {tenant: tenant.train("sft", dataset="toy", target_jobs=4) for tenant in (theirs, only)}
    for work in works.values():
        while work.status()["status"] != "running":
            pass
    seen, master = root.tenant(theirs.tenant_id), server.served.master.tenants
    seen.pause()
    assert master[theirs.tenant_id]["paused"]
    seen.resume()
    assert not master[theirs.tenant_id]["paused"]
    seen.workload().cancel()
    with pytest.raises(FutureCancelled, match="cancelled by the operator root"):
        works[theirs].result()
    seen.delete()
    with pytest.raises(NotFound):
        theirs.describe()

    monkeypatch.setenv("NEXUS_URL", server.url)
    monkeypatch.setenv("NEXUS_TOKEN", server.served.tokens["root"])
    for verb in ("pause", "resume", "cancel"):
        assert main([verb, "of-bob"]) == 0, capsys.readouterr().err
    with pytest.raises(FutureCancelled, match="cancelled by the operator root"):
        works[only].result()
    assert main(["delete", "of-bob"]) == 0
    done = [verb for verb, tenant_id, *_ in server.served.master.calls if tenant_id == only.tenant_id]
    assert done == ["submit", "pause", "resume", "cancel", "delete"]
    assert main(["list"]) == 0
    listed = capsys.readouterr().out.splitlines()[-2:]
    assert listed[0].split()[:2] == ["name", "owner"] and listed[1].split()[:2] == ["shared-name", "bob"]
    also.delete()


# ---- futures ----


def test_futures_can_be_awaited(server, tenant):
    async def many():
        observation, texts, action = batch(1.0)
        futures = [tenant.train_batch(observation, texts, action) for _ in range(5)]
        found = await asyncio.gather(*futures)
        arrays = await tenant.export_params()
        again = await futures[0]
        await server.clients[0]._transport.aclose()
        return [one["policy_version"] for one in found], arrays, again

    versions, arrays, again = asyncio.run(many())
    assert versions == [1, 2, 3, 4, 5] and arrays["head/weight"].shape == (4,) and again["policy_version"] == 1


def test_pipelined_is_awaited(server):
    """fb, step, fb, step without waiting gives the weights of waiting each time."""
    client = server.client()
    weights = []
    for name, wait in (("one", True), ("two", False)):
        tenant = client.create_tenant(name, SCHEMA, "mlp")
        futures = []
        for value in (1.0, 2.0, 3.0):
            futures += [tenant.forward_backward(*batch(value)), tenant.optim_step(lr=0.1)]
            if wait:
                [future.result() for future in futures]
        weights.append(tenant.export_params().result()["head/weight"])
        assert [future.seq for future in futures] == list(range(1, 7))
        assert futures[-1].result()["policy_version"] == 3
    assert weights[0].tobytes() == weights[1].tobytes()


def test_as_completed_and_cancel(server, client):
    slow, fast = (client.create_tenant(name, SCHEMA, "mlp") for name in ("slow", "fast"))
    workload, quick = slow.train("sft", dataset="toy"), fast.save()
    order = client.as_completed([workload, quick], timeout=10)
    assert next(order) is quick
    while workload.status()["status"] != "running":
        time.sleep(0.01)
    workload.cancel()
    assert next(order) is workload
    with pytest.raises(FutureCancelled):
        workload.result()
    assert client.future(quick.future_id).result().meta == {"policy_version": 0}
    with pytest.raises(FutureTimeout, match="1 futures"):
        list(client.as_completed([slow.train("sft", dataset="toy")], timeout=0.05))


def test_progress_is_shown_while_a_workload_runs(server, tenant, capsys):
    workload = tenant.train("sft", dataset="toy", target_jobs=3)
    thread = end_soon(server.master, tenant.tenant_id, result={"jobs": 3})
    assert workload.result(progress=True) == {"jobs": 3}
    thread.join()
    assert "3" in capsys.readouterr().err


# ---- faults ----


@pytest.mark.parametrize("fault", ["lost", "refused", "ready", "rate", "proxy", "quota"])
def test_a_change_is_executed_once_whatever_happens(server, client, tenant, fault):
    answers = {
        "ready": lambda: httpx.Response(503, json=NotReady("starting").to_json()),
        "rate": lambda: httpx.Response(429, json=RateLimited("slow down").to_json(), headers={"Retry-After": "0"}),
        "proxy": lambda: httpx.Response(502, text="<html>bad gateway</html>"),
        "quota": lambda: httpx.Response(
            403, json={"error": {"type": "quota_exceeded", "message": "wait", "details": [], "retryable": True}}
        ),
    }
    tenant.save().result()
    client.faults.plan = [answers[fault]() if fault in answers else fault for _ in range(3)]
    future = tenant.train_batch(*batch(1.0))
    assert future.seq == 2 and future.result()["policy_version"] == 1
    assert [call[0] for call in server.master.calls].count("optim_step") == 1
    assert tenant.train_batch(*batch(1.0)).seq == 3


def test_polls_survive_lost_connections(server, client, tenant):
    workload = tenant.train("sft", dataset="toy")
    client.faults.plan = ["lost", "refused"]
    thread = end_soon(server.master, tenant.tenant_id, result={"jobs": 1})
    assert workload.result(timeout=10) == {"jobs": 1}
    thread.join()


def test_retry_after_is_waited_for(server):
    client = server.client(retry_s=0.5)
    slow_down = httpx.Response(429, json=RateLimited("slow down", retry_after_s=30.0).to_json())
    client.faults.plan = [slow_down]
    with pytest.raises(RateLimited) as caught:  # 30 s do not fit into 0.5
        client.list_tenants()
    assert caught.value.retry_after_s == 30.0


def test_it_gives_up_with_the_reason(server, tenant):
    client = server.client(retry_s=0.2)
    client.faults.plan = ["refused"] * 100
    with pytest.raises(ConnectionLost, match=r"127.0.0.1.*refused"):
        client.list_tenants()
    client.faults.plan = [httpx.Response(502, text="<html>")] * 100
    with pytest.raises(NexusError, match="502"):
        client.list_tenants()


def test_numbers_go_on_after_a_request_that_was_lost_for_good(server):
    client = server.client(retry_s=0.2)
    tenant = client.create_tenant("arm", SCHEMA, "mlp")
    client.faults.plan = [None, "lost", *["refused"] * 100]
    with pytest.raises(ConnectionLost):
        tenant.optim_step()  # it was taken, but nobody told
    client.faults.plan = []
    assert tenant.optim_step().result()["policy_version"] == 2
    client.faults.plan = ["refused"] * 100
    with pytest.raises(ConnectionLost):
        tenant.optim_step()  # it was not taken
    client.faults.plan = []
    assert tenant.optim_step().result()["policy_version"] == 3


def test_many_threads_number_without_gaps(server, tenant):
    seqs, errors = [], []

    def work(k):
        for i in range(5):
            try:
                if (k + i) % 3 == 0:
                    with pytest.raises(InvalidRequest):
                        tenant.optim_step(lr=-1.0)  # refused before it gets a number
                seqs.append(tenant.optim_step().seq)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert errors == [] and sorted(seqs) == list(range(1, 21))
    assert tenant.save().result()["policy_version"] == 20


def test_a_delete_whose_answer_was_lost_is_done(client, tenant):
    client.faults.plan = ["lost"]
    tenant.delete()
    with pytest.raises(NotFound):
        tenant.delete()


def test_a_result_of_long_ago_is_gone(server, tenant):
    future = tenant.save()
    future.result()
    server.served.service.futures.grace_s = 0.0
    server.served.service.futures._drop(time.time() + 1)
    other = server.client()
    with pytest.raises(Gone):
        other.future(future.future_id).result()
    assert future.result() == {"policy_version": 0}, "a client keeps what it has read"


def test_the_failure_of_a_workload(server, tenant):
    workload = tenant.train("sft", dataset="toy")
    while workload.status()["status"] != "running":
        time.sleep(0.01)
    server.master.end_workload(tenant.tenant_id, "failed", error="the loss is not finite")
    with pytest.raises(FutureFailed, match="not finite") as caught:
        workload.result()
    assert isinstance(caught.value, RuntimeError) and not caught.value.retryable


# ---- the way in ----


def test_address_and_token(server, monkeypatch):
    monkeypatch.delenv("NEXUS_URL", raising=False), monkeypatch.delenv("NEXUS_TOKEN", raising=False)
    with pytest.raises(ValueError, match="NEXUS_URL"):
        NexusClient()
    with pytest.raises(Unauthorized, match="NEXUS_TOKEN"):
        NexusClient(server.url)
    with pytest.raises(Unauthorized):
        NexusClient(server.url, "nxl_x_y").list_tenants()
    token = server.served.tokens["alice"]
    assert token not in repr(NexusClient(server.url, token)) + repr(NexusClient(server.url, token)._transport)


def test_imports_no_torch():
    code = (
        "import sys, nexus_lightning.client.__main__; print([m for m in ('torch', 'tqdm', 'yaml') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.fixture
def shell(server, monkeypatch, capsys):
    """``shell(*argv)`` -> exit code, stdout, stderr."""
    monkeypatch.setenv("NEXUS_URL", server.url)
    monkeypatch.setenv("NEXUS_TOKEN", server.served.tokens["alice"])

    def run(*argv):
        capsys.readouterr()
        code = main(argv)
        return code, *capsys.readouterr()

    return run


def test_command_line(server, shell, tmp_path):
    spec = tmp_path / "arm.yaml"
    spec.write_text(f"name: arm\nschema: {json.dumps(SCHEMA)}\nhead: mlp\nseed: 3\n")
    code, out, _ = shell("create", str(spec))
    assert code == 0 and "arm" in out
    code, out, _ = shell("list")
    assert code == 0 and out.splitlines()[0].split()[:2] == ["name", "state"] and "arm" in out
    code, out, _ = shell("list", "--json")
    tenant_id = json.loads(out)[0]["tenant_id"]
    assert json.loads(shell("--json", "describe", "arm")[1])["tenant_id"] == tenant_id

    code, out, _ = shell(
        "train", "arm", "--task", "sft", "--dataset", "toy", "--target-jobs", "2", "--no-wait", "--json"
    )
    assert code == 0 and json.loads(out)["workload_id"].startswith("w")
    workloads = server.client().tenant("arm").workloads()
    assert workloads[0]["spec"] == {"task": "sft", "dataset": {"name": "toy"}, "target_jobs": 2}
    assert shell("cancel", "arm")[0] == 0
    thread = end_soon(server.master, tenant_id, result={"jobs": 2})
    code, out, _ = shell("train", "arm", "--task", "sft", "--dataset", "toy", "--json")
    thread.join()
    assert code == 0 and json.loads(out) == {"jobs": 2}

    assert json.loads(shell("evaluate", "arm", "--episodes", "3", "--environment", "toy", "--json")[1])["n"] == 3
    code, out, _ = shell("export", "arm", "--to", str(tmp_path / "home"), "--json")
    assert (tmp_path / "home" / "v00000000" / "manifest.json").is_file() and json.loads(out)["policy_version"] == 0
    server.master.log(tenant_id, loss=0.25)
    assert "loss=0.25" in shell("metrics", "arm")[1]
    assert json.loads(shell("metrics", "arm", "--json")[1])["metrics"] == {"loss": 0.25}
    np.savez(tmp_path / "seen.npz", state=np.zeros((2, 4), np.float32))
    answer = tmp_path / "answer.npz"
    code, out, _ = shell(
        "predict", "arm", str(tmp_path / "seen.npz"), "--instruction", "go", "--json", "--out", str(answer)
    )
    assert json.loads(out)["action"] == [[0.0] * 4] * 2 and np.load(answer)["action"].shape == (2, 4)
    assert shell("delete", "arm")[0] == 0
    code, out, err = shell("describe", "arm")
    assert code == 1 and out == "" and "'arm'" in err
    code, _, err = shell("describe", "arm", "--json")
    assert code == 1 and json.loads(err)["error"]["type"] == "not_found"


def test_command_line_says_what_is_wrong(shell, tmp_path):
    (tmp_path / "bad.yaml").write_text("name: arm\n")
    assert "schema, head missing" in shell("create", str(tmp_path / "bad.yaml"))[2]
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "a map is needed" in shell("create", str(tmp_path / "list.yaml"))[2]
    assert shell("create", str(tmp_path / "nowhere.yaml"))[0] == 1
    with pytest.raises(SystemExit):
        shell("no-such-verb")
