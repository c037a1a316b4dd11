"""The contract of components of every family, as tests."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from typing import ClassVar

from omegaconf import OmegaConf

from fedrec.component import Component, build

__all__ = ["ComponentContract"]


class ComponentContract(ABC):
    """Base of the contracts of components: pickling, and rebuilding from the recipe."""

    base: ClassVar[type[Component]] = Component

    @abstractmethod
    def make(self) -> Component:
        """Return a new component, the same each time."""

    def test_survives_pickling(self) -> None:
        """Other processes get the component pickled."""
        component = self.make()
        copy = pickle.loads(pickle.dumps(component))  # noqa: S301
        assert type(copy) is type(component)
        assert copy.spec() == component.spec()

    def test_repr_shows_the_arguments(self) -> None:
        """Logs and errors show how a component was made."""
        component = self.make()
        shown = repr(component)
        assert shown.startswith(f"{type(component).__name__}(")
        for name, value in component.init_args().items():
            assert f"{name}={value!r}" in shown

    def test_is_rebuilt_from_its_recipe(self) -> None:
        """A recipe, and a history's manifest, describe a component completely."""
        component = self.make()
        text = OmegaConf.to_yaml(OmegaConf.create(component.spec()))
        spec = OmegaConf.to_container(OmegaConf.create(text))
        assert isinstance(spec, dict)
        copy = build({str(key): value for key, value in spec.items()}, self.base, "component")
        assert type(copy) is type(component)
        assert repr(copy) == repr(component)
