"""Store for dataset repositories and storage buckets on the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # exported at run time

from dali_stream.errors import DatasetError, StorageError
from dali_stream.storage.connection import Response, body
from dali_stream.storage.http import HttpStore, retry_after
from dali_stream.storage.retry import Deadline, TransientError, silence_s

_LOGIN = "Run `hf auth login`, or give storage_options={'token': …} or HF_TOKEN"
_ADDRESS = re.compile(
    r"hf://(?P<kind>datasets|buckets)/(?P<id>[\w.-]+/[\w.-]+)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<folder>.*))?"
)


class HubStore(HttpStore):
    """Folder of a dataset repository at one commit, or of a bucket.

    The store calls the Hub's API directly and not through `HfApi`, because listings of `HfApi` have no timeout and could block
    forever. Endpoint, token and repository names follow huggingface_hub.

    Args:
        address: URL, `hf://datasets/<owner>/<name>[@revision][/folder]` or `hf://buckets/<owner>/<name>[/folder]`.
        storage_options: `token` (a string, True for the saved token, or False for no token), `endpoint`, and `timeout` as in
            `HttpStore`. Default: the token of the environment or the saved one, if any, and the endpoint of the environment.
        revision: Branch, tag or commit, which the constructor resolves to a commit. Default: the main branch.
        common: Arguments of `RemoteStore`.

    Raises:
        DatasetError: If the repository, bucket or revision does not exist, or the address is invalid.
        StorageError: If access is denied, the Hub cannot be reached, or huggingface_hub is in offline mode.
        ValueError: If a storage option is unknown or invalid, if `revision` differs from the one in the address, or if a bucket
            has a revision.
    """

    listings = True

    def __init__(self, address: str, storage_options: dict[str, Any] | None, revision: str | None, **common: Any) -> None:
        place, revision, inside = _parsed(address, revision)
        endpoint, headers, timeout_s = _options(storage_options or {})
        super().__init__(f"{endpoint}/{place}/resolve", {"headers": headers, "timeout": timeout_s}, **common)
        self._endpoint, self._place, self._wanted, self._inside = endpoint, place, revision, f"{inside}/" if inside else ""
        self.hint = f"{_LOGIN}, and accept the terms of a gated repository on {endpoint}/{place}"
        self.address = address = f"hf://{place}"
        url = f"{endpoint}/api/{place}" + ("" if revision is None else f"/revision/{quote(revision, safe='')}")
        info, _ = self._retried(address, lambda deadline: self._asked(url, deadline))
        if place.startswith("datasets/"):
            self.revision, self.frozen = _commit(info, address), True
            self._folder, address = f"{self._folder}/{self.revision}", f"{address}@{self.revision}"
        self._folder += quote(f"/{inside}" if inside else "")
        self.address = address + (f"/{inside}" if inside else "")
        self._source = f"{endpoint} {self.address}"

    def _list(self, folder: str, deadline: Deadline) -> dict[str, int]:
        """Return the sizes of the files below a folder, by path. Listings contain no ETags."""
        root, sizes = f"{self._inside}{folder}".strip("/"), {}
        revision = f"{self.revision}/" if self.revision else ""
        url: str | None = f"{self._endpoint}/api/{self._place}/tree/{revision}{quote(root, safe='')}?recursive=true"
        while url:
            entries, url = self._asked(url, deadline)
            for entry in entries:
                # A bucket lists every path that starts with the same characters, such as `data2/` for `data`.
                if entry["type"] == "file" and entry["path"].startswith(f"{root}/"):
                    sizes[entry["path"].removeprefix(self._inside)] = int(entry["size"])
        return sizes

    def _asked(self, url: str, deadline: Deadline) -> tuple[Any, str | None]:
        """Return (JSON response of the API, URL of the next page or None). The response is [] if the folder does not exist."""

        def use(response: Response) -> tuple[Any, str | None]:
            if response.headers.get("X-Error-Code") == "EntryNotFound":
                return [], None
            if response.status != 200:
                raise self._api_refusal(response)
            data, cut = body(response, None, deadline)
            if cut:
                raise TransientError(cut)
            return json.loads(data), self._following(url, response.headers)

        headers = {**self._headers, "Accept-Encoding": "identity"}
        return self._client.get(url, headers, deadline, use, f"hf://{self._place}")

    def _following(self, url: str, headers: Mapping[str, str]) -> str | None:
        """Return the URL of the next page of a listing, or None.

        All pages of a listing have the same path, so only the query of the server's link is used. A mirror may pass on links
        that name the original host, to which this store neither sends requests nor credentials.
        """
        link = re.search(r'<([^>]+)>;\s*rel="?next"?', headers.get("Link", ""))
        if link is None:
            return None
        following = urlunsplit(urlsplit(url)._replace(query=urlsplit(link[1]).query))
        if following == url:
            raise StorageError(
                f"hf://{self._place}: the listing at {self._endpoint} names the same page as the next one. Use another "
                "HF_ENDPOINT"
            )
        return following

    def _api_refusal(self, response: Response) -> Exception:
        status, code, where = response.status, response.headers.get("X-Error-Code", ""), f"hf://{self._place}"
        if code == "RevisionNotFound":
            return DatasetError(f"{where}: unknown revision {self._wanted!r}. Give an existing branch, tag or commit")
        if code == "GatedRepo" or status == 403:
            return StorageError(
                f"{where}: access denied (HTTP {status}). {_LOGIN}, and accept the terms of a gated repository on "
                f"{self._endpoint}/{self._place}"
            )
        if status in (401, 404, 410):
            return DatasetError(
                f"{where}: not found on {self._endpoint} (HTTP {status}). Check owner and name. {_LOGIN}, if it is private"
            )
        return self._refusal("", status, after_s=retry_after(response.headers))


def _parsed(address: str, revision: str | None) -> tuple[str, str | None, str]:
    """Split an address.

    Returns:
        `datasets/<owner>/<name>` or `buckets/<owner>/<name>`, revision or None, and folder, which may be empty.

    Raises:
        DatasetError: If the address is invalid.
        ValueError: If a bucket has a revision, or if `revision` differs from the one in the address.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or ".." in (match["folder"] or "").split("/"):
        raise DatasetError(
            f"{address}: an address on the Hub must be hf://datasets/<owner>/<name>[@revision][/folder] or "
            "hf://buckets/<owner>/<name>[/folder]"
        )
    inside = unquote(match["revision"]) if match["revision"] else None
    if match["kind"] == "buckets" and (inside or revision):
        raise ValueError(f"revision must be None for a bucket, got {inside or revision!r}")
    if inside and revision and inside != revision:
        raise ValueError(f"revision must be {inside!r}, as in {address}, or None, got {revision!r}")
    return f"{match['kind']}/{match['id']}", inside or revision, (match["folder"] or "").strip("/")


def _options(options: Mapping[str, Any]) -> tuple[str, dict[str, str], float]:
    """Return (endpoint, headers, timeout in seconds) from storage options and the environment.

    Raises:
        StorageError: If huggingface_hub is in offline mode, or `token` is True and no token is saved.
        ValueError: If an option is unknown.
    """
    unknown = sorted(set(options) - {"token", "endpoint", "timeout"})
    if unknown:
        raise ValueError(f"Unknown storage_options for hf://: {', '.join(unknown)}. Allowed: token, endpoint and timeout")
    endpoint = options.get("endpoint") or os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    if constants.HF_HUB_OFFLINE or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise StorageError(f"HF_HUB_OFFLINE is set, so no request is sent to {endpoint}. Unset it, or give a local folder")
    try:
        headers = build_hf_headers(token=options.get("token"), library_name="dali_stream")
    except OSError:  # LocalTokenNotFoundError
        headers = None
    if headers is None:
        raise StorageError(f"storage_options has token=True, but no token is saved on this machine. {_LOGIN}")
    return endpoint.rstrip("/"), headers, silence_s(options)


def _commit(info: Any, address: str) -> str:
    commit = info.get("sha") if isinstance(info, dict) else None
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        raise DatasetError(f"{address}: the Hub gives no commit for it ({commit!r}). Check that the repository is not empty")
    return commit
