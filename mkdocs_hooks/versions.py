"""Shows the choice of versions only where there are some: in what `mike` builds."""

from __future__ import annotations

import os

from mkdocs.config.defaults import MkDocsConfig


def on_config(config: MkDocsConfig) -> None:
    """Leave the list of versions out: elsewhere, asking for it would be an error on every page."""
    if "MIKE_DOCS_VERSION" not in os.environ:
        config.extra.pop("version", None)
