"""Frames in progress: a batch that is ready has no task that still runs or has failed."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from dali_stream.decode.decoder import Decoded, succeeded
from dali_stream.errors import DecodeError


def task(state: str) -> Future[None]:
    """A task that waits, runs, was cancelled, has failed or is done."""
    made: Future[None] = Future()
    if state == "cancelled":
        made.cancel()
    elif state != "waits":
        made.set_running_or_notify_cancel()
    if state == "failed":
        made.set_exception(DecodeError("damaged"))
    elif state == "done":
        made.set_result(None)
    return made


@pytest.mark.parametrize("state", ["waits", "runs", "cancelled", "failed", "done"])
def test_a_batch_is_ready_once_all_of_its_tasks_are_done(state: str) -> None:
    assert succeeded(task(state)) == (state == "done")
    slots: Any = SimpleNamespace(broken={})
    plan: Any = None
    assert Decoded(slots, plan, [task("done"), task(state)], {}).ready() == (state == "done")


def test_a_batch_with_a_frame_that_failed_is_not_ready() -> None:
    plan: Any = None
    for broken, failed in (({3: "damaged"}, {}), ({}, {0: DecodeError("damaged")})):
        slots: Any = SimpleNamespace(broken=broken)
        assert not Decoded(slots, plan, [task("done")], failed).ready()
