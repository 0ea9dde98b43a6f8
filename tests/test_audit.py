"""Audits of the DALI route: samples are decoded by torchcodec, too. On DALI's CPU backend, with VP9."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn
from support.batches import equal
from support.datasets import CAMERAS, TOP
from support.slow import slow

from dali_stream import Dataset, DecodeError, Loader
from dali_stream.order.uniforms import audited
from dali_stream.pipeline import graph

BATCH = 8
WINDOW = {TOP: [-0.1, 0.0, 0.05]}
ARGUMENTS: dict[str, Any] = {"batch_size": BATCH, "device": "cpu", "image_dtype": "uint8"}


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """DALI's decoder delivers the frames of the sample before, as one that has not written its output would."""
    decoded, order = graph._decoded, [BATCH - 1, *range(BATCH - 1)]
    monkeypatch.setattr(graph, "_decoded", lambda *given: fn.permute_batch(decoded(*given), indices=order))


@pytest.mark.slow
@pytest.mark.parametrize(("image_size", "image_dtype"), [(None, "uint8"), ((96, 120), "float32")])
def test_audits_of_right_frames_change_nothing(vp9_demo: Path, image_size: tuple[int, int] | None, image_dtype: str) -> None:
    arguments = ARGUMENTS | {"image_size": image_size, "image_dtype": image_dtype, "delta_timestamps": WINDOW, "decode": "dali"}
    with Loader(vp9_demo, audit=1, **arguments) as loader:
        with_audits = list(loader)
        assert loader.stats()["audited"] >= len(CAMERAS) * BATCH * len(with_audits)
    with Loader(vp9_demo, audit=0, **arguments) as loader:
        assert all(equal(first, second) for first, second in zip(with_audits, loader, strict=True))
        assert loader.stats()["audited"] == 0


def test_the_first_sample_of_each_file_is_audited(vp9_demo: Path) -> None:
    with Loader(vp9_demo, audit=1 << 40, decode="dali", **ARGUMENTS) as loader:
        for _ in loader:
            pass
        files = sum(len(np.unique(loader.dataset.source.videos[camera].file)) for camera in CAMERAS)
        assert loader.stats()["audited"] == files


@pytest.mark.usefixtures("swapped")
@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("window", [None, slow(WINDOW)])
def test_a_swapped_frame_is_an_error_and_is_not_delivered(
    vp9_demo: Path, augmented: bool, window: dict[str, list[float]] | None
) -> None:
    dali_graph = (lambda nodes: dict(nodes)) if augmented else None
    arguments = ARGUMENTS | {"delta_timestamps": window, "dali_graph": dali_graph}
    with (
        Loader(vp9_demo, decode="dali", **arguments) as loader,
        pytest.raises(DecodeError, match=rf"^{TOP}: episode \d+, frame \d+: .*\.mp4: DALI's frames must differ") as raised,
    ):
        next(iter(loader))
    assert "DALI's frames must differ from FFmpeg's by at most 4 of 255 on average, got " in str(raised.value)
    assert str(raised.value).endswith('. Use decode="auto" in place of decode="dali"')


def test_the_frames_of_a_graph_that_changes_them_are_audited_before_it(vp9_demo: Path) -> None:
    def flipped(nodes: dict[str, Any]) -> dict[str, Any]:
        return nodes | {camera: fn.flip(255 - nodes[camera]) for camera in CAMERAS}

    with Loader(vp9_demo, audit=1, decode="dali", dali_graph=flipped, **ARGUMENTS) as loader:
        batch = next(iter(loader))
    assert set(CAMERAS) <= set(batch)
    assert not [key for key in batch if key.startswith("audited")]


def test_without_audits_a_graph_may_drop_a_camera(vp9_demo: Path) -> None:
    with Loader(vp9_demo, audit=0, decode="dali", dali_graph=lambda nodes: {"top": nodes[TOP]}, **ARGUMENTS) as loader:
        assert next(iter(loader))["top"].shape[0] == BATCH


def test_audit_must_not_be_negative(vp9_demo: Path) -> None:
    with pytest.raises(ValueError, match=r"audit must be .*, got -1"):
        Loader(Dataset(vp9_demo), audit=-1)


def test_about_one_in_n_positions_is_audited() -> None:
    position = np.arange(200_000)
    for every in (1, 10, 1000):
        chosen = audited(position, 3, every)
        assert abs(chosen.mean() * every - 1) < 0.3
        for world in (2, 8):  # each rank has its share
            assert all(chosen[rank::world].any() for rank in range(world))
    assert (audited(position, 0, 10) != audited(position, 1, 10)).any()
