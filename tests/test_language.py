"""Language columns: lists of annotations in each row, as LeRobot 0.6 and later write them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.datasets import ROWS, Column, build
from support.servers import Server
from support.slow import slow_after

from dali_stream import Dataset, DatasetError, Loader, Mixture
from dali_stream.cli import main
from dali_stream.tools import sheet

LENGTHS = (6, 4)
KEYS = ("language_persistent", "language_events")
_COMMON = [("role", pa.string()), ("content", pa.string()), ("style", pa.string())]
_OTHERS = [("camera", pa.string()), ("tool_calls", pa.list_(pa.json_()))]
TYPES = {
    "language_persistent": pa.list_(pa.struct([*_COMMON, ("timestamp", pa.float32()), *_OTHERS])),
    "language_events": pa.list_(pa.struct([*_COMMON, *_OTHERS])),
}
CALL = {"type": "function", "function": {"name": "say", "arguments": {"text": "grüße ☃"}}}


def annotation(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "style": "subtask", "camera": None, "tool_calls": None} | more


def persistent(episode: int) -> list[dict[str, Any]]:
    """The annotations that all rows of an episode have."""
    return [annotation(f"step {step} of episode {episode}", timestamp=float(np.float32(0.1 * step))) for step in range(4)]


EVENTS: dict[int, list[dict[str, Any]] | None] = {  # by row; the others have an empty list
    1: [annotation("what is on the table?", style="vqa", camera="top"), annotation(None, style=None, tool_calls=[CALL])],
    4: None,
    7: [annotation("stop", tool_calls=[])],
}


def expected(row: int) -> dict[str, Any]:
    return {"language_persistent": persistent(int(row >= LENGTHS[0])), "language_events": EVENTS.get(row, [])}


def stored(annotations: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """With the calls of tools as texts, which is how a column of type JSON stores them."""
    return annotations and [
        each | {"tool_calls": each["tool_calls"] and [json.dumps(call) for call in each["tool_calls"]]} for each in annotations
    ]


def write(root: Path, version: str = "v3.0", is_inferred: bool = False, **options: Any) -> Path:
    """A dataset with both columns: of LeRobot's types, or as its writer lets Arrow infer them (0.1 is then a float64)."""
    rows = [expected(row) for row in range(sum(LENGTHS))]
    columns = {}
    for key in KEYS:
        typed = pa.array([stored(row[key]) for row in rows], storage_of(TYPES[key])).cast(TYPES[key])
        inferred = pa.array([rounded(row[key]) for row in rows])
        columns[key] = Column("language", [1], inferred if is_inferred else typed)
    columns["x"] = Column("float32", [1], np.arange(sum(LENGTHS)))
    return build(root, LENGTHS, columns, version=version, **options)


def rounded(annotations: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    return annotations and [
        each | ({"timestamp": round(each["timestamp"], 6)} if "timestamp" in each else {}) for each in annotations
    ]


def storage_of(kind: pa.DataType) -> pa.DataType:
    """The type with texts in place of JSON, from which Arrow casts."""
    fields = [
        field if field.name != "tool_calls" else pa.field("tool_calls", pa.list_(pa.string())) for field in kind.value_type
    ]
    return pa.list_(pa.struct(fields))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with both columns. Read only."""
    return write(tmp_path_factory.mktemp("language") / "set")


def assert_as_written(batch: dict[str, Any]) -> None:
    for place, row in enumerate(batch["index"].tolist()):
        assert {key: batch[key][place] for key in KEYS} == expected(row)


@pytest.mark.parametrize(
    "written", [{}, {"version": "v2.1"}, {"is_inferred": True}, {"is_inferred": True, "rows_per_group": 4}], ids=str
)
def test_each_sample_has_its_annotations(tmp_path: Path, written: dict[str, Any]) -> None:
    with Loader(write(tmp_path / "set", **written), batch_size=3, last_batch="partial") as loader:
        seen = []
        for _ in range(2):
            for batch in loader:
                assert_as_written(batch)
                seen += batch["index"].tolist()
                for annotations in batch["language_persistent"]:  # a change concerns no other sample, and no later epoch
                    annotations[0]["content"] = "changed"
                    annotations.clear()
    assert sorted(seen) == sorted([*range(sum(LENGTHS))] * 2)


def test_over_a_network_and_after_a_resume(root: Path) -> None:
    with Server(root) as server:
        with Loader(server.url, batch_size=2) as loader:
            assert_as_written(next(iter(loader)))
            state = loader.state_dict()
        with Loader(server.url, batch_size=2) as loader:
            loader.load_state_dict(state)
            rest = list(loader)
        assert len(rest) == sum(LENGTHS) // 2 - 1
        for batch in rest:
            assert_as_written(batch)


def test_through_a_graph_of_dali(root: Path) -> None:
    with Loader(root, batch_size=2, dali_graph=lambda nodes: nodes) as loader:
        for batch in loader:
            assert_as_written(batch)


def test_a_mixture_with_a_dataset_that_has_none(root: Path, tmp_path: Path) -> None:
    plain = build(tmp_path / "plain", [5], {"x": Column("float32", [1], np.arange(5))})
    with pytest.raises(ValueError, match="language_events"):
        Mixture({"with": root, "without": plain})
    with Loader(Mixture({"with": root, "without": plain}, missing="pad"), batch_size=5) as loader:
        seen = set()
        for batch in loader:
            for place, (name, row) in enumerate(zip(batch["dataset"], batch["index"].tolist(), strict=True)):
                values = {key: batch[key][place] for key in KEYS}
                assert values == (expected(row) if name == "with" else {key: [] for key in KEYS})
                seen.add(name)
        assert seen == {"with", "without"}


def test_they_can_be_left_out(root: Path) -> None:
    with Loader(Dataset(root).without(KEYS), batch_size=2) as loader:
        assert not set(KEYS) & set(next(iter(loader)))


def test_they_have_no_window(root: Path) -> None:
    with pytest.raises(ValueError, match="language_events"):
        Loader(root, batch_size=2, delta_timestamps={"language_events": [0.0]})


@pytest.mark.parametrize(
    "values", [pa.array([1] * 10), pa.array(["text"] * 10), pa.array([["text"]] * 10)], ids=["numbers", "text", "lists"]
)
def test_a_column_of_another_kind_is_an_error_with_a_remedy(tmp_path: Path, values: pa.Array) -> None:
    root = with_events(write(tmp_path / "set"), values)
    with (
        pytest.raises(DatasetError, match=r"language_events must hold lists of structs, .*Dataset\.without"),
        Loader(root, batch_size=2) as loader,
    ):
        next(iter(loader))


def with_events(root: Path, values: pa.Array) -> Path:
    table = pq.read_table(root / ROWS)
    place = table.column_names.index("language_events")
    pq.write_table(table.set_column(place, "language_events", values), root / ROWS)
    return root


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ([{"role": "user", "tool_calls": ["not JSON"]}], "Expecting value"),
        ([{"role": "user", "tool_calls": ["[" * 100_000]}], "recursion"),
        ([{"role": "user", "tool_calls": 7}], "not iterable"),
        ([{"role": "user", "timestamp": "soon"}], "could not convert"),
        ([{"role": b"bytes"}], "not JSON serializable"),
    ],
)
def test_a_broken_annotation_is_an_error_of_its_episode(tmp_path: Path, annotations: object, said: str) -> None:
    root = with_events(write(tmp_path / "set"), pa.array([annotations] * sum(LENGTHS)))
    with (
        pytest.raises(DatasetError, match=rf"episode \d: language_events must hold annotations .*{said}.*Dataset\.without"),
        Loader(root, batch_size=2) as loader,
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (pa.nulls(10), None),
        (pa.array([[None]] * 10), [None]),
        (pa.array([[{"content": "\\ud83d"}]] * 10), [{"content": "\\ud83d"}]),
        (pa.array([[{"timestamp": 1e300}]] * 10), [{"timestamp": float("inf")}]),
        (pa.array([[{"tool_calls": ['"\\ud83d"']}]] * 10), [{"tool_calls": ["\ud83d"]}]),
    ],
    ids=["nulls", "null annotation", "text", "large time", "lone surrogate"],
)
def test_unusual_annotations_are_delivered(tmp_path: Path, values: pa.Array, expected: object) -> None:
    with Loader(with_events(write(tmp_path / "set"), values), batch_size=2) as loader:
        for batch in loader:
            assert batch["language_events"] == [expected] * 2


def test_substitutes_have_annotations_of_their_own(tmp_path: Path) -> None:
    root = write(tmp_path / "set", version="v2.1")
    (root / "data/chunk-000/episode_000001.parquet").write_bytes(b"PAR1")
    with Loader(root, batch_size=5, shuffle=False, on_error="substitute", max_substitutes=0.9) as loader:
        batches = list(loader)
    for batch in batches:
        assert len({id(annotations) for annotations in batch["language_persistent"]}) == 5
    assert any(batch["is_substitute"].any() for batch in batches)


def test_annotations_that_repeat_in_each_row_stay_within_the_budget(tmp_path: Path) -> None:
    """LeRobot's writer puts all episodes of a file into one row group, whose encoding hides the repetition."""
    lengths, many = [50] * 40, [annotation(f"step {step} " + "x" * 50, timestamp=0.0) for step in range(20)]
    columns = {"language_persistent": Column("language", [1], pa.array([many] * sum(lengths)))}
    root = build(tmp_path / "set", lengths, columns, rows_per_group=sum(lengths))
    with Loader(root, batch_size=50, memory_budget="8MiB", consumers=2, episode_pool_size=2) as loader:
        for batch in loader:
            assert batch["language_persistent"] == [many] * 50
        assert loader.stats()["row_bytes"] < 8 << 20


def test_a_column_that_would_take_far_more_memory_than_the_file_is_an_error(tmp_path: Path) -> None:
    """A few kilobytes may encode millions of equal annotations."""
    bomb = pa.array([[annotation("a")] * 200_000] * 10, storage_of(TYPES["language_events"]))
    root = with_events(write(tmp_path / "set"), bomb)
    with pytest.raises(DatasetError, match="Invalid column language_events"), Loader(root, batch_size=2) as loader:
        next(iter(loader))


@pytest.mark.usefixtures("doctor_here")
@pytest.mark.parametrize("is_inferred", slow_after(1, [False, True]))
def test_commands_know_them(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_inferred: bool) -> None:
    root = write(tmp_path / "set", is_inferred=is_inferred)
    assert main(["info", str(root)]) == 0
    assert capsys.readouterr().out.count("language") >= 2
    assert main(["doctor", str(root)]) == 0
    assert main(["prepare", str(root), str(tmp_path / "copy"), "--jobs", "1"]) == 0
    with Loader(root, batch_size=2) as one, Loader(tmp_path / "copy", batch_size=2) as other:
        for batch, copy in itertools.zip_longest(one, other):
            assert_as_written(copy)
            assert {key: batch[key] for key in KEYS} == {key: copy[key] for key in KEYS}
    first, second = (pq.read_table(place / ROWS) for place in (root, tmp_path / "copy"))
    assert first.schema.field("language_events") == second.schema.field("language_events")
    assert first["language_events"].to_pylist() == second["language_events"].to_pylist()


def test_a_dataset_has_the_tools_that_it_declares(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    assert Dataset(root).tools == []
    path, tools = root / "meta/info.json", [{"type": "function", "function": {"name": "say"}}]
    info = json.loads(path.read_text())
    path.write_text(json.dumps(info | {"tools": tools}))
    dataset = Dataset(root)
    dataset.tools[0].clear()
    assert dataset.tools == tools
    path.write_text(json.dumps(info | {"tools": ["say"]}))
    with pytest.raises(DatasetError, match=r"^Invalid tools in .*info.json: must be a list of JSON objects, got \['say'\]"):
        Dataset(root)


def test_a_preview_has_the_first_line_of_each_column(tmp_path: Path) -> None:
    root = write(tmp_path / "set")
    with Loader(root, batch_size=4, shuffle=False) as loader:
        shown = sheet.samples(next(iter(loader)), [], {})
    # The annotations are at 0, 0.1, 0.2 and 0.3 s, and a row has that of its time.
    now = [f"assistant: step {step} of episode 0" for step in range(4)]
    events = {1: ["assistant: what is on the table?"]}
    heights = list[int]()
    for notes in (shown, [dataclasses.replace(sample, notes=()) for sample in shown]):
        sheet.save(tmp_path / "sheet.png", "title", notes, columns=2)
        with Image.open(tmp_path / "sheet.png") as image:
            heights.append(image.height)
    assert heights[0] > heights[1]
    assert [sample.notes for sample in shown] == [[now[row], *events.get(row, [])] for row in range(4)]
    shown = sheet.samples(
        {"index": np.arange(1), "language_events": [[annotation(None)]]}
        | dict.fromkeys(("episode_index", "frame_index"), np.zeros(1, np.int64)),
        [],
        {},
    )
    assert shown[0].notes == ["1 without text"]
