// Sequences: where each sequence of a call begins and how long it is, whatever form the caller gave it in; the shapes
// in which tensors hold them; fill, for the rows behind the last one, which no task computes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/elements.h"
#include "core/shape_check.h"
#include "machine/thread_pool.h"
#include "opst/attention.h"

namespace opst::attention {

// The tensors have been checked.
class Sequences {
 public:
  Sequences(const AttentionInputs& inputs, const AttentionProblem& problem) : in_(inputs), p_(problem) {}

  int64_t query_start(int64_t b) const { return p_.varlen_q ? index_at(in_.cu_seqlens_q, b) : 0; }
  int64_t query_len(int64_t b) const {
    return p_.varlen_q ? index_at(in_.cu_seqlens_q, b + 1) - index_at(in_.cu_seqlens_q, b) : p_.query_len;
  }
  int64_t key_start(int64_t b) const { return p_.varlen_k ? index_at(in_.cu_seqlens_k, b) : 0; }
  int64_t kv_len(int64_t b) const { return in_.kv_lengths ? index_at(in_.kv_lengths, b) : key_rows(b); }
  // kv_len where there are no kv_lengths.
  int64_t key_rows(int64_t b) const {
    return p_.varlen_k ? index_at(in_.cu_seqlens_k, b + 1) - index_at(in_.cu_seqlens_k, b) : p_.kv_len;
  }
  int64_t prefix(int64_t b) const { return p_.has_prefix ? index_at(in_.prefix, b) : 0; }
  // Word i of a sequence's tree mask, which the call has.
  int64_t tree_word(int64_t b, int64_t i) const {
    const ConstTensor& t = in_.tree_mask;
    return static_cast<const int64_t*>(t.data)[tree_offset(b) + i * t.strides[t.rank - 1]];
  }
  // Whether its tree mask hides some draft token from some query.
  bool has_tree(int64_t b) const {
    if (!p_.has_tree_mask) return false;
    const int64_t len = query_len(b);
    int64_t i = 0;
    while (i < len && tree_word(b, i) == -1) ++i;
    return i < len;
  }
  // Of the sequence's first word, in elements.
  int64_t tree_offset(int64_t b) const {
    const ConstTensor& t = in_.tree_mask;
    return p_.varlen_q ? query_start(b) * t.strides[0] : b * t.strides[0];
  }

  // How many of the first sequences tell all lengths: 1 where one entry in memory, or none, serves all, else batch.
  // Loops over lengths end here, since a caller needs no memory for a batch of equal sequences and may state any size.
  int64_t num_different() const {
    const bool same = repeats(in_.kv_lengths) && (!p_.varlen_q || repeats(in_.cu_seqlens_q)) &&
                      (!p_.varlen_k || repeats(in_.cu_seqlens_k));
    return same ? std::min<int64_t>(p_.batch, 1) : p_.batch;
  }

 private:
  // Whether all entries are one number in memory, or there are none.
  static bool repeats(const ConstTensor& t) { return !t || t.shape[0] <= 1 || t.strides[0] == 0; }

  const AttentionInputs& in_;
  const AttentionProblem& p_;
};

// The kinds of sequences that a varlen call tells apart, so that each is attended as it would be alone: sequences with so
// few query rows per KV head that keys are best read in place (decoding, trees), those whose rows are one block (fresh
// prompts of a tile of keys, short chunks), and the others.
struct SequenceKinds {
  static constexpr int kCount = 4;

  bool apart = false;  // else all are of one kind
  int64_t few_rows = 0;
  int64_t whole = 0, whole_of_tile = 0, tile_keys = 0;  // rows that are one block, if there are more keys than a tile

  int of(int64_t rows, int64_t kv_len) const {
    if (!apart) return 0;
    if (rows <= few_rows) return 3;
    if (rows <= whole_of_tile && kv_len <= tile_keys) return 2;
    return rows <= whole ? 1 : 0;
  }
};
SequenceKinds sequence_kinds(const AttentionProblem& problem, const Machine& machine);

// The sequences of a kind are attended together, by one plan.
struct SequenceGroup {
  AttentionProblem problem;  // its query_len and kv_len are the longest of the group
  SequenceKinds kinds = {};
  int kind = 0;
};
struct SequenceGroups {
  SequenceGroup group[SequenceKinds::kCount];
  int count = 0;
};
inline SequenceGroups sequence_groups(const AttentionInputs& inputs, const AttentionProblem& problem,
                                      const SequenceKinds& kinds) {
  SequenceGroups groups;
  if (!kinds.apart) {
    groups.group[groups.count++] = {problem};
    return groups;
  }
  const Sequences sequences(inputs, problem);
  SequenceGroup* of_kind[SequenceKinds::kCount] = {};
  const int64_t heads_of_group = problem.num_heads / problem.num_kv_heads;
  for (int64_t b = 0; b < sequences.num_different(); ++b) {
    const int64_t query_len = sequences.query_len(b), kv_len = sequences.kv_len(b);
    if (query_len == 0) continue;
    const int kind = kinds.of(query_len * heads_of_group, kv_len);
    if (of_kind[kind] == nullptr) {
      of_kind[kind] = &groups.group[groups.count++];
      *of_kind[kind] = {problem, kinds, kind};
      of_kind[kind]->problem.query_len = of_kind[kind]->problem.kv_len = 0;
    }
    AttentionProblem& p = of_kind[kind]->problem;
    p.query_len = std::max(p.query_len, query_len);
    p.kv_len = std::max(p.kv_len, kv_len);
  }
  return groups;
}

// A checked tensor with strides to compute with and in the shape of a call without varlen: [tokens, heads, dim] or
// [heads, tokens] of all sequences as [1, heads, tokens, dim] or [1, heads, tokens]. A sequence is then a range of
// dimension 2, and the stride between sequences is 0.
template <class T>
T uniform_shape(T t, bool varlen) {
  make_strides_normal(t);
  if (!varlen) return t;
  if (t.rank == 3) t = t.transposed(0, 1);
  for (int i = t.rank; i > 0; --i) t.shape[i] = t.shape[i - 1], t.strides[i] = t.strides[i - 1];
  ++t.rank, t.shape[0] = 1, t.strides[0] = 0;
  return t;
}
// Of a tensor that may be absent, and is not checked then.
template <class T>
T uniform_if_there(const T& t, bool varlen) {
  return t ? uniform_shape(t, varlen) : T{};
}

// Whether rows of two tensors of a rank, whose other sizes are equal, are as far apart.
inline bool same_rows(const ConstTensor& a, const ConstTensor& b) {
  for (int d = 0; d + 1 < a.rank; ++d) {
    if (a.shape[d] > 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

// Masks and arrays of integers stay: they are read through strides of dimensions that have several indices only.
inline AttentionInputs uniform_shapes(AttentionInputs in, const AttentionProblem& p) {
  in.query = uniform_shape(in.query, p.varlen_q);
  in.key = uniform_shape(in.key, p.varlen_k);
  in.value = uniform_shape(in.value, p.varlen_k);
  in.query_rope = uniform_if_there(in.query_rope, p.varlen_q);
  in.key_rope = uniform_if_there(in.key_rope, p.varlen_k);
  // [batch, num_kv_heads, query_len, count], as queries have it.
  ConstTensor& indices = in.sparse_indices.indices;
  if (in.sparse_indices) indices = p.varlen_q ? uniform_shape(indices, true) : normal_strides(indices).transposed(1, 2);
  for (ConstTensor* const t : {&in.key_scales, &in.value_scales, &in.key_offsets, &in.value_offsets}) {
    *t = uniform_if_there(*t, false);
  }
  return in;
}
inline AttentionOutputs uniform_shapes(const AttentionOutputs& out, const AttentionProblem& p) {
  return {uniform_shape(out.out, p.varlen_q), uniform_if_there(out.softmax_lse, p.varlen_q),
          uniform_if_there(out.softmax_max, p.varlen_q), uniform_if_there(out.softmax_sum, p.varlen_q)};
}

// Every element becomes x, rounded to t's dtype (f32, bf16, f16, f64); not the memory between them. The pool's threads
// share the elements in pieces of 64 KB. A tensor without data or elements is left alone.
void fill(const Tensor& t, double x, ThreadPool& pool);
// The same for rows [first, ...) of dimension 2.
void fill_rows(const Tensor& t, int64_t first, double x, ThreadPool& pool);

}  // namespace opst::attention
