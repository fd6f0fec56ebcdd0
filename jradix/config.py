"""What an engine is told when it starts: every default, every limit, and the bucket shapes that follow from them."""

import math
import os
import re
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from jradix import validation

SchedulePolicy = Literal[
    "fcfs", "lpm", "dfs-weight", "lof", "random", "hrrn", "shortest-prefill-first", "priority", "routing-key"
]
EvictionPolicy = Literal["adaptive", "fifo", "filo", "lfu", "lru", "mru", "priority", "slru"]
LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "bfloat16", "float32"]
Quantization = Literal["auto", "int8", "fp8"]
KVCacheDType = Literal["auto", "bfloat16", "fp8_e4m3", "int8"]
LayerLoop = Literal["auto", "scan", "unroll"]
FOUND_BY_JAX = "auto"
MAX_CHUNK = 32768
"""Prompt tokens of a step: a TPU notes 8 bytes of each in a memory of 1 MiB, and far fewer fill any device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to run one model. Names follow SGLang where the thing is the same; `docs/configuration.md` explains each.

    Attributes:
        model_path: a Hugging Face directory, a hub id (`org/name`), a GGUF file or what `jradix convert` wrote.
        load_format: "auto" reads the weights; "dummy" draws random ones of the same shapes, for benchmarks.
        skip_tokenizer_init: token ids in, token ids out; no text.
        dtype: of weights and, unless `kv_cache_dtype` says otherwise, of the KV pool. "auto" is bfloat16.
        quantization: "int8" or "fp8" keeps linear weights in 8 bits, with one scale for each output channel; the rest
            is `dtype`. "auto" keeps them as `jradix convert` wrote them, or as `dtype`.
        kv_cache_dtype: of the KV pool. "int8" and "fp8_e4m3" take half the memory of bfloat16, with one scale for each
            layer, KV head and channel, found when the weights are loaded. "auto" is `dtype`.
        context_length: the most positions of a request, prompt and output together. None: what the model allows.
        page_size: tokens a page holds.
        max_total_tokens: tokens the KV pool holds, rounded down to pages. None: sized from memory.
        mem_fraction_static: share of the device's memory for weights and pool. None: 0.85 on an accelerator, and on
            CPU, whose memory everything else shares, 0.1 of what is free after the weights are loaded.
        max_running_requests: the most requests that decode at once.
        chunked_prefill_size: the most prompt tokens of one step; longer prompts are computed in chunks.
        schedule_policy: which waiting request goes first.
        priority_scheduling_preemption_threshold: under policy "priority", a request that finds no room takes that of
            running ones whose priority is lower by at least this.
        max_queued_requests: the most requests that wait; more are refused. None: no limit.
        radix_eviction_policy: which cached pages are given up first.
        disable_radix_cache: never reuse KV between requests.
        min_copied_tokens: where a cached prefix ends inside a page, the page is copied if at least so many of its
            tokens agree. None: only whole pages are reused.
        tp_size: devices that share each layer, over all processes: the first of those that each has.
        dp_size: replicas of the model, each on `tp_size` devices of its own. Limits of requests and of tokens are those
            of each replica.
        dist_init_addr: "host:port" of process 0, by which several processes run one engine; "auto" lets jax find it,
            `nnodes` and `node_rank` too, as it does on TPUs, under Slurm and Open MPI. None: one process.
        nnodes: how many processes run the engine.
        node_rank: which of them this one is; 0 is the one that requests come to.
        random_seed: of requests that set no seed, and of dummy weights.
        layer_loop: "scan" compiles one layer and loops, "unroll" compiles them all; "auto" unrolls on GPUs and TPU 7x.
        warmup: compile every bucket before the first request, instead of each when it is first needed.
        strict_compile: raise if anything has to be compiled after the warm-up.
        compilation_cache_dir: where compiled steps are kept between runs. None: jax's own setting.
        cache_dir: where the prefix cache is kept between runs: restored from there at the start, saved at the end.
    """

    model_path: str
    load_format: LoadFormat = "auto"
    skip_tokenizer_init: bool = False
    dtype: DType = "auto"
    quantization: Quantization = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    context_length: int | None = None
    page_size: int = 16
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    max_running_requests: int = 64
    chunked_prefill_size: int = 512
    schedule_policy: SchedulePolicy = "fcfs"
    priority_scheduling_preemption_threshold: int = 10
    max_queued_requests: int | None = None
    radix_eviction_policy: EvictionPolicy = "lru"
    disable_radix_cache: bool = False
    min_copied_tokens: int | None = 1
    tp_size: int = 1
    dp_size: int = 1
    dist_init_addr: str | None = None
    nnodes: int = 1
    node_rank: int = 0
    random_seed: int = 0
    layer_loop: LayerLoop = "auto"
    warmup: bool = False
    strict_compile: bool = False
    compilation_cache_dir: str | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is bool:
                _require(isinstance(getattr(self, field.name), bool), self, field.name, "True or False")
            if get_origin(field.type) is Literal:
                choices = get_args(field.type)
                _require(getattr(self, field.name) in choices, self, field.name, f"one of {', '.join(choices)}")
        for name, limit in (
            ("page_size", 1),
            ("max_running_requests", 1),
            ("chunked_prefill_size", 1),
            ("priority_scheduling_preemption_threshold", 1),
            ("tp_size", 1),
            ("dp_size", 1),
            ("nnodes", 1),
            ("node_rank", 0),
            ("random_seed", 0),
        ):
            _require(_is_int(getattr(self, name), limit), self, name, f"an integer of at least {limit}")
        _require(self.chunked_prefill_size <= MAX_CHUNK, self, "chunked_prefill_size", f"at most {MAX_CHUNK}")
        for name, limit in (
            ("context_length", 2),
            ("max_total_tokens", self.page_size),
            ("max_queued_requests", 1),
            ("min_copied_tokens", 1),
        ):
            value = getattr(self, name)
            _require(value is None or _is_int(value, limit), self, name, f"None or an integer of at least {limit}")
        fraction = self.mem_fraction_static
        in_range = isinstance(fraction, float) and 0 < fraction < 1
        _require(fraction is None or in_range, self, "mem_fraction_static", "None or a float between 0 and 1")
        _require(isinstance(self.model_path, str | os.PathLike), self, "model_path", "a path or a hub id")
        for name in ("compilation_cache_dir", "cache_dir"):
            if getattr(self, name) is not None:
                validation.directory(name, getattr(self, name))
        _require(
            self.cache_dir is None or not self.disable_radix_cache,
            self,
            "cache_dir",
            "None without a cache (disable_radix_cache)",
        )
        self._check_processes()

    def _check_processes(self) -> None:
        address = self.dist_init_addr
        if address is None:
            _require(self.nnodes == 1, self, "nnodes", "1 if there is no dist_init_addr")
        else:
            found = re.fullmatch(r"\S+:(\d{1,5})", address) if isinstance(address, str) else None
            is_address = found is not None and 1 <= int(found[1]) <= 65535
            expected = f'None, "{FOUND_BY_JAX}" or "host:port", the port from 1 to 65535'
            _require(is_address or address == FOUND_BY_JAX, self, "dist_init_addr", expected)
        _require(self.node_rank < self.nnodes, self, "node_rank", f"less than nnodes ({self.nnodes})")
        _require(address is None or self.dp_size == 1, self, "dp_size", "1 if there is a dist_init_addr")
        _require(self.tp_size % self.nnodes == 0, self, "tp_size", f"a multiple of nnodes ({self.nnodes})")

    @classmethod
    def given(cls, config: "EngineConfig | None", options: dict[str, Any]) -> "EngineConfig":
        """What a caller gave, who may give either. ValueError for both."""
        if config is not None and options:
            raise ValueError("give either an EngineConfig or keyword options, not both")
        return config or cls.from_kwargs(**options)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> "EngineConfig":
        """The configuration with these fields. ValueError names a field that does not exist."""
        known = [field.name for field in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise ValueError(f"unknown engine option {name!r}; valid ones are {', '.join(known)}")
        if "model_path" not in kwargs:
            raise ValueError("model_path is missing: name a Hugging Face directory, a hub id or a GGUF file")
        return cls(**kwargs)


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """One bucket: the static shape of a step program.

    A step's tokens are `decode_rows` rows of one token, then `extend_tokens` tokens of `extend_rows` rows.
    """

    decode_rows: int
    extend_tokens: int
    extend_rows: int
    max_pages: int

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.extend_tokens

    @property
    def rows(self) -> int:
        return self.decode_rows + self.extend_rows


@dataclass(frozen=True, slots=True)
class Buckets:
    """Which shapes are compiled; each list ascends and its last entry is the limit.

    Few, because each is a compilation, and close, because padding is computed too. Decode steps take any of
    `decode_rows`; steps with prompt tokens take one of `mixed_decode_rows` beside them.
    """

    decode_rows: tuple[int, ...]
    mixed_decode_rows: tuple[int, ...]
    extend_tokens: tuple[int, ...]
    extend_rows: tuple[int, ...]
    max_pages: tuple[int, ...]

    @classmethod
    def of(cls, config: EngineConfig, context_length: int) -> "Buckets":
        rows, chunk = config.max_running_requests, config.chunked_prefill_size
        return cls(
            decode_rows=_geometric(1, rows, 2),
            mixed_decode_rows=(0, *_geometric(max(1, rows // 4), rows, 4)),
            extend_tokens=tuple(sorted({*_geometric(min(32, chunk), chunk, 4), max(1, chunk // 2)})),
            extend_rows=tuple(sorted({1, min(16, rows, chunk)})),
            max_pages=_geometric(128, math.ceil(context_length / config.page_size), 8),
        )

    def decode_shape(self, rows: int, pages: int) -> StepShape:
        return StepShape(_at_least(self.decode_rows, rows), 0, 0, _at_least(self.max_pages, pages))

    def extend_shape(self, decode_rows: int, tokens: int, rows: int, pages: int) -> StepShape:
        return StepShape(
            _at_least(self.mixed_decode_rows, decode_rows),
            _at_least(self.extend_tokens, tokens),
            _at_least(self.extend_rows, rows),
            _at_least(self.max_pages, pages),
        )

    def shapes(self) -> list[StepShape]:
        """Every shape that `decode_shape` and `extend_shape` can return."""
        decode = [StepShape(rows, 0, 0, pages) for rows in self.decode_rows for pages in self.max_pages]
        extend = [
            StepShape(decode_rows, tokens, rows, pages)
            for decode_rows in self.mixed_decode_rows
            for tokens in self.extend_tokens
            for rows in self.extend_rows
            for pages in self.max_pages
            if rows <= tokens
        ]
        return decode + extend

    def row_counts(self) -> list[int]:
        """Every number of rows that a shape has, each once."""
        return sorted({shape.rows for shape in self.shapes()})


def _geometric(first: int, last: int, ratio: int) -> tuple[int, ...]:
    """`last`, and the powers of `ratio` times `first` below it."""
    values = [last]
    value = first
    while value < last:
        values.append(value)
        value *= ratio
    return tuple(sorted(set(values)))


def _at_least(bucket: tuple[int, ...], need: int) -> int:
    for size in bucket:
        if size >= need:
            return size
    raise AssertionError(f"a step needs {need}, above the largest bucket {bucket[-1]}")


def _is_int(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


def _require(condition: bool, config: EngineConfig, name: str, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {expected}, got {getattr(config, name)!r}")
