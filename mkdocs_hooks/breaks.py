"""Decides where a line may be broken, which browsers do in the wrong places.

An option of the command line stays in one piece (after a hyphen, browsers break), and so do the
figures in a cell of a table. A dotted name that heads a page may be broken at its dots.
"""

from __future__ import annotations

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_CODE = re.compile(r"<code>[^<]*</code>")
_OPTION = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")
_FIGURES = re.compile(
    r"<td(?P<style>[^>]*)>(?P<text>(?:<strong>)?[\d.,;/()%±e +-]{1,24}(?:</strong>)?)</td>"
)
_NAME = re.compile(r'(?<=<span class="doc doc-object-name doc-)\w+-name">[\w.]+')


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark options and figures for the style sheet, and the places where a name may be broken."""
    html = _CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)
    html = _FIGURES.sub(r'<td class="figures"\g<style>>\g<text></td>', html)
    return _NAME.sub(lambda name: name[0].replace(".", ".<wbr>"), html)
