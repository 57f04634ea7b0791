"""The program on model files that the Python package gguf writes, against that package's dequantisation and NumPy."""

import json
import os
import subprocess

import gguf
import numpy as np
import pytest

PROGRAM = os.environ.get("OPST_PROGRAM", "")
pytestmark = pytest.mark.skipif(not os.path.exists(PROGRAM), reason="OPST_PROGRAM names no file: build first")

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 2, 8, 2, 32, 256, 64
WIDTH = HEADS * HEAD_DIM
EPS, THETA = 1e-5, 10000.0
Q = gguf.GGMLQuantizationType


def byte_alphabet():
    """The character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{byte: chr(byte) for byte in printable}, **{byte: chr(0x100 + i) for i, byte in enumerate(others)}}


TOKENS = ["<|end|>"] + [byte_alphabet()[byte] for byte in range(256)] + ["aa"]


# Offset of the scale d; spread of the values where d = 1; factor of the minimums (at offset 2) where d = 1, for a mean of about 0.
SUPER_BLOCKS = {Q.Q4_K: (0, 255, 7.5), Q.Q5_K: (0, 520, 15.5), Q.Q6_K: (208, 1369, None)}


def random_super_blocks(rng, shape, kind):
    """Rows of random bits with scales of the right size, since the package cannot quantise to these types."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    offset, spread, minimum = SUPER_BLOCKS[kind]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    d = 2 / np.sqrt(shape[1]) / spread * rng.uniform(0.5, 1.5, blocks.shape[:2])
    blocks[..., offset : offset + 2] = d.astype("<f2")[..., None].view(np.uint8)
    if minimum is not None:
        blocks[..., 2:4] = (d * minimum).astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def matrices(rng):
    """Name -> (quantised rows, type, the float32 matrix they stand for)."""
    types = [Q.Q4_1, Q.Q8_0, Q.F16, Q.F32, Q.Q4_0, Q.Q5_0, Q.Q5_1, Q.Q4_K, Q.Q5_K, Q.Q6_K]
    shapes = {"token_embd": (len(TOKENS), WIDTH)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_q": (WIDTH, WIDTH),
            f"blk.{layer}.attn_k": (KV_HEADS * HEAD_DIM, WIDTH),
            f"blk.{layer}.attn_v": (KV_HEADS * HEAD_DIM, WIDTH),
            f"blk.{layer}.attn_output": (WIDTH, WIDTH),
            f"blk.{layer}.ffn_gate": (FFN, WIDTH),
            f"blk.{layer}.ffn_up": (FFN, WIDTH),
            f"blk.{layer}.ffn_down": (WIDTH, FFN),
        }
    made = {}
    for i, (name, shape) in enumerate(shapes.items()):
        kind = types[i % len(types)]
        if kind in SUPER_BLOCKS:
            rows = random_super_blocks(rng, shape, kind)
        else:
            values = (rng.standard_normal(shape) * 2 / np.sqrt(shape[1])).astype(np.float32)
            rows = gguf.quants.quantize(values, kind)
        made[name + ".weight"] = (rows, kind, gguf.quants.dequantize(rows, kind))
    return made


def write_model(path, weights, norms, endianess=gguf.GGUFEndian.LITTLE):
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] + [1] * 257)
    writer.add_token_merges(["a a"])
    writer.add_eos_token_id(0)
    # Values that no model needs, of every other kind.
    writer.add_array("test.nested", [[1, 2], [3]])
    writer.add_array("test.floats", [1.5, -2.5])
    writer.add_int64("test.i64", -(1 << 40))
    writer.add_uint8("test.u8", 255)
    writer.add_int16("test.i16", -3)
    writer.add_float64("test.f64", 1e300)
    writer.add_bool("test.bool", True)
    for name, (rows, kind, _) in weights.items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    for name, values in norms.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_norms(rng):
    names = ["output_norm"] + [f"blk.{i}.{kind}_norm" for i in range(LAYERS) for kind in ("attn", "ffn")]
    return {f"{name}.weight": rng.uniform(0.5, 1.5, WIDTH).astype(np.float32) for name in names}


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)


def logits(weights, norms, tokens):
    """Logits after each token, in float64."""
    w = {name: values.astype(np.float64) for name, (_, _, values) in weights.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * norms[name + ".weight"]

    def turn(x):  # [tokens, heads, head_dim], adjacent pairs
        angle = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    h = w["token_embd.weight"][tokens]
    n = len(tokens)
    hidden = np.triu(np.full((n, n), -np.inf), 1)
    for layer in range(LAYERS):
        blk = f"blk.{layer}."
        x = norm(h, blk + "attn_norm")
        q = turn((x @ w[blk + "attn_q.weight"].T).reshape(n, HEADS, HEAD_DIM))
        k = turn((x @ w[blk + "attn_k.weight"].T).reshape(n, KV_HEADS, HEAD_DIM)).repeat(HEADS // KV_HEADS, 1)
        v = (x @ w[blk + "attn_v.weight"].T).reshape(n, KV_HEADS, HEAD_DIM).repeat(HEADS // KV_HEADS, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(HEAD_DIM) + hidden
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        h = h + np.einsum("hqk,khd->qhd", p, v).reshape(n, WIDTH) @ w[blk + "attn_output.weight"].T
        x = norm(h, blk + "ffn_norm")
        gate = x @ w[blk + "ffn_gate.weight"].T
        h = h + (gate / (1 + np.exp(-gate)) * (x @ w[blk + "ffn_up.weight"].T)) @ w[blk + "ffn_down.weight"].T
    return norm(h, "output_norm") @ w["token_embd.weight"].T


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_greedy_tokens_equal_numpy(tmp_path, seed):
    rng = np.random.default_rng(seed)
    weights, norms = matrices(rng), make_norms(rng)
    path = str(tmp_path / "model.gguf")
    write_model(path, weights, norms)
    prompt = "Any text will do."
    result = run("generate", "-m", path, "-p", prompt, "-n", "24", "--ignore-eos", "--json")
    assert result.returncode == 0, result.stderr
    got = json.loads(result.stdout)["tokens"]
    tokens = [1 + byte for byte in prompt.encode()]
    reference = logits(weights, norms, tokens + got)
    for step, token in enumerate(got):
        row = reference[len(tokens) - 1 + step]
        # The likeliest token, or one that float32 cannot tell from it.
        assert row[token] >= row.max() - 1e-3, step


def test_big_endian_is_refused_by_name(tmp_path):
    rng = np.random.default_rng(5)
    path = str(tmp_path / "model.gguf")
    write_model(path, matrices(rng), make_norms(rng), endianess=gguf.GGUFEndian.BIG)
    result = run("generate", "-m", path, "-p", "x")
    assert (result.returncode, result.stdout) == (1, "")
    assert "big-endian" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("kind", list(Q), ids=lambda kind: kind.name)
def test_every_tensor_type_has_the_packages_size(tmp_path, kind):
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    size = 3 * block_bytes
    writer.add_tensor_info("t", (3 * block_bytes,), np.dtype(np.uint8), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = path.read_bytes()
    header += bytes(-len(header) % 32)
    # With all of its bytes the tensor is accepted, and the missing metadata is the next complaint; without the last it is not.
    path.write_bytes(header + bytes(size))
    assert "key 'llama.block_count' is missing" in run("tokenize", "-m", str(path), "-p", "x").stderr
    path.write_bytes(header + bytes(size - 1))
    assert f"tensor 't': {size} bytes at offset 0" in run("tokenize", "-m", str(path), "-p", "x").stderr
