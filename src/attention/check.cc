#include "attention/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "attention/call_rules.h"
#include "attention/layout.h"
#include "attention/selected_keys.h"
#include "attention/sequences.h"
#include "core/guarded.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "kv_cache/pages.h"

namespace opst::attention {

namespace {

constexpr int64_t kMaxHeadDim = 768;
constexpr int64_t kMaxStart = int64_t{1} << 60;  // of indices that a caller sets: sums stay within 63 bits

constexpr std::initializer_list<DType> kIntegers = {DType::i32, DType::i64};

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", x);
  return text;
}

bool panels(const AttentionInputs& in, PageLayout page_layout) {
  return in.block_table && page_layout == PageLayout::panel32;
}

// [batch + 1] offsets: bound as [batch].
void bind_offsets(ShapeCheck& check, const char* name, const ConstTensor& t) {
  check.tensor(name, t).dtype(kIntegers);
  if (!check.ok()) return;
  check.require(
      t.rank == 1 && t.shape[0] >= 1, name, " is ", [&] { return to_string(t); },
      ", but must be [batch + 1], which has at least one entry");
  if (check.ok()) check.tensor(name, normal_strides(t).narrowed(0, 1, t.shape[0] - 1)).dims({"batch"});
}

void check_dtypes(ShapeCheck& check, const AttentionInputs& in, DType out) {
  const bool f64 = in.query.dtype == DType::f64;
  check.require((in.key.dtype == DType::f64) == f64 && (out == DType::f64) == f64, [&] {
    return text("f64 does not mix with other types: query is ", to_string(in.query.dtype), ", key ",
                to_string(in.key.dtype), ", out ", to_string(out));
  });
  check.require(in.value.dtype == in.key.dtype,
                [&] { return text("value is ", to_string(in.value.dtype), ", but key is ", to_string(in.key.dtype)); });
}

void check_options(ShapeCheck& check, const AttentionInputs& in, const AttentionOptions& options, int64_t num_heads) {
  const auto require_number = [&](bool condition, const char* name, double x, const char* rule) {
    check.require(
        condition, name, " is ", [&] { return number(x); }, ", must be ", rule);
  };
  const bool f64 = in.query.dtype == DType::f64;  // other kernels compute with f32
  const auto finite = [&](const char* name, double x) {
    require_number(std::isfinite(x), name, x, "finite");
    require_number(f64 || std::fabs(x) <= double{std::numeric_limits<float>::max()}, name, x, "finite in f32");
  };
  const auto within = [&](const char* name, int64_t x, int64_t low, int64_t high) {
    check.require(x >= low && x <= high, name, " is ", x, ", must be ", low, " to ", high);
  };
  const auto known = [&](const char* name, const char* type, auto value, auto last) {
    check.require(value <= last, name, " is ", static_cast<int64_t>(value), ", which is no ", type);
  };
  if (options.softmax_scale) finite("softmax_scale", *options.softmax_scale);
  known("path", "AttentionPath", options.path, AttentionPath::flash);
  known("alignment", "CausalAlignment", options.alignment, CausalAlignment::bottom_right);
  known("alibi_form", "AlibiForm", options.alibi_form, AlibiForm::square_root);
  known("page_layout", "PageLayout", options.page_layout, PageLayout::panel32);
  within("block_q", options.block_q, 0, kMaxBlock);
  within("block_kv", options.block_kv, 0, kMaxBlock);
  if (panels(in, options.page_layout)) {
    check.require(options.path != AttentionPath::standard, "path = standard does not read panel32 pages");
    check.require(options.block_kv % kPanelRows == 0, "block_kv is ", options.block_kv,
                  ", must be a multiple of 32 for panel32 pages");
  }
  const double softcap = options.softcap;
  require_number(softcap >= 0 || !std::isfinite(softcap), "softcap", softcap, "0 or positive");
  finite("softcap", softcap);
  // A cap that rounds to 0 would be none at all.
  require_number(f64 || softcap == 0 || static_cast<float>(softcap) > 0, "softcap", softcap, "0 or positive in f32");
  finite("bias_scale", options.bias_scale);
  within("alibi_query_start", options.alibi_query_start, -kMaxStart, kMaxStart);
  within("alibi_key_start", options.alibi_key_start, -kMaxStart, kMaxStart);
  const DropoutOptions& drop = options.dropout;
  // A word of 32 bits decides, so no smaller probability can be; and 1 / keep_prob stays a number of f32.
  require_number(drop.keep_prob >= 0x1p-32 && drop.keep_prob <= 1, "dropout.keep_prob", drop.keep_prob,
                 "at least 2^-32 (2.33e-10) and at most 1");
  within("dropout.first_query", drop.first_query, 0, kMaxStart);
  within("dropout.first_key", drop.first_key, 0, kMaxStart);
  within("dropout.first_head", drop.first_head, 0, kMaxStart);
  within("dropout.total_heads", drop.total_heads, 0, kMaxStart);
  if (!check.ok()) return;
  const int64_t total_heads = drop.total_heads == 0 ? num_heads : drop.total_heads, heads = drop.first_head + num_heads;
  check.require(heads <= total_heads, "dropout.first_head + num_heads is ", heads, ", but dropout.total_heads is ",
                total_heads);
}

// Each entry of [batch] integers from 0 to capacity(b), which `what(b)` explains.
template <class Capacity, class What>
void check_entries(ShapeCheck& check, const char* name, const ConstTensor& t, const Sequences& sequences,
                   const Capacity& capacity, const What& what) {
  const int64_t different = std::max(sequences.num_different(), distinct(t, 0));
  for (int64_t b = 0; check.ok() && b < different; ++b) {
    const int64_t x = index_at(t, b), most = capacity(b);
    check.require(
        x >= 0 && x <= most, name, "[", b, "] is ", x, ", must be 0 to ", most, " (", [&] { return what(b); }, ")");
  }
}

// From 0, not decreasing, the last at most `total`, which is dimension 0 of `tensor`.
void check_offsets(ShapeCheck& check, const char* name, const ConstTensor& t, const char* tensor, int64_t total) {
  int64_t previous = 0;
  for (int64_t b = 0; check.ok() && b < distinct(t, 0); ++b) {
    const int64_t x = index_at(t, b);
    check.require(b > 0 || x == 0, name, "[0] is ", x, ", must be 0");
    check.require(x >= previous, name, "[", b, "] is ", x, ", less than ", name, "[", b - 1, "] = ", previous);
    check.require(x <= total, name, "[", b, "] is ", x, ", but ", tensor, " has ", total, " rows");
    previous = x;
  }
}

void check_block_table(ShapeCheck& check, const AttentionInputs& in, int64_t num_blocks, int64_t block_size) {
  const ConstTensor& table = in.block_table;
  const int64_t batch = std::max(distinct(table, 0), distinct(in.kv_lengths, 0));
  for (int64_t b = 0; check.ok() && b < batch; ++b) {
    const int64_t used = ceil_div(index_at(in.kv_lengths, b), block_size);
    for (int64_t i = 0; check.ok() && i < std::min(used, distinct(table, 1)); ++i) {
      const int64_t block = index_at(table, b, i);
      check.require(block >= 0 && block < num_blocks, "block_table[", b, "][", i, "] is ", block,
                    ", but the cache has ", num_blocks, " blocks");
    }
  }
}

// A mask or bias broadcasts to [batch, num_heads, query_len, kv_len]; a size may be larger unless exact[d].
void check_broadcast(ShapeCheck& check, const char* name, const ConstTensor& t, const int64_t (&sizes)[4],
                     const bool (&exact)[4]) {
  static constexpr const char* kNames[4] = {"batch", "num_heads", "query_len", "kv_len"};
  check.require(t.rank <= 4, name, " has rank ", t.rank, ", must be at most 4");
  for (int d = 0; check.ok() && d < t.rank; ++d) {
    const int target = 4 - t.rank + d;
    const int64_t size = t.shape[d], wanted = sizes[target];
    check.require(size == 1 || size == wanted || (!exact[target] && size > wanted), name, " dim ", d, " is ", size,
                  ", but must be 1 or ", exact[target] ? "" : "at least ", kNames[target], " = ", wanted);
  }
}

}  // namespace

Size multiply_adds(const AttentionProblem& p) {
  return Size(p.batch) * p.num_heads * p.query_len * keys_read(p) * (p.head_dim + p.value_head_dim);
}

CallDims call_dims(const AttentionInputs& in) {
  static constexpr const char* kQuery[2][4] = {{"batch", "num_heads", "query_len", "head_dim"},
                                               {"batch", "num_heads", "query_len", "value_head_dim"}};
  static constexpr const char* kKey[2][4] = {{"batch", "num_kv_heads", "kv_len", "head_dim"},
                                             {"batch", "num_kv_heads", "kv_len", "value_head_dim"}};
  static constexpr const char* kVarlenQuery[2][3] = {{"total_q", "num_heads", "head_dim"},
                                                     {"total_q", "num_heads", "value_head_dim"}};
  static constexpr const char* kVarlenKey[2][3] = {{"total_k", "num_kv_heads", "head_dim"},
                                                   {"total_k", "num_kv_heads", "value_head_dim"}};
  static constexpr const char* kVarlenStatistic[] = {"num_heads", "total_q"};
  CallDims dims = {kQuery[0], kQuery[1], std::span(kQuery[0]).first(3), kKey[0], kKey[1]};
  if (in.cu_seqlens_q) dims = {kVarlenQuery[0], kVarlenQuery[1], kVarlenStatistic, kKey[0], kKey[1]};
  if (in.cu_seqlens_k) dims.key = kVarlenKey[0], dims.value = kVarlenKey[1];
  if (in.block_table) {
    dims.key = kv_cache::dims_of(page_format(PageLayout::norm, DType::f32, PageSide::key));
    dims.value = kv_cache::dims_of(page_format(PageLayout::norm, DType::f32, PageSide::value));
  }
  return dims;
}

bool has_scales(const AttentionInputs& in) {
  return is_given(in.key_scales) || is_given(in.value_scales) || is_given(in.key_offsets) || is_given(in.value_offsets);
}

void bind_inputs(ShapeCheck& check, const AttentionInputs& in, PageLayout page_layout) {
  const CallDims dims = call_dims(in);
  check.tensor("query", in.query).dtype(kFloats).dims(dims.query);
  if (in.cu_seqlens_q) bind_offsets(check, "cu_seqlens_q", in.cu_seqlens_q);
  const bool scales = has_scales(in);
  if (in.block_table && (size_bytes(in.key.dtype) == 1 || scales)) {
    // Pages of eight bits, and scales of any call: those of integers alone have them.
    kv_cache::check_cache(check, kPageNames, pages_of(in, page_layout), kv_cache::CacheUse::read);
  } else if (panels(in, page_layout)) {
    kv_cache::check_pages(check, page_layout, "key", in.key, "value", in.value);
  } else {
    check.tensor("key", in.key).dtype(kFloats).dims(dims.key);
    check.tensor("value", in.value).dtype(kFloats).dims(dims.value);
  }
  check.require(in.block_table || !scales,
                "key_scales, value_scales, key_offsets or value_offsets is given, but key is no pages of i8 or u8");
  if (in.cu_seqlens_k) bind_offsets(check, "cu_seqlens_k", in.cu_seqlens_k);
  if (in.block_table) {
    check.tensor("block_table", in.block_table).dtype(kIntegers).dims({"batch", "max_blocks"});
    check.require(bool{in.kv_lengths}, "block_table is given, but kv_lengths is not");
    check.require(!in.cu_seqlens_k, "block_table and cu_seqlens_k are given, but only one may be");
  }
  if (in.kv_lengths) check.tensor("kv_lengths", in.kv_lengths).dtype(kIntegers).dims({"batch"});
  if (in.prefix) check.tensor("prefix", in.prefix).dtype(kIntegers).dims({"batch"});

  const DType real = in.query.dtype == DType::f64 ? DType::f64 : DType::f32;
  if (in.mask) check.tensor("mask", in.mask).dtype({DType::boolean});
  if (in.bias) {
    ShapeCheck::TensorCheck bias = check.tensor("bias", in.bias);
    in.query.dtype == real ? bias.dtype({real}) : bias.dtype({real, in.query.dtype});
  }
  if (in.alibi_slopes) {
    static constexpr const char* kDims[] = {"batch", "num_heads"};
    const size_t rank = in.alibi_slopes.rank == 1 ? 1 : 2;
    check.tensor("alibi_slopes", in.alibi_slopes).dtype({real}).dims(std::span(kDims).last(rank));
  }
  if (in.sinks) check.tensor("sinks", in.sinks).dtype({real}).dims({"num_heads"});
  if (in.drop_mask) check.tensor("drop_mask", in.drop_mask).dtype({DType::u8});
  bind_block_mask(check, in.block_mask);
  bind_sparse_indices(check, in);
  bind_tree_mask(check, in);
}

namespace {

// Of keys or values: AttentionProblem::heads_side_by_side_kv. Gaps between heads may be as long as their rows (keys and
// values of a head side by side), since all of the stretch is fetched.
bool heads_side_by_side(const ConstTensor& t, bool paged, bool varlen, PageLayout layout) {
  if (paged && layout != PageLayout::norm) return false;
  int heads_dim = 1, rows_dim = 2;
  if (paged) heads_dim = page_format(layout, t.dtype, PageSide::value).heads_dim, rows_dim = 3 - heads_dim;
  const ConstTensor rows = paged ? t : uniform_shape(t, varlen);
  const int64_t head_stride = rows.strides[heads_dim];
  const int64_t stretch = (Size(std::max<int64_t>(head_stride, 0)) * rows.shape[heads_dim]).value();
  return stretch > 0 && head_stride <= 2 * rows.shape[3] && stretch <= rows.strides[rows_dim];
}

// What shapes, strides, options and the presence of tensors say of a call; the longest sequences come later.
AttentionProblem describe_call(const ShapeCheck& check, const AttentionInputs& in, const AttentionOptions& options) {
  const auto unit_stride = [](const ConstTensor& t) { return t.shape[t.rank - 1] <= 1 || t.strides[t.rank - 1] == 1; };
  const bool paged(in.block_table), varlen_q(in.cu_seqlens_q), varlen_k(in.cu_seqlens_k);
  return {.query_dtype = in.query.dtype,
          .kv_dtype = in.key.dtype,
          .batch = check["batch"],
          .num_heads = check["num_heads"],
          .num_kv_heads = check["num_kv_heads"],
          .query_len = varlen_q ? 0 : check["query_len"],
          .kv_len = paged || varlen_k ? 0 : check["kv_len"],
          .head_dim = check["head_dim"],
          .value_head_dim = check["value_head_dim"],
          .paged = paged,
          .block_size = check["block_size"],  // 0: dense
          .key_groups = check["key_groups"],
          .value_groups = check["value_groups"],
          .has_offsets = is_given(in.key_offsets),
          .unit_stride_kv = unit_stride(in.key) && unit_stride(in.value),
          .heads_side_by_side_kv = heads_side_by_side(in.key, paged, varlen_k, options.page_layout) &&
                                   heads_side_by_side(in.value, paged, varlen_k, options.page_layout),
          .options = options,
          .varlen_q = varlen_q,
          .varlen_k = varlen_k,
          .has_prefix = bool{in.prefix},
          .has_mask = bool{in.mask},
          .has_bias = bool{in.bias},
          .has_alibi = bool{in.alibi_slopes},
          .has_sinks = bool{in.sinks},
          .has_drop_mask = bool{in.drop_mask},
          .has_tree_mask = bool{in.tree_mask}};
}

void check_heads(ShapeCheck& check, const AttentionProblem& p) {
  const auto require_dim = [&](const char* name, int64_t d) {
    check.require(d >= 1 && d <= kMaxHeadDim, name, " is ", d, ", must be 1 to ", kMaxHeadDim);
  };
  require_dim(p.rope_dim > 0 ? "head_dim + rope_dim" : "head_dim", p.head_dim);
  require_dim("value_head_dim", p.value_head_dim);
  check.require(p.num_kv_heads > 0 ? p.num_heads % p.num_kv_heads == 0 : p.num_heads == 0, "num_heads is ", p.num_heads,
                ", not a multiple of num_kv_heads = ", p.num_kv_heads);
}

// kv_lengths within the pages or the sequence's keys, entries of block_table within the pool.
void check_kv_lengths(ShapeCheck& check, const AttentionInputs& in, const AttentionProblem& p,
                      const Sequences& sequences) {
  if (!in.kv_lengths) return;
  const int64_t max_blocks = p.paged ? check["max_blocks"] : 0, capacity = (Size(max_blocks) * p.block_size).value();
  check.require(!p.paged || p.block_size >= 1, "block_size is ", p.block_size, ", must be at least 1");
  const auto most = [&](int64_t b) { return p.paged ? capacity : sequences.key_rows(b); };
  check_entries(check, "kv_lengths", in.kv_lengths, sequences, most, [&](int64_t b) {
    if (p.paged) return text(max_blocks, " blocks of ", p.block_size, " keys in block_table");
    return p.varlen_k ? text("keys of sequence ", b) : text("kv_len of key");
  });
  if (p.paged && check.ok()) check_block_table(check, in, check["num_blocks"], p.block_size);
}

void check_drop_mask(ShapeCheck& check, const AttentionInputs& in, const AttentionProblem& p) {
  check.require(
      in.drop_mask.is_contiguous(), "drop_mask ", [&] { return to_string(in.drop_mask); },
      " is not contiguous, but its bits are counted on");
  const Size bits = CallRules(in, p).drop_mask_bits();
  const int64_t bytes = in.drop_mask.num_elements(), needed = ceil_div(bits.value(), 8);
  check.require(bits.within_limit() && needed <= bytes, "drop_mask has ", bytes, " bytes, but ",
                bits.within_limit() ? "" : "at least ", bits.value(), " weights need ", needed);
}

}  // namespace

Result<AttentionProblem> pose_problem(ShapeCheck& check, const AttentionInputs& in, const AttentionOptions& options) {
  if (!check.ok()) return check.status();
  AttentionProblem p = describe_call(check, in, options);
  describe_sparse_indices(check, in, p);
  p.values_of_keys = in.key.data == in.value.data && in.key.rank == in.value.rank &&
                     p.value_head_dim <= p.head_dim - p.rope_dim && same_rows(in.key, in.value);
  check_options(check, in, options, p.num_heads);
  check_heads(check, p);
  check_sparse_sizes(check, in, p);
  if (size_bytes(p.kv_dtype) == 1) {
    check.require(p.unit_stride_kv, "key and value of ", to_string(p.kv_dtype), " must have unit stride in dim 3");
    check.require(options.path != AttentionPath::standard, "path = standard does not read pages of ",
                  to_string(p.kv_dtype));
  }
  // Offsets first, then lengths within them, then what must lie within lengths.
  if (p.varlen_q) check_offsets(check, "cu_seqlens_q", in.cu_seqlens_q, "query", check["total_q"]);
  if (p.varlen_k) check_offsets(check, "cu_seqlens_k", in.cu_seqlens_k, "key", check["total_k"]);
  if (!check.ok()) return check.status();
  const Sequences sequences(in, p);
  check_kv_lengths(check, in, p, sequences);
  if (!check.ok()) return check.status();
  check_tree_mask(check, in, p, sequences);

  int64_t longest_query = 0, longest_keys = 0;
  for (int64_t b = 0; b < sequences.num_different(); ++b) {
    longest_query = std::max(longest_query, sequences.query_len(b));
    longest_keys = std::max(longest_keys, sequences.kv_len(b));
  }
  if (p.has_prefix) {
    check_entries(
        check, "prefix", in.prefix, sequences, [&](int64_t b) { return sequences.kv_len(b); },
        [&](int64_t b) { return text("keys of sequence ", b); });
  }
  // Masks of a dense call are as wide as its tensors, whatever the lengths.
  const bool dense_keys = !p.paged && !p.varlen_k;
  const int64_t sizes[4] = {p.batch, p.num_heads, p.varlen_q ? longest_query : p.query_len,
                            dense_keys ? p.kv_len : longest_keys};
  const bool exact[4] = {true, true, !p.varlen_q, dense_keys};
  if (p.has_mask) check_broadcast(check, "mask", in.mask, sizes, exact);
  if (p.has_bias) check_broadcast(check, "bias", in.bias, sizes, exact);
  if (in.block_mask && check.ok()) p.block_mask = check_block_mask(check, in.block_mask, p, sizes[2], sizes[3]);
  p.query_len = longest_query;
  // Where there are no keys at all no length says so.
  p.kv_len = p.batch > 0 ? longest_keys : p.kv_len;
  if (p.has_drop_mask && check.ok()) check_drop_mask(check, in, p);
  if (check.ok()) check_shared_prefix(check, in, p);
  if (!check.ok()) return check.status();
  return p;
}

Result<AttentionProblem> check_forward(const AttentionInputs& in, const AttentionOutputs& out,
                                       const AttentionOptions& options) {
  ShapeCheck check("flash_attention_forward");
  bind_inputs(check, in, options.page_layout);
  const CallDims dims = call_dims(in);
  check.output("out", out.out).dtype(kFloats).dims(dims.out);
  const DType statistics = in.query.dtype == DType::f64 ? DType::f64 : DType::f32;
  const auto statistic = [&](const char* name, const Tensor& t) {
    if (t) check.output(name, t).dtype({statistics}).dims(dims.statistic);
  };
  statistic("softmax_lse", out.softmax_lse);
  statistic("softmax_max", out.softmax_max);
  statistic("softmax_sum", out.softmax_sum);
  check_dtypes(check, in, out.out.dtype);
  return pose_problem(check, in, options);
}

}  // namespace opst::attention

namespace opst {

Result<AttentionProblem> attention_problem(const AttentionInputs& inputs, const AttentionOptions& options) {
  return guarded([&]() -> Result<AttentionProblem> {
    ShapeCheck check("attention_problem");
    attention::bind_inputs(check, inputs, options.page_layout);
    attention::check_dtypes(check, inputs, inputs.query.dtype);
    return attention::pose_problem(check, inputs, options);
  });
}

}  // namespace opst
