"""A scripted expert for PushT: plans pushes on the T with a contact model, two pushes ahead.

::

    observe poses ─► every push (contact point x tilt) in the model ─► best one, two pushes ahead ─► walk around the T
          ▲                                                                                              │
          └───────────────── pusher at rest ◄── push, stop where the model's error is least ◄────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from envs.gymnasium import GymnasiumSimulator

#: The T in its own frame, in pixels: (center, half size) of bar and stem; origin in the middle of the bar's top.
RECTANGLES = (
    (np.array([0.0, 15.0]), np.array([60.0, 15.0])),
    (np.array([0.0, 75.0]), np.array([15.0, 45.0])),
)
CORNERS = np.array([[x, y] for x in (-60.0, 60.0) for y in (0.0, 30.0)] + [[x, 120.0] for x in (-15.0, 15.0)])
RADIUS = 15.0  # of the pusher
GAP = 4.0  # between pusher and T before a push
CIRCLE = 104.0  # around the T's middle: the pusher walks there without touching it
WALK, PUSH = 30.0, 12.0  # how far the target moves per control step
STRIDE = 2.0  # of the model, in pixels of pusher travel
REACH = 140.0  # longest push
SETTLED = 0.8  # the pusher is where it was sent, in pixels
#: Error (mean corner distance, pixels) that one more push must save.
PRICE = 1.0


@dataclass
class Poses:
    """N poses of the T: its center of gravity ``at`` ``[N, 2]`` and ``angle`` ``[N]``."""

    at: np.ndarray
    angle: np.ndarray

    def __getitem__(self, rows) -> Poses:
        return Poses(self.at[rows], self.angle[rows])

    def local(self, points: np.ndarray) -> np.ndarray:
        """World ``[N, 2]`` -> relative to the center of gravity, in the T's axes."""
        return rotate(points - self.at, -self.angle)

    def world(self, points: np.ndarray) -> np.ndarray:
        return self.at + rotate(points, self.angle)


def rotate(vectors: np.ndarray, angle: np.ndarray) -> np.ndarray:
    cos, sin = np.cos(angle), np.sin(angle)
    x, y = vectors[..., 0], vectors[..., 1]
    return np.stack([cos * x - sin * y, sin * x + cos * y], -1)


def distance(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Signed distance to the T and outward normal at points ``[N, 2]`` of its own frame."""
    best = np.full(len(points), np.inf)
    normal = np.zeros_like(points)
    for center, half in RECTANGLES:
        offset = points - center
        sign, over = np.where(offset < 0, -1.0, 1.0), np.abs(offset) - half
        outside = np.maximum(over, 0)
        length = np.hypot(outside[:, 0], outside[:, 1])
        along_x = over[:, 0] > over[:, 1]
        inside = np.where(along_x, over[:, 0], over[:, 1])
        d = np.where(length > 0, length, inside)
        face = np.stack([along_x, ~along_x], -1).astype(float)
        n = sign * np.where(length[:, None] > 0, outside / np.maximum(length, 1e-9)[:, None], face)
        closer = d < best
        best, normal = np.where(closer, d, best), np.where(closer[:, None], n, normal)
    return best, normal


def contacts(spacing: float) -> tuple[np.ndarray, np.ndarray]:
    """Points on the T's outline that the pusher can touch, ``[C, 2]`` in its frame, and the outward normals there."""
    points, normals = [], []
    for a, b, normal in (
        ((-58, 0), (58, 0), (0, -1)),
        ((-60, 2), (-60, 28), (-1, 0)),
        ((60, 2), (60, 28), (1, 0)),
        ((-58, 30), (-34, 30), (0, 1)),  # beside the stem there is no room for the pusher
        ((34, 30), (58, 30), (0, 1)),
        ((-15, 50), (-15, 118), (-1, 0)),
        ((15, 50), (15, 118), (1, 0)),
        ((-13, 120), (13, 120), (0, 1)),
    ):
        count = max(2, round(np.hypot(*np.subtract(b, a)) / spacing) + 1)
        points += list(np.linspace(a, b, count))
        normals += [normal] * count
    return np.array(points, float), np.array(normals, float)


class PushModel:
    """What a push does to the T: no friction, no inertia, so the T moves just as far as it must to make room.

    Args:
        center: center of gravity in the T's frame.
        spin: rotational inertia over mass, pixels squared.
        goal: goal pose.
    """

    def __init__(self, center: np.ndarray, spin: float, goal: tuple[np.ndarray, float]) -> None:
        self.center, self.spin = center, spin
        angle = np.array([goal[1]])
        origin = Poses(np.asarray(goal[0], float)[None], angle)
        self.goal = origin.world(CORNERS)

    def error(self, poses: Poses) -> np.ndarray:
        """Mean distance of the corners to where they belong, ``[N]``."""
        corners = poses.at[:, None] + rotate(CORNERS - self.center, poses.angle[:, None])
        return np.linalg.norm(corners - self.goal, axis=-1).mean(-1)

    def pushes(self, poses: Poses, spacing: float, tilts: tuple[float, ...]) -> tuple[Poses, np.ndarray, np.ndarray]:
        """Every push on every pose: poses repeated to ``[N * P]``, pusher start and direction ``[N * P, 2]``."""
        points, normals = contacts(spacing)
        points = np.repeat(points + normals * (RADIUS + GAP), len(tilts), 0) - self.center
        ways = np.concatenate([rotate(-normal, np.array(tilts)) for normal in normals[:, None]])
        n, p = len(poses.angle), len(points)
        many = poses[np.repeat(np.arange(n), p)]
        return many, many.world(np.tile(points, (n, 1))), rotate(np.tile(ways, (n, 1)), many.angle)

    def push(self, poses: Poses, start: np.ndarray, way: np.ndarray) -> tuple[Poses, np.ndarray]:
        """The T along each push: poses ``[K, N]`` and error ``[K, N]`` after k strides (walls are not modelled)."""
        now, pusher = poses, start
        path, errors = [], []
        for _ in range(round(REACH / STRIDE)):
            pusher = pusher + way * STRIDE
            away, normal = distance(now.local(pusher) + self.center)
            depth = np.maximum(RADIUS - away, 0)
            normal = rotate(normal, now.angle)
            touch = pusher - normal * away[:, None] - now.at
            arm = touch[:, 0] * normal[:, 1] - touch[:, 1] * normal[:, 0]
            impulse = depth / (1 + arm**2 / self.spin)
            now = Poses(now.at - normal * impulse[:, None], now.angle - arm * impulse / self.spin)
            path.append(now)
            errors.append(self.error(now))
        return Poses(np.stack([p.at for p in path]), np.stack([p.angle for p in path])), np.stack(errors)


def clearance(poses: Poses, points: np.ndarray, center: np.ndarray) -> float:
    """Least distance between the pusher's edge and the T over the points ``[M, 2]``."""
    return float(distance(poses[np.zeros(len(points), int)].local(points) + center)[0].min()) - RADIUS


def line(a: np.ndarray, b: np.ndarray, step: float) -> np.ndarray:
    """Points after ``a`` up to and with ``b``, at most ``step`` apart."""
    count = max(1, int(np.ceil(np.linalg.norm(b - a) / step)))
    return a + (b - a) * (np.arange(1, count + 1) / count)[:, None]


def walk(pose: Poses, pusher: np.ndarray, target: np.ndarray, out: np.ndarray, model: PushModel) -> np.ndarray | None:
    """A way for the pusher to ``target`` around the T, ``[M, 2]``; None when there is none inside the workspace.

    Args:
        pose: of the T (one).
        pusher: where it is.
        target: where it shall be, beside the T.
        out: direction that leads from the target away from the T.
        model: for the T's frame.
    """
    straight = line(pusher, target, WALK)
    if clearance(pose, line(pusher, target, 3.0), model.center) > 1.0:
        return straight
    middle = pose.at[0]
    enter = to_circle(middle, target, out)
    best = None
    for turn in range(16):  # the way out of where it stands that makes the shortest walk
        exit_way = rotate(np.array([1.0, 0.0]), np.array(turn * np.pi / 8))
        leave = to_circle(middle, pusher, exit_way)
        first, last = (np.arctan2(*(p - middle)[::-1]) for p in (leave, enter))
        for delta in ((last - first) % (2 * np.pi), -((first - last) % (2 * np.pi))):
            count = max(1, int(np.ceil(abs(delta) * CIRCLE / WALK)))
            angles = first + delta * np.arange(1, count + 1) / count
            arc = middle + CIRCLE * np.stack([np.cos(angles), np.sin(angles)], -1)
            way = np.clip(np.concatenate([line(pusher, leave, WALK), arc, line(enter, target, WALK)]), 8, 504)
            if best is not None and len(way) >= len(best):
                continue
            fine = [line(a, b, 3.0) for a, b in zip([pusher, *way[:-1]], way, strict=True)]
            # It may stand against the T when it leaves, so the first pixels are free.
            if clearance(pose, np.concatenate(fine)[4:], model.center) > 1.0:
                best = way
    return best


def to_circle(middle: np.ndarray, point: np.ndarray, way: np.ndarray) -> np.ndarray:
    """Where the ray from ``point`` along ``way`` meets the circle, or the nearest point of it from outside."""
    offset = point - middle
    along = float(offset @ way)
    room = along**2 - float(offset @ offset) + CIRCLE**2
    if float(offset @ offset) >= CIRCLE**2 or room < 0:
        return middle + offset / np.linalg.norm(offset) * CIRCLE
    return point + way * (-along + np.sqrt(room))


def plan(model: PushModel, pose: Poses, pusher: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The next push: (walk ``[M, 2]``, push targets ``[L, 2]``); None when nothing gets better.

    A push that turns the T also moves it, so the best first push is often bad by itself: it is rated by what a second
    one makes of it.
    """
    many, start, way = model.pushes(pose, 9.0, (-0.4, 0.0, 0.4))
    path, errors = model.push(many, start, way)
    alone = errors.min(0)
    rating, stop = alone.copy(), errors.argmin(0)
    now = float(model.error(pose)[0])
    if alone.min() > 2.5:
        stops = np.array([int(s / STRIDE) for s in (12, 20, 32, 48, 70, 100)])
        rows = np.arange(0, len(way), 2)
        after = Poses(path.at[stops][:, rows].reshape(-1, 2), path.angle[stops][:, rows].reshape(-1))
        second = model.push(*model.pushes(after, 20.0, (0.0,)))[1].min(0)
        second = second.reshape(len(stops), len(rows), -1).min(-1) + PRICE
        better = second.min(0) < rating[rows]
        rating[rows[better]] = second.min(0)[better]
        stop[rows[better]] = stops[second.argmin(0)[better]]
    for row in np.argsort(rating):
        if rating[row] > now - PRICE / 10:
            return None
        approach = walk(pose, pusher, start[row], -way[row], model)
        end = start[row] + way[row] * STRIDE * (stop[row] + 1)
        if approach is not None and (end > 10).all() and (end < 502).all():
            return approach, line(start[row], end, PUSH)
    return None


def make_pusht_expert(simulator: GymnasiumSimulator) -> Iterator[np.ndarray]:
    """Actions (float32 ``[2]`` in [-1, 1]) until no push helps any more. Reads the poses out of the simulation."""
    env = simulator.env.unwrapped
    block = env.block
    center = np.array(block.center_of_gravity)
    model = PushModel(center, block.moment / block.mass, (env.goal_pose[:2], float(env.goal_pose[2])))
    while True:
        angle = np.array([block.angle])
        pose = Poses(np.array(block.position)[None] + rotate(center[None], angle), angle)
        plan_ = plan(model, pose, np.array(env.agent.position))
        if plan_ is None:
            return
        for targets in plan_:
            for target in targets:
                yield simulator.to_unit(target)
            while np.linalg.norm(np.array(env.agent.position) - targets[-1]) > SETTLED:
                yield simulator.to_unit(targets[-1])
