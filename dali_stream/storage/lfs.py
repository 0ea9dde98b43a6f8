"""Git LFS pointers: small text files in place of files that have not been fetched.

Format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

from __future__ import annotations

_VERSION = b"version https://git-lfs"  # the beginning of each pointer
ENOUGH = 64  # number of bytes of a file that are enough to recognize a pointer
REMEDY = "Run `git lfs pull` in its repository, or read the dataset from the Hub (hf://datasets/OWNER/NAME)"


def pointer(first: bytes) -> str:
    """Return part of an error message if a file with these first bytes is a Git LFS pointer, or else an empty string."""
    return f"the file is a Git LFS pointer, which only names the content. {REMEDY}" if first.startswith(_VERSION) else ""
