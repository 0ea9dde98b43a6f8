"""The index of an MP4: what was written is read, in all forms that the standard allows, and contradictions are refused."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.slow import examples
from support.videos import boxes as tree_of

from dali_stream.errors import DecodeError
from dali_stream.mp4.blocks import cut
from dali_stream.mp4.boxes import HEAD, UPRIGHT, box, full_box, read_moov
from dali_stream.mp4.clip import span
from dali_stream.mp4.hidden import hidden_frames
from dali_stream.mp4.index import VideoIndex, read_index
from dali_stream.mp4.keyframes import has_other_keyframes
from dali_stream.mp4.muxer import Track, head
from dali_stream.mp4.timing import find_packets
from dali_stream.storage import LocalStore

FTYP = box(b"ftyp", b"isom", bytes(4))
HEADER = UPRIGHT + bytes([0, 160, 0, 0, 0, 128, 0, 0])
Tables = dict[bytes, bytes]
MOVIE = 1000  # ticks per second of the movie, which an edit list counts in


def table(kind: bytes, *columns: Sequence[int], form: str = "I") -> bytes:
    """A table of a box: rows of these columns, each a number of 32 or 64 bits, signed or not."""
    rows = b"".join(struct.pack(f">{form * len(row)}", *row) for row in zip(*columns, strict=True))
    return full_box(kind, 0, 0, struct.pack(">I", len(columns[0])), rows)


def sizes(values: Sequence[int], fixed: int = 0) -> bytes:
    return full_box(
        b"stsz", 0, 0, struct.pack(f">II{len(values) * (not fixed)}I", fixed, len(values), *([] if fixed else values))
    )


def descriptions(*entries: bytes) -> bytes:
    return full_box(b"stsd", 0, 0, struct.pack(">I", len(entries)), *entries)


def edit_list(*edits: tuple[int, int, int], version: int = 0) -> bytes:
    """An edit list of (duration in ticks of the movie, first tick of the media, rate)."""
    rows = [struct.pack(">QqHH" if version else ">IiHH", duration, media, rate, 0) for duration, media, rate in edits]
    return box(b"edts", full_box(b"elst", version, 0, struct.pack(">I", len(rows)), *rows))


def track(tables: Tables, *, handler: bytes = b"vide", version: int = 0, timescale: int = 600, edits: bytes = b"") -> bytes:
    mdhd = full_box(b"mdhd", version, 0, bytes(16 if version else 8), struct.pack(">I", timescale), bytes(12))
    tkhd = full_box(b"tkhd", version, 3, bytes(36 if version else 24), bytes(12), HEADER)
    hdlr = full_box(b"hdlr", 0, 0, bytes(4), handler, bytes(13))
    return box(b"trak", tkhd, edits, box(b"mdia", mdhd, hdlr, box(b"minf", box(b"stbl", *tables.values()))))


def movie(media: int, *tracks: bytes, version: int = 0, movie_timescale: int = MOVIE) -> bytes:
    """An MP4 with `media` bytes of media from `BEGIN` on, before its index."""
    mvhd = full_box(b"mvhd", version, 0, bytes(16 if version else 8), struct.pack(">I", movie_timescale), bytes(80))
    return FTYP + box(b"mdat", bytes(media)) + box(b"moov", mvhd, *tracks)


BEGIN = len(FTYP) + 8


def index_of(folder: Path, video: bytes) -> VideoIndex:
    (folder / "a.mp4").write_bytes(video)
    store = LocalStore(str(folder))
    try:
        return read_index(store, "a.mp4")
    finally:
        store.close()


def runs(values: Sequence[Any], chance: random.Random) -> list[tuple[int, Any]]:
    """(count, value) of neighbours, some of which are equal in two runs."""
    found: list[tuple[int, Any]] = []
    for value in values:
        if found and found[-1][1] == value and chance.random() < 0.9:
            found[-1] = found[-1][0] + 1, value
        else:
            found.append((1, value))
    return found


class Written:
    """An MP4 with tables by a seed, and what they say.

    Attributes: `video`, the file; `offset`, `size`, `pts`, `config` per packet; `keyframes`; `displayed`, the packets whose
    frames the edit list does not hide.
    """

    def __init__(self, seed: int, codec: bytes) -> None:
        chance = random.Random(seed)
        n, version = chance.randint(1, 14), chance.randint(0, 1)
        fixed = chance.choice((0, 0, 7))
        self.size = [fixed or chance.randint(0, 300) for _ in range(n)]
        lengths: list[int] = []
        while sum(lengths) < n:
            lengths.append(min(chance.choice((1, 2, 2, 5)), n - sum(lengths)))
        kinds = [1] * len(lengths) if chance.random() < 0.7 else sorted(chance.randint(1, 3) for _ in lengths)
        self.config = [kind - 1 for kind, length in zip(kinds, lengths, strict=True) for _ in range(length)]
        starts, places, at = [sum(lengths[:i]) for i in range(len(lengths))], {}, BEGIN
        gaps = chance.choice((0, 0, 40))
        for chunk in sorted(range(len(lengths)), key=lambda chunk: chance.random() if gaps else chunk):
            at += chance.randint(0, gaps)
            places[chunk] = at
            at += sum(self.size[starts[chunk] : starts[chunk] + lengths[chunk]])
        self.offset = []
        for chunk, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            self.offset += [places[chunk] + sum(self.size[start:i]) for i in range(start, start + length)]
        every = chance.random() < 0.2
        begins = {i for i in range(n) if i and self.config[i] != self.config[i - 1]}
        self.keyframes = [i for i in range(n) if every or not i or i in begins or chance.random() < 0.25]
        stays = [chance.choice((20, 20, 20, 30)) for _ in range(n)]
        dts = [sum(stays[:i]) for i in range(n)]
        shown = list(dts)
        if chance.random() < 0.6:  # display order differs from decode order for a few frames
            for _ in range(3):
                i = chance.randrange(n)
                j = min(i + chance.randint(1, 3), n - 1)
                shown[i], shown[j] = shown[j], shown[i]
        late = chance.choice((0, 40))
        shifts = [late + after - before for before, after in zip(dts, shown, strict=True)]
        self.pts, self.displayed, edits = [time + late for time in shown], [*range(n)], []
        if chance.random() < 0.6:
            start = chance.choice((0, late, chance.choice(self.pts), chance.choice(self.pts) - 7))
            length = chance.choice((0, 60_000, 100, 101))
            # 100 ms are 60 ticks, and 101 ms are 60.6, which FFmpeg rounds to the nearest tick.
            stop = start + {0: 1 << 62, 60_000: 36_000, 100: 60, 101: 61}[length]
            delays = chance.choice(([], [500], [250, 50]))
            edits = [(delay, -1, 1) for delay in delays] + [(length, start, 1)]
            self.displayed = [packet for packet in range(n) if start <= self.pts[packet] < stop]
            begin = min((self.pts[packet] for packet in self.displayed), default=0)
            self.pts = [time - begin + sum(delays) * 600 // MOVIE for time in self.pts]
        entries = [box(codec, bytes(78), box(b"note", bytes([i])), box(b"btrt", bytes(12))) for i in range(max(kinds))]
        self.configs = tuple(box(codec, bytes(78), box(b"note", bytes([i]))) for i in range(max(kinds)))
        per_chunk = runs(list(zip(lengths, kinds, strict=True)), chance)
        firsts = [1 + sum(count for count, _ in per_chunk[:i]) for i in range(len(per_chunk))]
        durations, late_runs = runs(stays, chance), runs(shifts, chance)
        wide = chance.random() < 0.5
        tables = {
            b"stsd": descriptions(*entries),
            b"stts": table(b"stts", *zip(*durations, strict=True)),
            b"ctts": table(b"ctts", *zip(*late_runs, strict=True), form="i") if any(shifts) else b"",
            b"stss": b"" if every else table(b"stss", [i + 1 for i in self.keyframes]),
            b"stsz": sizes(self.size, fixed),
            b"stsc": table(b"stsc", firsts, *zip(*(value for _, value in per_chunk), strict=True)),
            b"stco": table(b"co64" if wide else b"stco", [places[c] for c in range(len(lengths))], form="Q" if wide else "I"),
        }
        video = track(tables, version=version, edits=edit_list(*edits, version=version) if edits else b"")
        sound = track({}, handler=b"soun")
        self.video = movie(at - BEGIN, *([sound, video] if chance.random() < 0.5 else [video]), version=version)

    def __len__(self) -> int:
        return len(self.size)

    def index(self, folder: Path) -> VideoIndex:
        """The index of the file. The example is left out if the edit list hides all frames, or frames in between: errors."""
        assume(self.displayed)
        order = sorted(range(len(self)), key=lambda packet: self.pts[packet])
        places = [order.index(packet) for packet in self.displayed]
        before, after = order[: min(places)], order[max(places) + 1 :]
        assume(all(self.gop(packet) <= self.gop(order[min(places)]) for packet in before))
        assume(all(self.gop(packet) >= self.gop(order[max(places)]) for packet in after))
        return index_of(folder, self.video)

    def gop(self, packet: int) -> int:
        return max(key for key in self.keyframes if key <= packet)

    def needs_the_gop_before(self, packet: int) -> bool:
        """Whether the packet's frame is displayed before the keyframe that it follows, which only happens in open GOPs."""
        return self.pts[packet] < self.pts[self.gop(packet)]

    def decode_start(self, packet: int) -> int:
        start = self.gop(packet)
        return self.gop(start - 1) if self.needs_the_gop_before(packet) and start else start


@given(st.integers(0, 1 << 32), st.sampled_from([b"hvc1", b"avc1", b"vp09"]))
@examples(400)
def test_the_index_is_what_the_tables_say(tmp_path_factory: pytest.TempPathFactory, seed: int, codec: bytes) -> None:
    written = Written(seed, codec)
    index, every = written.index(tmp_path_factory.getbasetemp()), range(len(written))
    assert (len(index), index.timescale, index.track_header, index.configs) == (len(written), 600, HEADER, written.configs)
    assert index.index_bytes == len(written.video) - written.video.index(b"moov") - 4
    for name in ("offset", "config", "keyframes"):
        assert getattr(index, name)[:].tolist() == getattr(written, name), name
    assert index.size().tolist() == written.size
    assert index.end[:].tolist() == [offset + size for offset, size in zip(written.offset, written.size, strict=True)]
    assert index.pts().tolist() == written.pts
    order = sorted(every, key=lambda packet: written.pts[packet])
    assert index.shown_at().tolist() == sorted(written.pts)
    assert index.displayed_packets.tolist() == [packet for packet in order if packet in written.displayed]
    assert (len(index.displayed), index.hidden) == (len(written.displayed), len(written) - len(written.displayed))
    assert index.display_order[:].tolist() == order
    assert index.place(np.array(every)).tolist() == [order.index(packet) for packet in every]
    assert index.reordered == (order != [*every])
    assert index.gop_start(np.array(every)).tolist() == [written.gop(packet) for packet in every]
    assert index.open_gops == any(map(written.needs_the_gop_before, every))
    assert index.longest_gop == max(b - a for a, b in itertools.pairwise([*written.keyframes, len(written)]))
    assert index.decode_starts(np.arange(len(written))).tolist() == [written.decode_start(packet) for packet in every]


@given(st.integers(0, 1 << 32), st.sampled_from([b"hvc1", b"avc1"]))
@examples(200)
def test_a_span_is_what_decoding_a_frame_takes(tmp_path_factory: pytest.TempPathFactory, seed: int, codec: bytes) -> None:
    written = Written(seed, codec)
    index, every = written.index(tmp_path_factory.getbasetemp()), range(len(written))
    for packet in every:
        start, stop = span(index, packet)
        assert start == written.decode_start(packet)
        # FFmpeg delays frames of H.264 that does not begin with an IDR frame, so it decodes four more frames with later times.
        later = [i for i in every[packet + 1 :] if written.pts[i] > written.pts[packet]][:4]
        holds_back = codec == b"avc1" and index.open_gops and start > 0
        assert stop == (later[-1] if holds_back and later else packet)


@given(st.integers(0, 1 << 32), st.sampled_from([b"hvc1", b"avc1"]), st.sampled_from([1, 200, 1000]), st.randoms())
@examples(200)
def test_blocks_hold_what_decoding_their_frames_takes(
    tmp_path_factory: pytest.TempPathFactory, seed: int, codec: bytes, size: int, chance: random.Random
) -> None:
    written = Written(seed, codec)
    index = written.index(tmp_path_factory.getbasetemp())
    packets = np.array([chance.choice([-1, *range(len(written))]) for _ in range(8)])
    found = cut(index, packets, np.where(packets >= 0, index.decode_starts(packets), -1), size)
    assert len(found.start) == len(found.stop) <= len(packets)
    assert ((found.first == -1) == (packets < 0)).all()
    assert ((found.last == -1) == (packets < 0)).all()
    shown = packets >= 0
    assert {*found.first[shown].tolist()} == {*range(len(found.start))}  # each block begins with a GOP that a frame begins with
    for first, last, packet in zip(
        found.first[shown].tolist(), found.last[shown].tolist(), packets[shown].tolist(), strict=True
    ):
        blocks = [(int(found.start[k]), int(found.stop[k])) for k in range(first, last + 1)]
        begin, end = span(index, packet)
        for needed in range(begin, end + 1):
            at = written.offset[needed]
            assert any(start <= at and at + written.size[needed] <= stop for start, stop in blocks)


@given(st.integers(0, 1 << 32), st.sampled_from([0.1, 0.25, 0.5]), st.integers(0, 20), st.integers(0, 20))
@examples(200)
def test_the_frame_of_a_row_is_the_nearest_one_of_its_episode(
    tmp_path_factory: pytest.TempPathFactory, seed: int, share: float, first: int, length: int
) -> None:
    written, fps = Written(seed, b"hvc1"), 30.0
    index = written.index(tmp_path_factory.getbasetemp())
    times = np.array(written.pts) / 600
    hidden = np.array([packet not in written.displayed for packet in range(len(written))])
    interval = (first / fps, (first + length) / fps if length else float("inf"))
    asked = np.arange(25) / fps + np.resize([0.0, 0.2 / fps, -0.3 / fps], 25)
    tolerance = share / fps
    found = find_packets(index, interval, asked, tolerance)
    for seconds, packet in zip((interval[0] + asked).tolist(), found.tolist(), strict=True):
        away = np.where(hidden, np.inf, np.abs(times - seconds))
        nearest = np.flatnonzero(away == away.min()).tolist()  # two, at the middle between their times
        inside = (interval[0] <= times + tolerance) & (times + tolerance < interval[1])
        assert packet in {near if away[near] <= tolerance and inside[near] else -1 for near in nearest}


# ---- tables that contradict themselves, or the file


ENTRY = box(b"hvc1", bytes(78))
TABLES = {
    b"stsd": descriptions(ENTRY),
    b"stts": table(b"stts", [6], [100]),
    b"stss": table(b"stss", [1, 4]),
    b"stsz": sizes([10, 20, 30, 40, 50, 60]),
    b"stsc": table(b"stsc", [1], [2], [1]),
    b"stco": table(b"stco", [BEGIN, BEGIN + 30, BEGIN + 100]),
}
TWO = descriptions(ENTRY, ENTRY)


def with_tables(*changed: bytes, media: int = 210, **options: Any) -> bytes:
    return movie(media, track(TABLES | {each[4:8]: each for each in changed}, **options))


def without(kind: bytes) -> bytes:
    return movie(210, track({name: body for name, body in TABLES.items() if name != kind}))


FILE = len(with_tables())
BROKEN: dict[str, tuple[bytes, str]] = {  # the file, and its error; none if it is sound
    "sound": (with_tables(), ""),
    "no stsd": (without(b"stsd"), "must have 1 to 127 sample descriptions .*, got 0"),
    "no stts": (without(b"stts"), "must have sample times"),
    "no stsz": (without(b"stsz"), "must have sample sizes"),
    "no stsc": (without(b"stsc"), "must have a chunk table"),
    "no stco": (without(b"stco"), "must have a chunk table"),
    "no stss, so every sample is a keyframe": (without(b"stss"), ""),
    "no stbl": (with_tables().replace(b"stbl", b"none"), "must have a sample table"),
    "no mdhd": (with_tables().replace(b"mdhd", b"none"), "must have a box 'mdhd'"),
    "no tkhd": (with_tables().replace(b"tkhd", b"none"), "must have a box 'tkhd'"),
    "no mvhd": (with_tables().replace(b"mvhd", b"none"), ""),
    "no mvhd for an edit list": (with_tables(edits=edit_list((0, 0, 1))).replace(b"mvhd", b"none"), "must have a box 'mvhd'"),
    "no time": (with_tables(timescale=0), "the timescale must be positive, got 0"),
    "one tick a second": (with_tables(timescale=1), ""),
    "no track": (movie(210), "must have exactly one video track, got 0"),
    "two tracks": (movie(210, track(TABLES), track(TABLES)), "must have exactly one video track, got 2"),
    "more sizes than there are": (
        with_tables(sizes([1] * 6).replace(struct.pack(">II", 0, 6), struct.pack(">II", 0, 7))),
        "stsz table: must have the sizes of 7 samples, got 6",
    ),
    "one size": (with_tables(sizes([35] * 6, 35)), ""),
    "one size, for 65536": (with_tables(sizes([1] * 65536, 1)), "stsc table: must place 65536 samples, got 6"),
    "one size, for more": (with_tables(sizes([1] * 65537, 1)), "stsz table: must have the sizes of 65537 samples, got 0"),
    "no frames": (with_tables(sizes([])), "the video track has no frames"),
    "fragments": (movie(210, track(TABLES | {b"stsz": sizes([])}), box(b"mvex")), "fragmented MP4"),
    "fewer times": (with_tables(table(b"stts", [5], [100])), "stts table: must describe 6 samples, got 5"),
    "more times": (with_tables(table(b"stts", [6, 1], [100, 100])), "stts table: must describe 6 samples, got 7"),
    "times in two runs": (with_tables(table(b"stts", [2, 4], [100, 5])), ""),
    "fewer shifts": (with_tables(table(b"ctts", [5], [100])), "ctts table: must describe 6 samples, got 5"),
    "fewer entries than it claims": (
        with_tables(table(b"stts", [6], [100]).replace(struct.pack(">I", 1), struct.pack(">I", 2), 1)),
        "invalid stts table: must have 2 entries, got 16 bytes",
    ),
    "more entries than it claims": (with_tables(box(b"stts", TABLES[b"stts"][8:], bytes(4))), ""),
    "two frames at a time": (with_tables(table(b"stts", [1, 1, 4], [100, 0, 100])), "two frames at the same time"),
    "the first is no keyframe": (with_tables(table(b"stss", [2, 4])), r"stss table .*must be 1, \.\.\. up to 6 in increasing"),
    "no keyframe": (with_tables(table(b"stss", [])), "stss table .* in increasing order"),
    "the last is a keyframe": (with_tables(table(b"stss", [1, 6])), ""),
    "keyframes beyond the last": (with_tables(table(b"stss", [1, 7])), "stss table .* in increasing order"),
    "keyframes far beyond the last": (with_tables(table(b"stss", [1, 9])), "stss table .* in increasing order"),
    "a keyframe twice": (with_tables(table(b"stss", [1, 3, 3])), "stss table .* in increasing order"),
    "keyframes that fall": (with_tables(table(b"stss", [1, 4, 3])), "stss table .* in increasing order"),
    "chunks from the second on": (with_tables(table(b"stsc", [2], [2], [1])), "stsc table: must cover 3 chunks"),
    "no chunks": (with_tables(table(b"stsc", [], [], [])), "stsc table: must cover 3 chunks"),
    "chunks twice": (with_tables(table(b"stsc", [1, 1], [2, 2], [1, 1])), "stsc table: must cover 3 chunks"),
    "the last chunk by itself": (with_tables(table(b"stsc", [1, 3], [2, 2], [1, 1])), ""),
    "chunks beyond the last": (with_tables(table(b"stsc", [1, 4], [2, 2], [1, 1])), "stsc table: must cover 3 chunks"),
    "description 0": (with_tables(table(b"stsc", [1], [2], [0])), "stsc table: must refer to the 1 sample descriptions"),
    "description 2": (with_tables(table(b"stsc", [1], [2], [2])), "stsc table: must refer to the 1 sample descriptions"),
    "description 2 of 2": (with_tables(table(b"stsc", [1], [2], [2]), TWO), ""),
    "a description within a GOP": (with_tables(table(b"stsc", [1, 2], [2, 2], [1, 2]), TWO), "changes between frames"),
    "a description per GOP": (
        with_tables(table(b"stsc", [1, 2], [3, 3], [1, 2]), table(b"stco", [BEGIN, BEGIN + 60]), TWO), ""
    ),
    "larger chunks": (with_tables(table(b"stsc", [1], [3], [1])), "stsc table: must place 6 samples, got 9"),
    "empty chunks": (with_tables(table(b"stsc", [1, 2, 3], [6, 0, 0], [1, 1, 1])), ""),
    "up to the end": (with_tables(table(b"stco", [BEGIN, BEGIN, FILE - 110])), ""),
    "beyond the end": (
        with_tables(table(b"stco", [BEGIN, BEGIN, FILE - 109])),
        rf"sample 5 of 6 must end within the {FILE} bytes .*, got bytes {FILE - 59} to {FILE + 1}\. The file is truncated",
    ),
    "beyond 64 bits": (
        movie(210, track({k: v for k, v in TABLES.items() if k != b"stco"}
                         | {b"co64": table(b"co64", [BEGIN, BEGIN, 1 << 63], form="Q")})),
        "sample 4 of 6 must .*, got bytes -",
    ),
    "a short description": (with_tables(descriptions(box(b"hvc1", bytes(77)))), "b'hvc1' must have at least 78 bytes, got 77"),
    "127 descriptions": (with_tables(descriptions(*[ENTRY] * 127)), ""),
    "128 descriptions": (with_tables(descriptions(*[ENTRY] * 128)), "must have 1 to 127 sample descriptions .*, got 128"),
    "an edit list of delays": (with_tables(edits=edit_list((5, -1, 1), (7, -1, 1))), ""),
    "two parts": (with_tables(edits=edit_list((0, 0, 1), (0, 0, 1))), "edit list must be one part .*, got 2 parts"),
    "twice as fast": (with_tables(edits=edit_list((0, 0, 2))), "edit list must be one part .*, got 1 part"),
    "a pause at the end": (with_tables(edits=edit_list((0, 0, 1), (9, -1, 1))), "edit list must be one part .*, got 1 part"),
    "a slower part": (with_tables(edits=edit_list((0, 0, 0))), "edit list must be one part .*, got 1 part"),
    "an edit list in no time": (movie(210, track(TABLES, edits=edit_list((0, 0, 1))), movie_timescale=0), "one part .*got 1"),
    "five frames are hidden": (with_tables(edits=edit_list((0, 500, 1), version=1), version=1), ""),
    "all frames are hidden": (with_tables(edits=edit_list((0, 501, 1))), "must display a frame, got 6 hidden frames"),
    "two delays": (with_tables(edits=edit_list((5, -1, 1), (7, -1, 1), (0, 0, 1))), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_tables_that_contradict_each_other_are_refused(name: str, tmp_path: Path) -> None:
    video, error = BROKEN[name]
    if not error:
        assert len(index_of(tmp_path, video)) == 6
        return
    with pytest.raises(DecodeError, match=rf"a\.mp4: .*{error}"):
        index_of(tmp_path, video)


def test_an_index_is_wherever_boxes_lead(tmp_path: Path) -> None:
    """In front of the media or after them, of any size, and at each place around the end of the first read."""
    store = LocalStore(str(tmp_path))

    def read(*boxes: bytes) -> bytes:
        (tmp_path / "a.mp4").write_bytes(FTYP + b"".join(boxes))
        try:
            return read_moov(store, "a.mp4")
        finally:
            store.close()

    def wide(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I4sQ", 1, kind, 16 + len(body)) + body

    for size in (0, 100, HEAD - 20, HEAD + 5000):
        body = random.Random(size).randbytes(size)
        for form in (box, wide):
            moov, media = form(b"moov", body), form(b"mdat", bytes(3 * HEAD))
            for boxes in (
                [moov],
                [moov, media],
                [media, moov],
                [box(b"free"), moov, media],
                [media, box(b"free"), moov, media],
            ):
                assert read(*boxes) == body
        assert read(struct.pack(">I4s", 0, b"moov") + body) == body  # 0: up to the end of the file
    for before in range(HEAD - len(FTYP) - 40, HEAD - len(FTYP) + 4):
        assert read(box(b"free", bytes(before - 8)), box(b"moov", body), b"") == body


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (b"\0\0\0\7free", "box 'free' at byte 16 must have at least 8 bytes for its header, got 7"),
        (b"\0\0\0\1free" + (15).to_bytes(8, "big"), "box 'free' at byte 16 must have at least 16 bytes .*, got 15"),
        (b"\0\0\0\1free" + (17).to_bytes(8, "big"), "box 'free' at byte 16 must have 17 bytes, got 16"),
        (b"\0\0\0\x09free", "box 'free' at byte 16 must have 9 bytes, got 8"),
        (b"\0\0\0\7fre", "the file ends in the middle of a box header at byte 16"),
        (b"", "no moov box"),
        (box(b"free"), "no moov box"),
        (box(b"free") * 10_000, "not an MP4, because it has more than 10000 boxes"),
        (struct.pack(">I4sQ", 1, b"moov", (256 << 20) + 17) + bytes(8), r"must have \d+ bytes, got 24"),
    ],
)
def test_boxes_that_do_not_fit_are_refused(end: bytes, error: str, tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match=error):
        index_of(tmp_path, FTYP + end)


def test_an_index_of_more_than_256_mib_is_not_read(tmp_path: Path) -> None:
    size = (256 << 20) + 1
    with open(tmp_path / "a.mp4", "wb") as file:
        file.write(FTYP + struct.pack(">I4s", size, b"moov"))
        file.truncate(len(FTYP) + size)
    with pytest.raises(DecodeError, match="box 'moov' must have at most 268435456 bytes, got 268435457"):
        read_index(LocalStore(str(tmp_path)), "a.mp4")


# ---- the head of an MP4 that is written


@st.composite
def tracks(draw: st.DrawFn) -> Track:
    n = draw(st.integers(1, 40))
    numbers = st.integers(0, 2000)
    stay = draw(st.lists(st.integers(1, 5000), min_size=n, max_size=n))
    order = draw(st.permutations(range(n)))
    times = np.cumsum(stay) - stay[0]
    configs = tuple(box(b"vp08", bytes(78), box(b"note", bytes([i]))) for i in range(draw(st.integers(1, 3))))
    # Descriptions change at keyframes only.
    sync = np.array([True, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))])
    config = np.array(draw(st.lists(st.integers(0, len(configs) - 1), min_size=n, max_size=n)))[np.cumsum(sync) - 1]
    size = np.array(draw(st.lists(st.one_of(numbers, st.just(CHUNK)), min_size=n, max_size=n)))
    header = UPRIGHT + bytes([0, 160, 0, 0, 0, 128, 0, 0])
    return Track(draw(st.integers(1, 1 << 31)), header, configs, size, times[np.array(order)], sync, config, stay[-1])


CHUNK = 700_000


@given(tracks())
@examples(60)
def test_the_head_of_an_mp4_reads_back(tmp_path_factory: pytest.TempPathFactory, track: Track) -> None:
    _check_head(track, tmp_path_factory.getbasetemp())


FOUR_GIB = 1 << 32


@pytest.mark.parametrize("nbytes", [5 << 30, FOUR_GIB, FOUR_GIB - 8, FOUR_GIB - 9, FOUR_GIB - 4096, FOUR_GIB - 6000])
def test_more_than_four_gigabytes(nbytes: int, tmp_path: Path) -> None:
    size = np.array([1 << 30, 1 << 30, 1 << 30, nbytes - (3 << 30)])
    every = np.arange(4)
    _check_head(Track(30, HEADER, (box(b"vp08", bytes(78)),), size, every, every == every, 0 * every, 1), tmp_path)


def _check_head(track: Track, folder: Path) -> None:
    """Check that the reader finds the values of `track` in a file with its head. The file is sparse, without samples."""
    before = head(track)
    with open(folder / "a.mp4", "wb") as file:
        file.write(before)
        file.truncate(len(before) + int(track.size.sum()))
    nbytes = int(track.size.sum())
    if nbytes + 8 < FOUR_GIB:
        assert struct.unpack(">I4s", before[-8:]) == (nbytes + 8, b"mdat")
    else:
        assert struct.unpack(">I4sQ", before[-16:]) == (1, b"mdat", nbytes + 16)
    assert (b"co64" in before) == (nbytes >= FOUR_GIB - 4096)
    table = read_index(LocalStore(str(folder)), "a.mp4")
    assert (table.timescale, table.track_header, table.configs) == (track.timescale, track.header, track.configs)
    np.testing.assert_array_equal(table.offset, len(before) + np.cumsum(track.size) - track.size)
    np.testing.assert_array_equal(table.size(), track.size)
    np.testing.assert_array_equal(table.pts(), track.pts)
    np.testing.assert_array_equal(table.keyframes, np.flatnonzero(track.sync))
    np.testing.assert_array_equal(table.config, track.config)


def test_headers_have_the_fields_of_the_standard() -> None:
    """They have version 1 (ISO/IEC 14496-12, 8.2.2, 8.3.2, 8.4.2). The movie has the clock of its track."""
    shown = np.array([0, 3, 1, 2]) * 512
    track = Track(15360, HEADER, (box(b"vp08", bytes(78)),), np.full(4, 10), shown, shown == 0, 0 * shown, 600)
    before = head(track)
    [(_, ftyp), (_, moov), _] = tree_of(before + bytes(40))
    assert ftyp == b"isom" + struct.pack(">I", 512) + b"isomiso2iso4mp41"
    duration, matrix = 3 * 512 + 600, HEADER[:36]
    rate_and_volume = struct.pack(">IH", 1 << 16, 1 << 8)
    times = struct.pack(">IQQIQ", 1 << 24, 0, 0, 15360, duration)
    assert moov[0] == [b"mvhd", times + rate_and_volume + bytes(10) + matrix + bytes(24) + struct.pack(">I", 2)]
    tkhd, (_, [mdhd, hdlr, (_, minf)]) = moov[1][1]
    enabled = struct.pack(">IQQIIQ", 1 << 24 | 3, 0, 0, 1, 0, duration)
    assert tkhd == [b"tkhd", enabled + bytes(16) + HEADER]
    assert mdhd == [b"mdhd", times + struct.pack(">HH", 0x55C4, 0)]  # no language
    assert hdlr == [b"hdlr", bytes(8) + b"vide" + bytes(12) + b"VideoHandler\0"]
    assert [name for name, _ in minf] == [b"vmhd", b"dinf", b"stbl"]
    assert minf[0][1] == struct.pack(">I", 1) + bytes(8)
    reference = box(b"dref", bytes(4), struct.pack(">I", 1), box(b"url ", struct.pack(">I", 1)))
    assert minf[1][1] == reference
    tables = dict(minf[2][1])
    assert tables[b"stts"] == struct.pack(">6I", 0, 2, 3, 512, 1, 600)
    assert tables[b"ctts"] == struct.pack(">II", 1 << 24, 3) + struct.pack(">IiIiIi", 1, 0, 1, 1024, 2, -512)
    assert tables[b"stss"] == struct.pack(">III", 0, 1, 1)
    assert tables[b"stsc"] == struct.pack(">5I", 0, 1, 1, 4, 1)
    assert tables[b"stsz"] == struct.pack(">7I", 0, 0, 4, *[10] * 4)
    assert tables[b"stco"] == struct.pack(">III", 0, 1, len(before))


# ---- a look into the first packets


def with_packets(packets: Sequence[bytes], entry: bytes, keyframes: Sequence[int], gap: int = 0) -> bytes:
    """An MP4 of these packets, each after `gap` other bytes."""
    offsets = [BEGIN + sum(map(len, packets[:i])) + gap * (i + 1) for i in range(len(packets))]
    tables = {
        b"stsd": descriptions(entry),
        b"stts": table(b"stts", [len(packets)], [100]),
        b"stss": table(b"stss", [keyframe + 1 for keyframe in keyframes]),
        b"stsz": sizes([*map(len, packets)]),
        b"stsc": table(b"stsc", [1], [1], [1]),
        b"stco": table(b"stco", offsets),
    }
    media = b"".join(b"\x84" * gap + packet for packet in packets)
    return FTYP + box(b"mdat", media) + movie(0, track(tables))[BEGIN:]


VP9 = box(b"vp09", bytes(78))
SHOWN, HIDDEN = b"\x86\x55\x66", b"\x84\x55\x66"


@pytest.mark.parametrize(
    ("packets", "gap", "expected"),
    [
        ([SHOWN] * 6, 0, (0, 6)),
        ([SHOWN, HIDDEN, SHOWN, HIDDEN, HIDDEN], 0, (3, 5)),
        ([HIDDEN] * 128 + [SHOWN] * 9, 0, (128, 128)),  # the first 128
        ([SHOWN, HIDDEN, SHOWN, HIDDEN], 5, (2, 4)),
        ([SHOWN] * 15 + [HIDDEN] * 5, 5, (1, 16)),  # with 16 reads
        ([SHOWN, HIDDEN + bytes((8 << 20) - 6), HIDDEN], 0, (1, 2)),  # of 8 MiB
        ([SHOWN, HIDDEN + bytes((8 << 20) - 5), HIDDEN], 0, (0, 1)),
        ([SHOWN + bytes(9 << 20), HIDDEN], 0, (0, 0)),
        ([SHOWN, b"", HIDDEN], 0, (1, 3)),
    ],
)
def test_hidden_frames_of_a_file(packets: list[bytes], gap: int, expected: tuple[int, int], tmp_path: Path) -> None:
    index = index_of(tmp_path, with_packets(packets, VP9, [0], gap))
    assert hidden_frames(LocalStore(str(tmp_path)), index, "vp9") == expected
    assert hidden_frames(LocalStore(str(tmp_path)), index, "h264") == (0, 0)


def test_damaged_frames_are_not_looked_into(tmp_path: Path) -> None:
    damaged = b"\x32\x05"  # a frame of AV1 that ends before it begins
    index = index_of(tmp_path, with_packets([b"\x32\x01\x00", damaged, b"\x32\x01\x10"], box(b"av01", bytes(78)), [0]))
    assert hidden_frames(LocalStore(str(tmp_path)), index, "av1") == (1, 2)


def nal(*units: bytes) -> bytes:
    return b"".join(len(unit).to_bytes(4, "big") + unit for unit in units)


AVC = box(b"avc1", bytes(78), box(b"avcC", bytes([1, 66, 0, 30, 0xFF, 0xE0, 0])))
IDR, INTRA, PREDICTED = nal(b"\x65\x88\x84"), nal(b"\x41\x88\x84"), nal(b"\x41\x9a\x02")


@pytest.mark.parametrize(
    ("packets", "keyframes", "expected"),
    [
        ([IDR, PREDICTED, IDR], [0, 2], False),
        ([INTRA, PREDICTED, IDR], [0, 2], True),
        ([IDR, PREDICTED, INTRA], [0, 2], True),
        ([IDR, IDR, INTRA], [0, 1, 2], False),  # the first two
        ([IDR], [0], False),
        ([nal(b"\x06" * 4082) + INTRA, IDR], [0, 1], True),  # the first 4096 bytes
        ([nal(b"\x06" * 4088) + INTRA, IDR], [0, 1], False),
    ],
)
def test_keyframes_that_are_not_idr_frames(packets: list[bytes], keyframes: list[int], expected: bool, tmp_path: Path) -> None:
    index = index_of(tmp_path, with_packets(packets, AVC, keyframes, gap=3))
    store = LocalStore(str(tmp_path))
    assert has_other_keyframes(store, index, "h264") == expected
    assert not has_other_keyframes(store, index, "vp9")


@pytest.mark.parametrize(("second", "found"), [(IDR, [0, 2]), (INTRA, [0, 2]), (PREDICTED, [0])])
def test_where_an_intra_refresh_begins_is_no_keyframe(second: bytes, found: list[int], tmp_path: Path) -> None:
    """With periodic intra refresh, x264 lists these frames. Decoding can only start at the first."""
    index = index_of(tmp_path, with_packets([IDR, PREDICTED, nal(b"\x06" * 4000) + second], AVC, [0, 2], gap=3))
    assert index.keyframes[:].tolist() == found
