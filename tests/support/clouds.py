"""The Hub and object stores on loopback. See `servers` for plain files and faults."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, quote, unquote, urlsplit

from support.servers import Handler, Request, Server

SIGNATURE = "signed-for-the-cdn"


class Hub(Server):
    """The Hub's API as huggingface_hub calls it, its files, and at another origin the CDN that it redirects to.

    Args:
        repos: {"datasets/<owner>/<name>" or "buckets/<owner>/<name>": a folder, or {path: bytes}}.
        token: without which nothing is answered.
        gated: whose terms nobody accepted.
        page: entries of a listing's page.

    Attributes:
        link: URL up to the query that the link to the next page names. None: that of the request.
        blobs: contents that were uploaded by `Xet`, by their hash.
        commits: the paths of the files of each commit or batch, in order.
    """

    def __init__(
        self,
        repos: dict[str, Path | dict[str, bytes]],
        *,
        token: str | None = None,
        gated: tuple[str, ...] = (),
        page: int = 1000,
        **network: Any,
    ) -> None:
        super().__init__({}, **network)
        self.token, self.gated, self.page = token, gated, page
        self.link: str | None = None
        self.names = tuple(repos)
        self.blobs: dict[str, bytes] = {}
        self.commits: list[set[str]] = []
        for name, files in repos.items():
            self.put(name, files)
        self.cdn = Cdn(self.files, **network)

    def put(self, name: str, files: Path | dict[str, bytes]) -> None:
        """Adds files to a repository, as a commit would."""
        assert isinstance(self.files, dict)
        if isinstance(files, Path):
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        self.files.update({f"{name}/{path}": data for path, data in files.items()})

    def commit(self, name: str) -> str:
        """The commit of a repository's present files."""
        assert isinstance(self.files, dict)
        names = sorted((path, len(data)) for path, data in self.files.items() if path.startswith(f"{name}/"))
        return hashlib.sha1(repr(names).encode()).hexdigest()

    def change(self, name: str, line: dict[str, Any]) -> None:
        """Does what a line of a commit, or of a batch of a bucket, says."""
        assert isinstance(self.files, dict)
        kind, value = (line["key"], line["value"]) if "key" in line else (line["type"], line)
        path = f"{name}/{value.get('path')}"
        if kind == "file":
            self.files[path] = base64.b64decode(value["content"])
        elif kind in ("lfsFile", "addFile"):
            self.files[path] = self.blobs[value.get("oid") or value["xetHash"]]
        elif kind in ("deletedFile", "deleteFile"):
            del self.files[path]
        else:
            assert kind == "header", kind

    def __enter__(self) -> Hub:
        self.cdn.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)
        self.cdn.__exit__(*arguments)

    def handler(self) -> type[Handler]:
        return _HubHandler


class Cdn(Server):
    """Answers signed URLs until `expired` is set."""

    expired = False

    def handler(self) -> type[Handler]:
        return _CdnHandler


class _CdnHandler(Handler):
    def answer(self, request: Request) -> None:
        assert isinstance(self.owner, Cdn)
        if self.owner.expired or parse_qs(request.query).get("Signature") != [SIGNATURE]:
            return self.reply(403, b"expired")
        return self.send_file(request.path.lstrip("/"), {"ETag": f'"cdn-{self.owner.version(request.path.lstrip("/"))}"'})


class _HubHandler(Handler):
    owner: Hub

    do_POST = Handler.do_GET

    def answer(self, request: Request) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.lstrip("/").split("/")]
        api = parts[0] == "api"
        name, rest = "/".join(parts[api : api + 3]), parts[api + 3 :]
        if self.owner.token and request.headers.get("authorization") != f"Bearer {self.owner.token}":
            return self.reply(401, b"no", {"X-Error-Code": "RepoNotFound"})
        if name not in self.owner.names:
            return self.reply(404, b"no", {"X-Error-Code": "RepoNotFound"})
        if name in self.owner.gated:
            return self.reply(403, b"no", {"X-Error-Code": "GatedRepo"})
        revision = rest.pop(1) if rest[:1] and rest[0] != "paths-info" and name.startswith("datasets/") else None
        if revision not in (None, "main", "refs/pr/1", self.owner.commit(name)):
            return self.reply(404, b"no", {"X-Error-Code": "RevisionNotFound"})
        if api:
            return self._api(request, name, rest)
        return self._resolve(name, "/".join(rest[1:]))

    def _api(self, request: Request, name: str, rest: list[str]) -> None:
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.owner.fault_for(request.path.lstrip("/"))
        fields, found = {"Content-Type": "application/json"}, {"id": name.partition("/")[2], "sha": self.owner.commit(name)}
        answer: Any = found | {"private": True, "createdAt": "2026-01-01T00:00:00.000Z", "size": 0, "totalFiles": 0}
        if self.command == "POST" and fault is None:
            answer = self._write(name, rest, sent)
        if rest[:1] == ["tree"]:
            query = parse_qs(request.query)
            recursive = query.get("recursive", [""])[0]
            answer = self._entries(name, "/".join(rest[1:]), recursive == "true")
            if not answer and len(rest) > 1:
                return self.reply(404, b"no", {"X-Error-Code": "EntryNotFound"})
            first = int(query.get("cursor", ["0"])[0])
            if first + self.owner.page < len(answer):
                place = urlsplit(self.path).path  # as it was quoted
                url = f"{self.owner.link or self.owner.url + place}?recursive={recursive}&cursor={first + self.owner.page}"
                fields["Link"] = f'<{url}>; rel="next"'
            answer = answer[first : first + self.owner.page]
        data = json.dumps(answer).encode()
        return self.reply(200, data, fields) if fault is None else fault(self, data, fields)

    def _write(self, name: str, rest: list[str], sent: bytes) -> Any:
        if rest == ["preupload"]:
            paths = [file["path"] for file in json.loads(sent)["files"]]
            modes = {path: "regular" if path.endswith(".json") else "lfs" for path in paths}
            return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}
        assert rest == ["commit" if name.startswith("datasets/") else "batch"]
        lines = [json.loads(line) for line in sent.splitlines()]
        for line in lines:
            self.owner.change(name, line)
        changed = [line.get("value", line) for line in lines if line.get("key") != "header"]
        self.owner.commits.append({value["path"] for value in changed})
        commit = self.owner.commit(name)
        return {"commitUrl": f"{self.owner.url}/{name}/commit/{commit}", "commitOid": commit, "failed": []}

    def _entries(self, name: str, folder: str, recursive: bool) -> list[dict[str, Any]]:
        assert isinstance(self.owner.files, dict)
        # A bucket lists every path that starts with the same characters.
        start = f"{name}/{folder}/" if folder and name.startswith("datasets/") else f"{name}/{folder}"
        entries: dict[str, dict[str, Any]] = {}
        for full, data in sorted(self.owner.files.items()):
            path = full.removeprefix(f"{name}/")
            below = path[len(start) - len(name) - 1 :].strip("/")
            if not full.startswith(start):
                continue
            if not recursive and "/" in below:
                folder_path = path[: len(path) - len(below)] + below.partition("/")[0]
                entries[folder_path] = {"type": "directory", "path": folder_path, "oid": "0" * 40}
                continue
            hashes = {"oid": hashlib.sha1(data).hexdigest(), "xetHash": hashlib.sha256(data).hexdigest()}
            entries[path] = {"type": "file", "path": path, "size": len(data), **hashes}
        return list(entries.values())

    def _resolve(self, name: str, path: str) -> None:
        version = self.owner.version(f"{name}/{path}")
        if version is None:
            return self.reply(404, b"no", {"X-Error-Code": "EntryNotFound"})
        if path.endswith(".json"):  # small text is answered at once
            return self.send_file(f"{name}/{path}")
        size, etag = version
        url = f"{self.owner.cdn.url}/{quote(name)}/{quote(path)}?Signature={SIGNATURE}"
        text = b"Found. Redirecting"
        return self.reply(302, text, {"Location": url, "X-Linked-ETag": etag, "X-Linked-Size": str(size)})


class Xet:
    """Plays `hf_xet`, whose protocol is not public: contents reach the Hub at once, and keep their hash.

    Args:
        hub: which receives them.
        failures: exceptions to raise in the first uploads, None for one that succeeds.
    """

    def __init__(self, hub: Hub, failures: Iterable[Exception | None] = ()) -> None:
        self._hub, self._failures = hub, iter(failures)

    @contextmanager
    def new_upload_commit(self, **_: Any) -> Iterator[Xet]:
        """The context of some uploads."""
        yield self

    def start_upload_file(self, path: str, sha256: Any) -> Any:
        """The upload of a file, which is done."""
        return self.start_upload_bytes(Path(path).read_bytes(), sha256)

    def start_upload_bytes(self, data: bytes, sha256: Any) -> Any:
        """The upload of some bytes, which is done."""
        if (failure := next(self._failures, None)) is not None:
            raise failure
        name = hashlib.sha256(data).hexdigest()
        self._hub.blobs[name] = data
        return SimpleNamespace(
            result=lambda: SimpleNamespace(xet_info=SimpleNamespace(hash=name, sha256=name, file_size=len(data)))
        )


class Objects(Server):
    """S3, Google Cloud Storage and Azure as an anonymous client sees them: objects, and listings of two entries a page.

    Args:
        files: {"bucket/key": bytes}.

    Attributes:
        redirect: address of the server to which all requests are redirected. Empty: none.
    """

    redirect = ""

    def handler(self) -> type[Handler]:
        return _ObjectsHandler


class _ObjectsHandler(Handler):
    owner: Objects

    def answer(self, request: Request) -> None:
        if self.owner.redirect:
            return self.reply(307, b"", {"Location": f"{self.owner.redirect}{self.path}"})
        query = parse_qs(request.query)
        if "list-type" not in query and "comp" not in query:
            return self.send_file(request.path.lstrip("/"))
        assert isinstance(self.owner.files, dict)
        bucket = request.path.strip("/")
        prefix, after = (
            f"{bucket}/{query.get('prefix', [''])[0]}",
            query.get("continuation-token", query.get("marker", [""]))[0],
        )
        names = sorted(name for name in self.owner.files if name.startswith(prefix) and name.partition("/")[2] > after)
        items = "".join(self._item(escape(name.partition("/")[2]), len(self.owner.files[name])) for name in names[:2])
        more = names[1].partition("/")[2] if len(names) > 2 else ""
        following = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        text = f"<ListBucketResult>{items}{following}</ListBucketResult>"
        if "comp" in query:
            text = f"<EnumerationResults><Blobs>{items}</Blobs><NextMarker>{more}</NextMarker></EnumerationResults>"
        return self.reply(200, text.encode(), {"Content-Type": "application/xml"})

    def _item(self, key: str, size: int) -> str:
        if "comp=list" in self.path:
            inside = f"<Last-Modified>{formatdate(0, usegmt=True)}</Last-Modified><Content-Length>{size}</Content-Length>"
            inside += "<Content-Type>text/plain</Content-Type><Etag>0x1</Etag>"
            return f"<Blob><Name>{key}</Name><Properties>{inside}</Properties></Blob>"
        inside = f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>{size}</Size>"
        return f'<Contents><Key>{key}</Key>{inside}<ETag>"1"</ETag></Contents>'


class S3:
    """moto's S3 server with one bucket, and the storage options to reach it.

    Args:
        files: a folder, or {key: bytes}.
    """

    bucket = "robots"

    def __init__(self, files: Path | dict[str, bytes]) -> None:
        if isinstance(files, Path):
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
        self.files = files

    def __enter__(self) -> S3:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        self.endpoint = "http://{}:{}".format(*self._server.get_host_and_port())
        self.options = {"key": "test-key", "secret": "test-secret", "endpoint_url": self.endpoint}
        # moto keeps the objects of earlier servers of the same process.
        request = urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")
        with urllib.request.urlopen(request, timeout=30):
            pass
        self._client().create_bucket(Bucket=self.bucket)
        for key, data in self.files.items():
            self.put(key, data)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def put(self, key: str, data: bytes) -> None:
        """Writes an object."""
        self._client().put_object(Bucket=self.bucket, Key=key, Body=data)

    def _client(self) -> Any:
        import boto3

        with mock.patch.dict(os.environ, {"AWS_EC2_METADATA_DISABLED": "true"}):
            return boto3.client(
                "s3",
                endpoint_url=self.endpoint,
                aws_access_key_id="test-key",
                aws_secret_access_key="test-secret",
                region_name="us-east-1",
            )
