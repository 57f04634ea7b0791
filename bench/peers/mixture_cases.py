"""The group `moe` of compare.py: one layer of a mixture of experts each, named by one line of text.

    bf16 moe 512x32/4x1024x512
    dtype, moe [training] tokens x experts/top_k x hidden x intermediate

training: the forward and the gradients of x, the weights of the choice and the experts together.
"""

from typing import NamedTuple

DTYPES = ("f32", "bf16", "f16")


class Case(NamedTuple):
    dtype: str
    words: tuple
    tokens: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def mode(self):
        return " ".join(self.words)

    @property
    def shape(self):
        return f"{self.tokens}x{self.experts}/{self.top_k}x{self.hidden}x{self.intermediate}"

    def __str__(self):
        return f"{self.dtype} {self.mode} {self.shape}"

    @property
    def training(self):
        return "training" in self.words


def parse(text):
    """The case that `text` names; ValueError says what is wrong with it."""
    dtype, *words, shape = text.split()
    if dtype not in DTYPES:
        raise ValueError(f"{text}: dtype {dtype} is none of {', '.join(DTYPES)}")
    if words[:1] != ["moe"] or words[1:] not in ([], ["training"]):
        raise ValueError(f"{text}: {' '.join(words)} is neither moe nor moe training")
    parts = [[int(n) for n in part.split("/")] for part in shape.split("x")]
    if [len(part) for part in parts] != [1, 2, 1, 1] or min(map(min, parts)) < 1 or parts[1][1] > parts[1][0]:
        raise ValueError(f"{text}: {shape} is not tokens x experts/top_k x hidden x intermediate with top_k experts at most")
    return Case(dtype, tuple(words), parts[0][0], *parts[1], parts[2][0], parts[3][0])


GROUP = [f"{dtype} moe {tokens}x32/4x1024x512" for dtype in ("f32", "bf16") for tokens in (1, 16, 512)]
GROUP += ["bf16 moe 256x128/8x2048x768", "f32 moe training 512x32/4x1024x512", "bf16 moe training 512x32/4x1024x512"]
