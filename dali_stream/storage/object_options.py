"""Storage options of s3://, gs:// and az://.

Options may have obstore's names or fsspec's. If botocore is installed, it looks up the credentials for AWS, as AWS's own tools
do.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from dali_stream.errors import StorageError
from dali_stream.storage.logs import private
from dali_stream.storage.retry import PER_HOST, Patience, cleaned, silence_s
from dali_stream.system.install import install_command

_PREFIX = re.compile("aws_|google_|azure_(storage_)?")
_SIGNING = ("access_key_id", "secret_access_key", "session_token")
_REFRESH = timedelta(minutes=10)  # interval at which obstore asks for credentials; botocore renews them if they expire sooner


class _Cloud(NamedTuple):
    """Storage options of one kind of bucket.

    Attributes:
        store: Class of obstore.
        names: Name in obstore of each option of s3fs, gcsfs, adlfs and botocore, or an empty string if renaming the option is
            not enough. Options that are not listed are passed to obstore.
        hint: Instructions for the user on how to provide credentials.
    """

    store: Any
    names: dict[str, str]
    hint: str


_S3 = _Cloud(
    S3Store,
    {
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "key": "access_key_id",
        "profile": "",
        "region_name": "region",
        "requester_pays": "request_payer",
        "secret": "secret_access_key",
        "token": "session_token",
    },
    f"Give storage_options={{'key': …, 'secret': …}} or AWS's environment or, after `{install_command('s3')}`, its "
    "config files, or for a public bucket {'anon': True}",
)
_GS = _Cloud(
    GCSStore,
    {"anon": "skip_signature", "endpoint_url": "base_url", "project": "", "requester_pays": "", "token": ""},
    "Run `gcloud auth application-default login`, or give storage_options={'token': PATH}, or for a public bucket "
    "{'token': 'anon'}",
)
_AZ = _Cloud(
    AzureStore,
    {
        "account_key": "account_key",
        "account_name": "account_name",
        "anon": "skip_signature",
        "connection_string": "",
        "endpoint_url": "endpoint",
        "sas_token": "sas_key",
    },
    "Give storage_options={'account_name': …, 'account_key': …} or Azure's environment, or for a public container "
    "{'anon': True}",
)
CLOUDS = {"s3": _S3, "s3a": _S3, "gs": _GS, "gcs": _GS, "az": _AZ, "abfs": _AZ, "abfss": _AZ}
_CONNECTION = {  # keys of Azure's connection strings
    "AccountKey": "account_key",
    "AccountName": "account_name",
    "BlobEndpoint": "endpoint",
    "SharedAccessSignature": "sas_key",
}


@dataclass(frozen=True)
class Bucket:
    """Folder in a bucket, with the options to read it.

    Attributes:
        scheme: Scheme of the address.
        address: URL of the folder without credentials.
        name: Name of the bucket or container.
        folder: Path of the folder in the bucket.
        config: Options of obstore's store.
        client: Options of obstore's client.
        profile: Profile in AWS's config files. Default: the profile that the environment names.
        endpoint: URL of the server without credentials. Empty for the default server of the cloud.
    """

    scheme: str
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
        """Instructions for the user on how to provide credentials."""
        return CLOUDS[self.scheme].hint

    def open(self) -> Any:
        """Return obstore's store with credentials, which may be requested over the network.

        Raises:
            StorageError: If no credentials are found, if the profile does not exist, or if a profile is set and botocore is not
                installed.
        """
        return self.store(*_as_aws(self)) if CLOUDS[self.scheme] is _S3 else self.store(self.config)

    def store(self, config: dict[str, Any], credentials: Callable[[], Any] | None = None) -> Any:
        """Return obstore's store. Its own retries are disabled, because they would exceed the time limit of `Patience`."""
        http = (config.get("endpoint") or config.get("base_url") or "").startswith("http://")
        return CLOUDS[self.scheme].store(
            self.name,
            prefix=self.folder or None,
            config=config,
            client_options={"allow_http": http, **self.client},
            retry_config={"max_retries": 0},
            **({} if credentials is None else {"credential_provider": credentials}),
        )


def parsed(address: str, options: Mapping[str, Any], patience: Patience) -> Bucket:
    """Parse an address and its storage options.

    Args:
        address: URL of a folder in a bucket.
        options: Storage options. Options with the value None are ignored.
        patience: Time limits of the requests.

    Raises:
        ValueError: If an option is unknown or invalid, or the address has no bucket.
    """
    parts = urlsplit(address)
    cloud, settings = CLOUDS[parts.scheme], {key: value for key, value in options.items() if value is not None}
    client = _client(settings, patience)
    profile = settings.pop("profile", None) if cloud is _S3 else None
    if cloud is _GS:
        _google(settings, client)
    shown, (user, _, name) = cleaned(address).rstrip("/"), parts.netloc.rpartition("@")
    if cloud is _AZ:
        pairs = (item.partition("=") for item in settings.pop("connection_string", "").split(";"))
        settings |= {_CONNECTION[key]: value for key, _, value in pairs if key in _CONNECTION}
        if user:  # abfs://container@account.dfs.core.windows.net/folder
            settings.setdefault("account_name", name.partition(".")[0])
            name, shown = user, f"{parts.scheme}://{user}@{name}{parts.path}".rstrip("/")
    if not name:
        raise ValueError(f"address must name a bucket, such as {parts.scheme}://bucket/folder, got {shown!r}")
    config = {
        cloud.names.get(key) or _PREFIX.sub("", key.lower(), 1): value if isinstance(value, bool) else str(value)
        for key, value in settings.items()
    }
    if config.get("skip_signature"):
        config = {key: value for key, value in config.items() if key not in _SIGNING}
    bucket = Bucket(parts.scheme, shown, name, parts.path.strip("/"), config, client, profile)
    try:
        bucket.store(config)
        return bucket
    except Exception as error:  # not shown to the user, because its text contains the values of the options
        unknown = re.search(r"key: '?(\w+)", str(error))
        problem = (
            f"unknown storage_options {unknown[1]}" if unknown else "obstore does not accept the values of storage_options"
        )
        if "Account must be specified" in str(error):
            problem = "storage_options must have account_name"
    known = ", ".join(sorted([*cloud.names, "timeout", "client_options"]))
    raise ValueError(f"{shown}: {problem}. Allowed for {parts.scheme}://: {known}, and the names of obstore's options")


def _client(options: dict[str, Any], patience: Patience) -> dict[str, Any]:
    """Return the options of obstore's client, and remove the options of s3fs and botocore from `options`.

    Raises:
        ValueError: If `client_kwargs` or `config_kwargs` have unknown keys.
    """
    kwargs, limits = dict(options.pop("client_kwargs", {})), dict(options.pop("config_kwargs", {}))
    options |= {name: kwargs.pop(name) for name in ("endpoint_url", "region_name") if name in kwargs}
    silent_s = silence_s(options)
    options.pop("timeout", None)
    connect_s, read_s = limits.pop("connect_timeout", silent_s), limits.pop("read_timeout", silent_s)
    if unknown := [*kwargs, *limits]:
        raise ValueError(
            f"Unknown storage_options in client_kwargs or config_kwargs: {', '.join(unknown)}. Allowed: endpoint_url, "
            "region_name, connect_timeout and read_timeout"
        )
    return {
        "connect_timeout": timedelta(seconds=min(connect_s, patience.first_s)),
        "read_timeout": timedelta(seconds=min(read_s, patience.total_s / 3)),  # leaves time for further attempts
        "timeout": timedelta(seconds=patience.total_s),
        "pool_max_idle_per_host": str(PER_HOST),
        **options.pop("client_options", {}),
    }


def _google(options: dict[str, Any], client: dict[str, Any]) -> None:
    """Translate gcsfs's options `token`, `project` and `requester_pays`, in place.

    Raises:
        ValueError: If the requester pays and no project is set.
    """
    token, project, pays = (options.pop(name, None) for name in ("token", "project", "requester_pays"))
    if token == "anon":
        options["skip_signature"] = True
    elif isinstance(token, Mapping):
        options["service_account_key"] = json.dumps(dict(token))
    elif token not in (None, "google_default", "cloud"):
        options["application_credentials"] = token
    if pays:
        payer = pays if isinstance(pays, str) else project
        if not payer:
            raise ValueError("storage_options with requester_pays must name the project that pays, {'project': …}")
        client["default_headers"] = {"x-goog-user-project": payer}


def _as_aws(bucket: Bucket) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """Complete obstore's options from AWS's environment and config files.

    Returns:
        Options of obstore's store, and a function that returns the current credentials. The function is None if requests are
        not signed, if the options contain the credentials, or if botocore is not installed.

    Raises:
        StorageError: If the profile does not exist, if a profile is set and botocore is not installed, or if botocore finds no
            credentials.
    """
    environment = os.environ.get
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        if bucket.profile is not None:
            raise StorageError(
                f"{bucket.address}: a profile needs botocore, which is not installed. Run `{install_command('s3')}`"
            ) from None
        session, scoped, region = None, {}, environment("AWS_DEFAULT_REGION")
    else:
        try:
            session = botocore.session.Session(profile=bucket.profile)
            scoped, region = session.get_scoped_config(), session.get_config_variable("region")
        except botocore.exceptions.ProfileNotFound:
            raise StorageError(f"{bucket.address}: AWS's config files have no profile of this name. Check it") from None
    endpoint = environment("AWS_ENDPOINT_URL_S3") or environment("AWS_ENDPOINT_URL") or scoped.get("endpoint_url")
    config = {**({"endpoint": endpoint} if endpoint else {}), **bucket.config}
    if "region" not in config:
        region = environment("AWS_REGION") or region or (None if "endpoint" in config else _region(bucket.name))
        config["region"] = region or "us-east-1"
    if session is None or config.get("skip_signature") or "access_key_id" in config:
        return config, None
    with private():  # filters the loggers of botocore, which may just have been imported
        credentials = session.get_credentials()
    if credentials is None:
        raise StorageError(f"{bucket.address}: access denied (no credentials were found). {bucket.hint}")

    def current() -> dict[str, Any]:
        """Return the credentials as obstore's S3Credential."""
        with private():
            key, secret, token = credentials.get_frozen_credentials()[:3]
        expires = datetime.now(timezone.utc) + _REFRESH
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}

    return config, current


def _region(name: str) -> str | None:
    """Return the region of a bucket on AWS, or None if AWS cannot be reached. The request needs no credentials."""
    url = f"https://s3.amazonaws.com/{quote(name)}?max-keys=0"
    try:
        answer = urllib.request.urlopen(url, timeout=5)
    except urllib.error.HTTPError as error:  # most buckets refuse the request, but their response contains the region
        answer = error
    except (OSError, http.client.HTTPException):
        return None
    with answer:
        return answer.headers.get("x-amz-bucket-region")  # type: ignore[no-any-return]
