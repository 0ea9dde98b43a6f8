"""Hosts to which obstore may send the requests of a bucket.

obstore follows redirects, and has no option that prevents it. A request that is redirected to another host still contains the
session token of AWS, the `default_headers` of the user and, as its `Referer`, the URL with the signature of Azure. Therefore,
requests to all hosts except those of the bucket use a proxy that does not exist. Ports are not distinguished.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NOWHERE = "127.0.0.1:0"  # no program can listen at port 0, so a request to it fails at once
_URL = re.compile(r"https?://[^\s\"'\\,;]+")
_ENVIRONMENT = {"s3": ("AWS_",), "gs": ("GOOGLE_", "GCE_"), "az": ("AZURE_", "AZURITE_", "IDENTITY_", "MSI_")}
# Services that obstore asks for credentials if the options have none.
_INSTANCE = ("169.254.0.0/16", "fd00:ec2::/32")
_LOGIN = {
    "s3": _INSTANCE,
    "gs": (*_INSTANCE, "googleapis.com", "accounts.google.com", "metadata.google.internal"),
    "az": (
        *_INSTANCE,
        *(f"login.{domain}" for domain in ("microsoftonline.com", "microsoftonline.us", "microsoftonline.de")),
        *("login.partner.microsoftonline.cn", "login.chinacloudapi.cn"),
    ),
}
_CREDENTIALS = ("access_key_id", "account_key", "access_key", "sas_key", "sas_token", "bearer_token")  # options of obstore


def only_own_hosts(cloud: str, config: Mapping[str, Any], client: Mapping[str, Any], has_credentials: bool) -> dict[str, str]:
    """Return options of obstore's client with which redirects to other hosts fail.

    They are empty if requests use a proxy of the environment or of `client`, since obstore supports only one proxy.

    Args:
        cloud: "s3", "gs" or "az".
        config: Options of obstore's store.
        client: Options of its client. Hosts in `proxy_excludes` are allowed as well.
        has_credentials: Whether a function returns credentials to obstore.
    """
    endpoint = config.get("endpoint") or config.get("base_url") or ""
    region, account = config.get("region"), config.get("account_name") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    hosts: list[str] = [host for value in config.values() for host in _hosts(str(value))]
    for name, value in os.environ.items():
        hosts += _hosts(value) if name.startswith(_ENVIRONMENT[cloud]) else []
    if cloud == "gs":  # the file may contain the address of an emulator
        for path in (config.get("application_credentials"), config.get("service_account")):
            with suppress(OSError, TypeError, ValueError):
                hosts += _hosts(Path(path).read_text())  # type: ignore[arg-type]
    if not endpoint:
        hosts += {
            "s3": [f"{region}.amazonaws.com" if config.get("s3_express") else f"s3.{region}.amazonaws.com"],
            "gs": ["storage.googleapis.com"],
            "az": [f"{account}.blob.core.windows.net", f"{account}.blob.fabric.microsoft.com"],
        }[cloud]
        hosts += ["127.0.0.1", "localhost"] if "use_emulator" in config or "AZURE_STORAGE_USE_EMULATOR" in os.environ else []
    if not (has_credentials or config.get("skip_signature") or any(name in config for name in _CREDENTIALS)):
        hosts += [*_LOGIN[cloud], f"sts.{region}.amazonaws.com"]
    hosts += str(client.get("proxy_excludes") or "").split(",")
    return {} if _has_proxy(endpoint, client) else {"proxy_url": f"http://{NOWHERE}", "proxy_excludes": ",".join(hosts)}


def _hosts(text: str) -> list[str]:
    """Return the hosts of the URLs in a text."""
    found = []
    for url in _URL.findall(text):
        with suppress(ValueError):  # e.g. an address that is not a valid IPv6 address
            found += [host] if (host := urlsplit(url).hostname) else []
    return found


def _has_proxy(endpoint: str, client: Mapping[str, Any]) -> bool:
    """Return whether a proxy of the environment or of the client's options is used for an endpoint."""
    parts, proxies = urlsplit(endpoint or "https://amazonaws.com"), urllib.request.getproxies()
    in_environment = bool(proxies.get(parts.scheme) or proxies.get("all"))
    return bool(client.get("proxy_url")) or (in_environment and not urllib.request.proxy_bypass(parts.hostname or ""))
