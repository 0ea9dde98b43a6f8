"""Options of s3://, gs:// and az:// for obstore, also in fsspec's spelling, and credentials as AWS's own tools find them."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import quote, urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from dali_stream.errors import StorageError
from dali_stream.storage.logs import private
from dali_stream.storage.retry import PER_HOST, Patience, checked_timeout, cleaned

SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_STORES: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_PREFIX = re.compile("aws_|google_|azure_(storage_)?")
# fsspec's names (s3fs, gcsfs, adlfs, botocore) and obstore's. All others of obstore are passed on.
_NAMES = {
    "s3": {
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "key": "access_key_id",
        "region_name": "region",
        "requester_pays": "request_payer",
        "secret": "secret_access_key",
        "token": "session_token",
    },
    "gs": {"anon": "skip_signature", "endpoint_url": "base_url"},
    "az": {"anon": "skip_signature", "endpoint_url": "endpoint", "sas_token": "sas_key"},
}
_SIGNING = ("access_key_id", "secret_access_key", "session_token")
_CONNECTION = {  # Azure's connection strings
    "AccountKey": "account_key",
    "AccountName": "account_name",
    "BlobEndpoint": "endpoint",
    "SharedAccessSignature": "sas_key",
}
_OTHERS = {
    "s3": ["profile"],
    "gs": ["project", "requester_pays", "token"],
    "az": ["account_key", "account_name", "connection_string"],
}
_HINTS = {
    "s3": "give storage_options={'key': …, 'secret': …} or AWS's environment or, with `pip install 'dali-stream[s3]'`, its "
    "config files; for a public bucket {'anon': True}",
    "gs": "run `gcloud auth application-default login`, or give storage_options={'token': PATH}; for a public bucket "
    "{'token': 'anon'}",
    "az": "give storage_options={'account_name': …, 'account_key': …} or Azure's environment; for a public container "
    "{'anon': True}",
}
_REFRESH = timedelta(minutes=10)  # botocore replaces credentials that expire sooner


@dataclass(frozen=True)
class Bucket:
    """A folder in a bucket, and how to read it.

    Attributes:
        kind: s3, gs or az.
        address, endpoint: without credentials; the endpoint is empty if none was given.
        name: of the bucket or container.
        folder: in the bucket.
        config, client: obstore's options of a store and of its client.
        profile: of AWS's config files.
    """

    kind: str
    address: str
    name: str
    folder: str
    config: dict[str, Any]
    client: dict[str, Any]
    profile: str | None = None

    @property
    def endpoint(self) -> str:
        return cleaned(self.config.get("endpoint") or self.config.get("base_url") or "")

    @property
    def hint(self) -> str:
        """How to give credentials."""
        return _HINTS[self.kind]

    def open(self) -> Any:
        """The client. May ask for credentials over the network.

        Raises:
            StorageError: there are no credentials.
        """
        return self.store(*_as_aws(self)) if self.kind == "s3" else self.store(self.config)

    def store(self, config: dict[str, Any], credentials: Callable[[], Any] | None = None) -> Any:
        """obstore's store. Its own retries are off: the stated time would not hold."""
        http = (config.get("endpoint") or config.get("base_url") or "").startswith("http://")
        return _STORES[self.kind](
            self.name,
            prefix=self.folder or None,
            config=config,
            client_options={"allow_http": http, **self.client},
            retry_config={"max_retries": 0},
            **({} if credentials is None else {"credential_provider": credentials}),
        )


def parsed(address: str, options: Mapping[str, Any], patience: Patience) -> Bucket:
    """Reads an address and its options.

    Raises:
        ValueError: an option is not understood, or the address names no bucket.
    """
    parts = urlsplit(address)
    kind = SCHEMES[parts.scheme]
    given = {key: value for key, value in options.items() if value is not None}
    client = _client(given, patience)
    profile = given.pop("profile", None) if kind == "s3" else None
    if kind == "gs":
        _google(given, client)
    for item in given.pop("connection_string", "").split(";") if kind == "az" else ():
        key, _, value = item.partition("=")
        if key in _CONNECTION:
            given[_CONNECTION[key]] = value
    user, _, name = parts.netloc.rpartition("@")
    shown = cleaned(address).rstrip("/")
    if kind == "az" and user:  # abfs://container@account.dfs.core.windows.net/folder
        given.setdefault("account_name", name.partition(".")[0])
        name, shown = user, f"{parts.scheme}://{user}@{name}{parts.path}".rstrip("/")
    if not name:
        raise ValueError(f"{shown!r} names no bucket; give an address like {parts.scheme}://bucket/folder")
    names = _NAMES[kind]
    config = {names.get(key, _PREFIX.sub("", key.lower(), 1)): _text(value) for key, value in given.items()}
    if config.get("skip_signature"):
        config = {key: value for key, value in config.items() if key not in _SIGNING}
    bucket = Bucket(kind, shown, name, parts.path.strip("/"), config, client, profile)
    try:
        bucket.store(config)
        return bucket
    except Exception as error:  # its text has the values
        wrong = re.search(r"key: '?(\w+)", str(error))
        problem = f"storage_options has {wrong[1]}" if wrong else "obstore does not accept the values of storage_options"
        if "Account must be specified" in str(error):
            problem = "storage_options lacks account_name"
    known = ", ".join(sorted([*names, *_OTHERS[kind], "timeout", "client_options"]))
    raise ValueError(f"{shown}: {problem}; allowed for {parts.scheme}:// are {known}, and the names of obstore's options")


def _text(value: Any) -> Any:
    return value if isinstance(value, bool) else str(value)


def _client(given: dict[str, Any], patience: Patience) -> dict[str, Any]:
    """obstore's client options, from the given ones of s3fs and botocore, which are taken out."""
    kwargs, limits = dict(given.pop("client_kwargs", {})), dict(given.pop("config_kwargs", {}))
    given |= {name: kwargs.pop(name) for name in ("endpoint_url", "region_name") if name in kwargs}
    silence_s = checked_timeout(given)
    given.pop("timeout", None)
    connect_s, read_s = limits.pop("connect_timeout", silence_s), limits.pop("read_timeout", silence_s)
    if unknown := [*kwargs, *limits]:
        raise ValueError(
            f"storage_options has {', '.join(unknown)} in client_kwargs or config_kwargs; allowed there are endpoint_url, "
            "region_name, connect_timeout and read_timeout"
        )
    return {
        "connect_timeout": timedelta(seconds=min(connect_s, patience.first_s)),
        "read_timeout": timedelta(seconds=min(read_s, patience.total_s / 3)),  # leaves time for other attempts
        "timeout": timedelta(seconds=patience.total_s),
        "pool_max_idle_per_host": str(PER_HOST),
        **given.pop("client_options", {}),
    }


def _google(given: dict[str, Any], client: dict[str, Any]) -> None:
    """Translates gcsfs's `token`, `project` and `requester_pays`."""
    token, project, pays = (given.pop(name, None) for name in ("token", "project", "requester_pays"))
    if token == "anon":
        given["skip_signature"] = True
    elif isinstance(token, Mapping):
        given["service_account_key"] = json.dumps(dict(token))
    elif token not in (None, "google_default", "cloud"):
        given["application_credentials"] = token
    if pays:
        payer = pays if isinstance(pays, str) else project
        if not payer:
            raise ValueError("storage_options has requester_pays; give the project that pays as well: {'project': …}")
        client["default_headers"] = {"x-goog-user-project": payer}


def _as_aws(bucket: Bucket) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """obstore's options, completed from AWS's environment and config files, and what gives the credentials."""
    environment = os.environ.get
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        if bucket.profile is not None:
            raise StorageError(
                f"{bucket.address}: a profile takes botocore, which is not installed: pip install 'dali-stream[s3]'"
            ) from None
        session, scoped, region = None, {}, environment("AWS_DEFAULT_REGION")
    else:
        try:
            session = botocore.session.Session(profile=bucket.profile)
            scoped, region = session.get_scoped_config(), session.get_config_variable("region")
        except botocore.exceptions.ProfileNotFound:
            raise StorageError(f"{bucket.address}: AWS's config files have no profile of this name; check it") from None
    endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL") or scoped.get("endpoint_url")
    config = {**({"endpoint": endpoint} if endpoint else {}), **bucket.config}
    if "region" not in config:
        region = environment("AWS_REGION") or region or (None if "endpoint" in config else _region(bucket.name))
        config["region"] = region or "us-east-1"
    if session is None or config.get("skip_signature") or "access_key_id" in config:
        return config, None
    with private():
        credentials = session.get_credentials()
    if credentials is None:
        raise StorageError(f"{bucket.address}: access denied (no credentials were found); {bucket.hint}")
    return config, _Credentials(credentials)


class _Credentials:
    """What botocore found: in the environment, config files, single sign-on, web identity or an instance role."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def __call__(self) -> dict[str, Any]:
        """obstore's S3Credential."""
        with private():
            key, secret, token = self._found.get_frozen_credentials()[:3]
        expires = datetime.now(timezone.utc) + _REFRESH
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}


def _region(name: str) -> str | None:
    """The region of a bucket of AWS, which says so to everybody; None where AWS cannot be reached."""
    url = f"https://s3.amazonaws.com/{quote(name)}?max-keys=0"
    try:
        answer = urllib.request.urlopen(url, timeout=5)
    except urllib.error.HTTPError as error:  # without credentials most buckets refuse, and name their region too
        answer = error
    except OSError:
        return None
    with answer:
        return answer.headers.get("x-amz-bucket-region")  # type: ignore[no-any-return]
