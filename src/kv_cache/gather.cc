// gather_pa_kv_cache: check every position that will be read, then deal out the tokens to tasks.
#include <atomic>

#include "core/int_math.h"
#include "kv_cache/page_rows.h"
#include "machine/context_impl.h"

namespace opst {

using namespace kv_cache;

namespace {

struct Sequences {
  const ConstTensor& block_table;
  const ConstTensor& kv_lengths;
  const GatherOptions& options;
  int64_t batch, num_blocks, block_size;

  // Sequences that may differ: where lengths, offsets and rows of the table all repeat (stride 0), the first sequence
  // stands for all.
  int64_t distinct_batch() const {
    const auto repeats = [](const ConstTensor& t) { return !t || distinct(t, 0) < t.shape[0]; };
    const bool alike = repeats(kv_lengths) && repeats(options.seq_offset) && repeats(block_table);
    return alike ? std::min<int64_t>(batch, 1) : batch;
  }
  int64_t length(int64_t b) const {
    return options.cumulative_lengths ? index_at(kv_lengths, b + 1) - index_at(kv_lengths, b) : index_at(kv_lengths, b);
  }
  int64_t offset(int64_t b) const { return options.seq_offset ? index_at(options.seq_offset, b) : 0; }
  // -1: past the table's columns.
  int64_t block(int64_t b, int64_t position) const {
    const int64_t column = position / block_size;
    return column < block_table.shape[1] ? index_at(block_table, b, column) : -1;
  }
  bool in_cache(int64_t block) const { return block >= 0 && block < num_blocks; }
};

// Tokens are dealt out evenly to a few tasks, each of which walks over the lengths to find its own.
struct TokenTasks {
  static constexpr int64_t kMaxTasks = 64;
  int64_t tokens, per_task, count;

  // `elements`: of all tokens > 0.
  TokenTasks(int64_t num_tokens, int64_t elements)
      : tokens(num_tokens),
        per_task(ceil_div(tokens, std::min(std::clamp<int64_t>(elements / kTaskElements, 1, kMaxTasks), tokens))),
        count(ceil_div(tokens, per_task)) {}

  // visit(token, count, block, row) for the runs of tokens that lie in one block each, in order; block -1 and others
  // that the cache has not: none.
  template <class Visit>
  void run(int64_t task, const Sequences& s, const Visit& visit) const {
    const int64_t begin = task * per_task, end = std::min(tokens, begin + per_task);
    int64_t start = 0;  // of sequence b
    for (int64_t b = 0; start < end; ++b) {
      const int64_t length = s.length(b), offset = s.offset(b), last = std::min(end, start + length);
      for (int64_t token = std::max(begin, start), n = 0; token < last; token += n) {
        const int64_t position = offset + (token - start), row = position % s.block_size;
        n = std::min(last - token, s.block_size - row);
        visit(token, n, s.block(b, position), row);
      }
      start += length;
    }
  }
};

void check_heads(ShapeCheck& check, const ConstTensor& head_indices, int64_t num_kv_heads) {
  for (int64_t h = 0; head_indices && h < distinct(head_indices, 0) && check.ok(); ++h) {
    const int64_t head = index_at(head_indices, h);
    check.require(head >= 0 && head < num_kv_heads, "head_indices[", h, "] is ", head,
                  ", but the cache has num_kv_heads = ", num_kv_heads);
  }
}

// The lengths sum to `tokens`. Each cumulative length is compared with the one before, not subtracted, so that no
// difference overflows.
void check_lengths(ShapeCheck& check, const Sequences& s, int64_t tokens) {
  const bool cumulative = s.options.cumulative_lengths;
  if (cumulative) {
    const int64_t first = index_at(s.kv_lengths, 0);
    check.require(first == 0, "kv_lengths[0] is ", first, ", but cumulative lengths start with 0");
  }
  int64_t total = 0;
  const int64_t num_sequences = s.distinct_batch();
  for (int64_t b = 0; b < num_sequences && check.ok(); ++b) {
    if (cumulative) {
      const int64_t end = index_at(s.kv_lengths, b + 1);
      check.require(end >= total, "kv_lengths[", b + 1, "] is ", end,
                    ", but cumulative lengths do not fall: kv_lengths[", b, "] is ", total);
      total = end;
    } else {
      const int64_t length = s.length(b);
      int64_t all = length;  // of the sequences that this one stands for
      const bool countable = num_sequences == s.batch || !__builtin_mul_overflow(length, s.batch, &all);
      check.require(length >= 0 && countable && !__builtin_add_overflow(total, all, &total), "kv_lengths[", b, "] is ",
                    length, ", but must be ", length < 0 ? ">= 0" : "such that the sum is below 2^63");
    }
    const int64_t offset = s.offset(b);
    check.require(offset >= 0, "seq_offset[", b, "] is ", offset, ", but must be >= 0");
    if (!check.ok()) break;
    const int64_t length = s.length(b);
    int64_t end = 0;
    check.require(!__builtin_add_overflow(offset, length, &end), "seq_offset[", b, "] + length is ", offset, " + ",
                  length, ", but must be below 2^63");
  }
  check.require(tokens == total, "key dim 0 (tokens) is ", tokens, ", but the lengths of ", s.batch,
                " sequences sum to ", total);
}

// Every block that will be read is in the cache.
void check_blocks(ShapeCheck& check, const Sequences& s) {
  const int64_t max_blocks = s.block_table.shape[1];
  const bool alike = distinct(s.block_table, 1) < max_blocks;
  for (int64_t b = 0; b < s.distinct_batch() && check.ok(); ++b) {
    const int64_t length = s.length(b), begin = s.offset(b), end = begin + length;
    if (length == 0) continue;
    const int64_t first = begin / s.block_size, last = (end - 1) / s.block_size;
    check.require(last < max_blocks, "sequence ", b, " reads positions ", begin, " to ", end - 1,
                  ", but block_table has ", max_blocks, " blocks of ", s.block_size, " rows for it, positions 0 to ",
                  (Size(max_blocks) * s.block_size).value() - 1);
    for (int64_t column = first; column <= (alike ? first : last) && check.ok(); ++column) {
      const int64_t position = std::max(begin, column * s.block_size);
      const int64_t block = s.block(b, position);
      check.require(s.in_cache(block), "block_table[", b, ", ", column, "] (sequence ", b, ", position ", position,
                    ") is block ", block, ", but the cache has num_blocks = ", s.num_blocks);
    }
  }
}

// The scales of every row that will be read: all threads look at them, and one that is wrong is looked for in order.
void check_scales(ShapeCheck& check, const Sequences& s, const CacheTensors& cache, int64_t num_kv_heads,
                  const TokenTasks& tasks, ThreadPool& pool) {
  if (!holds_integers(cache.key.dtype)) return;
  const ScaleCheck scales(cache, false);
  const ConstTensor& head_indices = s.options.head_indices;
  const int64_t num_heads = head_indices ? distinct(head_indices, 0) : num_kv_heads;
  const auto head_at = [&](int64_t h) { return head_indices ? index_at(head_indices, h) : h; };
  const auto rows_hold = [&](int64_t block, int64_t row, int64_t count) {
    if (!head_indices) return scales.hold(block, row, count, 0, num_kv_heads);
    bool good = true;
    for (int64_t h = 0; h < num_heads; ++h) good = scales.hold(block, row, count, head_at(h), 1) && good;
    return good;
  };
  std::atomic<bool> good = true;
  pool.parallel_for(tasks.count, [&](int64_t task, int) {
    tasks.run(task, s, [&](int64_t, int64_t count, int64_t block, int64_t row) {
      if (good && s.in_cache(block) && !rows_hold(block, row, count)) good = false;
    });
  });
  for (int64_t task = 0; !good && task < tasks.count && check.ok(); ++task) {
    tasks.run(task, s, [&](int64_t, int64_t count, int64_t block, int64_t row) {
      if (!check.ok() || !s.in_cache(block) || rows_hold(block, row, count)) return;
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t h = 0; h < num_heads && check.ok(); ++h) {
          check_row_scales(check, kCacheNames, cache, block, row + i, head_at(h), false);
        }
      }
    });
  }
}

// Keys or values: the pages that are read, and the tensor that is written.
struct Side {
  CacheSide from;
  Tensor to;  // [tokens, heads, dim]
  RowConversion convert;
  CopyRowsKernel copy_floats;  // f32 to the tensor's dtype

  // Rows [first_row, first_row + count) of a block become tokens from `token` on.
  void copy(int64_t block, int64_t first_row, int64_t count, int64_t token, const ConstTensor& head_indices,
            bool heads_innermost) const {
    const int64_t num_heads = to.shape[1];
    if (!head_indices && heads_innermost) {
      for (int64_t i = 0; i < count; ++i) {
        convert(num_heads, from.dim(), from.heads(block, first_row + i), {heads_of(to, token + i)});
      }
      return;
    }
    // Head after head: the lines of a transposed page that one row of a head touches stay in L1 for the next.
    for (int64_t h = 0; h < num_heads; ++h) {
      const int64_t head = head_indices ? index_at(head_indices, h) : h;
      for (int64_t i = 0, n = 0; i < count; i += n) {
        n = from.even_rows(first_row + i, count - i);
        convert(n, from.dim(), from.rows(block, first_row + i, head), {tokens_of(to, token + i, h)});
      }
    }
  }
  void zero(int64_t count, int64_t token) const {
    static constexpr float kZero = 0;  // the one element that every row reads
    const Rows zeros = {const_cast<float*>(&kZero), 0, 0, 1};
    for (int64_t i = 0; i < count; ++i) copy_floats({to.shape[1], from.dim(), zeros, heads_of(to, token + i)});
  }
};

// Checks all tensors, not the integers in them.
PageSizes check_tensors(ShapeCheck& check, const CacheTensors& cache, const ConstTensor& block_table,
                        const ConstTensor& kv_lengths, const Tensor& key, const Tensor& value,
                        const GatherOptions& options) {
  const auto& [layout, scales, cumulative, seq_offset, head_indices, zero_fill] = options;
  const PageSizes sizes = check_cache(check, kCacheNames, cache, CacheUse::read);
  check.tensor("block_table", block_table).dtype(kIntegers).dims({"batch", "max_blocks"});
  check.tensor("kv_lengths", kv_lengths).dtype(kIntegers).dims({cumulative ? "batch + 1" : "batch"});
  if (seq_offset) check.tensor("seq_offset", seq_offset).dtype(kIntegers).dims({"batch"});
  if (head_indices) check.tensor("head_indices", head_indices).dtype(kIntegers).dims({"heads"});
  const char* const heads = head_indices ? "heads" : "num_kv_heads";
  check.output("key", key).dtype(kFloats).dims({"tokens", heads, "head_dim"});
  check.output("value", value).dtype({key.dtype}).dims({"tokens", heads, "value_head_dim"});
  const int64_t batch = check["batch"];
  check.require(!cumulative || kv_lengths.shape[0] == batch + 1, "kv_lengths dim 0 is ", kv_lengths.shape[0],
                ", but cumulative lengths of block_table's batch = ", batch, " are ", batch + 1);
  return sizes;
}

}  // namespace

Status gather_pa_kv_cache(Context& context, const ConstTensor& key_cache, const ConstTensor& value_cache,
                          const ConstTensor& block_table, const ConstTensor& kv_lengths, const Tensor& key,
                          const Tensor& value, const GatherOptions& options) {
  return checked("gather_pa_kv_cache", [&](ShapeCheck& check) {
    const CacheTensors cache = {options.layout, key_cache, value_cache, options.scales};
    const PageSizes sizes = check_tensors(check, cache, block_table, kv_lengths, key, value, options);
    if (!check.ok()) return;
    const ConstTensor& head_indices = options.head_indices;
    const Sequences sequences = {block_table, kv_lengths, options, check["batch"], sizes.num_blocks, sizes.block_size};
    const int64_t tokens = key.shape[0];
    check_heads(check, head_indices, sizes.num_kv_heads);
    check_lengths(check, sequences, tokens);
    if (!options.zero_fill) check_blocks(check, sequences);
    if (!check.ok()) return;

    const int64_t elements = tokens * key.shape[1] * (sizes.head_dim + sizes.value_head_dim);
    if (elements == 0) return;
    const TokenTasks tasks(tokens, elements);
    ThreadPool& pool = context.impl().pool;
    check_scales(check, sequences, cache, sizes.num_kv_heads, tasks, pool);
    if (check.ok()) check.require(context.impl().workspaces.ready());
    if (!check.ok()) return;
    const Isa isa = context.machine().isa;
    const auto side_of = [&](PageSide side, const Tensor& to) -> Side {
      const CacheSide from(cache, side);
      return {from, normal_strides(to), RowConversion(isa, from.format(), {to.dtype}),
              copy_rows_kernel(isa, DType::f32, to.dtype)};
    };
    const Side sides[2] = {side_of(PageSide::key, key), side_of(PageSide::value, value)};
    const bool heads_innermost = options.layout == PageLayout::norm;
    pool.parallel_for(tasks.count, [&](int64_t task, int) {
      tasks.run(task, sequences, [&](int64_t token, int64_t count, int64_t block, int64_t row) {
        for (const Side& side : sides) {
          if (side.from.dim() == 0) continue;
          if (sequences.in_cache(block)) {
            side.copy(block, row, count, token, head_indices, heads_innermost);
          } else {
            side.zero(count, token);
          }
        }
      });
    });
  });
}

}  // namespace opst
