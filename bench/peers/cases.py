"""What is measured: one call each, of attention or (mixture_cases.py) of a mixture of experts, named by one line of text, and
the bars that it has to pass.

    f32 causal 1x32/8x2048x128
    dtype, words of the mode, batch x heads[/kv_heads] x length[/kv_len] x head_dim[/value_head_dim]

Words of the mode: forward (alone), causal, dropout, bool_mask, float_mask; backward: the gradients alone; training: forward
and gradients together. And the options that some libraries have and others do not:

    window    a query sees WINDOW keys: its own and those before it, without causal as many behind it
    alibi     each head's slope times the distance is taken from the scores
    softcap   scores become SOFTCAP * tanh(score / SOFTCAP)
    sinks     each head has one more score, without a value
    varlen    `batch` sequences of lengths that fall evenly from `length`, packed where the library takes them packed
    paged     keys and values lie in a paged cache; the last query sees the last key (prefill of a chunk)
    strided   inputs are views of memory in the order batch, length, heads, head_dim
    sparse    blocks of BLOCK queries see some blocks of BLOCK keys, drawn at random: SHARE of all (with causal: of those up to
              their own), or what one of the words 50%, 25%, 10% and 2% says; blocks64: blocks of 64
"""

from typing import NamedTuple, Optional

from . import mixture_cases

DTYPES = ("f32", "bf16", "f16")
OPTIONS = ("window", "alibi", "softcap", "sinks", "varlen", "paged", "sparse")  # what torch's function has no argument for
SHARES = {"50%": 0.5, "25%": 0.25, "10%": 0.1, "2%": 0.02}
OF_BLOCKS = (*SHARES, "blocks64")
WORDS = ("forward", "causal", "backward", "training", "dropout", "bool_mask", "float_mask", *OPTIONS, "strided", *OF_BLOCKS)
DROPOUT = 0.1
VISIBLE = 0.9  # share of the keys that a bool mask shows
WINDOW = 256
SOFTCAP = 20.0
SHARE = 0.1
BLOCK = 128  # flex_attention's own


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
        """Forward without mask, dropout or options, perhaps causal: what every peer has."""
        return not set(self.words) - {"causal"}

    @property
    def options(self):
        return tuple(word for word in self.words if word in OPTIONS)

    @property
    def share(self):
        """Of the blocks that a block of queries sees, with `sparse`."""
        return next((SHARES[word] for word in self.words if word in SHARES), SHARE)

    @property
    def block(self):
        return 64 if "blocks64" in self.words else BLOCK

    @property
    def lengths(self):
        """Of the sequences: query_len, or from it downwards in even steps."""
        if "varlen" not in self.words:
            return (self.query_len,) * self.batch
        return tuple(max(1, self.query_len * (self.batch - i) // self.batch) for i in range(self.batch))


def parse(text):
    """The case that `text` names; ValueError says what is wrong with it."""
    dtype, *words, shape = text.split()
    if "moe" in words:
        return mixture_cases.parse(text)
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
    case = Case(dtype, tuple(word for word in words if word != "forward"), parts[0][0], *heads, *lengths, *dims)
    if "paged" in words and (case.gradients or {"varlen", "strided", "dropout"} & set(words) or case.query_len > case.kv_len):
        raise ValueError(f"{text}: paged is forward, without varlen, strided and dropout, of no more queries than keys")
    if case.options and "paged" not in words and case.query_len != case.kv_len:
        raise ValueError(f"{text}: {case.options[0]} without paged has as many queries as keys, not {shape}")
    if set(OF_BLOCKS) & set(words) and "sparse" not in words or len(set(SHARES) & set(words)) > 1:
        raise ValueError(f"{text}: {', '.join(OF_BLOCKS)} go with sparse, one share at most")
    if case.options and "dropout" in words:
        raise ValueError(f"{text}: dropout goes without {case.options[0]}")
    return case


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
    "window": _product(["f32", "bf16"], ["causal window"], ["1x8x1024x64", "1x4x4096x128"])
    + ["f32 window 1x4x2048x64", "f32 causal window backward 1x4x2048x64"],
    "alibi": _product(["f32", "bf16"], ["causal alibi"], ["1x8x512x64", "1x8x2048x128"])
    + ["f32 alibi 1x8x1024x64", "f32 causal alibi backward 1x4x1024x64"],
    "softcap": _product(["f32", "bf16"], ["causal softcap"], ["1x8x512x64", "1x8x2048x128"])
    + ["f32 softcap backward 1x4x1024x64"],
    "sinks": _product(["f32", "bf16"], ["causal sinks", "causal window sinks"], ["1x8x512x64", "1x32/4x2048x64"]),
    "varlen": _product(["f32", "bf16"], ["varlen", "causal varlen"], ["8x8x512x64", "4x32/8x1024x128"])
    + ["f32 causal varlen backward 4x4x1024x64"],
    "paged": _product(["f32", "bf16"], ["causal paged"],
                      ["1x32/8x512x128", "1x32/8x512/4096x128", "4x32/8x64/2048x128", "8x32/8x1/2048x128"])
    + ["bf16 causal window paged 1x32/8x512/4096x128"],
    "sparse": _product(["f32", "bf16"], [f"sparse {share}" for share in SHARES], ["1x4x8192x64", "1x2x8192x128"])
    + _product(["f32", "bf16"], ["sparse 10% blocks64", "causal sparse 10%"], ["1x4x8192x64"])
    + ["f32 causal sparse 50% 1x8/2x4096x128", "f32 sparse 2% 1x1x16384x64", "f32 sparse 10% backward 1x4x4096x64",
       "bf16 causal sparse 25% backward 1x4x4096x64"],
    "strided": _product(["f32", "bf16"], ["strided", "causal strided"], ["1x8x256x64", "2x8x1024x64", "1x32/8x1024x128"])
    + ["f32 causal strided backward 2x4x1024x64"],
    "moe": mixture_cases.GROUP,
    "length": _product(["f32"], ["causal"], [f"1x1x{1 << n}x64" for n in range(8, 17)]),
}


class Bar(NamedTuple):
    against: str  # "best": the fastest peer; else how the peers' names begin, such as "torch": its own choice of path
    least: float


def bar(case: Case, threads: int, amx: bool = False) -> Optional[Bar]:
    """How many times a peer's time over ours has to be at least; None: shown without a bar."""
    if isinstance(case, mixture_cases.Case):
        if case.training:
            return Bar("torch", 3)
        return Bar("best", 2.5) if case.dtype == "bf16" and case.tokens >= 256 else None
    if case.options == ("sparse",) and not case.gradients and (case.dtype == "f32" or not amx):
        return Bar("torch flex", 3)
    if case.options or "strided" in case.words:
        return None
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
