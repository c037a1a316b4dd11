"""On real data, estimating is better than reusing history."""

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

    def start(self, history, max_rounds):
        self.errors = []
        super().start(history, max_rounds)

    def round_updates(self, t, global_weights, ctx):
        if self.exact_reason(t, ctx.max_rounds) is None:
            exact = ctx.exact(ctx.client_ids, "other").updates
            record = ctx.history(t)
            estimates = self.estimator.estimate(record, global_weights).updates
            distances = [(rows - exact).norm(dim=1) for rows in (estimates, record.updates)]
            self.errors.append(torch.stack(distances, dim=1))
        return super().round_updates(t, global_weights, ctx)


def test_estimates_are_closer_to_exact_updates_than_history_on_digits() -> None:
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
    errors = torch.cat(recoverer.errors)  # one row per client and round
    assert len(errors) == 16 * sum(recoverer.exact_reason(t, 120) is None for t in range(120))
    estimated, historical = errors.median(dim=0).values
    assert estimated < historical
