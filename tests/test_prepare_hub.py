"""`dali-stream prepare` to a dataset repository and to a bucket of the Hub, through its API on loopback."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import _xet
from support import faults
from support.clouds import Hub, Xet
from support.datasets import tree
from support.slow import slow_after
from support.tools import prepared
from support.videos import loader

from dali_stream import Dataset, DatasetError, StorageError
from dali_stream.cli import main
from dali_stream.storage.hub import HubStore
from dali_stream.tools.preparation import state
from dali_stream.tools.preparation.run import status

TOKEN = "hf_s3cretT0ken"
FILE_MB = 0.02  # several files of each kind
ADDRESSES = ["hf://datasets/owner/robot", "hf://buckets/owner/robot", "hf://datasets/owner/robot@refs%2Fpr%2F1/deep/er"]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A new repository as the Hub makes it, and an empty bucket."""
    repos: dict[str, Any] = {"datasets/owner/robot": {".gitattributes": b"*.mp4 filter=lfs\n"}, "buckets/owner/robot": {}}
    with Hub(repos, token=TOKEN, page=3) as server:
        xet = Xet(server)
        monkeypatch.setattr(_xet, "get_xet_session", lambda: xet)
        monkeypatch.setattr(random, "random", lambda: 0.0)  # no pauses between attempts
        yield server


@pytest.fixture(scope="module")
def whole(small: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All files of a local run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    prepared(small, out, file_mb=FILE_MB)
    return tree(out)


def stored(hub: Hub, address: str) -> dict[str, bytes]:
    """All files below an address, without that of a new repository."""
    assert isinstance(hub.files, dict)
    start = f"{address.removeprefix('hf://').replace('@refs%2Fpr%2F1', '')}/"
    files = {path.removeprefix(start): data for path, data in hub.files.items() if path.startswith(start)}
    return {path: data for path, data in files.items() if path != ".gitattributes"}


@pytest.mark.slow
@pytest.mark.parametrize("address", ADDRESSES)
def test_the_new_dataset_is_read_from_the_hub(
    hub: Hub, small: Path, whole: dict[str, bytes], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"token": TOKEN, "endpoint": hub.url}
    report = prepared(small, address, file_mb=FILE_MB, out_storage_options=options)
    assert report.written == len([name for name in whole if not name.startswith("meta/")]) > 3
    assert stored(hub, address) == whole
    assert capsys.readouterr().err == ""  # no progress bars of uploads
    with contextlib.closing(Dataset(address, storage_options=options)) as new:
        assert isinstance(new.store, HubStore)
        with loader(new, shuffle=False) as a, loader(small, shuffle=False) as b:
            for left, right in zip(a, b, strict=True):
                assert left.keys() == right.keys()
                for key, value in left.items():
                    assert torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
    assert prepared(small, address, file_mb=FILE_MB, out_storage_options=options).written == 0
    assert status(address, options).state == "finished"


def test_a_repository_is_prepared_by_its_id(small: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    with Hub({"datasets/owner/robot": tree(small)}, token=TOKEN) as server:
        prepared("owner/robot", tmp_path / "out", file_mb=FILE_MB, storage_options={"token": TOKEN, "endpoint": server.url})
    new = tree(tmp_path / "out")
    assert new.keys() == whole.keys()
    assert all(new[path] == data for path, data in whole.items() if path != "meta/prepare.json")  # which names the commit


def test_the_command_takes_a_token_for_each_repository(
    hub: Hub, small: Path, whole: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    with Hub({"datasets/owner/robot": tree(small)}, token="hf_of_the_source") as source:
        read = json.dumps({"token": "hf_of_the_source", "endpoint": source.url})
        written = json.dumps({"token": TOKEN, "endpoint": hub.url})
        options = ["--storage-options", read, "--out-storage-options", written]
        assert main(["prepare", "owner/robot", ADDRESSES[0], "--file-mb", str(FILE_MB), "--jobs", "1", *options]) == 0
        assert main(["prepare", "owner/robot", ADDRESSES[0], "--status", "--json", "--out-storage-options", written]) == 0
    assert '"finished"' in capsys.readouterr().out
    new = stored(hub, ADDRESSES[0])
    assert all(new[path] == data for path, data in whole.items() if path != "meta/prepare.json")  # which names the commit


Break = Callable[[Hub, pytest.MonkeyPatch], None]


def refuse(*statuses: int | None) -> Break:
    """Some commits are answered with these statuses."""

    def start(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
        script = [None if code is None else faults.status(code) for code in statuses]
        hub.set_faults({"api/datasets/owner/robot/commit/main": script, "api/buckets/owner/robot/batch": list(script)})

    return start


def break_upload(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload breaks before its commit."""
    xet = Xet(hub, [None, None, RuntimeError("the connection broke")])
    monkeypatch.setattr(_xet, "get_xet_session", lambda: xet)


@pytest.mark.parametrize("address", slow_after(1, ADDRESSES[:2]))
@pytest.mark.parametrize("fault", [refuse(None, 500), refuse(*[None, 412] * 5), break_upload], ids=["500", "412", "upload"])
def test_an_upload_that_fails_is_repeated(
    hub: Hub, small: Path, whole: dict[str, bytes], address: str, fault: Break, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(hub, monkeypatch)
    prepared(small, address, file_mb=FILE_MB, out_storage_options={"token": TOKEN, "endpoint": hub.url})
    assert stored(hub, address) == whole


@pytest.mark.parametrize("address", ADDRESSES[:2])
def test_an_interrupted_run_continues(hub: Hub, small: Path, whole: dict[str, bytes], address: str) -> None:
    options: dict[str, Any] = {"file_mb": FILE_MB, "out_storage_options": {"token": TOKEN, "endpoint": hub.url}}

    def interrupt(state: Any) -> None:
        if state.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(small, address, progress=interrupt, **options)
    with pytest.raises(DatasetError):
        Dataset(address, storage_options=options["out_storage_options"])
    with pytest.raises(ValueError, match="another command, which differs in options"):
        prepared(small, address, **options, rows_per_group=7)
    assert 0 < prepared(small, address, **options).written < len(whole)
    assert stored(hub, address) == whole


@pytest.mark.parametrize("seconds_per_file", [1, 25])
def test_commits_have_finished_files_and_are_few(
    hub: Hub, small: Path, whole: dict[str, bytes], seconds_per_file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first commit has the plan. Then one a minute has the finished files, and two have the metadata and the report."""
    now, done = 0.0, 0

    def advance(status: Any) -> None:
        nonlocal now, done
        now, done = now + seconds_per_file * (status.done - done), status.done

    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    prepared(small, ADDRESSES[0], file_mb=FILE_MB, progress=advance, out_storage_options={"token": TOKEN, "endpoint": hub.url})
    assert stored(hub, ADDRESSES[0]) == whole
    record, files = {"meta/prepare.json"}, {path for path in whole if not path.startswith("meta/")}
    plan, *batches, metadata, report = hub.commits
    assert plan == report == record
    assert metadata == whole.keys() - files - record
    assert all(batch > record for batch in batches)
    assert [path for batch in batches for path in batch - record if path not in files] == []
    assert sum(len(batch - record) for batch in batches) == len(files)
    assert len(batches) == (1 if seconds_per_file == 1 else -(-len(files) // 3))


def test_no_commit_has_a_file_twice(hub: Hub, small: Path, recwarn: pytest.WarningsRecorder) -> None:
    """Of two contents of stats.json, the Hub could take either."""
    options = {"token": TOKEN, "endpoint": hub.url}
    prepared(small, ADDRESSES[0], episodes=[0], out_storage_options=options)
    assert [warning for warning in recwarn if "same file" in str(warning.message)] == []
    with contextlib.closing(Dataset(ADDRESSES[0], storage_options=options)) as new:
        assert new.stats["index"]["count"].tolist() == [Dataset(small).lengths[0]]


@pytest.mark.parametrize("address", ["hf://datasets/owner/nothing", "hf://buckets/owner/nothing"])
def test_a_repository_that_does_not_exist_is_named(hub: Hub, small: Path, address: str) -> None:
    with pytest.raises(StorageError, match=f"{address}: does not exist"):
        prepared(small, address, out_storage_options={"token": TOKEN, "endpoint": hub.url})


@pytest.mark.parametrize("address", ADDRESSES[:2])
def test_other_files_are_left_alone(hub: Hub, small: Path, address: str) -> None:
    hub.put(address.removeprefix("hf://"), {"notes.txt": b"mine"})
    with pytest.raises(ValueError, match="is not empty"):
        prepared(small, address, out_storage_options={"token": TOKEN, "endpoint": hub.url})
    assert stored(hub, address) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("address", ADDRESSES[:2])
def test_a_token_that_may_not_write_is_not_tried_again(hub: Hub, small: Path, address: str) -> None:
    path = f"api/{address.removeprefix('hf://')}/{'commit/main' if 'datasets' in address else 'batch'}"
    hub.set_faults({path: [faults.status(403)] * 10})
    with pytest.raises(StorageError, match="HTTP 403"):
        prepared(small, address, out_storage_options={"token": TOKEN, "endpoint": hub.url})
    assert sum(request.path.endswith(("/commit/main", "/batch")) for request in hub.requests) == 1
