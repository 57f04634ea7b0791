"""Model: doors, refusals, re-entry, interruption, conversations. On the real model, as its answers can be judged."""

import os
import pathlib
import shutil
import signal
import threading

import numpy as np
import pytest

from conftest import required
from ops_transformer import Model


def model_path():
    path = os.environ.get("OPST_MODEL", "")
    if not pathlib.Path(path).is_file():
        assert not required("model"), "OPST_REQUIRE names the model, but OPST_MODEL is no file"
        pytest.skip("the model file is not there (OPST_MODEL)")
    return path


@pytest.fixture(scope="module")
def model():
    return Model(model_path(), max_context=512)


def test_paths_raise_what_open_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.gguf"):
        Model(tmp_path / "nothing.gguf")
    with pytest.raises(IsADirectoryError, match="folder"):
        Model(tmp_path)
    with pytest.raises(ValueError, match="null byte"):
        Model("model\0.gguf")
    with pytest.raises(FileNotFoundError):
        Model(os.fsencode(tmp_path / "caf\xe9.gguf"))
    if os.geteuid() != 0:
        (tmp_path / "secret.gguf").touch(mode=0)
        with pytest.raises(PermissionError):
            Model(tmp_path / "secret.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ValueError, match="not a regular file"):
        Model(tmp_path / "pipe.gguf")
    (tmp_path / "page.gguf").write_text("<!doctype html><html>")
    with pytest.raises(ValueError, match="HTML page"):
        Model(tmp_path / "page.gguf")


def test_options_are_refused_by_name(model):
    path = model_path()
    for error, options in [
        (ValueError, {"max_context": -5}),
        (TypeError, {"max_context": 2.5}),
        (ValueError, {"max_context": 2**70}),
        (ValueError, {"kv_dtype": "f64"}),
        (ValueError, {"activations": "int4"}),
        (TypeError, {"context": 3}),
    ]:
        with pytest.raises(error, match=next(iter(options))):
            Model(path, **options)
    for error, options in [
        (ValueError, {"seed": -1}),
        (ValueError, {"seed": 2**64}),
        (TypeError, {"seed": 1.5}),
        (TypeError, {"max_tokens": True}),
        (ValueError, {"max_tokens": 0}),
        (ValueError, {"top_k": -1}),
        (ValueError, {"top_p": 0.0, "temperature": 1.0}),
        (ValueError, {"temperature": float("nan")}),
        (TypeError, {"chat": 1}),
        (ValueError, {"system": "x"}),
        (ValueError, {"add_bos": False, "chat": True}),
    ]:
        with pytest.raises(error, match=next(iter(options))):
            model.generate("x", **options)


def test_defaults_say_nothing_and_are_taken(model):
    assert model.generate("x", max_tokens=1, temperature=0, top_k=0, top_p=1, seed=0) == model.generate("x", max_tokens=1)


def test_sampling_is_chosen_as_the_program_chooses_it(model):
    def tokens(**options):
        return model.generate("Once upon a time", max_tokens=12, ignore_end=True, **options).tokens

    def answered(**options):
        return model.conversation(**options).answer("Tell me a story.", max_tokens=12).tokens

    for made in (tokens, answered):
        likeliest = made()
        assert made(temperature=0) == made(temperature=0.0, seed=42, top_k=40, top_p=0.9) == likeliest
        drawn = made(seed=7)
        assert drawn != likeliest and drawn == made(seed=7, temperature=1) != made(seed=8)
        assert made(seed=0) == made(temperature=1.0) == made(top_k=0) == made(top_p=1) != likeliest


def test_what_is_no_prompt_is_refused(model):
    for prompt in (b"abc", bytearray(b"abc"), memoryview(b"abc"), [1.5], [1, True], np.array([1.0, 2.0]), None, 5, ["1"]):
        for call in (model.generate, model.logits, model.perplexity):
            with pytest.raises((TypeError, ValueError), match="prompt|text"):
                call(prompt)
    for tokens in ([-1], [2**31], [2**70], [model.vocab_size]):
        with pytest.raises(ValueError, match="token|holds"):
            model.logits(tokens)
    with pytest.raises(ValueError, match="Model.tokenize: text is .*, must be a text of whole characters"):
        model.tokenize("\ud800")
    with pytest.raises(ValueError, match="shape"):
        model.logits(np.zeros((2, 2), np.int64))
    assert model.logits([]).shape == (0, model.vocab_size)


def test_one_preparation_of_text(model):
    text = "a<|im_end|>b"
    special, plain = model.tokenize(text), model.tokenize(text, parse_special=False)
    assert len(special) == 3 and len(plain) > 5
    for ids, options in ((special, {}), (plain, {"parse_special": False})):
        assert np.array_equal(model.logits(text, **options), model.logits(ids))
        assert model.perplexity(text, **options) == model.perplexity(ids)
        got = model.generate(text, max_tokens=3, **options)
        assert got == model.generate(ids, max_tokens=3) == model.generate(np.array(ids, np.int32), max_tokens=3)


def test_a_call_from_on_text_is_refused(model):
    errors = []

    def call_again(_):
        for call in (lambda: model.generate("x", max_tokens=1), lambda: model.logits("x"), lambda: model.perplexity("x y")):
            with pytest.raises(RuntimeError, match="on_text"):
                call()
            errors.append(1)

    answer = model.generate("The capital of", max_tokens=2, on_text=call_again)
    assert len(errors) >= 3 and answer == model.generate("The capital of", max_tokens=2)


def test_other_threads_wait(model):
    expected = model.generate("The capital of", max_tokens=4)
    got = []
    threads = [threading.Thread(target=lambda: got.append(model.generate("The capital of", max_tokens=4))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected] * 3


class Interrupted(Exception):
    pass


def test_a_signal_ends_a_long_call():
    """Each call would take many times as long as the timer; it ends within one, without an answer."""
    model = Model(model_path(), max_context=4096)
    ids = [100 + i % 900 for i in range(4000)]

    def interrupt(*_):
        raise Interrupted

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        for call in (lambda: model.generate(ids, max_tokens=1), lambda: model.perplexity(ids), lambda: model.logits(ids[:2000])):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert model.generate("The capital of France is", max_tokens=2).text.strip().startswith("Paris")


def test_the_file_is_not_needed_after_loading(tmp_path):
    copy = shutil.copy(model_path(), tmp_path / "copy.gguf")
    model = Model(copy, max_context=256)
    os.truncate(copy, 4096)
    assert "Paris" in model.generate("What is the capital of France?", chat=True, max_tokens=24).text
    assert "Paris" in model.conversation().answer("What is the capital of France?", max_tokens=24).text
    with pytest.raises(ValueError, match="4096"):
        Model(copy)


def test_conversation(model):
    talk = model.conversation(system="You are helpful.")
    pieces = []
    first = talk.answer("What is the capital of France?", max_tokens=24, on_text=pieces.append)
    assert "Paris" in first.text and "".join(pieces) == first.text
    assert first == model.generate("What is the capital of France?", chat=True, system="You are helpful.", max_tokens=24)
    tokens = talk.tokens
    assert "Rome" in talk.answer("And of Italy?", max_tokens=24).text
    assert talk.tokens > tokens
    # The model's own calls and another conversation leave it alone.
    other = model.conversation()
    talk.reset()
    assert talk.tokens == 0

    def call_again(_):
        assert other.answer("Hi", max_tokens=1).tokens
        assert model.logits("x").shape[0] == 1
        with pytest.raises(RuntimeError, match="on_text"):
            talk.answer("x")
        with pytest.raises(RuntimeError, match="on_text"):
            talk.reset()

    assert talk.answer("What is the capital of France?", max_tokens=24, on_text=call_again) == first
    tokens = talk.tokens
    with pytest.raises(ValueError, match="no room"):
        talk.answer("x " * 600)
    assert talk.tokens == tokens
    with pytest.raises(TypeError, match="message"):
        talk.answer(b"x")


def test_rounded_caches_and_activations(model):
    text = "The cat sat on the mat, and the dog lay on the floor beside it."
    exact = model.perplexity(text)
    half = Model(model_path(), max_context=512, kv_dtype="bf16")
    assert half.kv_cache_bytes * 2 == model.kv_cache_bytes
    assert half.perplexity(text) == pytest.approx(exact, rel=0.02) and half.perplexity(text) != exact
    for dtype, far in (("int8", 0.02), ("fp8", 0.1), ("f8_e4m3", 0.1), ("f8_e5m2", 0.2)):
        quantised = Model(model_path(), max_context=512, kv_dtype=dtype)
        assert quantised.kv_cache_bytes < half.kv_cache_bytes
        assert quantised.perplexity(text) == pytest.approx(exact, rel=far) and quantised.perplexity(text) != exact
    rounded = Model(model_path(), max_context=512, activations="int8")
    assert rounded.perplexity(text) == pytest.approx(exact, rel=0.05) and rounded.perplexity(text) != exact


def test_numbers_and_prompts_are_refused_by_the_name_of_the_call(model):
    talk = model.conversation()
    for call, words in ((lambda: model.generate(""), "Model.generate: prompt has no tokens"),
                        (lambda: model.generate([]), "Model.generate: prompt has no tokens"),
                        (lambda: model.generate("x", max_tokens=0), "Model.generate: max_tokens is 0"),
                        (lambda: model.generate("x", top_k=-1), "Model.generate: top_k is -1"),
                        (lambda: model.generate("x", top_p=2), "Model.generate: top_p is 2"),
                        (lambda: model.conversation(top_p=float("nan")), "Model.conversation: top_p is nan"),
                        (lambda: talk.answer("x", max_tokens=-1), "Conversation.answer: max_tokens is -1"),
                        (lambda: model.perplexity([1]), "Model.perplexity: text has 1 tokens")):
        with pytest.raises(ValueError, match=words):
            call()
