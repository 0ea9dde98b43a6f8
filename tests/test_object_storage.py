"""S3, Google Cloud Storage, Azure and fsspec filesystems."""

from __future__ import annotations

import base64
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from support import faults
from support.clouds import S3, Objects
from support.servers import Handler, Server
from support.stores import CONTENT, Clock, failure, said

from dali_stream import Dataset
from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage import Store, open_store
from dali_stream.storage.filesystem import FsspecStore
from dali_stream.storage.logs import private
from dali_stream.storage.object_options import Bucket

FILES = {"set/meta/info.json": b"{}", "set/data/a b.parquet": CONTENT, "set/empty": b""}
HANG_GUARD_S = 60.0
ROOT, BIG = "s3://robots/set", "data/a b.parquet"


@pytest.fixture(autouse=True)
def _no_ambient_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "AZURE_"))]:
        monkeypatch.delenv(name)
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
    assert "s3://no-such-bucket/set: no such bucket (HTTP 404, NoSuchBucket)" in str(error)
    assert "no such file" not in str(error)
    with pytest.raises(DatasetError, match="no such bucket"):
        Dataset("s3://no-such-bucket/set", storage_options=s3.options)


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
        options = {"key": "k", "secret": "s", "endpoint_url": server.url, "timeout": timeout}
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
    assert "cannot connect" in message
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
        assert store.read_all("meta/info.json") == b"{}"
    assert store.traffic.fetched_bytes == 0


# -- each cloud


NUMBERS = {f"robots/set/n/{number}": bytes(number) for number in range(5)}


def opened(cloud: str, server: Server, **arguments: Any) -> Store:
    options = {"anon": True, "endpoint_url": server.url, "timeout": 60}
    if cloud == "az":
        options["account_name"] = "somebody"
    return open_store(f"{cloud}://robots/set", options | arguments.pop("options", {}), **{"give_up_after_s": 60.0, **arguments})


@pytest.fixture
def objects() -> Iterator[Objects]:
    with Objects({f"robots/{key}": data for key, data in FILES.items()} | NUMBERS) as server:
        yield server


@pytest.fixture(params=["s3", "gs", "az"])
def cloud(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_cloud_is_read_and_listed(objects: Objects, cloud: str) -> None:
    store = opened(cloud, objects)
    assert store.read(BIG, 10, 5000) == CONTENT[10:5000]
    assert store.read("empty", 0, 9) == b""
    assert (store.size("meta/info.json"), store.exists("nothing")) == (2, False)
    assert store.files("n") == [f"n/{number}" for number in range(5)]
    before = len(objects.requests)
    assert [store.size(f"n/{number}") for number in range(5)] == list(range(5))
    assert len(objects.requests) == before


@pytest.mark.parametrize("name", ["a b#c%.bin", "100%25/ä?+&=.mp4", "x=y/~'(1)!*.bin"])
def test_any_name_of_an_object_is_read(objects: Objects, cloud: str, name: str) -> None:
    assert isinstance(objects.files, dict)
    objects.files[f"robots/set/{name}"] = CONTENT[:99]
    store = opened(cloud, objects)
    assert store.read(name, 5, 50) == CONTENT[5:50]
    assert store.files(name.partition("/")[0] if "/" in name else "data") == [name if "/" in name else BIG]


def test_many_threads_look_for_credentials_once(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, open_bucket = [], Bucket.open
    monkeypatch.setattr(Bucket, "open", lambda self: asked.append(time.sleep(0.01)) or open_bucket(self))
    store = opened("s3", objects)
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(lambda _: store.read(BIG, 0, 9), range(32))) == {CONTENT[:9]}
    assert len(asked) == 1


def test_each_read_after_the_first_asks_for_the_same_version(objects: Objects, cloud: str) -> None:
    store = opened(cloud, objects)
    for at in range(3):
        assert store.read(BIG, at, at + 9) == CONTENT[at : at + 9]
    tags = [request.headers.get("if-match") for request in objects.requests]
    assert tags == [None, tags[1], tags[1]]
    assert tags[1]
    assert isinstance(objects.files, dict)
    objects.files[f"robots/set/{BIG}"] = CONTENT[::-1]
    assert "changed during the run" in str(failure(store, BIG, 100, 200))


MENDED = [
    faults.reset,
    faults.reset_inside,
    faults.short,
    faults.short_length,
    faults.long_length,
    faults.late,
    faults.content_range(shift=3),
    faults.content_range(missing=True),
    faults.garbage,
    *(faults.status(code) for code in (408, 425, 429, 500, 502, 503, 504)),
]


@pytest.mark.parametrize("fault", MENDED)
def test_a_fault_that_passes_costs_a_retry_and_no_bytes_are_wrong(objects: Objects, cloud: str, fault: faults.Fault) -> None:
    store = opened(cloud, objects)
    objects.set_faults([fault, fault])
    assert store.read(BIG, 100, 90_000) == CONTENT[100:90_000]
    assert store.traffic.retries == 2
    assert store.read(BIG, 0, len(CONTENT)) == CONTENT


LASTING = [
    (faults.status(401), "access denied"),
    (faults.status(403), "access denied"),
    (faults.status(404), "no such file"),
    (faults.status(418), "HTTP 418"),
    (faults.ignored_range, "does not support byte ranges"),
    (faults.changed_tag, "changed during the run"),
    (faults.changed_size, "changed during the run"),
    (faults.content_range(total=5), "changed during the run"),
]


@pytest.mark.parametrize(("fault", "words"), LASTING)
def test_a_fault_that_stays_is_an_error_at_once(objects: Objects, cloud: str, fault: faults.Fault, words: str) -> None:
    store = opened(cloud, objects)
    store.read(BIG, 0, 10)
    objects.set_faults([fault] * 50)
    error = failure(store, BIG, 5, 20_000)
    assert words in str(error)
    assert f"{cloud}://robots/set/{BIG}" in str(error)
    assert isinstance(error, DatasetError if "no such file" in words else StorageError)
    assert store.traffic.retries == 0


@pytest.mark.parametrize("fault", [faults.hang, faults.hang_inside, faults.drip, faults.drip_headers, faults.reset])
def test_no_fault_outlasts_the_stated_time(objects: Objects, fault: faults.Fault) -> None:
    objects.set_faults([fault] * 1000)
    assert "0.5 s are allowed" in str(failure(opened("s3", objects, give_up_after_s=0.5), BIG, 0, 100_000))


SECRETS = {
    "s3": {"anon": None, "key": "key", "secret": "s3cret", "token": "t0ken"},
    "gs": {},
    "az": {"anon": None, "sas_key": "sv=1&sig=s1gnature"},
}


@pytest.fixture
def elsewhere(objects: Objects) -> Iterator[Objects]:
    """Another host with the same objects. Its address has a name, and that of `objects` has a number."""
    with Objects(dict(objects.files)) as server:
        server.url = server.url.replace("127.0.0.1", "localhost")
        yield server


def redirected(cloud: str, objects: Objects, target: str, **client: Any) -> Store:
    """A store with credentials and headers of the user, whose server redirects all requests to `target`."""
    objects.redirect = target
    headers = {"default_headers": {"x-own": "0wn"}}
    return opened(cloud, objects, options=SECRETS[cloud] | {"client_options": headers | client})


def test_a_redirect_to_another_host_is_not_followed(objects: Objects, elsewhere: Objects, cloud: str) -> None:
    store = redirected(cloud, objects, elsewhere.url)
    errors = [failure(store, BIG)]
    for call in (lambda: store.size(BIG), lambda: store.files("data")):
        with pytest.raises(StorageError) as caught:
            call()
        errors.append(caught.value)
    assert all(f"{cloud}://robots/set/data" in str(error) and "redirects to another host" in str(error) for error in errors)
    assert elsewhere.requests == []
    assert len(objects.requests) == 3
    remedies = [
        opened(cloud, objects, options=SECRETS[cloud] | {"endpoint_url": elsewhere.url}),
        redirected(cloud, objects, elsewhere.url, proxy_excludes="localhost"),
    ]
    for remedied in remedies:
        assert remedied.read(BIG, 10, 5000) == CONTENT[10:5000]


@pytest.mark.parametrize("target", ["http://169.254.169.254", "http://metadata.google.internal", "https://169.254.169.254"])
def test_a_redirect_to_the_credentials_of_the_machine_is_not_followed(objects: Objects, target: str) -> None:
    assert "redirects to another host" in str(failure(redirected("s3", objects, target), BIG))


def test_a_redirect_within_the_host_is_followed(objects: Objects, cloud: str) -> None:
    objects.set_faults([faults.redirect(f"{objects.url}/{{path}}")])
    assert opened(cloud, objects, options=SECRETS[cloud]).read("meta/info.json", 0, 9) == b"{}"


def test_a_body_that_does_not_end_is_not_read(objects: Objects, cloud: str) -> None:
    sent: list[int] = []

    def endless(handler: Handler, data: bytes, fields: dict[str, str]) -> None:
        handler.close_connection = True
        handler.head(206, len(data) + (500 << 20), fields)
        with suppress(OSError):
            for part in [data, *[bytes(1 << 20)] * 500]:
                handler.body(part)
        sent.append(handler.request_seen.sent)

    objects.set_faults([endless, endless])
    store = opened(cloud, objects)
    assert store.read(BIG, 100, 41_000) == CONTENT[100:41_000]
    store.close()
    assert store.traffic.retries == 2
    while len(sent) < 2:
        os.sched_yield()
    assert max(sent) < 100 << 20  # what the buffers of the sockets hold
    assert store.traffic.fetched_bytes < 20 << 20


def test_closing_ends_a_read_that_waits(objects: Objects) -> None:
    started, errors = threading.Event(), []

    def hang(*arguments: Any) -> None:
        started.set()
        faults.hang(*arguments)

    objects.set_faults([hang])
    store = opened("s3", objects, options={"timeout": 500}, give_up_after_s=1000)
    reader = threading.Thread(target=lambda: errors.append(failure(store, BIG)))
    reader.start()
    assert started.wait(HANG_GUARD_S)
    store.close()
    reader.join(HANG_GUARD_S)
    assert "closed" in str(errors[0])
    assert store.read(BIG, 0, 10) == CONTENT[:10]


def test_ctrl_c_ends_a_read_that_waits_and_its_process(objects: Objects) -> None:
    started = threading.Event()

    def hang(*arguments: Any) -> None:
        started.set()
        faults.hang(*arguments)

    objects.set_faults([hang])
    options = {"anon": True, "endpoint_url": objects.url, "timeout": 500}
    program = (
        "import signal; from dali_stream.storage import open_store; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"open_store({ROOT!r}, {options!r}, give_up_after_s=1000).read({BIG!r}, 0, 10)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as reader:
        try:
            assert started.wait(HANG_GUARD_S)
            reader.send_signal(signal.SIGINT)
            errors = reader.communicate(timeout=HANG_GUARD_S)[1]
        finally:
            reader.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_no_more_than_32_requests_at_a_time_to_an_endpoint() -> None:
    with Objects({f"robots/set/{BIG}": CONTENT}, latency_s=0.03) as server, ThreadPoolExecutor(60) as pool:
        stores = [opened("s3", server), opened("s3", server)]
        parts = pool.map(lambda at: stores[at % 2].read(BIG, at * 1000, at * 1000 + 1000), range(200))
        assert b"".join(parts) == CONTENT[:200_000]
        assert 8 <= server.peak <= 32


def test_a_forked_process_is_told_that_it_cannot_read(objects: Objects) -> None:
    """obstore's threads do not live in it: without a check, it would hang."""
    store = opened("s3", objects)
    store.read(BIG, 0, 10)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=lambda: theirs.send(str(failure(store, BIG))))
    child.start()
    assert ours.poll(HANG_GUARD_S)
    assert "spawn or forkserver" in ours.recv()
    child.join()


# -- options and credentials


@pytest.mark.parametrize(
    ("address", "options", "words"),
    [
        ("s3://robots", {"acces_key": "s3cret"}, r"must be anon, .*, token or options of obstore's S3Store, got 'acces_key'$"),
        ("s3://robots", {"client_kwargs": {"verify": "s3cret"}}, "must be endpoint_url or region_name, got verify"),
        ("s3://robots", {"client_options": {"no_such": "s3cret"}}, "got 'no_such'"),
        ("s3://robots", {"timeout": 0}, r"storage_options\['timeout'\] must be a positive number of seconds, got 0"),
        ("s3://", {}, "address must name a bucket, .*, got"),
        ("gs://robots", {"consistency": "md5"}, "options of obstore's GCSStore, got 'consistency'$"),
        ("gs://robots", {"token": {"private_key": "s3cret"}}, "must be the path to a file of credentials, got a dict"),
        ("gs://robots", {"token": "google_default"}, "got 'google_default'. Leave it out"),
        ("gs://robots", {"token": "anon"}, "got 'anon'. .*use 'anon': True"),
        ("s3://robots", {"allow_http": "key: s3cret"}, "option 'allow_http' must be a value that obstore accepts, such as"),
        ("s3://robots", {"allow_http": "s3cret", "unsigned_payload": "s3cret"}, "must have values that obstore accepts"),
        ("az://robots", {"account_name": "a", "read_timeout": 60}, "option 'read_timeout' must be a value .*'30s' for a time$"),
        ("az://robots", {"azure_storage_account_name": "a", "azure_read_timeout": 60}, "option 'azure_read_timeout' must be a"),
        ("az://robots", {}, "must have account_name"),
        ("az://robots", {"account_name": "a", "block": 2}, "options of obstore's AzureStore, got 'block'$"),
    ],
)
def test_what_is_not_understood_is_an_error_that_names_it(address: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        open_store(address, options)
    assert "s3cret" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    ("cloud", "option", "remedy"),
    [
        (
            "s3",
            "config_kwargs",
            "'timeout', or obstore's 'client_options' with 'connect_timeout', and for the addressing style obstore's "
            "'virtual_hosted_style_request'",
        ),
        ("s3", "password", "obstore's 'secret_access_key'"),
        ("s3", "profile", "the environment variable AWS_PROFILE"),
        ("s3a", "region_name", "obstore's 'region'"),
        ("s3", "requester_pays", "obstore's 'request_payer'"),
        ("s3", "use_ssl", "'endpoint_url' with http:// or https://"),
        ("s3", "username", "obstore's 'access_key_id'"),
        ("gs", "project", "obstore's 'client_options' with {'default_headers': {'x-goog-user-project': PROJECT}}"),
        ("gcs", "requester_pays", "obstore's 'client_options' with {'default_headers': {'x-goog-user-project': PROJECT}}"),
        ("gs", "requests_timeout", "'timeout', or obstore's 'client_options' with 'connect_timeout'"),
        ("gs", "session_kwargs", "obstore's 'client_options'"),
        ("az", "account_host", "obstore's 'endpoint'"),
        ("az", "connection_string", "obstore's 'account_name', 'account_key' and 'endpoint'"),
        ("az", "connection_timeout", "'timeout', or obstore's 'client_options' with 'connect_timeout'"),
        ("az", "credential", "obstore's 'account_key' or 'sas_key'"),
    ],
)
def test_other_names_of_fsspec_are_refused_with_what_to_use(cloud: str, option: str, remedy: str) -> None:
    message = f"{cloud}://robots: storage option {option!r} is not supported, use {remedy}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        open_store(f"{cloud}://robots", {option: "s3cret"})


KEY, AZURE = {"key": "AKEY", "secret": "s3cret"}, {"account_name": "me"}


@pytest.mark.parametrize(
    ("cloud", "options", "own", "header", "value"),
    [
        ("s3", KEY, {"access_key_id": "AKEY", "secret_access_key": "s3cret"}, "authorization", "Credential=AKEY/"),
        ("s3", KEY | {"token": "t0ken"}, {"aws_session_token": "t0ken"} | KEY, "x-amz-security-token", "t0ken"),
        ("s3", {"anon": True}, {"skip_signature": True}, "authorization", None),
        ("gs", {"anon": True}, {"skip_signature": True}, "authorization", None),
        ("az", {"anon": True} | AZURE, {"skip_signature": True} | AZURE, "authorization", None),
        ("az", AZURE, {"azure_storage_account_name": "me"}, "authorization", "SharedKey me:"),
    ],
)
def test_common_options_send_what_those_of_obstore_send(
    objects: Objects, cloud: str, options: dict[str, Any], own: dict[str, Any], header: str, value: str | None
) -> None:
    """Options with the names of fsspec, including the endpoint, and with the names of obstore."""
    key = {"account_key": "Zm9v"} if value and cloud == "az" else {}
    endpoint = {"s3": "endpoint", "gs": "base_url", "az": "azure_storage_endpoint"}[cloud]
    for named in (options | {"endpoint_url": objects.url}, own | {endpoint: objects.url}):
        assert open_store(f"{cloud}://robots/set", named | key).read(BIG, 0, 10) == CONTENT[:10]
        sent = objects.requests[-1].headers.get(header)
        assert sent is None if value is None else value in (sent or "")


def test_client_kwargs_name_the_endpoint_and_the_region(objects: Objects) -> None:
    for options in (
        {"client_kwargs": {"endpoint_url": objects.url, "region_name": "eu-west-1"}},
        {"client_kwargs": {"endpoint_url": objects.url}, "region": "eu-west-1"},
        {"endpoint_url": objects.url, "client_kwargs": {"region_name": "eu-west-1"}},
    ):
        assert open_store(ROOT, options | KEY).read(BIG, 0, 10) == CONTENT[:10]
        assert "/eu-west-1/s3/" in objects.requests[-1].headers["authorization"]


def test_the_token_of_google_is_a_file_of_credentials(objects: Objects, tmp_path: Path) -> None:
    """Requests are signed with its key."""
    key = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    account = {"type": "service_account", "client_email": "robot@lab", "private_key_id": "7", "private_key": key.decode()}
    path = tmp_path / "credentials.json"
    path.write_text(json.dumps(account))
    for named in ({"token": path}, {"token": str(path)}, {"google_application_credentials": str(path)}):
        assert open_store("gs://robots/set", named | {"endpoint_url": objects.url}).read(BIG, 0, 10) == CONTENT[:10]
        payload = objects.requests[-1].headers["authorization"].removeprefix("Bearer ").split(".")[1]
        assert json.loads(base64.urlsafe_b64decode(payload + "=="))["iss"] == "robot@lab"


def test_requests_carry_what_the_options_say(objects: Objects) -> None:
    url = {"endpoint_url": objects.url}
    pays = {"default_headers": {"x-goog-user-project": "mine"}}
    for address, options, header, value in (
        ("s3", {"aws_endpoint": objects.url, "region": "eu-1"} | KEY, "authorization", "/eu-1/s3/"),
        ("s3", url | KEY | {"request_payer": True}, "x-amz-request-payer", "requester"),
        ("gs", url | {"anon": True, "client_options": pays}, "x-goog-user-project", "mine"),
        ("gs", url | {"bearer_token": "b3arer"}, "authorization", "Bearer b3arer"),
    ):
        assert open_store(f"{address}://robots/set", options).read(BIG, 0, 10) == CONTENT[:10]
        assert value in objects.requests[-1].headers[header]
    store = open_store("abfss://robots@me.dfs.core.windows.net/set", url | {"sas_token": "sig=s1g"})
    assert store.read(BIG, 0, 10) == CONTENT[:10]
    assert objects.requests[-1].query == "sig=s1g"
    assert store.address == "abfss://robots@me.dfs.core.windows.net/set"


def signer(server: Server) -> str:
    """The access key that the last request was signed with."""
    return server.requests[-1].headers["authorization"].partition("Credential=")[2].partition("/")[0]


def test_credentials_of_the_environment(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", objects.url)
    for _ in range(2):
        assert open_store(ROOT).read(BIG, 0, 10) == CONTENT[:10]
        assert signer(objects) == "ENVKEY"
        monkeypatch.setitem(sys.modules, "botocore.session", None)  # the second time without botocore


def test_credentials_of_config_files(objects: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("[default]\naws_access_key_id=K\naws_secret_access_key=S\n[lab]\ncredential_process=get\n")
    (tmp_path / "get").write_text('#!/bin/sh\necho \'{"Version": 1, "AccessKeyId": "LAB", "SecretAccessKey": "S"}\'\n')
    (tmp_path / "get").chmod(0o755)
    (tmp_path / "config").write_text(f"[profile lab]\nregion=eu-west-9\nendpoint_url={objects.url}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert open_store(ROOT, {"endpoint_url": objects.url}).read(BIG, 0, 10) == CONTENT[:10]
    assert signer(objects) == "K"
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert open_store(ROOT).read(BIG, 0, 10) == CONTENT[:10]
    assert signer(objects) == "LAB"
    assert "/eu-west-9/s3/" in objects.requests[-1].headers["authorization"]
    monkeypatch.setenv("AWS_PROFILE", "none")
    assert "no profile of this name" in str(failure(open_store(ROOT), BIG))


def test_credentials_of_instance_and_web_identity_roles(
    objects: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, everything_logged: pytest.LogCaptureFixture
) -> None:
    with S3({}) as moto:  # which plays both services that give credentials
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", moto.endpoint)
        store = open_store(ROOT, {"endpoint_url": objects.url})
        assert store.read(BIG, 0, 10) == CONTENT[:10]
        instance = signer(objects)
        (tmp_path / "token").write_text("w3bt0ken")
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/robots")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", moto.endpoint)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        assert open_store(ROOT, {"endpoint_url": objects.url}).read(BIG, 0, 10) == CONTENT[:10]
        assert len({instance, signer(objects)}) == 2
        assert all(request.headers["x-amz-security-token"] for request in objects.requests)
        secrets = ["w3bt0ken", *(request.headers["x-amz-security-token"] for request in objects.requests)]
        assert [secret for secret in secrets if secret in said(everything_logged)] == []


# -- other filesystems


@pytest.mark.parametrize(
    ("address", "module", "words"),
    [("sftp://robots/set", "paramiko", "paramiko"), ("nonsense://robots/set", "json", "unknown scheme nonsense://")],
)
def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch, address: str, module: str, words: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DatasetError, match=words):
        open_store(address)


def test_other_filesystems_look_at_the_version_with_each_read() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/robots/set/a", CONTENT[:1000])
    store = FsspecStore("memory://robots/set", None)
    assert store.read("a", 5, 2000) == CONTENT[5:1000]
    assert not store.exists("b")
    memory.pipe("/robots/set/a", CONTENT[:1000][::-1])
    assert "changed during the run" in str(failure(store, "a"))
    memory.rm("/robots", recursive=True)


def test_a_logger_of_a_driver_that_is_made_later_keeps_credentials_too(everything_logged: pytest.LogCaptureFixture) -> None:
    """Also one whose name a child logger reserved before; other loggers and other threads' records are untouched."""
    name = f"botocore.made_{os.getpid()}"
    child = logging.getLogger(f"{name}.child")  # reserves `name`, for which no logger exists yet
    with private():
        made = logging.getLogger(name)
        later = logging.getLogger(f"{name}.later")
        made.debug("s3cret")
        child.debug("s3cret")
        with private():  # for the next request
            later.debug("s3cret")
        logging.getLogger(f"mine.{name}").debug("not of a driver")
    made.debug("not of a request")
    assert [record.getMessage() for record in everything_logged.records if name in record.name] == [
        "not of a driver",
        "not of a request",
    ]


def test_loggers_are_looked_at_when_there_are_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with private():
        pass

    def fail(self: logging.Logger, filter: Any) -> None:
        raise AssertionError("the loggers are looked at again, although none was added")

    monkeypatch.setattr(logging.Logger, "addFilter", fail)
    with private():
        pass
