"""The site leaves nothing out, and its pages are as a reader wants them."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import ModuleType

import pytest

import fedrec
from fedrec.aggregators import Aggregator
from fedrec.attacks import Attack
from fedrec.component import Component
from fedrec.data import FederatedDataModule, Partitioner
from fedrec.detectors import Detector
from fedrec.recipe import load_recipe
from fedrec.recoverers import Estimator, Recoverer

pytest.importorskip("mkdocs", reason="the site needs `pip install 'fedrec[docs]'`")

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
RESULTS = [
    *("results", "reproduction", "estimates", "robustness", "detection", "theorem"),
    *("history_measured", "performance"),
]
BROWSER = next((p for n in ("chromium", "google-chrome") if (p := shutil.which(n))), None)


def hook(name: str) -> ModuleType:
    """Return one of the modules that make pages."""
    path = REPOSITORY / "mkdocs_hooks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mkdocs_hooks.{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    # As mkdocs does, so that one may import another.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    return module


reference, gallery = hook("reference"), hook("gallery")
FAMILIES = reference.families(DOCS)
RECIPES = gallery.recipes(REPOSITORY / "recipes")


def public_modules() -> list[ModuleType]:
    names = [module.name for module in pkgutil.iter_modules(fedrec.__path__)]
    modules = [importlib.import_module(f"fedrec.{n}") for n in names if not n.startswith("_")]
    return [module for module in modules if hasattr(module, "__all__")]


@pytest.mark.parametrize("module", public_modules(), ids=lambda m: m.__name__)
def test_every_public_name_has_its_row_and_its_page(module: ModuleType) -> None:
    found = {n.path: n for names in FAMILIES.values() for n in names}
    for title in module.__all__:
        name = found[f"{module.__name__}.{title}"]
        assert f"| [`{title}`][{name.path}] | " in reference.table([name])
        assert f"\n::: {name.path}\n" in reference.page(name, [])
        assert name.summary, "a name without a docstring has an empty row"


def test_what_the_package_exports_is_in_a_family() -> None:
    shown = {
        id(getattr(importlib.import_module(name.path.rpartition(".")[0]), name.title))
        for names in FAMILIES.values()
        for name in names
    }
    assert [n for n in fedrec.__all__ if id(getattr(fedrec, n)) not in shown] == []


@pytest.mark.parametrize(
    ("family", "base"),
    [
        ("aggregators", Aggregator),
        ("attacks", Attack),
        ("detectors", Detector),
        ("recoverers", Recoverer),
        ("recoverers", Estimator),
        ("data", FederatedDataModule),
        ("data", Partitioner),
    ],
)
def test_every_concrete_class_is_compared_with_the_others(
    family: str, base: type[Component]
) -> None:
    said = reference.facts((DOCS / "api" / family / "index.md").read_text(encoding="utf-8"))
    package = importlib.import_module(f"fedrec.{family}")
    classes = {n: getattr(package, n) for n in package.__all__}
    concrete = {
        f"fedrec.{family}.{name}"
        for name, value in classes.items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
        if not inspect.isabstract(value)
    }
    assert len(concrete) > 3
    assert concrete - set(said) == set()


@pytest.mark.parametrize("family", ["aggregators", "attacks"])
def test_one_line_of_a_recipe_is_right(family: str) -> None:
    said = reference.facts((DOCS / "api" / family / "index.md").read_text(encoding="utf-8"))
    lines = {p: cell for p, pairs in said.items() for c, cell in pairs if c == "In a recipe"}
    assert set(lines) == set(said)
    recipe = REPOSITORY / "recipes" / "quickstart.yaml"
    for path, cell in lines.items():
        text = cell.strip("`")
        assert path.rpartition(".")[2] in text
        load_recipe(recipe, [f"{family[:-1]}={text}", "data.init_args.server_samples=20"])


def test_every_recipe_has_its_card_and_its_page() -> None:
    files = {
        path.relative_to(REPOSITORY / "recipes") for path in REPOSITORY.glob("recipes/**/*.y*")
    }
    assert {recipe.name for recipe in RECIPES} == {p.with_suffix("").as_posix() for p in files}
    cards = gallery.cards(RECIPES)
    for recipe in RECIPES:
        assert f"]({recipe.name}.md)**" in cards
        page = gallery.page(recipe)
        assert recipe.said["Time"] in page
        assert f"recipes/{recipe.name}.yaml" in page


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_the_figure_of_a_recipe_exists(recipe: object) -> None:
    line = recipe.said.get("Figure", "")  # type: ignore[attr-defined]
    assert bool(line) == bool(figure := recipe.figure(""))  # type: ignore[attr-defined]
    if line:
        assert (DOCS / re.search(r"\((.+)\)", figure)[1]).is_file()  # type: ignore[index]


@pytest.mark.parametrize("page", RESULTS)
def test_what_a_page_says_in_short_it_also_says_at_length(page: str) -> None:
    """So that no number is changed in one of the two places alone."""
    lines = (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    box = " ".join(line for line in lines if line.startswith("> "))
    rest = "\n".join(line for line in lines if not line.startswith("> "))
    assert "**In short" in box
    numbers = re.findall(r"(?<![\w.])\d+(?:\.\d+)?", re.sub(r"\(#[^)]*\)", "", box))
    assert [
        n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}(?![\d.]*\d)", rest)
    ] == []


# Opens one page after the other, as wide as a phone. The next one is asked for before the browser
# takes the last one for loaded, so that it waits for all.
_HARNESS = """<!doctype html><title>pages</title><body><script>
const pages = %s, seen = [], wrong = [];
const frame = document.createElement("iframe");
frame.style.cssText = "width:390px;height:800px;border:0";
const next = () => {
  if (pages.length) frame.src = pages[0];
  else document.body.replaceChildren(JSON.stringify({ seen, wrong }));
};
frame.addEventListener("load", () => {
  const { document: page, performance } = frame.contentWindow;
  const { scrollWidth, clientWidth } = page.documentElement;
  const silent = [...page.images].filter((image) => !image.alt);
  const drawn = [...page.querySelectorAll("article svg:not([aria-hidden]):not(.twemoji svg)")];
  const nameless = drawn.filter(
    (svg) => !svg.ariaLabel && !svg.querySelector("title, desc"));
  const foreign = performance.getEntriesByType("resource").map((entry) => entry.name)
    .filter((name) => /^https?:/.test(name));
  if (scrollWidth > clientWidth) wrong.push([pages[0], "scrolls", scrollWidth]);
  if (silent.length + nameless.length) wrong.push([pages[0], "has no text for a picture"]);
  if (foreign.length) wrong.push([pages[0], "asks the network", foreign]);
  seen.push(new URL(page.URL).pathname);
  pages.shift();
  next();
});
next();
document.body.append(frame);
</script>"""


@pytest.mark.slow  # builds the site unless `make` has done so, and opens most of it
@pytest.mark.timeout(1800)
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_pages_fit_a_phone_and_ask_nobody(tmp_path: Path) -> None:
    site = tmp_path / "site"
    if built := os.environ.get("FEDREC_SITE"):
        shutil.copytree(REPOSITORY / built, site)
    else:
        build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site]
        subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    pages = [p.relative_to(site).as_posix() for p in sorted(site.rglob("*.html"))]
    # The page for what is not found is for a server: it looks for everything at its root. Of the
    # pages of single names, those with a formula on a line of its own, which can be too wide.
    pages.remove("404.html")
    single = {
        f"{name.uri.removesuffix('.md')}.html" for names in FAMILIES.values() for name in names
    }
    plain = {p for p in single if '<math display="block"' not in (site / p).read_text("utf-8")}
    assert set(pages) > single > plain
    pages = [page for page in pages if page not in plain]
    (site / "harness.html").write_text(_HARNESS % json.dumps(pages), encoding="utf-8")
    assert BROWSER is not None
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--v=0", "--dump-dom", (site / "harness.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    body = re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)
    assert body is not None
    found = json.loads(unescape(body[1]))
    assert found["seen"] == [(site / page).as_uri().removeprefix("file://") for page in pages]
    assert found["wrong"] == []
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
