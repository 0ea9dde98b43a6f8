"""Renderer of the demo scene: Pillow paints boxes from far to near over a background, at twice the size of the frame.

The table and its goals do not move within an episode, so the background is computed once, with NumPy, with light and in shadow.
For each frame, the two are mixed where boxes cast shadows, and the visible faces of the boxes are painted over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from dali_stream.demo import scene
from dali_stream.system.cached import cached_property

_LIGHT = np.array([0.34, -0.40, 0.85]) / np.linalg.norm([0.34, -0.40, 0.85])  # direction to the lamp
_BLOCK_COLOURS = np.array([[214, 62, 52], [52, 168, 92], [50, 108, 214]], dtype=np.float64)
_FINGER, _PALM, _WRIST = np.array([[66, 70, 80], [214, 218, 224], [244, 152, 54]], dtype=np.float64)
_WOOD, _WALL, _GOAL = np.array([[206, 172, 130], [72, 80, 92], [250, 250, 244]], dtype=np.float64)
_SHADOW = 0.45  # fraction of the light that a shadow removes
_SCALE = 2  # edges are smooth because polygons are painted at this multiple of the frame's size, and reduced


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
    large = (size[1] * _SCALE, size[0] * _SCALE)
    lit, dark = _backgrounds(episode.goals, camera, size)
    for state, blocks, yaws in zip(episode.state, episode.block_positions, episode.block_yaws, strict=True):
        groups = _boxes(state, blocks, yaws)
        table = Image.composite(dark, lit, _shadows(groups, camera, size))
        image = table.resize(large, Image.Resampling.NEAREST)
        draw = ImageDraw.Draw(image)
        for box in sorted(itertools.chain(*groups), key=lambda box: -float(np.linalg.norm(box.middle - camera.eye))):
            _paint_box(draw, box, camera, size)
        yield np.asarray(image.reduce(_SCALE))


def _boxes(state: np.ndarray, blocks: np.ndarray, yaws: np.ndarray) -> tuple[list[Box], list[Box]]:
    """Return the boxes of a frame: the blocks; and the fingers, palm and wrist of the gripper.

    Args:
        state: State of the gripper, shape (8,).
        blocks: Centres of the blocks in metres, shape (3, 2).
        yaws: Rotations of the blocks in radians, shape (3,).
    """
    half = scene.BLOCK_HALF
    cubes = [
        Box(np.array([x, y, half]), np.full(3, half), float(yaw), colour)
        for (x, y), yaw, colour in zip(blocks, yaws, _BLOCK_COLOURS, strict=True)
    ]
    x, y, z, yaw = (float(value) for value in state[:4])
    radius = scene.FINGER_RADIUS
    gripper = [
        Box(np.append(finger, z + 0.03), np.array([radius, radius, 0.03]), yaw, _FINGER)
        for finger in scene.finger_positions(state[:4].astype(np.float64))
    ]
    gripper.append(Box(np.array([x, y, z + 0.07]), np.array([0.014, 0.034, 0.01]), yaw, _PALM))
    gripper.append(Box(np.array([x, y, z + 0.12]), np.array([0.012, 0.016, 0.04]), yaw, _WRIST))
    return cubes, gripper


def _backgrounds(goals: np.ndarray, camera: Camera, size: tuple[int, int]) -> tuple[Image.Image, Image.Image]:
    """Return two images of the empty table: one in the light of the lamp, and one whose table is in shadow."""
    height, width = size
    columns, rows = np.meshgrid(np.arange(width) + 0.5 - width / 2, np.arange(height) + 0.5 - height / 2)
    right, down, forward = camera.axes
    rays = columns[..., None] * right + rows[..., None] * down + camera.focal_length(size) * forward
    # Points at which the rays of the pixels hit the plane of the table. Rays that do not descend get a point far away.
    points = np.array(camera.eye[:2]) + rays[..., :2] * (camera.eye[2] / np.maximum(-rays[..., 2:], 1e-6))
    fade = np.linspace(1.12, 0.72, height)[:, None, None]
    wall = _image(np.broadcast_to(_WALL * fade, (height, width, 3))).resize((width * _SCALE, height * _SCALE))
    half_x, half_y = scene.TABLE_HALF
    thickness = Box(np.array([0, 0, -0.016]), np.array([half_x, half_y, 0.016]), 0.0, _WOOD * 0.55)
    _paint_box(ImageDraw.Draw(wall), thickness, camera, size)
    wall = wall.reduce(_SCALE)
    mask = Image.new("L", (width * _SCALE, height * _SCALE))
    corners = np.array([[-half_x, -half_y, 0], [half_x, -half_y, 0], [half_x, half_y, 0], [-half_x, half_y, 0]])
    _paint(ImageDraw.Draw(mask), camera.project(corners, size) * _SCALE, 255)
    mask, top = mask.reduce(_SCALE), _table_top(points, goals)
    lit, dark = (Image.composite(_image(top * light), wall, mask) for light in (1, 1 - _SHADOW))
    return lit, dark


def _image(colours: np.ndarray) -> Image.Image:
    """Return an image of colours from 0 to 255, shape (H, W, 3)."""
    return Image.fromarray(np.clip(colours + 0.5, 0, 255).astype(np.uint8))


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


def _shadows(groups: tuple[list[Box], ...], camera: Camera, size: tuple[int, int]) -> Image.Image:
    """Return how much groups of boxes block the parallel light of the lamp, from 0 to 255. Overlapping shadows merge."""
    merged = Image.new("L", (size[1], size[0]))
    for boxes in groups:
        mask = Image.new("L", merged.size)
        draw = ImageDraw.Draw(mask)
        for box in boxes:
            corners = box.corners()
            ground = camera.project(corners - corners[:, 2:] / _LIGHT[2] * _LIGHT, size)
            for _, face in _FACES:
                _paint(draw, ground[face], 255)
        # The lamp is not a point, so the edge of a shadow is wider for a higher box.
        height = min(float(box.middle[2] - box.half[2]) for box in boxes)
        merged = ImageChops.lighter(merged, mask.filter(ImageFilter.BoxBlur((1 + 60 * height) * size[0] / 240)))
    return merged


def _paint_box(draw: ImageDraw.ImageDraw, box: Box, camera: Camera, size: tuple[int, int]) -> None:
    """Paint the faces of a box that the camera sees, with ambient and diffuse (Lambertian) light."""
    corners, rotation = box.corners(), box.rotation()
    pixels = camera.project(corners, size) * _SCALE
    for normal, face in _FACES:
        outward = rotation @ normal
        # The normal of a visible face points towards the camera.
        if outward @ (np.array(camera.eye) - corners[face[0]]) <= 0:
            continue
        colour = box.colour * (0.58 + 0.5 * max(0.0, float(outward @ _LIGHT)))
        _paint(draw, pixels[face], colour)
        if normal[2] > 0 and box.colour is not _FINGER:
            inset = pixels[face] + 0.2 * (pixels[face].mean(axis=0) - pixels[face])
            _paint(draw, inset, colour + 0.12 * (255 - colour))


def _paint(draw: ImageDraw.ImageDraw, polygon: np.ndarray, colour: np.ndarray | int) -> None:
    """Paint a polygon, shape (n, 2), in pixels. Pillow's coordinates are of the centres of pixels."""
    fill = colour if isinstance(colour, int) else tuple(min(int(value + 0.5), 255) for value in colour)
    draw.polygon((polygon - 0.5).ravel().tolist(), fill=fill)
