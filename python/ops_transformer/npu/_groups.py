"""Names of groups, by which the device's functions find the ranks they work with."""

from __future__ import annotations

import threading
from typing import Any, Dict, NoReturn, Tuple

import torch

from .. import mc2

_of_thread = threading.local()
_of_process: Dict[str, Any] = {}
_of_torch: Dict[str, Tuple[Any, Any]] = {}  # by name: the group of torch.distributed, and the communicator made of it
_lock = threading.Lock()


def register_group(name: str, communicator: Any, *, whole_process: bool = False) -> None:
    """Names a communicator of ops_transformer.mc2: functions find it by `hcom` or `group`.

    The name holds in the calling thread, as ranks may be threads of one process; with whole_process=True, for a rank that is a process,
    in all threads that have not registered the name themselves. A name that is registered again gets the new communicator.
    TypeError for a name that is no str or is empty, and for what has no rank and world_size.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_group: name is {name!r}, must be a str that is not empty")
    if not _is_communicator(communicator):
        raise TypeError(f"register_group: communicator is a {type(communicator).__name__}, must be a communicator of ops_transformer.mc2")
    if whole_process:
        with _lock:
            _of_process[name] = communicator
    else:
        vars(_of_thread)[name] = communicator


def unregister_group(name: str) -> None:
    """Forgets the name in this thread, or where this thread has none, in the process; ValueError where neither knows it."""
    if vars(_of_thread).pop(name, None) is not None:
        return
    with _lock:
        if _of_process.pop(name, None) is None:
            _unknown(name)


def group_of(argument: str, group: Any, world_size: int = 0) -> Any:
    """The communicator of a name, or of a group object itself; ValueError where its size is not world_size (0: not asked)."""
    found = group if _is_communicator(group) else _by_name(argument, group)
    if world_size and found.world_size != world_size:
        raise ValueError(f"world_size is {world_size}, but {argument} is a group of {found.world_size} ranks")
    return found


def _is_communicator(value: Any) -> bool:
    return hasattr(value, "world_size") and hasattr(value, "rank") and not callable(value.rank)


def _unknown(name: Any) -> NoReturn:
    raise ValueError(f'there is no group "{name}": call ops_transformer.npu.register_group("{name}", communicator) in each rank\'s thread, '
                     "with whole_process=True where ranks are processes, or pass the name of a group of torch.distributed")


def _by_name(argument: str, group: Any) -> Any:
    if isinstance(group, str):
        found = vars(_of_thread).get(group) or _of_process.get(group)
        if found is not None:
            return found
    elif not (torch.distributed.is_available() and isinstance(group, torch.distributed.ProcessGroup)):
        raise TypeError(f"{argument} is a {type(group).__name__}, must be the name of a group, a communicator or a group of torch.distributed")
    return _from_torch(group)


def _from_torch(group: Any) -> Any:
    """The communicator of a group of torch.distributed, made once. All ranks meet here in their first call."""
    if isinstance(group, str):
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            _unknown(group)
        try:
            group = torch.distributed.distributed_c10d._resolve_process_group(group)
        except (LookupError, RuntimeError):
            _unknown(group)
    with _lock:
        known = _of_torch.get(group.group_name)
        if known is None or known[0] is not group:
            known = _of_torch[group.group_name] = (group, mc2.from_group(group))
        return known[1]
