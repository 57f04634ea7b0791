"""Communicators: who the ranks are that call the operators of mc2 together, and how they find each other."""

from __future__ import annotations

import socket
from typing import Any, Callable, List, Optional

from . import _core
from ._arrays import empty, view
from ._calls import public
from ._context import Context, default_context
from ._core import Communicator, RankMemory

MEBIBYTE = 1 << 20


@public
def create_threads(world_size: int, *, timeout_seconds: float = 60.0, staging_bytes: int = 16 * MEBIBYTE,
                   direct_stores: bool = True) -> List[Communicator]:
    """The communicators of ranks that are threads of this process: element r is for the thread that is rank r.

    A call ends with an error after timeout_seconds without progress. staging_bytes: a rank's memory for tiles on their way to it;
    it bounds the tile. direct_stores: products store finished tiles into other ranks' outputs; False: they go through staging.
    Each thread passes a Context of its own to operators (context=), or they share one's threads.
    """
    return _core.thread_ranks(_size("world_size", world_size), timeout_seconds, staging_bytes, direct_stores)


@public
def create_memory(world_size: int, *, staging_bytes: int = 16 * MEBIBYTE, shared_bytes: int = 0) -> RankMemory:
    """Memory that ranks share which are processes of this machine; its `ticket`, a text, lets each of them `join`.

    It must live until every rank has joined. shared_bytes: of each rank, for outputs that others store into (allocate_shared).
    """
    return _core.rank_memory(_size("world_size", world_size), staging_bytes, shared_bytes)


@public
def join(ticket: str, rank: int, *, timeout_seconds: float = 60.0, direct_stores: bool = True) -> Communicator:
    """The communicator of rank `rank` in the memory of that ticket: one call for each rank, from any process of the same user."""
    return _core.join_ranks(ticket, _size("rank", rank), timeout_seconds, direct_stores)


@public
def allocate_shared(communicator: Communicator, shape: Any, dtype: str = "f32") -> Any:
    """A NumPy array [shape] that other ranks' products can store into directly, for `out` of ranks that are processes.

    It comes out of the shared_bytes of create_memory and is not given back before the communicator ends, which it holds.
    """
    sizes = tuple(shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"shape is {list(sizes)}, must not be negative")
    like = empty(None, (), dtype)
    memory = getattr(like, "array", like)
    count = 1
    for size in sizes:
        count *= size
    array = communicator.shared_bytes(count * memory.itemsize).view(memory.dtype).reshape(sizes)
    return type(like)(array, dtype) if like is not memory else array


def meet(rank: int, world_size: int, broadcast: Callable[[Any], Any], gather: Callable[[Any], List[Any]], *,
         timeout_seconds: float, staging_bytes: int, shared_bytes: int, direct_stores: bool) -> Communicator:
    """The communicator of processes that can already tell each other texts.

    broadcast(value): rank 0's on all ranks; gather(value): those of all ranks, in their order, on all ranks. What one rank says goes
    wrong, all ranks raise.
    """
    hosts = gather(socket.gethostname())
    if len(set(hosts)) > 1:
        raise RuntimeError(f"rank 0 is on host {hosts[0]}, but rank {next(r for r, h in enumerate(hosts) if h != hosts[0])} is on "
                           f"{next(h for h in hosts if h != hosts[0])}; ranks of one communicator are on one machine")
    memory, failed = None, None
    if rank == 0:
        try:
            memory = create_memory(world_size, staging_bytes=staging_bytes, shared_bytes=shared_bytes)
        except Exception as error:
            failed = str(error)
    ticket, failed = broadcast((None if memory is None else memory.ticket, failed))
    if failed is not None:
        raise RuntimeError(f"rank 0 has no memory to share: {failed}")
    joined, failed = None, None
    try:
        joined = join(ticket, rank, timeout_seconds=timeout_seconds, direct_stores=direct_stores)
    except Exception as error:
        failed = str(error)
    for other, said in enumerate(gather(failed)):
        if said is not None:
            raise RuntimeError(f"rank {other} cannot join: {said}")
    return joined


@public
def from_mpi4py(comm: Any, *, timeout_seconds: float = 60.0, staging_bytes: int = 16 * MEBIBYTE, shared_bytes: int = 0,
                direct_stores: bool = True) -> Communicator:
    """The communicator of the ranks of an mpi4py communicator, all of which call this. They must be on one machine."""
    return meet(comm.Get_rank(), comm.Get_size(), lambda value: comm.bcast(value, root=0), comm.allgather,
                timeout_seconds=timeout_seconds, staging_bytes=staging_bytes, shared_bytes=shared_bytes, direct_stores=direct_stores)


@public
def from_group(group: Any = None, *, timeout_seconds: float = 60.0, staging_bytes: int = 16 * MEBIBYTE, shared_bytes: int = 0,
               direct_stores: bool = True) -> Communicator:
    """The communicator of the ranks of a torch.distributed group (None: of all), all of which call this, on one machine."""
    from ._torch_ranks import telling

    return meet(*telling(group), timeout_seconds=timeout_seconds, staging_bytes=staging_bytes, shared_bytes=shared_bytes,
                direct_stores=direct_stores)


def _size(name: str, value: int) -> int:
    if not 0 <= value < 2**31:
        raise ValueError(f"{name} is {value}, must be from 0 to {2**31 - 1}")
    return value


# ---- Weights of several ranks ----------------------------------------------------------------------------------------


@public
def pack_columns(weight: Any, parts: int, *, context: Optional[Context] = None) -> _core.PackedParts:
    """A weight [n, k] divided by its outputs over `parts` ranks, as equal as can be (the first ranks one more), each packed for itself:
    the weights of matmul_all_to_all."""
    return _core.pack_columns(context or default_context(), view(weight, "weight"), _size("parts", parts))


@public
def pack_columns_blocks(blocks: Any, format: str, rows: int, cols: int, parts: int, *,
                        context: Optional[Context] = None) -> _core.PackedParts:
    """The same of a GGUF matrix [rows, cols], which stays quantised: uint8 blocks of a format such as "q4_1"."""
    return _core.pack_columns_blocks(context or default_context(), view(blocks, "blocks"), format, rows, cols, _size("parts", parts))


@public
def pack_columns_int(q: Any, scales: Any, zeros: Any = None, *, parts: int, context: Optional[Context] = None) -> _core.PackedParts:
    """The same of an int8 weight [n, k], or int4 as uint8 [n, k / 2], with float32 scales [n, groups] (quant.quantize)."""
    return _core.pack_columns_int(context or default_context(), view(q, "q"), view(scales, "scales"),
                                  None if zeros is None else view(zeros, "zeros"), _size("parts", parts))
