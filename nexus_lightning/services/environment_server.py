"""Simulators behind HTTP, for those that cannot be installed beside the training (another Python, another machine).

This one file is all that the other side needs: numpy, msgpack and the standard library, Python 3.8 or newer. Copy it
there, or run it from the package::

    python -m nexus_lightning.services.environment_server --simulator pkg.module:factory --port 9000 --token-file token
    python environment_server.py --simulator push=my.tasks:Push --simulator stack=my.tasks:make_stack --token-file token

``factory(**arguments)``, with the arguments that a client sends, returns one of:

- an object of the contract of ``nexus_lightning.simulator.Simulator``: ``reset(seed)``, ``step(action)`` (gives an
  object with ``reward, success, terminated, truncated``), ``observe()`` and optionally ``close()``, ``gripper``,
  ``image_orientation``, ``horizon``;
- a Gymnasium environment with a float Box as actions (-1 and +1 are its bounds): see :class:`GymnasiumAdapter`.

Every step and observation is checked: a finite reward, bools, a finite float32 state and uint8 images in the shapes of
the first reset. What breaks that is answered by 500 ``simulator_contract`` with the field, what came and what is
expected, and ends the session.

Every session has a simulator of its own in a process of its own (``--threads``: in a thread, for light ones), always
called from one and the same thread, because rendering contexts belong to threads. Sessions step in parallel; the calls
of one session wait for each other.

Protocol (POST, ``Authorization: Bearer <token>``, bodies msgpack ``{"meta", "arrays": {name: {"dtype", "shape",
"data"}}}`` or JSON with lists in place of arrays; answers in the form of the request)::

    /v1/environments/sessions   environment {name?, ...arguments}, lease_s?, seed?
          -> session_id, lease_s, instruction, state_dim, cameras, image_size, max_steps, gripper, image_orientation
    .../{id}/reset              seed -> observation: arrays state [S], image/<camera> [3, H, W]; meta instruction
    .../{id}/step               array action [A], request_seq -> observation, reward, terminated, truncated, success
    .../{id}/batch_step         array actions [T, A], request_seq -> up to the first done: array rewards [n], last
                                observation, steps, terminated, truncated, success (of any step)
    .../{id}/close
    GET /healthz                without a token

``request_seq`` grows by one with every step or batch_step of a session. The same number with the same content gives the
stored answer, so a client that lost an answer asks again and the simulator moves once. A session ends when no call came
for ``lease_s`` seconds, or its process died; then every call answers 410 ``session_lost``, as for an unknown id.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import importlib
import json
import math
import multiprocessing
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgpack
import numpy as np

ROOT = "/v1/environments/sessions"
MAX_STEPS_PER_CALL = 1024
#: Requests hold actions and arguments only.
MAX_BODY_BYTES = 1 << 20
MAX_LEASE_S = 3600.0
#: Seconds until a silent connection is closed (it holds a thread).
IDLE_CONNECTION_S = 120.0
CLOSE_TIMEOUT_S = 5.0
#: With one process per simulator, more threads per process only fight each other.
WORKER_ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")


class ServerError(Exception):
    """An answer with status >= 400, in the JSON form of all services of this project."""

    def __init__(self, status: int, kind: str, message: str, retryable: bool = False) -> None:
        super().__init__(message)
        self.status, self.kind, self.message, self.retryable = status, kind, message, retryable

    def to_json(self) -> dict[str, Any]:
        error = {"type": self.kind, "message": self.message, "details": [], "retryable": self.retryable}
        return {"error": error}


def invalid(message: str) -> ServerError:
    return ServerError(422, "invalid_request", message)


def lost(message: str) -> ServerError:
    return ServerError(410, "session_lost", message + ": open a new session and start the episode again")


# ---- the simulator and the process or thread it lives in ----


class ContractBroken(Exception):
    """A simulator gave what its contract does not allow: the field, what came and what is expected."""


#: Rewards are summed and trained on in float32.
LARGEST_REWARD = float(np.finfo(np.float32).max)
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


def as_number(name: str, value: Any) -> float:
    if not isinstance(value, NUMBERS) or not abs(float(value)) <= LARGEST_REWARD:
        raise ContractBroken(f"{name}: {_shown(value)}: expected one finite number")
    return float(value)


def as_flag(name: str, value: Any) -> bool:
    """A bool, or a 0 or 1 that stands for one."""
    if not isinstance(value, NUMBERS) or value not in (0, 1):
        raise ContractBroken(f"{name}: {_shown(value)}: expected a bool")
    return bool(value)


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{value.dtype} {value.shape}"
    return repr(value)[:80]


class GymnasiumAdapter:
    """A Gymnasium environment behind the contract of a simulator.

    Images (uint8 ``[H, W, 3]``) of a Dict observation are cameras under their key, an image observation is the camera
    ``camera``; all other entries are flattened into the state in the order of the space. The instruction is the
    environment's attribute ``instruction``, else its id. Success is ``info["is_success"]`` or ``info["success"]``, else
    an end with a positive reward. ``nexus_lightning`` has more choices in ``envs/gymnasium.py``: wrap there, where it
    can be installed.
    """

    gripper = "none"

    def __init__(self, env: Any) -> None:
        self.env = env
        space = env.action_space
        low, high = getattr(space, "low", None), getattr(space, "high", None)
        if low is None or high is None or not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError(f"the actions are {space}: only a Box with finite bounds works")
        self.low, self.range = low.reshape(-1).astype(np.float64), (high - low).reshape(-1).astype(np.float64)
        spec = getattr(env, "spec", None)
        self.horizon = getattr(spec, "max_episode_steps", None)
        self.instruction = str(getattr(env.unwrapped, "instruction", None) or getattr(spec, "id", type(env).__name__))
        self.gripper = str(getattr(env.unwrapped, "gripper", "none"))

    def reset(self, seed: int) -> None:
        self.observation, _ = self.env.reset(seed=seed)

    def step(self, action: np.ndarray) -> Any:
        space = self.env.action_space
        if action.size != self.low.size:
            raise ValueError(f"an action of {action.size} dims; the environment has {self.low.size}")
        native = (self.low + (action.astype(np.float64) + 1) / 2 * self.range).reshape(space.shape)
        self.observation, reward, terminated, truncated, info = self.env.step(native.astype(space.dtype))
        reward, terminated = as_number("reward", reward), as_flag("terminated", terminated)
        success = info.get("is_success", info.get("success", terminated and reward > 0))
        truncated = as_flag("truncated", truncated) and not terminated
        return _Step(reward, as_flag("info's success", success), terminated, truncated)

    def observe(self) -> dict[str, Any]:
        seen = self.observation if isinstance(self.observation, dict) else {"camera": self.observation}
        images, state = {}, []
        for key, value in seen.items():
            value = np.asarray(value)
            if value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3:
                images[key] = np.ascontiguousarray(np.moveaxis(value, -1, 0))
            else:
                state.append(value.astype(np.float32).reshape(-1))
        flat = np.concatenate(state) if state else np.zeros(1, np.float32)
        return {"image": images, "state": flat, "instruction": self.instruction}

    def close(self) -> None:
        self.env.close()


class _Step:
    def __init__(self, reward: float, success: bool, terminated: bool, truncated: bool) -> None:
        self.reward, self.success, self.terminated, self.truncated = reward, success, terminated, truncated


def load_factory(target: str) -> Callable[..., Any]:
    """``pkg.module:factory`` -> the callable."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"simulator {target!r}: write pkg.module:factory")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"simulator {target!r}: not callable")
    return found


class SimulatorHost:
    """Answers commands on one simulator; lives in the process or thread of a session."""

    def __init__(self, target: str, arguments: dict[str, Any]) -> None:
        self.shapes: dict[str, tuple[int, ...]] | None = None  # of the first observation
        built = load_factory(target)(**arguments)
        self.sim = built if hasattr(built, "observe") else GymnasiumAdapter(built)

    def describe(self, seed: int) -> dict[str, Any]:
        self.sim.reset(seed)
        seen = self._observe()
        images = seen["image"]
        return {
            "instruction": seen["instruction"],
            "state_dim": len(seen["state"]),
            "cameras": list(images),
            "image_size": int(next(iter(images.values())).shape[-1]) if images else 0,
            "max_steps": getattr(self.sim, "horizon", None),
            "gripper": getattr(self.sim, "gripper", "none"),
            "image_orientation": getattr(self.sim, "image_orientation", "upright"),
        }

    def reset(self, seed: int) -> dict[str, Any]:
        self.sim.reset(seed)
        return {"observation": self._observe()}

    def steps(self, actions: np.ndarray) -> dict[str, Any]:
        """Rows of ``actions`` up to the first done; rewards are float64, so that their sum is the local one."""
        rewards, success = [], False
        for action in actions:
            step = self.sim.step(action)
            for name in ("reward", "success", "terminated", "truncated"):
                if not hasattr(step, name):
                    raise ContractBroken(f"step: {_shown(step)}: expected an object with {name}")
                if name != "reward" and not isinstance(getattr(step, name), (bool, np.bool_)):
                    raise ContractBroken(f"{name}: {_shown(getattr(step, name))}: expected a bool")
            rewards.append(as_number("reward", step.reward))
            success = success or bool(step.success)
            if step.terminated or step.truncated:
                break
        return {
            "rewards": np.array(rewards, np.float64),
            "success": success,
            "terminated": bool(step.terminated),
            "truncated": bool(step.truncated),
            "observation": self._observe(),
        }

    def close(self) -> None:
        getattr(self.sim, "close", lambda: None)()

    def _observe(self) -> dict[str, Any]:
        seen = self.sim.observe()
        if not isinstance(seen, dict) or "state" not in seen:
            raise ContractBroken(f"observation: {_shown(seen)}: expected a dict of image, state and instruction")
        state = np.asarray(seen["state"])
        if state.ndim != 1 or state.dtype != np.float32:
            raise ContractBroken(f"state: {state.dtype} {state.shape}: expected float32 (S,)")
        if not np.isfinite(state).all():
            raise ContractBroken(f"state: {state.tolist()}: expected finite numbers")
        images = {camera: np.asarray(image) for camera, image in seen.get("image", {}).items()}
        for camera, image in images.items():
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] != 3:
                raise ContractBroken(f"image {camera!r}: {image.dtype} {image.shape}: expected uint8 (3, H, W)")
        shapes = {"state": state.shape, **{"image " + camera: image.shape for camera, image in images.items()}}
        if self.shapes is None:
            self.shapes = shapes
        if shapes != self.shapes:
            raise ContractBroken(f"observation: {shapes}: expected {self.shapes}, as at the first reset")
        text = seen.get("instruction")
        if not (isinstance(text, str) and text):
            raise ContractBroken(f"instruction: {_shown(text)}: expected words that say what to do")
        return {"image": images, "state": state, "instruction": text}


def run_host(pipe: Any, target: str, arguments: dict[str, Any]) -> None:
    """Main of a session's process or thread: builds, answers commands, ends at "stop" or when the server is gone."""
    host = None
    try:
        host = SimulatorHost(target, arguments)
        while True:
            try:
                command, values = pipe.recv()
            except (EOFError, OSError):  # the server is gone
                break
            if command == "stop":
                break
            pipe.send(("ok", getattr(host, command)(*values)))
    except ContractBroken as error:
        pipe.send(("contract", str(error)))
    except Exception:  # also an OSError: a simulator that misses a file says which
        try:
            pipe.send(("error", traceback.format_exc()))
        except OSError:
            pass  # the server is gone
    finally:
        if host is not None:
            host.close()
        pipe.close()


def _process_main(pipe: Any, target: str, arguments: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the server closes its sessions
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)  # some simulators ask questions on stdin: an end of file answers at once
    os.dup2(null, 0)
    os.close(null)
    for name in WORKER_ENVIRONMENT:
        os.environ.setdefault(name, "1")
    run_host(pipe, target, arguments)


class Worker:
    """The process or thread of one session; any failure ends it."""

    def __init__(self, target: str, arguments: dict[str, Any], threads: bool) -> None:
        self.target = target
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: Any = None
        if threads:
            thread = threading.Thread(
                target=run_host, args=(theirs, target, arguments), name="env-session", daemon=True
            )
            self._join: Callable[[float], Any] = thread.join
            thread.start()
        else:
            self.process = context.Process(target=_process_main, args=(theirs, target, arguments), daemon=True)
            self._join = self.process.join
            self.process.start()
            theirs.close()  # the end of file tells that the process is gone

    def call(self, command: str, *values: Any, timeout_s: float) -> Any:
        """
        Raises:
            ServerError: ``simulator_contract``, ``simulator_error`` with its traceback, or ``session_lost``.
        """
        try:
            try:
                self.pipe.send((command, values))
            except OSError:
                pass  # it ended before it was asked: why it did may be waiting in the pipe, else an end of file
            if not self.pipe.poll(timeout_s):
                self.close(kill=True)
                raise lost(f"the simulator gave no answer within {timeout_s:.0f} s")
            status, answer = self.pipe.recv()
        except (EOFError, OSError):
            self.close(kill=True)
            raise lost("the simulator's process ended") from None
        if status != "ok":
            self.close()
            if status == "contract":
                raise ServerError(500, "simulator_contract", f"simulator {self.target} broke its contract: {answer}")
            raise ServerError(500, "simulator_error", "the simulator raised\n" + answer)
        return answer

    def close(self, kill: bool = False) -> None:
        """Ends it; a simulator in a thread that hangs can only be left behind."""
        try:
            self.pipe.send(("stop", ()))
        except OSError:
            pass  # closed, or gone already
        if not kill:
            self._join(CLOSE_TIMEOUT_S)
        if self.process is not None:
            if self.process.is_alive():
                self.process.kill()
            self.process.join()
        self.pipe.close()


# ---- sessions ----


class Session:
    """One client's simulator. Use under ``lock``."""

    def __init__(self, worker: Worker, lease_s: float) -> None:
        self.worker, self.lease_s = worker, lease_s
        self.lock = threading.Lock()
        self.last_call = time.monotonic()
        self.closed: str | None = None  # why
        self.running = False  # an episode
        self.seq, self.digest = 0, ""
        self.answer: tuple[dict[str, Any], dict[str, np.ndarray]] | None = None


class Sessions:
    """All sessions of a server.

    Args:
        factories: name -> ``pkg.module:factory``.
        threads: simulators live in threads of this process.
        max_sessions: at one time; one more is refused with 503.
        lease_s: of a session that asks for none.
        open_timeout_s: for building a simulator and its first reset.
        call_timeout_s: for every later call.
    """

    def __init__(
        self,
        factories: dict[str, str],
        threads: bool = False,
        max_sessions: int = 16,
        lease_s: float = 600.0,
        open_timeout_s: float = 600.0,
        call_timeout_s: float = 120.0,
    ) -> None:
        self.factories, self.threads, self.max_sessions, self.lease_s = factories, threads, max_sessions, lease_s
        self.open_timeout_s, self.call_timeout_s = open_timeout_s, call_timeout_s
        self._sessions: dict[str, Session] = {}
        self._opening = 0
        self._table = threading.Lock()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, meta: dict[str, Any]) -> dict[str, Any]:
        environment = meta.get("environment") or {}
        if not isinstance(environment, dict) or not all(isinstance(key, str) for key in environment):
            raise invalid(f"environment={environment!r}: a map {{name, ...arguments}}")
        arguments = dict(environment)
        name = arguments.pop("name", None)
        if name is None and len(self.factories) == 1:
            (name,) = self.factories
        if name not in self.factories:
            raise invalid("environment.name={!r}: choose one of {}".format(name, ", ".join(sorted(self.factories))))
        lease_s = _number(meta, "lease_s", self.lease_s)
        if not 0 < lease_s <= MAX_LEASE_S:
            raise invalid(f"lease_s={lease_s}: more than 0 and at most {MAX_LEASE_S:.0f}")
        with self._table:
            if len(self._sessions) + self._opening >= self.max_sessions:
                message = f"all {self.max_sessions} sessions are in use; close one or try again later"
                raise ServerError(503, "not_ready", message, retryable=True)
            self._opening += 1
        worker = None
        try:
            worker = Worker(self.factories[name], arguments, self.threads)
            described = worker.call("describe", _seed(meta, 0), timeout_s=self.open_timeout_s)
        except ServerError as error:
            if error.kind in (
                "simulator_error",
                "simulator_contract",
            ):  # most likely the arguments: nothing to be retried
                raise invalid(f"environment {name!r} cannot be built\n{error.message}") from None
            raise
        finally:
            with self._table:
                self._opening -= 1
        session_id = "s" + secrets.token_hex(16)
        with self._table:
            self._sessions[session_id] = Session(worker, lease_s)
        return dict(described, session_id=session_id, lease_s=lease_s)

    def reset(self, session_id: str, meta: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        seed = _seed(meta, None)
        session = self._get(session_id)
        with session.lock:
            answer = self._ask(session_id, session, "reset", seed)
            session.running = True
            return _observation(answer)

    def steps(
        self, session_id: str, meta: dict[str, Any], actions: np.ndarray, single: bool
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        seq = meta.get("request_seq")
        if type(seq) is not int or seq < 1:
            raise invalid(f"request_seq={seq!r}: a number from 1 on, one more for every step")
        digest = hashlib.sha256(actions.tobytes() + repr((actions.shape, single)).encode()).hexdigest()
        session = self._get(session_id)
        with session.lock:
            if seq == session.seq and session.answer is not None:
                if digest != session.digest:
                    raise ServerError(409, "conflict", f"request_seq={seq} came before with other actions")
                session.last_call = time.monotonic()
                return session.answer
            if seq != session.seq + 1:
                raise ServerError(409, "conflict", f"request_seq={seq} after {session.seq}")
            if not session.running:
                raise ServerError(409, "conflict", "the episode is over or not begun: reset first")
            answer = self._ask(session_id, session, "steps", actions)
            session.running = not (answer["terminated"] or answer["truncated"])
            meta, arrays = _observation(answer)
            meta.update({key: answer[key] for key in ("terminated", "truncated", "success")})
            if single:
                meta["reward"] = float(answer["rewards"][0])
            else:
                meta["steps"] = len(answer["rewards"])
                arrays["rewards"] = answer["rewards"]
            session.seq, session.digest, session.answer = seq, digest, (meta, arrays)
            return session.answer

    def close(self, session_id: str) -> None:
        """Closing what is gone is no error: a client that lost the answer asks again."""
        with self._table:
            session = self._sessions.pop(session_id, None)
        if session is not None:
            with session.lock:
                self._end(session, "it was closed")

    def expire(self, now: float) -> list[str]:
        """Closes the sessions whose lease is over at ``now`` (monotonic seconds); one that is being used is not."""
        expired = []
        with self._table:
            candidates = list(self._sessions.items())
        for session_id, session in candidates:
            if session.lock.acquire(blocking=False):
                try:
                    if now - session.last_call > session.lease_s:
                        with self._table:
                            self._sessions.pop(session_id, None)
                        self._end(session, f"no call came within its lease of {session.lease_s:g} s")
                        expired.append(session_id)
                finally:
                    session.lock.release()
        return expired

    def close_all(self) -> None:
        for session_id in list(self._sessions):
            self.close(session_id)

    def _get(self, session_id: str) -> Session:
        with self._table:
            session = self._sessions.get(session_id)
        if session is None:
            raise lost(f"session {session_id[:40]}: unknown or closed")
        return session

    def _ask(self, session_id: str, session: Session, command: str, value: Any) -> dict[str, Any]:
        if session.closed is not None:  # while this call waited for the lock
            raise lost(f"session {session_id}: {session.closed}")
        try:
            return session.worker.call(command, value, timeout_s=self.call_timeout_s)
        except ServerError as error:
            session.closed = error.message
            with self._table:
                self._sessions.pop(session_id, None)
            raise
        finally:
            session.last_call = time.monotonic()

    def _end(self, session: Session, reason: str) -> None:
        if session.closed is None:
            session.closed = reason
            session.worker.close()


def _observation(answer: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    seen = answer["observation"]
    arrays = {"state": seen["state"]}
    arrays.update({"image/" + camera: image for camera, image in seen["image"].items()})
    return {"instruction": seen["instruction"]}, arrays


def _number(meta: dict[str, Any], key: str, default: float) -> float:
    value = meta.get(key, default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(f"{key}={value!r}: a number")
    return float(value)


def _seed(meta: dict[str, Any], default: int | None) -> int:
    seed = meta.get("seed", default)
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise invalid(f"seed={seed!r}: an integer from 0 on")
    return seed


# ---- bodies ----


def read_body(data: bytes, content_type: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(meta, arrays) of a request; arrays are numpy arrays (msgpack) or lists (JSON, beside the meta)."""
    kind = content_type.split(";")[0].strip().lower()
    if not data:
        return {}, {}
    try:
        if kind == "application/json":
            meta = json.loads(data)
            if not isinstance(meta, dict):
                raise ValueError("not a map")
            return meta, meta
        if kind in ("application/msgpack", "application/x-msgpack"):
            body = msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
            if not isinstance(body, dict) or not isinstance(body.get("meta", {}), dict):
                raise ValueError("not a map with a map meta")
            arrays = body.get("arrays", {})
            if not isinstance(arrays, dict) or len(arrays) > 4:
                raise ValueError("arrays must be a map of at most 4")
            return body.get("meta", {}), {name: _read_array(name, value) for name, value in arrays.items()}
    except ServerError:
        raise
    except RecursionError:
        raise invalid("the body is nested too deep") from None
    except Exception as error:  # each parser has its own errors, some of them straight from Exception
        raise invalid(f"the body is no valid {kind}: {error}") from None
    raise ServerError(415, "unsupported_media_type", "send application/msgpack or application/json")


def _read_array(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data"}:
        raise invalid(f"array {name!r}: a map of dtype, shape and data")
    dtype, shape, data = value["dtype"], value["shape"], value["data"]
    if dtype not in ("float32", "float64"):
        raise invalid(f"array {name!r}: dtype={dtype!r}: actions are float32")
    sizes_fit = isinstance(shape, list) and len(shape) <= 2 and all(type(n) is int and 0 <= n < 1 << 31 for n in shape)
    if not sizes_fit or not isinstance(data, bytes):
        raise invalid(f"array {name!r}: shape={shape!r}: one or two sizes, data as bytes")
    count = shape[0] * (shape[1] if len(shape) > 1 else 1) if shape else 1
    if count * np.dtype(dtype).itemsize != len(data):
        raise invalid(f"array {name!r}: shape={shape} does not fit {len(data)} bytes of data")
    return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(shape)


def read_actions(arrays: dict[str, Any], key: str, ndim: int) -> np.ndarray:
    if key not in arrays:
        raise invalid(f"array {key!r} is missing")
    try:
        actions = np.array(arrays[key], dtype=np.float32)
    except (TypeError, ValueError):
        raise invalid(f"{key}: numbers in {ndim} dims") from None
    if actions.ndim != ndim or actions.size == 0:
        raise invalid(f"{key}: shape {actions.shape}; {ndim} dims are needed, none of them 0")
    if ndim == 2 and len(actions) > MAX_STEPS_PER_CALL:
        raise ServerError(413, "too_large", f"{len(actions)} actions in one call; the limit is {MAX_STEPS_PER_CALL}")
    if not np.isfinite(actions).all():
        raise invalid(f"{key}: not finite")
    return actions if ndim == 2 else actions[None]


def write_body(meta: dict[str, Any], arrays: dict[str, np.ndarray], as_json: bool) -> tuple[bytes, str]:
    if as_json:
        meta = dict(meta, **{name: array.tolist() for name, array in arrays.items()})
        return json.dumps(_finite(meta)).encode(), "application/json"
    body = {"meta": _finite(meta)}
    body["arrays"] = {name: _write_array(array) for name, array in arrays.items()}
    packed = msgpack.packb(body, use_bin_type=True)
    assert packed is not None
    return packed, "application/msgpack"


def _write_array(array: np.ndarray) -> dict[str, Any]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": little.tobytes()}


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value


# ---- HTTP ----


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "environment_server"
    sys_version = ""
    wbufsize = -1  # header and body leave in one packet
    disable_nagle_algorithm = True
    timeout = IDLE_CONNECTION_S
    server: EnvironmentServer

    def do_GET(self) -> None:
        if self.path == "/healthz":
            self._answer(200, {"status": "ok", "sessions": len(self.server.sessions)}, {}, as_json=True)
        else:
            self._error(ServerError(404, "not_found", "no such route"))

    def do_POST(self) -> None:
        content_type = self.headers.get("Content-Type", "application/json")
        as_json = content_type.startswith("application/json")
        try:
            if not self.server.authorised(self.headers.get("Authorization", "")):
                self.close_connection = True  # the body is not read
                raise ServerError(401, "unauthorized", "send 'Authorization: Bearer <token>' with the server's token")
            meta, arrays = read_body(self._read(), content_type)
            self._answer(200, *self._dispatch(meta, arrays), as_json=as_json)
        except ServerError as error:
            self._error(error)
        except Exception:
            traceback.print_exc()
            self._error(ServerError(500, "internal_error", "the server failed; its log has the reason"))

    def _dispatch(self, meta: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        sessions = self.server.sessions
        if self.path == ROOT:
            return sessions.open(meta), {}
        parts = self.path[len(ROOT) :].split("/")
        if not self.path.startswith(ROOT + "/") or len(parts) != 3:
            raise ServerError(404, "not_found", "no such route")
        _, session_id, verb = parts
        if verb == "reset":
            return sessions.reset(session_id, meta)
        if verb == "step":
            return sessions.steps(session_id, meta, read_actions(arrays, "action", 1), single=True)
        if verb == "batch_step":
            return sessions.steps(session_id, meta, read_actions(arrays, "actions", 2), single=False)
        if verb == "close":
            sessions.close(session_id)
            return {"status": "closed"}, {}
        raise ServerError(404, "not_found", "no such route")

    def _read(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is None or not length.isdigit() or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise invalid("a body needs a Content-Length")
        if int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            raise ServerError(413, "too_large", f"a body of {length} bytes; the limit is {MAX_BODY_BYTES}")
        return self.rfile.read(int(length))

    def _answer(self, status: int, meta: dict[str, Any], arrays: dict[str, np.ndarray], as_json: bool) -> None:
        data, content_type = write_body(meta, arrays, as_json)
        self._send(status, data, content_type)

    def _error(self, error: ServerError) -> None:
        self._send(error.status, json.dumps(error.to_json()).encode(), "application/json")

    def _send(self, status: int, data: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # one line per step would be a flood


class EnvironmentServer(ThreadingHTTPServer):
    """``with EnvironmentServer(...) as server: server.serve_forever()``; closes all simulators at the end.

    Args:
        sessions: what it serves.
        token: that clients must send; None: anybody may (on this machine only, see :func:`main`).
        address: to listen on; port 0 takes a free one, see ``server_address``.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, sessions: Sessions, token: str | None, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.sessions = sessions
        self._token = None if token is None else token.encode()
        # a client holds one connection a session, and opens another when that one breaks
        self._connections = threading.BoundedSemaphore(4 * sessions.max_sessions + 16)
        self._stopping = threading.Event()
        super().__init__(address, _Handler)
        self._reaper = threading.Thread(target=self._reap, name="env-leases", daemon=True)
        self._reaper.start()

    def authorised(self, header: str) -> bool:
        if self._token is None:
            return True
        sent = header[7:] if header.startswith("Bearer ") else ""
        return hmac.compare_digest(sent.encode("utf-8", "surrogateescape"), self._token)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that goes away is not worth a traceback
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        super().server_close()
        self._stopping.set()
        self._reaper.join()
        self.sessions.close_all()

    def _reap(self) -> None:
        while not self._stopping.wait(1.0):
            self.sessions.expire(time.monotonic())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--simulator", action="append", required=True, metavar="[NAME=]PKG.MODULE:FACTORY")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--token-file", help="the secret that clients send; required unless --host is this machine")
    parser.add_argument("--max-sessions", type=int, default=16)
    parser.add_argument("--lease-s", type=float, default=600.0, help="seconds without a call after which one ends")
    parser.add_argument("--threads", action="store_true", help="simulators in threads of this process (light ones)")
    options = parser.parse_args(argv)
    sys.path.insert(0, os.getcwd())  # as python -m does; a file that is run does not
    factories = {}
    for item in options.simulator:
        name, _, target = item.rpartition("=")
        factories[name or "default"] = target
    token = None
    if options.token_file:
        with open(options.token_file) as file:
            token = file.read().strip()
    if not token and (options.token_file or options.host not in ("127.0.0.1", "localhost", "::1")):
        parser.error("a server that others can reach needs --token-file with a secret in it")
    sessions = Sessions(factories, options.threads, options.max_sessions, options.lease_s)

    def stop(*_: Any) -> None:
        threading.Thread(target=server.shutdown).start()  # it waits for serve_forever, which runs in this thread

    with EnvironmentServer(sessions, token, (options.host, options.port)) as server:
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
        print("listening on http://{}:{}".format(*server.server_address[:2]), flush=True)
        server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
