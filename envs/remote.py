"""A simulator behind HTTP: in another Python environment or on another machine, served by
``nexus_lightning/services/environment_server.py`` (or the environment routes of ``scripts/serve.py``)."""

from __future__ import annotations

import hashlib
import http.client
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import urlsplit

import numpy as np

from nexus_lightning.services.codec import MSGPACK, Message, decode, encode
from nexus_lightning.services.errors import (
    ConnectionLost,
    Gone,
    NexusError,
    NotFound,
    NotReady,
    RateLimited,
    error_from_json,
)
from nexus_lightning.simulator import ChunkResult, ContractError, Simulator, StepResult, check_chunk

if TYPE_CHECKING:  # a worker process needs no torch
    from nexus_lightning.schema import TenantSchema

SESSIONS = "/v1/environments/sessions"
#: Longest wait between two tries.
MAX_BACKOFF_S = 5.0


class EpisodeLost(RuntimeError):
    """A remote simulator was lost in the middle of an episode, and the episode could not be brought back as it was."""


class RemoteSimulator(Simulator):
    """One session of an environment server behind the contract of a local simulator.

    A chunk is one request, an observation comes with the answer. Results are the local simulator's, bit for bit.

    What goes wrong on the way:

    * No connection, no answer, 503, 429: the same request is sent again, with the same ``request_seq``, for up to
      ``retry_s`` seconds; the server carries it out once.
    * The session is gone (its process died, the server was restarted, its lease ran out): a new one is opened and the
      episode starts again with the same seed. In the middle of an episode its chunks so far are carried out again, and
      every answer must be the one of the first time, bit by bit; only then the episode goes on. Otherwise, or when
      this happens more than ``max_rebuilds`` times in one episode, :class:`EpisodeLost` is raised: an episode is never
      continued from another state.
    * The simulator raised: its traceback is raised here.
    * The simulator broke its contract (see :class:`~nexus_lightning.simulator.Simulator`), or the server itself did:
      a :class:`~nexus_lightning.simulator.ContractError`.

    Lists of tasks (``environment.tasks``) are names of environments of the server.

    Args:
        url: of the server, ``http://host:9000``.
        name: of the environment; None: the server has one.
        arguments: of the environment, as the server's factory takes them.
        token_env: environment variable that holds the token; None: the server asks for none. The token itself has no
            place in a configuration, which is saved with every run.
        image_orientation: what the server's images are, see ``TenantSchema.image_orientation``; checked at the start.
        lease_s: seconds without a call (training between two rollouts, say) after which the server may close it.
        retry_s: see above.
        timeout_s: of one request, building the simulator included.
        max_rebuilds: see above.

    Raises:
        ValueError: the token is missing, or the server's images are oriented otherwise.
        NexusError: the server refused, see :mod:`nexus_lightning.services.errors`.
    """

    task_key: ClassVar[str | None] = "name"
    image_orientation: ClassVar[str | None] = None

    @classmethod
    def problems(cls, arguments: Mapping[str, Any], schema: TenantSchema) -> list[str]:
        orientation = arguments.get("image_orientation", "upright")
        if schema.cameras and orientation != schema.image_orientation:
            return [f"image_orientation={orientation}: the schema says {schema.image_orientation}"]
        variable = arguments.get("token_env")
        if variable is not None and not os.environ.get(variable):
            return [f"token_env={variable}: this environment variable is not set"]
        return []

    def __init__(
        self,
        url: str,
        name: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        token_env: str | None = None,
        image_orientation: str = "upright",
        lease_s: float = 600.0,
        retry_s: float = 60.0,
        timeout_s: float = 600.0,
        max_rebuilds: int = 3,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url!r}: write http://host:port or https://host")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._prefix = parts.path.rstrip("/")
        self.url, self.lease_s, self.retry_s, self.max_rebuilds = url, lease_s, retry_s, max_rebuilds
        self._headers = {"Content-Type": MSGPACK, "Accept": MSGPACK}
        if token_env is not None:
            token = os.environ.get(token_env)
            if not token:
                raise ValueError(f"token_env={token_env}: this environment variable is not set")
            self._headers["Authorization"] = f"Bearer {token}"
        self._environment = {**({} if name is None else {"name": name}), **(arguments or {})}
        self._session: str | None = None
        self._about = self._open()
        self.gripper = self._about["gripper"]
        if self._about["cameras"] and self._about["image_orientation"] != image_orientation:
            self.close()
            raise ValueError(
                f"{url}: image_orientation={image_orientation!r}: the server's images are "
                f"{self._about['image_orientation']!r}"
            )

    # ---- the contract ----

    def reset(self, seed: int) -> None:
        self._history: list[tuple[np.ndarray, str]] = []
        self._rebuilds = 0
        self._seed = seed
        self._last = self._insist(lambda: self._start(), rebuild=self._open)
        self._begun = _digest(self._last)

    def execute(self, actions: np.ndarray) -> ChunkResult:
        actions = np.asarray(actions, np.float32)
        self._last = answer = self._insist(lambda: self._send(actions), rebuild=self._replay)
        self._history.append((actions.copy(), _digest(answer)))
        rewards, meta = answer.arrays.get("rewards"), answer.meta
        if rewards is None or rewards.ndim != 1 or not 1 <= len(rewards) <= len(actions):
            came = "none" if rewards is None else f"{rewards.dtype} {rewards.shape}"
            raise ContractError(
                f"{self.url}: rewards: {came}: expected one for each executed of {len(actions)} actions"
            )
        result = ChunkResult(
            reward=float(sum(float(reward) for reward in rewards)),
            **{name: cast(bool, meta.get(name)) for name in ("success", "terminated", "truncated")},
            executed=np.arange(len(actions)) < len(rewards),
        )
        check_chunk(result, len(actions))
        return result

    def step(self, action: np.ndarray) -> StepResult:
        result = self.execute(np.asarray(action)[None])
        return StepResult(result.reward, result.success, result.terminated, result.truncated)

    def observe(self) -> dict[str, Any]:
        arrays = self._last.arrays
        images = {name.removeprefix("image/"): image for name, image in arrays.items() if name.startswith("image/")}
        return {"image": images, "state": arrays.get("state"), "instruction": self._last.meta.get("instruction")}

    def close(self) -> None:
        if self._session is not None:
            try:
                self._request(f"{SESSIONS}/{self._session}/close", Message(), retry_s=0.0)
            except NexusError:
                pass  # gone already, or out of reach: its lease ends it
            self._session = None
        self._connection.close()

    # ---- sessions ----

    def _open(self) -> dict[str, Any]:
        meta = {"environment": self._environment, "lease_s": self.lease_s}
        about = self._request(SESSIONS, Message(meta)).meta
        self._session, self._seq = about.pop("session_id"), 0
        about.pop("lease_s")
        return about

    def _start(self) -> Message:
        return self._request(f"{SESSIONS}/{self._session}/reset", Message({"seed": self._seed}))

    def _send(self, actions: np.ndarray) -> Message:
        message = Message({"request_seq": self._seq + 1}, {"actions": actions})
        answer = self._request(f"{SESSIONS}/{self._session}/batch_step", message)
        self._seq += 1
        return answer

    def _insist(self, call, rebuild) -> Message:
        while True:
            try:
                return call()
            except (Gone, NotFound) as error:  # a server that was restarted knows no session at all
                while True:
                    self._rebuilds += 1
                    if self._rebuilds > self.max_rebuilds:
                        raise EpisodeLost(
                            f"{self.url}: episode with seed {self._seed} after {len(self._history)} chunks: lost more "
                            f"than max_rebuilds={self.max_rebuilds} times: {error}"
                        ) from error
                    try:
                        rebuild()
                        break
                    except (Gone, NotFound) as again:
                        error = again

    def _replay(self) -> None:
        """The episode so far in a new session."""
        where = f"{self.url}: episode with seed {self._seed}"
        if self._open() != self._about:
            raise EpisodeLost(f"{where}: the server has another environment now")
        if _digest(self._start()) != self._begun:
            raise EpisodeLost(f"{where}: it starts otherwise than before; reset(seed) is not reproducible")
        for k, (actions, digest) in enumerate(self._history):
            if _digest(self._send(actions)) != digest:
                raise EpisodeLost(
                    f"{where}: chunk {k} carried out again ends otherwise; the simulator has chance in it"
                )

    # ---- HTTP ----

    def _request(self, path: str, message: Message, retry_s: float | None = None) -> Message:
        body = encode(message, MSGPACK)
        deadline = time.monotonic() + (self.retry_s if retry_s is None else retry_s)
        pause = 0.05
        while True:
            try:
                self._connection.request("POST", self._prefix + path, body, self._headers)
                response = self._connection.getresponse()
                data = response.read()
                answer = decode(data, response.headers.get("Content-Type"), max_meta_bytes=len(data))
                if response.status == 200:
                    return answer
                error = error_from_json(answer.meta, response.status)
                if answer.meta.get("error", {}).get("type") == "simulator_contract":
                    raise ContractError(f"{self.url}: {error.message}")
                if not isinstance(error, NotReady | RateLimited):
                    raise error
            except (OSError, http.client.HTTPException) as broken:
                if isinstance(broken, NexusError):  # NotReady and others are also ConnectionErrors
                    raise
                self._connection.close()
                error = ConnectionLost(f"{self.url}: {type(broken).__name__}: {broken}")
            wait = max(pause, error.retry_after_s or 0.0)
            if time.monotonic() + wait > deadline:
                raise error
            time.sleep(wait)
            pause = min(2 * pause, MAX_BACKOFF_S)


def _digest(answer: Message) -> str:
    """Of everything in an answer, so that two of them can be compared without keeping images."""
    return hashlib.sha256(encode(answer, MSGPACK)).hexdigest()
