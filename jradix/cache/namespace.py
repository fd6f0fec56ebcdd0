"""What keeps requests with equal tokens apart."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything beside the tokens that the KV depends on, or that must not be shared for other reasons.

    Tagged fields and never a joined string: a salt "x" is not an adapter "x", and a missing salt is not an empty one.
    """

    salt: str | None = None  # a tenant's secret; prompts of other tenants cannot be guessed by timing
    adapter: Hashable = None  # an id that changes when the adapter's weights do, not its name
    weight_version: int = 0  # of the base model


UNSHARED: Final = object()
"""The namespace of requests that find nothing cached, leave nothing behind, and are not counted: probes."""
