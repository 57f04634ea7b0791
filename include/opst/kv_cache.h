// A paged cache of keys and values: a pool of blocks, each with room for block_size tokens.
//
// Where token number p of a sequence lives is the caller's affair, told by a slot: slot = block * block_size + row.
//
//   float k[blocks * 16 * heads * dim] ...
//   Tensor key_cache = Tensor::contiguous(DType::f32, {blocks, 16, heads, dim}, k);
//   Status status = scatter_pa_kv_cache(context, key, value, slot_mapping, key_cache, value_cache);
#pragma once

#include <cstdint>

#include "opst/context.h"
#include "opst/status.h"
#include "opst/tensor.h"

namespace opst {

// How the rows of a block lie in memory.
enum class PageLayout : uint8_t {
  norm,  // [num_blocks, block_size, num_kv_heads, head_dim], a row of each token and head, as the device has it
};
const char* to_string(PageLayout layout);

// Whether blocks of this size and dtype can be held in a layout: ok, or unsupported with the reason. `norm` holds f32,
// bf16 and f16 in blocks of any size >= 1.
Status supports(PageLayout layout, DType dtype, int64_t block_size);

struct ScatterOptions {
  PageLayout layout = PageLayout::norm;
};

// Writes the keys and values of new tokens into the cache (reshape_and_cache):
//   key_cache[slot / block_size, slot % block_size, h, :] = key[t, h, :]   with slot = slot_mapping[t], value likewise
//   key           [tokens, num_kv_heads, head_dim]                         f32, bf16 or f16
//   value         [tokens, num_kv_heads, value_head_dim]                   the dtype of key
//   slot_mapping  [tokens] i64; -1 skips the token
//   key_cache     [num_blocks, block_size, num_kv_heads, head_dim]         f32, bf16 or f16: rounded once, to nearest
//   even value_cache   [num_blocks, block_size, num_kv_heads, value_head_dim]   the dtype of key_cache
// Any strides; the caches overlap neither each other nor the inputs. Of several tokens with one slot the last wins.
// Cache rows that no slot names keep their bytes. Errors: invalid_argument for shapes and dtypes that disagree and for
// a slot outside the cache (the message names token, slot and capacity), unsupported for a layout that cannot hold the
// blocks; nothing has been written then.
Status scatter_pa_kv_cache(Context& context, const ConstTensor& key, const ConstTensor& value,
                           const ConstTensor& slot_mapping, const Tensor& key_cache, const Tensor& value_cache,
                           const ScatterOptions& options = {});

}  // namespace opst
