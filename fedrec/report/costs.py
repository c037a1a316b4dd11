"""What a recovery costs each client, beside training from scratch."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from fedrec._files import write_atomically
from fedrec.report.html import document, note, section, table
from fedrec.report.table import percent, print_table

if TYPE_CHECKING:
    from fedrec.metrics.cost import CostLedger

__all__ = ["Table", "costs_table", "print_costs", "table_of_costs", "write_costs"]

_Costs = Mapping[str, tuple[float, int, float]]


class Table(NamedTuple):
    """A table as text.

    Attributes:
        heads: Headings of the columns.
        rows: Cells, one row a client, the last for all of them.
    """

    heads: list[str]
    rows: list[list[str]]


def print_costs(ledger: CostLedger, console: Console, *, title: str = "") -> None:
    """Print what a recovery has cost each client: requests, bytes, and seconds if measured.

    Beside them is what training from scratch would have cost, see
    [`CostLedger.from_scratch`][fedrec.metrics.CostLedger.from_scratch].

    Args:
        ledger: The ledger of the recovery.
        console: The console to print to.
        title: Printed above.

    Examples:
        >>> from fedrec.metrics import CostLedger
        >>> ledger = CostLedger({"a": 8, "b": 8})
        >>> ledger.add("a", 0, "warmup", num_bytes=3_000_000, seconds=0.5)
        >>> print_costs(ledger, Console(width=60))
        <BLANKLINE>
                                   Scratch: Scratch: Scratch:
         Client Asked   MB Seconds    asked       MB  seconds
         ────────────────────────────────────────────────────
         a          1 3.00     0.5        8    24.00      4.0
         b          0 0.00     0.0        8    24.00      4.0
         all        1 3.00     0.5       16    48.00      8.0
        <BLANKLINE>
    """
    heads, rows = costs_table(ledger)
    print_table(console, heads, rows, title=title)


def write_costs(
    ledger: CostLedger, output: str | Path, *, title: str = "Costs of a recovery"
) -> Path:
    """Write what `print_costs` prints as an HTML page, which needs no other file and no network.

    Args:
        ledger: The ledger of the recovery.
        output: File to write.
        title: Heading of the page.

    Returns:
        The file.

    Examples:
        >>> import tempfile
        >>> from fedrec.metrics import CostLedger
        >>> ledger = CostLedger({"a": 8, "b": 8})
        >>> ledger.add("a", 0, "warmup", num_bytes=3_000_000, seconds=0.5)
        >>> write_costs(ledger, f"{tempfile.mkdtemp()}/costs.html").name
        'costs.html'
    """
    heads, rows = costs_table(ledger)
    cells = [[escape(client), *rest] for client, *rest in rows]
    saved = f"ACP {percent(ledger.acp())} %" if ledger.cp() else "nobody has rounds to save"
    header = f"<p>{len(ledger.num_rounds)} clients: {saved}.</p>"
    main = section("Costs by client", table("Costs by client", heads, cells)) + note(
        "How often a client was asked, megabytes that it received and sent, and the seconds that "
        "it took, as it says. Beside them: what training from scratch would have cost, at as much "
        "for each request. ACP: the part of the rounds in which a client was not asked, on average."
    )
    path = Path(output)
    write_atomically(path, document(title, "fedrec recovery", header, main))
    return path


def costs_table(ledger: CostLedger) -> Table:
    """Return what a recovery has cost each client, beside training from scratch."""
    return table_of_costs(ledger.by_client(), ledger.from_scratch())


def table_of_costs(spent: _Costs, scratch: _Costs) -> Table:
    """Return two kinds of costs by client as a table.

    Args:
        spent: Requests, bytes and seconds of a recovery by client.
        scratch: The same of training from scratch; empty if it is not known.
    """
    timed = any(seconds for _, _, seconds in spent.values())
    heads = ["Asked", "MB", "Seconds"][: 3 if timed else 2]
    kinds = [spent, scratch] if scratch else [spent]

    def cells(clients: list[str]) -> list[str]:
        shown = []
        for kind in kinds:
            sums = [sum(kind.get(c, (0, 0, 0.0))[k] for c in clients) for k in range(3)]
            texts = [f"{sums[0]:,.0f}", f"{sums[1] / 1e6:,.2f}", f"{sums[2]:,.1f}"]
            shown += texts[: len(heads)]
        return shown

    rows = [[client_id, *cells([client_id])] for client_id in spent]
    rows.append(["all", *cells(list(spent))])
    beside = [f"Scratch:\n{head if head == 'MB' else head.lower()}" for head in heads]
    return Table(["Client", *heads, *(beside if scratch else [])], rows)
