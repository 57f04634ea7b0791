"""A facade in the place of the package whose names it has: what install() changes, and how it is taken back."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
from typing import Any, Dict, List, Tuple


class Installation:
    """What install() changed. By undo(), or at the end of the outermost block, everything is as it was before."""

    def __init__(self) -> None:
        self._blocks = 0  # that have not ended
        self._is_held = False  # by a call without a block, which undo() alone ends
        self._before: List[Tuple[Any, str, Any]] = []
        self._modules: List[str] = []

    def __enter__(self) -> "Installation":
        self._blocks += 1
        return self

    def __exit__(self, *_: Any) -> None:
        self._blocks -= 1
        if self._blocks == 0 and not self._is_held:
            self.undo()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, owner.__dict__.get(name, Installation)))
        setattr(owner, name, value)

    def _add_module(self, name: str, doc: str, content: Dict[str, Any]) -> types.ModuleType:
        module = types.ModuleType(name, doc)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)  # scripts ask find_spec whether there is one
        module.__dict__.update(content)
        sys.modules[name] = module
        self._modules.append(name)
        return module

    def _install(self) -> None:
        raise NotImplementedError

    def undo(self) -> None:
        """Takes everything back; a second time nothing."""
        if _installed.get(type(self)) is not self:
            return
        for owner, name, value in reversed(self._before):
            if value is Installation:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for name in self._modules:
            sys.modules.pop(name, None)
        del _installed[type(self)]


_installed: Dict[type, Installation] = {}


def install(kind: type, package: str, instead: str) -> Any:
    """The Installation of a kind, made where there is none. RuntimeError where `package` itself can be imported: one then uses
    `instead`."""
    there = _installed.get(kind)
    if there is not None:
        there._is_held |= there._blocks == 0
        return there
    if package in sys.modules or importlib.util.find_spec(package) is not None:
        raise RuntimeError(f"install: {package} can be imported here, so its name is not taken: import {instead}")
    installation = _installed[kind] = kind()
    try:
        installation._install()
    except BaseException:
        installation.undo()
        raise
    return installation
