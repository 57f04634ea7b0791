// The numbers in the scales of pages of integers, before anything is written: all threads look at those of keys that a
// query may see. With a scale to a row of i8 they are as many bytes as a hundredth to a thirtieth of the keys, with a scale
// to 32 numbers of u8 a quarter; they are read again at once.
#include <atomic>

#include "attention/call_heads.h"
#include "attention/check.h"
#include "core/guarded.h"
#include "kv_cache/page_rows.h"

namespace opst::attention {

namespace {

constexpr int64_t kTaskKeys = 4096;

// Keys of a head that some query may see: from the first one of its first query on.
int64_t first_visible(const CallHeads& call, int64_t head) {
  const Visibility visible = call.visibility(head);
  return visible.prefix > 0 ? 0 : std::max<int64_t>(visible.first_key(0), 0);
}

// Whether a list holds for keys [begin, end) of a head. Scales: x >= 0 (also +inf); offsets: finite. A row has `groups`
// of them, `stride` apart.
bool holds(const KvRows& rows, int64_t begin, int64_t end, int64_t groups, int64_t stride, bool scales) {
  bool good = true;
  for (int64_t key = begin; key < end;) {
    const char* at = rows.row(key);
    for (const int64_t stop = key + rows.run(key, end - key); key < stop; ++key, at += rows.row_bytes) {
      for (int64_t group = 0; group < groups; ++group) {
        const float x = reinterpret_cast<const float*>(at)[group * stride];
        good &= scales ? x >= 0 : x - x == 0;
      }
    }
  }
  return good;
}

// The first row that does not hold, in a message.
Status describe(const char* operator_name, const AttentionInputs& in, const AttentionProblem& p) {
  ShapeCheck check(operator_name);
  const CallHeads call{in, p};
  for (int64_t head = 0; head < call.heads && check.ok(); ++head) {
    const int64_t b = call.batch(head);
    if (call.sequences.query_len(b) == 0) continue;
    for (int64_t key = first_visible(call, head); key < call.sequences.kv_len(b) && check.ok(); ++key) {
      kv_cache::check_row_scales(check, kPageNames, pages_of(in, p.options.page_layout),
                                 index_at(in.block_table, b, key / p.block_size), key % p.block_size,
                                 call.kv_head(head), false);
    }
  }
  return check.status();
}

}  // namespace

Status check_scales(const char* operator_name, const AttentionInputs& in, const AttentionProblem& p, ThreadPool& pool) {
  const CallHeads call{in, p};
  const int64_t chunks = ceil_div(p.kv_len, kTaskKeys);
  std::atomic<bool> good = true;
  pool.parallel_for(call.heads * chunks, [&](int64_t task, int) {
    const int64_t head = task / chunks, b = call.batch(head);
    if (call.sequences.query_len(b) == 0) return;
    const int64_t begin = std::max(task % chunks * kTaskKeys, first_visible(call, head));
    const int64_t end = std::min((task % chunks + 1) * kTaskKeys, call.sequences.kv_len(b));
    const auto look_at = [&](const ConstTensor& list, int64_t groups, bool scales) {
      if (!list) return;
      const int64_t stride = groups_stride(list);
      if (!holds(call.kv_rows(list, head), begin, end, groups, stride, scales)) good = false;
    };
    look_at(in.key_scales, p.key_groups, true);
    look_at(in.value_scales, p.value_groups, true);
    look_at(in.key_offsets, p.key_groups, false);
    look_at(in.value_offsets, p.value_groups, false);
  });
  if (good) return {};
  return describe(operator_name, in, p);
}

}  // namespace opst::attention
