"""The DALI graph: decodes and resizes what the external source delivers, and applies the user's function.

The same graph serves a CPU and a GPU; `mixed` decoding on NVDEC is the `cpu` decoding of VP9 with another device.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dali_stream.decode import dali  # before DALI itself: it says what to do where that is missing
from dali_stream.decode.capability import engines
from dali_stream.decode.route import TORCHCODEC_CUDA
from dali_stream.errors import DaliStreamError
from dali_stream.pipeline.config import SAMPLE, SUBSTITUTE

# isort: split
from nvidia.dali import fn, types

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode
    from nvidia.dali.pipeline import Pipeline

    from dali_stream.decode.route import Route
    from dali_stream.pipeline.config import Config
    from dali_stream.pipeline.external_source import ExternalSource

Graph = Callable[[dict[str, "DataNode"]], dict[str, "DataNode"]]
"""Function from a dict of DALI nodes to another. The dict has a node for each key of a batch, and the function may change, add
and drop some. The node "sample" holds the random numbers for `dali_stream.augment`, and is not part of a batch."""
AUDITED = "audited "  # before the name of a camera: output with its frames as they go into the user's graph
Kind = tuple[str, Any, int, str]  # of what goes into DALI: its key, DALI's type, dimensions of a sample, layout
_log = logging.getLogger("dali_stream")
_HINT = (
    ". To rename an output, change its key in the dict that dali_graph returns and not DataNode.name; give two operators no "
    "equal names; use gpu() only where there is a GPU"
)
_TYPES = {np.dtype(np.float32): types.FLOAT, np.dtype(np.int64): types.INT64, np.dtype(np.bool_): types.BOOL}


def build(
    config: Config, source: ExternalSource, routes: Mapping[str, Route], user: Graph | None
) -> tuple[Pipeline, list[str]]:
    """Build the pipeline.

    Args:
        config: Configuration of the loader.
        source: External source.
        routes: {camera: decoder}.
        user: The user's function, which gets (F)HWC frames and tabular nodes on the pipeline's device.

    Returns:
        The pipeline and the names of its outputs.

    Raises:
        ValueError: If `user` does not return a dict of DataNodes.
        DaliStreamError: If DALI does not build what it returns.
    """
    threads, on_dali = config.num_threads, sum(route.decoder == "dali" for route in routes.values())
    if config.gpu is not None and on_dali:
        threads = dali.decode_threads(threads, engines(config.gpu), on_dali)
    # The planner is ahead already; with one batch, an error costs no batch before it (see `Iterator`).
    pipeline = dali.empty_pipeline(config.batches.largest, config.gpu, threads, prefetch=1)
    with pipeline:
        nodes = _read(config, source, routes)
        for camera in [camera for camera in config.dataset.cameras if camera in nodes]:
            # The CPU's frames have been resized where they were decoded.
            size = None if routes[camera].decoder == "torchcodec" else config.image_size
            nodes[camera] = _scaled(nodes[camera], size, config.image_dtype)
        given = nodes
        if user is not None:
            nodes = _applied(user, nodes)
        if config.audits_apart:
            nodes |= {AUDITED + key: given[key] for key, route in routes.items() if route.decoder == "dali"}
        pipeline.set_outputs(*nodes.values())
    try:
        with warnings.catch_warnings():
            # A user's function may drop what it has no use for. A camera it drops is decoded all the same, so that is said.
            warnings.filterwarnings("ignore", message="The external source node", category=Warning)
            pipeline.build()
    except RuntimeError as error:
        hint = "" if user is None else _HINT
        raise DaliStreamError(f"DALI does not build the graph: {dali.explanation(error).rstrip('.')}{hint}") from error
    used = _ancestors(nodes.values())
    for camera in config.dataset.cameras if user is not None else ():
        if _place(given[camera]) not in used:
            _log.warning("dali_graph drops %s, which is decoded nevertheless; leave it out of the dataset's cameras", camera)
    return pipeline, list(nodes)


def _ancestors(nodes: Iterable[DataNode]) -> set[tuple[int, int]]:
    """The places of these nodes and of all that goes into them."""
    found, todo = set[tuple[int, int]](), list(nodes)
    while todo:
        node = todo.pop()
        if _place(node) not in found:
            found.add(_place(node))
            todo += getattr(node.source, "inputs", None) or ()
    return found


def _place(node: DataNode) -> tuple[int, int]:
    """Which output of which operator it is: `node.gpu()` is another object for the same one."""
    return id(node.source), node.index


def _read(config: Config, source: ExternalSource, routes: Mapping[str, Route]) -> dict[str, DataNode]:
    """The source's arrays as nodes on the pipeline's device, with clips decoded."""
    kinds: list[Kind] = [(key, *_column(config, key)) for key in config.columns()]
    decoded: list[Kind] = []
    on_gpu: list[Kind] = []
    for camera in config.dataset.cameras:
        layout = "HWC" if config.squeezed(camera) else "FHWC"
        if routes[camera].decoder == "dali":
            kinds += [(camera, types.UINT8, 1, ""), (camera, types.INT32, 1, "")]  # clip, frames in it
            kinds += [] if config.squeezed(camera) else [(camera, types.INT32, 1, "")]  # order of the steps
        elif routes[camera].decoder == TORCHCODEC_CUDA:
            on_gpu.append((camera, types.UINT8, len(layout), layout))
        else:
            decoded.append((camera, types.UINT8, len(layout), layout))
    # A key comes once, but for an encoded camera's.
    grouped: dict[str, list[DataNode]] = {}
    for key, node in _source(source.columns, kinds):
        grouped.setdefault(key, []).append(node)

    def placed(node: DataNode) -> DataNode:
        return node if config.gpu is None else node.gpu()

    nodes = {}
    for key, parts in grouped.items():
        if key in routes:
            nodes[key] = _decoded(parts, config.gpu)
        else:
            # What a sample brings for augmentation stays on the CPU, where DALI's operators want their arguments.
            nodes[key] = parts[0] if key == SAMPLE and config.augments else placed(parts[0])
    # DALI copies what it is fed with the interpreter held, which no decode thread can have meanwhile. Frames are much,
    # so they stay where they are, and an operator copies them in DALI's threads, unless another one reads them anyway.
    for camera, node in _source(source.frames, decoded, no_copy=True) if decoded else ():
        divided = config.gpu is None and config.image_dtype == "float32"
        nodes[camera] = placed(node if divided else fn.copy(node))
    # The frames are complete, and the source refers to them until this run of the pipeline has ended. With 1 for the stream,
    # DALI copies them on a stream of its own and waits for it (according to its documentation; not run on a GPU).
    place = {"device": "cpu"} if config.gpu is None else {"device": "gpu", "cuda_stream": 1}
    return nodes | (dict(_source(source.gpu_frames, on_gpu, **place)) if on_gpu else {})


def _source(call: Callable[[], tuple[Any, ...]], kinds: list[Kind], **options: Any) -> list[tuple[str, DataNode]]:
    """An external source of what `call` returns, by key."""
    keys, dtypes, ndims, layouts = (list(part) for part in zip(*kinds, strict=True))
    nodes = fn.external_source(call, num_outputs=len(kinds), batch=True, dtype=dtypes, ndim=ndims, layout=layouts, **options)
    return list(zip(keys, nodes, strict=True))


def _column(config: Config, key: str) -> tuple[Any, int, str]:
    if key == SAMPLE and config.augments:
        return types.FLOAT, 1, ""
    if key == SUBSTITUTE and config.max_substitutes is not None:
        return types.BOOL, 0, ""
    if key in config.dataset.constants:
        constant = config.dataset.constants[key]
        return _TYPES[constant.dtype], constant.ndim - 1, ""
    if key not in config.dataset.features:
        return types.BOOL, 1, ""  # a pad mask
    feature = config.dataset.features[key]
    return _TYPES[np.dtype(feature.numpy)], len(feature.row_shape) + (key in config.windows), ""


def _decoded(parts: list[DataNode], gpu: int | None) -> DataNode:
    """The frames of a window out of its clip, HWC without an order of steps, else FHWC."""
    video = dali.operator(parts[0], parts[1], gpu)
    return fn.squeeze(video, axes=[0]) if len(parts) == 2 else fn.sequence_rearrange(video, new_order=parts[2])


def _scaled(node: DataNode, image_size: tuple[int, int] | None, image_dtype: str) -> DataNode:
    as_float = image_dtype == "float32"
    if image_size is not None:
        node = fn.resize(node, size=image_size, dtype=types.FLOAT if as_float else types.UINT8)
    return node / np.float32(255) if as_float else node  # a division, as LeRobot does it: x * (1 / 255) rounds otherwise


def _applied(user: Graph, nodes: dict[str, DataNode]) -> dict[str, DataNode]:
    from nvidia.dali.data_node import DataNode

    try:
        found = user(dict(nodes))
    except KeyError as error:
        if (key := error.args[0] if error.args else None) in nodes:
            raise
        raise ValueError(f"dali_graph raised KeyError: {key!r}. Keys of its argument: {', '.join(nodes)}") from error
    if isinstance(found, dict) and found.get(SAMPLE) is nodes[SAMPLE]:
        found = {key: node for key, node in found.items() if key != SAMPLE}
    if not isinstance(found, dict) or not found:
        raise ValueError(f"dali_graph must return a dict of DALI DataNodes by key, got {type(found).__name__}")
    for key, node in found.items():
        if not isinstance(key, str) or not isinstance(node, DataNode):
            raise ValueError(f"dali_graph must return DALI DataNodes by key, got {key!r}: {type(node).__name__}")
    return found
