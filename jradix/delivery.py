"""What a caller has not yet been told of the outputs of one call."""

from collections.abc import Sequence
from typing import Any

from jradix.output import Output


class StepFailedError(RuntimeError):
    """The device failed in a step that the request was in; the cause says how."""


class Delivery:
    """Turns word that an output has changed into the results a caller sees.

    The loop's thread says which output has changed, the caller's takes what is new of it. Several changes may be taken
    at once; then word of the later ones brings nothing new.
    """

    def __init__(self, outputs: Sequence[Output], *, single: bool) -> None:
        """single: the caller passed one prompt and wants one result of it, so that results carry no `index`."""
        self._places = {id(output): place for place, output in enumerate(outputs)}
        self._num_told = [0] * len(outputs)
        self._single = single
        self._unfinished = set(self._places)

    @property
    def done(self) -> bool:
        return not self._unfinished

    def take(self, output: Output) -> dict[str, Any] | None:
        """The output's state if it has grown or ended since the last time, else None.

        Raises:
            StepFailedError: it ended because its step failed.
        """
        if id(output) not in self._unfinished:
            return None
        place = self._places[id(output)]
        state = output.as_dict()
        ended = state["meta_info"]["finish_reason"] is not None
        if ended:
            self._unfinished.remove(id(output))
            if output.error is not None:
                raise StepFailedError(f"the step failed: {output.error!r}") from output.error
        elif len(state["output_ids"]) == self._num_told[place]:
            return None
        self._num_told[place] = len(state["output_ids"])
        return state if self._single else {**state, "index": place}
