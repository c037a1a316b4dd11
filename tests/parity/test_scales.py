"""Rules and attacks with updates of any magnitude: like float64, and in proportion to them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedrec import aggregators as rules
from fedrec import attacks
from fedrec.aggregators import AggregationContext, Aggregator
from fedrec.attacks import Attack, AttackContext
from fedrec.parameters import ParameterVector

M, D, F = 15, 60, 3
LAYOUT = ParameterVector(nn.Linear(D - 1, 1))
IDS = tuple(map(str, range(M)))

# Each as a function of the scale, in whose unit some arguments are.
RULES: dict[str, Callable[[float], Aggregator]] = {
    "FedAvg": lambda s: rules.FedAvg(),
    "Median": lambda s: rules.Median(),
    "TrimmedMean": lambda s: rules.TrimmedMean(trim=F),
    "Krum": lambda s: rules.Krum(num_byzantine=F),
    "MultiKrum": lambda s: rules.MultiKrum(num_byzantine=F),
    "Bulyan": lambda s: rules.Bulyan(num_byzantine=F),
    "GeometricMedian": lambda s: rules.GeometricMedian(),
    "MeanAroundMedian": lambda s: rules.MeanAroundMedian(num_byzantine=F),
    "NormClipping": lambda s: rules.NormClipping(),
    "NormClipping(max_norm=max_norm)": lambda s: rules.NormClipping(max_norm=5 * s),
    "DnC": lambda s: rules.DnC(num_byzantine=F),
    "CAF": lambda s: rules.CAF(num_byzantine=F),
    "FLAME": lambda s: rules.FLAME(noise_factor=0.0),
    "SignGuard": lambda s: rules.SignGuard(),
    "RLR": lambda s: rules.RLR(rules.FedAvg(), threshold=5),
    "CenteredClipping": lambda s: rules.CenteredClipping(tau=3 * s, iterations=3),
    "FoolsGold": lambda s: rules.FoolsGold(),
    "FLTrust": lambda s: rules.FLTrust(),
    "NearestNeighborMixing": lambda s: rules.NearestNeighborMixing(rules.Median(), num_byzantine=F),
    "Bucketing": lambda s: rules.Bucketing(rules.Median()),
    "ARC": lambda s: rules.ARC(rules.FedAvg(), num_byzantine=F),
    "AlignIns": lambda s: rules.AlignIns(),
    "LASA": lambda s: rules.LASA(),
    "MultiMetrics": lambda s: rules.MultiMetrics(local_lr=0.1),
    "RFLBAT": lambda s: rules.RFLBAT(),
    "FedAvgM": lambda s: rules.FedAvgM(rules.FedAvg()),
}
ATTACKS: dict[str, Callable[[float], Attack]] = {
    "TrimAttack": lambda s: attacks.TrimAttack(),
    "KrumAttack": lambda s: attacks.KrumAttack(threshold=1e-5 * s),
    "ALIE": lambda s: attacks.ALIE(full_knowledge=True),
    "IPM": lambda s: attacks.IPM(),
    "MinMax": lambda s: attacks.MinMax(),
    "MinSum": lambda s: attacks.MinSum(),
    "Mimic": lambda s: attacks.Mimic(),
    "PoisonedFL": lambda s: attacks.PoisonedFL(),
}
# Powers of two near 1e-30, 1e-12, 1e12 and 1e30: multiplying with them rounds nothing.
SCALES = [2.0**-100, 2.0**-40, 2.0**40, 2.0**100]


def updates_of(seed: int, offset: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(M, D))
    x[:F] = 4 * rng.normal(size=D) + 0.1 * rng.normal(size=(F, D))
    return (x + offset).astype(np.float32)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    assert float((got.double() - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RULES)
def test_rules(name: str, scale: float, offset: float) -> None:
    def run(x: Tensor, s: float) -> Tensor:
        rule = RULES[name](s)
        for t in range(3):
            ctx = AggregationContext(
                round=t,
                phase="record",
                client_ids=IDS,
                global_weights=x[0],
                layout=LAYOUT,
                server_update=x.mean(dim=0),
            )
            result = rule(x, None, ctx)
        return result

    x = torch.from_numpy(updates_of(0, offset))
    wanted = run(x.double(), 1.0)
    assert_close(run(x, 1.0), wanted)
    assert_close(run(x * scale, scale), wanted * scale)


@pytest.mark.parametrize("offset", [0.0, 1e3])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(name: str, scale: float, offset: float) -> None:
    malicious = torch.arange(M) < F

    def run(x: Tensor, s: float) -> Tensor:
        attack = copy.deepcopy(ATTACKS[name](s))
        attack.reset(IDS[:F])
        ctx = AttackContext(
            round=0,
            phase="record",
            client_ids=IDS,
            global_weights=x.mean(dim=0),
            layout=LAYOUT,
            aggregator=rules.Krum(num_byzantine=F),
            last_aggregate=x[F:].mean(dim=0),
            num_malicious=F,
            num_malicious_total=F,
            cohort_size=M,
            cohort_malicious=F,
        )
        return attack.craft(x, malicious, ctx)[:F]

    x = torch.from_numpy(updates_of(0, offset))
    wanted = run(x.double(), 1.0)
    for one in (run(x, 1.0), run(x * scale, scale) / scale):
        assert float((one.double() - wanted).norm()) <= 1e-5 * float(wanted.norm())
