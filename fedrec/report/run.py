"""Reading a run folder for a page."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedrec.loop.logs import read_metrics
from fedrec.metrics import CostLedger
from fedrec.metrics.estimate_errors import read_estimate_errors
from fedrec.recipe.results import is_reference
from fedrec.recipe.schema import folder_name, label_of
from fedrec.recipe.tables import POISONED, name_of_recorded
from fedrec.report.curves import Series
from fedrec.types import EstimateError

__all__ = ["REFERENCE", "Run", "styles_of"]

#: CSS class of the method that others are compared with.
REFERENCE = "scratch-line"


@dataclass(frozen=True)
class Run:
    """The content of a run folder.

    Args:
        folder: A run folder with `results.json`.
    """

    folder: Path

    @cached_property
    def results(self) -> dict[str, Any]:
        """Content of `results.json`."""
        results: dict[str, Any] = self._json("results.json")
        return results

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return str(self.results["recipe"]["name"])

    @property
    def methods(self) -> list[dict[str, Any]]:
        """The finished recoveries."""
        methods: list[dict[str, Any]] = self.results["methods"]
        return methods

    @property
    def reference(self) -> dict[str, Any] | None:
        """The first recovery that trains from scratch, or `None`."""
        styles = styles_of(self.results["recipe"])
        return next((m for m in self.methods if styles[m["name"]] == REFERENCE), None)

    @property
    def detection(self) -> dict[str, Any] | None:
        """The detector's result with the scores, or `None`."""
        if self.results["detection"] is None:
            return None
        detection: dict[str, Any] = self._json("detection.json")["result"]
        return detection

    def curves(self, figure: str, styles: Mapping[str, str]) -> list[Series]:
        """Return the curves of TER or ASR in percent; the first method comes last, to be on top.

        Args:
            figure: The column of metrics.csv, `"ter"` or `"asr"`.
            styles: CSS class by method.
        """
        malicious = name_of_recorded(self.results) == POISONED
        name = "Poisoned recording" if malicious else "Recording"
        series = [Series(name, "poisoned", self._points("record", figure))]
        for name in reversed([m["name"] for m in self.methods]):
            label = f"{name} (reference)" if styles[name] == REFERENCE else name
            points = self._points(f"recover/{folder_name(name)}", figure)
            series.append(Series(label, styles[name], points))
        return [s for s in series if s.points]

    def cost_savings(self, method: str) -> dict[str, float]:
        """Return the CP, a fraction, of every client that remains in a recovery."""
        stored = self._json(f"recover/{folder_name(method)}/result.json", {})
        return dict(stored.get("result", {}).get("cp", {}))

    def costs(self, method: str) -> dict[str, tuple[int, int, float]]:
        """Return requests, bytes and seconds of every client in a recovery's ledger."""
        path = self.folder / "recover" / folder_name(method) / "ledger.csv"
        if not path.exists():
            return {}
        with path.open(newline="", encoding="utf-8") as file:
            clients = list(dict.fromkeys(row["client_id"] for row in csv.DictReader(file)))
        return CostLedger.from_csv(path, dict.fromkeys(clients, 0)).by_client()

    def estimate_errors(self, method: str) -> list[EstimateError]:
        """Return the errors of a recovery's estimates that were compared with exact updates."""
        path = self.folder / "recover" / folder_name(method) / "diagnostics.csv"
        return [row for row in read_estimate_errors(path) if math.isfinite(row.relative_error)]

    def _points(self, folder: str, figure: str) -> list[tuple[float, float]]:
        rows = read_metrics(self.folder / folder / "metrics.csv")
        return [(row["round"], round(100 * row[figure], 10)) for row in rows if figure in row]

    def _json(self, name: str, default: Any = None) -> Any:
        path = self.folder / name
        if default is not None and not path.exists():
            return default
        return json.loads(path.read_text(encoding="utf-8"))


def styles_of(*recipes: Mapping[str, Any]) -> dict[str, str]:
    """Return the CSS classes of every method, so that it has the same look all over a page.

    Args:
        *recipes: Resolved recipes.

    Examples:
        >>> nodes = [{"class_path": "A", "label": label} for label in "abcdefghi"]
        >>> styles = styles_of({"recoverers": nodes})
        >>> styles["a"], styles["i"]
        ('method-0', 'method-0 second')
    """
    styles: dict[str, str] = {}
    for node in [node for recipe in recipes for node in recipe.get("recoverers") or []]:
        taken = sum(style.startswith("method-") for style in styles.values())
        # There are eight colours. The next eight methods have the same, with dashes and stripes.
        method = f"method-{taken % 8}{' second' if taken // 8 % 2 else ''}"
        own = REFERENCE if is_reference(node) else method
        styles.setdefault(label_of(node), own)
    return styles
