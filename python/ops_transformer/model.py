"""Model: a language model of a GGUF file."""

from __future__ import annotations

import os
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Union

import numpy as np

from . import _core
from ._arrays import default_context, view
from ._core import Context

__all__ = ["Generation", "Model"]


class Generation(NamedTuple):
    text: str
    tokens: List[int]  # the ending one included
    finish_reason: str  # "stop", "length" or "context"


class Model:
    """A llama-architecture GGUF file. One sequence at a time: calls from several threads wait for one another.

    model = Model("SmolLM2-135M-Instruct.Q4_1.gguf")
    print(model.generate("What is the capital of France?", chat=True).text)
    """

    def __init__(self, path: Union[str, "os.PathLike[str]"], *, max_context: int = 0, context: Optional[Context] = None):
        """max_context: tokens of prompt and answer together; 0: 4096, at most the model's own."""
        self._model = _core.Model(context or default_context(), os.fspath(path), max_context)

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def max_context(self) -> int:
        return self._model.max_context

    def tokenize(self, text: str, *, parse_special: bool = False) -> List[int]:
        """The ids of a text; parse_special: texts such as "<|im_end|>" become their tokens."""
        return self._model.tokenize(text, parse_special)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._model.detokenize(list(tokens)).decode("utf-8", errors="replace")

    def _ids(self, text: Union[str, Sequence[int]]) -> List[int]:
        return self._model.prompt_ids(text) if isinstance(text, str) else [int(token) for token in text]

    def generate(
        self,
        prompt: Union[str, Sequence[int]],
        *,
        max_tokens: int = 256,
        chat: bool = False,
        system: Optional[str] = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        on_text: Optional[Callable[[str], Any]] = None,
    ) -> Generation:
        """Goes on behind a text or tokens; chat: the prompt is a user's message. temperature 0 takes the likeliest.

        on_text gets the text as it grows.
        """
        if chat:
            if not isinstance(prompt, str):
                raise TypeError("a chat's prompt is a text")
            turns = ([("system", system)] if system is not None else []) + [("user", prompt)]
            ids = self._model.chat_ids(turns)
        else:
            ids = self._ids(prompt)
        return Generation(*self._model.generate(ids, max_tokens, temperature == 0, top_k, top_p, temperature, seed, on_text))

    def logits(self, prompt: Union[str, Sequence[int]]) -> np.ndarray:
        """float32 [tokens, vocab_size]: the scores of the next token after each one."""
        ids = self._ids(prompt)
        out = np.empty((len(ids), self.vocab_size), np.float32)
        self._model.logits(ids, view(out))
        return out

    def perplexity(self, text: Union[str, Sequence[int]]) -> float:
        """exp of the mean of -ln p(token | the tokens before it), in windows of max_context tokens."""
        return self._model.perplexity(self._ids(text))
