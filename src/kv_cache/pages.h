// The pages of a cache, whatever their layout: their check, addresses of rows, and slots.
//
//   ShapeCheck check("scatter_pa_kv_cache");
//   const PageSizes sizes = check_pages(check, layout, "key_cache", key_cache, "value_cache", value_cache);
//   if (!check.ok()) return check.status();
//   const Pages keys(layout, PageSide::key, key_cache);
//   keys.heads(block, row)       // num_kv_heads rows: the heads of one token
//   keys.rows(block, row, head)  // even_rows(row, count) rows: the tokens of one head
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "core/elements.h"
#include "core/shape_check.h"
#include "kv_cache/kernels.h"
#include "machine/thread_pool.h"
#include "opst/kv_cache.h"

namespace opst::kv_cache {

inline constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16};
inline constexpr std::initializer_list<DType> kIntegers = {DType::i32, DType::i64};
inline constexpr std::initializer_list<DType> kPageTypes = {DType::f32, DType::bf16,    DType::f16,    DType::i8,
                                                            DType::u8,  DType::f8_e4m3, DType::f8_e5m2};

// Whether pages hold integers, which have scales; how many numbers an element of them is.
inline bool holds_integers(DType dtype) { return dtype == DType::i8 || dtype == DType::u8; }
inline int64_t numbers_of(DType dtype) { return dtype == DType::u8 ? 2 : 1; }

// Checks a cache of floats, a pair of inputs or outputs: a layout that can hold it, or unsupported; dtypes, ranks and
// sizes that agree, strides that the layout allows. Binds the names of PageSizes. The result means nothing where the
// check fails.
PageSizes check_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const ConstTensor& key,
                      const char* value_name, const ConstTensor& value, bool are_outputs = false,
                      std::initializer_list<DType> dtypes = kFloats);

// The dimensions from contiguous_from on lie as the shape says, and hold whole rows.
void check_panels(ShapeCheck& check, const char* name, const ConstTensor& t, const PageFormat& format);

// A cache in any format, and what messages call its tensors.
struct CacheNames {
  const char *key, *value, *key_scales, *value_scales, *key_offsets, *value_offsets;
  const char *key_groups = "key_groups", *value_groups = "value_groups";  // sizes
};
inline constexpr CacheNames kCacheNames = {"key_cache",    "value_cache", "key_scales",
                                           "value_scales", "key_offsets", "value_offsets"};
struct CacheTensors {
  PageLayout layout;
  ConstTensor key, value;
  ConstPageScales scales;
};
enum class CacheUse { read, written, written_by_given_scales };
// The same of a cache in any format: scales where there must be some, of the cache's sizes, with groups that divide a
// row. Binds the names of groups where there are scales.
PageSizes check_cache(ShapeCheck& check, const CacheNames& names, const CacheTensors& cache, CacheUse use);

inline std::span<const char* const> dims_of(const PageFormat& format) {
  return {format.dims, static_cast<size_t>(format.rank)};
}

// Addresses in one tensor of a checked cache; written to only where the constructor was given a Tensor.
class Pages {
 public:
  Pages(PageLayout layout, PageSide side, const ConstTensor& tensor);

  Rows heads(int64_t block, int64_t row) const { return {at(block, row, 0), head_stride_, word_stride_, step_}; }
  Rows rows(int64_t block, int64_t row, int64_t head) const {
    return {at(block, row, head), group_ == 1 ? group_stride_ : row_stride_, word_stride_, step_};
  }
  // The rows from `row` on that lie at a fixed distance, at most `count`.
  int64_t even_rows(int64_t row, int64_t count) const {
    return group_ == 1 ? count : std::min(count, group_ - row % group_);
  }
  // Elements of a row.
  int64_t dim() const { return dim_; }

 private:
  char* at(int64_t block, int64_t row, int64_t head) const {
    return data_ + element_bytes_ * (block * block_stride_ + head * head_stride_ + row / group_ * group_stride_ +
                                     row % group_ * row_stride_);
  }

  char* data_;
  int64_t element_bytes_, dim_, block_stride_, head_stride_;
  // group_ rows lie row_stride_ apart: a panel of keys, a pair of values (PageFormat::panel_rows).
  int64_t group_, group_stride_, row_stride_;
  int64_t word_stride_, step_;
};

// The heads of a token in a checked tensor [tokens, heads, dim] with normal_strides, and its tokens from `token` on of
// one head. Written to only where the tensor is an output.
template <class AnyTensor>
Rows heads_of(const AnyTensor& tensor, int64_t token, int64_t head = 0) {
  const int64_t offset = (token * tensor.strides[0] + head * tensor.strides[1]) * size_bytes(tensor.dtype);
  char* const data = static_cast<char*>(const_cast<void*>(tensor.data)) + offset;
  return {data, tensor.strides[1], tensor.strides[2], 1};
}
template <class AnyTensor>
Rows tokens_of(const AnyTensor& tensor, int64_t token, int64_t head) {
  return {heads_of(tensor, token, head).data, tensor.strides[0], tensor.strides[2], 1};
}

// The kernel that copies rows between two dtypes of floats, or of equal bytes.
using CopyRowsKernel = void (*)(const CopyRows& rows);
CopyRowsKernel copy_rows_kernel(Isa isa, DType from, DType to);

// Every slot is -1 or one of the cache's; called after the shapes' check.
void check_slots(ShapeCheck& check, const ConstTensor& slot_mapping, const PageSizes& sizes);

// Slots are dealt out in runs, and a task writes its slots in token order: so of several tokens with one slot the last
// wins, whoever runs the tasks. Each task looks at every slot, so tasks are few.
struct SlotTasks {
  static constexpr int64_t kRunSlots = 16;
  static constexpr int64_t kMaxTasks = 16;
  int64_t block_size, count;

  // `elements`: of all tokens, >= 0.
  SlotTasks(const PageSizes& sizes, int64_t elements)
      : block_size(sizes.block_size), count(std::clamp<int64_t>(elements / kTaskElements, 1, kMaxTasks)) {}

  // write(token, block, row) for the slots of a task.
  template <class Write>
  void run(int64_t task, const ConstTensor& slot_mapping, const Write& write) const {
    const int64_t tokens = slot_mapping.shape[0];
    // Where all tokens have one slot (stride 0), the last wins.
    for (int64_t t = tokens - distinct(slot_mapping, 0); t < tokens; ++t) {
      const int64_t slot = index_at(slot_mapping, t);
      if (slot >= 0 && slot / kRunSlots % count == task) write(t, slot / block_size, slot % block_size);
    }
  }
};

}  // namespace opst::kv_cache
