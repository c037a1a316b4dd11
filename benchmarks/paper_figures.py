"""The paper's appendix tables, and its figures over a parameter, on MNIST at a reduced scale.

    OMP_NUM_THREADS=1 python benchmarks/paper_figures.py

From the repository's root. Every experiment is a `fedrec sweep` of a recipe of `recipes/paper/`
with the overrides in `SCALE`; `--dry-run` prints the commands, `--only NAME ...` does some of them.
What is done is kept, so the same call goes on after an interruption. The tables are
`benchmarks/results/paper_NAME.csv`, the figures of `fedrec plot` `docs/assets/paper_NAME.svg`.
All of it takes about half an hour on one core, and 6 GB of disk in `--work`.

The reduced scale: 50 clients of which 10 are malicious, 500 rounds, a network with a hidden layer
of 32 (25,450 parameters). The learning rate is 4 times the paper's, as there are 4 times fewer
rounds, so that their product is the paper's; it was not tuned. All else is the paper's.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

from fedrec.cli.main import main as fedrec

RECIPES = Path("recipes/paper")
LR = 0.0384
MODEL = f"model={{class_path: MLP, init_args: {{in_features: 784, hidden: [32], lr: {LR}}}}}"
SCALE = (
    "data.init_args.num_clients=50",
    "federation.malicious=10",
    "model={class_path: MLP, init_args: {in_features: 784, hidden: [32]}}",
    "record.max_rounds=500",
    f"record.server_lr={LR}",
    "loop.num_threads=1",
    "loop.accelerator=cpu",
)
RULES = "aggregator=FedAvg,Median,TrimmedMean"
ATTACKS = "attack=TrimAttack,BackdoorAttack"
OTHER_RULES = "aggregator=FedAvg,Median"
ERRORS, RATES = "detector.init_args", "0,0.2,0.4,0.5"
# Beside what the recipe has.
ANCHORED = (
    "recoverers=[{class_path: FedRecover, init_args: {estimator: paired}}, TrainFromScratch, "
    "{class_path: FedRecover, label: anchored, init_args: {estimator: anchored}}]"
)
FED_RECOVER, FINE_TUNE = "recoverers.0.init_args", "recoverers.2.init_args"
LITERAL = tuple(f"recoverers.{i}.init_args.estimator=paper" for i in (0, 2, 3, 4))
CURVATURE = (
    f"{FED_RECOVER}.estimator.class_path=PairedLBFGS",
    f"{FED_RECOVER}.estimator.init_args.negative_curvature=true,false",
)


@dataclass(frozen=True)
class Experiment:
    """A sweep of a recipe, and the figures drawn from its table.

    Args:
        name: Names the table and the figures.
        recipe: Of `recipes/paper/`, without the suffix.
        grid: `key=v1,v2` texts beside those of `SCALE`, which they replace.
        plot: Arguments of `fedrec plot`, if there is a figure.
        repeats: Seeds, if not only one.
    """

    name: str
    recipe: str
    grid: tuple[str, ...]
    plot: str = ""
    repeats: int = 1

    def command(self, work: Path, repeats: int) -> list[str]:
        """Return the arguments of `fedrec`."""
        own = {text.split("=")[0] for text in self.grid}
        scale = [text for text in SCALE if text.split("=")[0] not in own]
        return [
            *("sweep", str(RECIPES / f"{self.recipe}.yaml"), f"name={self.name}"),
            *(*scale, *self.grid),
            *("--repeats", str(max(repeats, self.repeats)), "--output-dir", str(work)),
            *("--recordings", str(work / "recordings"), "--no-progress"),
        ]


LINES = "--where method=FedRecover,TrainFromScratch --y ter,acp --x"
ASR_LINES = "--where method=FedRecover,TrainFromScratch --y ter,asr,acp --x"
# A stand-in for Purchase, with the paper's product of rounds and learning rate.
TANH = "{in_features: 600, hidden: [128], num_classes: 100, activation: tanh}"
PURCHASE = (
    "data.init_args.num_clients=20",
    "data.init_args.num_records=30000",
    "data.init_args.num_train=24000",
    "federation.malicious=4",
    "federation.batch_size=100",
    f"model={{class_path: MLP, init_args: {TANH}}}",
    "record.server_lr=0.36",
)
CONVERGENCE = (
    "--where method=FedRecover,TrainFromScratch --y "
    "rounds_to_converge,exact_rounds_to_converge,local_steps_to_converge"
)
EXPERIMENTS = (
    Experiment("without_approximation", "without_approximation", (RULES, ATTACKS)),
    Experiment("without_strategies", "without_strategies", (ATTACKS,)),
    Experiment(
        "correction_period",
        "correction_period",
        (f"{FED_RECOVER}.correction_period=5,10,20,50,100",),
        f"{LINES} correction_period",
    ),
    Experiment(
        "accuracy_cost",
        "accuracy_cost",
        (f"{FED_RECOVER}.correction_period=5,10,20,50,100",),
        "--kind cost --y relative_distance --where method=FedRecover",
    ),
    Experiment(
        "tolerance_rate",
        "tolerance_rate",
        (f"{FED_RECOVER}.tolerance_rate=1e-6,1e-5,1e-4,1e-3",),
        f"{LINES} tolerance_rate",
    ),
    Experiment(
        "warmup_rounds",
        "warmup_rounds",
        (f"{FED_RECOVER}.warmup_rounds=5,20,80",),
        f"{LINES} warmup_rounds",
    ),
    Experiment(
        "final_rounds",
        "final_rounds",
        (f"{FED_RECOVER}.final_rounds=0,1,5,20",),
        f"{LINES} final_rounds",
    ),
    Experiment("without_strategies_purchase", "without_strategies_purchase", PURCHASE, repeats=3),
    Experiment(
        "without_strategies_literal",
        "without_strategies",
        (ATTACKS, *LITERAL),
    ),
    Experiment("fnr", "detection_errors", ("detector.init_args.fnr=0,0.2,0.4",), f"{LINES} fnr"),
    Experiment("fpr", "detection_errors", ("detector.init_args.fpr=0,0.2,0.4",), f"{LINES} fpr"),
    Experiment("fnr_rules", "detection_errors", (OTHER_RULES, f"{ERRORS}.fnr={RATES}", ANCHORED)),
    Experiment("fpr_rules", "detection_errors", (OTHER_RULES, f"{ERRORS}.fpr={RATES}", ANCHORED)),
    Experiment("history_reused", "history_reused", (ATTACKS,)),
    Experiment(
        "cp_distribution",
        "cp_distribution",
        (RULES,),
        "--kind cp --x aggregator --where method=FedRecover",
    ),
    Experiment(
        "num_malicious",
        "num_malicious",
        ("federation.malicious=5,10,20",),
        f"{LINES} malicious",
    ),
    Experiment(
        "num_malicious_tolerance_rate",
        "num_malicious",
        ("federation.malicious=20", f"{FED_RECOVER}.tolerance_rate=1e-5,1e-4"),
    ),
    Experiment(
        "num_malicious_negative_curvature",
        "num_malicious",
        ("federation.malicious=20", *CURVATURE),
    ),
    Experiment(
        "non_iid",
        "non_iid",
        ("data.init_args.partitioner.init_args.q=0.1,0.5,0.9",),
        f"{LINES} q",
    ),
    Experiment(
        "non_iid_negative_curvature",
        "non_iid",
        (
            "data.init_args.partitioner.init_args.q=0.9",
            *CURVATURE,
        ),
    ),
    Experiment(
        "adaptive_backdoor",
        "adaptive_backdoor",
        ("detector.init_args.fnr=0,0.2,0.4",),
        f"{ASR_LINES} fnr",
    ),
    Experiment(
        "fine_tune_examples",
        "fine_tune_examples",
        (ATTACKS, f"{FINE_TUNE}.num_samples=10,100,1000"),
        "--where attack=BackdoorAttack --y ter,asr --x num_samples",
    ),
    Experiment(
        "fine_tune_distribution",
        "fine_tune_distribution",
        (f"{FINE_TUNE}.beta=0.1,1,10",),
        "--y ter --x beta",
    ),
    Experiment(
        "local_batches",
        "local_batches",
        ("federation.local_steps=1,5", MODEL),
        f"{CONVERGENCE} --x local_steps",
    ),
    Experiment(
        "local_batches_long",
        "local_batches",
        (
            "federation.local_steps=5,10,20,30,50",
            MODEL,
            "record.max_rounds=150",
            "recoverers=[TrainFromScratch]",
        ),
    ),
)


def run(
    experiment: Experiment, command: list[str], work: Path, results: Path, figures: Path
) -> None:
    """Do what is missing of an experiment, and write its table and its figure."""
    if code := fedrec(command):
        raise SystemExit(code)
    table = results / f"paper_{experiment.name}.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(work / experiment.name / "results.csv", table)
    if experiment.plot:
        output = figures / f"paper_{experiment.name}.svg"
        plot = ["plot", str(work / experiment.name), *shlex.split(experiment.plot)]
        fedrec([*plot, "--output", str(output)])


def main() -> None:
    """Run the experiments that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [experiment.name for experiment in EXPERIMENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=1, help="seeds of each point")
    parser.add_argument("--work", type=Path, default=Path("runs/paper_small"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--figures", type=Path, default=Path("docs/assets"))
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    arguments = parser.parse_args()
    for experiment in EXPERIMENTS:
        if experiment.name not in arguments.only:
            continue
        command = experiment.command(arguments.work, arguments.repeats)
        print(f"$ fedrec {shlex.join(command)}", flush=True)
        if not arguments.dry_run:
            run(experiment, command, arguments.work, arguments.results, arguments.figures)


if __name__ == "__main__":
    main()
