"""metrics.csv holds numbers, all of them, whatever was logged and when."""

from __future__ import annotations

from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedrec.exceptions import ConfigurationError
from fedrec.loop.logs import MetricsLog, read_metrics


class Remember:
    """Stands for a logger of Lightning."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.seen.append((step, metrics))


def write(path: Path | None, rows: list[dict[str, Any]], first_round: int = 0) -> MetricsLog:
    log = MetricsLog(path, [], "record/", first_round)
    with closing(log):
        for t, row in enumerate(rows, start=first_round):
            logged = {k: v for k, v in row.items() if k != "ter"}
            log.write(t, logged, {k: v for k, v in row.items() if k == "ter"})
    return log


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (0.25, "0.25"),
        (5, "5"),
        (True, "1.0"),
        (np.float64(0.25), "0.25"),
        (np.float32(0.5), "0.5"),
        (np.int64(5), "5"),
        (np.array([0.25]), "0.25"),
        (torch.tensor(0.25), "0.25"),
        (torch.tensor(0.25, requires_grad=True), "0.25"),
        (torch.tensor([[7]]), "7"),
        (Fraction(1, 4), "0.25"),
        (float("nan"), "nan"),
    ],
)
def test_every_number_is_written_as_one(tmp_path: Path, value: Any, cell: str) -> None:
    log = write(tmp_path / "m.csv", [{"loss": value}])
    assert (tmp_path / "m.csv").read_text() == f"round,ter,asr,loss\n0,,,{cell}\n"
    assert type(log.rows[0]["loss"]) in (int, float)


@pytest.mark.parametrize(
    "value", ["0.5", "low", None, 1j, [1.0], torch.zeros(2), np.zeros(2), torch.zeros(0)]
)
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigurationError, match="`loss` to be a number"):
        write(tmp_path / "m.csv", [{"ter": 0.5}, {"loss": value}])
    assert read_metrics(tmp_path / "m.csv") == [{"round": 0, "ter": 0.5}]


def test_what_is_logged_late_gets_a_column(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    write(path, [{"loss": 2.0}, {"loss": 1.5, "ter": 0.5}, {"late": 7}, {"loss": 1.0}])
    assert path.read_text() == "round,ter,asr,loss,late\n0,,,2.0,\n1,0.5,,1.5,\n2,,,,7\n3,,,1.0,\n"
    assert [p.name for p in tmp_path.iterdir()] == ["m.csv"]


def test_rows_are_in_the_file_before_it_is_closed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.csv", [], "", 0)
    for t, row in enumerate([{"a": 1}, {"b": 2}, {"a": 3, "b": 4}]):
        log.write(t, row)
        assert read_metrics(tmp_path / "m.csv") == log.rows
    log.close()


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"n": 5}, {"loss": 0.5, "ter": 0.25}, {"é": 1e-7}, {"n": 6}]
    write(tmp_path / "whole.csv", rows)
    for cut in range(1, 4):
        path = tmp_path / f"cut{cut}.csv"
        write(path, rows[:cut])
        write(path, rows[cut - 1 :], first_round=cut - 1)  # the last round was not stored
        assert path.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_reading_stops_at_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    for damaged in (b"1,0.4,\xff\xfe\n", b"1,0.4,,8,9\n", b"1,x,\n", b"\0\0\0,1,\n"):
        path.write_bytes(b"round,ter,n\n0,0.5,3\n" + damaged + b"2,0.1,\n")
        assert read_metrics(path) == [{"round": 0, "ter": 0.5, "n": 3}]
    assert read_metrics(tmp_path / "absent.csv") == []


def test_loggers_get_plain_numbers() -> None:
    logger = Remember()
    log = MetricsLog(None, [logger], "record/", 0)
    log.write(3, {"loss": torch.tensor(0.25), "n": 2})
    assert logger.seen == [(3, {"record/loss": 0.25, "record/n": 2})]
    assert type(logger.seen[0][1]["record/loss"]) is float


def test_names_of_test_results_are_not_for_the_training_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m.csv", [], "", 0, metrics=["f1"])
    log.write(0, {"loss": 1.0}, {"f1": 0.5})
    log.write(1, {"loss": 0.5})
    assert log.curve() == [{"round": 0, "f1": 0.5}]
    for name in ("ter", "f1"):
        with pytest.raises(ConfigurationError, match=rf"\['{name}'\] was logged.*`train_{name}`"):
            log.write(2, {name: 1.0})
    log.close()
