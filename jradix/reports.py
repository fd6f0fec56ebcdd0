"""What the replicas of an engine report, as the engine's: sums, and beside them what each replica says."""

from collections.abc import Mapping, Sequence
from typing import Any

_RATES = ("hit_rate", "window_hit_rate")
_SAME = ("page_size", "weight_version", "weight_bytes_per_device", "pool_bytes_per_device")
"""Equal for all replicas, and so not added up."""


def combined_cache_report(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of `Core.cache_report`s: that of a single replica, or with `replicas`, theirs one by one."""
    return dict(reports[0]) if len(reports) == 1 else {**_summed_cache(reports), "replicas": list(reports)}


def combined_info(infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of `Core.info`s: that of a single replica, or with `replicas`, theirs one by one."""
    if len(infos) == 1:
        return dict(infos[0])
    return {
        **_summed(infos, leave_out=("paused", "cache")),
        "paused": any(info["paused"] for info in infos),
        "cache": _summed_cache([info["cache"] for info in infos]),
        "replicas": list(infos),
    }


def _summed_cache(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summed = _summed(reports, leave_out=_RATES)
    asked, window_asked = summed["asked_tokens"], summed["window_asked_tokens"]
    return {
        **summed,
        "hit_rate": summed["hit_tokens"] / asked if asked else 0.0,
        "window_hit_rate": summed["window_hit_tokens"] / window_asked if window_asked else 0.0,
    }


def _summed(reports: Sequence[Mapping[str, Any]], leave_out: Sequence[str]) -> dict[str, Any]:
    return {
        name: value if name in _SAME else sum(report[name] for report in reports)
        for name, value in reports[0].items()
        if name not in leave_out
    }
