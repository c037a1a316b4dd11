"""Results as a table in the terminal and as a page that stands on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.report.page import write_report
    from fedrec.report.table import print_results

__all__ = ["print_results", "write_report"]

__getattr__, __dir__ = lazy(
    __name__,
    {"print_results": "fedrec.report.table", "write_report": "fedrec.report.page"},
)
