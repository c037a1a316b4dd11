"""What it costs to craft malicious updates, against one read of the data and a trimmed mean.

    python benchmarks/attacks.py --csv benchmarks/results/attacks.csv

Everything is measured in turn in one process, so that drift hits all alike; figures are medians of
wall-clock time. `times one read` divides by the time of `torch.sum` over the updates, `times a
trimmed mean` by that of the rule that most of these attacks are tried against.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from timing import interleave, median, size_parser, table, write_csv
from torch import nn

from fedrec.attacks import (
    ALIE,
    IPM,
    MPAF,
    Attack,
    AttackContext,
    BackdoorAttack,
    GaussianNoise,
    KrumAttack,
    Mimic,
    MinMax,
    MinSum,
    ModelReplacement,
    Neurotoxin,
    SignFlip,
    TrimAttack,
)
from fedrec.functional import trimmed_mean
from fedrec.loop.runtime import keep_freed_memory
from fedrec.parameters import ParameterVector

HEADERS = ("attack", "clients", "parameters", "threads", "ms", "times one read", "times a rule")
BACKDOOR = BackdoorAttack(scale=1.0)
ATTACKS: dict[str, Attack] = {
    "SignFlip": SignFlip(),
    "GaussianNoise": GaussianNoise(),
    "TrimAttack": TrimAttack(),
    "TrimAttack, partial knowledge": TrimAttack(full_knowledge=False),
    "KrumAttack": KrumAttack(),
    "KrumAttack, partial knowledge": KrumAttack(full_knowledge=False),
    "ALIE": ALIE(),
    "ALIE, full knowledge": ALIE(full_knowledge=True),
    "IPM": IPM(),
    "MinMax": MinMax(),
    "MinSum": MinSum(),
    "Mimic, warm-up": Mimic(warmup_rounds=1),
    "MPAF": MPAF(),
    "BackdoorAttack": BACKDOOR,
    "ModelReplacement": ModelReplacement(BACKDOOR),
    "Neurotoxin": Neurotoxin(BACKDOOR),
}


def main() -> None:
    """Measure, print, write."""
    parser = size_parser(__doc__)
    parser.add_argument("--malicious", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()  # as the loop does
    m, d = arguments.clients, arguments.parameters
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(m, d, generator=generator)
    malicious = torch.zeros(m, dtype=torch.bool)
    malicious[torch.randperm(m, generator=generator)[: arguments.malicious]] = True
    ctx = AttackContext(
        round=0,
        phase="record",
        client_ids=tuple(f"client-{i}" for i in range(m)),
        global_weights=torch.randn(d, generator=generator),
        layout=ParameterVector(nn.Linear(d, 1, bias=False)),
        last_aggregate=torch.randn(d, generator=generator),
        cohort_size=m,
        cohort_malicious=arguments.malicious,
    )

    def craft(attack: Attack) -> None:
        attack.reset(())
        attack.craft(updates, malicious, ctx)

    functions: dict[str, Callable[[], object]] = {
        "read": updates.sum,
        "rule": partial(trimmed_mean, updates, arguments.malicious),
        **{name: partial(craft, attack) for name, attack in ATTACKS.items()},
    }
    with torch.no_grad():
        seconds = interleave(functions, repeats=arguments.repeats)
    took = {name: median(values) for name, values in seconds.items()}
    rows = [
        (name, m, d, arguments.threads, 1e3 * t, t / took["read"], t / took["rule"])
        for name, t in took.items()
        if name != "read"
    ]
    table(rows, HEADERS)
    if arguments.csv is not None:
        write_csv(arguments.csv, rows, HEADERS)


if __name__ == "__main__":
    main()
