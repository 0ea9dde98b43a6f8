"""DALI graph: decodes and resizes the arrays of the external source, and applies the user's function.

The same graph is built for a CPU and for a GPU. Decoding of VP9 on a CPU differs from decoding on NVDEC only in the device of
the operator, `cpu` instead of `mixed`.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dali_stream.checks.text import listed
from dali_stream.decode import dali  # before DALI itself, since its error message says how to install DALI
from dali_stream.decode.capability import engines
from dali_stream.errors import DaliStreamError
from dali_stream.pipeline.config import SAMPLE, SUBSTITUTE

# isort: split
from nvidia.dali import fn, types

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode
    from nvidia.dali.pipeline import Pipeline

    from dali_stream.pipeline.aliases import Graph
    from dali_stream.pipeline.config import Config
    from dali_stream.pipeline.external_source import ExternalSource
    from dali_stream.pipeline.layout import Layout

AUDITED = "audited "  # prefix of the output with a camera's frames before the user's function changes them
Kind = tuple[str, Any, int, str]  # input of DALI: key, DALI's type, number of dimensions of a sample, and layout
_log = logging.getLogger("dali_stream")
_HINT = (
    ". To rename an output, change its key in the dict that dali_graph returns and not DataNode.name. Operators must have "
    "different names, and gpu() needs a GPU"
)
_TYPES = {np.dtype(np.float32): types.FLOAT, np.dtype(np.int64): types.INT64, np.dtype(np.bool_): types.BOOL}


def build(layout: Layout, source: ExternalSource, user: Graph | None) -> tuple[Pipeline, list[str]]:
    """Build the pipeline.

    Args:
        layout: Configuration of the loader, with the decoders.
        source: External source.
        user: User's function. Its argument has frames with the layout HWC or FHWC, and tabular nodes, on the pipeline's device.
            None if the user gives no function.

    Returns:
        Pipeline, and names of its outputs.

    Raises:
        ValueError: If `user` does not return a dict of DataNodes.
        DaliStreamError: If DALI cannot build the graph.
    """
    config, threads = layout.config, layout.config.num_threads
    if config.gpu is not None and layout.on_dali:
        threads = dali.decode_threads(threads, engines(config.gpu), len(layout.on_dali))
    # The planner already works ahead. With a prefetch of 1, an error in a batch does not lose the previous one, see `Iterator`.
    pipeline = dali.empty_pipeline(config.batches.largest, config.gpu, threads, prefetch=1)
    with pipeline:
        nodes = _read(layout, source)
        for camera in [camera for camera in config.source.cameras if camera in nodes]:
            # Other decoders resize frames in the decode threads.
            size = config.image_size if camera in layout.on_dali else None
            if not config.source.features[camera].is_depth:
                nodes[camera] = _scaled(nodes[camera], size, config.image_dtype)
        camera_nodes = nodes
        if user is not None:
            nodes = _applied(user, nodes)
        if config.audits_apart:
            nodes |= {AUDITED + key: camera_nodes[key] for key in layout.on_dali}
        pipeline.set_outputs(*nodes.values())
    try:
        with warnings.catch_warnings():
            # A user's function may drop nodes, so DALI's warning about unused nodes is ignored. A dropped camera is still
            # decoded, so the code below logs a warning of its own.
            warnings.filterwarnings("ignore", message="The external source node", category=Warning)
            pipeline.build()
    except RuntimeError as error:
        hint = "" if user is None else _HINT
        raise DaliStreamError(f"DALI does not build the graph: {dali.explanation(error).rstrip('.')}{hint}") from error
    used = _ancestors(nodes.values())
    for camera in config.source.cameras if user is not None else ():
        if _place(camera_nodes[camera]) not in used:
            _log.warning("dali_graph drops %s, which is still decoded. Leave it out of the dataset's cameras", camera)
    return pipeline, list(nodes)


def _ancestors(nodes: Iterable[DataNode]) -> set[tuple[int, int]]:
    """Return the places (see `_place`) of some nodes and of all nodes from which they are computed."""
    ancestors, todo = set[tuple[int, int]](), list(nodes)
    while todo:
        node = todo.pop()
        if _place(node) not in ancestors:
            ancestors.add(_place(node))
            todo += getattr(node.source, "inputs", None) or ()
    return ancestors


def _place(node: DataNode) -> tuple[int, int]:
    """Return what identifies a node: its operator, and the number of its output.

    The object itself does not identify the node, since `node.gpu()` is another object for the same output.
    """
    return id(node.source), node.index


def _read(layout: Layout, source: ExternalSource) -> dict[str, DataNode]:
    """Return the arrays of the external source as nodes on the pipeline's device. Clips are decoded."""
    config = layout.config
    kinds: list[Kind] = [(key, *_column(config, key)) for key in config.columns()]
    decoded: list[Kind] = []
    on_gpu: list[Kind] = []
    for camera in config.source.cameras:
        axes = "HWC" if config.squeezed(camera) else "FHWC"
        if camera in layout.on_dali:
            kinds += [(camera, types.UINT8, 1, ""), (camera, types.INT32, 1, "")]  # clip, and frame indices in it
            kinds += [] if config.squeezed(camera) else [(camera, types.INT32, 1, "")]  # order of the steps
        elif camera in layout.in_gpu_cache:
            on_gpu.append((camera, types.UINT8, len(axes), axes))
        else:
            is_depth = config.source.features[camera].is_depth
            decoded.append((camera, types.FLOAT if is_depth else types.UINT8, len(axes), axes))
    # Each key has one node, except for an encoded camera, which has two or three.
    grouped: dict[str, list[DataNode]] = {}
    for key, node in _source(source.columns, kinds):
        grouped.setdefault(key, []).append(node)

    def placed(node: DataNode) -> DataNode:
        return node if config.gpu is None else node.gpu()

    nodes = {}
    for key, parts in grouped.items():
        if key in layout.routes:
            nodes[key] = _decoded(parts, config.gpu)
        else:
            # The random numbers for augmentation stay on the CPU, since DALI's operators require arguments in CPU memory.
            nodes[key] = parts[0] if key == SAMPLE and config.augments else placed(parts[0])
    # DALI copies its inputs while it holds the interpreter's lock, so no decode thread can run Python code meanwhile. Frames
    # are large, so they are passed without a copy. A GPU reads the page-locked memory of the batch. On a CPU, an operator
    # copies them in DALI's threads, unless the division by 255 writes to new memory anyway.
    for camera, node in _source(source.frames, decoded, no_copy=True) if decoded else ():
        is_depth = config.source.features[camera].is_depth
        written = config.gpu is not None or (config.image_dtype == "float32" and not is_depth)
        nodes[camera] = placed(node) if written else fn.copy(node)
    # Frames in the GPU's memory are complete, and their memory is reused once the run has ended. An operator writes them to new
    # memory, since a graph may return them as they are.
    device = "cpu" if config.gpu is None else "gpu"
    for camera, node in _source(source.gpu_frames, on_gpu, no_copy=True, device=device) if on_gpu else ():
        nodes[camera] = node if config.image_dtype == "float32" else fn.copy(node)
    return nodes


def _source(call: Callable[[], tuple[Any, ...]], kinds: list[Kind], **options: Any) -> list[tuple[str, DataNode]]:
    """Return (key, node) for each array that `call` returns, as an external source of the graph."""
    keys, dtypes, ndims, layouts = (list(part) for part in zip(*kinds, strict=True))
    nodes = fn.external_source(call, num_outputs=len(kinds), batch=True, dtype=dtypes, ndim=ndims, layout=layouts, **options)
    return list(zip(keys, nodes, strict=True))


def _column(config: Config, key: str) -> tuple[Any, int, str]:
    """Return DALI's type, the number of dimensions of a sample, and the layout of a key of `Config.columns`."""
    if key == SAMPLE and config.augments:
        return types.FLOAT, 1, ""
    if key == SUBSTITUTE and config.max_substitutes is not None:
        return types.BOOL, 0, ""
    if key in config.source.constants:
        constant = config.source.constants[key]
        return _TYPES[constant.dtype], constant.ndim - 1, ""
    if key not in config.source.features:
        return types.BOOL, 1, ""  # a pad mask
    feature = config.source.features[key]
    return _TYPES[np.dtype(feature.numpy)], len(feature.row_shape) + (key in config.windows), ""


def _decoded(parts: list[DataNode], gpu: int | None) -> DataNode:
    """Return the decoded frames of a camera's clips: FHWC if `parts` has an order of steps, and HWC otherwise."""
    video = dali.operator(parts[0], parts[1], gpu)
    return fn.squeeze(video, axes=[0]) if len(parts) == 2 else fn.sequence_rearrange(video, new_order=parts[2])


def _scaled(node: DataNode, image_size: tuple[int, int] | None, image_dtype: str) -> DataNode:
    """Return frames resized to `image_size`, if it is not None, and as uint8 or as float32 in [0, 1]."""
    as_float = image_dtype == "float32"
    if image_size is not None:
        node = fn.resize(node, size=image_size, dtype=types.FLOAT if as_float else types.UINT8)
    return node / np.float32(255) if as_float else node  # a division as in LeRobot, since x * (1 / 255) is rounded differently


def _applied(user: Graph, nodes: dict[str, DataNode]) -> dict[str, DataNode]:
    """Return the result of the user's function. Raises ValueError if it is not a dict of DataNodes."""
    from nvidia.dali.data_node import DataNode

    try:
        returned = user(dict(nodes))
    except KeyError as error:
        if (key := error.args[0] if error.args else None) in nodes:
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
        raise ValueError(f"dali_graph raised KeyError: {key!r} ({place}). Keys of its argument: {listed(nodes)}") from error
    if isinstance(returned, dict) and returned.get(SAMPLE) is nodes[SAMPLE]:
        returned = {key: node for key, node in returned.items() if key != SAMPLE}
    if not isinstance(returned, dict) or not returned:
        raise ValueError(f"dali_graph must return a dict of DALI DataNodes by key, got {type(returned).__name__}")
    for key, node in returned.items():
        if not isinstance(key, str) or not isinstance(node, DataNode):
            raise ValueError(f"dali_graph must return DALI DataNodes by key, got {key!r}: {type(node).__name__}")
    return returned
