"""Conversion of Arrow columns to NumPy arrays.

The dtypes are the same as in LeRobot, which converts rows with `torch.tensor`: every float becomes float32, and every integer
becomes int64.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dali_stream.errors import DatasetError, StorageError, prefixed
from dali_stream.lerobot.features import Feature


def to_numpy(
    column: pa.ChunkedArray,
    feature: Feature,
    where: str,
    image: Callable[[str], bytes] | None = None,
    *,
    dtype: type[np.generic] | None = None,
    leave_out: bool = True,
) -> npt.NDArray[Any]:
    """Return a column as a NumPy array.

    Args:
        column: Column with L rows.
        feature: Feature that the column must match.
        where: Address of the file and the column, for messages.
        image: Function that reads an image file of the dataset, given its path. Default: None, and images outside the Parquet
            file are an error.
        dtype: Dtype of numbers. Default: that of a batch, see `Feature.numpy`.
        leave_out: Whether messages may suggest to leave the feature out of the dataset. Default: True.

    Returns:
        Array of shape (L, *shape), or (L,) if the shape of the feature is (1,) or (). Images are encoded, as objects of type
        bytes. Strings are objects of type str, and annotations are JSON texts of type bytes, see `parse_annotations`.

    Raises:
        DatasetError: If a value is missing, if its shape or dtype differs from the feature, or if it does not fit into the
            dtype of a batch.
        StorageError: If an image cannot be read.
    """
    advice = ". Record or convert the dataset again" + (", or leave the feature out with Dataset.without" if leave_out else "")
    if feature.is_language:
        # Row by row, because pyarrow 26 cannot combine chunks of structs with fields of type null.
        return _objects(_annotations(column, where, advice), bytes, where, advice)
    array = _storage(column.combine_chunks() if column.num_chunks != 1 else column.chunk(0))
    if feature.is_image:
        return _objects(_encoded(array, where, image), bytes, where, advice)
    if array.null_count:
        raise DatasetError(f"{where}: {array.null_count} of {len(array)} values are missing{advice}")
    shape, depth = feature.row_shape, 0
    expected = f"{where} must have shape {feature['shape']}, as meta/info.json says"
    # Each pass removes one level of lists. A number of shape (1,) may be stored in a list of length 1.
    while depth < len(shape) or is_list(array.type):
        size = shape[depth] if depth < len(shape) else 1
        if not is_list(array.type):
            raise DatasetError(f"{expected}, got {column.type}{advice}")
        if not _has_length(array, size):
            raise DatasetError(f"{expected}, got a value of another shape{advice}")
        array, depth = array.flatten(), depth + 1
        if array.null_count:
            raise DatasetError(f"{where}: {array.null_count} of its numbers are missing{advice}")
    array = _cast(array, feature, where, dtype or feature.numpy, advice)
    if feature.is_text:
        values = _objects(array.to_pylist(), str, where, advice)
    else:
        values = _numbers(array, feature, where, dtype or feature.numpy, advice)
    return values.reshape(len(column), *shape)


def _cast(array: pa.Array, feature: Feature, where: str, dtype: type[np.generic], advice: str) -> pa.Array:
    """Return an array without lists in the type of its feature if LeRobot casts it to that, in float64 if `dtype` is float64.

    LeRobot casts decimals, dates, times and durations to numbers, and all of these, bytes and numbers to text. Text for numbers
    is an error here.
    """
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if feature.is_text:
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        kind = kind if is_text or pa.types.is_nested(kind) or pa.types.is_null(kind) else pa.string()
    elif pa.types.is_decimal(kind) or pa.types.is_temporal(kind):
        kind = pa.type_for_alias(feature.dtype)
    if kind == array.type:
        return array
    try:
        return array.cast(pa.float64() if dtype is np.float64 else kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DatasetError(
            f"{where} must hold {feature.dtype} of shape {feature['shape']}, as meta/info.json says, got {array.type} that "
            f"cannot be cast to it: {error}{advice}"
        ) from error


def parse_annotations(text: bytes) -> list[dict[str, Any]] | None:
    """Return the annotations of a row of a language column. They are new objects, which a caller may change."""
    values: list[dict[str, Any]] | None = json.loads(text)
    return values


def _annotations(column: pa.ChunkedArray, where: str, advice: str) -> list[bytes]:
    """Return the annotations of each row as a JSON text.

    They are those of LeRobot's items: times are rounded to float32, and calls of tools in columns of type JSON are parsed. All
    rows of an episode usually have the same persistent annotations, so equal consecutive rows share one text.
    """
    kind = column.type
    # LeRobot's writer lets pyarrow infer the types, so a file without annotations has lists of nulls.
    item = kind.value_type if is_list(kind) else kind
    if not (pa.types.is_null(item) or (pa.types.is_struct(item) and is_list(kind))):
        raise DatasetError(f"{where} must hold lists of structs, as LeRobot writes language columns, got {kind}{advice}")
    texts: list[bytes] = []
    before: pa.Scalar | None = None
    for row in column:
        if before is None or not row.equals(before):
            before, values = row, row.as_py()
            try:
                for each in filter(None, values or ()):
                    if each.get("timestamp") is not None:
                        each["timestamp"] = _float32(each["timestamp"])
                    if each.get("tool_calls") is not None:
                        each["tool_calls"] = [
                            json.loads(call) if isinstance(call, str) else call for call in each["tool_calls"]
                        ]
                texts.append(json.dumps(values).encode())
            except (TypeError, ValueError, RecursionError) as error:  # bytes, dates, or a text that is not JSON
                raise DatasetError(f"{where} must hold annotations as LeRobot writes them: {error}{advice}") from error
        else:
            texts.append(texts[-1])
    return texts


def _float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _storage(array: pa.Array) -> pa.Array:
    """Return an array without its extension type. If the library `datasets` is imported, it registers types for matrices."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind))


def _has_length(array: pa.Array, size: int) -> bool:
    """Return whether all lists have the length `size`. No list may be null."""
    if pa.types.is_fixed_size_list(array.type):
        return bool(array.type.list_size == size or not len(array))
    return bool((np.diff(array.offsets.to_numpy()) == size).all())


def _numbers(array: pa.Array, feature: Feature, where: str, dtype: type[np.generic], advice: str) -> npt.NDArray[Any]:
    """Return numbers of a dtype. Floats are rounded to it. Other values that would change are an error."""
    kind = array.type
    if not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise DatasetError(
            f"{where} must hold {feature.dtype} of shape {feature['shape']}, as meta/info.json says, got {kind}{advice}"
        )
    values = array.to_numpy(zero_copy_only=False)
    if values.dtype == dtype:
        return values
    with np.errstate(invalid="ignore", over="ignore"):
        converted: npt.NDArray[Any] = values.astype(dtype, copy=False)
    if not feature.is_float and values.dtype != converted.dtype and (wrong := converted != values).any():
        raise DatasetError(
            f"{where} must hold {feature.dtype}, as meta/info.json says, which is {converted.dtype} in batches, got "
            f"{values[wrong][0]} ({kind}){advice}"
        )
    return converted


def _encoded(array: pa.Array, where: str, read: Callable[[str], bytes] | None) -> list[Any]:
    """Return the encoded bytes of images.

    The column contains bytes, structs of `bytes` and `path`, which the library `datasets` writes, or paths. If a struct has
    bytes, its path is ignored, because it is the former location of the image.
    """
    named = pa.nulls(len(array), pa.string())
    if pa.types.is_struct(array.type):
        columns = {field.name: pc.struct_field(array, field.name) for field in array.type}
        array, named = columns.get("bytes", pa.nulls(len(array), pa.binary())), columns.get("path", named)
    elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array, named = pa.nulls(len(array), pa.binary()), array
    encoded = array.to_pylist()
    for frame in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)).tolist():
        path = named[frame].as_py()
        if not isinstance(path, str):
            raise DatasetError(f"{where}: {array.null_count} of {len(array)} images are missing, the first of frame {frame}")
        if read is None or path.startswith("/") or "://" in path:
            raise DatasetError(
                f"{where}: the image of frame {frame} must be in its Parquet row, where LeRobot writes it, or in a file of the "
                f"dataset, whose path begins at its root, got {path[:200]!r}. Embed it on the machine that has the file, for "
                "example with lerobot.datasets.io_utils.embed_images, or leave the camera out with cameras=..."
            )
        try:
            encoded[frame] = read(path)
        except (DatasetError, StorageError) as error:
            raise prefixed(f"{where}: frame {frame}", error) from error
    return encoded


def _objects(values: list[Any], kind: type, where: str, advice: str) -> npt.NDArray[np.object_]:
    wrong = {type(value).__name__ for value in values if not isinstance(value, kind)}
    if wrong:
        raise DatasetError(f"{where} must hold {kind.__name__}, got {', '.join(sorted(wrong))}{advice}")
    objects = np.empty(len(values), object)
    objects[:] = values
    return objects
