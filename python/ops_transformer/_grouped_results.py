"""What the grouped products give, as tuples with names: for arrays and for the operators of torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class GroupedGradients(NamedTuple):
    """What grouped_matmul_backward gives."""

    x: Any  # [m, k], zeros behind the last group
    weight: Any  # [E, n, k], zeros of an empty group
    bias: Any  # [E, n]
