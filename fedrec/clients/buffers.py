"""What local training made of a module's buffers."""

from __future__ import annotations

from torch import Tensor, nn

from fedrec.clients.state import ModuleState
from fedrec.exceptions import ConfigurationError
from fedrec.parameters import averageable_buffers
from fedrec.types import RoundContext

__all__ = ["buffers_after"]


def buffers_after(module: nn.Module, ctx: RoundContext, state: ModuleState) -> Tensor | None:
    """Return the buffers that are averaged, as local training left them.

    Args:
        module: After training, before anything is put back.
        ctx: The round.
        state: Of the module before training.

    Returns:
        Shape $(b,)$, or `None` if none are averaged.

    Raises:
        ConfigurationError: If another buffer with floating-point numbers has changed, which would
            be lost.
    """
    layout = ctx.layout
    if state.has_changed:
        others = set(averageable_buffers(module)).difference(layout.buffer_names)
        changed = [name for name in state.changes() if name in others]
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
