"""Llama 1 to 3 and the many models that use its architecture, SmolLM2 among them: the common decoder."""

from typing import Any, Final

from jradix.model.family import DENSE_PARTS, Family
from jradix.model.fields import Fields


def _parse(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": fields.flag("mlp_bias", False)}


LLAMA: Final = Family(_parse, DENSE_PARTS)
