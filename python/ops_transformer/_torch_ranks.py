"""How the ranks of a torch.distributed group tell each other texts."""

from __future__ import annotations

from typing import Any, Callable, List, Tuple

import torch.distributed as distributed


def telling(group: Any) -> Tuple[int, int, Callable[[Any], Any], Callable[[Any], List[Any]]]:
    """(rank, world_size, broadcast, gather) of a group, as _ranks.meet takes them."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError("torch.distributed has no groups: call torch.distributed.init_process_group before")
    rank, world_size = distributed.get_rank(group), distributed.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is no rank of the group")
    first = 0 if group is None else distributed.get_global_rank(group, 0)

    def broadcast(value: Any) -> Any:
        told = [value]
        distributed.broadcast_object_list(told, src=first, group=group)
        return told[0]

    def gather(value: Any) -> List[Any]:
        told = [None] * world_size
        distributed.all_gather_object(told, value, group=group)
        return told

    return rank, world_size, broadcast, gather
