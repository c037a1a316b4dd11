"""Results as tables in the terminal, as self-contained HTML pages, and as figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.report.comparison import write_comparison
    from fedrec.report.costs import print_costs, write_costs
    from fedrec.report.figures import draw_box, draw_cost, draw_cp, draw_values
    from fedrec.report.looks import save_figure
    from fedrec.report.notebook import Comparison, compare
    from fedrec.report.page import write_report
    from fedrec.report.table import print_results

__all__ = [
    "Comparison",
    "compare",
    "draw_box",
    "draw_cost",
    "draw_cp",
    "draw_values",
    "print_costs",
    "print_results",
    "save_figure",
    "write_comparison",
    "write_costs",
    "write_report",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        **dict.fromkeys(
            ("draw_box", "draw_cost", "draw_cp", "draw_values"), "fedrec.report.figures"
        ),
        **dict.fromkeys(("Comparison", "compare"), "fedrec.report.notebook"),
        **dict.fromkeys(("print_costs", "write_costs"), "fedrec.report.costs"),
        "print_results": "fedrec.report.table",
        "save_figure": "fedrec.report.looks",
        "write_comparison": "fedrec.report.comparison",
        "write_report": "fedrec.report.page",
    },
)
