"""The page in a real browser: no error in its console, no sideways scrolling, the right figures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from fedrec.history.tools.browse import Look, RoundLook
from fedrec.recipe.schema import folder_name
from fedrec.report import write_comparison, write_report
from fedrec.report.history import write_look

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

EVIL = "<script>console.error('ran')</script>"
REASONS = {"warmup": 20.0, "correction": 10.5, "abnormality": 0.25}
WIDTHS = (320, 390, 1280)

# Loads a page at several widths and notes how wide its content is.
_HARNESS = """<!doctype html><title>widths</title><body><script>
const widths = %s;
const frames = widths.map((width) => {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:800px;border:0`;
  frame.src = "page.html";
  document.body.append(frame);
  return frame;
});
window.addEventListener("load", () => {
  const found = frames.map((frame) => {
    const page = frame.contentDocument;
    const charts = [...page.querySelectorAll(".chart svg")];
    const chart = charts.find((svg) => svg.getBoundingClientRect().width);
    chart.dispatchEvent(new KeyboardEvent("keydown", { key: "Home" }));
    const shown = page.querySelector(".tip").textContent;
    const { scrollWidth, clientWidth } = page.documentElement;
    // Tables that are too wide: each has to scroll to its end, and to shade the edge till then.
    const all = (what) => [...page.querySelectorAll(what)];
    const wide = (box) => box.scrollWidth > box.clientWidth;
    const boxes = all(".scroll").filter(wide);
    const stuck = boxes.filter((box) => {
      box.scrollLeft = 1e6;
      const last = box.querySelector("tr").lastElementChild.getBoundingClientRect();
      const shades = getComputedStyle(box).backgroundAttachment;
      const reached = last.right <= box.getBoundingClientRect().right + 1;
      return !reached || shades !== "local, local, scroll, scroll";
    });
    const loose = all("table").filter((table) => !table.closest(".scroll"));
    const wrong = [stuck, loose, all("pre").filter(wide)].map((found) => found.length);
    return { hidden: scrollWidth - clientWidth, shown, scrolls: boxes.length, wrong };
  });
  document.body.replaceChildren(JSON.stringify(found));
});
</script>"""


def opened(page: Path, tmp_path: Path) -> tuple[str, list[str]]:
    """Return the document as the browser has it in the end, and what its console said."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--v=0", "--window-size=1400,900", "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, console


def run_folder(path: Path) -> Path:
    """Write a run folder with everything a page can show, and hostile names in it."""
    figures = {"ter": 0.0517, "asr": 0.25, "acp": 0.88875, "cp_min": 0.8, "cp_max": 0.9}
    figures |= {"relative_distance": 0.0625, "metrics": {EVIL: 0.75}}
    costs = {"exact_rounds_by_reason": REASONS, "seconds": 1.5, "client_bytes": 2_000_000}
    names = [EVIL, "TrainFromScratch", "A method with a name that is rather long, " * 3]
    methods = [{"name": n, **figures, **costs, "client_seconds": {"warmup": 1.0}} for n in names]
    results = {
        "recipe": {
            "name": "all " + EVIL,
            "recoverers": [{"class_path": n, "label": n} for n in names],
            "data": "Purchase",
        },
        "synthetic_data": True,
        "poisoned": {"ter": 0.625, "asr": 0.99},
        "detection": {"malicious": ["client-1", EVIL], "fnr": 0.5, "fpr": 0.25, "round": 30},
        "methods": methods,
        "recording": {"seconds": 4.0, "client_seconds": 3.0},
        "history": {
            "bytes": 1_500_000, "rounds": 100, "clients": 5, "parameters": 10, "codec": "int8+zstd",
            "keep": {"every": 2}, "encryption": None,
        },
        "execution": {"device": "cpu"},
        "versions": {"fedrec": "0.1.0"},
    }  # fmt: skip
    (path / "record").mkdir(parents=True)
    (path / "results.json").write_text(json.dumps(results))
    curve = "round,ter,asr\n0,0.9,0.1\n50,0.5,0.7\n99,0.5,0.25\n"
    (path / "record" / "metrics.csv").write_text(curve)
    for name in names:
        folder = path / "recover" / folder_name(name)
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text(curve)
        cp = {"client-0": 0.8, "client-2": 0.9}
        (folder / "result.json").write_text(json.dumps({"result": {"cp": cp}}))
        rows = "client-0,20,0.5,0.9\nclient-2,20,0.25,-0.5\nclient-0,21,0.001,1.0\n"
        (folder / "diagnostics.csv").write_text("client_id,round,relative_error,cosine\n" + rows)
    scores = {"client-0": 0.1, "client-1": 2.5, "client-2": 0.2, EVIL: 1.0, "client-3": 0.3}
    detection = {
        "scores": scores, "malicious": ["client-1", EVIL], "truth": ["client-1", "client-3"],
        "seen": list(scores),
    }  # fmt: skip
    (path / "detection.json").write_text(json.dumps({"result": detection}))
    return path


def test_a_run_in_a_browser(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    dom, console = opened(write_report(folder), tmp_path)
    assert console == []
    assert dom.count("<script>") == 1
    results = json.loads((folder / "results.json").read_text())
    summary = dom[dom.index("<h2>Summary") : dom.index("<h2>Metrics")]
    metrics = dom[dom.index("<h2>Metrics") : dom.index("<h2>Beside")]
    assert re.findall(r'<data value="([^"]+)">', metrics) == ["0.75"] * 3
    shown = [float(v) for v in re.findall(r'<data value="([^"]+)">', summary)]
    expected = [results["poisoned"]["ter"], results["poisoned"]["asr"]]
    for method in results["methods"]:
        expected += [method[key] for key in ("ter", "asr", "relative_distance", "acp")]
        expected += [sum(REASONS.values()), method["client_bytes"], method["seconds"]]
    assert shown == expected
    charts = [json.loads(unescape(s)) for s in re.findall(r'data-series="([^"]*)"', dom)]
    assert [s["label"] for s in charts[0]][-1] == EVIL
    assert charts[0][-1]["points"] == [[0, 90], [50, 50], [99, 50]]
    errors = next(c for c in charts if c[-1]["label"] == f"{EVIL}, median")
    assert errors[-1]["points"] == [[20, 0.375], [21, 0.001]]
    assert errors[-2]["points"] == [[20, 0.5], [21, 0.001]]
    verdicts = re.findall(r'<span class="flag[^"]*">([^<]*)</span>', dom)
    assert verdicts == ["found", "false alarm", "missed", "", ""]
    for text in (
        "Missed (false negatives): client-3.",
        "Synthetic data: Purchase is made up.",
        "int8+zstd",
        "every=2",
        "4.0 s, 3.0 by clients",
        "80 to 82 %",
    ):
        assert text in dom


# Loads a page and notes what the keys, the curves and the bars of its methods look like.
_LOOKS = """<!doctype html><title>looks</title><body><iframe src="page.html"></iframe><script>
window.addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const look = (names) => (one) => names.map((name) => getComputedStyle(one)[name]).join();
  const line = look(["stroke", "strokeDasharray"]);
  const found = [
    ["tbody th .line", line],
    ["ul.legend .line", line],
    [".chart svg.wide .line", line],
    [".fill", look(["backgroundColor", "backgroundImage"])],
  ].map(([what, looks]) => [...page.querySelectorAll(what)].map(looks));
  document.body.replaceChildren(JSON.stringify(found));
});
</script>"""


def test_sixteen_methods_are_told_apart(tmp_path: Path) -> None:
    folder, names = run_folder(tmp_path / "run"), [f"M{i}" for i in range(16)]
    results = json.loads((folder / "results.json").read_text())
    figures = {"ter": 0.5, "asr": None, "acp": None, "cp_min": None, "cp_max": None}
    figures |= {"exact_rounds_by_reason": REASONS, "seconds": 1.5}
    results["methods"] = [{"name": n, **figures} for n in [*names, "TrainFromScratch"]]
    nodes = [{"class_path": n, "label": n} for n in names]
    results["recipe"]["recoverers"] = [*nodes, "TrainFromScratch"]
    results["poisoned"] = {"ter": 0.5, "asr": None}
    (folder / "results.json").write_text(json.dumps(results))
    for name in [*names, "TrainFromScratch"]:
        (folder / "recover" / name).mkdir(exist_ok=True)
        (folder / "recover" / name / "metrics.csv").write_text("round,ter\n0,0.5\n9,0.25\n")
    for more in ("result.json", "diagnostics.csv"):  # which have pictures of their own
        (folder / "recover" / "TrainFromScratch" / more).unlink()
    (folder / "record" / "metrics.csv").write_text("round,ter\n0,0.5\n9,0.25\n")
    write_report(folder, tmp_path / "page.html")
    (tmp_path / "harness.html").write_text(_LOOKS)
    dom, console = opened(tmp_path / "harness.html", tmp_path)
    assert console == []
    found = json.loads(unescape(dom[dom.index("<body>") + 6 : dom.index("</body>")]))
    keys, legend, curves, bars = found
    # The sixteen, the reference and the recording; all of them have the same look everywhere.
    assert len(keys) == len(set(keys)) == 18
    assert legend == curves[::-1] == [*keys[1:], keys[0]]
    assert len(bars) == len(set(bars)) == 18


@pytest.mark.parametrize("several", [False, True])
def test_nothing_is_wider_than_the_screen(tmp_path: Path, several: bool) -> None:
    folder, page = run_folder(tmp_path / "run"), tmp_path / "page.html"
    if several:
        write_comparison([folder, run_folder(tmp_path / "other")], page)
    else:
        write_report(folder, page)
    harness = tmp_path / "harness.html"
    harness.write_text(_HARNESS % json.dumps(WIDTHS))
    dom, console = opened(harness, tmp_path)
    assert console == []
    found = json.loads(unescape(dom[dom.index("<body>") + 6 : dom.index("</body>")]))
    assert [f["hidden"] for f in found] == [0] * len(WIDTHS)
    assert found[WIDTHS.index(390)]["scrolls"] > 0
    assert [f["wrong"] for f in found] == [[0, 0, 0]] * len(WIDTHS)
    # The arrow keys show the values of a round: here those of the first one, in percent.
    assert all(f["shown"].startswith(f"round 0{EVIL}90.0") for f in found)


def test_the_page_of_a_history_fits_every_screen(tmp_path: Path) -> None:
    norms = {EVIL: 0.5, "client-1": 4.0, "client-with-a-rather-long-name": 2.0}
    rounds = tuple(
        RoundLook(
            round=t, asked=3, used=3, aggregate=1.0, refused={}, norms=norms if t else {}, lost=()
        )
        for t in range(20)
    )
    look = Look(
        path="history", run=None, num_rounds=20, num_clients=3, num_parameters=7, num_bytes=10**6,
        attack=None, clients=dict.fromkeys(norms, 5), malicious=(EVIL,), flagged=("client-1",),
        scores={}, rounds=rounds,
    )  # fmt: skip
    write_look(look, tmp_path / "page.html")
    (tmp_path / "harness.html").write_text(_HARNESS % json.dumps(WIDTHS))
    dom, console = opened(tmp_path / "harness.html", tmp_path)
    assert console == []
    found = json.loads(unescape(dom[dom.index("<body>") + 6 : dom.index("</body>")]))
    assert [(f["hidden"], f["wrong"]) for f in found] == [(0, [0, 0, 0])] * len(WIDTHS)
    # The first round with a curve of clients is 1; in round 0 there is the aggregate alone.
    assert all(f["shown"] == "round 0Aggregate1.00" for f in found)
