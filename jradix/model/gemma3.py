"""Gemma 3, its text model: Gemma 2 with head norms for caps, and a rope of their own in the layers with a window."""

from dataclasses import replace
from typing import Any, Final

from jradix.model.family import alternating_windows
from jradix.model.fields import Fields
from jradix.model.gemma2 import GEMMA2, gemma_fields, soft_cap


def _parse(fields: Fields) -> dict[str, Any]:
    # Both spellings are about configs without `layer_types`.
    period = fields.integer("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
    return gemma_fields(fields) | {
        "qk_norm": True,
        "windows": alternating_windows(fields, period),
        "logit_soft_cap": soft_cap(fields, "final_logit_softcapping", None),
    }


GEMMA3_TEXT: Final = replace(
    GEMMA2, parse=_parse, rope_theta=1e6, window_rope_theta=1e4, rope_types=frozenset({"default", "linear"})
)
