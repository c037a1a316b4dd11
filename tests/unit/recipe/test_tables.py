"""Tables of a sweep: what a mean over repeats keeps beside the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedrec.recipe.tables import COLUMNS, read_table, summarize, synthetic_text, write_table


def row(data: str, repeat: int, **more: Any) -> dict[str, Any]:
    return {"data": data, "seed": repeat, "repeat": repeat, "method": "A", "ter": 0.25, **more}


def test_a_summary_says_which_rows_are_of_synthetic_data(tmp_path: Path) -> None:
    rows = [
        row("PurchaseSynthetic", 0, synthetic_data=None, failure="It failed."),
        row("PurchaseSynthetic", 1, synthetic_data="true"),
        row("FashionMNIST", 0, synthetic_data="false"),
        row("HAR", 0, synthetic_data=None, failure="It failed."),
    ]
    summary = summarize(rows, ["data"])
    found = [(line["data"], line["repeats"], line["synthetic_data"]) for line in summary]
    assert found == [
        ("PurchaseSynthetic", 1, "true"), ("FashionMNIST", 1, "false"), ("HAR", 0, None),
    ]  # fmt: skip
    assert list(summary[0])[:5] == ["data", "method", "failures", "repeats", "synthetic_data"]
    # Read from the file, where what is not known is an empty cell, it is the same.
    write_table(tmp_path / "results.csv", rows, ["data", *COLUMNS])
    read, keys = read_table(tmp_path)
    assert summarize(read, keys) == summary
    assert synthetic_text(read) == synthetic_text(summary) == "in part synthetic data"
    assert synthetic_text(read[:2]) == "synthetic data"
    assert synthetic_text(read[2:]) == ""
