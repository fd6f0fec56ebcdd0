"""Plans laid out in padded arrays: what each token reads and writes, and that padding touches nothing."""

import jax
import numpy as np

from jradix.batch import (
    StepArrays,
    build_arrays,
    build_copies,
    first_tokens,
    row_indices,
    step_shape,
)
from jradix.config import Buckets, StepShape
from jradix.request import Request
from jradix.sampling_params import SamplingParams
from jradix.schedule_plan import PlannedRow, StepPlan

PAGE_SIZE, SLOTS = 4, 5
SHAPE = StepShape(decode_rows=3, extend_tokens=12, extend_rows=3, max_pages=4)
TABLES = np.arange(1, 1 + SLOTS * 6, dtype=np.int32).reshape(SLOTS, 6)  # every slot has pages of its own


def row(slot: int, start: int, num_tokens: int, *, samples: bool = True, outputs: int = 0) -> PlannedRow:
    """Prompt tokens are 100 * slot + position, known outputs 1000 + index."""
    request = Request(
        id=str(slot),
        prompt_ids=np.arange(100 * slot, 100 * slot + 10, dtype=np.int32),
        params=SamplingParams(),
        stop_ids=frozenset({7, 3}),
        max_new_tokens=20,
        seed=40 + slot,
        slot=slot,
        output_ids=[1000 + index for index in range(outputs)],
        num_pages=-(-(start + num_tokens) // PAGE_SIZE),
    )
    return PlannedRow(request, start, num_tokens, samples, start)


PLAN = StepPlan(
    decode=[row(1, 11, 1, outputs=2), row(4, 12, 1, outputs=2)],  # the second's input is still on the device
    extend=[row(0, 3, 6, samples=False), row(2, 9, 1)],
)


def arrays() -> StepArrays:
    return StepArrays.unpack(build_arrays(PLAN, SHAPE, TABLES, PAGE_SIZE, 31), SHAPE, 31)


def test_tokens_are_the_hosts_or_a_reference_to_the_slot_that_sampled_them() -> None:
    ids = np.asarray(arrays().token_ids).tolist()
    assert ids == [1001, -5, 0, *range(3, 9), 209, *[0] * 5]


def test_each_token_writes_to_its_own_page() -> None:
    attention = arrays().attention
    positions = [11, 12, 0, *range(3, 9), 9, *[0] * 5]
    assert attention.positions.tolist() == positions
    owners = [1, 4, None, *[0] * 6, 2, *[None] * 5]
    pages = [0 if slot is None else TABLES[slot, at // PAGE_SIZE] for slot, at in zip(owners, positions, strict=True)]
    assert attention.write_pages.tolist() == pages


def test_each_row_sees_its_own_pages_and_length() -> None:
    step = arrays()
    assert step.attention.seq_lens.tolist() == [12, 13, 0, 9, 10, 0]
    assert step.attention.query_starts.tolist() == [0, 6, 7, 7]
    for index, slot in ((0, 1), (1, 4), (3, 0), (4, 2)):
        assert step.attention.page_table[index].tolist() == TABLES[slot, :4].tolist()
    assert not step.attention.page_table[[2, 5]].any(), "a padding row has pages"
    assert (step.attention.decode_rows, step.attention.extend_rows) == (3, 3)


def test_only_rows_that_sample_have_a_slot_to_write_to() -> None:
    step = arrays()
    assert np.asarray(step.sample_slots).tolist() == [1, 4, SLOTS, SLOTS, 2, SLOTS]
    assert np.asarray(step.logits_at)[[0, 1, 3, 4]].tolist() == [0, 1, 8, 9]
    assert row_indices(PLAN, SHAPE) == [0, 1, 3, 4]


def test_the_first_token_of_each_row_is_known() -> None:
    ids = np.asarray(arrays().token_ids)
    assert ids[first_tokens(PLAN, SHAPE)].tolist() == [1001, -5, 3, 209]
    assert first_tokens(StepPlan(PLAN.decode, []), SHAPE) == [0, 1]
    assert first_tokens(StepPlan([], PLAN.extend), SHAPE) == [3, 9]


def test_arrays_are_fresh_and_of_the_shapes_that_are_compiled() -> None:
    """The device may alias them, so the next step must not write into this one's."""
    first, second = arrays(), arrays()
    assert not np.shares_memory(np.asarray(first.token_ids), np.asarray(second.token_ids))
    assert not np.shares_memory(np.asarray(first.attention.page_table), TABLES)
    shapes = (first.token_ids.shape, first.attention.page_table.shape, first.sample_slots.shape)
    assert shapes == ((15,), (6, 4), (6,))
    assert {first.token_ids.dtype, first.attention.page_table.dtype, first.logits_at.dtype} == {np.dtype(np.int32)}


def test_the_smallest_bucket_that_holds_the_plan_is_taken() -> None:
    buckets = Buckets(
        decode_rows=(1, 2, 4), mixed_decode_rows=(0, 4), extend_tokens=(4, 8, 16), extend_rows=(1, 4), max_pages=(3, 6)
    )
    assert step_shape(PLAN, buckets) == StepShape(4, 8, 4, 6)
    assert step_shape(StepPlan(PLAN.decode[:1], []), buckets) == StepShape(1, 0, 0, 3)
    assert step_shape(StepPlan([], PLAN.extend[1:]), buckets) == StepShape(0, 4, 1, 3)


def test_a_step_on_the_device_finds_what_the_host_packed() -> None:
    vector = build_arrays(PLAN, SHAPE, TABLES, PAGE_SIZE, 31)
    on_device = jax.jit(lambda packed: StepArrays.unpack(packed, SHAPE, 31).attention.page_table)(vector)
    assert np.array_equal(on_device, StepArrays.unpack(vector, SHAPE, 31).attention.page_table)


def test_what_shared_pages_hold_already_is_written_to_the_null_page() -> None:
    shared = row(0, 3, 6, samples=False)._replace(write_from=8)
    packed = build_arrays(StepPlan([], [shared]), SHAPE, TABLES, PAGE_SIZE, 31)
    written = StepArrays.unpack(packed, SHAPE, 31).attention.write_pages[3:9].tolist()
    assert written == [0, 0, 0, 0, 0, TABLES[0, 8 // PAGE_SIZE]]
    cached, own = row(0, 9, 1)._replace(write_from=10), row(1, 9, 1)
    packed = build_arrays(StepPlan([cached, own], []), SHAPE, TABLES, PAGE_SIZE, 31)
    written = StepArrays.unpack(packed, SHAPE, 31).attention.write_pages[:3].tolist()
    assert written == [0, TABLES[1, 9 // PAGE_SIZE], 0]


def test_copies_are_padded_and_there_are_none_without_any() -> None:
    assert build_copies(PLAN, 4) is None
    copies = build_copies(StepPlan(PLAN.decode, PLAN.extend, [(5, 6), (7, 5)]), 4)
    assert copies is not None
    assert copies.tolist() == [[5, 7, 0, 0], [6, 5, 0, 0]]
