"""Context and set_num_threads as users call them: their options are checked as those of every function are."""

from __future__ import annotations

from typing import Optional

from . import _arrays, _core
from ._calls import public


class Context(_core.Context):
    """A processor level, a pool of threads and reusable scratch memory. Calls on one Context from several threads are legal."""

    @public
    def __init__(self, num_threads: int = 0, isa: Optional[str] = None) -> None:
        """num_threads 0: OPST_NUM_THREADS, else the cores of this process, at most OMP_NUM_THREADS. isa: at most this level
        (generic, avx2, avx512, avx512_vnni, avx512_bf16)."""
        if not -(2**31) <= num_threads < 2**31:
            raise ValueError(f"num_threads is {num_threads}, more than there can be")
        super().__init__(num_threads, isa)


@public
def set_num_threads(num_threads: int) -> None:
    """Number of threads of the default Context from now on; 0: as if it had not been called (see default_context)."""
    _arrays.set_default(Context(num_threads) if num_threads else None)
