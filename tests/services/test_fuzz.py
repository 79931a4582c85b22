"""Whatever is sent: no 5xx, nothing changes, and nobody reaches what is another's. FakeMaster stands in for the master.

Three attacks on the whole API, in process: other accounts' ids on every route (routes are listed by the application, so
none can be forgotten), broken bodies and headers, and what schemathesis makes of the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import struct
from collections import Counter

import httpx
import msgpack
import numpy as np
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from nexus_lightning.services import app as app_module
from nexus_lightning.services.bodies import TOY_SCHEMA
from nexus_lightning.services.codec import JSON, MSGPACK, SAFETENSORS, Message, encode

SPEC = {"name": "arm", "schema": TOY_SCHEMA, "head": {"name": "mlp"}}
ARRAYS = {
    "observation/state": np.zeros((1, 4), np.float32),
    "action": np.ones((1, 2, 2), np.float32),
    "actions": np.ones((2, 2), np.float32),
}
#: Routes whose path names nobody's property: their bodies do, or they are for operators.
SHARED = {
    ("GET", "/v1/capabilities"),
    ("POST", "/v1/tenants"),
    ("GET", "/v1/tenants"),
}
OPERATOR = re.compile(r"/v1/operator/|^/metrics$")


@pytest.fixture
def served(serve, monkeypatch):
    monkeypatch.setattr(app_module, "STREAM_S", 0.0)
    return serve(max_in_flight=10_000, max_tenants_per_owner=10_000, max_sessions=10_000)


def routes(app):
    """(method, path) of everything that needs a token."""
    found = [(m, r.path) for r in app.routes if isinstance(r, APIRoute) for m in r.methods]
    return [(m, p) for m, p in found if p.startswith("/v1/") or p == "/metrics"]


def bodies_of(app):
    """(method, path) -> a body that the route takes, and whether arrays may go with it."""
    schema, found = app.openapi(), {}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]
                model = content[JSON]["schema"]["$ref"].split("/")[-1]
                described = schema["components"]["schemas"][model]
                assert "example" in described or not described.get("required"), f"{model} has no example"
                found[method.upper(), path] = (described.get("example", {}), MSGPACK in content)
    return found


def property_of(served, client):
    """Everything that can be owned, and its ids by the names that paths use."""
    tenant_id = client.post("/v1/tenants", json=SPEC).json()["tenant_id"]
    root = f"/v1/tenants/{tenant_id}"
    body = {"task": "sft", "dataset": {"name": "toy"}, "target_jobs": 4}
    workload = client.post(root + "/workloads", json=body, headers={"Nexus-Seq": "1"}).json()
    future = client.post(root + "/export").json()["future_id"]
    assert client.get(f"/v1/futures/{future}?wait_s=20").json()["status"] == "completed"
    exported = client.post(root + "/training/export_params").json()["future_id"]
    assert client.get(f"/v1/futures/{exported}?wait_s=20").json()["data_bytes"] > 0
    session = client.post("/v1/environments/sessions", json={"environment": {"name": "toy"}}).json()["session_id"]
    job = client.post(root + "/scheduler/reserve", json={"sample_count": 1}).json()["job"]["job_id"]
    put = encode(Message({"partition_id": "p"}, ARRAYS), MSGPACK)
    assert client.post(root + "/queue/queue_put", content=put, headers={"Content-Type": MSGPACK}).status_code == 200
    return {
        "tenant_id": tenant_id,
        "workload_id": workload["workload_id"],
        "future_id": exported,
        "session_id": session,
        "job_id": job,
        "version": "0",
        "token_id": served.tokens["alice"].split("_")[1],
    }


def unknown_like(ids):
    changed = {key: value[0] + "0" * (len(value) - 1) for key, value in ids.items() if key != "version"}
    return {**changed, "version": ids["version"]}


def world(served, owned):
    """Everything of alice that bob must not change."""
    store = served.service.store
    rows = [(r["future_id"], r["status"]) for r in store.requests(owned["tenant_id"])]
    return served.master.state(), rows, store.workloads(owned["tenant_id"]), store.tenants(), store.tokens()


def test_other_accounts_ids_are_answered_like_unknown_ones_on_every_route(served):
    owned = property_of(served, served.alice)
    mine = property_of(served, served.bob)  # of the same form: nothing is refused for want of something
    bodies = bodies_of(served.app)
    before, tried = world(served, owned), 0
    for method, path in routes(served.app):
        if (method, path) in SHARED or OPERATOR.search(path):
            continue
        answers = {}
        for whose, ids in (("hers", owned), ("nobody's", unknown_like(owned))):
            ids = dict(ids)
            for own_tenant in (False, True) if "{tenant_id}" in path and path.count("{") > 1 else (False,):
                if own_tenant:  # her workload under his tenant
                    ids["tenant_id"] = mine["tenant_id"]
                url = re.sub(r"{(\w+)}", lambda m, ids=ids: ids[m[1]], path)
                keywords = {}
                if method == "POST":
                    meta, arrays = bodies[method, path]
                    meta = {**meta, **{k: ids[k] for k in ("job_id", "tenant_id") if k in meta}}
                    if path == "/v1/futures/retrieve":
                        meta = {"future_ids": [mine["future_id"], ids["future_id"]]}
                    if path == "/v1/environments/sessions":
                        meta = {**meta, "tenant_id": ids["tenant_id"]}
                    content = encode(Message(meta, ARRAYS if arrays else {}), MSGPACK)
                    keywords = {"content": content, "headers": {"Content-Type": MSGPACK}}
                answer = served.bob.request(method, url, **keywords)
                text = answer.text
                for value in (*owned.values(), *unknown_like(owned).values()):
                    if len(value) > 1:
                        text = text.replace(value, "<id>")
                tried += 1
                answers[whose, own_tenant] = (answer.status_code, text)
        for own_tenant in {key[1] for key in answers}:
            hers, nobodys = answers["hers", own_tenant], answers["nobody's", own_tenant]
            if own_tenant and path.endswith("/{version}"):
                continue  # a version number is his own as well
            assert hers == nobodys and hers[0] == 404, f"{method} {path}: {hers} against {nobodys}"
    assert tried > 80 and world(served, owned) == before


def test_jobs_and_partitions_of_others_are_unknown_inside_ones_own_tenant(served):
    owned = property_of(served, served.alice)
    mine = served.bob.post("/v1/tenants", json=SPEC).json()["tenant_id"]
    before = world(served, owned)
    for path, meta in (
        ("scheduler/complete", {"job_id": owned["job_id"]}),
        ("scheduler/fail", {"job_id": owned["job_id"], "reason": "x"}),
        ("scheduler/mark", {"job_id": owned["job_id"], "state": "ready"}),
        ("queue/queue_clear", {"partition_id": "p"}),
        ("queue/queue_get_meta", {"partition_id": "p", "fields": ["action"], "task_name": "t"}),
    ):
        assert served.bob.post(f"/v1/tenants/{mine}/{path}", json=meta).status_code == 404, path
    assert world(served, owned)[0] == before[0]


def test_every_route_wants_a_token_and_operators_routes_an_operator(served):
    owned = property_of(served, served.alice)
    before = world(served, owned)
    for method, path in routes(served.app):
        url = re.sub(r"{(\w+)}", lambda m: owned[m[1]], path)
        for headers in ({}, {"Authorization": "Bearer nxl_" + "0" * 12 + "_" + "0" * 48}):
            assert served.nobody.request(method, url, headers=headers).status_code == 401, f"{method} {path}"
        if OPERATOR.search(path):
            body = {"owner": "x"} if method == "POST" else None
            assert served.alice.request(method, url, json=body).status_code == 403
    assert world(served, owned) == before
    open_ones = {r.path for r in served.app.routes} - {path for _, path in routes(served.app)}
    assert open_ones == {"/", "/healthz", "/readyz", "/openapi.json", "/docs", "/docs/oauth2-redirect"}


# ------------------------------------------------------------------------------------------------------- broken bodies

NASTY = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, '"\\ud800"', "[" * 3000, '{"a":' * 3000, "\0", "﻿{}"]
JUNK = [b"", b"\xff\xfe", b"null", b"[]", b"0", b'"x"', b"{", b'{"a":1,"a":2}', b"\x00" * 100, b"true false", b"\xc3("]
VALUES = [
    None,
    True,
    -1,
    2**53 + 2,
    2**70,
    1.5,
    float("inf"),
    "",
    "x" * 3000,
    "../../etc",
    [],
    [[]],
    {},
    {"": None},
    "\n",
]


def broken_json(rng, meta):
    """A JSON body that no route takes."""
    kind = rng.randrange(4)
    text = json.dumps(meta)
    if kind == 0:
        return (
            rng.choice(JUNK) if rng.random() < 0.5 else bytes(rng.randrange(256) for _ in range(rng.randrange(1, 80)))
        )
    if kind == 1 and len(text) > 2:
        return text[: rng.randrange(1, len(text) - 1)].encode()
    if kind == 2:
        return (text[:-1] + ("," if meta else "") + f'"nasty": {rng.choice(NASTY)}' + "}").encode()
    key = rng.choice([*meta, "unknown_key"])
    return json.dumps({**meta, "no_such_key": rng.choice(VALUES), key: rng.choice(VALUES)}).encode()


def broken_msgpack(rng, meta):
    array = {"dtype": "float32", "shape": [2], "data": bytes(8)}
    wrong = [
        {**array, "dtype": "object"},
        {**array, "dtype": "<U8"},
        {**array, "shape": [2**40]},
        {**array, "shape": [-2]},
        {**array, "shape": [3]},
        {**array, "shape": [0] * 40},
        {**array, "data": "text"},
        {**array, "data": bytes(7)},
        {**array, "extra": 1},
        {"dtype": "float32"},
        [],
        None,
    ]
    images = [b"GIF89a", b"\x89PNG\r\n\x1a\n", b""]
    bodies = [
        lambda: msgpack.packb({"meta": meta, "arrays": {"action": rng.choice(wrong)}}),
        lambda: msgpack.packb({"meta": meta, "arrays": {rng.choice(["/x", "a//b", "", "é", "x" * 999]): array}}),
        lambda: msgpack.packb({"meta": meta, "arrays": {f"a{i}": array for i in range(2000)}}),
        lambda: msgpack.packb({"meta": meta, "images": {"camera": [rng.choice(images)]}}),
        lambda: msgpack.packb({"meta": {**meta, "when": msgpack.Timestamp(1)}}),
        lambda: msgpack.packb({"meta": {**meta, "code": msgpack.ExtType(5, b"x" * 16)}}),
        lambda: msgpack.packb({"meta": {**meta, "nan": float("nan")}}),
        lambda: msgpack.packb({"meta": meta, "pickle": b"cos\nsystem\n"}),
        lambda: msgpack.packb(rng.choice([1, [], "x", None, {1: 2}, {"meta": 1}, {"meta": {1: 2}}])),
        lambda: b"\xdf\xff\xff\xff\xff",
        lambda: b"\x81\xa4meta" + b"\x91" * 500,
        lambda: b"\x81\xa6arrays\x81\xa1a\x83\xa5dtype\xa7float32\xa5shape\x91\x02\xa4data\xc6\x7f\xff\xff\xff",
        lambda: msgpack.packb({"meta": meta})[: -rng.randrange(1, 3)],
        lambda: msgpack.packb({"meta": meta}) + b"\x00",
    ]
    return rng.choice(bodies)()


def broken_safetensors(rng, meta):
    def file(header, data=b""):
        text = json.dumps(header).encode() if isinstance(header, dict) else header
        return struct.pack("<Q", len(text)) + text + data

    f32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    bodies = [
        lambda: b"\x00" * rng.randrange(1, 8),
        lambda: struct.pack("<Q", 2**62) + b"{}",
        lambda: file(b"[]"),
        lambda: file({"action": {**f32, "dtype": rng.choice(["F8_E4M3", "object", 3, None])}}, bytes(8)),
        lambda: file({"action": {**f32, "data_offsets": rng.choice([[0, 80], [8, 0], [-1, 7], "x"])}}, bytes(8)),
        lambda: file({"action": f32, "more": f32}, bytes(8)),
        lambda: file({"action": {**f32, "shape": [2**33, 2**33]}}, bytes(8)),
        lambda: file({"__metadata__": {"json": rng.choice(["{", "NaN", "[]", "[" * 999])}}),
        lambda: file({"__metadata__": rng.choice([[], 3, {"json": 5}])}),
        lambda: file({"/x": f32}, bytes(8)),
    ]
    return rng.choice(bodies)()


MAKERS = {JSON: broken_json, MSGPACK: broken_msgpack, SAFETENSORS: broken_safetensors}
HEADERS = [
    {"Nexus-Seq": value} for value in ("0", "-1", "1.5", "abc", "9" * 30, "nan", "1e3", "1 2", "99999999", "\xb2")
] + [{"Nexus-Deadline-S": value} for value in ("nan", "inf", "-1", "0", "1e30", "x")]


def test_thousands_of_broken_requests_change_nothing_and_get_a_4xx(served):
    owned = property_of(served, served.alice)
    for client in (served.root, served.bob):
        property_of(served, client)
    bodies = bodies_of(served.app)
    before, rng, seen, kinds = world(served, owned), random.Random(0), Counter(), Counter()
    posts = sorted(bodies)

    async def attack():
        transport = httpx.ASGITransport(served.app)
        headers = {"Authorization": f"Bearer {served.tokens['alice']}"}
        operator = {"Authorization": f"Bearer {served.tokens['root']}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            for i in range(2200):
                method, path = posts[i % len(posts)]
                url = re.sub(r"{(\w+)}", lambda m: owned[m[1]], path)
                meta, _ = bodies[method, path]
                kind = rng.choice(list(MAKERS))
                content = MAKERS[kind](rng, meta)
                if not content:
                    content = b"{"
                declared = (
                    kind if rng.random() < 0.9 else rng.choice(["", "text/plain", "multipart/form-data", "a/b/c;;"])
                )
                sent = {"Content-Type": declared, **(operator if OPERATOR.search(path) else {})}
                answer = await client.request(method, url, content=content, headers=sent)
                seen[answer.status_code] += 1
                kinds[declared, answer.status_code] += 1
                assert 400 <= answer.status_code < 500, (path, kind, content[:200], answer.status_code, answer.text)
                error = answer.json()["error"]
                assert set(error) >= {"type", "message", "details", "retryable"} and "Traceback" not in answer.text
            for i in range(400):  # good bodies, broken headers
                verbs = [p for p in posts if "training" in p[1] or "scheduler" in p[1] or p[1].endswith("/workloads")]
                method, path = verbs[i % len(verbs)]
                sent = {"Content-Type": MSGPACK, **HEADERS[i % len(HEADERS)]}
                sent = {key: value.encode("latin-1") for key, value in sent.items()}
                meta, arrays = bodies[method, path]
                content = encode(Message(meta, ARRAYS if arrays else {}), MSGPACK)
                url = re.sub(r"{(\w+)}", lambda m: owned[m[1]], path)
                answer = await client.request(method, url, content=content, headers=sent)
                assert 400 <= answer.status_code < 500, (path, sent, answer.text)
            for query in ("wait_s=nan", "wait_s=inf", "wait_s=-1", "wait_s=1e9", "wait_s=x", "wait_s="):
                assert (await client.get(f"/v1/futures/{owned['future_id']}?{query}")).status_code == 422
            for version in ("-1", "x", "9" * 40, "1.5", "%00", "0%2f..%2f.."):
                answer = await client.get(f"/v1/tenants/{owned['tenant_id']}/payloads/{version}")
                assert answer.status_code in (404, 422), answer.text
            for strange in ("%00", "%ff%fe", "..%2f..", "%F0%9F%92%A9", "a" * 5000, "'; DROP TABLE tokens; --"):
                for path in ("tenants", "futures"):
                    assert (await client.get(f"/v1/{path}/{strange}")).status_code == 404

    asyncio.run(attack())
    assert seen[422] > 1000 and seen[415] > 50, seen
    assert world(served, owned) == before


# --------------------------------------------------------------------------------------------------------- schemathesis


def test_requests_made_from_the_openapi_document(served):
    """A few of every operation, good and bad ones, sent by an operator, whom every route admits."""
    property_of(served, served.root)
    schema = schemathesis.openapi.from_asgi("/openapi.json", served.app)
    headers = {"Authorization": f"Bearer {served.tokens['root']}"}
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    names = []
    for found in schema.get_all_operations():
        operation = found.ok()
        names.append(operation.label)

        @settings(
            max_examples=5,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def send_and_check(case):
            case.call_and_validate(headers=headers, checks=checks)

        send_and_check()
    assert len(set(names)) == len(routes(served.app)) + 3, "and the page, /healthz and /readyz"
