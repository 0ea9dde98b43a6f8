"""Git LFS pointers, which lie in place of files that were never fetched.

Format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
"""

from __future__ import annotations

_VERSION = b"version https://git-lfs"  # with which each pointer begins
ENOUGH = 64  # bytes of a file that tell
REMEDY = "run `git lfs pull` in its repository, or read the dataset from the Hub (hf://datasets/OWNER/NAME)"


def pointer(first: bytes) -> str:
    """What to say of a file with these first bytes if it is a Git LFS pointer; empty for any other file."""
    return f"it is a Git LFS pointer and not the file itself: {REMEDY}" if first.startswith(_VERSION) else ""
