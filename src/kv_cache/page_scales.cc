// The check of a cache in any format: its pages, and the scales and offsets of integers; and of the scales themselves.
#include <algorithm>
#include <span>
#include <utility>

#include "kv_cache/page_rows.h"
#include "kv_cache/pages.h"

namespace opst::kv_cache {

namespace {

// One side's tensors.
struct Side {
  const char *pages_name, *scales_name, *offsets_name;
  DType dtype;
  ConstTensor scales, offsets;
  PageSide side;
  const char *dim_name, *groups_name;
};

void check_scales(ShapeCheck& check, PageLayout layout, const Side& s, CacheUse use) {
  if (!holds_integers(s.dtype)) {
    for (const auto& [name, tensor] : {std::pair{s.scales_name, &s.scales}, {s.offsets_name, &s.offsets}}) {
      check.require(!is_given(*tensor), name, " is given, but ", s.pages_name, " is ", to_string(s.dtype),
                    ", and only i8 and u8 have any");
    }
    return;
  }
  check.require(is_given(s.scales), s.scales_name, " is absent, but ", s.pages_name, " is ", to_string(s.dtype),
                ": integers to be multiplied with scales");
  const PageFormat& format = page_format(layout, DType::f32, s.side);
  for (const auto& [name, tensor] : {std::pair{s.scales_name, &s.scales}, {s.offsets_name, &s.offsets}}) {
    if (!check.ok() || !is_given(*tensor)) continue;
    ShapeCheck::TensorCheck of_tensor =
        use == CacheUse::written ? check.output(name, *tensor) : check.tensor(name, *tensor);
    const char* dims[kMaxRank];
    std::copy_n(format.dims, format.rank, dims);
    dims[3] = s.groups_name;
    of_tensor.dtype({DType::f32}).dims(std::span(dims, static_cast<size_t>(format.rank)));
    if (check.ok()) check_panels(check, name, *tensor, format);
  }
}

// A whole number, the negative of one that a byte (or half of one) holds: from `least` to 1 - least.
bool is_zero_point(float x, float least) {
  return x >= least && x <= 1 - least && x == static_cast<float>(static_cast<int>(x));
}

// After all tensors, since a dimension may be bound by any of them.
void check_groups(ShapeCheck& check, const Side& s) {
  if (!check.ok() || !holds_integers(s.dtype)) return;
  const int64_t groups = check[s.groups_name], dim = check[s.dim_name];
  check.require(groups >= 1 && dim % groups == 0, s.scales_name, " has ", groups, " groups (", s.groups_name,
                "), which do not divide ", s.dim_name, " = ", dim);
  if (!check.ok()) return;
  check.require(dim / groups % numbers_of(s.dtype) == 0, s.scales_name, " has groups of ", dim / groups,
                " numbers, but those of u8 must fill whole bytes");
}

}  // namespace

PageSizes check_cache(ShapeCheck& check, const CacheNames& names, const CacheTensors& cache, CacheUse use) {
  // Names that lambdas may capture, as structured bindings may not be by clang before 16.
  const PageLayout layout = cache.layout;
  const ConstTensor &key = cache.key, &value = cache.value;
  const ConstPageScales& scales = cache.scales;
  const Side sides[2] = {{names.key, names.key_scales, names.key_offsets, key.dtype, scales.key, scales.key_offsets,
                          PageSide::key_scales, "head_dim", names.key_groups},
                         {names.value, names.value_scales, names.value_offsets, value.dtype, scales.value,
                          scales.value_offsets, PageSide::value_scales, "value_head_dim", names.value_groups}};
  const auto check_all_scales = [&] {
    for (const Side& side : sides) check_scales(check, layout, side, use);
    check.require(is_given(scales.key_offsets) == is_given(scales.value_offsets), names.key_offsets, " and ",
                  names.value_offsets, " must both be given or both be absent");
  };
  // Outputs come last: they overlap nothing.
  if (use == CacheUse::written_by_given_scales) check_all_scales();
  const PageSizes sizes =
      check_pages(check, layout, names.key, key, names.value, value, use != CacheUse::read, kPageTypes);
  if (check.ok() && use != CacheUse::written_by_given_scales) check_all_scales();
  for (const Side& side : sides) check_groups(check, side);
  return sizes;
}

ScaleCheck::ScaleCheck(const CacheTensors& cache, bool given)
    : lists_{{Pages(cache.layout, PageSide::key_scales, cache.scales.key), false},
             {Pages(cache.layout, PageSide::value_scales, cache.scales.value), false},
             {Pages(cache.layout, PageSide::key_scales, cache.scales.key_offsets), true},
             {Pages(cache.layout, PageSide::value_scales, cache.scales.value_offsets), true}},
      num_lists_(!holds_integers(cache.key.dtype) ? 0
                 : cache.scales.key_offsets       ? 4
                                                  : 2),
      given_(given),
      least_offset_(cache.key.dtype == DType::i8 ? -127.0f : -7.0f) {}

template <class Rule>
bool ScaleCheck::all(const Pages& pages, int64_t block, int64_t row, int64_t count, int64_t head, int64_t num_heads,
                     const Rule& rule) {
  const int64_t groups = pages.dim();
  bool good = true;
  const auto look_at = [&](const Rows& rows, int64_t n) {
    const auto* const data = static_cast<const float*>(rows.data);
    const bool close = rows.word_stride == 1 && rows.row_stride == groups;  // one list
    const int64_t words = close ? n * groups : groups;
    for (int64_t i = 0; i < (close ? 1 : n); ++i) {
      const float* const numbers = data + i * rows.row_stride;
      for (int64_t j = 0; j < words; ++j) good &= rule(numbers[j * rows.word_stride]);
    }
  };
  // In the order of memory.
  const Rows heads = pages.heads(block, row), tokens = pages.rows(block, row, head);
  if (num_heads > 1 && heads.row_stride < tokens.row_stride) {
    for (int64_t i = 0; i < count; ++i) {
      Rows some = pages.heads(block, row + i);
      some.data = static_cast<float*>(some.data) + head * some.row_stride;
      look_at(some, num_heads);
    }
    return good;
  }
  for (int64_t h = head; h < head + num_heads; ++h) {
    for (int64_t i = 0, n = 0; i < count; i += n) {
      n = pages.even_rows(row + i, count - i);
      look_at(pages.rows(block, row + i, h), n);
    }
  }
  return good;
}

bool ScaleCheck::hold(int64_t block, int64_t row, int64_t count, int64_t head, int64_t num_heads) const {
  const auto all_of = [&](const List& list, const auto& rule) {
    return all(list.pages, block, row, count, head, num_heads, rule);
  };
  for (int i = 0; i < num_lists_; ++i) {
    const List& list = lists_[i];
    const bool good = !given_           ? (list.is_offsets ? all_of(list, [](float x) { return x - x == 0; })
                                                           : all_of(list, [](float x) { return x >= 0; }))
                      : list.is_offsets ? all_of(list, [&](float x) { return is_zero_point(x, least_offset_); })
                                        : all_of(list, [](float x) { return x >= 0 && x - x == 0; });
    if (!good) return false;
  }
  return true;
}

void check_row_scales(ShapeCheck& check, const CacheNames& names, const CacheTensors& cache, int64_t block, int64_t row,
                      int64_t head, bool given) {
  for (const bool keys : {true, false}) {
    const DType dtype = cache.key.dtype;
    const ConstTensor &scales = keys ? cache.scales.key : cache.scales.value,
                      &offsets = keys ? cache.scales.key_offsets : cache.scales.value_offsets;
    const PageSide side = keys ? PageSide::key_scales : PageSide::value_scales;
    const auto each = [&](const char* name, const ConstTensor& tensor, const auto& rule) {
      const Pages pages(cache.layout, side, tensor);
      const Rows at = pages.rows(block, row, head);
      for (int64_t group = 0; group < pages.dim() && check.ok(); ++group) {
        const float x = static_cast<const float*>(at.data)[group * at.word_stride];
        const char* const broken = rule(x);
        check.require(broken == nullptr, name, " of block ", block, ", row ", row, ", head ", head, ", group ", group,
                      " is ", x, ", but must be ", broken == nullptr ? "" : broken);
      }
    };
    each(keys ? names.key_scales : names.value_scales, scales, [&](float x) -> const char* {
      if (!(x >= 0)) return ">= 0";
      return given && x - x != 0 ? "finite" : nullptr;
    });
    if (!offsets) continue;
    each(keys ? names.key_offsets : names.value_offsets, offsets, [&](float x) -> const char* {
      if (!given) return x - x == 0 ? nullptr : "finite";
      if (is_zero_point(x, dtype == DType::i8 ? -127.0f : -7.0f)) return nullptr;
      return dtype == DType::i8 ? "a whole number in -127..128" : "a whole number in -7..8";
    });
  }
}

void check_slot_scales(ShapeCheck& check, const CacheTensors& cache, const ConstTensor& slot_mapping,
                       const PageSizes& sizes) {
  const ScaleCheck scales(cache, true);
  for (int64_t t = 0; t < distinct(slot_mapping, 0) && check.ok(); ++t) {
    const int64_t slot = index_at(slot_mapping, t);
    if (slot < 0 || scales.hold(slot / sizes.block_size, slot % sizes.block_size, 1, 0, sizes.num_kv_heads)) continue;
    for (int64_t head = 0; head < sizes.num_kv_heads && check.ok(); ++head) {
      check_row_scales(check, kCacheNames, cache, slot / sizes.block_size, slot % sizes.block_size, head, true);
    }
  }
}

}  // namespace opst::kv_cache
