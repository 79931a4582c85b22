"""Which policies are served: per tenant, versions of its head on the one frozen backbone."""

from __future__ import annotations

import copy
import logging
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nexus_lightning.backbone import Backbone
from nexus_lightning.checkpoint import tensors_digest
from nexus_lightning.head import ActionHead
from nexus_lightning.schema import Normalizer, TenantSchema

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Served:
    """One published policy version. Read only: the head's memory is reused once the version is dropped.

    Attributes:
        tenant / version: whose policy, and which.
        head: private eval copy on the backbone's device, without gradients.
        normalizer: private copy, same device.
        schema: the tenant's schema.
        digest: sha256 of the head's tensors.
        unchanged: True when the digest equals that of the version published before it.
        pins: how many :meth:`ServedPolicies.pin` calls keep it.
        users: how many requests are being served with it.
    """

    tenant: str
    version: int
    head: ActionHead
    normalizer: Normalizer
    schema: TenantSchema
    digest: str
    unchanged: bool
    pins: int = 0
    users: int = 0


@dataclass(eq=False)
class TenantPolicies:
    versions: dict[int, Served] = field(default_factory=dict)
    latest: int = -1
    spare: ActionHead | None = None  # memory of the version dropped last
    published: int = 0
    unchanged: int = 0

    def drop_unused(self) -> None:
        for version in [v for v, s in self.versions.items() if v != self.latest and not s.pins and not s.users]:
            self.spare = self.versions.pop(version).head


class ServedPolicies:
    """The one frozen backbone and, per tenant, the heads that are served on it.

    Memory: the backbone is the caller's own object, never copied. A tenant holds its latest version, its pinned
    versions, and one spare head whose memory the next publication reuses.

    A version leaves when a newer one is there and nobody pins or uses it. All methods are thread safe; copying a head
    does not block requests.

    Example::

        policies = ServedPolicies(backbone)
        policies.publish("libero", 0, head, normalizer, schema)
        version = policies.pin("libero")      # evaluation: this version stays although training goes on
        ...
        policies.unpin("libero", version)
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self._lock = threading.Lock()  # the tables; held for dictionary operations only
        self._publish_lock = threading.Lock()  # one publication at a time; held while tensors are copied
        self._tenants: dict[str, TenantPolicies] = {}

    def publish(self, tenant: str, version: int, head: ActionHead, normalizer: Normalizer, schema: TenantSchema) -> str:
        """Copy ``head`` and ``normalizer`` and serve them as ``version`` from the next request on.

        The caller must not train the head meanwhile. Identical bytes under a new version are legal: they are logged,
        counted in :meth:`counts` and marked ``Served.unchanged``.

        Returns:
            sha256 over the names, dtypes, shapes and bytes of the head's ``state_dict``.

        Raises:
            ValueError: ``version`` is not newer than the latest one, the schema differs from the tenant's earlier one,
                or the head holds the backbone's parameters.
            RuntimeError: the copy's digest differs from the source's. The previous version stays served.
        """
        owned = {id(p) for p in self.backbone.parameters()}
        if any(id(p) in owned for p in head.parameters()):
            raise ValueError(
                f"tenant {tenant!r}: the head holds parameters of the shared backbone; keep them out of it"
            )
        with self._publish_lock:
            with self._lock:
                known = self._tenants.get(tenant, TenantPolicies())
                previous = known.versions.get(known.latest)
                if version < 0 or version <= known.latest:
                    raise ValueError(
                        f"tenant {tenant!r}: version {version} is not newer than {known.latest}; versions only grow"
                    )
                if previous is not None and previous.schema.signature != schema.signature:
                    raise ValueError(
                        f"tenant {tenant!r}: version {version} has another schema than version {previous.version} "
                        f"({'; '.join(schema.differences(previous.schema))}); remove the tenant first"
                    )
                spare, known.spare = known.spare, None
            served_head = _copy_head(head, spare, self.backbone.device)
            digest, source = head_digest(served_head), head_digest(head)
            if digest != source:
                raise RuntimeError(
                    f"tenant {tenant!r}: publication of version {version} failed: digest of the copy {digest[:12]} "
                    f"differs from the source's {source[:12]}; was the head trained meanwhile?"
                )
            served = Served(
                tenant=tenant,
                version=version,
                head=served_head,
                normalizer=copy.deepcopy(normalizer).requires_grad_(False).eval().to(self.backbone.device),
                schema=schema,
                digest=digest,
                unchanged=previous is not None and previous.digest == digest,
            )
            if served.unchanged:
                _logger.warning("tenant %r: version %d has the same bytes as the one before", tenant, version)
            with self._lock:
                policies = self._tenants.setdefault(tenant, known)
                policies.versions[version] = served
                policies.latest = version
                policies.published += 1
                policies.unchanged += served.unchanged
                policies.drop_unused()
        return digest

    def renormalize(self, tenant: str, normalizer: Normalizer) -> None:
        """Give the latest version other statistics (those of the tenant's first dataset); its weights stay."""
        copied = copy.deepcopy(normalizer).requires_grad_(False).eval().to(self.backbone.device)
        with self._lock:
            self._find(tenant, None).normalizer = copied

    def load(self, tenant: str, version: int, head: ActionHead, normalizer: Normalizer) -> None:
        """Serve an older version beside the latest one, pinned (see :meth:`pin`); ``head`` becomes the table's own.

        Raises:
            ValueError: no such tenant, or the version is not older than the latest one.
        """
        head = head.requires_grad_(False).eval().to(self.backbone.device)
        normalizer = copy.deepcopy(normalizer).requires_grad_(False).eval().to(self.backbone.device)
        with self._lock:
            policies = self._policies(tenant)
            if version not in policies.versions:
                if version > policies.latest:
                    raise ValueError(
                        f"tenant {tenant!r}: version {version} is newer than {policies.latest}: publish it"
                    )
                schema, digest = self._find(tenant, None).schema, head_digest(head)
                policies.versions[version] = Served(tenant, version, head, normalizer, schema, digest, False)
            policies.versions[version].pins += 1

    def remove(self, tenant: str) -> None:
        """Forget a tenant at once, pinned versions too; requests in service finish.

        Raises:
            ValueError: no such tenant.
        """
        with self._publish_lock, self._lock:
            self._policies(tenant)
            del self._tenants[tenant]

    def pin(self, tenant: str, version: int | None = None) -> int:
        """Keep ``version`` (None: the latest) served until as many :meth:`unpin` calls; returns the version."""
        with self._lock:
            served = self._find(tenant, version)
            served.pins += 1
            return served.version

    def unpin(self, tenant: str, version: int) -> None:
        """Undo one :meth:`pin`. Does nothing when the tenant has been removed: its pins went with it.

        Raises:
            ValueError: the version is not pinned.
        """
        with self._lock:
            policies = self._tenants.get(tenant)
            if policies is None:
                return
            served = policies.versions.get(version)
            if served is None or not served.pins:
                raise ValueError(f"tenant {tenant!r}: version {version} is not pinned")
            served.pins -= 1
            policies.drop_unused()

    def acquire(self, tenant: str, version: int | None = None) -> Served:
        """A version (None: the latest) that stays intact until :meth:`release`. Used by the server per request."""
        with self._lock:
            served = self._find(tenant, version)
            served.users += 1
            return served

    def release(self, served: Served) -> None:
        """Undo one :meth:`acquire`."""
        with self._lock:
            served.users -= 1
            policies = self._tenants.get(served.tenant)
            if policies is not None:
                policies.drop_unused()

    def served(self, tenant: str, version: int | None = None) -> Served:
        """Look at a served version (None: the latest). Its tensors may be reused later: read metadata only."""
        with self._lock:
            return self._find(tenant, version)

    def tenants(self) -> list[str]:
        """Names of the tenants that are served."""
        with self._lock:
            return list(self._tenants)

    def versions(self, tenant: str) -> list[int]:
        """Served versions in growing order."""
        with self._lock:
            return sorted(self._policies(tenant).versions)

    def latest(self, tenant: str) -> int:
        """Newest served version."""
        with self._lock:
            return self._policies(tenant).latest

    def counts(self) -> dict[str, dict[str, int]]:
        """Per tenant: ``published`` versions and how many of them were ``unchanged``."""
        with self._lock:
            return {t: {"published": p.published, "unchanged": p.unchanged} for t, p in self._tenants.items()}

    def _policies(self, tenant: str) -> TenantPolicies:
        policies = self._tenants.get(tenant)
        if policies is None:
            raise ValueError(f"tenant {tenant!r} is not served; published tenants: {sorted(self._tenants)}")
        return policies

    def _find(self, tenant: str, version: int | None) -> Served:
        policies = self._policies(tenant)
        served = policies.versions.get(policies.latest if version is None else version)
        if served is None:
            raise ValueError(
                f"tenant {tenant!r}: version {version} is not served (served: {sorted(policies.versions)}); "
                "pin a version for as long as it is needed"
            )
        return served


def head_digest(head: ActionHead) -> str:
    """See :func:`~nexus_lightning.checkpoint.tensors_digest`: of the tensors of the head's ``state_dict``."""
    return tensors_digest({name: value for name, value in head.state_dict().items() if isinstance(value, Tensor)})


def _layout(head: ActionHead) -> dict[str, tuple]:
    tensors = {**dict(head.named_parameters()), **dict(head.named_buffers())}
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def _copy_head(head: ActionHead, spare: ActionHead | None, device: torch.device) -> ActionHead:
    """Eval copy of ``head`` on ``device`` without gradients, in the memory of ``spare`` when the layouts agree."""
    if spare is None or type(spare) is not type(head) or _layout(spare) != _layout(head):
        return copy.deepcopy(head).requires_grad_(False).eval().to(device)
    spare.load_state_dict(head.state_dict())
    source = dict(head.named_buffers())
    for name, buffer in spare.named_buffers():  # load_state_dict leaves non-persistent buffers out
        buffer.copy_(source[name])
    return spare
