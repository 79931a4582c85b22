"""Records demonstrations: a scripted expert drives the real simulator, successes become a LeRobotDataset v3.

::

    worker 0 ── episode of seed 0 ──┐
    worker 1 ── episode of seed 1 ──┼─► in seed order: successes only ─► <root>.recording-<pid> ─► rename to <root>
    worker 0 ── episode of seed 2 ──┘

The dataset holds what the simulator gives and takes: raw states, **native** actions (gripper command of the simulator,
see ``TenantSchema.gripper``), images in the schema's orientation and of the simulator's size. So a recording never
needs ``dataset.conventions``.
The result does not depend on the number of workers.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nexus_lightning.files import made_once, put_in_place
from nexus_lightning.simulator import (
    ContractError,
    InlineSimulator,
    SimulatorDied,
    SimulatorHost,
    SimulatorProcess,
    View,
    check_step,
)

if TYPE_CHECKING:
    from nexus_lightning.schema import TenantSchema

#: Provenance of a recorded dataset, beside LeRobot's own metadata.
RECORD_FILE = Path("meta", "nexus.json")
#: Schema fields that are properties of the data; chunk length, normalisation ... may change without a new recording.
DATA_FIELDS = (
    "cameras",
    "image_size",
    "image_orientation",
    "state_dim",
    "action_dim",
    "control_hz",
    "action_convention",
    "rotation",
    "gripper",
    "gripper_index",
    "privileged",
)
#: Give up when this many times the wanted episodes were tried.
ATTEMPTS_PER_EPISODE = 5


def record_demonstrations(
    simulator: Mapping[str, Any],
    expert: str,
    root: str | Path,
    episodes: int,
    first_seed: int,
    schema: TenantSchema,
    workers: int = 2,
    repo_id: str | None = None,
    progress: bool = True,
    inline: bool = False,
    start_timeout_s: float = 600.0,
    episode_timeout_s: float = 300.0,
    random_share: float = 0.0,
    keep_failures: bool = False,
    tenant: str = "",
) -> Path:
    """Records ``episodes`` episodes (successful ones, unless ``keep_failures``), or finds them already recorded.

    Features: ``observation.images.<camera>`` (PNG) for each camera of the schema, ``observation.state`` float32,
    ``action`` float32 in the native convention clipped to [-1, 1], ``next.success`` bool, the instruction as the task.
    Frame k holds the observation before action k. Without cameras nothing is rendered.

    Args:
        simulator: ``{"_target_": ..., **kwargs}`` of a :class:`~nexus_lightning.simulator.Simulator`.
        expert: dotted name of a function that takes the freshly reset simulator and returns an iterator of native
            actions; it runs in the worker.
        root: folder of the dataset. Reused when it holds a recording of the same simulator, expert, seeds and data.
        episodes: successful episodes wanted.
        first_seed: seeds ``first_seed``, ``first_seed + 1``, ... are tried in order.
        schema: what the recorded data must look like.
        workers: simulator processes.
        repo_id: name stored in the dataset, ``local/<folder>`` by default.
        progress: show a bar.
        inline: run a light simulator in this process instead of ``workers`` processes.
        start_timeout_s: time for starting a process and its first episode.
        episode_timeout_s: time for each later episode.
        random_share: mixed quality: an action is ``(1 - w) * expert + w * random``, where ``random`` is uniform in
            [-1, 1] and each episode draws its ``w`` from 0 to ``random_share``.
        keep_failures: keep episodes that did not succeed, too.
        tenant: name for messages, that of the folder by default.

    Returns:
        ``root``.

    Raises:
        ValueError: ``root`` holds something else (names what differs), or simulator and schema disagree.
        ContractError: the simulator gave a step or an observation that it must not.
        RuntimeError: the expert fails too often.
        ImportError: LeRobot is not installed.
    """
    root = Path(root)
    record = describe_recording(simulator, expert, episodes, first_seed, schema, random_share, keep_failures)
    how = (expert, random_share, keep_failures)
    if root.exists():
        check_recording(root, record)
        return root
    _require_lerobot()
    with made_once(root, "recording"):
        if root.exists():  # by now
            check_recording(root, record)
            return root
        for left in root.parent.iterdir():  # by a recording that was killed
            if left.name.startswith(f"{root.name}.recording-"):
                shutil.rmtree(left)
        tenant = tenant or root.name
        count = 0 if inline else min(workers, episodes)
        processes = [SimulatorProcess(record["simulator"], tenant, i, host=RecorderHost) for i in range(count)]
        temporary = root.with_name(f"{root.name}.recording-{os.getpid()}")
        try:
            if inline:
                source = _inline_episodes(record["simulator"], tenant, how, episodes, first_seed, schema)
            else:
                source = _episodes(processes, how, episodes, first_seed, schema, start_timeout_s, episode_timeout_s)
            kept, tried = _write(source, temporary, repo_id or f"local/{root.name}", episodes, schema, progress)
            made = record | {"seeds": kept, "tried": tried, "schema_signature": schema.signature}
            (temporary / RECORD_FILE).write_text(json.dumps(made, indent=2) + "\n")
            if not put_in_place(temporary, root):  # on a file system whose locks do not reach the other machine
                check_recording(root, record)
        finally:
            for process in processes:
                process.close()
            shutil.rmtree(temporary, ignore_errors=True)
    return root


def describe_recording(
    simulator: Mapping[str, Any],
    expert: str,
    episodes: int,
    first_seed: int,
    schema: TenantSchema,
    random_share: float = 0.0,
    keep_failures: bool = False,
) -> dict[str, Any]:
    """What makes two recordings the same, as JSON values (the last two only where they are set)."""
    from omegaconf import OmegaConf

    fields = asdict(schema)
    record = {
        "simulator": OmegaConf.to_container(OmegaConf.create(dict(simulator)), resolve=True),
        "expert": expert,
        "episodes": episodes,
        "first_seed": first_seed,
        "schema": {name: fields[name] for name in DATA_FIELDS},
        **({"random_share": random_share} if random_share else {}),
        **({"keep_failures": True} if keep_failures else {}),
    }
    return json.loads(json.dumps(record))


def check_recording(root: Path, record: dict[str, Any]) -> None:
    """Raises ValueError unless ``root`` was recorded as ``record`` says, naming every key that differs."""
    path = root / RECORD_FILE
    if not path.is_file():
        raise ValueError(f"{root} exists but holds no recording ({RECORD_FILE} is missing): choose another root")
    there = json.loads(path.read_text())
    keys = [*record, *({"random_share", "keep_failures"} - set(record))]
    differing = [
        f"{key}: recorded {old!r}, asked for {new!r}"
        for key, old, new in _differences({k: there.get(k) for k in keys}, {k: record.get(k) for k in keys})
    ]
    if differing:
        raise ValueError(
            f"{root} was recorded with another configuration; delete it or choose another root. " + "; ".join(differing)
        )


def _differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield key, old, new


class RecorderHost(SimulatorHost):
    """Runs whole episodes of an expert in the worker process."""

    def episode(
        self, expert: str, seed: int, random_share: float = 0.0, keep_failures: bool = False
    ) -> dict[str, Any] | None:
        """One episode, or None when it did not succeed (and failures are not kept).

        A simulator that can put states back is stepped without rendering first, and only a success is rendered
        afterwards, from the recorded states.

        Returns:
            ``images`` ``{camera: uint8 [L, H, W, 3]}``, ``state`` float32 ``[L, S]``, ``action`` float32 ``[L, A]``,
            ``success`` bool ``[L]``, ``instruction``, ``gripper``.
        """
        from hydra.utils import get_method

        sim = self.sim
        sim.reset(seed)
        replay = sim.get_state() is not None
        before, actions, success, ended = [], [], [], False
        generator = np.random.default_rng((seed, 1))
        share = random_share * generator.random()
        for action in get_method(expert)(sim):
            # copies: a simulator may hand out views of its buffers
            before.append(np.array(sim.get_state()) if replay else _copied(sim.observe()))
            action = np.asarray(action, dtype=np.float32)
            if not np.isfinite(action).all():
                raise ValueError(
                    f"expert {expert}: action {len(actions)} of seed {seed} is not finite: {action.tolist()}"
                )
            if random_share:
                action = (1 - share) * action + share * generator.uniform(-1, 1, action.shape).astype(np.float32)
            actions.append(np.clip(action, -1.0, 1.0))
            result = sim.step(actions[-1])
            check_step(result)
            success.append(bool(result.success))
            ended = result.success or result.terminated or result.truncated
            if ended:
                break
        if not success or not (success[-1] or keep_failures):
            return None
        if replay:
            before = [self._observe_at(state) for state in before]
        view = View.of(before[0])
        if problems := [f"step {k}: {p}" for k, seen in enumerate(before) for p in view.problems(seen)]:
            raise ContractError(f"{problems[0]} (in the episode of seed {seed})")
        cameras = before[0]["image"]
        return {
            "images": {c: np.stack([np.moveaxis(o["image"][c], 0, -1) for o in before]) for c in cameras},
            "state": np.stack([o["state"] for o in before]),
            "action": np.stack(actions),
            "success": np.array(success),
            "instruction": before[0]["instruction"],
            "gripper": sim.gripper,
        }

    def _observe_at(self, state: np.ndarray) -> dict[str, Any]:
        self.sim.set_state(state)
        return _copied(self.sim.observe())


def _copied(observation: Any) -> dict[str, Any]:
    if not isinstance(observation, Mapping):
        raise ContractError("; ".join(View(0).problems(observation)))
    images = {camera: np.array(image) for camera, image in observation.get("image", {}).items()}
    return {"image": images, "state": np.array(observation.get("state")), "instruction": observation.get("instruction")}


def _episodes(
    processes: list[SimulatorProcess],
    how: tuple[str, float, bool],
    episodes: int,
    first_seed: int,
    schema: TenantSchema,
    start_timeout_s: float,
    episode_timeout_s: float,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """``(seed, episode or None)`` in seed order, until the consumer stops asking; all processes stay busy."""
    last_seed = _last_seed(first_seed, episodes)
    seed, next_out = first_seed, first_seed
    running: dict[SimulatorProcess, int] = {}
    finished: dict[int, dict[str, Any] | None] = {}
    timeouts = dict.fromkeys(processes, start_timeout_s)
    while True:
        for process in processes:
            # no further ahead than a few seeds: finished episodes wait in memory
            if process not in running and seed < min(last_seed, next_out + 4 * len(processes)):
                expert, random_share, keep_failures = how
                process.send("episode", expert, seed, random_share, keep_failures)
                running[process] = seed
                seed += 1
        if next_out == last_seed:
            raise RuntimeError(_gave_up(how[0], first_seed, episodes))
        timeout_s = max(timeouts[p] for p in running)
        # `wait` takes anything with a fileno(); its stub names connections and sockets only
        ready = cast(
            list[SimulatorProcess],
            wait(list(running), timeout_s),  # pyright: ignore[reportArgumentType]
        )
        if not ready:
            process = next(iter(running))
            raise SimulatorDied(process.tenant, process.index, None, f"no episode within {timeout_s:.0f} s")
        for process in ready:
            answer = process.receive(timeouts[process])
            finished[running.pop(process)] = answer
            timeouts[process] = episode_timeout_s
            if answer is not None:
                _check_episode(answer, schema)
        while next_out in finished:
            yield next_out, finished.pop(next_out)
            next_out += 1


def _inline_episodes(
    simulator: dict[str, Any],
    tenant: str,
    how: tuple[str, float, bool],
    episodes: int,
    first_seed: int,
    schema: TenantSchema,
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    worker = InlineSimulator(simulator, tenant, 0, RecorderHost)
    try:
        for seed in range(first_seed, _last_seed(first_seed, episodes)):
            worker.send("episode", how[0], seed, *how[1:])
            answer = worker.receive(timeout_s=0.0)
            if answer is not None:
                _check_episode(answer, schema)
            yield seed, answer
        raise RuntimeError(_gave_up(how[0], first_seed, episodes))
    finally:
        worker.close()


def _last_seed(first_seed: int, episodes: int) -> int:
    return first_seed + ATTEMPTS_PER_EPISODE * episodes + 10


def _gave_up(expert: str, first_seed: int, episodes: int) -> str:
    return f"expert {expert} did not succeed often enough: tried {_last_seed(first_seed, episodes) - first_seed} seeds"


def _check_episode(episode: dict[str, Any], schema: TenantSchema) -> None:
    found = {
        "state_dim": episode["state"].shape[1],
        "action_dim": episode["action"].shape[1],
        "gripper": episode["gripper"],
    }
    problems = [
        f"{key}={getattr(schema, key)!r}: the simulator and expert give {value!r}"
        for key, value in found.items()
        if getattr(schema, key) != value and (key, schema.state_dim) != ("state_dim", 0)
    ]
    missing = [camera for camera in schema.cameras if camera not in episode["images"]]
    problems += [f"cameras: no {camera!r}; the simulator has {sorted(episode['images'])}" for camera in missing]
    if problems:
        raise ValueError("schema and simulator disagree: " + "; ".join(problems))


def _write(
    source: Iterator[tuple[int, dict[str, Any] | None]],
    root: Path,
    repo_id: str,
    episodes: int,
    schema: TenantSchema,
    progress: bool,
) -> tuple[list[int], int]:
    """Writes the first ``episodes`` kept episodes of ``source``; returns their seeds and how many were tried."""
    import datasets
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from tqdm import tqdm

    datasets.disable_progress_bars()  # one bar per episode written, on top of ours
    dataset: Any = None
    kept: list[int] = []
    tried = 0
    with tqdm(total=episodes, desc="recording demonstrations", unit="episode", disable=not progress) as bar:
        for seed, episode in source:
            tried += 1
            if episode is None:
                continue
            if dataset is None:
                features = _features(episode, schema)
                # LeRobot says int; rounded, the recording would not be one of this control rate
                fps: Any = int(schema.control_hz) if schema.control_hz.is_integer() else schema.control_hz
                dataset = LeRobotDataset.create(repo_id, fps=fps, features=features, root=root, use_videos=False)
            for k in range(len(episode["action"])):
                images = {f"observation.images.{c}": episode["images"][c][k] for c in schema.cameras}
                dataset.add_frame(
                    {
                        **images,
                        **({"observation.state": episode["state"][k]} if schema.state_dim else {}),
                        "action": episode["action"][k],
                        "next.success": episode["success"][k : k + 1],
                        "task": episode["instruction"],
                    }
                )
            dataset.save_episode()
            kept.append(seed)
            bar.update()
            bar.set_postfix(tried=tried)
            if len(kept) == episodes:
                break
    dataset.finalize()  # writes the parquet footers; without it the dataset cannot be read
    return kept, tried


def _features(episode: dict[str, Any], schema: TenantSchema) -> dict[str, Any]:
    """LeRobot's features of a recording: what one episode holds."""

    def vector(dim: int, names: tuple[str, ...]) -> dict[str, Any]:
        return {"dtype": "float32", "shape": (dim,), "names": list(names) or None}

    images = {
        f"observation.images.{camera}": {
            "dtype": "image",
            "shape": episode["images"][camera].shape[1:],
            "names": ["height", "width", "channels"],
        }
        for camera in schema.cameras
    }
    return {
        **images,
        **({"observation.state": vector(schema.state_dim, schema.state_names)} if schema.state_dim else {}),
        "action": vector(schema.action_dim, schema.action_names),
        "next.success": {"dtype": "bool", "shape": (1,), "names": None},
    }


def _require_lerobot() -> None:
    from importlib.util import find_spec

    if find_spec("lerobot") is None:
        raise ImportError("recording needs LeRobot: pip install 'lerobot[dataset]'")
