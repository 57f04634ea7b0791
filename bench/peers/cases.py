"""What is measured: one attention call each, named by one line of text, and the bars that it has to pass.

    f32 causal 1x32/8x2048x128
    dtype, words of the mode, batch x heads[/kv_heads] x length[/kv_len] x head_dim[/value_head_dim]

Words of the mode: forward (alone), causal, dropout, bool_mask, float_mask; backward: the gradients alone; training: forward
and gradients together.
"""

from typing import NamedTuple, Optional

DTYPES = ("f32", "bf16", "f16")
WORDS = ("forward", "causal", "backward", "training", "dropout", "bool_mask", "float_mask")
DROPOUT = 0.1
VISIBLE = 0.9  # share of the keys that a bool mask shows


class Case(NamedTuple):
    dtype: str
    words: tuple
    batch: int
    heads: int
    kv_heads: int
    query_len: int
    kv_len: int
    head_dim: int
    value_head_dim: int

    @property
    def mode(self):
        return " ".join(self.words) or "forward"

    @property
    def shape(self):
        def pair(a, b):
            return str(a) if a == b else f"{a}/{b}"

        return "x".join((str(self.batch), pair(self.heads, self.kv_heads), pair(self.query_len, self.kv_len),
                         pair(self.head_dim, self.value_head_dim)))

    def __str__(self):
        return f"{self.dtype} {self.mode} {self.shape}"

    @property
    def gradients(self):
        return bool({"backward", "training"} & set(self.words))

    @property
    def plain(self):
        """Forward without mask or dropout, perhaps causal: what every peer has."""
        return not set(self.words) - {"causal"}


def parse(text):
    """The case that `text` names; ValueError says what is wrong with it."""
    dtype, *words, shape = text.split()
    if dtype not in DTYPES:
        raise ValueError(f"{text}: dtype {dtype} is none of {', '.join(DTYPES)}")
    for word in words:
        if word not in WORDS:
            raise ValueError(f"{text}: {word} is none of {', '.join(WORDS)}")
    parts = [[int(n) for n in part.split("/")] for part in shape.split("x")]
    if [len(part) for part in parts][:1] != [1] or len(parts) != 4 or not all(1 <= len(part) <= 2 for part in parts):
        raise ValueError(f"{text}: {shape} is not batch x heads[/kv_heads] x length[/kv_len] x head_dim[/value_head_dim]")
    heads, lengths, dims = ((part * 2)[:2] for part in parts[1:])
    if heads[0] % heads[1] or min(parts[0] + heads + lengths + dims) < 1:
        raise ValueError(f"{text}: {shape} has a size of 0, or heads that kv_heads does not divide")
    return Case(dtype, tuple(word for word in words if word != "forward"), parts[0][0], *heads, *lengths, *dims)


def _product(dtypes, modes, shapes):
    return [f"{dtype} {mode} {shape}" for dtype in dtypes for mode in modes for shape in shapes]


_SHORT = [f"1x8x{n}x{d}" for n in (64, 128, 256, 512) for d in (64, 128)]
_LONG = [f"1x{heads}x{n}x{d}" for n, heads in ((1024, 8), (2048, 4), (4096, 2)) for d in (64, 128)]
_BACKWARD = [f"1x{heads}x{n}x{d}" for n, heads in ((1024, 4), (2048, 2), (4096, 1)) for d in (64, 128)]
_DECODE = ["1x32/8x1/1024x128", "1x32/8x1/32768x128", "8x32/8x1/4096x128", "1x32x1/4096x128", "1x8/1x1/32768x128"]

GROUPS = {
    "quick": _product(["f32"], ["forward", "causal", "backward"], ["1x8x64x64", "1x8x256x64", "1x8x1024x64"])
    + ["f32 dropout 1x8x512x64", "f32 bool_mask 1x8x512x64", "f32 forward 1x8x512x128/64", "bf16 forward 1x8x1024x64",
       "bf16 forward 1x32/8x1/4096x128"],
    "short": _product(["f32"], ["forward", "causal"], _SHORT) + ["f32 forward 8x12x128x64"],
    "long": _product(["f32"], ["forward", "causal"], _LONG) + ["f32 causal 1x12x512x64", "f32 causal 1x32/8x2048x128"],
    "bf16": _product(["bf16"], ["forward", "causal"],
                     ["1x8x64x64", "1x8x256x64", "1x8x1024x64", "1x4x2048x64", "1x4x2048x128"])
    + ["bf16 causal 1x32/8x2048x128", "bf16 forward 8x12x128x64", "bf16 causal 1x12x512x64"],
    "short_backward": _product(["f32"], ["backward", "causal backward"], _SHORT),
    "backward": _product(["f32"], ["backward", "causal backward"], _BACKWARD)
    + ["f32 causal backward 1x25x1024x64", "f32 backward 1x8/1x2048x128"],
    "bf16_backward": _product(["bf16"], ["backward", "causal backward"],
                              ["1x8x128x64", "1x8x512x64", "1x4x2048x64", "1x4x2048x128"])
    + ["bf16 backward 1x8/1x2048x128"],
    "dropout": _product(["f32", "bf16"], ["dropout", "dropout backward", "dropout training"],
                        ["1x8x512x64", "1x4x1024x128", "1x2x4096x64"]),
    "mask": _product(["f32", "bf16"], ["bool_mask", "float_mask"], ["1x8x512x64", "1x8x1024x128", "1x2x4096x64"])
    + ["f32 bool_mask backward 1x8x1024x64"],
    "head_dims": _product(["f32", "bf16"], ["forward", "causal", "backward"],
                          ["1x8x512x128/64", "1x8x512x64/128", "1x4x2048x192/128"])
    + _product(["f32"], ["forward"], [f"1x4x1024x{d}" for d in (33, 40, 72, 80, 96, 256)]),
    "decode": _product(["f32", "bf16"], ["forward"], _DECODE),
    "length": _product(["f32"], ["causal"], [f"1x1x{1 << n}x64" for n in range(8, 17)]),
}


class Bar(NamedTuple):
    against: str  # "best": the fastest peer; "torch": torch's own choice of path
    least: float


def bar(case: Case, threads: int, amx: bool = False) -> Optional[Bar]:
    """How many times a peer's time over ours has to be at least; None: shown without a bar."""
    if "dropout" in case.words or case.head_dim != case.value_head_dim:
        return Bar("torch", 3)
    if "bool_mask" in case.words:
        return Bar("torch", 2)
    if case.query_len != case.kv_len or "float_mask" in case.words:
        return None
    if case.dtype != "f32":
        return None if amx else Bar("torch", 2)
    if case.gradients:
        return Bar("best", 1.1 if threads == 1 else 1.3)
    if threads == 1 and "causal" in case.words:
        return Bar("best", 1.4 if case.query_len <= 2048 else 1.25)
    if threads == 1 and case.query_len <= 512:
        return Bar("best", 1.2 if case.query_len <= 128 else 1.05)
    if threads == 1 and case.query_len >= 1024 and case.head_dim in (64, 128):
        return Bar("best", 1.08 if case.head_dim == 128 else 1.2)
    return Bar("best", 1) if case.batch * case.heads >= 8 and case.query_len >= 64 else None
