// --pages, --kv-dtype and --shared-prefix of `opst bench|check|plan attention`: keys and values in the pages of a cache.
#pragma once

#include <string>
#include <vector>

#include "opst/attention.h"
#include "opst/context.h"
#include "opst/kv_cache.h"

namespace opst::tools {

// Names of --kv-dtype that pages alone hold.
inline constexpr const char* kByteFormats[] = {"f8_e4m3", "f8_e5m2", "int8", "int8_offset", "int4", "int4_offset"};
bool is_byte_format(const std::string& name);

// What a plan needs to know of a problem whose keys lie in pages of a layout ("norm", "panel32"). A CommandError where
// the layout cannot hold them.
void set_pages(const std::string& layout, const std::string& kv_format, AttentionProblem& problem);

// Says that all sequences hold their first `keys` keys in the same pages, for a problem that set_pages() has seen; a
// CommandError where that does not go with --batch or --seq.
void share_prefix(int64_t keys, AttentionProblem& problem);

// The pages of a problem's sequences: a block behind the other from the end of the pool, those of the shared prefix (the
// last of them whole) first, then sequence after sequence its own.
struct BlockTable {
  // `lengths`: keys of each sequence; none: kv_len of each.
  explicit BlockTable(const AttentionProblem& problem, std::vector<int64_t> lengths = {});

  int64_t columns, num_blocks;
  std::vector<int64_t> blocks, lengths;  // [batch][columns], [batch]

  // The tensors of a call; they view this table.
  void enter(AttentionInputs& inputs) const;
};

// A cache for a problem. Sequences that share a prefix hold the last sequence's keys there.
class PagedKeys {
 public:
  PagedKeys(const AttentionProblem& problem, const std::string& kv_format, const std::vector<int64_t>& lengths);

  // key [batch, num_kv_heads, kv_len, head_dim] and value, or [tokens, num_kv_heads, head_dim] of sequences one after the
  // other, -> pages.
  void store(const ConstTensor& key, const ConstTensor& value);
  // What the pages hold.
  void read(const Tensor& key, const Tensor& value) const { read(key_, value_, key, value); }
  // The same of other pages of this table: gradients of floats.
  void read(const ConstTensor& key_pages, const ConstTensor& value_pages, const Tensor& key, const Tensor& value) const;
  // Takes the place of dense keys and values.
  void enter(AttentionInputs& inputs) const;

 private:
  Tensor make(Tensor shape);
  std::vector<int64_t> slots(int64_t batch) const;
  // Sequence b of what store() takes: [length, heads, dim].
  template <class TensorType>
  TensorType tokens(const TensorType& t, int64_t b) const;

  AttentionProblem problem_;
  std::vector<Buffer> buffers_;
  Tensor key_, value_;
  PageScales scales_;
  BlockTable table_;
};

}  // namespace opst::tools
