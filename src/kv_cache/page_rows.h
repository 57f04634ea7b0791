// Rows of pages in any format, and how rows become rows of another: copied, rounded, quantised or read back.
//
//   const CacheSide keys(cache, PageSide::key);
//   const RowConversion write(isa, {key.dtype}, keys.format());
//   write(num_kv_heads, head_dim, {heads_of(key, token)}, keys.heads(block, row));
#pragma once

#include <cstdint>

#include "kv_cache/pages.h"

namespace opst::kv_cache {

// Rows of numbers, and of their scales and offsets (f32) where they are integers that have such.
struct PageRows {
  Rows numbers;
  Rows scales = {}, offsets = {};
};

// How the numbers of rows are stored. Floats have no groups.
struct RowFormat {
  DType dtype = DType::f32;
  int64_t groups = 0;
  bool has_offsets = false;
  bool operator==(const RowFormat&) const = default;
};

// Keys or values of a checked cache.
class CacheSide {
 public:
  CacheSide(const CacheTensors& cache, PageSide side);

  PageRows heads(int64_t block, int64_t row) const {
    PageRows at = {numbers_.heads(block, row)};
    if (format_.groups > 0) at.scales = scales_.heads(block, row);
    if (format_.has_offsets) at.offsets = offsets_.heads(block, row);
    return at;
  }
  PageRows rows(int64_t block, int64_t row, int64_t head) const {
    PageRows at = {numbers_.rows(block, row, head)};
    if (format_.groups > 0) at.scales = scales_.rows(block, row, head);
    if (format_.has_offsets) at.offsets = offsets_.rows(block, row, head);
    return at;
  }
  // As Pages::even_rows: scales lie in panels of as many rows as the numbers.
  int64_t even_rows(int64_t row, int64_t count) const { return numbers_.even_rows(row, count); }
  // Numbers of a row.
  int64_t dim() const { return numbers_.dim() * numbers_of(format_.dtype); }
  const RowFormat& format() const { return format_; }

 private:
  RowFormat format_;
  Pages numbers_, scales_, offsets_;
};

class RowConversion {
 public:
  // scales_given: those of `to` are read.
  RowConversion(Isa isa, const RowFormat& from, const RowFormat& to, bool scales_given = false);

  // num_rows rows of dim >= 1 numbers. `scratch`: dim floats, unless is_copy() or the floats among the two are rows of
  // f32, bf16 or f16 that do not lie in pairs.
  void operator()(int64_t num_rows, int64_t dim, const PageRows& from, const PageRows& to,
                  float* scratch = nullptr) const;
  // Floats to floats, or equal formats.
  bool is_copy() const { return copies_; }

 private:
  void copy(int64_t num_rows, int64_t dim, const PageRows& from, const PageRows& to) const;
  void quantize(int64_t dim, const Rows& from, DType dtype, const PageRows& to, int64_t row) const;
  void dequantize(int64_t dim, const PageRows& from, int64_t row, const Rows& to, DType dtype) const;

  Isa isa_;
  RowFormat from_, to_;
  bool given_, copies_, direct_;
};

// The numbers that scales and offsets of a cache may be: >= 0 (+inf marks a row that was not finite) and finite; or, `given`
// (ScatterOptions), finite and >= 0, and whole numbers that a zero point may be.
class ScaleCheck {
 public:
  ScaleCheck(const CacheTensors& cache, bool given);

  // Whether those of `count` rows of a block are, from `row` and `head` on.
  bool hold(int64_t block, int64_t row, int64_t count, int64_t head, int64_t num_heads) const;

 private:
  struct List {
    Pages pages;
    bool is_offsets;
  };
  template <class Rule>
  static bool all(const Pages& pages, int64_t block, int64_t row, int64_t count, int64_t head, int64_t num_heads,
                  const Rule& rule);

  List lists_[4];  // offsets behind the scales
  int num_lists_;
  bool given_;
  float least_offset_;
};

// The scales and offsets that a row of one head has, of keys and of values, are such as may be read, or `given`
// (ScatterOptions). A message begins with the tensor's name and says where.
void check_row_scales(ShapeCheck& check, const CacheNames& names, const CacheTensors& cache, int64_t block, int64_t row,
                      int64_t head, bool given);
// Of all slots that are named: given.
void check_slot_scales(ShapeCheck& check, const CacheTensors& cache, const ConstTensor& slot_mapping,
                       const PageSizes& sizes);

}  // namespace opst::kv_cache
