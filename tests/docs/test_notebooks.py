"""The notebooks of the docs work, give what they say, and their pages show them."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((REPOSITORY / "docs" / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location(
        "notebook_tool", REPOSITORY / "benchmarks" / "notebook.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_pages_are_their_notebooks(tool: Any, path: Path) -> None:
    shown = path.with_suffix(".md").read_text(encoding="utf-8")
    assert shown == tool.page(path), "run `python benchmarks/notebook.py`"


# Of the kernel's own machinery: an event loop that is left open.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_own_resnet(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    path = REPOSITORY / "docs" / "notebooks" / "own_resnet.ipynb"
    cells = [cell for cell in tool.play(path, tmp_path).cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    # Nothing but what cells return and draw: no warning, no log.
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data"}
    # The live view of a run says how far it is.
    outputs = [o for o in outputs if not re.match(r"\w+ +\d+/\d+ ", o.data["text/plain"])]
    texts = [output.data["text/plain"] for output in outputs]
    tables = [output.data.get("text/html", "") for output in outputs]
    poisoned, detection = texts[1], texts[3]
    assert poisoned.startswith("RunResult(record: 40 rounds in ")
    assert "malicious=('client-2', 'client-5')" in detection
    assert sum("<svg" in table for table in tables) == 2
    tested = ast.literal_eval(texts[5])
    assert tested["ter"] < 0.15
    assert tested["asr"] < 0.1
    assert ast.literal_eval(texts[-1]) == ("model.ckpt", True)
    assert (tmp_path / "run" / "recover" / "FedRecover" / "model.ckpt").is_file()
