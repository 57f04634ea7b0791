"""Context, and the process's own one, as users call them: options are checked as those of every function are."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Optional

from ._calls import public
from ._core import Context as CoreContext


class Context(CoreContext):
    """A processor level, a pool of threads and reusable scratch memory. Calls on one Context from several threads are legal."""

    @public
    def __init__(self, num_threads: int = 0, isa: Optional[str] = None) -> None:
        """num_threads 0: OPST_NUM_THREADS, else the cores of this process, at most OMP_NUM_THREADS. isa: at most this level
        (generic, avx2, avx512, avx512_vnni, avx512_bf16)."""
        if not -(2**31) <= num_threads < 2**31:
            raise ValueError(f"num_threads is {num_threads}, more than there can be")
        super().__init__(num_threads, isa)


# ---- the process's own -----------------------------------------------------------------------------------------------

_default: Optional[Context] = None
_lock = threading.Lock()
# Another thread of the parent may have held it when a child was forked.
os.register_at_fork(after_in_child=_lock._at_fork_reinit)
# Whether the number of threads was said to us, by set_num_threads or OPST_NUM_THREADS: then torch's says nothing.
_said = False
_torch_threads: Any = None  # torch.get_num_threads, once torch is there
_followed: Optional[int] = None  # what it said when _default was made


@public
def set_num_threads(num_threads: int) -> None:
    """Number of threads of the default Context from now on; 0: as if it had not been called (see default_context)."""
    global _default, _said
    context = Context(num_threads) if num_threads else None
    with _lock:
        _default, _said = context, context is not None


def default_context() -> Context:
    """The process's own Context, made at the first call that needs one.

    Its number of threads is that of set_num_threads, else OPST_NUM_THREADS, else what torch.set_num_threads says where torch
    is imported, else OMP_NUM_THREADS; the last two at most the cores that affinity and cgroup leave, which is also the number
    where nobody says anything.
    """
    if _default is not None and (_said or (_torch_threads is None and "torch" not in sys.modules)
                                 or (_torch_threads is not None and _torch_threads() == _followed)):
        return _default
    return _new_default()


def _new_default() -> Context:
    global _default, _said, _torch_threads, _followed
    with _lock:
        if _default is None and os.environ.get("OPST_NUM_THREADS"):
            _said = True
        if not _said and _torch_threads is None:
            # A torch that is still being imported has no such function yet.
            _torch_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)
        followed = None if _said or _torch_threads is None else _torch_threads()
        if _default is None or (followed is not None and followed != _followed):
            threads = 0 if followed is None else min(followed, Context(num_threads=1).cores)
            if _default is None or threads != _default.num_threads:
                _default = Context(num_threads=threads)
            _followed = followed
        return _default
