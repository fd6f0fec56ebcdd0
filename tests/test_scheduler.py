"""The scheduler over the real cache, on a device on paper that checks every slot that every row reads."""

import itertools
import random

import pytest

from jradix.cache.render import rows
from jradix.request import RequestState
from tests.paper_device import VOCAB, PaperDevice, serial_output

PAGE_SIZES = [1, 2, 3, 16, 64]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("outputs", [1, 2, 3, 17])
def test_every_page_comes_back_at_all_lengths_around_a_page_edge(page_size: int, outputs: int) -> None:
    for length in {max(1, page_size + d) for d in (-1, 0, 1)} | {max(1, 2 * page_size + d) for d in (-1, 0, 1)}:
        device = PaperDevice(num_pages=200, page_size=page_size)
        device.add(list(range(length)), outputs)
        device.run()
        device.check_idle()
        device.check_outputs()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_second_equal_prompt_computes_its_last_token_alone(page_size: int) -> None:
    for length in (1, page_size, page_size + 1, 2 * page_size):
        device = PaperDevice(num_pages=200, page_size=page_size)
        device.add(list(range(length)))
        device.run()
        second = device.add(list(range(length)))
        device.run()
        assert second.cached_tokens == length - 1
        device.check_outputs()


def test_without_copies_only_whole_pages_are_hit() -> None:
    device = PaperDevice(num_pages=200, page_size=16, min_copied_tokens=None)
    requests = [device.add(list(range(40)))]
    device.run()
    requests.append(device.add(list(range(40))))
    device.run()
    assert [request.cached_tokens for request in requests] == [0, 32]


def test_a_hit_too_short_to_be_worth_a_copy_is_not_taken() -> None:
    device = PaperDevice(num_pages=200, page_size=16, min_copied_tokens=5)
    device.add(list(range(40)))
    device.run()
    short, long = device.add([*range(20), 99]), device.add([*range(21), 99])
    device.run()
    assert (short.cached_tokens, long.cached_tokens) == (16, 21)
    device.check_outputs()


def test_a_page_that_the_same_step_fills_is_not_copied() -> None:
    device = PaperDevice(num_pages=100, page_size=8, chunk=64)
    requests = [device.add([*range(20), *range(90 + i, 94 + i)]) for i in range(3)]
    plan = device.step()
    assert plan is not None
    assert [row.num_tokens for row in plan.extend] == [24, 8, 8]
    late = device.add([*range(20), 99])
    device.run()
    assert [request.cached_tokens for request in (*requests, late)] == [0, 16, 16, 20]
    device.check_outputs()


def test_equal_prompts_share_a_cached_last_page_and_never_write_to_it() -> None:
    prompt = [position % 50 for position in range(64)]
    device = PaperDevice(num_pages=64, page_size=64, chunk=512)
    device.add(prompt, max_new_tokens=1)
    device.run()
    requests = [device.add(prompt, max_new_tokens=1) for _ in range(4)]
    plan = device.step()
    assert plan is not None
    assert [request.cached_tokens for request in requests] == [63] * 4
    assert [row.write_from for row in plan.decode] == [64] * 4
    assert plan.copies == []
    device.run()
    device.check_outputs()


def test_prompts_that_are_cached_whole_take_a_chunk_only_beside_one() -> None:
    device = PaperDevice(num_pages=200, page_size=16, chunk=64)
    running = device.add(list(range(48)), max_new_tokens=20)
    device.step()
    cached = [device.add(list(range(48))), device.add(list(range(30)))]
    plan = device.step()
    assert plan is not None
    assert plan.extend == []
    assert {row.request.id for row in plan.decode} == {request.id for request in (running, *cached)}
    late = [device.add(list(range(48))), device.add([*range(20), *range(60, 80)])]
    plan = device.step()
    assert plan is not None
    assert {row.request.id for row in plan.extend} == {request.id for request in late}
    device.run()
    device.check_outputs()
    device.check_idle()


def test_a_pin_gives_way_to_a_request_that_needs_the_room() -> None:
    device = PaperDevice(num_pages=8, page_size=4, chunk=64)
    device.add(list(range(8)), max_new_tokens=1)
    device.run()
    assert device.cache.pin("system", list(range(8))) == 8
    request = device.add([40] * 28, max_new_tokens=2)
    device.run()
    assert request.finish_reason is not None
    assert "system" not in device.cache.pins
    device.check_outputs()


def test_what_is_left_of_a_page_after_the_output_is_reused_by_the_next_turn() -> None:
    device = PaperDevice(num_pages=100, page_size=16)
    first = device.add(list(range(10)), max_new_tokens=5)
    device.run()
    turn = [*first.prompt_ids.tolist(), *first.output_ids, 70, 71]
    second = device.add(turn)
    device.run()
    assert second.cached_tokens == 10 + 4, "the last output token was never fed back"
    device.check_outputs()


def test_requests_that_arrive_together_compute_a_shared_prefix_once() -> None:
    device = PaperDevice(num_pages=100, page_size=4, chunk=64)
    shared = list(range(40))
    requests = [device.add([*shared, 50 + i, 60 + i]) for i in range(4)]
    plan = device.step()
    assert plan is not None
    assert [row.num_tokens for row in plan.extend] == [42, 2, 2, 2]
    assert [request.cached_tokens for request in requests] == [0, 40, 40, 40]
    device.run()
    device.check_outputs()


def test_a_prompt_under_way_skips_what_another_request_has_computed_meanwhile() -> None:
    device = PaperDevice(num_pages=100, page_size=4, chunk=16)
    shared = [t % VOCAB for t in range(80)]
    first, second = device.add([*shared, 1]), device.add([*shared, 2])
    device.run()
    assert first.cached_tokens == 0
    assert second.cached_tokens == 80
    assert device.cache.statistics.total.hit_tokens == 80, "the cache counts what results say"
    device.check_outputs()


def test_chunks_never_exceed_the_budget_and_at_most_one_prompt_is_partial() -> None:
    for chunk in (1, 7, 16, 32):
        device = PaperDevice(num_pages=400, page_size=4, chunk=chunk)
        for i in range(6):
            device.add([(i * 7 + t) % VOCAB for t in range(25 + chunk * (i % 2))])
        while device.scheduler.has_work:
            device.step()
            partial = [r for r in device.scheduler.running if 0 < r.computed_len < r.prompt_len]
            assert len(partial) <= 1
        device.collect_all()
        device.check_outputs()


@pytest.mark.parametrize("missing", [0, 1, 4, 63, 64, 65])
def test_prompts_nearly_cached_fill_chunks_beside_many_rows_and_one_at_most_is_partial(missing: int) -> None:
    """35 rows decode while prompts of 64 cached tokens come, each with so many of its own."""
    device = PaperDevice(num_pages=800, page_size=4, rows=45, chunk=64)
    shared = [t % VOCAB for t in range(64)]
    for i in range(35):
        device.add([*shared, i], max_new_tokens=60)
    while device.scheduler.waiting:
        device.step()
    for i in range(8):
        device.add([*shared, 49 - i, *range(missing)], max_new_tokens=2)
    while device.scheduler.waiting or len(device.scheduler.running) > 35:
        plan = device.step()
        partial = [r for r in device.scheduler.running if not r.num_sampled]
        assert plan is not None
        assert len(plan.decode) >= 35
        assert len(partial) <= 1
    assert all(request.cached_tokens >= 64 for request in device.requests[1:])
    device.run()
    device.check_outputs()
    device.check_idle()


def test_decodes_go_on_while_a_long_prompt_is_chunked() -> None:
    device = PaperDevice(num_pages=100, page_size=4, chunk=8)
    short = device.add([1, 2, 3], max_new_tokens=12)
    device.step()
    device.add([t % VOCAB for t in range(80)])
    for _ in range(5):
        plan = device.step()
        assert plan is not None
        assert [row.request for row in plan.decode] == [short]
        assert plan.extend


def test_first_come_is_first_served() -> None:
    device = PaperDevice(num_pages=20, page_size=4, rows=2, chunk=8)
    requests = [device.add([i, i + 1, i + 2, i + 3, i + 4], max_new_tokens=2) for i in range(10)]
    order = []
    while device.scheduler.has_work:
        plan = device.step()
        order += [row.request for row in plan.extend if row.request not in order] if plan else []
    assert order == requests


def test_what_can_never_fit_is_refused_with_the_numbers_and_what_barely_fits_runs() -> None:
    page_size, pages = 4, 10
    for total in range((pages - 2) * page_size, pages * page_size + 3):
        device = PaperDevice(num_pages=pages, page_size=page_size)
        # The last sampled token's KV is never written, so one token more than the pool's slots fits.
        if total <= pages * page_size + 1:
            device.add([t % VOCAB for t in range(total - 5)], max_new_tokens=5)
            device.run()
            device.check_outputs()
        else:
            with pytest.raises(ValueError, match=rf"{pages + 1} KV pages of {page_size} tokens, the pool has {pages}"):
                device.add([t % VOCAB for t in range(total - 5)], max_new_tokens=5)
        small = device.add([1, 2, 3])
        device.run()
        assert small.state is RequestState.FINISHED
        device.check_idle()


def test_retraction_gives_pages_back_and_changes_no_output() -> None:
    device = PaperDevice(num_pages=16, page_size=4, chunk=64, rows=8)
    for i in range(6):
        device.add([i * 3 + 1, 2, 3, 4, 5], max_new_tokens=30)
    device.run()
    assert device.scheduler.num_retractions > 0
    device.check_outputs()
    device.check_idle()


def test_a_request_that_waits_for_room_leaves_no_trace_on_the_prefix_it_hits() -> None:
    """Tried again in every step, it must not make the prefix look often or recently used."""
    device = PaperDevice(num_pages=19, page_size=4, chunk=64)
    for first in (0, 20):
        device.add([first + i for i in range(16)], max_new_tokens=1)
        device.run()
    hog = device.add([45] * 20, max_new_tokens=20)
    waiting = device.add([*range(16), *range(10, 46)], max_new_tokens=2)
    while not hog.output_ids:
        device.step()
    before, clock = rows(device.cache), device.cache.clock
    for _ in range(8):
        device.step()
    assert waiting.state is RequestState.WAITING
    assert (rows(device.cache), device.cache.clock) == (before, clock)
    device.run()
    assert waiting.cached_tokens == 16
    device.check_outputs()


def test_a_retracted_request_holds_nothing_and_what_it_computed_can_be_evicted() -> None:
    device = PaperDevice(num_pages=16, page_size=4, chunk=64, rows=8)
    for i in range(6):
        device.add([i * 3 + 1, 2, 3, 4, 5], max_new_tokens=30)
    while not device.scheduler.num_retractions:
        device.step()
    [retracted] = [request for request in device.scheduler.waiting if request.num_retractions]
    assert (retracted.lock, retracted.num_pages, retracted.slot) == (None, 0, -1)
    held = sum(request.lock.num_tokens // 4 for request in device.scheduler.running if request.lock is not None)
    assert device.cache.num_protected == held, "prompts of one page each, which nobody shares"
    device.run()
    device.check_idle()


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_decoding_needs_no_page_more_than_the_rows_at_a_page_edge(spare: int) -> None:
    """Of four rows two need a page for their next token, and those that need none come first and last."""
    device = PaperDevice(num_pages=6 + spare, page_size=4, chunk=64, rows=4)
    for first, length in ((10, 3), (20, 4), (30, 4), (40, 3)):
        device.add([first] * length, max_new_tokens=2)
    device.run()
    assert bool(device.scheduler.num_retractions or len(set(device.batch_sizes)) > 1) == (spare < 0)
    device.check_outputs()
    device.check_idle()


def test_no_more_requests_run_than_there_are_pages_however_short_they_are() -> None:
    device = PaperDevice(num_pages=3, page_size=64, chunk=64, rows=8)
    requests = [device.add([i], max_new_tokens=5) for i in range(10)]
    while device.scheduler.has_work:
        device.step()
        device.check()
        assert len(device.scheduler.running) <= 3
    device.collect_all()
    assert all(len(request.output_ids) == 5 for request in requests)
    device.check_idle()


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("past", [-16, -4, -1, 0, 1, 4, 16])
def test_hits_around_the_size_of_a_chunk_leave_the_rest_to_compute(past: int, page_size: int) -> None:
    """Beside rows that decode; the missing part is shorter than a chunk, as long as one, and longer."""
    chunk = 32
    device = PaperDevice(num_pages=200, page_size=page_size, chunk=chunk)
    shared = [t % VOCAB for t in range(chunk + past)]
    device.add(shared, max_new_tokens=1)
    device.run()
    device.add([49, 48, 47], max_new_tokens=60)
    for i, rest in enumerate((0, 1, chunk - 1, chunk, 70)):
        request = device.add([*shared, 30 + i, *range(rest)])
        while not request.output_ids:
            device.step()
        assert request.cached_tokens == len(shared)
    device.run()
    device.check_outputs()
    device.check_idle()


def test_after_pressure_the_batch_grows_back() -> None:
    device = PaperDevice(num_pages=40, page_size=4, chunk=64, rows=8)
    for i in range(8):
        device.add([i, 2, 3], max_new_tokens=40)
    device.run()
    assert device.scheduler.num_retractions > 0
    device.batch_sizes.clear()
    for i in range(8):
        device.add([i, 7, 8], max_new_tokens=8)
    device.run()
    assert max(device.batch_sizes) == 8


def test_cached_tokens_do_not_count_what_a_retracted_request_finds_of_its_own() -> None:
    device = PaperDevice(num_pages=16, page_size=4, chunk=64, rows=8)
    requests = [device.add([i * 3 + 1, 2, 3, 4, 5], max_new_tokens=30) for i in range(6)]
    device.run()
    assert any(request.num_retractions for request in requests)
    assert all(request.cached_tokens == 0 for request in requests)


def test_decode_rows_that_share_a_prefix_stand_side_by_side() -> None:
    device = PaperDevice(num_pages=200, page_size=4, chunk=64, rows=8)
    prefixes = [[i] * 16 for i in range(3)]
    for i in range(8):
        device.add([*prefixes[i % 3], 40 + i], max_new_tokens=6)
    plan = device.step()
    while plan is None or len(plan.decode) < 8:
        plan = device.step()
    order = [int(row.request.prompt_ids[0]) for row in plan.decode]
    assert sum(a != b for a, b in itertools.pairwise(order)) == 2, order
    device.run()
    device.check_outputs()


@pytest.mark.parametrize("page_size", [4, 16], ids=["whole pages", "copied heads"])
@pytest.mark.parametrize("when", range(12))
def test_abort_at_any_moment_leaks_nothing_and_disturbs_nobody(when: int, page_size: int) -> None:
    device = PaperDevice(num_pages=60, page_size=page_size, chunk=8)
    shared = list(range(20))
    requests = [device.add([*shared, 30 + i], max_new_tokens=4) for i in range(4)]
    for _ in range(when):
        device.step()
    device.abort(requests[1])
    device.abort(requests[1])
    device.check()
    device.run()
    assert requests[1].state is RequestState.FINISHED
    device.check_outputs()
    device.check_idle()


def test_rows_that_stop_early_give_their_slot_and_pages_to_the_next() -> None:
    prompt = [3, 1, 4, 1, 5]
    stop = serial_output(prompt, 3, frozenset())[2]
    device = PaperDevice(num_pages=30, page_size=4, rows=1)
    requests = [device.add([*prompt], 50, frozenset({stop})) for _ in range(3)]
    device.run()
    assert all(request.output_ids == serial_output(prompt, 50, frozenset({stop})) for request in requests)
    device.check_idle()


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("enabled", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize("seed", range(4))
def test_random_loads_on_a_tiny_pool_keep_every_answer_and_every_page(page_size: int, enabled: bool, seed: int) -> None:
    rng = random.Random(seed)
    pages = -(-100 // page_size) + rng.randrange(4)
    device = PaperDevice(
        pages, page_size, rows=rng.choice([1, 3, 8]), chunk=rng.choice([1, 5, 16, 64]), enabled=enabled
    )
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
            stops = frozenset(rng.sample(range(VOCAB), rng.randrange(3)))
            device.add(rng.choice(prefixes) + own, rng.randrange(1, 40), stops)
        for _ in range(rng.randrange(6)):
            device.step()
            device.check()
        if device.scheduler.running and rng.random() < 0.1:
            device.abort(rng.choice(device.scheduler.running))
        if device.scheduler.waiting and rng.random() < 0.1:
            device.abort(rng.choice(list(device.scheduler.waiting)))
    device.run()
    device.check_outputs()
    device.check_idle()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_log_probabilities_are_right_whatever_is_cached_kept_evicted_or_retracted(page_size: int, seed: int) -> None:
    """Beside requests that want none, whose pages know no values; from any position, in chunks, without output."""
    rng = random.Random(seed)
    chunk = rng.choice([3, 7, 16, 64])
    num_pages = -(-rng.choice([100, 400]) // page_size) + rng.randrange(4)
    device = PaperDevice(num_pages, page_size, rows=rng.choice([3, 8]), chunk=chunk)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            prompt = rng.choice(prefixes) + [rng.randrange(3) for _ in range(rng.randrange(12))]
            start = rng.choice([None, 0, rng.randrange(len(prompt)), len(prompt) - 1, len(prompt)])
            outputs = rng.choice([1, 9, 30] if start in (None, len(prompt)) else [0, 0, 1, 9, 30])
            device.add(prompt, outputs, logprob_start=start, num_top=rng.randrange(2))
        for _ in range(rng.randrange(6)):
            device.step()
            device.check()
        if device.scheduler.running and rng.random() < 0.1:
            device.abort(rng.choice(device.scheduler.running))
    device.run()
    device.check_outputs()
    device.check_idle()
    assert device.cache.statistics.total.hit_tokens == sum(request.cached_tokens for request in device.requests)
