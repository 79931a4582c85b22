"""FakeMaster: a stand-in for services.master.Master in unit tests of the HTTP layer. It trains nothing.

A tenant is a version number and a weight vector; verbs change them in ways that a test can predict. Workloads end when
a test says so (``end_workload``). ``calls`` records what was asked, in order.
"""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import numpy as np

from nexus_lightning.services.errors import Conflict, InvalidRequest, NotFound, SessionLost


class FakeMaster:
    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.ready = True
        self.alarm_lines: list[str] = []
        self.calls: list[tuple] = []
        self.tenants: dict[str, dict] = {}
        self.fail_create: Exception | None = None
        self.gate = threading.Event()  # verbs wait for it
        self.gate.set()
        self.changed = threading.Condition()

    def _of(self, tenant_id: str) -> dict:
        if tenant_id not in self.tenants:
            raise NotFound(f"tenant {tenant_id}: unknown")
        return self.tenants[tenant_id]

    def _call(self, verb: str, tenant_id: str, *values) -> dict:
        tenant = self._of(tenant_id)
        assert self.gate.wait(30)
        self.calls.append((verb, tenant_id, *values))
        return tenant

    def state(self) -> str:
        """Digest of everything a request may have changed."""
        parts = []
        for tenant_id, tenant in sorted(self.tenants.items()):
            kept = {k: v for k, v in tenant.items() if k not in ("weights", "on_end", "rows")}
            parts.append((tenant_id, repr(kept), tenant["weights"].tobytes(), sorted(tenant["rows"])))
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    # ---- tenants

    def ping(self, timeout_s: float) -> None:
        pass

    def alarms(self) -> list[str]:
        return list(self.alarm_lines)

    def capabilities(self) -> dict:
        return {"backbone": "fake", "heads": {"mlp": ["lr"]}, "environments": {"toy": []}, "datasets": {"toy": []}}

    def create_tenant(self, tenant_id: str, spec: dict) -> dict:
        if self.fail_create is not None:
            raise self.fail_create
        if spec["head"]["name"] != "mlp":
            raise InvalidRequest("spec.head.name: choose mlp")
        self.tenants[tenant_id] = {
            "policy_version": 0,
            "weights": np.zeros(4, np.float32),
            "grad": 0.0,
            "workload": None,
            "on_end": None,
            "paused": False,
            "rows": {},
            "jobs": {},
            "metrics": [],
            "saved": [],
        }
        return self.describe(tenant_id)

    def restore_tenant(self, tenant_id: str, spec: dict) -> dict:
        if spec["name"] == "broken":
            raise RuntimeError("damaged payload at /secret/path")
        self.create_tenant(tenant_id, spec)
        self.tenants[tenant_id]["policy_version"] = 7
        return {"policy_version": 7, "optimizer_steps": 7}

    def delete_tenant(self, tenant_id: str) -> None:
        self._call("delete", tenant_id)
        with self.changed:
            del self.tenants[tenant_id]
            self.changed.notify_all()

    def describe(self, tenant_id: str) -> dict:
        tenant = self._of(tenant_id)
        version = tenant["policy_version"]
        return {"state": "idle", "policy_version": version, "jobs_completed": version, "loss": float("nan")}

    # ---- workloads

    def submit(self, tenant_id: str, workload: dict, *, resume: bool = False, paused: bool = False, on_end) -> None:
        tenant = self._call("submit", tenant_id, workload["task"], resume)
        tenant["paused"] = paused
        if tenant["workload"] is not None:
            raise Conflict(f"tenant {tenant_id}: a workload is active")
        tenant["workload"], tenant["on_end"] = workload, on_end

    def end_workload(self, tenant_id: str, status: str = "completed", **outcome) -> None:
        tenant = self._of(tenant_id)
        on_end, tenant["workload"], tenant["on_end"] = tenant["on_end"], None, None
        on_end({"status": status, **outcome})

    def pause(self, tenant_id: str) -> None:
        self._call("pause", tenant_id)["paused"] = True

    def resume(self, tenant_id: str) -> None:
        self._call("resume", tenant_id)["paused"] = False

    def cancel(self, tenant_id: str) -> None:
        self._call("cancel", tenant_id)
        self.end_workload(tenant_id, "cancelled")

    def evaluate(self, tenant_id: str, request: dict, on_end) -> None:
        tenant = self._call("evaluate", tenant_id, request["episodes"])
        result = {"success_rate": 0.5, "n": request["episodes"], "policy_version": tenant["policy_version"]}
        on_end({"status": "completed", "result": result})

    def export(self, tenant_id: str) -> Path:
        version = self._call("export", tenant_id)["policy_version"]
        path = self.folder / "tenants" / tenant_id / f"v{version:08d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "head.safetensors").write_bytes(b"weights of " + tenant_id.encode())
        (path / "manifest.json").write_text("{}")
        (path / "processors").mkdir(exist_ok=True)
        (path / "processors" / "policy.json").write_text("{}")
        return path

    def payloads(self, tenant_id: str) -> list[dict]:
        self._of(tenant_id)
        folders = sorted((self.folder / "tenants" / tenant_id).glob("v*"))
        return [
            {"policy_version": int(f.name[1:]), "name": f.name, "files": sorted(p.name for p in f.rglob("*.*"))}
            for f in folders
        ]

    def payload_path(self, tenant_id: str, version: int) -> Path:
        path = self.folder / "tenants" / tenant_id / f"v{version:08d}"
        if not path.is_dir():
            raise NotFound(f"tenant {tenant_id}: no payload of version {version}")
        return path

    def log(self, tenant_id: str, **metrics) -> None:
        with self.changed:
            rows = self._of(tenant_id)["metrics"]
            rows.append({"id": len(rows) + 1, "time_s": 0.0, "metrics": metrics})
            self.changed.notify_all()

    def metrics(self, tenant_id: str, after: int = 0) -> list[dict]:
        return self._of(tenant_id)["metrics"][after:]

    def wait_metrics(self, tenant_id: str, after: int, timeout_s: float) -> list[dict]:
        end_s = time.monotonic() + timeout_s
        with self.changed:
            while not (rows := self.metrics(tenant_id, after)) and time.monotonic() < end_s:
                self.changed.wait(end_s - time.monotonic())
            return rows

    # ---- training

    def forward_backward(self, tenant_id, arrays, *, instructions=(), loss="sft", loss_options=None) -> dict:
        if "action" not in arrays:
            raise InvalidRequest("array 'action': missing")
        tenant = self._call("forward_backward", tenant_id, float(np.mean(arrays["action"])))
        tenant["grad"] += float(np.mean(arrays["action"]))
        return {"loss:mean": tenant["grad"]}

    def optim_step(self, tenant_id, *, lr=None, grad_clip_norm=None) -> dict:
        tenant = self._call("optim_step", tenant_id)
        tenant["weights"] = tenant["weights"] - np.float32((lr or 0.1) * tenant["grad"])
        tenant["grad"], tenant["policy_version"] = 0.0, tenant["policy_version"] + 1
        return {"policy_version": tenant["policy_version"]}

    def train_batch(self, tenant_id, arrays, *, options, instructions=(), loss="sft", loss_options=None) -> dict:
        return self.forward_backward(tenant_id, arrays) | self.optim_step(tenant_id, **options)

    def train_job(self, tenant_id, *, job_id: str) -> dict:
        tenant = self._call("train_job", tenant_id, job_id)
        if job_id not in tenant["jobs"]:
            raise NotFound(f"job {job_id}: unknown")
        return {"policy_version": tenant["policy_version"]}

    def export_params(self, tenant_id) -> dict:
        return {"head/weight": self._call("export_params", tenant_id)["weights"]}

    def save(self, tenant_id) -> dict:
        tenant = self._call("save", tenant_id)
        tenant["saved"].append(tenant["policy_version"])
        return {"policy_version": tenant["policy_version"]}

    def load(self, tenant_id, source) -> dict:
        tenant = self._call("load", tenant_id)
        if isinstance(source, int):
            if source not in tenant["saved"]:
                raise NotFound(f"version {source}: not saved")
        else:
            tenant["weights"] = np.asarray(source["head/weight"], np.float32)
        return {"policy_version": tenant["policy_version"]}

    # ---- inference

    def predict(self, tenant_id, arrays, instructions, *, deterministic=True, policy_version=None, seed=None) -> dict:
        if "observation/state" not in arrays or arrays["observation/state"].ndim != 2:
            raise InvalidRequest("array 'observation/state': [B, S] is required")
        if len(instructions) != len(arrays["observation/state"]):
            raise InvalidRequest("instructions: one for each row")
        self._call("predict", tenant_id)
        return {"action": np.repeat(self.tenants[tenant_id]["weights"][None], len(instructions), 0)}

    def rollout(self, tenant_id, request) -> tuple[dict, dict]:
        self._call("rollout", tenant_id, request["episodes"])
        return {"reward": np.ones(request["episodes"], np.float32)}, {"episodes": request["episodes"]}

    def load_weights(self, tenant_id, *, version: int) -> dict:
        if version > self._call("load_weights", tenant_id, version)["policy_version"]:
            raise NotFound(f"version {version}: unknown")
        return {"policy_version": version}

    # ---- queue and scheduler

    def queue_put(self, tenant_id, arrays, *, partition_id=None, metadata=None) -> dict:
        if partition_id is None or not arrays:
            raise InvalidRequest("partition_id and arrays are required")
        self._call("queue_put", tenant_id, partition_id)["rows"][partition_id] = dict(arrays)
        return {"partition_id": partition_id}

    def _partition(self, tenant_id, partition_id) -> dict:
        if partition_id not in self._of(tenant_id)["rows"]:
            raise NotFound(f"partition {partition_id}: unknown")
        return self._of(tenant_id)["rows"][partition_id]

    def queue_get_meta(self, tenant_id, *, partition_id, fields, batch_size, task_name) -> dict:
        self._partition(tenant_id, partition_id)
        rows = list(range(batch_size or 1))
        meta = {"partition_id": partition_id, "fields": fields, "rows": rows, "task_name": task_name, "delivery": 1}
        return {"metadata": meta}

    def queue_get(self, tenant_id, request) -> dict:
        return self._partition(tenant_id, request["metadata"]["partition_id"])

    def queue_clear(self, tenant_id, *, partition_id) -> dict:
        self._partition(tenant_id, partition_id)
        del self._of(tenant_id)["rows"][partition_id]
        return {"rows": 1}

    def reserve(self, tenant_id, *, sample_count, behavior_policy_version, domain, metadata) -> dict:
        jobs = self._call("reserve", tenant_id)["jobs"]
        job = {"job_id": f"{tenant_id[:8]}-{len(jobs)}", "state": "reserved", "sample_count": sample_count}
        jobs[job["job_id"]] = job
        return {"job": job}

    def _job(self, tenant_id, job_id) -> dict:
        if job_id not in self._of(tenant_id)["jobs"]:
            raise NotFound(f"job {job_id}: unknown")
        return self._of(tenant_id)["jobs"][job_id]

    def mark(self, tenant_id, *, job_id, state, lease_id, metadata) -> dict:
        self._job(tenant_id, job_id)["state"] = state
        return {"job": self._job(tenant_id, job_id)}

    def lease_next(self, tenant_id, *, deadline_s) -> dict:
        ready = [job for job in self._of(tenant_id)["jobs"].values() if job["state"] == "ready"]
        if ready:
            ready[0]["state"] = "leased"
        return {"job": ready[0] if ready else None}

    def complete(self, tenant_id, *, job_id, lease_id, metadata) -> dict:
        return self.mark(tenant_id, job_id=job_id, state="completed", lease_id=lease_id, metadata=metadata)

    def fail(self, tenant_id, *, job_id, reason, lease_id) -> dict:
        return self.mark(tenant_id, job_id=job_id, state="failed", lease_id=lease_id, metadata={})

    # ---- environments

    def open_session(self, scope, request) -> dict:
        if request["environment"]["name"] != "toy":
            raise InvalidRequest("environment.name: choose toy")
        session_id = "s" + hashlib.sha256(f"{scope}{len(self.calls)}".encode()).hexdigest()[:32]
        self.calls.append(("open_session", scope))
        return {"session_id": session_id, "lease_s": request.get("lease_s") or 60.0, "instruction": "x"}

    def session_reset(self, scope, session_id, request, arrays) -> tuple[dict, dict]:
        if request["seed"] == 666:
            raise SessionLost(f"session {session_id}: its simulator died")
        return {"instruction": "x"}, {"state": np.zeros(4, np.float32)}

    def session_step(self, scope, session_id, request, arrays) -> tuple[dict, dict]:
        if not arrays:
            raise InvalidRequest("array 'action': missing")
        self.calls.append(("step", scope))
        return {"reward": 1.0, "terminated": False}, {"state": np.zeros(4, np.float32)}

    session_batch_step = session_step

    def session_close(self, scope, session_id, request, arrays) -> tuple[dict, dict]:
        return {}, {}

    def stats(self) -> dict:
        versions = {tenant_id: tenant["policy_version"] for tenant_id, tenant in self.tenants.items()}
        return {
            "ready": True,
            "tenants": {
                name: {
                    "policy_version": version,
                    "jobs_completed": version,
                    "memory_bytes": 64,
                    "queue_bytes": 0,
                    "device_seconds": {"actor": 0.5},
                    "jobs": {"ready": 1},
                }
                for name, version in versions.items()
            },
            "jobs_by_state": {"ready": 1},
            "utilisation": {"actor": 0.5},
            "inference": {
                "backbone_calls": 3,
                "shared_backbone_calls": 1,
                "rows_served": 8,
                "rows_failed": 0,
                "call_sizes": {2: 1, 3: 2},
            },
            "actor_encode": {"calls": 1, "rows": 4},
            "feature_store_bytes": 0,
            "simulators": 0,
        }
