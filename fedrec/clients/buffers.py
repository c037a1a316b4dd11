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
                f"Training changed buffers of {type(module).__name__} in round {ctx.round} that it "
                "had left alone when it was tried before round 0, so that nothing was said about "
                f"them: {', '.join(f'`{name}`' for name in changed)}. HINT: keep them as they are "
                "in every local training, or change them in all of them and pass "
                '`buffers="average"`.'
            )
    return layout.buffers(module) if ctx.buffers is not None else None
