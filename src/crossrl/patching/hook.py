"""An import hook: calls back when a module that somebody waits for has been executed, before its importer goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Finder:
    """Stands first in ``sys.meta_path``; lets the other finders find, and wraps the loader of a watched module.

    ``loaded(module)`` runs while the importing thread holds that module's import lock: no other thread gets the module
    before it is done. If it raises, the import fails with that error.
    """

    def __init__(self, watched: Callable[[str], bool], loaded: Callable[[ModuleType], None]) -> None:
        self.watched, self.loaded = watched, loaded

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.watched(name):
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self.loaded)
                return spec
        return None

    @property
    def installed(self) -> bool:
        return any(finder is self for finder in sys.meta_path)

    def install(self) -> None:
        """Stand first, once; again, if somebody put another finder before."""
        self.remove()
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]


class _Loader:
    """The real loader, which the module gets back before its code runs."""

    def __init__(self, real: Any, loaded: Callable[[ModuleType], None]) -> None:
        self._real, self._loaded = real, loaded

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        self._real.exec_module(module)
        # Some packages put another object in their place while they run.
        self._loaded(sys.modules.get(module.__name__, module))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
