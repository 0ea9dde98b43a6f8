"""Command that installs the requirements of an extra of this package, for messages."""

from __future__ import annotations

import importlib.metadata
import shlex


def requirements() -> list[str]:
    """Return the requirements of this package. Empty for a checkout that is on the path but not installed."""
    try:
        return importlib.metadata.requires("dali-stream") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def install_command(extra: str) -> str:
    """Return the command that installs the requirements of an extra, such as "pip install 'botocore>=1.34'".

    The command names the requirements, not the package, so it works for a checkout, a wheel and a release.
    """
    lines = requirements()
    if not lines:
        return f"pip install -c constraints.txt '.[{extra}]'"
    return shlex.join(["pip", "install", *(line.partition(";")[0].strip() for line in lines if _is_of(line, extra))])


def _is_of(line: str, extra: str) -> bool:
    marker = line.partition(";")[2].replace('"', "'")
    return f"extra == '{extra}'" in marker
