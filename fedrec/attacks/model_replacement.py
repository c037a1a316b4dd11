"""Model replacement."""

from __future__ import annotations

from torch import Tensor

from fedrec._checks import check_float
from fedrec.attacks._rows import counts, replaced
from fedrec.attacks.base import Attack, AttackContext
from fedrec.attacks.wrapper import AttackWrapper

__all__ = ["ModelReplacement"]


class ModelReplacement(AttackWrapper):
    r"""An attack scaled so that the average replaces the global model by the attacker's.

    With $m$ clients in a round, $f$ of them malicious, a malicious client multiplies its update by

    $$\gamma = \frac{m}{f} \cdot \frac{\eta_{\text{local}}}{\eta}$$

    where $\eta$ is the server's learning rate. If the benign updates have all but vanished, the
    average is then $\eta_{\text{local}} / \eta$ times the mean of the malicious updates, and the
    next global weights are $w - \eta_{\text{local}}\, \tilde g$: the model that the attacker
    trained. With the paper's $n$ clients and global learning rate $\eta'$, for which
    $\eta = \eta_{\text{local}}\, \eta'\, m / n$, this is its $n / \eta'$. It is exact where all
    clients have equally many samples.

    Since $f$ counts the malicious clients of the round, those that are left in a recovery make up
    for the malicious clients that were detected.

    Args:
        attack: What is scaled, most often a `BackdoorAttack` with a `scale` of 1.
        local_lr: $\eta_{\text{local}}$; `None` for the server's learning rate, that is, a model
            that is one honest server step away.

    Raises:
        ConfigurationError: If an argument is out of range.

    References:
        - Bagdasaryan et al., How To Backdoor Federated Learning, AISTATS 2020.

    Examples:
        >>> from fedrec.attacks import BackdoorAttack
        >>> ModelReplacement(BackdoorAttack(scale=1.0), local_lr=0.1).target_label
        0
    """

    by_columns = True

    def __init__(self, attack: Attack, *, local_lr: float | None = None) -> None:
        super().__init__(attack)
        if local_lr is not None:
            local_lr = check_float("local_lr", local_lr, minimum=0.0, open_minimum=True)
        self.local_lr = local_lr

    def craft(self, updates: Tensor, malicious: Tensor, ctx: AttackContext) -> Tensor:
        """Scale what the wrapped attack sends."""
        crafted = self.attack.craft(updates, malicious, ctx)
        num_clients, num_malicious = counts(malicious, ctx)
        scale = num_clients / max(1, num_malicious)
        if self.local_lr is not None:
            scale *= self.local_lr / ctx.server_lr
        return replaced(updates, malicious, scale * crafted[malicious], crafted)
