"""What the device refuses, refused here as well: strict=True in a call, `with strict():`, or OPST_NPU_STRICT=1.

Without it the functions take more than the device does (other dtypes, any sizes). Each limit below names itself in its
message, with the argument and both values.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Iterator, Optional

_of_thread = threading.local()
_by_environment = os.environ.get("OPST_NPU_STRICT", "") == "1"
_used = _by_environment  # whether anybody in this process has asked: a short call has little time for questions


def is_on(asked: Optional[bool] = None) -> bool:
    """Whether this call is to be strict: what it says itself, else the block around it, else the environment."""
    if asked is not None:
        return asked
    if not _used:
        return False
    return getattr(_of_thread, "on", _by_environment)


@contextlib.contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Calls of this thread in the block are strict (or with on=False are not)."""
    global _used
    _used = True
    before = getattr(_of_thread, "on", _by_environment)
    _of_thread.on = on
    try:
        yield
    finally:
        _of_thread.on = before


def check(name: str, bound: Any) -> None:
    """ValueError that names the limit which the arguments of a call break."""
    from . import _limits

    limit = _limits.LIMITS.get(name)
    if limit is not None:
        bound.apply_defaults()
        limit(name, bound.arguments)
