"""Inference replicas on a Ray cluster: copies of the backbone that answer the collectors there.

::

    this process                               the cluster
    ServedPolicies ── weights of a version ─►  InferenceReplica 0: TenantInferenceServer (backbone, heads it was given)
       (the truth)    as safetensors bytes     InferenceReplica 1: TenantInferenceServer
                                                  ▲ requests; weights of a version that it lacks; answers ▼
    RolloutProducer ── index, version ──────►  TenantCollector: TorchRL collector in an actor (RayCollector), simulators
       ◄────────────── partition ────────────

A replica is a :class:`~nexus_lightning.inference.server.TenantInferenceServer` behind an actor: observations of many
tenants share its backbone calls as they do in this process. A request names tenant, version and digest. A replica that
lacks that version says so, is given it and asked again; so nothing has to be announced, and a replica that was started
anew fills up by itself. A client keeps to one replica; when that is lost it asks the next one. Noise travels with the
request: whoever answers, the answer has the same bits.

Why not TorchRL's ``RayTransport``: it needs two queue actors per client, its server has the base class's single-tenant
``_serve_batch`` built in, and a request to a server that died waits for its answer for good.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from hydra.utils import instantiate
from safetensors.torch import load as safetensors_load
from safetensors.torch import save as safetensors_save
from tensordict import TensorDictBase
from torch import nn

from nexus_lightning.backbone import Backbone, FeatureSpec
from nexus_lightning.config import InferenceQueueConfig, NexusConfig
from nexus_lightning.head import ActionHead
from nexus_lightning.inference.client import TenantPolicyClient
from nexus_lightning.inference.policies import Served, ServedPolicies, TenantPolicies, head_digest
from nexus_lightning.inference.requests import Ask, Session
from nexus_lightning.inference.server import TenantInferenceServer
from nexus_lightning.memory import keep_freed_memory
from nexus_lightning.schema import Normalizer, TenantSchema
from nexus_lightning.tenant import TenantSlot, TenantSpec, build_head

log = logging.getLogger(__name__)

#: Versions of a tenant that a replica keeps: those of its rollouts and of an evaluation, and one on the way.
KEPT_VERSIONS = 3
#: Seconds that a client waits for an answer: when all replicas are lost, one of them must load its backbone again.
ANSWER_TIMEOUT_S = 600.0
#: Seconds between two looks for a replica when none answers.
RETRY_S = 0.1


@dataclass(frozen=True)
class Weights:
    """One policy version on its way to a replica.

    Attributes:
        tenant, version: whose policy, and which.
        digest: of the head, see :func:`~nexus_lightning.checkpoint.tensors_digest`.
        data: one reference into Ray's object store, to safetensors bytes of ``head.*`` and ``normalizer.*`` (in a list,
            or Ray would fetch them for everybody who is merely told of them).
    """

    tenant: str
    version: int
    digest: str
    data: list[Any]


# ---------------------------------------------------------------------------------------------------- in the replica


class ReplicaPolicies(ServedPolicies):
    """Policies as they are given, in any order of versions; a tenant's :data:`KEPT_VERSIONS` used last stay."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self._used: dict[tuple[str, int], None] = {}  # those that are kept, the one used last at the end

    def hold(
        self, tenant: str, version: int, head: ActionHead, normalizer: Normalizer, schema: TenantSchema, digest: str
    ) -> None:
        """Serve ``version`` from now on. Takes ``head`` and ``normalizer`` over.

        Raises:
            RuntimeError: the head is not the one that ``digest`` was taken of.
        """
        given = head_digest(head)
        if given != digest:
            raise RuntimeError(
                f"tenant {tenant!r}: version {version} arrived at a replica with digest {given[:12]} instead of "
                f"{digest[:12]}"
            )
        served = Served(tenant, version, head, normalizer, schema, digest, unchanged=False, pins=1)
        with self._lock:
            policies = self._tenants.setdefault(tenant, TenantPolicies())
            policies.versions[version] = served
            policies.latest = max(policies.latest, version)
            self._used[tenant, version] = None
            kept = [key for key in self._used if key[0] == tenant]
            for key in kept[:-KEPT_VERSIONS]:
                del self._used[key]
                policies.versions[key[1]].pins -= 1
            policies.drop_unused()
            policies.spare = None  # heads are taken over here, not copied into

    def acquire(self, tenant: str, version: int | None = None) -> Served:
        served = super().acquire(tenant, version)
        with self._lock:
            if (tenant, served.version) in self._used:
                self._used[tenant, served.version] = self._used.pop((tenant, served.version))
        return served


class InferenceReplica:
    """What runs in a replica's actor.

    Args:
        backbone: the run's ``backbone`` configuration.
        fingerprint: of the run's backbone.
        specs: the tenants.
        settings: of the queue.
        torch_threads: intra-op threads; None: torch's default.
        use_gpu: whether Ray has reserved a GPU for it.

    Raises:
        RuntimeError: the backbone that is built here is not the run's.
    """

    def __init__(
        self,
        backbone: dict[str, Any],
        fingerprint: str,
        specs: dict[str, TenantSpec],
        settings: InferenceQueueConfig,
        torch_threads: int | None,
        use_gpu: bool,
    ) -> None:
        if torch_threads is not None:
            torch.set_num_threads(torch_threads)
        keep_freed_memory()
        built = instantiate(backbone)
        if built.fingerprint != fingerprint:
            raise RuntimeError(
                f"the backbone built here has fingerprint {built.fingerprint[:12]}, the run's has {fingerprint[:12]}: "
                "the machines must have the same weights and versions of packages"
            )
        self.specs = specs
        self.policies = ReplicaPolicies(built.to("cuda" if use_gpu else "cpu"))
        self._server = TenantInferenceServer(
            self.policies,
            max_batch_size=settings.max_batch_size,
            timeout_s=settings.timeout_s,
            static_batch_size=settings.static_batch_size,
        )
        self._server.start()
        self._templates: dict[str, ActionHead] = {}
        self._building = threading.Lock()
        self._sessions: dict[str, Session] = {}

    async def ready(self) -> None:
        """Answers once the replica is built."""

    async def act(self, session: str, group: tuple[str, int], digest: str, ask: Ask) -> tuple[Any, Any] | None:
        """The answer and the tenant and version that gave it; None when this version was not given yet."""
        assert ask.version is not None, "the latest version is known in the run's own process only"
        try:
            served = self.policies.acquire(ask.tenant, ask.version)
        except ValueError:
            return None
        try:
            if served.digest != digest:
                raise RuntimeError(
                    f"tenant {ask.tenant!r}: version {ask.version} has digest {served.digest[:12]} on a replica, "
                    f"{digest[:12]} was asked for"
                )
            known = self._sessions.setdefault(session, Session(group))
            ticket = self._server.transport.submit(replace(ask, session=known))
            return await asyncio.wrap_future(ticket), ticket.answered_by
        finally:
            self.policies.release(served)

    async def give(self, tenant: str, version: int, digest: str, weights: bytes) -> None:
        """Serve this version too."""
        await asyncio.to_thread(self._give, tenant, version, digest, weights)

    async def rest(self, session: str) -> None:
        """Nobody waits for this client before its next request."""
        known = self._sessions.pop(session, None)
        if known is not None:
            self._server.transport.rest(known)

    async def summary(self) -> dict[str, dict[str, Any]]:
        """See :meth:`TenantInferenceServer.summary`."""
        return self._server.summary()

    def _give(self, tenant: str, version: int, digest: str, weights: bytes) -> None:
        spec, tensors = self.specs[tenant], safetensors_load(weights)
        with self._building:
            if tenant not in self._templates:
                self._templates[tenant] = build_head(spec.config, spec.schema, self.policies.backbone, seed=0)
            head, normalizer = copy.deepcopy(self._templates[tenant]), Normalizer(spec.schema)
        for prefix, module in {"head": head, "normalizer": normalizer}.items():
            module.load_state_dict(_part(tensors, prefix))
            module.requires_grad_(False).eval().to(self.policies.backbone.device)
        self.policies.hold(tenant, version, head, normalizer, spec.schema, digest)


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(f"{prefix}."): v for k, v in tensors.items() if k.startswith(f"{prefix}.")}


# ---------------------------------------------------------------------------------------------------- in the collector


@dataclass(frozen=True)
class _HeadFacts:
    """What a client asks of a head."""

    noise_shape: tuple[int, ...]
    trace_shapes: dict[str, tuple[int, ...]]
    supports_rl: bool
    feature_spec: FeatureSpec


@dataclass(frozen=True)
class _PolicyFacts:
    """What a client asks of a served policy; the same for all versions of a tenant."""

    head: _HeadFacts
    schema: TenantSchema


class Replicas:
    """The replicas as a :class:`TenantPolicyClient` of one tenant sees them: in the place of the server, its transport
    and its policies. Travels to an actor.

    Args:
        tenant: whose.
        actors: handles of the replicas, in the order in which they are asked.
        facts: of the tenant's policies.
    """

    is_alive = True  # single replicas may not be; a request looks for one that is until its client gives up

    def __init__(self, tenant: str, actors: Sequence[Any], facts: _PolicyFacts) -> None:
        self.tenant, self.actors, self.facts = tenant, list(actors), facts
        self.transport = self.policies = self
        self.weights: Weights | None = None
        self._place = 0
        self._sessions: dict[Session, str] = {}

    def client(
        self, tenant: str, *, sample: bool, version: int | None = None, generator: torch.Generator | None = None
    ) -> TenantPolicyClient:
        """As :meth:`TenantInferenceServer.client`."""
        return TenantPolicyClient(
            self, tenant, sample=sample, version=version, generator=generator, timeout_s=ANSWER_TIMEOUT_S
        )

    def hold(self, weights: Weights) -> None:
        """What is asked for from now on."""
        assert weights.tenant == self.tenant
        self.weights = weights

    # of the policies

    def served(self, tenant: str, version: int | None = None) -> _PolicyFacts:
        assert tenant == self.tenant
        return self.facts

    # of the transport

    def submit(self, ask: Ask) -> RemoteTicket:
        weights = self.weights
        assert weights is not None and (weights.tenant, weights.version) == (ask.tenant, ask.version)
        session = self._sessions.setdefault(ask.session, uuid.uuid4().hex)
        group = ask.session.group
        return RemoteTicket(self, weights, (session, group, weights.digest, replace(ask, session=cast(Any, None))))

    def rest(self, session: Session) -> None:
        known = self._sessions.pop(session, None)
        if known is not None:
            self.actor.rest.remote(known)

    # of the ticket

    @property
    def actor(self) -> Any:
        """The replica that is asked now."""
        return self.actors[self._place]

    def skip(self, lost: Any) -> None:
        """Ask the one after ``lost`` from now on."""
        if self.actor is lost:
            self._place = (self._place + 1) % len(self.actors)


class RemoteTicket:
    """A request to the replicas, with the part of a future's interface that :meth:`TenantPolicyClient.wait` uses."""

    answered_by: tuple[str, int] | None = None

    def __init__(self, replicas: Replicas, weights: Weights, request: tuple[Any, ...]) -> None:
        self._replicas, self._weights, self._request = replicas, weights, request
        self._send()

    def result(self, timeout: float) -> TensorDictBase:
        """The answer; looks for another replica when the one that was asked is lost.

        Raises:
            TimeoutError: none within ``timeout`` seconds.
            ValueError: as the server's.
            RuntimeError: as the server's.
        """
        import ray
        import ray.exceptions

        end_s = time.monotonic() + timeout
        while True:
            try:
                reply = ray.get(self._reply, timeout=max(0.0, end_s - time.monotonic()))
                if reply is not None:
                    answer, self.answered_by = reply
                    return answer
                w = self._weights
                ray.get(self._actor.give.remote(w.tenant, w.version, w.digest, w.data[0]))
            except ray.exceptions.GetTimeoutError:
                raise TimeoutError from None
            except ray.exceptions.RayTaskError as error:
                raise error.cause from None
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as error:
                log.warning("tenant %s: a replica is lost: %s", self._weights.tenant, error)
                self._replicas.skip(self._actor)
                time.sleep(min(RETRY_S, max(0.0, end_s - time.monotonic())))
            self._send()
            if time.monotonic() >= end_s:
                raise TimeoutError

    def done(self) -> bool:
        """Its answer is fetched by :meth:`result` only."""
        return False

    def cancel(self) -> None:
        """The answer, if one comes, is not fetched."""

    def _send(self) -> None:
        self._actor = self._replicas.actor
        self._reply = self._actor.act.remote(*self._request)


# -------------------------------------------------------------------------------------------------- in this process


class Fleet:
    """The run's replicas, seen from its own process.

    Args:
        config: validated; ``placement.ray`` has replicas.
        slots: the tenants.
        served: where their versions come from.
        fingerprint: of the backbone.
    """

    def __init__(
        self, config: NexusConfig, slots: dict[str, TenantSlot], served: ServedPolicies, fingerprint: str
    ) -> None:
        import ray

        settings = config.placement.ray
        assert settings is not None
        self.served = served
        self._data: dict[str, dict[int, Weights]] = {}
        self._lock = threading.Lock()
        self._tenants = list(slots)
        options = {
            "num_cpus": settings.num_cpus_per_replica,
            "num_gpus": settings.num_gpus_per_replica,
            "max_restarts": -1,  # on another machine once there is room; it is given the weights again
            "scheduling_strategy": "SPREAD",
        }
        specs = {name: slot.spec for name, slot in slots.items()}
        use_gpu = settings.num_gpus_per_replica > 0
        threads = config.placement.torch_threads
        self.actors: list[Any] = [
            ray.remote(InferenceReplica)
            .options(**options)
            .remote(config.backbone, fingerprint, specs, config.queues.inference, threads, use_gpu)
            for _ in range(settings.inference_replicas)
        ]

    def wait_ready(self) -> None:
        """Wait until every replica has built its backbone.

        Raises:
            RuntimeError: one cannot; its own traceback is in the message.
        """
        import ray
        import ray.exceptions

        try:
            ray.get([actor.ready.remote() for actor in self.actors])
        except ray.exceptions.RayActorError as error:
            raise RuntimeError(f"placement.ray.inference_replicas: a replica cannot start: {error}") from None

    def weights(self, tenant: str, version: int) -> Weights:
        """A served version in Ray's object store, put there once; leaves it when the version is no longer served."""
        import ray

        with self._lock:
            known = self._data.setdefault(tenant, {})
            served = self.served.acquire(tenant, version)
            try:
                if version not in known:
                    parts: dict[str, nn.Module] = {"head": served.head, "normalizer": served.normalizer}
                    tensors = {
                        f"{prefix}.{k}": v for prefix, part in parts.items() for k, v in part.state_dict().items()
                    }
                    data = safetensors_save({k: v.detach().cpu().clone() for k, v in tensors.items()})
                    known[version] = Weights(tenant, version, served.digest, [ray.put(data)])
            finally:
                self.served.release(served)
            for old in set(known) - set(self.served.versions(tenant)):
                del known[old]
            return known[version]

    def service(self, tenant: str) -> PolicyService:
        """The tenant's policy for TorchRL's RayCollector. Tenants begin at different replicas."""
        served = self.served.served(tenant)
        head = served.head
        facts = _HeadFacts(head.noise_shape, head.trace_shapes, head.supports_rl, head.feature_spec)
        first = self._tenants.index(tenant) % len(self.actors)
        order = self.actors[first:] + self.actors[:first]
        return PolicyService(Replicas(tenant, order, _PolicyFacts(facts, served.schema)))

    def summary(self) -> list[dict[str, dict[str, Any]]]:
        """:meth:`TenantInferenceServer.summary` of every replica; of one that is lost, nothing."""
        import ray
        import ray.exceptions

        out = []
        for actor in self.actors:
            try:
                out.append(ray.get(actor.summary.remote(), timeout=5.0))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                out.append({})
        return out

    def close(self) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)


class PolicyService:
    """TorchRL's protocol of an inference service on Ray, which its RayCollector takes in place of a policy."""

    service_backend = "ray"

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas

    def client(self) -> TenantPolicyClient:
        return self.replicas.client(self.replicas.tenant, sample=True)

    def clients(self, count: int) -> list[TenantPolicyClient]:
        return [self.client() for _ in range(count)]
