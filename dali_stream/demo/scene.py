"""A tabletop with three blocks and a two-fingered gripper, and a scripted expert that pushes a block to a goal.

Lengths are metres, angles radians, times seconds. The table lies in the plane z = 0, x to the right, y away from the
robot's base. The physics is quasi-static: a block moves only while a finger (or another block) presses on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

COLOURS = ("red", "green", "blue")
SIDES = ("left", "right")
STATE_NAMES = ("x", "y", "z", "yaw", "vx", "vy", "vz", "yaw_rate")
ACTION_NAMES = ("vx", "vy", "vz", "yaw_rate")

TABLE_HALF = (0.34, 0.25)
BLOCK_HALF = 0.022
FINGER_RADIUS = 0.007
FINGER_SPREAD = 0.017  # from the gripper's middle to each finger
GOAL_RADIUS = 0.045
TRAVEL_HEIGHT = 0.085
SUCCESS_DISTANCE = 0.015
MAX_SECONDS = 7.0

_LAG = 0.08  # time constant of the velocity controller
_PUSH_HEIGHT = 0.006
_SUBSTEPS = 10
# Ratio of the largest friction torque to the largest friction force of a square with even pressure: the mean distance
# of its points from the middle, 0.3826 times the side.
_TORQUE_ARM = 0.3826 * 2 * BLOCK_HALF


@dataclass
class Table:
    """All that moves: gripper (4,) x, y, z, yaw; velocity (4,); blocks (3, 2) x, y; yaws (3,)."""

    gripper: np.ndarray
    velocity: np.ndarray
    blocks: np.ndarray
    yaws: np.ndarray


@dataclass(frozen=True)
class Episode:
    """A recorded episode of T frames. Row t holds what the frames of frame t show, and the action taken then."""

    task: str
    goals: np.ndarray
    """float64 (2, 2): middle of the left and of the right goal."""
    state: np.ndarray
    """float32 (T, 8): gripper position and velocity, see `STATE_NAMES`."""
    action: np.ndarray
    """float32 (T, 4): velocity command, see `ACTION_NAMES`."""
    block_positions: np.ndarray
    """float32 (T, 3, 2): middle of the red, green and blue block."""
    block_yaws: np.ndarray
    """float32 (T, 3)."""
    reward: np.ndarray
    """float32 (T,): 1 where the action leaves the block in its goal, else 0."""
    done: np.ndarray
    """bool (T,): True in the last frame."""

    def __len__(self) -> int:
        return len(self.state)


def finger_positions(gripper: np.ndarray) -> np.ndarray:
    """Middles of the two fingers (2, 2) in the table's plane, on a line across the gripper's heading."""
    across = np.array([-np.sin(gripper[3]), np.cos(gripper[3])]) * FINGER_SPREAD
    return np.stack([gripper[:2] + across, gripper[:2] - across])


def move_gripper(position: np.ndarray, velocity: np.ndarray, command: np.ndarray, dt: float) -> tuple[np.ndarray, np.ndarray]:
    """Position and velocity after `dt` under a constant velocity command: a first-order lag, solved exactly."""
    decay = np.exp(-dt / _LAG)
    error = velocity - command
    return position + command * dt + error * _LAG * (1 - decay), command + error * decay


def step(table: Table, command: np.ndarray, dt: float) -> Table:
    """The table after `dt` seconds of a velocity command (4,). Contacts are resolved in `_SUBSTEPS` parts."""
    gripper, velocity = table.gripper, table.velocity
    blocks, yaws = table.blocks.copy(), table.yaws.copy()
    for _ in range(_SUBSTEPS):
        gripper, velocity = move_gripper(gripper, velocity, command, dt / _SUBSTEPS)
        if gripper[2] < 2 * BLOCK_HALF:
            for finger in finger_positions(gripper):
                for block in range(len(blocks)):
                    _push(blocks, yaws, block, finger)
            _separate(blocks)
    return Table(gripper, velocity, blocks, yaws)


def _push(blocks: np.ndarray, yaws: np.ndarray, block: int, finger: np.ndarray) -> None:
    """Move a block out of a finger, by the ellipsoidal limit surface of planar sliding without finger friction.

    The block's twist is proportional to (f, torque / c^2) of the pressing force f (Howe and Cutkosky 1996); its size
    follows from the demand that the contact point leave the finger.
    """
    cos, sin = np.cos(yaws[block]), np.sin(yaws[block])
    rotation = np.array([[cos, -sin], [sin, cos]])
    local = (finger - blocks[block]) @ rotation
    contact = np.clip(local, -BLOCK_HALF, BLOCK_HALF)
    gap = np.linalg.norm(local - contact)
    if gap >= FINGER_RADIUS or gap == 0.0:  # substeps are far shorter than a finger's radius: never inside a block
        return
    push = (contact - local) / gap
    arm = contact[0] * push[1] - contact[1] * push[0]
    size = (FINGER_RADIUS - gap) / (1 + (arm / _TORQUE_ARM) ** 2)
    blocks[block] += rotation @ (size * push)
    yaws[block] += size * arm / _TORQUE_ARM**2


def _separate(blocks: np.ndarray) -> None:
    """Move overlapping blocks apart by equal shares, as if they were discs a little wider than the inscribed one."""
    reach = 2 * 1.15 * BLOCK_HALF
    for first in range(len(blocks)):
        for second in range(first + 1, len(blocks)):
            between = blocks[second] - blocks[first]
            distance = max(float(np.linalg.norm(between)), 1e-9)
            if distance < reach:
                shift = between / distance * (reach - distance) / 2
                blocks[first] -= shift
                blocks[second] += shift


@dataclass
class Expert:
    """Pushes `block` to `goal` (2,): above the far side, down, push, up and back."""

    block: int
    goal: np.ndarray
    speed: float
    """Factor on all speeds, 0.6 to 1."""
    phase: str = field(default="approach", init=False)
    _heading: np.ndarray = field(default_factory=lambda: np.zeros(2), init=False)

    def command(self, table: Table) -> np.ndarray:
        """The velocity command (4,) for this table; may change the phase."""
        block = table.blocks[self.block]
        to_goal = self.goal - block
        distance = float(np.linalg.norm(to_goal))
        if distance > 0.03 or not self._heading.any():  # the direction is ill-defined near the goal: keep the last one
            self._heading = to_goal / max(distance, 1e-9)
        yaw = _wrap_half(np.arctan2(self._heading[1], self._heading[0]))
        turn = np.clip(6 * _wrap_half(yaw - table.gripper[3]), -2.5, 2.5)
        return np.append(self._linear(table, block, float(to_goal @ self._heading)), turn)

    def _linear(self, table: Table, block: np.ndarray, remaining: float) -> np.ndarray:
        position = table.gripper[:3]
        behind = np.append(block - self._heading * (BLOCK_HALF + 0.03), TRAVEL_HEIGHT)
        if self.phase == "approach" and np.linalg.norm(position - behind) < 0.008:
            self.phase = "lower"
        if self.phase == "lower" and position[2] < _PUSH_HEIGHT + 0.004:
            self.phase = "push"
        if self.phase == "push" and remaining < 0.004:
            self.phase = "lift"
        if self.phase == "approach":
            return _limit(6 * (behind - position), 0.32 * self.speed)
        if self.phase == "lower":
            return _limit(7 * (np.append(behind[:2], _PUSH_HEIGHT) - position), 0.22 * self.speed)
        if self.phase == "push":
            return self._pushing(position, block, remaining)
        return np.append(-0.12 * self._heading, 0.2) * self.speed

    def _pushing(self, position: np.ndarray, block: np.ndarray, remaining: float) -> np.ndarray:
        """Forward, slower near the goal, and sideways so that block, gripper and goal stay in line."""
        across = np.array([-self._heading[1], self._heading[0]])
        sideways = np.clip(8 * float((block - position[:2]) @ across), -0.06, 0.06)
        forward = min(0.15 * self.speed, 0.02 + 5 * max(remaining, 0.0))
        return np.append(forward * self._heading + sideways * across, 4 * (_PUSH_HEIGHT - position[2]))


def record_episode(seed: int, episode: int, fps: int) -> Episode:
    """Simulate episode number `episode` of a dataset: a random start, then the expert until the task is done.

    The result depends on the three arguments alone. A start from which the expert fails (it knocks another block into
    its own way) is replaced by the next one of the same generator.
    """
    rng = np.random.default_rng((seed, episode))
    colour, side = int(rng.integers(len(COLOURS))), int(rng.integers(len(SIDES)))
    while True:
        table, goals = _random_start(rng, colour, side)
        recorded = _simulate(table, Expert(colour, goals[side], rng.uniform(0.58, 0.95)), fps)
        if recorded is not None:
            task = f"Push the {COLOURS[colour]} block to the goal on the {SIDES[side]}."
            return Episode(task, goals, *recorded)


def _simulate(table: Table, expert: Expert, fps: int) -> tuple[np.ndarray, ...] | None:
    """The arrays of an `Episode` after its goals; None where the block is not in the goal in time."""
    rows = []
    for _ in range(round(MAX_SECONDS * fps)):
        # What is recorded is what was done: the rounded command moves the gripper.
        command = expert.command(table).astype(np.float32)
        before, table = table, step(table, command.astype(np.float64), 1 / fps)
        inside = np.linalg.norm(table.blocks[expert.block] - expert.goal) < SUCCESS_DISTANCE
        done = bool(inside and table.gripper[2] > 0.7 * TRAVEL_HEIGHT)
        state = np.concatenate([before.gripper, before.velocity])
        rows.append((state, command, before.blocks, before.yaws, float(inside), done))
        if done:
            columns = [np.array(column) for column in zip(*rows, strict=True)]
            return (*(column.astype(np.float32) for column in columns[:-1]), columns[-1])
    return None


def _random_start(rng: np.random.Generator, colour: int, side: int) -> tuple[Table, np.ndarray]:
    """A table whose blocks stand apart, with the way from the block to its goal free, and both goals (2, 2)."""
    goals = np.array([[-0.23, 0.02], [0.23, 0.02]]) + rng.uniform(-1, 1, (2, 2)) * (0.02, 0.07)
    while True:
        blocks = rng.uniform((-0.12, -0.12), (0.12, 0.14), (len(COLOURS), 2))
        gaps = np.linalg.norm(blocks[:, None] - blocks[None], axis=-1) + np.eye(len(blocks))
        others = np.delete(blocks, colour, axis=0)
        if gaps.min() > 0.08 and _distance_to_path(others, blocks[colour], goals[side]).min() > 0.065:
            break
    gripper = np.array([*rng.uniform((-0.2, -0.16), (0.2, 0.0)), TRAVEL_HEIGHT, rng.uniform(-0.6, 0.6)])
    return Table(gripper, np.zeros(4), blocks, rng.uniform(-np.pi / 4, np.pi / 4, len(COLOURS))), goals


def _distance_to_path(points: np.ndarray, start: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Distances (n,) of points (n, 2) from the way that fingers and block take, which begins behind the block."""
    heading = (goal - start) / np.linalg.norm(goal - start)
    start = start - 0.07 * heading
    along = np.clip((points - start) @ heading, 0, np.linalg.norm(goal - start))
    return np.linalg.norm(points - start - along[:, None] * heading, axis=-1)


def _limit(vector: np.ndarray, length: float) -> np.ndarray:
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-9))


def _wrap_half(angle: float) -> float:
    """The angle modulo a half turn, in [-pi/2, pi/2): the gripper looks the same after half a turn."""
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)
