"""A call's result here beside what the device gave: errors, and which convention would explain them.

    case = Case("npu_fusion_attention", q, k, v, 8, "BNSD", atten_mask=mask)
    print(compare(case, device_output))
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

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
        return self.results(**changes)[0]

    def results(self, **changes: Any) -> List[Any]:
        """All of them; a list of groups is one."""
        arguments = {name: _copied(value) for name, value in {**self.bound.arguments, **changes}.items()}
        parameters = inspect.signature(FUNCTIONS[self.function]).parameters
        positional = [arguments.pop(name) for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY]
        with torch.no_grad():
            out = FUNCTIONS[self.function](*positional, strict=False, **arguments)
        if out is None:
            raise ValueError(f"compare: {self.function} gives no result")
        return _listed(out, self.gives_groups)


def _copied(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value


def _listed(results: Any, are_groups: bool) -> List[Any]:
    """Several results, or one; the rows of a list of groups one behind the other."""
    if not isinstance(results, (tuple, list)):
        return [results]
    if not are_groups:
        return list(results)
    is_stackable = len({tuple(part.shape[1:]) for part in results}) == 1
    return [torch.cat(list(results) if is_stackable else [part.reshape(-1) for part in results])]


class Comparison(NamedTuple):
    """What compare found. The numbers are those of the result that differs most, measured by what is tolerated of it."""

    max_error: float
    mean_error: float
    worst: List[int]  # index of the largest error
    agrees: bool  # all results, within the tolerance
    conventions: List[str]  # that would explain the difference, the best first
    result: int = 0  # which of the function's results this is
    differing: Sequence[int] = ()  # results beyond the tolerance

    def __str__(self) -> str:
        said = "within the tolerance" if self.agrees else f"beyond the tolerance in result {', '.join(map(str, self.differing))}"
        lines = [f"result {self.result}: largest error {self.max_error:.3g} at {self.worst}, mean {self.mean_error:.3g}: {said}"]
        return "\n".join(lines + [f"explained by: {text}" for text in self.conventions])


def _layout_swapped(a: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """BNSD and BSND read as each other."""
    other = {"BNSD": "BSND", "BSND": "BNSD"}.get(a.get("input_layout", ""))
    return None if other is None else {name: a[name].transpose(1, 2) for name in ("query", "key", "value")} | {"input_layout": other}


def _variants(case: Case) -> Dict[str, Callable[[], List[Any]]]:
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
    return {text: (lambda changes=changes: case.results(**changes)) for text, changes in found.items()}


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
    """Sets the results of a Case beside the device's: a tensor is the first one, of a tuple each tensor has its own (None: not looked
    at); a list of groups is one result. tolerance: of the largest error, relative to the device's largest finite number (default
    1e-4 for float32, 1e-2 for 16 bits). Of int8 one step is none, other integers are equal. Numbers that are no tensors, such as
    seeds, are not compared."""
    found, given = case.results(), _listed(device_output, case.gives_groups)
    if len(given) > len(found):
        raise ValueError(f"compare: the device gave {len(given)} results, but {case.function} gives {len(found)}")
    pairs = [(i, out, wanted) for i, (out, wanted) in enumerate(zip(found, given)) if isinstance(out, Tensor) and isinstance(wanted, Tensor)]
    if not pairs:
        raise ValueError("compare: device_output has no tensor that is a result")
    measured = []
    for i, out, wanted in pairs:
        if out.shape != wanted.shape:
            which = f"result {i}" if len(given) > 1 else "result"
            raise ValueError(f"compare: the device's {which} is {list(wanted.shape)}, but {case.function} gives {list(out.shape)}")
        errors, bound = _errors(out, wanted), _bound(out, wanted, tolerance)
        largest = float(errors.max()) if errors.numel() else 0.0
        measured.append((largest / bound if bound else math.inf if largest else 0.0, i, errors, bound, largest))
    _, result, errors, bound, largest = max(measured, key=lambda one: (one[0], -one[1]))
    worst = [int(i) for i in torch.unravel_index(errors.argmax(), errors.shape)] if errors.numel() else []
    differing = [i for _, i, _, limit, error in measured if error > limit]
    conventions = _explained(case, given[result], result, bound, largest) if differing else []
    return Comparison(largest, float(errors.mean()) if errors.numel() else 0.0, worst, not differing, conventions, result, differing)


def _explained(case: Case, wanted: Tensor, result: int, bound: float, largest: float) -> List[str]:
    """The conventions by which the result comes ten times nearer, or within its bound."""
    better = []
    for text, run in _variants(case).items():
        try:
            other = run()[result]
        except (ValueError, TypeError, RuntimeError, NotImplementedError):
            continue  # the arguments cannot be read so
        if other.shape == wanted.shape:
            error = float(_errors(other, wanted).max())
            if error <= max(bound, largest / 10):
                better.append((error, text))
    return [text for _, text in sorted(better)]
