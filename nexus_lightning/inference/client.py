"""A tenant's policy as its collector or evaluator sees it."""

from __future__ import annotations

import hashlib
import time
from typing import Any, Protocol, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from nexus_lightning.backbone import VLAFeature, sharing_key
from nexus_lightning.inference.requests import Ask, Mode, Session, Ticket
from nexus_lightning.inference.transport import LIVENESS_POLL_S


class PolicyServer(Protocol):
    """What a client needs of its server: :class:`~.server.TenantInferenceServer`, or replicas in its place."""

    policies: Any  # served(tenant, version): head and schema
    transport: Any  # submit(ask) -> ticket, rest(session)

    @property
    def is_alive(self) -> bool: ...

    def client(
        self, tenant: str, *, sample: bool, version: int | None = None, generator: torch.Generator | None = None
    ) -> TenantPolicyClient: ...


class TenantPolicyClient(TensorDictModuleBase):
    """A tenant's policy as seen by its collector or evaluator; the server does the work.

    Give it to TorchRL's ``Collector`` as ``policy``. With ``use_buffers=False`` the collector asks the policy only for
    real steps; its default probes it once at construction, which draws once from the generator.

    Reads from a TensorDict ``[N]``: ``("observation", "image", <camera>)`` uint8 ``[N, 3, H, W]``,
    ``("observation", "state")`` float32 ``[N, S]``, ``language_instruction`` (one string per row). Writes
    ``("vla_action", "chunk")`` float32 ``[N, T, A]`` (normalised), ``policy_version`` int64 ``[N, 1]``, and for heads
    that support RL ``("vla_action", "log_probs")`` ``[N, T, A]``, ``("vla_action", "trace", ...)`` and ``state_value``
    ``[N, 1]``.

    With ``record_features`` the features that the head saw come back too, compactly, and wait in :meth:`take_features`
    in the order of the calls: training can use them without another backbone pass.

    Sampling noise is drawn here, from ``generator``, never from a global generator: TorchRL's exploration type is not
    consulted. Use one client per thread. ``noise_rows = (first, total)`` says that the rows asked for are rows
    ``first ...`` of ``total`` which several processes with equal generators share: each gets its own rows' noise.

    Args:
        server: the server.
        tenant: whose policy.
        sample: True: sample with noise; False: the deterministic action.
        version: policy version; None: the latest when the request is served.
        generator: CPU generator of the noise; None: seeded from the tenant's name, so give a second sampling client of
            one tenant a generator of its own.
        timeout_s: seconds to wait for an answer.

    Raises:
        ValueError: the tenant or version is not published.
    """

    def __init__(
        self,
        server: PolicyServer,
        tenant: str,
        *,
        sample: bool,
        version: int | None = None,
        generator: torch.Generator | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        super().__init__()
        served = server.policies.served(tenant, version)
        self.server = server
        self.tenant = tenant
        self.sample = sample
        self.version = version
        self.timeout_s = timeout_s
        if generator is None:
            seed = int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:7], "little")
            generator = torch.Generator().manual_seed(seed)
        self.generator = generator
        self._noise_shape = served.head.noise_shape
        self._session = Session(sharing_key(served.schema, served.head.feature_spec.kind))
        self.noise_rows: tuple[int, int] | None = None
        self.record_features = False
        self._features: list[VLAFeature] = []
        cameras = [("observation", "image", camera) for camera in served.schema.cameras]
        in_keys: list[Any] = [*cameras, ("observation", "state"), "language_instruction"]
        out_keys: list[Any] = [("vla_action", "chunk"), "policy_version"]
        if served.head.supports_rl:
            out_keys += [("vla_action", "log_probs"), "state_value"]
            out_keys += [("vla_action", "trace", key) for key in served.head.trace_shapes]
        self.in_keys, self.out_keys = in_keys, out_keys

    def rest(self) -> None:
        """No request follows soon (an evaluation is over, an update begins): others need not wait for this session.

        Its next request ends the rest. Without this call they wait once, T seconds at most.
        """
        self.server.transport.rest(self._session)

    def get_rng_state(self) -> Tensor:
        """State of the noise generator, uint8 ``[bytes]``; part of a resumable run."""
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor) -> None:
        """Go on from a state that :meth:`get_rng_state` gave."""
        self.generator.set_state(state)

    def submit(self, td: TensorDictBase, mode: Mode = "act") -> Ticket:
        """Queue a request for ``td`` ``[N]``; the future gives the raw answer ``[N]`` or raises.

        Raises:
            ValueError: ``td`` has no rows or not exactly one batch dim.
        """
        if len(td.batch_size) != 1 or not td.batch_size[0]:
            raise ValueError(f"tenant {self.tenant!r}: expected a batch [N] with N >= 1, got {list(td.batch_size)}")
        observation = td.get("observation", None)
        noise = None
        if mode == "act" and self.sample:
            first, total = (0, td.batch_size[0]) if self.noise_rows is None else self.noise_rows
            noise = torch.randn(total, *self._noise_shape, generator=self.generator)[first : first + td.batch_size[0]]
        return self.server.transport.submit(
            Ask(
                self._session,
                self.tenant,
                self.version,
                mode,
                rows=td.batch_size[0],
                # the caller may put other tensors into its own TensorDict while this one waits
                observation=observation.copy() if isinstance(observation, TensorDictBase) else observation,
                instruction=td.get("language_instruction", None),
                noise=noise,
                keep_features=self.record_features and mode == "act",
            )
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on ``tensordict`` ``[N]``; returns it with the keys above.

        Raises:
            ValueError: the request does not fit the tenant's schema, or the backbone refuses it.
            RuntimeError: the head crashed or gave non-finite numbers, or the server stopped.
            TimeoutError: no answer within ``timeout_s``.
        """
        answer = self.wait(self.submit(tensordict))
        if "features" in answer.keys():
            self._features.append(cast(VLAFeature, answer.get("features")))
        device = tensordict.device
        for key in ("vla_action", "policy_version", "state_value"):
            if key in answer.keys():
                tensordict.set(key, answer.get(key) if device is None else answer.get(key).to(device))
        return tensordict

    def take_features(self) -> list[VLAFeature]:
        """What :attr:`record_features` kept since the last call of this method: one feature ``[N]`` per decision."""
        taken, self._features = self._features, []
        return taken

    def value(self, td: TensorDictBase) -> Tensor:
        """Critic estimate ``[N, 1]`` for the observations in ``td`` ``[N]`` (bootstrap of the last step).

        Raises:
            ValueError: the tenant's head has no value head; otherwise as :meth:`forward`.
        """
        return self.wait(self.submit(td, "value")).get("state_value")

    def wait(self, ticket: Ticket) -> TensorDict:
        """The raw answer of :meth:`submit`; raises as :meth:`forward` does."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            remaining = deadline - time.monotonic()
            try:
                answer = ticket.result(timeout=max(0.0, min(remaining, LIVENESS_POLL_S)))
                break
            except TimeoutError:
                if ticket.done():  # just now
                    answer = ticket.result()
                    break
                stopped = not self.server.is_alive
                if not stopped and remaining > 0:
                    continue
                ticket.cancel()  # a request that still waits is never served
                if stopped:
                    raise RuntimeError(f"tenant {self.tenant!r}: the inference server is not running") from None
                message = f"tenant {self.tenant!r}: no answer from inference within {self.timeout_s:g} s"
                raise TimeoutError(message) from None
        tenant, version = cast(tuple[str, int], ticket.answered_by)
        if tenant != self.tenant or (self.version is not None and version != self.version):
            raise RuntimeError(
                f"tenant {self.tenant!r} asked for version {self.version} and was given {tenant!r} "
                f"version {version}: the answer belongs to another request"
            )
        return answer
