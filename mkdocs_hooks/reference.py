"""Makes the reference: one page for every public name, and the table of each family.

A family is a page `docs/api/FAMILY/index.md`. Each of its lines `::: fedrec.MODULE` becomes a table
of what that module's `__all__` names, and every name gets a page of its own. What the tables above
that line say of a name (its paper, its cost) is repeated on the page of the name. The bibliography
lists what the docstrings refer to, with the names that do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe
import navigation
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_MODULE = re.compile(r"^::: (fedrec[\w.]*)$", re.MULTILINE)
_ROW = re.compile(r"^\| \[`\w+`\]\[(fedrec[\w.]*)\] \|")


@dataclass(frozen=True)
class Name:
    """A public name and what its page is made from."""

    family: str
    path: str
    summary: str
    group: str
    is_class: bool
    references: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name without its module."""
        return self.path.rpartition(".")[2]

    @property
    def uri(self) -> str:
        """The page, in the folder of the docs."""
        return f"api/{self.family}/{self.title}.md"


def families(docs: Path) -> dict[str, list[Name]]:
    """Return the public names of every family, by the name of its folder."""
    package = griffe.load("fedrec", search_paths=[docs.parent])
    found: dict[str, list[Name]] = {}
    for index in sorted(docs.glob("api/*/index.md")):
        family = index.parent.name
        for path in _MODULE.findall(index.read_text(encoding="utf-8")):
            found.setdefault(family, []).extend(_names(package, family, path))
    return found


def _names(package: Any, family: str, path: str) -> Iterator[Name]:
    module = package[path.partition(".")[2]]
    for title in module.exports:
        target = module[title]
        while target.is_alias:
            target = target.final_target
        summary = target.docstring.value.partition("\n\n")[0] if target.docstring else ""
        parent = target.module.parent
        inside = parent is not None and parent.path.startswith(f"{path}.")
        group = parent.docstring.value.partition("\n")[0] if inside and parent.docstring else ""
        yield Name(
            family,
            f"{path}.{title}",
            " ".join(summary.split()),
            group.rstrip("."),
            target.is_class,
            tuple(_references(target.docstring.value if target.docstring else "")),
        )


def _references(docstring: str) -> Iterator[str]:
    """Return the papers of a docstring: authors, title, venue and year."""
    section = re.search(r"^References:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    for entry in re.split(r"^ +- ", section[1], flags=re.MULTILINE)[1:] if section else ():
        # What follows the year says where in the paper.
        paper = re.match(r".*?\b(19|20)\d\d(?![-/]|\.\d)", " ".join(entry.split()))
        yield paper[0] if paper else " ".join(entry.split()).rstrip(".")


def facts(index: str) -> dict[str, list[tuple[str, str]]]:
    """Return what the tables of a family's page say of each name: (column, cell), by path."""
    said: dict[str, list[tuple[str, str]]] = {}
    head: list[str] = []
    above = ""
    for line in index.splitlines():
        if re.match(r"\|[-| :]+\|$", line):
            head = _cells(above)
        elif row := _ROW.match(line):
            cells = _cells(line)
            pairs = [(h, c) for h, c in zip(head[1:], cells[1:], strict=True) if h and c]
            said.setdefault(row[1], []).extend(pairs)
        above = line
    return said


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def table(names: list[Name]) -> str:
    """Return the table of a module's names, one part for every sub-package."""
    lines = []
    for group in sorted({name.group for name in names}):
        lines += [f"\n### {group}\n" if group else "", "| Name | What it is |", "|---|---|"]
        for name in sorted(names, key=lambda name: name.title.lower()):
            if name.group == group:
                summary = re.sub(r"(?<!\\)\|", r"\\|", name.summary)
                lines.append(f"| [`{name.title}`][{name.path}] | {summary} |")
    return "\n".join(lines) + "\n"


def page(name: Name, said: list[tuple[str, str]]) -> str:
    """Return the text of a name's page."""
    # Who looks for `Krum` wants the rule, before what is made from it.
    boost = ["---", "search:", "  boost: 4", "---", ""] if name.is_class else []
    lines = [*boost, f"# {name.title}", ""]
    if said:
        rows = [f"- **{column}**: {cell}" for column, cell in said]
        lines += ['<div class="facts" markdown>', "", *rows, "", "</div>"]
    lines += ["", f"::: {name.path}", "    options:", "      show_root_heading: true"]
    lines += ["      show_root_full_path: true", "      show_root_toc_entry: true"]
    return "\n".join(lines) + "\n"


def bibliography(names: list[Name]) -> str:
    """Return the papers that docstrings refer to, each with the names that do."""
    papers: dict[tuple[str, str], str] = {}
    cited: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        for paper in name.references:
            # Some name a paper in short: the same authors, the same venue and year.
            same = paper.split(", ")[0], paper.rpartition(", ")[2]
            papers[same] = max(papers.get(same, ""), paper, key=len)
            cited.setdefault(same, {})[name.title] = name.path
    lines = []
    for same, paper in sorted(papers.items(), key=lambda item: item[1].casefold()):
        links = ", ".join(f"[`{title}`][{path}]" for title, path in sorted(cited[same].items()))
        lines.append(f"- {paper}: {links}")
    return "\n".join(lines) + "\n"


_found: dict[str, list[Name]] = {}


def on_config(config: MkDocsConfig) -> None:
    """Put the pages into the navigation, each below the page of its family."""
    _found.clear()
    _found.update(families(Path(config.docs_dir)))
    navigation.extend(config.nav, _below)


def _below(page: str) -> list[dict[str, Any]]:
    match = re.fullmatch(r"api/(\w+)/index\.md", page)
    names = sorted(_found[match[1]], key=lambda name: name.title.lower()) if match else []
    return [{name.title: name.uri} for name in names]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the page of every public name."""
    for family, names in _found.items():
        index = Path(config.docs_dir, "api", family, "index.md").read_text(encoding="utf-8")
        said = facts(index)
        for name in names:
            content = page(name, said.get(name.path, []))
            files.append(File.generated(config, name.uri, content=content))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str | None:
    """Put the tables into the page of a family, and the papers into the bibliography."""
    if page.file.src_uri == "explanation/bibliography.md":
        return markdown + "\n" + bibliography([n for names in _found.values() for n in names])
    match = re.fullmatch(r"api/(\w+)/index\.md", page.file.src_uri)
    if not match:
        return None

    def replace(module: re.Match[str]) -> str:
        mine = [n for n in _found[match[1]] if n.path.rpartition(".")[0] == module[1]]
        options = "    options:\n      members: false\n"
        return f"## `{module[1]}`\n\n{module[0]}\n{options}\n{table(mine)}"

    return _MODULE.sub(replace, markdown)
