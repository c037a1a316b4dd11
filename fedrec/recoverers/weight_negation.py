"""NoT: negate a layer of the poisoned model, and train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedrec._checks import check_int
from fedrec.exceptions import ConfigurationError, expected
from fedrec.parameters import ParameterVector
from fedrec.recoverers._final import final_weights, rounds_after
from fedrec.recoverers.base import Recoverer
from fedrec.recoverers.context import RecoveryContext

if TYPE_CHECKING:
    from fedrec.history.view import HistoryView

__all__ = ["WeightNegation"]


class WeightNegation(Recoverer):
    r"""Negates a layer of the final, poisoned model, then the remaining clients train on (NoT).

    With $\ell$ the chosen layers, $w_\ell \leftarrow -w_\ell$ in the model after the last round. A
    negated first layer breaks what the layers after it have learnt to expect, so the model no
    longer works, but the other layers are a better start than random weights. The remaining clients
    then train it for `num_rounds` rounds, with the recorded rule and learning rate.

    The method needs neither history but for the final model nor data at the server, and what the
    excluded clients have taught the model is not taken out but forgotten: nothing bounds what is
    left of it. The numbers of the rounds follow those of the recording. The first round negates,
    and asks nobody.

    Args:
        num_rounds: Rounds of the remaining clients after the negation, at least 0.
        layers: Names of the layers or parameters to negate, as `module.named_modules()` and
            `module.named_parameters()` have them; `None` for the first layer with parameters, as in
            the paper: its weights and biases.

    Raises:
        ConfigurationError: If an argument is out of range, or in a recovery, if the model has no
            such layer.

    References:
        - Khalil et al., NoT: Federated Unlearning via Weight Negation, CVPR 2025.

    Examples:
        >>> WeightNegation(num_rounds=20)
        WeightNegation(num_rounds=20, layers=None)
    """

    def __init__(self, *, num_rounds: int = 50, layers: Sequence[str] | None = None) -> None:
        self.num_rounds = check_int("num_rounds", num_rounds, minimum=0)
        if isinstance(layers, str) or (layers is not None and len(layers) == 0):
            raise ConfigurationError(expected("layers", "a list of names, or None", layers))
        self.layers = None if layers is None else tuple(layers)
        self._first = 0

    def rounds(self, history: HistoryView, max_rounds: int) -> range:
        """Return one round for the negation, and those of the remaining clients."""
        return rounds_after(history, 1 + self.num_rounds)

    def start(self, history: HistoryView, max_rounds: int) -> None:
        """Compute the final model of the recording."""
        self._final = final_weights(history, max_rounds)
        self._first = len(history.rounds())

    def initial_weights(self, history: HistoryView) -> Tensor:
        """Return the final, poisoned model."""
        return self._final

    def step(self, t: int, global_weights: Tensor, ctx: RecoveryContext) -> Tensor:
        """Negate, or train with the remaining clients."""
        if t == self._first:
            return self._negated(global_weights, ctx.layout)
        sent = ctx.exact(ctx.client_ids, "final")
        return ctx.server_step(sent)

    def _negated(self, global_weights: Tensor, layout: ParameterVector) -> Tensor:
        chosen = self.layers
        if chosen is None:
            chosen = (layout.names[0].rpartition(".")[0] or layout.names[0],)
        negated = global_weights.clone()
        for layer in chosen:
            parts = {
                name: part
                for name, part in layout.unflatten(negated).items()
                if name == layer or name.startswith(f"{layer}.")
            }
            if not parts:
                raise ConfigurationError(
                    expected("layers", "layers of the model", layer, known=layout.names)
                )
            for part in parts.values():
                part.neg_()  # a view of the vector
        return negated

    def state_dict(self) -> dict[str, Any]:
        """Return the round of the negation."""
        return {"first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._first = state["first"]
