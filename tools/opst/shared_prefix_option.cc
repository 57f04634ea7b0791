#include "shared_prefix_option.h"

#include <string>

#include "command.h"

namespace opst::tools {

namespace {

// What a call finds in the table; its tensors need no memory for that.
SharedPrefixSizes shared_prefix_of(const AttentionProblem& p) {
  const PageTable table(p, p.options.shared_prefix);
  alignas(64) static const char nothing[64] = {};
  AttentionInputs in;
  in.query = ConstTensor::contiguous(p.query_dtype, {p.batch, p.num_heads, p.query_len, p.head_dim}, nothing);
  in.key =
      ConstTensor::contiguous(p.kv_dtype, {table.num_blocks, PageTable::kKeys, p.num_kv_heads, p.head_dim}, nothing);
  in.value = ConstTensor::contiguous(p.kv_dtype, {table.num_blocks, PageTable::kKeys, p.num_kv_heads, p.value_head_dim},
                                     nothing);
  in.block_table = ConstTensor::contiguous(DType::i64, {p.batch, table.columns}, table.blocks.data());
  in.kv_lengths = ConstTensor::contiguous(DType::i64, {p.batch}, table.lengths.data());
  return value_or_fail(attention_problem(in, p.options)).shared_prefix;
}

}  // namespace

void share_prefix(int64_t keys, AttentionProblem& p) {
  if (p.batch < 2) usage_error("--shared-prefix takes --batch 2 or more");
  if (keys > p.kv_len) {
    usage_error("--shared-prefix: " + std::to_string(keys) + " is more than the " + std::to_string(p.kv_len) +
                " keys of --seq");
  }
  p.paged = true, p.block_size = PageTable::kKeys;
  p.options.shared_prefix = keys;
  p.shared_prefix = shared_prefix_of(p);
}

}  // namespace opst::tools
