"""Counters that only grow, a bounded number of rows, and a window over the latest requests."""

from jradix.cache import CacheStatistics, Counters


def test_the_total_is_the_sum_over_namespaces() -> None:
    statistics = CacheStatistics()
    statistics.count_request("a", 10, 4)
    statistics.count_request("a", 10, 6)
    statistics.of(None).evicted_tokens += 3
    assert statistics.by_namespace == {"a": Counters(2, 20, 10), None: Counters(evicted_tokens=3)}
    assert statistics.total == Counters(2, 20, 10, 0, 3, 0)


def test_many_namespaces_share_one_row_in_the_end() -> None:
    statistics = CacheStatistics(max_namespaces=2)
    for i in range(100):
        statistics.count_request(i, 10, 1)
    assert list(statistics.by_namespace) == [0, 1]
    assert statistics.other_namespaces == Counters(98, 980, 98)
    assert statistics.total == Counters(100, 1000, 100)


def test_the_window_forgets_old_requests_and_the_counters_do_not() -> None:
    statistics = CacheStatistics(window=2)
    assert statistics.window_hit_rate == 0
    for hit_tokens in (0, 10, 5):
        statistics.count_request(None, 10, hit_tokens)
    assert statistics.window_hit_rate == 15 / 20
    assert statistics.total.hit_tokens == 15


def test_a_late_hit_is_of_its_namespace_and_adds_to_the_latest_requests() -> None:
    statistics = CacheStatistics(window=2)
    for namespace, asked, hit in (("a", 50, 50), ("a", 10, 0), ("b", 30, 5)):
        statistics.count_request(namespace, asked, hit)
    statistics.count_late_hit("a", 10)
    assert (statistics.of("a").hit_tokens, statistics.of("b").hit_tokens) == (60, 5)
    assert statistics.total.num_requests == 3
    assert statistics.window_hit_rate == 15 / 40
    for _ in range(2):
        statistics.count_request("a", 10, 0)
    assert statistics.window_hit_rate == 0
