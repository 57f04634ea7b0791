// gather_pa_kv_cache: check every position that will be read, then deal out the tokens to tasks.
#include <algorithm>
#include <optional>
#include <string>

#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "kv_cache/pages.h"
#include "machine/context_impl.h"
#include "opst/kv_cache.h"

namespace opst {
namespace {

using kv_cache::CopyRowsKernel;
using kv_cache::Pages;

constexpr int64_t kTaskElements = int64_t{1} << 14;
constexpr int64_t kMaxTasks = 64;  // each walks over the lengths to find its tokens

// The element that a zero-filled row reads, with strides of 0.
constexpr float kZero = 0;

struct Sequences {
  const ConstTensor& block_table;
  const ConstTensor& kv_lengths;
  const GatherOptions& options;
  int64_t batch, num_blocks, block_size;

  // Sequences that may differ: where lengths, offsets and rows of the table all repeat (stride 0), the first sequence
  // stands for all.
  int64_t distinct_batch() const {
    const auto repeats = [](const ConstTensor& t) { return t.data == nullptr || distinct(t, 0) < t.shape[0]; };
    const bool alike = repeats(kv_lengths) && repeats(options.seq_offset) && repeats(block_table);
    return alike ? std::min<int64_t>(batch, 1) : batch;
  }
  int64_t length(int64_t b) const {
    return options.cumulative_lengths ? index_at(kv_lengths, b + 1) - index_at(kv_lengths, b) : index_at(kv_lengths, b);
  }
  int64_t offset(int64_t b) const { return options.seq_offset.data == nullptr ? 0 : index_at(options.seq_offset, b); }
  bool has_column(int64_t position) const { return position / block_size < block_table.shape[1]; }
  // Where has_column.
  int64_t block(int64_t b, int64_t position) const {
    return index_at(block_table.selected(0, b), position / block_size);
  }
  bool in_cache(int64_t block) const { return block >= 0 && block < num_blocks; }
};

// The sum of the lengths; nullopt after a failure. Each cumulative length is compared with the one before, not
// subtracted, so that no difference overflows.
std::optional<int64_t> check_lengths(ShapeCheck& check, const Sequences& s) {
  const auto name = [](const char* tensor, int64_t i) { return std::string(tensor) + '[' + std::to_string(i) + ']'; };
  if (s.options.cumulative_lengths) {
    const int64_t first = index_at(s.kv_lengths, 0);
    check.require(first == 0, [&] {
      return std::string("kv_lengths[0] is ") + std::to_string(first) + ", but cumulative lengths start with 0";
    });
  }
  int64_t total = 0;
  const int64_t num_sequences = s.distinct_batch();
  for (int64_t b = 0; b < num_sequences && check.ok(); ++b) {
    if (s.options.cumulative_lengths) {
      const int64_t end = index_at(s.kv_lengths, b + 1);
      check.require(end >= total, [&] {
        return name("kv_lengths", b + 1) + " is " + std::to_string(end) +
               ", but cumulative lengths do not fall: " + name("kv_lengths", b) + " is " + std::to_string(total);
      });
      total = end;
    } else {
      const int64_t length = s.length(b);
      int64_t all = length;  // of the sequences that this one stands for
      const bool countable = num_sequences == s.batch || !__builtin_mul_overflow(length, s.batch, &all);
      check.require(length >= 0 && countable && !__builtin_add_overflow(total, all, &total), [&] {
        return name("kv_lengths", b) + " is " + std::to_string(length) + ", but must be " +
               (length < 0 ? ">= 0" : "such that the sum is below 2^63");
      });
    }
    const int64_t offset = s.offset(b);
    int64_t end = 0;
    check.require(offset >= 0,
                  [&] { return name("seq_offset", b) + " is " + std::to_string(offset) + ", but must be >= 0"; });
    if (!check.ok()) break;
    check.require(!__builtin_add_overflow(offset, s.length(b), &end), [&] {
      return name("seq_offset", b) + " + length is " + std::to_string(offset) + " + " + std::to_string(s.length(b)) +
             ", but must be below 2^63";
    });
  }
  return check.ok() ? std::optional(total) : std::nullopt;
}

// Every block that will be read is in the cache.
void check_blocks(ShapeCheck& check, const Sequences& s) {
  const int64_t max_blocks = s.block_table.shape[1];
  for (int64_t b = 0; b < s.distinct_batch() && check.ok(); ++b) {
    const int64_t length = s.length(b), begin = s.offset(b), end = begin + length;
    if (length == 0) continue;
    check.require(s.has_column(end - 1), [&] {
      return std::string("sequence ") + std::to_string(b) + " reads positions " + std::to_string(begin) + " to " +
             std::to_string(end - 1) + ", but block_table has " + std::to_string(max_blocks) + " blocks of " +
             std::to_string(s.block_size) + " rows for it, positions 0 to " +
             std::to_string((Size(max_blocks) * s.block_size).value() - 1);
    });
    const int64_t first = begin / s.block_size, last = (end - 1) / s.block_size;
    const bool alike = distinct(s.block_table, 1) < max_blocks;
    for (int64_t column = first; column <= (alike ? first : last) && check.ok(); ++column) {
      const int64_t position = std::max(begin, column * s.block_size);
      const int64_t block = s.block(b, position);
      check.require(s.in_cache(block), [&] {
        return std::string("block_table[") + std::to_string(b) + ", " + std::to_string(column) + "] (sequence " +
               std::to_string(b) + ", position " + std::to_string(position) + ") is block " + std::to_string(block) +
               ", but the cache has num_blocks = " + std::to_string(s.num_blocks);
      });
    }
  }
}

// Keys or values: the pages that are read, and the tensor that is written.
struct Side {
  Pages from;
  Tensor to;  // [tokens, heads, dim]
  CopyRowsKernel copy_rows;
  // The heads of a token, or the tokens of a head, seen as rows.
  kv_cache::RowsView heads_view() const { return {to.strides[1], to.strides[2], 1}; }
  kv_cache::RowsView tokens_view() const { return {to.strides[0], to.strides[2], 1}; }
  char* row(int64_t token, int64_t head) const {
    return static_cast<char*>(to.data) + (token * to.strides[0] + head * to.strides[1]) * size_bytes(to.dtype);
  }

  // Rows [row, row + count) of a block become tokens from `token` on.
  void copy(int64_t block, int64_t first_row, int64_t count, int64_t token, const ConstTensor& head_indices,
            bool heads_innermost) const {
    const int64_t num_heads = to.shape[1];
    if (head_indices.data == nullptr && heads_innermost) {
      for (int64_t i = 0; i < count; ++i) {
        copy_rows(
            {num_heads, from.dim(), from.at(block, first_row + i), from.heads_view(), row(token + i, 0), heads_view()});
      }
      return;
    }
    // Head after head: the lines of a transposed page that one row of a head touches stay in L1 for the next.
    for (int64_t h = 0; h < num_heads; ++h) {
      const int64_t offset = from.head_offset_bytes(head_indices.data == nullptr ? h : index_at(head_indices, h));
      for (int64_t i = 0; i < count;) {
        const int64_t n = from.even_rows(first_row + i, count - i);
        copy_rows({n, from.dim(), from.at(block, first_row + i) + offset, from.rows_view(), row(token + i, h),
                   tokens_view()});
        i += n;
      }
    }
  }
  void zero(int64_t count, int64_t token) const {
    for (int64_t i = 0; i < count; ++i) {
      copy_rows({to.shape[1], from.dim(), &kZero, {0, 0, 1}, row(token + i, 0), heads_view()});
    }
  }
};

void check_heads(ShapeCheck& check, const ConstTensor& head_indices, int64_t num_kv_heads) {
  for (int64_t h = 0; head_indices && h < distinct(head_indices, 0) && check.ok(); ++h) {
    const int64_t head = index_at(head_indices, h);
    check.require(head >= 0 && head < num_kv_heads, [&] {
      return std::string("head_indices[") + std::to_string(h) + "] is " + std::to_string(head) +
             ", but the cache has num_kv_heads = " + std::to_string(num_kv_heads);
    });
  }
}

// Checks all tensors, and the integers in them; gives the cache's sizes.
Result<PageSizes> check_call(ShapeCheck& check, const ConstTensor& key_cache, const ConstTensor& value_cache,
                             const ConstTensor& block_table, const ConstTensor& kv_lengths, const Tensor& key,
                             const Tensor& value, const GatherOptions& options) {
  const ConstTensor& head_indices = options.head_indices;
  const PageSizes sizes =
      kv_cache::check_pages(check, options.layout, "key_cache", key_cache, "value_cache", value_cache);
  check.tensor("block_table", block_table).dtype({DType::i32, DType::i64}).dims({"batch", "max_blocks"});
  check.tensor("kv_lengths", kv_lengths)
      .dtype({DType::i32, DType::i64})
      .dims({options.cumulative_lengths ? "batch + 1" : "batch"});
  if (options.seq_offset) {
    check.tensor("seq_offset", options.seq_offset).dtype({DType::i32, DType::i64}).dims({"batch"});
  }
  if (head_indices) check.tensor("head_indices", head_indices).dtype({DType::i32, DType::i64}).dims({"heads"});
  const char* const heads = head_indices ? "heads" : "num_kv_heads";
  check.output("key", key).dtype({DType::f32, DType::bf16, DType::f16}).dims({"tokens", heads, "head_dim"});
  check.output("value", value).dtype({key.dtype}).dims({"tokens", heads, "value_head_dim"});
  if (options.cumulative_lengths) {
    check.require(kv_lengths.shape[0] == check["batch"] + 1, [&] {
      return std::string("kv_lengths dim 0 is ") + std::to_string(kv_lengths.shape[0]) +
             ", but cumulative lengths of block_table's batch = " + std::to_string(check["batch"]) + " are " +
             std::to_string(check["batch"] + 1);
    });
  }
  if (!check.ok()) return check.status();
  check_heads(check, head_indices, sizes.num_kv_heads);
  const Sequences sequences = {block_table, kv_lengths, options, check["batch"], sizes.num_blocks, sizes.block_size};
  if (const std::optional<int64_t> total = check_lengths(check, sequences)) {
    check.require(key.shape[0] == *total, [&] {
      return std::string("key dim 0 (tokens) is ") + std::to_string(key.shape[0]) + ", but the lengths of " +
             std::to_string(sequences.batch) + " sequences sum to " + std::to_string(*total);
    });
  }
  if (check.ok() && !options.zero_fill) check_blocks(check, sequences);
  if (!check.ok()) return check.status();
  return sizes;
}

}  // namespace

Status gather_pa_kv_cache(Context& context, const ConstTensor& key_cache, const ConstTensor& value_cache,
                          const ConstTensor& block_table, const ConstTensor& kv_lengths, const Tensor& key,
                          const Tensor& value, const GatherOptions& options) {
  return guarded([&]() -> Status {
    ShapeCheck check("gather_pa_kv_cache");
    const Result<PageSizes> checked =
        check_call(check, key_cache, value_cache, block_table, kv_lengths, key, value, options);
    if (!checked.ok()) return checked.status();
    const PageSizes& sizes = checked.value();
    const ConstTensor& head_indices = options.head_indices;
    const Sequences sequences = {block_table, kv_lengths, options, check["batch"], sizes.num_blocks, sizes.block_size};
    const int64_t num_heads = head_indices ? check["heads"] : sizes.num_kv_heads;
    const int64_t tokens = check["tokens"];
    const int64_t elements = tokens * num_heads * (sizes.head_dim + sizes.value_head_dim);
    if (elements == 0) return {};
    const CopyRowsKernel copy_rows = kv_cache::copy_rows_kernel(context.machine().isa, key_cache.dtype, key.dtype);
    const Side sides[2] = {{Pages(options.layout, PageSide::key, key_cache), normal_strides(key), copy_rows},
                           {Pages(options.layout, PageSide::value, value_cache), normal_strides(value), copy_rows}};
    const bool heads_innermost = options.layout == PageLayout::norm;
    const int64_t num_tasks = std::min(std::clamp<int64_t>(elements / kTaskElements, 1, kMaxTasks), tokens);
    const int64_t tokens_per_task = ceil_div(tokens, num_tasks);
    context.impl().pool.parallel_for(ceil_div(tokens, tokens_per_task), [&](int64_t task, int) {
      const int64_t begin = task * tokens_per_task, end = std::min(tokens, begin + tokens_per_task);
      int64_t start = 0;  // of sequence b
      for (int64_t b = 0; start < end; ++b) {
        const int64_t length = sequences.length(b), offset = sequences.offset(b);
        const int64_t last = std::min(end, start + length);
        for (int64_t token = std::max(begin, start); token < last;) {
          const int64_t position = offset + (token - start);
          const int64_t row = position % sizes.block_size;
          const int64_t count = std::min(last - token, sizes.block_size - row);
          const int64_t block = sequences.has_column(position) ? sequences.block(b, position) : -1;
          for (const Side& side : sides) {
            if (side.from.dim() == 0) continue;
            if (sequences.in_cache(block)) {
              side.copy(block, row, count, token, head_indices, heads_innermost);
            } else {
              side.zero(count, token);
            }
          }
          token += count;
        }
        start += length;
      }
    });
    return {};
  });
}

}  // namespace opst
