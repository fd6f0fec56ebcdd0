"""What Prometheus is told: SGLang's names where the meaning is SGLang's, and names of our own."""

from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jradix.server.generation import Sample

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)


class Metrics:
    """The server's metrics. Counters and histograms grow as requests end, gauges are set when somebody asks."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model_name = model_name
        self._requests = self._counter("sglang:num_requests", "Requests that have ended.")
        self._aborted = self._counter("sglang:num_aborted_requests", "Requests that were aborted.")
        self._prompt = self._counter("sglang:prompt_tokens", "Prompt tokens of requests that have ended.")
        self._cached = self._counter("sglang:cached_tokens", "Those of them that were in the cache.")
        self._output = self._counter("sglang:generation_tokens", "Tokens generated for requests that have ended.")
        self._first = self._histogram("sglang:time_to_first_token_seconds", "From arrival to the first token.")
        self._whole = self._histogram("sglang:e2e_request_latency_seconds", "From arrival to the end.")
        self._each = self._histogram("jradix:time_per_output_token_seconds", "After the first: a request's mean.")
        self._gauges = {
            "num_running_requests": self._gauge("sglang:num_running_reqs", "Requests that run."),
            "num_waiting_requests": self._gauge("sglang:num_queue_reqs", "Requests that wait."),
            "num_compiled_programs": self._gauge("jradix:num_compiled_programs", "Programs compiled so far."),
            "cache_hit_rate": self._gauge("sglang:cache_hit_rate", "Prompt tokens cached, of the last 1000 requests."),
            "max_total_num_tokens": self._gauge("sglang:max_total_num_tokens", "Tokens that the KV pool holds."),
            "num_used_tokens": self._gauge("sglang:num_used_tokens", "Of these, held by running requests."),
            "token_usage": self._gauge("sglang:token_usage", "The same as a share."),
            "evictable_size": self._gauge("jradix:evictable_tokens", "Tokens cached, and held by no request."),
        }
        self._totals = {
            "num_retractions": self._counter(
                "sglang:num_retracted_requests", "Running requests that gave up their pages."
            ),
            "evicted_tokens": self._counter("sglang:evicted_tokens", "Cached tokens that made room for others."),
        }
        self._last_totals: dict[tuple[str, int], int] = {}  # by name and replica

    def ended(self, sample: Sample) -> None:
        """Count a request that has ended."""
        meta = sample.meta
        self._requests.inc()
        self._aborted.inc(meta["finish_reason"]["type"] == "abort")
        self._prompt.inc(meta["prompt_tokens"])
        self._cached.inc(meta["cached_tokens"])
        self._output.inc(meta["completion_tokens"])
        first, whole = meta.get("time_to_first_token"), meta["e2e_latency"]
        self._whole.observe(whole)
        if first is not None:
            self._first.observe(first)
            if meta["completion_tokens"] > 1:
                self._each.observe((whole - first) / (meta["completion_tokens"] - 1))

    def exposition(self, info: Mapping[str, Any]) -> bytes:
        """The text that Prometheus reads: sums over all replicas. info: see `combined_info`."""
        values = {**info, **cache_numbers(info)}
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
        for rank, replica in enumerate(replica_infos(info)):
            counted = {**replica, **cache_numbers(replica)}
            for name, counter in self._totals.items():
                last, now = self._last_totals.get((name, rank), 0), counted[name]
                counter.inc(now - last if now >= last else now)  # a replica counts anew after a failed step
                self._last_totals[name, rank] = now
        return generate_latest(self._registry)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, ["model_name"], registry=self._registry).labels(self._model_name)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, ["model_name"], registry=self._registry).labels(self._model_name)

    def _histogram(self, name: str, meaning: str) -> Histogram:
        labelled = Histogram(name, meaning, ["model_name"], registry=self._registry, buckets=_SECONDS)
        return labelled.labels(self._model_name)


def replica_infos(info: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What each replica says, of `combined_info`."""
    return info.get("replicas", [info])


def cache_numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    """The cache in tokens, named as SGLang does, from `Core.info` or `combined_info`."""
    cache = info["cache"]
    size, total = cache["page_size"], cache["num_pages"]
    used = cache["protected_pages"] + cache["private_pages"]
    return {
        "cache_hit_rate": cache["window_hit_rate"],
        "max_total_num_tokens": total * size,
        "num_used_tokens": used * size,
        "token_usage": used / total,
        "available_size": cache["free_pages"] * size,
        "evictable_size": cache["evictable_pages"] * size,
        "protected_size": cache["protected_pages"] * size,
        "hit_tokens": cache["hit_tokens"],
        "asked_tokens": cache["asked_tokens"],
        "evicted_tokens": cache["evicted_tokens"],
    }
