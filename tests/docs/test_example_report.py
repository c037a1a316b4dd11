"""The report that the docs show is what `fedrec run quickstart` makes now."""

from __future__ import annotations

import re
from pathlib import Path

from fedrec.recipe import load_recipe, run

REPOSITORY = Path(__file__).resolve().parents[2]
SHOWN = REPOSITORY / "docs" / "assets" / "quickstart_report.html"


def frame(page: str) -> list[str]:
    """Return what does not depend on the number of rounds: style, script, headings, remarks."""
    parts = r"<meta .*?>|<style>.*?</style>|<script>.*?</script>|<h2>.*?</h2>|<thead>.*?</thead>"
    return re.findall(rf'{parts}|<p class="note">.*?</p>', page, re.DOTALL)


def settings(page: str) -> list[str]:
    """Return the lines of the recipe, without the number of rounds."""
    found = re.search(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)
    assert found is not None
    return [line for line in found[1].splitlines() if "max_rounds" not in line]


def test_it_looks_as_reports_do_now(tmp_path: Path) -> None:
    # 40 rounds are enough for the detector and for exact rounds of each kind.
    recipe = load_recipe("quickstart", overrides=["record.max_rounds=40"])
    run(recipe, folder=tmp_path / "quickstart", progress=False)
    made = (tmp_path / "quickstart" / "report.html").read_text(encoding="utf-8")
    shown = SHOWN.read_text(encoding="utf-8")
    assert frame(shown) == frame(made), "copy the report of `fedrec run quickstart` there"
    assert settings(shown) == settings(made), "copy the report of `fedrec run quickstart` there"


def test_its_errors_are_those_of_the_readme() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| | TER, % | exact rounds") :].split("\n\n")[0]
    errors = re.findall(r"^\|[^|]+\| \**([\d.]+)", table, re.MULTILINE)
    summary = SHOWN.read_text(encoding="utf-8").split("</table>")[0]
    assert len(errors) == 7
    assert sorted(errors) == sorted(re.findall(r"</th><td><data value=[^>]*>([\d.]+)", summary))
