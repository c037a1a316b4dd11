"""Keeps options of the command line in one piece: browsers break a line after any hyphen."""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_CODE = re.compile(r"<code>[^<]*</code>")
_OPTION = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark the options in a page's code within lines, for the style sheet."""
    return _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
