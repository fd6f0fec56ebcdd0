"""One request: what was asked, how far it is, and which changes of state are legal."""

import enum
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from jradix.cache.prefix_cache import Lock
from jradix.grammar import Constraint
from jradix.sampling_params import SamplingParams
from jradix.token_logprobs import TokenLogprobs

FinishType = Literal["stop", "length", "abort"]
MAX_PREEMPTIONS = 4
"""A bound, so that no stream of urgent requests can undo the same work for ever."""


class RequestState(enum.Enum):
    WAITING = "waiting"  # holds no pages and no slot
    RUNNING = "running"  # holds a slot, a lock and pages
    FINISHED = "finished"


LEGAL_CHANGES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended. `matched` is the stop string or token id, `message` what went wrong."""

    type: FinishType
    matched: str | int | None = None
    length: int | None = None
    message: str | None = None

    def as_dict(self) -> dict[str, str | int]:
        fields = {"type": self.type, "matched": self.matched, "length": self.length, "message": self.message}
        return {name: value for name, value in fields.items() if value is not None}


@dataclass(eq=False, slots=True)
class Request:
    """A prompt on its way to its output.

    Token counts: positions `[0, computed_len)` have their KV written by a step that is launched; `seq_len` tokens
    exist, the last ones perhaps still on the device only (`num_sampled` counts those in flight too, `output_ids`
    holds those the host has seen). `seq_len - computed_len` tokens are to be computed next: 1 while decoding.

    Attributes:
        id: unique among the live requests.
        prompt_ids: int32 `[prompt_len]`.
        params: how to sample.
        stop_ids: ids that end the request (EOS and `stop_token_ids`).
        max_new_tokens: `params.max_new_tokens` within what the context has room for.
        seed: of its random numbers.
        namespace: requests share KV within one namespace only.
        constraint: how far the output is in its grammar; None if it may be anything.
        priority: the higher, the sooner, where the policy asks for it; the lowest is retracted first under any.
        routing_key: requests of equal key belong together, for the policy of that name.
        arrival: its number among all that were queued; -1 before.
        preemptions_left: how often it may still be retracted to let one of higher priority run.
        slot: its row in the scheduler's page tables and in the device's vector of next tokens; -1 when not running.
        cached_tokens: prompt tokens it did not compute because another request had.
        logprobs: the log-probabilities to report of prompt and output, as far as they are known; None for none.
        return_hidden_states: report the last layer's output for every token that is computed.
        num_counted: outputs it had when it was last given a slot; penalties count later ones on the device.
        dp_rank: the replica it was sent to, if there are several.
        groups: ids under which the caller knows it and others: of its batch, of its prompt if that has several samples.
        has_penalties, adjusts_logits: whether `params` do something to the logits before they are sampled.
        arrival_time, first_token_time, finish_time, deadline: seconds of `time.perf_counter`.
    """

    id: str
    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    stop_ids: frozenset[int]
    max_new_tokens: int
    seed: int = 0
    namespace: Hashable | None = None
    constraint: Constraint | None = None
    priority: int = 0
    routing_key: str | None = None
    logprobs: TokenLogprobs | None = None
    return_hidden_states: bool = False
    dp_rank: int | None = None
    groups: tuple[str, ...] = ()
    deadline: float | None = None
    state: RequestState = RequestState.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_sampled: int = 0
    computed_len: int = 0
    cached_tokens: int = 0
    num_retractions: int = 0
    arrival: int = -1
    preemptions_left: int = MAX_PREEMPTIONS
    num_counted: int = 0
    slot: int = -1
    num_pages: int = 0
    lock: Lock | None = None
    finish_reason: FinishReason | None = None
    arrival_time: float = field(default_factory=time.perf_counter)
    first_token_time: float | None = None
    finish_time: float | None = None
    prompt_len: int = field(init=False)  # this and the next are read several times for each row and step
    has_penalties: bool = field(init=False)
    adjusts_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.prompt_ids)
        params = self.params
        penalties = (params.frequency_penalty, params.presence_penalty, params.repetition_penalty)
        self.has_penalties = penalties != (0, 0, 1)
        processed = params.custom_logit_processor is not None
        self.adjusts_logits = self.has_penalties or bool(params.logit_bias) or processed

    @property
    def seq_len(self) -> int:
        return self.prompt_len + self.num_sampled

    @property
    def wants_step(self) -> bool:
        """Whether a further step makes sense: not once all its tokens are sampled, even if not all have arrived."""
        if self.state is RequestState.FINISHED:
            return False
        return self.num_sampled < self.max_new_tokens or (
            not self.max_new_tokens and self.computed_len < self.prompt_len
        )

    @property
    def wants_prompt(self) -> bool:
        """Whether the prompt is to be computed even if no token is to be generated."""
        return self.return_hidden_states or (self.logprobs is not None and self.logprobs.start < self.prompt_len)

    def token_ids(self, end: int) -> npt.NDArray[np.int32]:
        """Tokens `[0, end)`, of which the host has seen all."""
        assert end <= self.prompt_len + len(self.output_ids), "these tokens are still on the device"
        if end <= self.prompt_len:
            return self.prompt_ids[:end]
        return np.concatenate([self.prompt_ids, np.asarray(self.output_ids[: end - self.prompt_len], np.int32)])

    def change_state(self, state: RequestState) -> None:
        assert state in LEGAL_CHANGES[self.state], f"{self.id}: {self.state.value} cannot become {state.value}"
        self.state = state
        if state is RequestState.RUNNING:
            self.num_counted = len(self.output_ids)
