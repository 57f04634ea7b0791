"""A call's result here beside what the device gave: errors, and which convention would explain them.

    case = Case("npu_fusion_attention", q, k, v, 8, "BNSD", atten_mask=mask)
    print(compare(case, device_output))
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
from torch import Tensor

from ._arguments import head_dim_of
from ._edge import FUNCTIONS


class Case:
    """A call of a function by the device's name: its arguments."""

    def __init__(self, function: str, *args: Any, **kwargs: Any) -> None:
        if function not in FUNCTIONS:
            raise ValueError(f"Case: there is no function {function}")
        self.function = function
        self.bound = inspect.signature(FUNCTIONS[function]).bind(*args, **kwargs)
        self.bound.apply_defaults()
        self.gives_groups = inspect.signature(FUNCTIONS[function]).return_annotation == "List[Tensor]"

    def run(self, **changes: Any) -> Tensor:
        """The first result, or all rows of a list of groups, with some arguments changed. Functions that write in place write copies."""
        arguments = {name: _copied(value) for name, value in {**self.bound.arguments, **changes}.items()}
        parameters = inspect.signature(FUNCTIONS[self.function]).parameters
        positional = [arguments.pop(name) for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        with torch.no_grad():
            out = FUNCTIONS[self.function](*positional, strict=False, **arguments)
        if out is None:
            raise ValueError(f"compare: {self.function} gives no result")
        return _first(out, self.gives_groups)


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value


def _first(results: Any, are_groups: bool) -> Tensor:
    """The first of several results; of a list of groups all of them, one behind the other."""
    if not isinstance(results, (tuple, list)):
        return results
    if not are_groups or len(results) == 1:
        return results[0]
    is_stackable = len({tuple(part.shape[1:]) for part in results}) == 1
    return torch.cat(list(results) if is_stackable else [part.reshape(-1) for part in results])


class Comparison(NamedTuple):
    """What compare found."""

    max_error: float
    mean_error: float
    worst: List[int]  # index of the largest error
    agrees: bool  # within the tolerance
    conventions: List[str]  # that would explain the difference, the best first

    def __str__(self) -> str:
        lines = [f"largest error {self.max_error:.3g} at {self.worst}, mean {self.mean_error:.3g}: "
                 + ("within the tolerance" if self.agrees else "beyond the tolerance")]
        return "\n".join(lines + [f"explained by: {text}" for text in self.conventions])


def _layout_swapped(a: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """BNSD and BSND read as each other."""
    other = {"BNSD": "BSND", "BSND": "BNSD"}.get(a.get("input_layout", ""))
    return None if other is None else {name: a[name].transpose(1, 2) for name in ("query", "key", "value")} | {"input_layout": other}


def _variants(case: Case) -> Dict[str, Callable[[], Tensor]]:
    """Calls that read an argument by another convention."""
    a = case.bound.arguments
    found: Dict[str, Dict[str, Any]] = {}
    mask = a.get("atten_mask")
    if mask is not None:
        mode = a.get("sparse_mode", 0)
        if mode in (0, 1):
            found["mask polarity: the device's 1 hides a key, and this mask looks inverted"] = {"atten_mask": ~mask.bool()}
        if mode in (2, 3):
            corner = {2: "bottom right (sparse_mode 3)", 3: "top left (sparse_mode 2)"}[mode]
            found[f"alignment: the causal diagonal at the {corner}"] = {"sparse_mode": 5 - mode}
        found["no mask: every key is seen"] = {"atten_mask": None}
    for name in ("scale", "scale_value", "softmax_scale"):
        if name in a and "input_layout" in a:
            heads = a.get("head_num", a.get("num_heads", a.get("num_query_heads", 1)))
            usual = 1 / math.sqrt(head_dim_of(a["query"], a["input_layout"].partition("_")[0], heads))
            if not math.isclose(a[name], usual):
                found[f"scale: 1 / sqrt(D) = {usual:.4g} in place of {a[name]:.4g}"] = {name: usual}
            if a[name] != 1.0:
                found[f"scale: 1 in place of {a[name]:.4g}"] = {name: 1.0}
            if a.get("pse") is not None and name == "scale":
                if "pse_type" in a and a["pse_type"] in (0, 1):
                    found["pse order: " + ("pse is scaled too" if a["pse_type"] == 0 else "pse is added after scaling")] = {"pse_type": 1 - a["pse_type"]}
                elif a[name] != 0:
                    found["pse order: pse is added after scaling"] = {"pse": a["pse"] / a[name]}
    if "input_layout" in a and all(isinstance(a.get(name), Tensor) and a[name].dim() == 4 for name in ("query", "key", "value")):
        swapped = _layout_swapped({**a})
        if swapped is not None and a["query"].shape == a["key"].shape:
            plain = {name: a[name] for name in ("query", "key", "value")}
            found[f"layout: the tensors read as {swapped['input_layout']}"] = {**plain, "input_layout": swapped["input_layout"]}
            if "head_num" in a:
                found[f"layout: the tensors read as {swapped['input_layout']}"]["head_num"] = a["query"].shape[1 if swapped["input_layout"] == "BNSD" else 2]
    if a.get("group_list_type") in (0, 1) and a.get("group_list") is not None:
        found["group_list: " + ("counts" if a["group_list_type"] == 0 else "running totals")] = {"group_list_type": 1 - a["group_list_type"]}
    if isinstance(a.get("activate_left"), bool):
        found["swiglu: the other half is activated"] = {"activate_left": not a["activate_left"]}
    if case.function in ("npu_rotary_mul",):
        found["rotary: pairs interleaved in place of halves, or the other way round"] = {
            "rotary_mode": "half" if a["rotary_mode"] == "interleave" else "interleave"}
    return {text: (lambda changes=changes: case.run(**changes)) for text, changes in found.items()}


def _errors(got: Tensor, wanted: Tensor) -> Tensor:
    """Absolute differences; 0 where both are the same infinity or NaN, infinite where one of them is."""
    got, wanted = got.double(), wanted.double()
    same = (got == wanted) | (got.isnan() & wanted.isnan())
    return (got - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)


def _bound(out: Tensor, wanted: Tensor, tolerance: Optional[float]) -> float:
    """The largest error that is none."""
    if not out.is_floating_point():
        return 1.0 if out.dtype == torch.int8 else 0.0
    if tolerance is None:
        tolerance = {torch.float32: 1e-4, torch.float64: 1e-9}.get(out.dtype, 1e-2)
    finite = wanted.double()[wanted.isfinite()].abs()
    return tolerance * float(finite.max()) if finite.numel() else 0.0


def compare(case: Case, device_output: Any, tolerance: Optional[float] = None) -> Comparison:
    """Sets the first result of a Case beside the device's; of a list of groups all. tolerance: of the largest error, relative to the
    device's largest finite number (default 1e-4 for float32, 1e-2 for 16 bits). Of int8 one step is none, other integers are equal."""
    out = case.run()
    wanted = _first(device_output, case.gives_groups)
    if out.shape != wanted.shape:
        raise ValueError(f"compare: the device's result is {list(wanted.shape)}, but {case.function} gives {list(out.shape)}")
    bound = _bound(out, wanted, tolerance)
    errors = _errors(out, wanted)
    largest = float(errors.max()) if errors.numel() else 0.0
    worst = [int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)] if errors.numel() else []
    better = []
    if largest > bound:
        for text, run in _variants(case).items():
            try:
                other = run()
            except (ValueError, TypeError, RuntimeError, NotImplementedError):
                continue  # the arguments cannot be read so
            if other.shape == wanted.shape:
                error = float(_errors(other, wanted).max())
                if error <= max(bound, largest / 10):
                    better.append((error, text))
    return Comparison(largest, float(errors.mean()) if errors.numel() else 0.0, worst, largest <= bound, [text for _, text in sorted(better)])
