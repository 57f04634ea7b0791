// The pages of a cache, whatever their layout: check, and addresses of rows.
//
//   ShapeCheck check("scatter_pa_kv_cache");
//   const PageSizes sizes = check_pages(check, layout, "key_cache", key_cache, "value_cache", value_cache);
//   if (!check.ok()) return check.status();
//   const Pages keys(layout, PageSide::key, key_cache);
//   keys.at(block, row)      // the row's first element in head 0; the other heads and elements as heads_view() says
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/elements.h"
#include "core/shape_check.h"
#include "kv_cache/kernels.h"
#include "opst/kv_cache.h"

namespace opst::kv_cache {

// Checks a cache as a pair of inputs or (check_output_pages) outputs: a layout that can hold it, or unsupported; dtypes,
// ranks and sizes that agree, strides that the layout allows. Binds the names of PageSizes. The result means nothing
// where the check fails.
PageSizes check_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const ConstTensor& key,
                      const char* value_name, const ConstTensor& value);
PageSizes check_output_pages(ShapeCheck& check, PageLayout layout, const char* key_name, const Tensor& key,
                             const char* value_name, const Tensor& value);

inline std::span<const char* const> dims_of(const PageFormat& format) {
  return {format.dims, static_cast<size_t>(format.rank)};
}

// Addresses in one tensor of a checked cache.
class Pages {
 public:
  Pages(PageLayout layout, PageSide side, const ConstTensor& tensor);

  // Element 0 of a row, head 0.
  const char* at(int64_t block, int64_t row) const {
    return data_ + element_bytes_ * (block * block_stride_ + row / group_ * group_stride_ + row % group_ * row_stride_);
  }
  // Only where the constructor was given a Tensor, whose memory may be written.
  char* writable_at(int64_t block, int64_t row) const { return const_cast<char*>(at(block, row)); }
  // The heads of a row, seen as rows.
  const RowsView& heads_view() const { return view_; }
  int64_t head_offset_bytes(int64_t head) const { return element_bytes_ * head * view_.row_stride; }
  // The rows of a head that lie at a fixed distance: even_rows(row, count) of them from `row` on, at most `count`.
  RowsView rows_view() const {
    return {
        .row_stride = group_ == 1 ? group_stride_ : row_stride_, .word_stride = view_.word_stride, .step = view_.step};
  }
  int64_t even_rows(int64_t row, int64_t count) const {
    return group_ == 1 || group_ - row % group_ > count ? count : group_ - row % group_;
  }
  int64_t dim() const { return dim_; }
  DType dtype() const { return dtype_; }

 private:
  const char* data_;
  DType dtype_;
  int64_t element_bytes_, dim_, block_stride_;
  // group_ rows lie row_stride_ apart: a panel of keys, a pair of values (PageFormat::panel_rows).
  int64_t group_, group_stride_, row_stride_;
  RowsView view_;
};

// The kernel that copies rows between two dtypes.
using CopyRowsKernel = void (*)(const CopyRows& rows);
CopyRowsKernel copy_rows_kernel(Isa isa, DType from, DType to);

}  // namespace opst::kv_cache
