"""Storage options of s3://, gs:// and az://.

Options have obstore's names. Eight common ones may have their names in s3fs, gcsfs and adlfs: key, secret, token, anon,
endpoint_url, account_name, and client_kwargs with endpoint_url or region_name. If botocore is installed, it looks up the
credentials for AWS, as AWS's own tools do.
"""

from __future__ import annotations

import contextlib
import http.client
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
from dali_stream.storage.object_hosts import only_own_hosts
from dali_stream.storage.retry import PER_HOST, Patience, cleaned, silence_s
from dali_stream.system.install import install_command

_PREFIX = re.compile("aws_|google_|azure_(storage_)?")
_SIGNING = ("access_key_id", "secret_access_key", "session_token")
_REFRESH = timedelta(minutes=10)  # interval at which obstore asks for credentials; botocore renews them if they expire sooner


class _Cloud(NamedTuple):
    """One kind of bucket.

    Attributes:
        name: "s3", "gs" or "az".
        store: Class of obstore.
        names: Name in obstore of each common option. Other options are passed to obstore.
        refused: Replacement of each option of s3fs, gcsfs and adlfs that is not supported, for the error message.
        hint: Instructions for the user on how to provide credentials.
    """

    name: str
    store: Any
    names: dict[str, str]
    refused: dict[str, str]
    hint: str


_GCSFS_TOKENS = ("anon", "browser", "cache", "cloud", "google_default")  # words that gcsfs reads as a `token`
_TIMEOUTS = "'timeout', or obstore's 'client_options' with 'connect_timeout'"
_S3 = _Cloud(
    "s3",
    S3Store,
    {
        "anon": "skip_signature",
        "endpoint_url": "endpoint",
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
    },
    {
        "config_kwargs": f"{_TIMEOUTS}, and for the addressing style obstore's 'virtual_hosted_style_request'",
        "password": "obstore's 'secret_access_key'",
        "profile": "the environment variable AWS_PROFILE",
        "region_name": "obstore's 'region'",
        "requester_pays": "obstore's 'request_payer'",
        "use_ssl": "'endpoint_url' with http:// or https://",
        "username": "obstore's 'access_key_id'",
    },
    f"Give storage_options={{'key': …, 'secret': …}} or AWS's environment or, after `{install_command('s3')}`, its "
    "config files, or for a public bucket {'anon': True}",
)
_PROJECT = "obstore's 'client_options' with {'default_headers': {'x-goog-user-project': PROJECT}}"
_GS = _Cloud(
    "gs",
    GCSStore,
    {"anon": "skip_signature", "endpoint_url": "base_url", "token": "application_credentials"},
    {
        "project": _PROJECT,
        "requester_pays": _PROJECT,
        "requests_timeout": _TIMEOUTS,
        "session_kwargs": "obstore's 'client_options'",
    },
    "Run `gcloud auth application-default login`, or give storage_options={'token': PATH}, or for a public bucket "
    "{'anon': True}",
)
_AZ = _Cloud(
    "az",
    AzureStore,
    {"account_name": "account_name", "anon": "skip_signature", "endpoint_url": "endpoint"},
    {  # `read_timeout` has the same name in obstore, which takes a text such as "30s"
        "account_host": "obstore's 'endpoint'",
        "connection_string": "obstore's 'account_name', 'account_key' and 'endpoint'",
        "connection_timeout": _TIMEOUTS,
        "credential": "obstore's 'account_key' or 'sas_key'",
    },
    "Give storage_options={'account_name': …, 'account_key': …} or Azure's environment, or for a public container "
    "{'anon': True}",
)
CLOUDS = {"s3": _S3, "s3a": _S3, "gs": _GS, "gcs": _GS, "az": _AZ, "abfs": _AZ, "abfss": _AZ}


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
        endpoint: URL of the server without credentials. Empty for the default server of the cloud.
    """

    scheme: str
    address: str
    name: str
    folder: str
    config: dict[str, Any]
    client: dict[str, Any]

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
            StorageError: If no credentials are found, or if the profile that the environment names does not exist.
        """
        return self.store(*_as_aws(self)) if CLOUDS[self.scheme] is _S3 else self.store(self.config)

    def store(self, config: dict[str, Any], credentials: Callable[[], Any] | None = None) -> Any:
        """Return obstore's store, which follows no redirect to another host.

        Its own retries are disabled, because they would exceed the time limit of `Patience`.
        """
        is_http = (config.get("endpoint") or config.get("base_url") or "").startswith("http://")
        own_hosts = only_own_hosts(CLOUDS[self.scheme].name, config, self.client, credentials is not None)
        return CLOUDS[self.scheme].store(
            self.name,
            prefix=self.folder or None,
            config=config,
            client_options={"allow_http": is_http, **self.client, **own_hosts},
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
    shown, (user, _, name) = cleaned(address).rstrip("/"), parts.netloc.rpartition("@")
    if cloud is _AZ and user:  # abfs://container@account.dfs.core.windows.net/folder
        settings.setdefault("account_name", name.partition(".")[0])
        name, shown = user, f"{parts.scheme}://{user}@{name}{parts.path}".rstrip("/")
    if not name:
        raise ValueError(f"address must name a bucket, such as {parts.scheme}://bucket/folder, got {shown!r}")
    for key in settings:
        if key in cloud.refused:
            raise ValueError(f"{shown}: storage option {key!r} is not supported, use {cloud.refused[key]}")
    if cloud is _GS:
        _check_token(settings.get("token", ""), shown)
    given = {cloud.names.get(key) or _PREFIX.sub("", key.lower(), 1): key for key in settings}  # {name in obstore: name}
    config = {name: settings[key] if isinstance(settings[key], bool) else str(settings[key]) for name, key in given.items()}
    if config.get("skip_signature"):
        config = {key: value for key, value in config.items() if key not in _SIGNING}
    bucket = Bucket(parts.scheme, shown, name, parts.path.strip("/"), config, client)
    try:
        bucket.store(config)
        return bucket
    except Exception as error:  # not shown to the user, because its text contains the values of the options
        named = re.search(r"key: '?(\w+)", str(error))
        unknown = named[1] if named and named[1] in {**config, **client} else None  # anything else may be a part of a value
        no_account = "Account must be specified" in str(error)
    if no_account:
        raise ValueError(f"{shown}: storage_options must have account_name, got none")
    if not unknown:
        if wrong := _wrong_option(bucket):
            raise ValueError(
                f"{shown}: storage option {given[wrong]!r} must be a value that obstore accepts, such as '30s' for a time"
            )
        raise ValueError(f"{shown}: storage_options must have values that obstore accepts. Check them")
    known = ", ".join(sorted([*cloud.names, "timeout", "client_kwargs", "client_options"]))
    raise ValueError(
        f"{shown}: storage_options must be {known} or options of obstore's {cloud.store.__name__}, got {unknown!r}"
    )


def _wrong_option(bucket: Bucket) -> str | None:
    """Return the option, by its name in obstore, without which obstore accepts the others, or None."""
    for wrong in bucket.config:
        with contextlib.suppress(Exception):
            bucket.store({name: value for name, value in bucket.config.items() if name != wrong})
            return wrong
    return None


def _check_token(token: object, shown: str) -> None:
    """Check the option `token` of Google Cloud. Raises ValueError if it is not a path but another form that gcsfs accepts."""
    if not isinstance(token, (str, os.PathLike)) or token in _GCSFS_TOKENS:
        kind = repr(token) if isinstance(token, str) else f"a {type(token).__name__}"
        raise ValueError(
            f"{shown}: token in storage_options must be the path to a file of credentials, got {kind}. Leave it out to use the "
            "default credentials of this machine, or use 'anon': True or obstore's 'service_account_key', a JSON text"
        )


def _client(options: dict[str, Any], patience: Patience) -> dict[str, Any]:
    """Return the options of obstore's client, and remove them from `options`.

    The entries of `client_kwargs`, which is an option of s3fs, are moved to `options`.

    Raises:
        ValueError: If `client_kwargs` has keys other than endpoint_url and region_name.
    """
    kwargs = dict(options.pop("client_kwargs", {}))
    for name, own in (("endpoint_url", "endpoint_url"), ("region_name", "region")):
        if name in kwargs:
            options[own] = kwargs.pop(name)
    if kwargs:
        raise ValueError(
            f"client_kwargs in storage_options must be endpoint_url or region_name, got {', '.join(kwargs)}. Options of "
            "obstore's client belong in client_options"
        )
    silent_s = silence_s(options)
    options.pop("timeout", None)
    return {
        "connect_timeout": timedelta(seconds=min(silent_s, patience.first_s)),
        "read_timeout": timedelta(seconds=min(silent_s, patience.total_s / 3)),  # leaves time for further attempts
        "timeout": timedelta(seconds=patience.total_s),
        "pool_max_idle_per_host": str(PER_HOST),
        **options.pop("client_options", {}),
    }


def _as_aws(bucket: Bucket) -> tuple[dict[str, Any], Callable[[], Any] | None]:
    """Complete obstore's options from AWS's environment and config files.

    Returns:
        Options of obstore's store, and a function that returns the current credentials. The function is None if requests are
        not signed, if the options contain the credentials, or if botocore is not installed.

    Raises:
        StorageError: If the profile that the environment names does not exist, or if botocore finds no credentials.
    """
    environment = os.environ.get
    try:
        import botocore.exceptions
        import botocore.session
    except ImportError:
        session, scoped, region = None, {}, environment("AWS_DEFAULT_REGION")
    else:
        try:
            session = botocore.session.Session()
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
