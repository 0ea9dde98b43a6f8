"""Renderer of the demo scene: a painter's algorithm for convex polygons with soft edges, in NumPy.

How much a polygon covers a pixel depends on the signed distance between the pixel and the nearest edge. The coverage rises from
0 to 1 over one pixel for an antialiased edge, and over several for the edge of a shadow. The table and its goals do not move
within an episode, so they are painted once. For each frame, shadows and boxes are painted over a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from dali_stream.demo import scene

_LIGHT = np.array([0.34, -0.40, 0.85]) / np.linalg.norm([0.34, -0.40, 0.85])  # direction to the lamp
_BLOCK_COLOURS = np.array([[214, 62, 52], [52, 168, 92], [50, 108, 214]], dtype=np.float64)
_FINGER, _PALM, _WRIST = np.array([[66, 70, 80], [214, 218, 224], [244, 152, 54]], dtype=np.float64)
_WOOD, _WALL, _GOAL = np.array([[206, 172, 130], [72, 80, 92], [250, 250, 244]], dtype=np.float64)
_SHADOW = 0.45  # fraction of the light that a shadow removes


@dataclass(frozen=True)
class Camera:
    """Pinhole camera.

    Attributes:
        eye: Position of the camera (x, y, z), in metres.
        target: Position at the centre of the view (x, y, z), in metres.
        field_of_view: Vertical field of view in radians.
    """

    eye: tuple[float, float, float]
    target: tuple[float, float, float]
    field_of_view: float

    @cached_property
    def axes(self) -> np.ndarray:
        """Unit vectors to the right, down and forward, as rows, shape (3, 3)."""
        forward = np.subtract(self.target, self.eye)
        forward = forward / np.linalg.norm(forward)
        right = np.cross(forward, (0.0, 0.0, 1.0))
        right /= np.linalg.norm(right)
        return np.stack([right, np.cross(forward, right), forward])

    def focal_length(self, size: tuple[int, int]) -> float:
        """Return the focal length in pixels for frames of a size (height, width).

        `field_of_view` applies to frames that are at least as wide as 4:3. Narrower frames show the same width as 4:3.
        """
        return min(size[0], size[1] * 0.75) / 2 / np.tan(self.field_of_view / 2)

    def project(self, points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Project points onto a frame.

        Args:
            points: Points in metres, shape (..., 3).
            size: Size (height, width) of the frame in pixels.

        Returns:
            Pixel positions (x to the right, y down), shape (..., 2).
        """
        seen = (points - np.array(self.eye)) @ self.axes.T
        scale = self.focal_length(size) / seen[..., 2:]
        return seen[..., :2] * scale + (size[1] / 2, size[0] / 2)


CAMERAS = {
    "observation.images.top": Camera((0.0, -0.10, 0.80), (0.0, -0.015, 0.0), 0.66),
    "observation.images.side": Camera((-0.34, -0.76, 0.46), (-0.01, -0.035, 0.02), 0.56),
}


@dataclass(frozen=True)
class Box:
    """Box with vertical sides.

    Attributes:
        middle: Centre in metres, shape (3,).
        half: Half of each edge length in metres, shape (3,).
        yaw: Rotation about the z axis in radians.
        colour: RGB colour, 0 to 255, shape (3,).
    """

    middle: np.ndarray
    half: np.ndarray
    yaw: float
    colour: np.ndarray

    def corners(self) -> np.ndarray:
        """Return the corners, float64, shape (8, 3). Bits 2, 1 and 0 of a corner's index are its signs in x, y and z."""
        return self.middle + (_SIGNS * self.half) @ self.rotation().T

    def rotation(self) -> np.ndarray:
        cos, sin = np.cos(self.yaw), np.sin(self.yaw)
        return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])


_SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], dtype=np.float64)
# Outward normal and corners, in order around the face, of the faces that a camera above the table can see.
_FACES = (
    (np.array([-1.0, 0, 0]), [0, 1, 3, 2]),
    (np.array([1.0, 0, 0]), [4, 5, 7, 6]),
    (np.array([0, -1.0, 0]), [0, 1, 5, 4]),
    (np.array([0, 1.0, 0]), [2, 3, 7, 6]),
    (np.array([0, 0, 1.0]), [1, 3, 7, 5]),
)


def render_episode(episode: scene.Episode, camera: Camera, size: tuple[int, int]) -> Iterator[np.ndarray]:
    """Yield the frames of an episode, uint8, shape (H, W, 3).

    Args:
        episode: Episode to render.
        camera: Camera that sees the scene.
        size: Size (height, width) of the frames in pixels.
    """
    background, table_mask = _background(episode.goals, camera, size)
    for state, blocks, yaws in zip(episode.state, episode.block_positions, episode.block_yaws, strict=True):
        boxes = _boxes(state, blocks, yaws)
        image = background.copy()
        _cast_shadows(image, table_mask, boxes, camera, size)
        for box in sorted(boxes, key=lambda box: -float(np.linalg.norm(box.middle - camera.eye))):
            _paint_box(image, box, camera, size)
        yield np.clip(image + 0.5, 0, 255).astype(np.uint8)


def _boxes(state: np.ndarray, blocks: np.ndarray, yaws: np.ndarray) -> list[Box]:
    """Return the boxes of a frame: the blocks, and the fingers, palm and wrist of the gripper.

    Args:
        state: State of the gripper, shape (8,).
        blocks: Centres of the blocks in metres, shape (3, 2).
        yaws: Rotations of the blocks in radians, shape (3,).
    """
    half = scene.BLOCK_HALF
    boxes = [
        Box(np.array([x, y, half]), np.full(3, half), float(yaw), colour)
        for (x, y), yaw, colour in zip(blocks, yaws, _BLOCK_COLOURS, strict=True)
    ]
    x, y, z, yaw = (float(value) for value in state[:4])
    radius = scene.FINGER_RADIUS
    for finger in scene.finger_positions(state[:4].astype(np.float64)):
        boxes.append(Box(np.append(finger, z + 0.03), np.array([radius, radius, 0.03]), yaw, _FINGER))
    boxes.append(Box(np.array([x, y, z + 0.07]), np.array([0.014, 0.034, 0.01]), yaw, _PALM))
    boxes.append(Box(np.array([x, y, z + 0.12]), np.array([0.012, 0.016, 0.04]), yaw, _WRIST))
    return boxes


def _background(goals: np.ndarray, camera: Camera, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return an image of the empty table, shape (H, W, 3), and how much the table covers each pixel, shape (H, W), float32."""
    height, width = size
    columns, rows = np.meshgrid(np.arange(width) + 0.5 - width / 2, np.arange(height) + 0.5 - height / 2)
    right, down, forward = camera.axes
    rays = columns[..., None] * right + rows[..., None] * down + camera.focal_length(size) * forward
    # Points at which the rays of the pixels hit the plane of the table. Rays that do not descend get a point far away.
    points = np.array(camera.eye[:2]) + rays[..., :2] * (camera.eye[2] / np.maximum(-rays[..., 2:], 1e-6))
    fade = np.linspace(1.12, 0.72, height)[:, None, None]
    image = np.broadcast_to(_WALL * fade, (height, width, 3)).astype(np.float32)
    half_x, half_y = scene.TABLE_HALF
    thickness = Box(np.array([0, 0, -0.016]), np.array([half_x, half_y, 0.016]), 0.0, _WOOD * 0.55)
    _paint_box(image, thickness, camera, size)
    mask = np.zeros(size, dtype=np.float32)
    corners = np.array([[-half_x, -half_y, 0], [half_x, -half_y, 0], [half_x, half_y, 0], [-half_x, half_y, 0]])
    window, coverage = _coverage(camera.project(corners, size), size, softness=1.0)
    mask[window] = coverage
    _blend(image, (slice(None), slice(None)), mask, _table_top(points, goals))
    return image, mask


def _table_top(points: np.ndarray, goals: np.ndarray) -> np.ndarray:
    """Return the colours of the wood and the goals at points of the table.

    Args:
        points: Points on the table in metres, shape (H, W, 2).
        goals: Centres of the goals in metres, shape (2, 2).

    Returns:
        RGB colours, shape (H, W, 3).
    """
    x, y = points[..., 0], points[..., 1]
    planks = np.floor((y + 1) / 0.0833)
    joint = np.abs((y + 1) / 0.0833 - planks - 0.5) > 0.485
    grain = np.sin(150 * y + 3 * np.sin(9 * x + 5 * planks)) + 0.6 * np.sin(330 * y + 4 * np.sin(5 * x + planks))
    tone = 1 + 0.014 * grain + 0.035 * np.sin(planks * 2.4) - 0.1 * joint
    light = 1.1 - 0.85 * ((x - 0.1) ** 2 + (y + 0.06) ** 2)  # brightest under a lamp at the front right
    colours = _WOOD * (tone * np.clip(light, 0.55, 1.2))[..., None]
    for goal in goals:
        distance = np.hypot(x - goal[0], y - goal[1])
        inside = np.clip((scene.GOAL_RADIUS - distance) / 0.0015 + 0.5, 0, 1)
        ring = inside * np.clip((distance - scene.GOAL_RADIUS + 0.005) / 0.0015 + 0.5, 0, 1)
        opacity = np.maximum(0.28 * inside, 0.9 * ring)[..., None]
        colours = colours + opacity * (_GOAL - colours)
    return colours


def _cast_shadows(image: np.ndarray, mask: np.ndarray, boxes: list[Box], camera: Camera, size: tuple[int, int]) -> None:
    """Darken the table where boxes block the parallel light of the lamp. Overlapping shadows merge."""
    light = np.ones(size, dtype=np.float32)
    for box in boxes:
        corners = box.corners()
        ground = corners - corners[:, 2:] / _LIGHT[2] * _LIGHT
        height = float(box.middle[2] - box.half[2])
        # The lamp is not a point, so the edge of a shadow is wider for a higher box.
        softness = (2.5 + 110 * height) * size[0] / 240
        window, coverage = _coverage(_convex_hull(camera.project(ground, size)), size, softness)
        light[window] *= 1 - coverage
    image *= (1 - np.float32(_SHADOW) * (1 - light) * mask)[..., None]


def _paint_box(image: np.ndarray, box: Box, camera: Camera, size: tuple[int, int]) -> None:
    """Paint the faces of a box that the camera sees, with ambient and diffuse (Lambertian) light."""
    corners, rotation = box.corners(), box.rotation()
    pixels = camera.project(corners, size)
    for normal, face in _FACES:
        outward = rotation @ normal
        # The normal of a visible face points towards the camera.
        if outward @ (np.array(camera.eye) - corners[face[0]]) <= 0:
            continue
        colour = box.colour * (0.58 + 0.5 * max(0.0, float(outward @ _LIGHT)))
        # Half a pixel of overlap hides the seams between the faces of a box.
        _blend(image, *_coverage(pixels[face], size, softness=1.0, grow=0.4), colour)
        if normal[2] > 0 and box.colour is not _FINGER:
            inset = pixels[face] + 0.2 * (pixels[face].mean(axis=0) - pixels[face])
            _blend(image, *_coverage(inset, size, softness=1.0), colour + 0.12 * (255 - colour))


def _coverage(
    polygon: np.ndarray, size: tuple[int, int], softness: float, grow: float = 0.0
) -> tuple[tuple[slice, slice], np.ndarray]:
    """Compute how much of each pixel a convex polygon covers.

    Args:
        polygon: Pixel positions of the corners, clockwise or counterclockwise, shape (n, 2).
        size: Size (height, width) of the frame in pixels.
        softness: Width of the edge in pixels.
        grow: Distance by which the edge is moved outwards, in pixels. Default: 0.

    Returns:
        Window of the frame that contains the polygon, and the coverage of its pixels from 0 to 1, shape (h, w).
    """
    # A polygon has few corners, and Python computes with them faster than NumPy, whose operations have a fixed cost.
    corners = polygon.tolist()
    following = corners[1:] + corners[:1]
    # The sign of the area makes the normals point inwards, for corners in either direction.
    area = sum(x * v - y * u for (x, y), (u, v) in zip(corners, following, strict=True))
    sign = (area > 0) - (area < 0)
    normals = []
    for (x, y), (u, v) in zip(corners, following, strict=True):
        length = max(math.sqrt((u - x) ** 2 + (v - y) ** 2), 1e-9)
        normals.append(((y - v) * sign / length, (u - x) * sign / length))
    normal = np.array(normals, np.float32)
    offset = (normal * polygon).sum(axis=1, dtype=np.float64).astype(np.float32)
    margin = softness / 2 + grow
    (left, right), (top, bottom) = (
        (math.floor(min(each) - margin), math.ceil(max(each) + margin)) for each in zip(*corners, strict=True)
    )
    window = slice(max(top, 0), max(min(bottom, size[0]), 0)), slice(max(left, 0), max(min(right, size[1]), 0))
    rows, columns = (_centres(length)[part] for length, part in zip(size, window, strict=True))
    across = normal[:, :1] * columns - offset[:, None]
    coverage = (across[:, None, :] + (normal[:, 1:] * rows)[:, :, None]).min(axis=0)
    coverage += np.float32(grow)
    coverage /= np.float32(softness)
    coverage += np.float32(0.5)
    return window, np.clip(coverage, 0, 1, out=coverage)


@cache
def _centres(length: int) -> np.ndarray:
    """Return the positions of the centres of pixels along a side of a frame, shape (length,)."""
    return np.arange(length, dtype=np.float32) + np.float32(0.5)


def _blend(image: np.ndarray, window: tuple[slice, slice], coverage: np.ndarray, colour: np.ndarray) -> None:
    """Blend a colour of shape (3,), or colours of shape (h, w, 3), into a window of the frame, in place."""
    part = image[window]
    part += coverage[..., None] * (np.asarray(colour, dtype=np.float32) - part)


def _convex_hull(points: np.ndarray) -> np.ndarray:
    """Return the corners of the convex hull of points, shape (n, 2), in order (Andrew's monotone chain)."""
    ordered = sorted(map(tuple, points.tolist()))
    hull: list[tuple[float, float]] = []
    for sweep in (ordered, ordered[::-1]):
        start = len(hull)
        for point in sweep:
            while len(hull) >= start + 2 and _turn(hull[-2], hull[-1], point) <= 0:
                hull.pop()
            hull.append(point)
        hull.pop()
    return np.array(hull)


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
