"""The facade in the place of flash_attn."""

from __future__ import annotations

from .. import _installation
from . import bert_padding, flash_attn_interface

VERSION = "2.8.3+ops.transformer"  # of the interface; scripts ask which rules to expect


class Installation(_installation.Installation):
    """flash_attn and its submodules in sys.modules. By undo(), or at the end of the outermost block, they are gone."""

    def _install(self) -> None:
        functions = {name: getattr(flash_attn_interface, name) for name in flash_attn_interface.__all__}
        package = self._add_module("flash_attn", "ops_transformer.flash_attn: CPU tensors.", {**functions, "__version__": VERSION})
        package.__path__ = []  # a package: other submodules are ModuleNotFoundError
        for module in (flash_attn_interface, bert_padding):
            name = module.__name__.rpartition(".")[2]
            content = {key: getattr(module, key) for key in module.__all__}
            setattr(package, name, self._add_module(f"flash_attn.{name}", module.__doc__, content))


def install() -> Installation:
    """From here on, or for a block (`with install():`), `import flash_attn` gives this facade, with the submodules
    flash_attn_interface and bert_padding. RuntimeError where a flash_attn can be imported.

    A second call while installed gives the first Installation, and the end of an inner block leaves what the outer one, or a call
    without a block, installed.
    """
    return _installation.install(Installation, "flash_attn", "ops_transformer.flash_attn")
