"""The loop: records, recovers and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.loop.loop import FederatedLoop

__all__ = ["FederatedLoop"]

__getattr__, __dir__ = lazy(__name__, {"FederatedLoop": "fedrec.loop.loop"})
