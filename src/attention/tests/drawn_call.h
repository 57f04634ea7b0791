// The call that a Draw describes: its tensors behind guard pages, what belongs to nobody NaN, and the verdict on what
// the operator wrote.
//
//   const Draw d = draw(random);
//   DrawnCall call(d, random);
//   flash_attention_forward(context, call.inputs, outputs, d.options);
//   for (const auto& [b, h, i] : call.rows())  reference_row(call.oracle_inputs, d.options, b, h, i)
#pragma once

#include <numeric>

#include "attention/tests/attention_draw.h"
#include "core/elements.h"

namespace opst::test {

class DrawnCall {
 public:
  DrawnCall(const Draw& d, Random& random) : d_(d) {
    const int64_t batch = d.batch();
    const std::vector<int64_t> q_ends = ends(d.query_lens), k_ends = ends(d.kv_lens);
    const auto queries = [&](int64_t dim) {
      const int64_t total = q_ends.back() + d.rows_behind;
      return d.varlen_q ? tokens(d.query_dtype, total, d.num_heads, dim, d.query_strides, random)
                        : filled(d.query_dtype, batch, d.num_heads, d.query_lens[0], dim, d.query_strides, random);
    };
    inputs.query = queries(d.head_dim);
    if (d.varlen_q) inputs.cu_seqlens_q = offsets(q_ends, random);
    const int64_t keys_behind = random.integer(0, 2);  // varlen: rows after the last sequence
    const auto kv = [&](int64_t dim) {
      if (d.keys == Keys::varlen) {
        return tokens(d.kv_dtype, k_ends.back() + keys_behind, d.num_kv_heads, dim, d.kv_strides, random);
      }
      if (d.keys == Keys::dense) {
        const Tensor t = filled(d.kv_dtype, batch, d.num_kv_heads, d.longest_keys(), dim, d.kv_strides, random);
        for (int64_t b = 0; b < batch; ++b) spoil(t.selected(0, b), 1, d.kv_lens[static_cast<size_t>(b)]);
        return t;
      }
      return pages(dim, random);
    };
    if (d.keys == Keys::norm_pages || d.keys == Keys::panel_pages) make_table(random);
    inputs.key = kv(d.head_dim + (d.rope_beside ? d.rope_dim : 0));
    const int last = inputs.key.rank - 1;
    if (d.rope_dim > 0) {
      inputs.query_rope = queries(d.rope_dim);
      inputs.key_rope = d.rope_beside ? inputs.key.narrowed(last, d.head_dim, d.rope_dim) : kv(d.rope_dim);
      inputs.key = inputs.key.narrowed(last, 0, d.head_dim);
    }
    inputs.value = d.values_of_keys ? inputs.key.narrowed(last, 0, d.value_head_dim) : kv(d.value_head_dim);
    if (d.keys == Keys::varlen) {
      inputs.cu_seqlens_k = offsets(k_ends, random);
    } else if (d.keys != Keys::dense || d.kv_lens != std::vector<int64_t>(d.kv_lens.size(), d.longest_keys())) {
      inputs.kv_lengths = integers(d.kv_lens, random);
    }
    if (d.prefix) {
      std::vector<int64_t> prefix;
      for (const int64_t length : d.kv_lens) prefix.push_back(random.chance(0.2) ? 0 : random.integer(0, length));
      inputs.prefix = integers(prefix, random);
    }
    const int64_t sizes[4] = {batch, d.num_heads, d.longest_query(), d.longest_keys()};
    // Varlen and pages may come with a larger mask.
    const int64_t spare[4] = {0, 0, d.varlen_q ? random.integer(0, 2) : 0,
                              d.keys != Keys::dense ? random.integer(0, 2) : 0};
    if (d.mask) {
      inputs.mask = broadcast(DType::boolean, sizes, spare, d.mask_dims, d.mask_rank, d.mask_strides);
      const double share = random.pick({0.5, 0.9, 0.1});
      change(inputs.mask, [&](double) { return random.chance(share) ? 1 : 0; });
      // Any byte but 0 means visible.
      for (int64_t i = 0; i < inputs.mask.num_elements(); ++i) {
        auto* byte = static_cast<uint8_t*>(const_cast<void*>(inputs.mask.data)) + offset_of(inputs.mask, i);
        if (*byte != 0) *byte = random.pick<uint8_t>({1, 2, 128, 255});
      }
    }
    if (d.bias) {
      inputs.bias = broadcast(d.bias_dtype, sizes, spare, d.bias_dims, d.bias_rank, d.bias_strides);
      change(inputs.bias,
             [&](double) { return random.chance(0.1) && d.options.bias_scale > 0 ? -HUGE_VAL : random.normal() * 2; });
    }
    const DType real = d.query_dtype == DType::f64 ? DType::f64 : DType::f32;
    if (d.alibi) {
      inputs.alibi_slopes = filled(real, 1, d.slopes_of_batch ? batch : 1, 1, d.num_heads, Strides::padded, random);
      inputs.alibi_slopes = inputs.alibi_slopes.selected(0, 0).selected(1, 0);
      if (!d.slopes_of_batch) inputs.alibi_slopes = inputs.alibi_slopes.selected(0, 0);
      change(inputs.alibi_slopes, [&](double) { return random.uniform(0, 0.5); });
    }
    if (d.sinks) {
      inputs.sinks = filled(real, 1, 1, 1, d.num_heads, Strides::bnsd, random);
      inputs.sinks = inputs.sinks.selected(0, 0).selected(0, 0).selected(0, 0);
      change(inputs.sinks, [&](double x) { return random.chance(0.1) ? -HUGE_VAL : 2 * x; });
    }
    if (d.drop_mask) {
      int64_t bits = 0;
      const bool varlen = d.varlen_q || d.keys == Keys::varlen;
      for (size_t b = 0; b < d.kv_lens.size(); ++b) {
        bits += d.num_heads * d.query_lens[b] * (varlen ? d.kv_lens[b] : d.longest_keys());
      }
      View* bytes = keep(std::make_unique<View>(DType::u8, 1, 1, 1, ceil_div(bits, int64_t{8}), Strides::bnsd));
      for (int64_t i = 0; i < ceil_div(bits, int64_t{8}); ++i) {
        set(bytes->tensor(), i, static_cast<double>(random.integer(0, 255)));
      }
      inputs.drop_mask = bytes->tensor().selected(0, 0).selected(0, 0).selected(0, 0);
    }
    if (d.mask_heads > 0) make_block_mask(random);
    if (d.index_block > 0) make_indices(random);
    if (d.tree) make_tree(random);
    if (d.non_finite) {
      const ConstTensor& t = random.chance(0.7) ? inputs.value : inputs.key;
      const double x = random.pick({std::numeric_limits<double>::quiet_NaN(), HUGE_VAL, -HUGE_VAL});
      if (t.num_elements() > 0) set(mutable_view(t), random.integer(0, t.num_elements() - 1), x);
    }
    oracle_inputs = inputs;
    if (d.keys == Keys::panel_pages) {
      panels_ = panels_of(inputs);
      inputs = panels_.inputs;
    }
  }

  struct Row {
    int64_t b, h, i;
  };
  // All rows of all sequences, or `most` of them spread evenly.
  std::vector<Row> rows(int64_t most = int64_t{1} << 40) const {
    std::vector<Row> all, some;
    for (int64_t b = 0; b < d_.batch(); ++b) {
      for (int64_t h = 0; h < d_.num_heads; ++h) {
        for (int64_t i = 0; i < d_.query_lens[static_cast<size_t>(b)]; ++i) all.push_back({b, h, i});
      }
    }
    const auto total = static_cast<int64_t>(all.size()), count = std::min(total, most);
    for (int64_t n = 0; n < count; ++n) some.push_back(all[static_cast<size_t>(n * total / count)]);
    return some;
  }
  // A row of out or of a statistic (which has no last dimension).
  ConstTensor row_of(const ConstTensor& t, const Row& row) const {
    if (!d_.varlen_q) return t.selected(0, row.b).selected(0, row.h).selected(0, row.i);
    const int64_t token = ends(d_.query_lens)[static_cast<size_t>(row.b)] + row.i;
    return t.rank == 3 ? t.selected(0, token).selected(0, row.h) : t.selected(0, row.h).selected(0, token);
  }

  // Outputs prefilled with NaN.
  struct Outputs {
    std::unique_ptr<View> memory[4];
    AttentionOutputs tensors;
    bool gaps_intact() const {
      return std::all_of(memory, memory + 4, [](const auto& view) { return view->gaps_intact(); });
    }
    std::string differs_from(const Outputs& other) const {
      for (const auto& [mine, theirs, name] :
           {std::tuple(&tensors.out, &other.tensors.out, "out"),
            std::tuple(&tensors.softmax_lse, &other.tensors.softmax_lse, "softmax_lse"),
            std::tuple(&tensors.softmax_max, &other.tensors.softmax_max, "softmax_max"),
            std::tuple(&tensors.softmax_sum, &other.tensors.softmax_sum, "softmax_sum")}) {
        const Comparison c = compare_bits(*mine, *theirs, {.name = name});
        if (!c.ok) return c.message;
      }
      return "";
    }
  };
  Outputs make_outputs() const {
    Outputs out;
    const DType statistics = d_.query_dtype == DType::f64 ? DType::f64 : DType::f32;
    const int64_t tokens = ends(d_.query_lens).back() + d_.rows_behind;
    const int64_t batch = d_.batch(), len = d_.query_lens[0];
    out.memory[0] = d_.varlen_q ? std::make_unique<View>(d_.out_dtype, 1, tokens, d_.num_heads, d_.value_head_dim,
                                                         d_.out_strides, Guard::before)
                                : std::make_unique<View>(d_.out_dtype, batch, d_.num_heads, len, d_.value_head_dim,
                                                         d_.out_strides, Guard::before);
    out.tensors.out = out.memory[0]->tensor();
    if (d_.varlen_q) out.tensors.out = out.tensors.out.selected(0, 0);
    Tensor* statistic[] = {&out.tensors.softmax_lse, &out.tensors.softmax_max, &out.tensors.softmax_sum};
    for (int i = 0; i < 3; ++i) {
      out.memory[i + 1] = d_.varlen_q ? std::make_unique<View>(statistics, 1, d_.num_heads, tokens, 1, d_.out_strides)
                                      : std::make_unique<View>(statistics, batch, d_.num_heads, len, 1, d_.out_strides);
      *statistic[i] = out.memory[i + 1]->tensor().selected(3, 0);
      if (d_.varlen_q) *statistic[i] = statistic[i]->selected(0, 0);
    }
    return out;
  }

  const Draw& drawn() const { return d_; }
  AttentionInputs inputs;         // what the operator gets
  AttentionInputs oracle_inputs;  // the same values in a form that the reference reads

 private:
  static std::vector<int64_t> ends(const std::vector<int64_t>& lengths) {
    std::vector<int64_t> sums = {0};
    for (const int64_t length : lengths) sums.push_back(sums.back() + length);
    return sums;
  }
  View* keep(std::unique_ptr<View> view) {
    views_.push_back(std::move(view));
    return views_.back().get();
  }
  template <class Change>
  static void change(const ConstTensor& t, const Change& to) {
    for (int64_t i = 0; i < t.num_elements(); ++i) set(mutable_view(t), i, to(get(t, i)));
  }
  Tensor filled(DType dtype, int64_t a, int64_t b, int64_t c, int64_t e, Strides strides, Random& random) {
    const Tensor t = keep(std::make_unique<View>(dtype, a, b, c, e, strides))->tensor();
    fill(t, random.chance(0.8) ? Fill::normal : random.pick({Fill::small_integers, Fill::uniform, Fill::ones}), random);
    return t;
  }
  Tensor tokens(DType dtype, int64_t total, int64_t heads, int64_t dim, Strides strides, Random& random) {
    return filled(dtype, 1, total, heads, dim, strides, random).selected(0, 0);
  }
  // Rows from `length` on along dimension `dim` become NaN.
  static void spoil(const Tensor& t, int dim, int64_t length) {
    Random random(1);
    fill(t.narrowed(dim, length, t.shape[dim] - length), Fill::nan, random);
  }
  ConstTensor integers(const std::vector<int64_t>& values, Random& random) {
    const DType dtype = random.pick({DType::i32, DType::i64});
    const auto count = static_cast<int64_t>(values.size());
    const Tensor t = keep(std::make_unique<View>(dtype, 1, 1, 1, count, Strides::bnsd))->tensor();
    for (int64_t i = 0; i < count; ++i) set(t, i, static_cast<double>(values[static_cast<size_t>(i)]));
    return t.selected(0, 0).selected(0, 0).selected(0, 0);
  }
  ConstTensor offsets(const std::vector<int64_t>& sums, Random& random) { return integers(sums, random); }
  ConstTensor broadcast(DType dtype, const int64_t (&sizes)[4], const int64_t (&spare)[4], const bool (&dims)[4],
                        int rank, Strides strides) {
    int64_t shape[4];
    for (int i = 0; i < 4; ++i) shape[i] = dims[i] ? sizes[i] + spare[i] : 1;
    ConstTensor t = keep(std::make_unique<View>(dtype, shape[0], shape[1], shape[2], shape[3], strides))->tensor();
    for (int i = rank; i < 4; ++i) t = t.selected(0, 0);
    return t;
  }
  // A share of the pairs of blocks. Some rows have none, and some heads the entries of the head before.
  void make_block_mask(Random& random) {
    const int64_t query_blocks =
        ceil_div(d_.longest_query(), d_.mask_block_q) + (d_.varlen_q ? random.integer(0, 2) : 0);
    const int64_t key_blocks = ceil_div(d_.longest_keys(), d_.mask_block_kv);
    const double share = random.pick({0.5, 0.2, 0.9, 0.05});
    std::vector<int64_t> offsets, columns;
    for (int64_t head = 0; head < d_.mask_batch * d_.mask_heads; ++head) {
      const auto row = static_cast<int64_t>(query_blocks) + 1;
      if (head > 0 && random.chance(0.3)) {
        for (int64_t i = 0; i < row; ++i) offsets.push_back(offsets[offsets.size() - static_cast<size_t>(row)]);
        continue;
      }
      offsets.push_back(static_cast<int64_t>(columns.size()));
      for (int64_t i = 0; i < query_blocks; ++i) {
        const bool some = random.chance(0.9);
        for (int64_t j = 0; j < key_blocks; ++j) {
          if (some && random.chance(share)) columns.push_back(j);
        }
        offsets.push_back(static_cast<int64_t>(columns.size()));
      }
    }
    const auto strides = [&] { return random.pick({Strides::bnsd, Strides::padded, Strides::shifted}); };
    const auto write = [](const Tensor& t, const std::vector<int64_t>& values) {
      for (size_t i = 0; i < values.size(); ++i) set(t, static_cast<int64_t>(i), static_cast<double>(values[i]));
      return t;
    };
    const DType dtype = random.pick({DType::i32, DType::i64});
    const Tensor of_rows =
        keep(std::make_unique<View>(dtype, 1, d_.mask_batch, d_.mask_heads, query_blocks + 1, strides()))->tensor();
    const Tensor of_columns = keep(std::make_unique<View>(random.pick({DType::i32, DType::i64}), 1, 1,
                                                          static_cast<int64_t>(columns.size()), 1, strides()))
                                  ->tensor();
    inputs.block_mask.row_offsets = write(of_rows, offsets).selected(0, 0);
    inputs.block_mask.columns = write(of_columns, columns).selected(0, 0).selected(0, 0).selected(1, 0);
    inputs.block_mask.block_q = d_.mask_block_q, inputs.block_mask.block_kv = d_.mask_block_kv;
  }
  void make_indices(Random& random) {
    const int64_t len = d_.varlen_q ? ends(d_.query_lens).back() + d_.rows_behind : d_.query_lens[0];
    const Strides strides = random.pick({Strides::bnsd, Strides::bsnd, Strides::padded, Strides::transposed});
    const int64_t batch = d_.varlen_q ? 1 : d_.batch(), heads = d_.num_kv_heads;
    const Tensor t = keep(std::make_unique<View>(DType::i32, batch, len, heads, d_.index_count, strides))->tensor();
    draw_lists(d_, t, random);
    inputs.sparse_indices = {d_.varlen_q ? t.selected(0, 0) : t, d_.index_block};
  }
  // Words of trees by parents, of any bits, and that hide nothing; of rows behind the last sequence what would be refused.
  void make_tree(Random& random) {
    const int64_t total = ends(d_.query_lens).back() + d_.rows_behind, len = d_.query_lens[0];
    const Strides strides = random.pick({Strides::bnsd, Strides::padded, Strides::transposed});
    const Tensor t = keep(d_.varlen_q ? std::make_unique<View>(DType::i64, 1, 1, total, 1, strides)
                                      : std::make_unique<View>(DType::i64, 1, d_.batch(), len, 1, strides))
                         ->tensor();
    const auto word = [&](int64_t i) -> int64_t& { return static_cast<int64_t*>(t.data)[offset_of(t, i)]; };
    for (int64_t i = 0; i < t.num_elements(); ++i) word(i) = 12345;
    for (size_t b = 0; b < d_.query_lens.size(); ++b) {
      const int64_t n = d_.query_lens[b], first = ends(d_.query_lens)[b];
      const bool tree = n <= 64 && n <= d_.kv_lens[b] && random.chance(0.85), by_parents = random.chance(0.7);
      for (int64_t i = 0; i < n; ++i) {
        const int64_t parent = random.integer(-1, i - 1);
        const uint64_t any = n >= 64 ? random.bits() : random.bits() % (uint64_t{1} << n);
        const uint64_t path = (parent < 0 ? 0 : static_cast<uint64_t>(word(first + parent))) | uint64_t{1} << i % 64;
        word(first + i) = tree ? static_cast<int64_t>(by_parents ? path : any) : -1;
      }
    }
    inputs.tree_mask = d_.varlen_q ? t.selected(0, 0).selected(0, 0).selected(1, 0) : t.selected(0, 0).selected(2, 0);
  }
  void make_table(Random& random) {
    int64_t used = 0, most = 2;
    for (const int64_t length : d_.kv_lens) {
      used += ceil_div(length, d_.block_size);
      most = std::max(most, ceil_div(length, d_.block_size) + 1);
    }
    num_blocks_ = used + 2;
    std::vector<int64_t> order(static_cast<size_t>(num_blocks_));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = order.size(); i > 1; --i) {
      std::swap(order[i - 1], order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    const DType dtype = random.pick({DType::i32, DType::i64});
    const Tensor table = keep(std::make_unique<View>(dtype, 1, 1, d_.batch(), most, Strides::padded))->tensor();
    size_t next = 0;
    for (int64_t b = 0; b < d_.batch(); ++b) {
      const int64_t length = d_.kv_lens[static_cast<size_t>(b)];
      for (int64_t i = 0; i < most; ++i) {
        const bool real = i < ceil_div(length, d_.block_size);
        if (!real) {
          set(table, b * most + i, 1e9);
          continue;
        }
        const bool again = d_.share_pages && next > 0 && random.chance(0.4);
        int64_t block =
            again ? order[static_cast<size_t>(random.integer(0, static_cast<int64_t>(next) - 1))] : order[next++];
        if (b > 0 && !d_.shared_blocks.empty() && i < d_.shared_blocks[static_cast<size_t>(b)] &&
            i < ceil_div(d_.kv_lens[static_cast<size_t>(b - 1)], d_.block_size)) {
          block = static_cast<int64_t>(get(table, (b - 1) * most + i));
        }
        set(table, b * most + i, static_cast<double>(block));
        for (int64_t j = i * d_.block_size; j < std::min(length, (i + 1) * d_.block_size); ++j) {
          slots_.push_back({block, j % d_.block_size});
        }
      }
    }
    inputs.block_table = table.selected(0, 0).selected(0, 0);
  }
  Tensor pages(int64_t dim, Random& random) {
    const Tensor t =
        keep(std::make_unique<View>(d_.kv_dtype, num_blocks_, d_.block_size, d_.num_kv_heads, dim, Strides::bnsd))
            ->tensor();
    for (const auto& [block, row] : slots_) {
      fill(t.selected(0, block).selected(0, row), Fill::normal, random);
    }
    return t;
  }

  Draw d_;
  std::vector<std::unique_ptr<View>> views_;
  int64_t num_blocks_ = 0;
  struct Slot {
    int64_t block, row;
  };
  std::vector<Slot> slots_;
  PanelPages panels_;
};

// "" where the outputs agree with the reference on `most` rows, and rows behind the last sequence are empty.
inline std::string judge(const DrawnCall& call, const DrawnCall::Outputs& out, const Context& context, int64_t most,
                         double& worst_ratio) {
  const Draw& d = call.drawn();
  const std::string about =
      to_string(d) + "\n  " + to_string(context.machine()) + ", " + std::to_string(context.num_threads()) + " threads";
  if (!out.gaps_intact()) return "an output was written beside its elements\n  " + about;
  const bool bf16 = d.query_dtype == DType::bf16 && d.kv_dtype == DType::bf16;
  const DType storage =
      d.query_dtype == DType::f64 ? DType::f64
      : bf16 && includes(context.machine().isa, Isa::avx512_bf16) && context.machine().bf16_product == Bf16Product::dot
          ? DType::bf16
          : DType::f32;
  JudgedRows judged{.about = about,
                    .query_dtype = d.query_dtype,
                    .out_dtype = d.out_dtype,
                    .storage = storage,
                    .kv_len = d.longest_keys(),
                    .reference = {},
                    .naive = {},
                    .score_scale = 0,
                    .typical_value = 1 / d.options.dropout.keep_prob,
                    .flushed = 0,
                    .rounds_twice = context.machine().isa == Isa::generic};
  if (d.kv_dtype == DType::bf16) judged.flushed = static_cast<double>(d.longest_keys()) * 0x1p-120;
  // Thousands of equal weights times equal values: each addition of the chain rounds in the same direction.
  if (d.query_dtype != DType::f64 && d.longest_keys() > 2048) {
    judged.flushed += static_cast<double>(d.longest_keys()) * 0x1p-29 * judged.typical_value;
  }
  for (const DrawnCall::Row& row : call.rows(most)) {
    judged.reference.push_back(attention::reference_row(call.oracle_inputs, d.options, row.b, row.h, row.i));
    judged.naive.push_back(attention::naive_row(call.oracle_inputs, d.options, row.b, row.h, row.i, storage));
    const double scale = judged.reference.back().score_scale;
    if (std::isfinite(scale)) judged.score_scale = std::max(judged.score_scale, scale);
    const ConstTensor got = call.row_of(out.tensors.out, row);
    for (int64_t i = 0; i < d.value_head_dim; ++i) judged.out.push_back(get(got, i));
    judged.lse.push_back(get(call.row_of(out.tensors.softmax_lse, row), 0));
    judged.max.push_back(get(call.row_of(out.tensors.softmax_max, row), 0));
    judged.sum.push_back(get(call.row_of(out.tensors.softmax_sum, row), 0));
  }
  std::string message = judged.judge(worst_ratio);
  if (!message.empty() || !d.varlen_q) return message;
  const ConstTensor all = out.tensors.out, lse = out.tensors.softmax_lse;
  for (int64_t token = all.shape[0] - d.rows_behind; token < all.shape[0]; ++token) {
    for (int64_t h = 0; h < d.num_heads; ++h) {
      const ConstTensor row = all.selected(0, token).selected(0, h);
      for (int64_t i = 0; i < d.value_head_dim; ++i) {
        if (get(row, i) != 0) return "a row behind the last sequence is not 0\n  " + about;
      }
      if (get(lse.selected(0, h).selected(0, token), 0) != -HUGE_VAL) {
        return "lse of a row behind the last sequence is not -inf\n  " + about;
      }
    }
  }
  return "";
}

// Contexts that differ from `chosen` in the number of threads only.
inline std::vector<const TestContext*> contexts_like(const TestContext& chosen) {
  std::vector<const TestContext*> list;
  const auto add_from = [&](const std::vector<TestContext>& all) {
    for (const TestContext& t : all) {
      const Machine& a = chosen.context.machine();
      const Machine& b = t.context.machine();
      if (a.isa == b.isa && a.bf16_product == b.bf16_product && a.cache.l2_bytes == b.cache.l2_bytes && &t != &chosen) {
        list.push_back(&t);
      }
    }
  };
  add_from(contexts());
  // Under a sanitizer contexts() may have this level with the other caches only.
  if (list.empty()) add_from(contexts_with_threads(3));
  return list;
}

}  // namespace opst::test
