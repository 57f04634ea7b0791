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

    def run(self, **changes: Any) -> Tensor:
        """The first result, with some arguments changed."""
        arguments = {**self.bound.arguments, **changes}
        parameters = inspect.signature(FUNCTIONS[self.function]).parameters
        positional = [arguments.pop(name) for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        with torch.no_grad():
            out = FUNCTIONS[self.function](*positional, strict=False, **arguments)
        return out[0] if isinstance(out, (tuple, list)) else out


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
    return (got.double() - wanted.double()).abs().nan_to_num(nan=math.inf)


def compare(case: Case, device_output: Any, tolerance: Optional[float] = None) -> Comparison:
    """Sets the first result of a Case beside the device's. tolerance: of the largest error, relative to the largest number (default
    1e-4 for float32, 1e-2 for 16 bits, one step for integers)."""
    wanted = device_output[0] if isinstance(device_output, (tuple, list)) else device_output
    out = case.run()
    if out.shape != wanted.shape:
        raise ValueError(f"compare: the device's result is {list(wanted.shape)}, but {case.function} gives {list(out.shape)}")
    if tolerance is None:
        tolerance = {torch.float32: 1e-4, torch.float64: 1e-9}.get(out.dtype, 1e-2)
    bound = tolerance * max(1.0, float(wanted.double().abs().nan_to_num().max())) if wanted.numel() else 0.0
    if not out.is_floating_point():
        bound = 1.0
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
