"""Gemma 3, its text model: Gemma 2 with head norms for caps, and a rope of their own in the layers with a window."""

from typing import Any, Final

from jradix.model.family import Family, alternating_windows
from jradix.model.fields import Fields
from jradix.model.gemma2 import GEMMA_PARTS, gemma_fields, soft_cap


def _parse(fields: Fields) -> dict[str, Any]:
    # Both spellings are about configs without `layer_types`.
    period = fields.integer("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
    return gemma_fields(fields) | {
        "qk_norm": True,
        "windows": alternating_windows(fields, period),
        "logit_soft_cap": soft_cap(fields, "final_logit_softcapping", None),
    }


GEMMA3_TEXT: Final = Family(
    _parse,
    GEMMA_PARTS,
    kv_heads=4,
    head_dim=256,
    tie_word_embeddings=True,
    activation="gelu_pytorch_tanh",
    rope_theta=1e6,
    window_rope_theta=1e4,
    rope_types=frozenset({"default", "linear"}),
)
