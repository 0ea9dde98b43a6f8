"""Dataset repositories and storage buckets on the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from email.message import Message
from http.client import HTTPResponse
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, unquote, urljoin, urlsplit

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported at run time

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.connection import Pool, body
from dali_stream.storage.http import HttpTransport, origin, retry_after
from dali_stream.storage.retry import AGAIN, Deadline, Patience, TransientError, checked_timeout, retried
from dali_stream.storage.store import Traffic

_LOGIN = "run `hf auth login`, or give storage_options={'token': …} or HF_TOKEN"
_ADDRESS = re.compile(
    r"hf://(?P<kind>datasets|buckets)/(?P<id>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<folder>.*))?"
)


class HubTransport(HttpTransport):
    """A folder of a dataset repository at one commit, or of a bucket.

    The Hub's API is called directly and not through `HfApi`, whose requests have no timeout: a listing could hang for ever.
    Endpoint, token and repository names follow huggingface_hub.

    Args:
        address: `hf://datasets/<owner>/<name>[@revision][/folder]` or `hf://buckets/<owner>/<name>[/folder]`.
        storage_options: `token` (a string, or False for none), `endpoint`, and `timeout` as for HTTP.
        revision: branch, tag or commit; resolved to a commit here.
        patience: for how long finding the commit is retried.

    Raises:
        DatasetError: there is no such repository, bucket or revision.
        StorageError: access is denied, or the Hub cannot be reached.
        ValueError: another storage option, or two revisions.
    """

    listings = True

    def __init__(self, address: str, storage_options: dict[str, Any] | None, revision: str | None, patience: Patience) -> None:
        place = _parsed(address, revision)
        endpoint, headers, timeout_s = _options(storage_options or {})
        pool = Pool(timeout_s)
        self._api = _Api(endpoint, place, headers, pool)
        what = f"hf://{place.kind}/{place.id}"
        info = retried(
            self._api.info, lambda found: found, what, host=urlsplit(endpoint).netloc, patience=patience, traffic=Traffic()
        )
        root = f"{endpoint}/{place.kind}/{place.id}/resolve"
        if place.kind == "datasets":
            self.revision, self.frozen = _commit(info, what), True
            root, what = f"{root}/{self.revision}", f"{what}@{self.revision}"
        folder = f"/{place.folder}" if place.folder else ""
        super().__init__(
            root + quote(folder),
            {"headers": headers},
            shown=what + folder,
            source=f"{endpoint} {what}{folder}",
            hint=f"{_LOGIN}; for a gated one accept its terms on {endpoint}/{place.kind}/{place.id}",
            pool=pool,
        )

    def files(self, folder: str, deadline: Deadline) -> dict[str, int] | None:
        """The files below a folder, with sizes. Their ETags are known when they are read."""
        return dict(self._api.tree(folder, self.revision, deadline))


class _Place(NamedTuple):
    kind: str
    id: str
    revision: str | None
    folder: str


class _Api:
    """The Hub's API for one repository or bucket."""

    def __init__(self, endpoint: str, place: _Place, headers: dict[str, str], pool: Pool) -> None:
        self._endpoint, self._place, self._headers, self._pool = endpoint, place, headers, pool
        self._url = f"{endpoint}/api/{place.kind}/{place.id}"

    def info(self, deadline: Deadline) -> Any:
        """Its metadata; at `place.revision` if that is given."""
        revision = self._place.revision
        url = self._url if revision is None else f"{self._url}/revision/{quote(revision, safe='')}"
        found, _ = self._get(url, deadline)
        return found

    def tree(self, folder: str, revision: str | None, deadline: Deadline) -> Iterator[tuple[str, int]]:
        """(path, size) of each file below a folder, both relative to the place's folder."""
        prefix = f"{self._place.folder}/" if self._place.folder else ""
        inside = f"{prefix}{folder}".strip("/")
        url: str | None = "/".join([f"{self._url}/tree", *([revision] if revision else []), quote(inside, safe="")])
        url = f"{url}?recursive=true"
        while url:
            entries, following = self._get(url, deadline, missing=[])
            for entry in entries:
                # A bucket answers with every path that starts with these letters.
                if entry["type"] == "file" and entry["path"].startswith(f"{inside}/"):
                    yield entry["path"].removeprefix(prefix), int(entry["size"])
            url = following

    def _get(self, url: str, deadline: Deadline, missing: Any = None) -> tuple[Any, str | None]:
        """An answer and the URL of its next page. `missing` is the answer if there is no such folder."""

        def use(response: HTTPResponse) -> tuple[Any, str | None]:
            if response.headers.get("X-Error-Code") == "EntryNotFound" and missing is not None:
                return missing, None
            if response.status != 200:
                self._refused(response)
            data, cut = body(response, None)
            if cut:
                raise TransientError(cut)
            return json.loads(data), self._following(url, response.headers)

        return self._pool.get(url, self._headers | {"Accept-Encoding": "identity"}, deadline, use, f"hf://{self._what}")

    def _following(self, url: str, headers: Message) -> str | None:
        found = re.search(r'<([^>]+)>;\s*rel="?next"?', headers.get("Link", ""))
        following = urljoin(url, found[1]) if found else None
        if following is not None and origin(following) != origin(self._endpoint):
            raise StorageError(
                f"hf://{self._what}: its listing continues at another host, which is not allowed; check HF_ENDPOINT"
            )
        return following

    @property
    def _what(self) -> str:
        return f"{self._place.kind}/{self._place.id}"

    def _refused(self, response: HTTPResponse) -> NoReturn:
        status, code = response.status, response.headers.get("X-Error-Code", "")
        if status in AGAIN:
            raise TransientError(f"HTTP {status}", retry_after(response.headers))
        where = f"hf://{self._what}"
        if code == "RevisionNotFound":
            raise DatasetError(f"{where}: unknown revision {self._place.revision!r}; give an existing branch, tag or commit")
        if code == "GatedRepo" or status == 403:
            raise StorageError(
                f"{where}: access denied (HTTP {status}). If it is gated, accept its terms on {self._endpoint}/{self._what}; "
                f"then {_LOGIN}"
            )
        if status in (401, 404, 410):
            raise DatasetError(
                f"{where}: not found on {self._endpoint} (HTTP {status}). Check owner and name; if it is private, {_LOGIN}"
            )
        raise StorageError(f"{where}: the Hub answers HTTP {status}; check the address and the token")


def _parsed(address: str, revision: str | None) -> _Place:
    match = _ADDRESS.fullmatch(address)
    if match is None or ".." in (match["folder"] or "").split("/"):
        raise DatasetError(
            f"{address}: not an address of a dataset on the Hub; allowed are hf://datasets/<owner>/<name>[@revision][/folder] "
            "and hf://buckets/<owner>/<name>[/folder]"
        )
    inside = unquote(match["revision"]) if match["revision"] else None
    if match["kind"] == "buckets" and (inside or revision):
        raise ValueError(f"revision is {inside or revision!r}, but a bucket has no revisions; omit it")
    if inside and revision and inside != revision:
        raise ValueError(f"{address} has the revision {inside!r}, but revision is {revision!r}; give one of them")
    return _Place(match["kind"], match["id"], inside or revision, (match["folder"] or "").strip("/"))


def _options(options: Mapping[str, Any]) -> tuple[str, dict[str, str], float]:
    """Endpoint, headers, timeout."""
    unknown = sorted(set(options) - {"token", "endpoint", "timeout"})
    if unknown:
        raise ValueError(f"storage_options has {', '.join(unknown)}; allowed for hf:// are token, endpoint and timeout")
    endpoint = options.get("endpoint") or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise StorageError(f"HF_HUB_OFFLINE is set, so no request is sent to {endpoint}; unset it, or give a local folder")
    try:
        headers = build_hf_headers(token=options.get("token"), library_name="dali_stream")
    except OSError:  # LocalTokenNotFoundError
        headers = None
    if headers is None:
        raise StorageError(f"storage_options has token=True, but no token is saved on this machine; {_LOGIN}")
    return endpoint.rstrip("/"), headers, checked_timeout(options)


def _commit(info: Any, what: str) -> str:
    commit = info.get("sha") if isinstance(info, dict) else None
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise DatasetError(f"{what}: the Hub gives no commit for it ({commit!r}); check that the repository is not empty")
    return commit
