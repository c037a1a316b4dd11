"""The HTML page of a run: self-contained, readable on a phone and in the dark."""

from __future__ import annotations

from pathlib import Path

from fedrec._derived import register_derived
from fedrec._files import write_atomically
from fedrec.report.html import document
from fedrec.report.run import Run, styles_of
from fedrec.report.sections import headline, sections

__all__ = ["write_report"]


def write_report(folder: str | Path, output: str | Path | None = None) -> Path:
    """Write the page of a run.

    Args:
        folder: A run folder with `results.json`.
        output: File to write; `report.html` in the run folder by default.

    Returns:
        The file.
    """
    run = Run(Path(folder))
    main = sections(run, styles_of(run.results["recipe"]))
    path = run.folder / "report.html" if output is None else Path(output)
    if output is None:
        register_derived(path)  # the page shows scores of single clients
    write_atomically(path, document(run.name, "fedrec run", headline(run), main))
    return path
