"""Simulation of a table with three blocks and a two-fingered gripper, and a scripted expert that pushes a block to a goal.

Lengths are in metres, angles in radians and times in seconds. The surface of the table is the plane z = 0, with x to the right
and y away from the robot's base. The physics is quasi-static: a block moves only while a finger or another block pushes it.
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
FINGER_SPREAD = 0.017  # distance between each finger and the centre of the gripper
GOAL_RADIUS = 0.045
TRAVEL_HEIGHT = 0.085
SUCCESS_DISTANCE = 0.015
MAX_SECONDS = 7.0

_LAG = 0.08  # time constant of the velocity controller
_PUSH_HEIGHT = 0.006
_SUBSTEPS = 10
# Ratio of the maximum friction torque to the maximum friction force of a square with uniform pressure. It is the mean distance
# between the points of the square and its centre, which is 0.3826 times the side.
_TORQUE_ARM = 0.3826 * 2 * BLOCK_HALF


@dataclass
class Table:
    """State of the simulation.

    Attributes:
        gripper: Position x, y, z and yaw of the gripper, shape (4,).
        velocity: Velocity of the gripper, shape (4,).
        blocks: Centre x, y of each block, shape (3, 2).
        yaws: Rotation of each block, shape (3,).
    """

    gripper: np.ndarray
    velocity: np.ndarray
    blocks: np.ndarray
    yaws: np.ndarray


@dataclass(frozen=True)
class Episode:
    """Recorded episode of T frames. Row t contains the state that frame t shows, and the action that follows it."""

    task: str
    """Task in words."""
    goals: np.ndarray
    """Centres of the left and the right goal, float64, shape (2, 2)."""
    state: np.ndarray
    """Position and velocity of the gripper, see `STATE_NAMES`, float32, shape (T, 8)."""
    action: np.ndarray
    """Velocity command, see `ACTION_NAMES`, float32, shape (T, 4)."""
    block_positions: np.ndarray
    """Centres of the red, the green and the blue block, float32, shape (T, 3, 2)."""
    block_yaws: np.ndarray
    """Rotations of these blocks, float32, shape (T, 3)."""
    reward: np.ndarray
    """1 if the block is in its goal after the action, or else 0, float32, shape (T,)."""
    done: np.ndarray
    """True in the last frame, bool, shape (T,)."""

    def __len__(self) -> int:
        return len(self.state)


def finger_positions(gripper: np.ndarray) -> np.ndarray:
    """Return x and y of both fingers, shape (2, 2). The line between them is perpendicular to the gripper's heading."""
    across = np.array([-np.sin(gripper[3]), np.cos(gripper[3])]) * FINGER_SPREAD
    return np.stack([gripper[:2] + across, gripper[:2] - across])


def move_gripper(position: np.ndarray, velocity: np.ndarray, command: np.ndarray, dt: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the position and the velocity after `dt` seconds of a constant velocity command.

    The velocity follows the command with a first-order lag, which is solved exactly.
    """
    decay = np.exp(-dt / _LAG)
    error = velocity - command
    return position + command * dt + error * _LAG * (1 - decay), command + error * decay


def step(table: Table, command: np.ndarray, dt: float) -> Table:
    """Return the table after `dt` seconds of a velocity command of shape (4,). Contacts are resolved in `_SUBSTEPS` steps."""
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
    """Move a block out of a finger. The block slides with an ellipsoidal limit surface, and the finger has no friction.

    Under a force f of the finger, the velocity and the angular velocity of the block are proportional to f and torque / c^2,
    where c is `_TORQUE_ARM` (Howe and Cutkosky 1996). The block moves until the contact point is at the surface of the finger.
    """
    cos, sin = np.cos(yaws[block]), np.sin(yaws[block])
    rotation = np.array([[cos, -sin], [sin, cos]])
    local = (finger - blocks[block]) @ rotation
    contact = np.clip(local, -BLOCK_HALF, BLOCK_HALF)
    gap = np.linalg.norm(local - contact)
    # The gap is not 0 in practice, because a finger moves much less than its radius in a substep.
    if gap >= FINGER_RADIUS or gap == 0.0:
        return
    push = (contact - local) / gap
    arm = contact[0] * push[1] - contact[1] * push[0]
    size = (FINGER_RADIUS - gap) / (1 + (arm / _TORQUE_ARM) ** 2)
    blocks[block] += rotation @ (size * push)
    yaws[block] += size * arm / _TORQUE_ARM**2


def _separate(blocks: np.ndarray) -> None:
    """Move overlapping blocks apart by equal distances. Each is treated as a disc of 1.15 times its inscribed circle."""
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
    """Scripted policy that pushes a block to a goal.

    The gripper moves to a point above the side of the block that faces away from the goal. It descends, pushes, and then rises
    and retreats.
    """

    block: int
    """Number of the block."""
    goal: np.ndarray
    """Centre of the goal, shape (2,)."""
    speed: float
    """Factor of most speeds. In demo datasets, it is 0.58 to 0.95."""
    phase: str = field(default="approach", init=False)
    _heading: np.ndarray = field(default_factory=lambda: np.zeros(2), init=False)

    def command(self, table: Table) -> np.ndarray:
        """Return the velocity command for a state of the table, shape (4,), and update the phase."""
        block = table.blocks[self.block]
        to_goal = self.goal - block
        distance = float(np.linalg.norm(to_goal))
        if distance > 0.03 or not self._heading.any():  # near the goal, the direction is ill-defined and is kept
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
        """Return the linear velocity while pushing, shape (3,).

        The gripper slows down near the goal. The sideways component keeps the block, the gripper and the goal in line.
        """
        across = np.array([-self._heading[1], self._heading[0]])
        sideways = np.clip(8 * float((block - position[:2]) @ across), -0.06, 0.06)
        forward = min(0.15 * self.speed, 0.02 + 5 * max(remaining, 0.0))
        return np.append(forward * self._heading + sideways * across, 4 * (_PUSH_HEIGHT - position[2]))


def record_episode(seed: int, episode: int, fps: int) -> Episode:
    """Simulate one episode of a dataset, from a random start until the expert has completed the task.

    The result depends only on the arguments. If the expert fails, because it pushes another block into its own path, it tries
    again from the next random start of the same generator.

    Args:
        seed: Seed of the dataset.
        episode: Number of the episode.
        fps: Frames per second.
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
    """Return the arrays that follow `goals` in an `Episode`. None if the expert does not finish within `MAX_SECONDS`."""
    rows = []
    for _ in range(round(MAX_SECONDS * fps)):
        # Rounding the command before it moves the gripper makes the recorded actions exact.
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
    """Return a random table and the centres of both goals, shape (2, 2).

    The blocks do not touch each other. No block is on the path along which the block to push moves to its goal.
    """
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
    """Return the distances between points and the path of the gripper and the block, shape (n,).

    Args:
        points: Points in metres, shape (n, 2).
        start: Centre of the block in metres, shape (2,). The path starts on the side of the block that faces away from the
            goal.
        goal: Centre of the goal in metres, shape (2,).
    """
    heading = (goal - start) / np.linalg.norm(goal - start)
    start = start - 0.07 * heading
    along = np.clip((points - start) @ heading, 0, np.linalg.norm(goal - start))
    return np.linalg.norm(points - start - along[:, None] * heading, axis=-1)


def _limit(vector: np.ndarray, length: float) -> np.ndarray:
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-9))


def _wrap_half(angle: float) -> float:
    """Return an angle modulo pi, in [-pi/2, pi/2). The gripper looks the same after half a turn."""
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)
