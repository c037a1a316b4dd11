"""Makes the recipe gallery: a page for every recipe, out of the comment that it begins with."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import navigation
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

#: Folders of recipes, in the order of the gallery, with their headings.
FOLDERS = {
    "": "Start here",
    "mnist": "MNIST",
    "har": "Human activity recognition",
    "purchase": "Purchase",
    "paper": "Tables and figures of the FedRecover paper",
    "benchmarks": "Benchmarks",
}
_LABEL = re.compile(r"(Before|Run|Change|Then|Time|Figure): +")
_FIGURE = re.compile(r"docs/(assets/\w+\.svg) \((.+)\)")


@dataclass(frozen=True)
class Recipe:
    """A recipe, as its comment describes it."""

    name: str
    text: str
    about: list[str]
    said: dict[str, str]
    outcome: list[str]

    @property
    def folder(self) -> str:
        """The folder in `recipes/`, `""` for that folder itself."""
        return posixpath.dirname(self.name)

    @property
    def uri(self) -> str:
        """The page, in the folder of the docs."""
        return f"gallery/{self.name}.md"

    def figure(self, start: str) -> str:
        """Return the figure as Markdown, seen from a page in the folder `start`, or nothing."""
        match = _FIGURE.fullmatch(self.said.get("Figure", ""))
        return f"![{match[2]}]({posixpath.relpath(match[1], start)})" if match else ""


def read(path: Path, root: Path) -> Recipe:
    """Read a recipe's comment: what it is about, labelled lines, and what to expect."""
    text = path.read_text(encoding="utf-8")
    # Editors read this line; people need not.
    text = re.sub(r"\A# yaml-language-server:.*\n(#?\n)?", "", text)
    comment = re.match(r"(#.*\n)+", text)
    if comment is None:
        raise ValueError(f"Expected `{path}` to begin with a comment, but it does not.")
    about, outcome, said = [], [], {}
    for paragraph in re.split(r"\n#\n", comment[0].rstrip()):
        lines = [line[2:] for line in paragraph.split("\n")]
        if _LABEL.match(lines[0]):
            label = ""
            for line in lines:
                if match := _LABEL.match(line):
                    label = match[1]
                    said[label] = line[match.end() :]
                else:
                    said[label] += " " + line.strip()
        elif re.match(r"Expected|The paper", lines[0]):
            outcome.append(" ".join(lines))
        else:
            about.append(" ".join(lines))
    name = path.relative_to(root).with_suffix("").as_posix()
    return Recipe(name, text, about, said, outcome)


def recipes(root: Path) -> list[Recipe]:
    """Return all recipes, in the order of the gallery; those that others extend come last."""
    found = [read(path, root) for path in sorted(root.rglob("*.yaml"))]
    order = list(FOLDERS)
    return sorted(
        found,
        key=lambda r: (
            order.index(r.folder),
            r.name.endswith("base"),
            not r.name.startswith("quickstart"),
            r.name,
        ),
    )


def prose(text: str, start: str) -> str:
    """Return a comment's words as Markdown, the files it names as links."""
    text = text.replace("*", r"\*")
    above = posixpath.relpath(".", start)
    text = re.sub(
        r"docs/((?:\w+/)*(\w+))\.md",
        lambda m: f"[{m[2].replace('_', ' ')}]({above}/{m[1]}.md)",
        text,
    )
    link = rf"[`\2.yaml`]({posixpath.relpath('gallery', start)}/\1.md)"
    return re.sub(r"recipes/((?:\w+/)*(\w+))\.yaml", link, text)


def page(recipe: Recipe) -> str:
    """Return the text of a recipe's page."""
    start = posixpath.dirname(recipe.uri)
    said = recipe.said
    parts = [f"# {posixpath.basename(recipe.name)}", *(prose(t, start) for t in recipe.about)]
    parts += [f"**Before**: {prose(said['Before'], start)}", f"**Time**: {said['Time']}"]
    parts += ["## Run it", f"```bash\n{_command(said['Run'])}\n```"]
    parts += ["With other settings:", f"```bash\n{_command(said['Change'])}\n```"]
    if "Then" in said:
        parts.append(f"Then: `{said['Then']}`")
    if recipe.outcome or "Figure" in said:
        parts += ["## What comes out", *(prose(t, start) for t in recipe.outcome)]
        parts.append(recipe.figure(start))
    body = recipe.text[re.match(r"(#.*\n)+", recipe.text).end() :].strip()  # type: ignore[union-attr]
    parts += ["## The recipe", f'```yaml title="recipes/{recipe.name}.yaml"\n{body}\n```']
    if match := re.match(r"extends: (\S+)\.yaml", body):
        above = posixpath.normpath(posixpath.join(recipe.folder, match[1]))
        path = posixpath.relpath(f"gallery/{above}.md", start)
        parts.append(f"It changes what [`{above}.yaml`]({path}) says.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _command(line: str) -> str:
    # A word a line where one line would be long: a shell reads it the same way.
    words = [shlex.quote(word) for word in shlex.split(line)]
    return line if len(line) < 80 else " \\\n    ".join([" ".join(words[:3]), *words[3:]])


def cards(found: list[Recipe]) -> str:
    """Return the cards of all recipes, one part for every folder."""
    lines = []
    for folder, heading in FOLDERS.items():
        lines += [f"## {heading}", "", '<div class="grid cards" markdown>', ""]
        for recipe in (r for r in found if r.folder == folder):
            title = f"[{posixpath.basename(recipe.name)}]({recipe.name}.md)"
            summary = re.split(r"(?<=[.!?]) (?=[A-Z])", recipe.about[0])[0]
            time = re.split(r"[:;]", recipe.said["Time"])[0]
            for i, part in enumerate(
                [f"**{title}**", prose(summary, "gallery"), recipe.figure("gallery"), f"*{time}*"]
            ):
                lines += [f"{'-   ' if i == 0 else '    '}{part}", ""] if part else []
        lines += ["</div>", ""]
    return "\n".join(lines)


_found: list[Recipe] = []


def on_config(config: MkDocsConfig) -> None:
    """Read all recipes, and put their pages into the navigation."""
    _found[:] = recipes(Path(config.docs_dir).parent / "recipes")
    navigation.extend(config.nav, _below)


def _below(page: str) -> list[dict[str, Any]]:
    if page != "gallery/index.md":
        return []
    return [
        {
            heading: [
                {posixpath.basename(recipe.name): recipe.uri}
                for recipe in _found
                if recipe.folder == folder
            ]
        }
        for folder, heading in FOLDERS.items()
    ]


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the page of every recipe."""
    for recipe in _found:
        files.append(File.generated(config, recipe.uri, content=page(recipe)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str | None:
    """Put the cards below the words of the gallery."""
    return markdown + "\n" + cards(_found) if page.file.src_uri == "gallery/index.md" else None
