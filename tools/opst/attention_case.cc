#include "attention_case.h"

#include <algorithm>

#include "testing/random.h"

namespace opst::tools {

namespace {

DType parse_dtype(const std::string& name) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
    if (name == to_string(dtype)) return dtype;
  }
  usage_error("--dtype: " + name + " is not f32, bf16, f16 or f64");
}

AttentionPath parse_path(const std::string& name) {
  for (const AttentionPath path : {AttentionPath::automatic, AttentionPath::standard, AttentionPath::flash}) {
    if (name == to_string(path)) return path;
  }
  usage_error("--path: " + name + " is not automatic, standard or flash");
}

}  // namespace

void add_attention_options(CLI::App& command, AttentionArguments& a) {
  const auto dtypes = CLI::IsMember({"f32", "bf16", "f16", "f64"});
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 40);
  command.add_option("--dtype", a.dtype, "Type of query and output: f32, bf16, f16, f64")
      ->check(dtypes)
      ->capture_default_str();
  command.add_option("--kv-dtype", a.kv_dtype, "Type of keys and values (default: as --dtype)")->check(dtypes);
  command.add_option("--batch", a.batch, "Sequences")->check(positive)->capture_default_str();
  command.add_option("--heads", a.heads, "Query heads")->check(positive)->capture_default_str();
  command.add_option("--kv-heads", a.kv_heads, "Key/value heads (default: as --heads)")->check(positive);
  command.add_option("--seq", a.seq, "Lengths of the keys, separated by commas")
      ->delimiter(',')
      ->check(positive)
      ->capture_default_str();
  command.add_option("--query-len", a.query_len, "Queries (default: as many as keys)")->check(positive);
  command.add_option("--head-dim", a.head_dim, "Size of a query and a key")->check(positive)->capture_default_str();
  command.add_option("--value-head-dim", a.value_head_dim, "Size of a value (default: as --head-dim)")->check(positive);
  command.add_flag("--causal", a.causal, "A query sees no later keys; the last query sees all");
  command.add_flag("--top-left", a.top_left, "With --causal: query i sees keys 0 to i instead");
  command.add_option("--block-q", a.block_q, "Rows of a tile (default: the plan's choice)")->check(positive);
  command.add_option("--block-kv", a.block_kv, "Keys of a tile (default: the plan's choice)")->check(positive);
  add_threads_option(command, a.num_threads);
  command.add_flag("--json", a.json, "Print one JSON object");
}

AttentionProblem attention_problem(const AttentionArguments& a, int64_t kv_len) {
  AttentionProblem p;
  p.query_dtype = parse_dtype(a.dtype);
  p.kv_dtype = a.kv_dtype.empty() ? p.query_dtype : parse_dtype(a.kv_dtype);
  p.batch = a.batch;
  p.num_heads = a.heads;
  p.num_kv_heads = a.kv_heads > 0 ? a.kv_heads : a.heads;
  if (p.num_heads % p.num_kv_heads != 0) {
    usage_error("--heads " + std::to_string(p.num_heads) + " is not a multiple of --kv-heads " +
                std::to_string(p.num_kv_heads));
  }
  p.kv_len = kv_len;
  p.query_len = a.query_len > 0 ? a.query_len : kv_len;
  p.head_dim = a.head_dim;
  p.value_head_dim = a.value_head_dim > 0 ? a.value_head_dim : a.head_dim;
  p.options.causal = a.causal;
  p.options.alignment = a.top_left ? CausalAlignment::top_left : CausalAlignment::bottom_right;
  p.options.path = parse_path(a.path);
  p.options.block_q = a.block_q;
  p.options.block_kv = a.block_kv;
  return p;
}

double visible_pairs(const AttentionProblem& p) {
  double pairs = 0;
  if (!p.options.causal) {
    pairs = static_cast<double>(p.query_len) * static_cast<double>(p.kv_len);
  } else {
    const int64_t diagonal = p.options.alignment == CausalAlignment::top_left ? 0 : p.kv_len - p.query_len;
    for (int64_t i = 0; i < p.query_len; ++i) {
      pairs += static_cast<double>(std::clamp<int64_t>(i + diagonal + 1, 0, p.kv_len));
    }
  }
  return pairs * static_cast<double>(p.batch);
}

double attention_flops(const AttentionProblem& p) {
  return 2.0 * static_cast<double>(p.head_dim + p.value_head_dim) * visible_pairs(p) * static_cast<double>(p.num_heads);
}

AttentionCase::AttentionCase(const AttentionProblem& problem) : problem_(problem) {
  const AttentionProblem& p = problem_;
  inputs_.query = make(p.query_dtype, {p.batch, p.num_heads, p.query_len, p.head_dim});
  inputs_.key = make(p.kv_dtype, {p.batch, p.num_kv_heads, p.kv_len, p.head_dim});
  inputs_.value = make(p.kv_dtype, {p.batch, p.num_kv_heads, p.kv_len, p.value_head_dim});
  outputs_.out = make(p.query_dtype, {p.batch, p.num_heads, p.query_len, p.value_head_dim});
  outputs_.softmax_lse =
      make(p.query_dtype == DType::f64 ? DType::f64 : DType::f32, {p.batch, p.num_heads, p.query_len});
}

Tensor AttentionCase::make(DType dtype, std::initializer_list<int64_t> shape) {
  Tensor t = Tensor::contiguous(dtype, shape, nullptr);
  buffers_.push_back(value_or_fail(Buffer::allocate(t.num_elements() * opst::size_bytes(dtype))));
  t.data = buffers_.back().data();
  test::Random random(buffers_.size());
  test::fill(t, test::Fill::normal, random);
  return t;
}

int64_t AttentionCase::size_bytes() const {
  int64_t total = 0;
  for (const Buffer& buffer : buffers_) total += buffer.size_bytes();
  return total;
}

void AttentionCase::run(Context& context, AttentionPath path) const {
  AttentionOptions options = problem_.options;
  options.path = path;
  const Status status = flash_attention_forward(context, inputs_, outputs_, options);
  if (!status.ok()) throw CommandError(1, status.message());
}

std::vector<AttentionCase::RowIndex> AttentionCase::sampled_rows(int64_t most) const {
  const AttentionProblem& p = problem_;
  const int64_t total = p.batch * p.num_heads * p.query_len;
  const int64_t count = std::min(total, most);
  std::vector<RowIndex> rows;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t at = count == 1 ? total - 1 : n * (total - 1) / (count - 1);
    rows.push_back({at / p.query_len / p.num_heads, at / p.query_len % p.num_heads, at % p.query_len});
  }
  return rows;
}

}  // namespace opst::tools
