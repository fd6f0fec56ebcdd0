"""How much room running requests need for their output: learned from those that ended and from retractions."""

import math

from jradix.request import Request

PRIOR = 0.3  # the share before any request has ended
WINDOW = 16  # requests over which the averages move

RESERVED = 0.25
"""The part of the expected output that is reserved. Requests end at different times, and those that end leave their
pages to those that grow; to reserve all would idle a third of the pool, which costs more than a few retractions."""

CAUTION = 0.2  # the part of what was not reserved that a retraction adds
CAUTION_STEPS = 128  # in which caution is gone, however many retractions there were


class OutputEstimate:
    """What admission reserves of the tokens that requests may still generate.

    That is a part of what they will probably use, for which ended requests are the measure, plus caution: each
    retraction says that too little was reserved, and with each step this is forgotten, so that the batch is back to
    its size soon after the pressure has ended.
    """

    def __init__(self) -> None:
        self._used, self._allowed = PRIOR, 1.0  # moving averages, in tokens
        self._has_seen_any = False
        self._caution = 0.0

    @property
    def share(self) -> float:
        """What requests use of their `max_new_tokens`, all tokens of the last requests together."""
        return self._used / self._allowed

    @property
    def reserved(self) -> float:
        """The part of what requests may still generate that they should find room for, at most 1."""
        return min(1.0, RESERVED * self.share + self._caution)

    def reserved_len(self, request: Request) -> int:
        """The positions of KV that there should be room for: at least those that its next token needs.

        At most those that it can fill; the KV of its last token is never written.
        """
        remaining = request.max_new_tokens - request.num_sampled
        if remaining == 0:
            return request.seq_len - bool(request.num_sampled)
        return request.seq_len + math.ceil((remaining - 1) * self.reserved)

    def finished(self, num_tokens: int, max_new_tokens: int) -> None:
        """Learn from a request that ended by itself after `num_tokens` tokens, of `max_new_tokens`, which is not 0."""
        if max_new_tokens == 1:
            return  # it had no choice
        if not self._has_seen_any:  # what was assumed before counts as requests like this one
            self._has_seen_any = True
            self._used, self._allowed = PRIOR * max_new_tokens, float(max_new_tokens)
        self._used += (num_tokens - self._used) / WINDOW
        self._allowed += (max_new_tokens - self._allowed) / WINDOW

    def retracted(self) -> None:
        """The pool ran out of pages."""
        self._caution += CAUTION * (1.0 - self.reserved)

    def step(self) -> None:
        """A step was planned."""
        self._caution = max(0.0, self._caution - 1.0 / CAUTION_STEPS)
