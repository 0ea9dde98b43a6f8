"""The memory of rows and indices: what is pinned stays, the rest leaves in the order of its last use, and the bytes add up."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dali_stream.cache.account import Key, MemoryAccount

ROOM, SHARE = 100, 30
KEYS = st.tuples(st.sampled_from(["", "camera"]), st.integers(0, 5))


class Memory(RuleBasedStateMachine):
    """Compares the account with a list of keys in the order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.account = MemoryAccount(ROOM, SHARE)
        self.sizes: dict[Key, int] = {}
        self.pins: list[Key] = []
        self.coming: dict[Key, Future[int]] = {}
        self.used: list[Key] = []  # least recently used first

    def idle(self) -> list[Key]:
        return [key for key in self.used if key not in self.pins]

    def gone(self, key: Key) -> None:
        del self.sizes[key]
        self.coming.pop(key, None)
        self.used.remove(key)

    @rule(key=KEYS, size=st.integers(0, 60), is_used=st.booleans(), is_read=st.booleans())
    def add(self, key: Key, size: int, is_used: bool, is_read: bool) -> None:
        if key in self.sizes:
            return
        self.account.add(key, size, is_used)
        self.sizes[key] = size
        # A pinned entry counts as used when it is unpinned.
        self.used.insert(len(self.used) if is_used or key in self.pins else 0, key)
        if is_read:
            self.coming[key] = Future()
            self.account.set_read(key, self.coming[key])

    @precondition(lambda self: self.coming)
    @rule(fails=st.booleans(), data=st.data())
    def take(self, fails: bool, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.coming)))
        assert self.account.is_coming(key)
        if fails:
            self.coming[key].set_exception(OSError("no"))
            with pytest.raises(OSError, match="no"):
                self.account.take(key)
            self.gone(key)
        else:
            self.coming.pop(key).set_result(7)
            assert self.account.take(key) == 7

    @precondition(lambda self: self.sizes)
    @rule(size=st.integers(0, 60), data=st.data())
    def resize(self, size: int, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sizes)))
        self.account.resize(key, size)
        self.sizes[key] = size

    @rule(keys=st.sets(KEYS, max_size=3))
    def pin(self, keys: set[Key]) -> None:
        self.account.pin(keys)
        self.pins += sorted(keys)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.pins))
        self.account.unpin([key])
        self.pins.remove(key)
        if key in self.sizes and key not in self.pins:
            self.used.remove(key)
            self.used.append(key)

    @rule(need=st.integers(0, 150), as_far_as_possible=st.booleans())
    def make_room(self, need: int, as_far_as_possible: bool) -> None:
        self.account.take_evicted()
        idle = self.idle()
        fits = ROOM - sum(self.sizes.values()) + sum(self.sizes[key] for key in idle) >= need
        expected: list[Key] = []
        while (fits or as_far_as_possible) and ROOM - sum(self.sizes.values()) < need and (idle := self.idle()):
            over = sum(size for key, size in self.sizes.items() if key[0]) > SHARE
            first = [key for key in idle if bool(key[0]) == over] or idle
            expected += [] if first[0] in self.coming else [first[0]]
            self.gone(first[0])
        assert self.account.make_room(need, as_far_as_possible) == fits
        assert self.account.take_evicted() == expected

    @invariant()
    def adds_up(self) -> None:
        rows, indices = (sum(size for key, size in self.sizes.items() if bool(key[0]) == kind) for kind in (False, True))
        assert self.account.bytes_by_kind == (rows, indices)
        assert self.account.free == ROOM - rows - indices
        assert all((key in self.account) == (key in self.sizes) for key in [("", 0), ("camera", 0), *self.pins])


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
