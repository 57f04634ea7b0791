// How the rows of a paged cache lie in memory (kv_cache.h has what is done with them).
//
// Plain data, for any thread. Kernel code includes this file, so it holds no inline function (dtype.h says why).
#pragma once

#include <cstdint>

#include "opst/dtype.h"

namespace opst {

// norm: a row of each token and head, as the device has it; any strides. f32, bf16, f16, i8, u8, f8_e4m3, f8_e5m2.
//
// panel32: pages that attention multiplies without packing. Keys are transposed in panels of 32 rows; bf16 lies in
// pairs, of two consecutive elements of a key, or of the same element of two consecutive rows of values. block_size is
// a multiple of 32; head_dim is even for bf16. The dimensions after num_kv_heads are contiguous, as the shape says (the
// stride of a dimension of size 1 is ignored); the strides of num_blocks and num_kv_heads are free.
//
// An element of u8 pages holds two numbers of four bits, of a row's neighbours: head_dim and value_head_dim are even,
// and stand halved below. Scales and offsets of integers (KvFormat in kv_cache.h) lie in f32 pages of the same layout,
// whose rows have as many elements as a row has groups.
//
//                        shape                                                                 panel_rows  step
//   norm          key    [num_blocks, block_size, num_kv_heads, head_dim]                      1           1
//                 value  [num_blocks, block_size, num_kv_heads, value_head_dim]                1           1
//   panel32 f32   key    [num_blocks, num_kv_heads, block_size / 32, head_dim, 32]             32          1
//                 value  [num_blocks, num_kv_heads, block_size, value_head_dim]                1           1
//           f16, i8, u8, f8   as f32
//           bf16  key    [num_blocks, num_kv_heads, block_size / 32, head_dim / 2, 64]         32          2
//                 value  [num_blocks, num_kv_heads, block_size / 2, 2 * value_head_dim]        2           1
// A tensor has at most five dimensions: 64 = 32 rows x 2 elements, 2 * value_head_dim = value_head_dim x 2 rows. All
// layouts hold the same number of elements.
enum class PageLayout : uint8_t { norm, panel32 };
const char* to_string(PageLayout layout);

// A panel of panel32 keys.
inline constexpr int64_t kPanelRows = 32;

// The tensors of a cache. Scales stand for offsets too.
enum class PageSide : uint8_t { key, value, key_scales, value_scales };

// The table above, for one tensor. panel_rows rows lie interleaved, a word of each in turn; a word is `step` elements
// of a row.
struct PageFormat {
  int rank;
  const char* dims[5];      // names of the dimensions
  int heads_dim, rows_dim;  // the dimension of num_kv_heads, and that which counts panels of rows
  int contiguous_from;      // the first dimension whose stride is not free; rank: all are
  int64_t panel_rows, step;
  int64_t numbers = 1;  // in an element: 2 in u8

  // Of a tensor with this shape: rows of a block; elements of a row, and the numbers in them (head_dim, value_head_dim
  // or groups).
  int64_t block_size(const int64_t* shape) const;
  int64_t row_elements(const int64_t* shape) const;
  int64_t row_numbers(const int64_t* shape) const;
  // Where element d of row `row` of panel32 lies, in elements from the start of its block and head:
  //   row / panel_rows * panel_rows * row_elements + d / step * panel_rows * step + row % panel_rows * step + d % step
  // (In norm the tensor's strides say it.)
  int64_t offset(int64_t row, int64_t d, int64_t row_elements) const;
};
// Of any arguments: a dtype that panel32 cannot hold has the format of f32, a layout that is no enumerator has norm's.
// The dtype says nothing of scales, which are f32.
const PageFormat& page_format(PageLayout layout, DType dtype, PageSide side);

// The sizes of a cache, whatever its layout.
struct PageSizes {
  int64_t num_blocks = 0, block_size = 0, num_kv_heads = 0, head_dim = 0, value_head_dim = 0;
};

}  // namespace opst
