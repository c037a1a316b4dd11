"""Play the notebooks of the documentation, and write a page from each.

python benchmarks/notebook.py

Each `docs/notebooks/*.ipynb` is run in a kernel of its own, its outputs are stored in it, and the
page of the same name beside it is written anew.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def play(path: Path, folder: Path) -> Any:
    """Return a notebook with the outputs that its cells have now.

    Args:
        path: The notebook.
        folder: The current folder of its kernel.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
    notebook.metadata.pop("language_info", None)  # the version of Python
    return notebook


def page(path: Path) -> str:
    """Return a notebook, with the outputs stored in it, as a page in Markdown."""
    notebook = nbformat.read(path, as_version=4)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            # Not "python": the notebook is tested itself, so the page need not be.
            parts.append(f"```py\n{cell.source}\n```")
            parts += [_shown(output) for output in cell.outputs]
    title, *rest = parts
    link = f"[The notebook]({path.name}) to run and to change."
    return "\n\n".join([title, link, *rest]).rstrip() + "\n"


def _shown(output: Any) -> str:
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```"
    if "image/png" in output.data:
        words, image = "The figure that the code above draws", output.data["image/png"].strip()
        return f'<img alt="{words}" src="data:image/png;base64,{image}">'
    if "text/html" in output.data:
        html = re.sub(r"\n\s*\n", "\n", output.data["text/html"])
        # The site dresses up tables that have no class.
        html = html.replace('<table border="1" class="dataframe">', "<table>")
        return html if html.startswith("<div") else f"<div>{html}</div>"
    return f"```text\n{output.data['text/plain']}\n```"


def main() -> None:
    """Play all notebooks and write their pages."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(play(path, Path(folder)), path)
        path.with_suffix(".md").write_text(page(path), encoding="utf-8")


if __name__ == "__main__":
    main()
