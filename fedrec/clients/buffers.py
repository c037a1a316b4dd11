"""What local training made of a module's buffers."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from fedrec.exceptions import ConfigurationError
from fedrec.parameters import averageable_buffers
from fedrec.types import RoundContext

__all__ = ["buffers_after"]


def buffers_after(module: nn.Module, ctx: RoundContext, changes: Collection[str]) -> Tensor | None:
    """Return the buffers that are averaged, as local training left them.

    Args:
        module: After training, before anything is put back.
        ctx: The round.
        changes: Names of what training changed, see `ModuleState.changes`.

    Returns:
        Shape $(b,)$, or `None` if none are averaged.

    Raises:
        ConfigurationError: If another buffer with floating-point numbers has changed, which would
            be lost.
    """
    layout = ctx.layout
    if changes:
        others = set(averageable_buffers(module)).difference(layout.buffer_names)
        changed = [name for name in changes if name in others]
        if changed:
            raise ConfigurationError(
                f"Training changed buffers of {type(module).__name__} in round {ctx.round} which "
                "are not averaged, so that it would be lost: "
                f"{', '.join(f'`{n}`' for n in changed)}. "
                "Those that one client changes in its first local trainings are found before the "
                "first round. HINT: change them in every local training and pass "
                '`buffers="average"`, or in none.'
            )
    return layout.buffers(module) if ctx.buffers is not None else None
