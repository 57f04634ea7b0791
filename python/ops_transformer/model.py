"""Model: a language model of a GGUF file."""

from __future__ import annotations

import errno
import math
import os
import stat
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from ._arrays import integer_array, view
from ._calls import option
from ._context import Context, default_context
from ._core import Conversation as CoreConversation, Model as CoreModel

__all__ = ["Conversation", "Generation", "Model"]


class Generation(NamedTuple):
    text: str
    tokens: List[int]  # the ending one included
    finish_reason: str  # "stop", "length" or "context"


def _ids(function: str, name: str, values: Any) -> List[int]:
    # Elements of bytes are integers, but nobody means them as tokens.
    if isinstance(values, (bytes, bytearray, memoryview)):
        raise TypeError(f"{function}: {name} is {type(values).__name__}, must be a text (str) or token ids")
    ids = integer_array(values, f"{function}: {name}")
    if ids.ndim != 1:
        raise ValueError(f"{function}: {name} must be one row of token ids, but its shape is {list(ids.shape)}")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"{function}: token {wrong} of {name} is in no vocabulary")
    return ids.tolist()


def _sampling(function: str, temperature: Optional[float], top_k: Optional[int], top_p: Optional[float], seed: Optional[int]) -> tuple:
    """(greedy, top_k, top_p, temperature, seed). As with `opst generate`: greedy where none is given, else temperature 1."""
    greedy = temperature is None and top_k is None and top_p is None and seed is None
    temperature = option(function, "temperature", "float", 1.0 if temperature is None else temperature)
    if not 0 <= temperature < math.inf:
        raise ValueError(f"{function}: temperature is {temperature}, must be finite and >= 0")
    top_k = option(function, "top_k", "int", 0 if top_k is None else top_k)
    if top_k < 0:
        raise ValueError(f"{function}: top_k is {top_k}, must be >= 0")
    top_p = option(function, "top_p", "float", 1.0 if top_p is None else top_p)
    if not 0 < top_p <= 1:
        raise ValueError(f"{function}: top_p is {top_p}, must be in (0, 1]")
    return greedy, top_k, top_p, temperature, option(function, "seed", "int", 0 if seed is None else seed)


def _max_tokens(function: str, value: Any) -> int:
    count = option(function, "max_tokens", "int", value)
    if count < 1:
        raise ValueError(f"{function}: max_tokens is {count}, must be >= 1")
    return count


def _openable(path: Union[str, bytes, "os.PathLike[Any]"]) -> bytes:
    """The path as the system takes it. Raises what open() raises where there is no file to read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe must not wait for a writer
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, "a model is a .gguf file, not a folder", os.fspath(path))
    finally:
        os.close(descriptor)
    return os.fsencode(path)


class Model:
    """A llama-architecture GGUF file. One sequence at a time: calls from several threads wait for one another, and a call
    from within on_text is refused. Ctrl-C ends a call within a second. After loading, the file is not read again.

    model = Model("SmolLM2-135M-Instruct.Q4_1.gguf")
    print(model.generate("What is the capital of France?", chat=True).text)

    A text becomes the same tokens wherever one is taken: add_bos puts the model's leading token in front, if it has one
    and the text has not; parse_special makes tokens of the names of control tokens ("<|im_end|>"), which are plain text
    otherwise. Token ids are taken as they are.
    """

    def __init__(
        self,
        path: Union[str, bytes, "os.PathLike[Any]"],
        *,
        max_context: int = 0,
        kv_dtype: str = "f32",
        activations: str = "exact",
        context: Optional[Context] = None,
    ):
        """max_context: tokens of prompt and answer together; 0: 4096, at most the model's own. kv_dtype: "f32", "bf16",
        "f16", "int8" (with a scale for each token and head), "int4" (with one for each 32 numbers), "f8_e4m3" (or
        "fp8") or "f8_e5m2", how keys and values are cached. activations: "exact", or "int8": numbers rounded in blocks of 32 where they meet quantised
        weights, faster for long prompts.
        """
        if option("Model", "max_context", "int", max_context) < 0:
            raise ValueError(f"Model: max_context is {max_context}, must be >= 0")
        if kv_dtype not in ("f32", "bf16", "f16", "int8", "int4", "fp8", "f8_e4m3", "f8_e5m2"):
            raise ValueError(f"Model: kv_dtype is {kv_dtype!r}, must be 'f32', 'bf16', 'f16', 'int8', 'int4', 'fp8', 'f8_e4m3' "
                             "or 'f8_e5m2'")
        if activations not in ("exact", "int8"):
            raise ValueError(f"Model: activations is {activations!r}, must be 'exact' or 'int8'")
        context = default_context() if context is None else option("Model", "context", "Context", context)
        file = _openable(path)
        self._model = CoreModel(context, file, max_context, kv_dtype, activations == "int8")

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_context(self) -> int:
        return self._model.max_context

    @property
    def kv_cache_bytes(self) -> int:
        return self._model.kv_cache_bytes

    def tokenize(self, text: str, *, add_bos: bool = True, parse_special: bool = True) -> List[int]:
        """The ids of a text, those that generate, logits and perplexity take."""
        return self._tokens("Model.tokenize", "text", option("Model.tokenize", "text", "str", text), add_bos, parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._model.detokenize(_ids("Model.detokenize", "tokens", tokens)).decode("utf-8", errors="replace")

    def _tokens(self, function: str, name: str, prompt: Any, add_bos: bool, parse_special: bool) -> List[int]:
        add_bos = option(function, "add_bos", "bool", add_bos)
        parse_special = option(function, "parse_special", "bool", parse_special)
        if isinstance(prompt, str):
            return self._model.tokenize(option(function, name, "str", prompt), add_bos, parse_special)
        return _ids(function, name, prompt)

    def generate(
        self,
        prompt: Union[str, Sequence[int]],
        *,
        max_tokens: int = 256,
        chat: bool = False,
        system: Optional[str] = None,
        temperature: Optional[float] = None,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        seed: Optional[int] = None,
        ignore_end: bool = False,
        on_text: Optional[Callable[[str], Any]] = None,
        add_bos: bool = True,
        parse_special: bool = True,
    ) -> Generation:
        """Goes on behind a text or tokens. ignore_end goes on where the model ends.

        Each token is the likeliest one unless temperature, top_k, top_p or seed is given, as with `opst generate`: it is
        drawn then, by default at temperature 1, out of all tokens, with the seed 0. At temperature 0 it is the likeliest one
        whatever the others are.

        chat: the prompt is a user's message in the model's chat template, plain text whatever it contains, behind the
        system message if there is one. on_text gets the text as it grows.
        """
        name = "Model.generate"
        sampling = _sampling(name, temperature, top_k, top_p, seed)
        max_tokens = _max_tokens(name, max_tokens)
        ignore_end = option(name, "ignore_end", "bool", ignore_end)
        if option(name, "chat", "bool", chat):
            if not option(name, "add_bos", "bool", add_bos):
                raise ValueError(f"{name}: add_bos is False, but with chat=True the model's template says how a text begins")
            turns = [("system", option(name, "system", "str", system))] if system is not None else []
            ids = self._model.chat_ids(turns + [("user", option(name, "prompt", "str", prompt))])
        elif system is not None:
            raise ValueError(f"{name}: system is for chat=True")
        else:
            ids = self._tokens(name, "prompt", prompt, add_bos, parse_special)
            if not ids:
                raise ValueError(f"{name}: prompt has no tokens, and the model goes on from at least one")
        return Generation(*self._model.generate(ids, max_tokens, *sampling, ignore_end, on_text))

    def conversation(
        self,
        *,
        system: Optional[str] = None,
        temperature: Optional[float] = None,
        top_k: Optional[int] = None,
        top_p: Optional[float] = None,
        seed: Optional[int] = None,
    ) -> "Conversation":
        """Turns of a user and the model, each of which costs what is new in it. It has a cache of its own, as large as the
        model's; any number of conversations, and the model's own calls, may go on side by side. Tokens are chosen as
        generate chooses them."""
        name = "Model.conversation"
        system = None if system is None else option(name, "system", "str", system)
        return Conversation(CoreConversation(self._model, system, *_sampling(name, temperature, top_k, top_p, seed)))

    def logits(self, prompt: Union[str, Sequence[int]], *, add_bos: bool = True, parse_special: bool = True) -> np.ndarray:
        """float32 [tokens, vocab_size]: the scores of the next token after each one."""
        ids = self._tokens("Model.logits", "prompt", prompt, add_bos, parse_special)
        out = np.empty((len(ids), self.vocab_size), np.float32)
        if ids:
            self._model.logits(ids, view(out))
        return out

    def perplexity(self, text: Union[str, Sequence[int]], *, add_bos: bool = True, parse_special: bool = True) -> float:
        """exp of the mean of -ln p(token | the tokens before it), in windows of max_context tokens."""
        ids = self._tokens("Model.perplexity", "text", text, add_bos, parse_special)
        if len(ids) < 2:
            raise ValueError(f"Model.perplexity: text has {len(ids)} tokens, but predicting one from another takes 2")
        return self._model.perplexity(ids)


class Conversation:
    """Turns of a user and a model, made by Model.conversation(); what `opst chat` has.

    talk = model.conversation(system="Answer in one sentence.")
    print(talk.answer("What is the capital of France?").text)
    print(talk.answer("And of Italy?").text)
    """

    def __init__(self, conversation: CoreConversation):
        self._conversation = conversation

    def answer(
        self, message: str, *, max_tokens: int = 1024, on_text: Optional[Callable[[str], Any]] = None
    ) -> Generation:
        """The answer to a message, which is plain text whatever it contains.

        A message that has no room in the context raises ValueError and leaves the conversation as it was. After Ctrl-C the
        answer stays as far as it came; what on_text raises loses the history.
        """
        message = option("Conversation.answer", "message", "str", message)
        max_tokens = _max_tokens("Conversation.answer", max_tokens)
        return Generation(*self._conversation.answer(message, max_tokens, on_text))

    def reset(self) -> None:
        """Starts anew behind the system message."""
        self._conversation.reset()

    @property
    def tokens(self) -> int:
        """Of the history, all turns and their marks."""
        return self._conversation.tokens

    @property
    def max_context(self) -> int:
        return self._conversation.max_context
