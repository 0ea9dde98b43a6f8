"""S3 and other fsspec filesystems."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from support import faults
from support.clouds import S3
from support.servers import Server
from support.stores import CONTENT, Clock, failure, said

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage import RemoteStore, open_store
from dali_stream.storage.objects import FsspecTransport

FILES = {"set/meta/info.json": b"{}", "set/data/a b.parquet": CONTENT, "set/empty": b""}
ROOT, BIG = "s3://robots/set", "data/a b.parquet"


@pytest.fixture(autouse=True)
def _no_ambient_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with S3(FILES) as server:
        yield server


@pytest.mark.parametrize("root", [ROOT, "s3a://robots/set/"])
def test_objects_are_read_by_ranges(s3: S3, root: str) -> None:
    store = open_store(root, s3.options)
    assert store.remote
    assert store.read(BIG, 10, 5000) == CONTENT[10:5000]
    assert store.read(BIG, 0, 2 * len(CONTENT)) == CONTENT
    assert store.read(BIG, len(CONTENT), len(CONTENT) + 5) == b""
    assert store.read("empty", 0, 5) == b""
    assert store.size("meta/info.json") == 2
    assert store.traffic.fetched_bytes == 4990 + len(CONTENT)
    assert not store.exists("nothing")
    store.close()


def test_a_read_past_the_end_before_anything_is_known(s3: S3) -> None:
    assert open_store(ROOT, s3.options).read(BIG, len(CONTENT) + 5, len(CONTENT) + 9) == b""
    assert open_store(ROOT, s3.options).read("empty", 0, 9) == b""


def test_objects_are_listed(s3: S3) -> None:
    store = open_store(ROOT, s3.options)
    assert store.files("data") == [BIG]
    assert store.files("nothing") == []


def test_an_object_that_changes_is_an_error_and_not_a_mixture(s3: S3) -> None:
    s3.put("set/changing", CONTENT[:1000])
    store = open_store(ROOT, s3.options)
    assert store.read("changing", 0, 10) == CONTENT[:10]
    s3.put("set/changing", CONTENT[:1000][::-1])
    assert "changed during the run" in str(failure(store, "changing", 10, 20))
    s3.put("set/changing", b"short")
    assert "changed during the run" in str(failure(store, "changing", 10, 20))


def test_a_missing_object_or_bucket(s3: S3) -> None:
    assert isinstance(failure(open_store(ROOT, s3.options), "nothing"), DatasetError)
    error = failure(open_store("s3://no-such-bucket/set", s3.options), BIG)
    assert isinstance(error, DatasetError)
    assert "NoSuchBucket" in str(error)


def test_missing_and_refused_credentials_say_how_to_give_them(s3: S3) -> None:
    endpoint = {"endpoint_url": s3.endpoint}
    for options in (endpoint, endpoint | {"anon": True}):
        error = failure(open_store(ROOT, options), BIG)
        assert isinstance(error, StorageError)
        assert "access denied" in str(error)
        assert "{'anon': True}" in str(error)


@pytest.mark.parametrize(
    "fault", [faults.reset_inside, faults.short, faults.reset, faults.status(503, "0"), faults.hang_inside]
)
def test_faults_are_retried_by_our_rules(fault: faults.Fault) -> None:
    timeout = 0.3 if fault is faults.hang_inside else 60  # a busy machine answers late, which would be a retry more
    with Server({f"robots/{key}": data for key, data in FILES.items()}) as server:
        options = {"key": "k", "secret": "s", "endpoint_url": server.url, "config_kwargs": {"read_timeout": timeout}}
        store = open_store(ROOT, options, give_up_after_s=60)
        server.set_faults([fault, fault])
        assert store.read(BIG, 100, 90_000) == CONTENT[100:90_000]
        assert len(server.requests) == 3 or (len(server.requests) > 3 and fault is faults.hang_inside)
        store.close()


def test_the_stated_time_holds() -> None:
    with Server({f"robots/{key}": data for key, data in FILES.items()}) as server:
        store = open_store(ROOT, {"key": "k", "secret": "s", "endpoint_url": server.url}, give_up_after_s=0.5)
        server.set_faults([faults.drip] * 1000)
        assert "0.5 s are allowed" in str(failure(store, BIG, 0, 100_000))
        server.set_faults([faults.hang] * 1000)
        assert "0.5 s are allowed" in str(failure(store, BIG, 0, 100_000))
        store.close()


def test_a_host_that_never_was_reached_is_given_up_soon(clock: Clock, refusing: str) -> None:
    store = open_store(ROOT, {"key": "k", "secret": "s", "endpoint_url": refusing})
    message = str(failure(store, BIG))
    assert "EndpointConnectionError" in message
    assert "where 5 s are allowed" in message
    assert 1 < clock.now <= 5


def test_credentials_are_nowhere_to_be_seen(s3: S3, everything_logged: pytest.LogCaptureFixture) -> None:
    options = s3.options | {"secret": "s3cretkey", "token": "s3ssiontoken"}
    store = open_store(ROOT, options)
    store.read(BIG, 0, 10)
    store.files("data")
    errors = [failure(store, "nothing"), failure(open_store(ROOT, options | {"anon": True, "key": None}), BIG)]
    closed = open_store(ROOT, options | {"endpoint_url": "http://me:p4ssword@127.0.0.1:1"}, give_up_after_s=0.3)
    errors.append(failure(closed, BIG))
    text = said(everything_logged, *errors) + store.address
    assert [secret for secret in ("s3cretkey", "s3ssiontoken", "p4ssword", "Signature=") if secret in text] == []


def test_the_cache_keeps_objects(s3: S3, tmp_path: Path) -> None:
    for _ in range(2):
        store = open_store(ROOT, s3.options, cache_dir=tmp_path)
        assert store.read(BIG, 1000, 5000) == CONTENT[1000:5000]
    assert (store.traffic.cached_bytes, store.traffic.fetched_bytes) == (4000, 0)


@pytest.mark.parametrize(
    ("address", "module", "words"),
    [
        ("s3://robots/set", "s3fs", r"pip install 'dali-stream\[s3\]'"),
        ("gs://robots/set", "gcsfs", r"pip install 'dali-stream\[gcs\]'"),
        ("abfs://robots/set", "adlfs", "adlfs"),
        ("nonsense://robots/set", "json", "nonsense:// is unknown"),
    ],
)
def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch, address: str, module: str, words: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, address.partition(":")[0], raising=False)
    with pytest.raises(DatasetError, match=words):
        open_store(address)


def test_options_that_the_driver_does_not_take(s3: S3) -> None:
    store = open_store(ROOT, s3.options | {"config_kwargs": {"no_such_option": 2}})
    assert "check the address and storage_options" in str(failure(store, BIG))


def test_other_filesystems_look_at_the_version_with_each_read() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/robots/set/a", CONTENT[:1000])
    store = RemoteStore(FsspecTransport("memory://robots/set", None))
    assert store.read("a", 5, 2000) == CONTENT[5:1000]
    assert not store.exists("b")
    memory.pipe("/robots/set/a", CONTENT[:1000][::-1])
    assert "changed during the run" in str(failure(store, "a"))
    memory.rm("/robots", recursive=True)
