"""How an epoch is cut into batches: nothing lost, nothing twice, as many batches on each rank, from any position on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slow import examples

from dali_stream.order.batches import LAST_BATCH, Batches

cuts = st.builds(
    Batches, st.integers(0, 300), st.integers(1, 20), st.sampled_from((1, 2, 3, 4, 8)), st.sampled_from(LAST_BATCH)
)


def spans(batches: Batches, position: int = 0) -> list[tuple[int, int]]:
    """The global batches from `position` on, as a loader walks them."""
    found = []
    while batches.count(position):
        found.append(batches.span(position))
        position = found[-1][1]
    return found


def shares(batches: Batches, span: tuple[int, int]) -> list[int]:
    """Positions of each rank in a global batch: rank r serves those that are r modulo the world size."""
    world = batches.world_size
    return [sum(g % world == rank for g in range(*span)) for rank in range(world)]


@given(cuts, st.integers(0, 320))
@examples(300)
def test_spans_follow_each_other_and_are_as_many_as_counted(batches: Batches, position: int) -> None:
    found = spans(batches, position)
    assert len(found) == batches.count(position)
    for number, (start, stop) in enumerate(found):
        assert start == (found[number - 1][1] if number else position)
        assert start < stop <= batches.frames
        assert batches.count(start) == len(found) - number


@given(cuts)
@examples(100)
def test_each_batch_begins_where_its_span_does(batches: Batches) -> None:
    begins = [start for start, _ in spans(batches, 0)]
    assert [batches.start_of(number) for number in range(len(begins) + 1)] == [*begins, batches.frames]
    with pytest.raises(ValueError, match=f"batch must be at most {len(begins)}, the number of batches of an epoch, got"):
        batches.start_of(len(begins) + 1)


@given(cuts, st.integers(0, 320))
@examples(300)
def test_ranks_get_equal_shares(batches: Batches, position: int) -> None:
    found = spans(batches, position)
    for number, span in enumerate(found):
        share, last = shares(batches, span), number == len(found) - 1
        if not last or batches.last_batch == "drop":
            assert share == [batches.batch_size] * batches.world_size
        elif batches.last_batch == "partial":
            assert 1 <= min(share) <= max(share) <= min(min(share) + 1, batches.largest)
        else:
            assert max(share) <= batches.batch_size == batches.largest


@given(cuts, st.integers(0, 320))
@examples(300)
def test_what_is_left_out(batches: Batches, position: int) -> None:
    left = max(batches.frames - position, 0)
    served = sum(stop - start for start, stop in spans(batches, position))
    if batches.last_batch == "drop":
        assert served == left // batches.stride * batches.stride
    elif batches.last_batch == "pad" or left >= batches.world_size:
        assert served == left
    else:  # fewer samples than ranks, and no batch that could take them
        assert served == 0


def test_examples() -> None:
    """23 frames, 4 a batch, 2 ranks: 8 positions a step."""
    steps = {name: spans(Batches(23, 4, 2, name)) for name in LAST_BATCH}
    assert steps["drop"] == [(0, 8), (8, 16)]
    assert steps["partial"] == steps["pad"] == [(0, 8), (8, 16), (16, 23)]
    assert spans(Batches(17, 4, 2, "partial")) == [(0, 8), (8, 17)]
    assert shares(Batches(17, 4, 2, "partial"), (8, 17)) == [5, 4]
    assert spans(Batches(17, 4, 2, "pad")) == [(0, 8), (8, 16), (16, 17)]


@pytest.mark.parametrize("last_batch", LAST_BATCH)
def test_an_epoch_that_fits_is_cut_alike(last_batch: str) -> None:
    assert spans(Batches(24, 4, 2, last_batch)) == [(0, 8), (8, 16), (16, 24)]
    assert spans(Batches(24, 4, 2, last_batch), 24) == []


def test_an_epoch_has_one_batch_or_more() -> None:
    for last_batch in LAST_BATCH:
        assert len(spans(Batches(8, 4, 2, last_batch).checked())) == 1
    with pytest.raises(ValueError, match="batch_size=4 on 2 ranks needs 8 frames, but the selection has 7"):
        Batches(7, 4, 2, "drop").checked()
    assert len(spans(Batches(7, 4, 2, "pad").checked())) == 1
