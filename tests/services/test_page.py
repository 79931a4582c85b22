"""The operator's page in a real browser, against the real HTTP server (its master is a FAKE)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CHROMIUM = Path("/usr/bin/chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
SCHEMA = {"state_dim": 4, "action_dim": 2, "chunk": 2, "execute": 2}


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


def tenant(server, name, **more):
    """What the master says of a tenant in the middle of its life."""
    tenant_id = server.client().create_tenant(name, SCHEMA, "mlp").tenant_id
    server.shown[tenant_id] = more
    return tenant_id


@pytest.fixture
def server(serve, monkeypatch):
    from client_server import Server

    running = Server(serve(max_tenants=100))
    running.shown, describe, stats = {}, running.master.describe, running.master.stats

    def described(tenant_id):
        return {**describe(tenant_id), "task": "rl", "evaluations": [], **running.shown.get(tenant_id, {})}

    def figures():
        found = stats()
        found["utilisation"] = {"actor": 0.41, "inference": 0.14, "environment": 0.81}
        for k, stat in enumerate(found["tenants"].values()):
            stat["device_seconds"] = {"actor": 100.0 / (k + 1), "inference": 30.0, "environment": 12.0 * k}
            stat["queue_bytes"] = 3_400_000 * k
        found["jobs_by_state"] = {"completed": 320, "ready": 3, "generating": 2, "leased": 1}
        found["inference"] |= {"backbone_calls": 900, "shared_backbone_calls": 640, "rows_served": 7200}
        found["inference"]["call_sizes"] = {n: 400 // (1 + abs(8 - n)) for n in range(1, 17)}
        found["simulators"] = 6
        return found

    running.master.describe, running.master.stats = described, figures
    yield running
    running.stop()


@pytest.fixture
def page(browser, server):
    page = browser.new_page(viewport={"width": 1400, "height": 950})
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.problems.append(request.url) if server.url not in request.url else None)
    page.goto(server.url)
    yield page
    assert page.problems == [], "a script failed, or something came from elsewhere"
    page.close()


def log_in(page, server, who="root"):
    page.fill("#token", server.served.tokens[who])
    page.click("#form button")
    page.wait_for_selector("#board:not([hidden])")


def test_what_it_shows(page, server):
    arm = tenant(server, "arm", state="running", policy_version=12, jobs_completed=12, target_jobs=60, task="rl")
    tenant(server, "gripper", state="failed", last_error="ValueError: the loss is not finite")
    evaluation = {"success_rate": 0.95, "n": 40, "policy_version": 60}
    tenant(server, "camera", state="idle", task="sft", evaluations=[evaluation], memory_bytes=3_200_000)
    log_in(page, server)
    text = page.inner_text("#tenants")
    for word in ("arm", "alice", "running", "12 / 60", "95% of 40", "3.2 MB", arm[:9]):
        assert word in text, word
    assert "41%" in page.inner_text("#utilisation") and "completed" in page.inner_text("#jobs")
    assert "arm" in page.inner_text("#seconds") and "900 calls" in page.inner_text("#calls")
    assert page.locator("#histogram > div").count() == 16
    assert "gripper" in page.inner_text("#errors") and "not finite" in page.inner_text("#errors")
    assert "alice" in page.inner_text("#accounts") and "71%" in page.inner_text("#figures")
    folder = os.environ.get("NX_SCREENSHOTS")  # to look at it: light and dark
    for scheme in ("light", "dark") if folder else ():
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=f"{folder}/page_{scheme}.png", full_page=True)


def test_it_is_live(page, server):
    tenant_id = tenant(server, "arm", policy_version=1)
    log_in(page, server)
    assert page.locator("#tenants tbody tr").count() == 1
    server.shown[tenant_id]["policy_version"] = 77
    tenant(server, "second")
    page.locator("#tenants tbody tr").nth(1).wait_for()
    assert "77" in page.inner_text("#tenants")
    server.master.ready = False
    page.locator("#dot.wait").wait_for()
    assert "starting" in page.inner_text("#status") and page.is_visible("#tenants")
    server.master.ready = True
    page.locator("#dot.ok").wait_for()
    assert page.is_hidden("#alarms")
    server.master.alarm_lines = ["payload of tenant t1: <b>No space left</b>"]
    page.wait_for_selector("#alarms:not([hidden])")
    assert "t1: <b>No space left</b>" in page.inner_text("#alarms") and page.locator("#dot.bad").count() == 1
    server.master.alarm_lines = []
    page.wait_for_selector("#alarms", state="hidden")


def test_names_and_errors_of_tenants_are_text(page, server):
    """The server takes no such name; the page does not rely on that."""
    tenant(server, "arm", task=SCRIPT, state=SCRIPT, last_error=SCRIPT, jobs={SCRIPT: 1})
    known = server.served.service.describe

    def describe(account, tenant_id):
        return {**known(account, tenant_id), "name": SCRIPT}

    server.served.service.describe = describe
    log_in(page, server)
    assert page.inner_text("#tenants .name") == SCRIPT and SCRIPT in page.inner_text("#errors")
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('#board script, #board img').length") == 0


def test_only_for_operators(page, server):
    assert page.is_visible("#login") and page.is_hidden("#board")
    for token, says in (("nxl_0_0", "does not know"), (server.served.tokens["alice"], "not an operator's")):
        page.fill("#token", token)
        page.click("#form button")
        page.locator("#why", has_text=says).wait_for()
        assert page.is_hidden("#board") and page.evaluate("sessionStorage.length") == 0
    log_in(page, server)
    token = server.served.tokens["root"]
    assert page.evaluate("Object.values(sessionStorage)") == [token] and page.evaluate("localStorage.length") == 0
    assert token not in page.content() and token not in page.url
    page.reload()
    page.wait_for_selector("#board:not([hidden])")
    page.click("#forget")
    assert page.is_visible("#login") and page.evaluate("sessionStorage.length") == 0


def test_the_server_goes_away_and_comes_back(page, server):
    log_in(page, server)
    page.route("**/v1/operator/overview", lambda route: route.abort())
    page.locator("#dot.bad").wait_for()
    assert page.is_visible("#tenants"), "what was known stays"
    page.unroute("**/v1/operator/overview")
    page.locator("#dot.ok").wait_for()
