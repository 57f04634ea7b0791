#!/usr/bin/env python3
"""Makes a mixture of experts of a dense GGUF model of the Llama family, which computes what the dense model computes.

    make_mixture.py DENSE OUT --kind copies --experts 4 --used 2    every expert is the whole feed-forward, the router random
    make_mixture.py DENSE OUT --kind slices --experts 8             every expert is a slice of it, all are used with weight 1
    make_mixture.py DENSE OUT --kind shared --experts 8             the same, but the first slice is a shared expert

copies: the weights of a token's experts have the sum 1, so that any choice of them gives the dense result. slices: the
result is the sum of the slices', which are different matrices: a row that meets the wrong expert is seen. Blocks are
copied as they are, nothing is quantised again: rows of gate and up are cut between rows, columns of down between blocks.
"""

import argparse
import sys

import gguf
import numpy as np

FFN = ("gate", "up", "down")


def copy_metadata(reader, writer, changed):
    """All keys but those that `changed` sets."""
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in changed:
            continue
        kind = field.types[0]
        writer.add_key_value(key, field.contents(), kind, sub_type=field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)


def cut(tensor, count, columns):
    """Its blocks in `count` slices of rows, or of columns: [count, rows, bytes of a row], or elements of one."""
    rows, row = tensor.data.shape
    if not columns:
        if rows % count:
            sys.exit(f"make_mixture.py: {tensor.name} has {rows} rows, which are not {count} equal slices")
        return tensor.data.reshape(count, rows // count, row)
    width, (block, _) = int(tensor.shape[0]), gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    if width % (count * block):
        sys.exit(f"make_mixture.py: {tensor.name} has {width} columns in blocks of {block}, which are not {count} equal slices")
    return np.ascontiguousarray(tensor.data.reshape(rows, count, row // count).transpose(1, 0, 2))


def experts_of(tensor, what, options):
    """(name's suffix, data) of each tensor that takes the place of ffn_gate, ffn_up or ffn_down"""
    if options.kind == "copies":
        return [("exps", np.repeat(tensor.data[None], options.experts, axis=0))]
    slices = cut(tensor, options.experts, columns=what == "down")
    if options.kind == "slices":
        return [("exps", slices)]
    return [("shexp", slices[0]), ("exps", slices[1:])]


def make(options):
    reader = gguf.GGUFReader(options.dense)
    arch = reader.get_field("general.architecture").contents()
    if arch != "llama":
        sys.exit(f"make_mixture.py: the architecture is {arch}, but only llama is supported")
    number = lambda key: int(reader.get_field(f"{arch}.{key}").contents())  # noqa: E731
    size = number("feed_forward_length") // (1 if options.kind == "copies" else options.experts)
    routed = options.experts - (options.kind == "shared")
    used = options.used if options.kind == "copies" else routed
    if not 1 <= used <= routed:
        sys.exit(f"make_mixture.py: {used} of {routed} experts cannot be used")
    # Equal scores give each of `routed` experts the weight 1 / routed: the scale makes it 1.
    scale = 1.0 if options.kind == "copies" else float(routed)
    changed = {"feed_forward_length": size, "expert_feed_forward_length": size, "expert_count": routed, "expert_used_count": used}
    if options.kind == "shared":
        changed["expert_shared_feed_forward_length"] = size

    writer = gguf.GGUFWriter(options.out, arch)
    copy_metadata(reader, writer, {f"{arch}.{key}" for key in changed})
    for key, value in changed.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_bool(f"{arch}.expert_weights_norm", True)
    writer.add_float32(f"{arch}.expert_weights_scale", scale)
    rng = np.random.default_rng(options.seed)
    router = np.zeros((routed, number("embedding_length")), np.float32)
    for tensor in reader.tensors:
        layer, _, name = tensor.name.rpartition(".ffn_")
        what = name.removesuffix(".weight")
        if what not in FFN:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        for suffix, data in experts_of(tensor, what, options):
            writer.add_tensor(f"{layer}.ffn_{what}_{suffix}.weight", data, raw_dtype=tensor.tensor_type)
        if what == "gate":
            random = rng.standard_normal(router.shape, dtype=np.float32) if options.kind == "copies" else router
            writer.add_tensor(f"{layer}.ffn_gate_inp.weight", random)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", help="a GGUF file of a dense model")
    parser.add_argument("out", help="the file to write")
    parser.add_argument("--kind", choices=("copies", "slices", "shared"), required=True)
    parser.add_argument("--experts", type=int, default=8, help="copies or slices; of shared, one is the shared expert (default 8)")
    parser.add_argument("--used", type=int, default=2, help="copies: how many a token uses (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="copies: of the random router (default 0)")
    make(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
