"""What one step computes: the scheduler's answer, which `batch` turns into arrays."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jradix.request import Request


class PlannedRow(NamedTuple):
    """One request's part of a step: tokens `[start, start + num_tokens)` of its sequence.

    `samples`: they reach the end of the sequence, so the step yields its next token. Tokens before `write_from` are in
    shared pages already, and their KV is not written again.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    write_from: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch: rows of one token that yield the next, then rows that extend by a chunk of their prompt.

    The first token after a prompt that is cached but for its last token comes from a row of the first kind, if no chunk
    is in the step.

    Before it, pages are copied, one after another in the order of `copies`, which holds (source, target) page ids.
    """

    decode: list[PlannedRow]
    extend: list[PlannedRow]
    copies: list[tuple[int, int]] = field(default_factory=list)

    @property
    def rows(self) -> list[PlannedRow]:
        return self.decode + self.extend
