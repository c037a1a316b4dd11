"""Recipes: YAML files that say what Python can say, and running them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedrec._lazy import lazy

if TYPE_CHECKING:
    from fedrec.recipe.runner import run
    from fedrec.recipe.schema import Recipe, load_recipe
    from fedrec.recipe.sweeping import Sweep, sweep

__all__ = ["Recipe", "Sweep", "load_recipe", "run", "sweep"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Recipe": "fedrec.recipe.schema",
        "Sweep": "fedrec.recipe.sweeping",
        "load_recipe": "fedrec.recipe.schema",
        "run": "fedrec.recipe.runner",
        "sweep": "fedrec.recipe.sweeping",
    },
)
