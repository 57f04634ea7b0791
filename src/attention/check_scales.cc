// The numbers in the scales of pages of integers, before anything is written: those of keys that some query sees.
//
// All threads look at what is shown by structure (lengths, windows, prefix), the block mask and the lists: as many rows as
// attention reads, and no others. With a scale to a row of i8 they are as many bytes as a hundredth to a thirtieth of
// the keys, with a scale to 32 numbers of u8 a quarter; they are read again at once. Where heads share their
// keys they are looked at together, in the order of memory. Only if a number there is none that may be
// read, the rows are asked one by one, by the bool mask, too, whether any of them sees its key.
#include <atomic>

#include "attention/call_heads.h"
#include "attention/call_rules.h"
#include "attention/check.h"
#include "kv_cache/page_rows.h"

namespace opst::attention {

namespace {

constexpr int64_t kTaskKeys = 4096, kTaskQueries = 64;

class ScalesInUse : CallHeads {
 public:
  ScalesInUse(const AttentionInputs& inputs, const AttentionProblem& problem)
      : CallHeads{inputs, problem}, cache_(pages_of(inputs, problem.options.page_layout)) {}

  bool hold(ThreadPool& pool) const {
    const int64_t outer = shared_ ? p.batch : heads, chunks = ceil_div(listed_ ? p.query_len : p.kv_len, per_task());
    std::atomic<bool> good = true;
    pool.parallel_for((Size(outer) * chunks).value(), [&](int64_t task, int) {
      const int64_t head = task / chunks * (shared_ ? p.num_kv_heads : 1), first = task % chunks * per_task();
      for_keys(head, {first, first + per_task()}, [&](KeyInterval keys) {
        if (!runs_hold(head, keys)) good = false;
        return !good;
      });
    });
    return good;
  }

  // The first number that does not hold and whose key some row sees, in a message.
  Status describe(const char* operator_name) const {
    ShapeCheck check(operator_name);
    for (int64_t head = 0; head < heads && check.ok(); ++head) {
      for_keys(head, {0, listed_ ? p.query_len : p.kv_len}, [&](KeyInterval keys) {
        for (int64_t key = keys.begin; key < keys.end && check.ok(); ++key) {
          const int64_t block = block_of(head, key), row = key % p.block_size;
          if (scales_.hold(block, row, 1, kv_head(head), 1) || !some_row_sees(head, key)) continue;
          kv_cache::check_row_scales(check, kPageNames, cache_, block, row, kv_head(head), false);
        }
        return !check.ok();
      });
    }
    return check.status();
  }

 private:
  // Queries of a task where each of them (or of the mask's rows) has keys of its own; else keys.
  int64_t per_task() const {
    return !listed_ ? kTaskKeys : p.block_mask ? round_up(kTaskQueries, in.block_mask.block_q) : kTaskQueries;
  }
  int64_t block_of(int64_t head, int64_t key) const {
    return index_at(in.block_table, batch(head), key / p.block_size);
  }

  bool runs_hold(int64_t head, KeyInterval keys) const {
    const int64_t first_head = shared_ ? 0 : kv_head(head), num_heads = shared_ ? p.num_kv_heads : 1;
    for (int64_t key = keys.begin, n = 0; key < keys.end; key += n) {
      n = std::min(keys.end - key, p.block_size - key % p.block_size);
      if (!scales_.hold(block_of(head, key), key % p.block_size, n, first_head, num_heads)) return false;
    }
    return true;
  }

  // visit(KeyInterval) for keys that may be seen, until it returns true: by queries of `part`, or keys of it.
  template <class Visit>
  void for_keys(int64_t head, KeyInterval part, const Visit& visit) const {
    const int64_t queries = sequences.query_len(batch(head));
    const Visibility v = visibility(head);
    if (queries == 0) return;
    if (!listed_) {
      const KeyInterval seen = hull(v, 0, queries - 1);
      for (const KeyInterval& keys :
           {KeyInterval{0, v.prefix}, KeyInterval{std::max(seen.begin, v.prefix), seen.end}}) {
        const KeyInterval some = {std::max(keys.begin, part.begin), std::min(keys.end, part.end)};
        if (some.begin < some.end && visit(some)) return;
      }
      return;
    }
    const int64_t step = p.block_mask ? in.block_mask.block_q : 1, end = std::min(part.end, queries);
    for (int64_t query = part.begin; query < end; query += step) {
      if (p.block_mask ? masked_keys(head, v, query, std::min(query + step, queries) - 1, visit)
                       : any_selected_run(head, query, visit)) {
        return;
      }
    }
  }
  // From the first to the last key that neighbouring queries of a sequence see behind the prefix.
  static KeyInterval hull(const Visibility& v, int64_t first, int64_t last) {
    return {v.first_key(first), std::clamp<int64_t>(last + v.high + 1, 0, v.kv_len)};
  }
  template <class Visit>
  bool masked_keys(int64_t head, const Visibility& v, int64_t first, int64_t last, const Visit& visit) const {
    const HeadMask mask = head_mask(head);
    const KeyInterval seen = hull(v, first, last);
    for (int64_t h = 0; h < mask.heads; ++h) {
      if (mask.any_run(first, h, {0, v.prefix}, visit)) return true;
      if (mask.any_run(first, h, {std::max(seen.begin, v.prefix), seen.end}, visit)) return true;
    }
    return false;
  }
  bool some_row_sees(int64_t head, int64_t key) const {
    const Visibility v = visibility(head);
    const auto holds_key = [&](KeyInterval keys) { return keys.begin <= key && key < keys.end; };
    for (int64_t r = 0; r < query_rows(head); ++r) {
      const int64_t query = r / group;
      if (p.has_mask) {
        RowRules row;
        const ScoreRules rules = rules_.of_block(batch(head), kv_head(head), r, 1, &row);
        if (row.mask[key * rules.mask_stride] == 0) continue;
      }
      if (p.sparse_indices) {
        if (any_selected_run(head, query, holds_key)) return true;
        continue;
      }
      if (key >= v.prefix && !holds_key(v.keys_of_query(query))) continue;
      if (!p.block_mask) return true;
      const HeadMask mask = head_mask(head);
      if (mask.any_run(query, mask.heads > 1 ? r % group : 0, {key, key + 1}, holds_key)) return true;
    }
    return false;
  }

  const kv_cache::CacheTensors cache_;
  const kv_cache::ScaleCheck scales_{cache_, false};
  const CallRules rules_{in, p};
  const bool listed_ = p.block_mask || p.sparse_indices;
  // All KV heads see the same keys, but for bool masks.
  const bool shared_ = !p.sparse_indices && p.block_mask.heads <= 1;
};

}  // namespace

Status check_scales(const char* operator_name, const AttentionInputs& in, const AttentionProblem& p, ThreadPool& pool) {
  const ScalesInUse scales(in, p);
  return scales.hold(pool) ? Status() : scales.describe(operator_name);
}

}  // namespace opst::attention
