"""What a notebook shows: tables of datasets and Loaders, a picture of a batch, and commands in cells."""

from __future__ import annotations

import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nbclient import NotebookClient
from nbformat import v4
from PIL import Image
from support.datasets import TOP

from dali_stream import Dataset, Loader, Mixture, tools

PATIENCE_S = 300  # of a cell on a busy machine


class Table(HTMLParser):
    """Rows of the table that an object shows in a notebook, and the names of all elements."""

    def __init__(self, shown: object) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.elements: set[str] = set()
        self.caption = ""
        self.feed(shown._repr_html_())  # type: ignore[attr-defined]  # the protocol of IPython

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.elements.add(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1].append(data)
        else:
            self.caption += data


def test_a_dataset_shows_its_sizes_and_features(small: Path) -> None:
    dataset = Dataset(small, episodes=[0, 1])
    table = Table(dataset)
    rows = dict(table.rows)
    assert (table.caption, rows["address"], rows["version"], rows["episodes"]) == ("Dataset", str(small), "v3.0", "2")
    assert rows["frames"].startswith(f"{dataset.num_frames} at {dataset.fps:g} fps, ")
    assert {key: rows[key] for key in dataset.features} == {
        key: f"{feature.dtype} {feature.shape}" for key, feature in dataset.features.items()
    }


def test_a_loader_shows_its_position_and_decoders(small: Path) -> None:
    with Loader(small, batch_size=8, device="cpu", in_process=True) as loader:
        assert dict(Table(loader).rows)["next batch"] == "0 of epoch 0"
        batches = iter(loader)
        next(batches)
        rows = dict(Table(loader).rows)
        assert (rows["next batch"], rows["batches of an epoch"]) == ("1 of epoch 0", f"{len(loader)} of 8 samples")
        assert rows[TOP] == f"{loader.routes[TOP].decoder}: {loader.routes[TOP].reason}"
        batches.close()  # type: ignore[attr-defined]  # a generator
    assert dict(Table(loader).rows)["next batch"] == "none, since it is closed"


def test_a_mixture_shows_the_share_of_each_dataset(small: Path) -> None:
    mixture = Mixture({"a <b>": Dataset(small, episodes=[0]), "c": Dataset(small)}, weights={"a <b>": 1, "c": 3})
    table = Table(mixture)
    rows = dict(table.rows)
    assert rows["a <b>"].startswith("0.25 of the samples, from ")
    assert rows["samples of an epoch"] == str(len(mixture))
    assert table.elements == {"table", "caption", "tr", "th", "td"}


def test_a_picture_shows_a_batch_of_a_run(small: Path) -> None:
    options: dict[str, Any] = {"batch_size": 3, "image_size": (48, 64), "seed": 5, "device": "cpu"}
    picture = tools.preview(small, epoch=1, batch=2, plots=True, **options)
    with Image.open(io.BytesIO(picture._repr_png_())) as shown:  # what a cell displays
        assert shown.size == picture.size
    content = json.loads(picture.info["dali_stream"])
    with Loader(small, **options, image_dtype="uint8", in_process=True) as loader:
        batch = loader.batch_at(1, 2)
    assert [frame["index"] for frame in content["frames"] if frame["camera"] == TOP] == batch["index"].tolist()
    assert {plot["key"] for plot in content["plots"]} >= {"action"}
    place = next(frame for frame in content["frames"] if frame["camera"] == TOP)
    left, top = place["box"][:2]
    pixels = np.asarray(picture)[top : top + 48, left : left + 64]
    np.testing.assert_array_equal(pixels, batch[TOP][0].permute(1, 2, 0).numpy())


@pytest.mark.slow
def test_a_command_in_a_cell_writes_no_terminal_codes_but_colours(small: Path, tmp_path: Path) -> None:
    """A cell gives its commands a terminal, but displays neither a cursor that moves nor lines that disappear."""
    command = f"{sys.executable} -m dali_stream preview {small} --out sheet.png --batch-size 2 --device cpu"
    call = f"from dali_stream.cli import main\nmain({command.split()[3:]!r})"
    script = f"%%bash\n{command}"
    terminal = f"!{sys.executable} -c 'import sys; print(sys.stderr.isatty())'"
    book = v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in (f"!{command}", call, script, terminal)])
    NotebookClient(book, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *texts, is_terminal = ["".join(part.get("text", "") for part in cell.outputs) for cell in book.cells]
    assert is_terminal.strip() == "True"  # otherwise, this test would not show anything
    for text in texts:
        assert "sheet.png: 2 samples" in text
        plain = re.sub(r"\x1b\[[\d;]*m", "", text).replace("\r\n", "\n")
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", plain), repr(text)
