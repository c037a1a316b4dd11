"""On real data, what is aggregated of estimates is closer than what is aggregated of history."""

import torch

from fedrec import FederatedLoop, Federation
from fedrec.aggregators import TrimmedMean
from fedrec.attacks import TrimAttack
from fedrec.data import Digits
from fedrec.history import MemoryHistory
from fedrec.models import MLP
from fedrec.recoverers import FedRecover


class Diagnosed(FedRecover):
    """Asks everyone in every estimated round too, to compare."""

    def start(self, history, remaining, max_rounds):
        self.errors = []
        super().start(history, remaining, max_rounds)

    def _fix(self, record, estimates, abnormal, missing, global_weights, ctx):
        exact = ctx.exact(ctx.client_ids, "other").updates
        means = (rows.mean(dim=0) for rows in (estimates, record.updates))
        self.errors.append(torch.stack([(mean - exact.mean(dim=0)).norm() for mean in means]))
        return super()._fix(record, estimates, abnormal, missing, global_weights, ctx)


def test_the_mean_estimate_is_closer_to_the_mean_exact_update_than_history_on_digits() -> None:
    torch.manual_seed(0)
    module = MLP(in_features=64, hidden=(32,))
    federation = Federation.from_data(Digits(num_clients=20), module, malicious=4, batch_size=16)
    loop = FederatedLoop(accelerator="cpu", enable_progress_bar=False)
    history = MemoryHistory()
    loop.record(
        federation,
        TrimmedMean(trim=0.2),
        history,
        max_rounds=120,
        server_lr=0.1,
        attack=TrimAttack(),
    )
    recoverer = Diagnosed()
    loop.recover(federation, history, recoverer, federation.malicious)
    errors = torch.stack(recoverer.errors)  # one row per round
    assert len(errors) == sum(recoverer.exact_reason(t, 120) is None for t in range(120))
    estimated, historical = errors.median(dim=0).values
    assert estimated < 0.9 * historical
