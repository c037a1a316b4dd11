"""Numbers that are on more than one page, or that a reader would look up in a table of results."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean, median

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"


def results(name: str) -> list[dict[str, str]]:
    with (REPOSITORY / "benchmarks/results" / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def cells(page: str, begins: str) -> list[str]:
    """The cells after the first one of the first row of a page that begins so."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(begins))
    return [cell.strip(" *") for cell in row.strip("|").split("|")[1:]]


@pytest.mark.parametrize(
    ("page", "row", "columns"),
    [
        ("estimates.md", "| **mean of all**", ("paired", "anchored", "average")),
        ("extend/estimator.md", "| TER above", ("anchored", "average", "paired")),
    ],
)
def test_estimators_end_as_far_from_scratch_as_their_table_says(
    page: str, row: str, columns: tuple[str, ...]
) -> None:
    ter = {(r["setting"], r["seed"], r["rule"]): float(r["ter"]) for r in results("estimators.csv")}
    cases = {key[:2] for key in ter}
    assert len(cases) == 27
    points = [mean(ter[*c, rule] - ter[*c, "scratch"] for c in cases) * 100 for rule in columns]
    shown = [cell.removesuffix(" points") for cell in cells(page, row)]
    assert shown == [f"{number:.1f}" for number in points]


@pytest.mark.parametrize(
    "codec", ["float32", "lz4", "zstd", "float16", "int8", "int8+zstd", "sign"]
)
def test_codecs_are_as_fast_as_their_table_says(codec: str) -> None:
    rounds = [r for r in results("codecs.csv") if r["model"] == "CNN" and r["codec"] == codec]
    assert len(rounds) == 4
    encode, decode = cells("history.md", f"| `{codec}`")[2:4]
    told = dict(zip(("encode GB/s", "decode GB/s"), (encode, decode), strict=True))
    for column, number in told.items():
        if number != "no copy":
            assert float(number) == pytest.approx(
                median(float(r[column]) for r in rounds), abs=0.051
            )
