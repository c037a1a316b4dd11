"""Makes the description that package indexes show, which is the README seen from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^][]*)\]\((?!https?://|#)([^()#]+)((?:#[^()]*)?)\)")


class DescriptionHook(MetadataHookInterface):
    """Hatchling's hook of fields that `pyproject.toml` calls dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the description."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": described(text, repository, f"v{metadata['version']}"),
        }


def described(text: str, repository: str | None, tag: str) -> str:
    """Return the README with links that lead somewhere from any page.

    Args:
        text: The README, whose links are relative to it.
        repository: Where the repository is, or `None`: then links are their words, and pictures
            are left out.
        tag: The release, so that its description shows its files and not newer ones.
    """

    def absolute(match: re.Match[str]) -> str:
        picture, words, path, anchor = match.groups()
        if repository is None:
            return "" if picture else words
        kind = "raw" if picture else "blob"
        return f"{picture}[{words}]({repository.rstrip('/')}/{kind}/{tag}/{path}{anchor})"

    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(absolute, text))
