// Options that pose an attention problem, read and checked.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "attention_case.h"
#include "model/llama.h"

namespace opst::tools {

namespace {

constexpr int64_t kMostHeads = int64_t{1} << 20, kMostTokens = int64_t{1} << 30;

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

int64_t whole_number(const std::string& text, const std::string& complaint) {
  int64_t number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end) usage_error(complaint);
  return number;
}

// "LEFT,RIGHT", each a whole number or "all".
void parse_window(const std::string& text, AttentionOptions& options) {
  const std::string complaint = "--window: '" + text +
                                "' is not LEFT,RIGHT: two whole numbers (keys before and after the query's own; a "
                                "negative one leaves out the nearest), or all in place of one";
  const size_t comma = text.find(',');
  if (comma == std::string::npos) usage_error(complaint);
  const auto side = [&](const std::string& word) { return word == "all" ? kUnbounded : whole_number(word, complaint); };
  options.window_left = side(text.substr(0, comma));
  options.window_right = side(text.substr(comma + 1));
}

// "N" or "Q:K".
AttentionSetup::Sequence parse_sequence(const std::string& text) {
  const size_t colon = text.find(':');
  const auto number = [&](const std::string& digits) {
    const std::string complaint =
        "--varlen: '" + text + "' is neither a length nor QUERIES:KEYS, 0 to " + std::to_string(kMostTokens);
    const int64_t length = whole_number(digits, complaint);
    if (length < 0 || length > kMostTokens) usage_error(complaint);
    return length;
  };
  const int64_t queries = number(text.substr(0, colon));
  return {queries, colon == std::string::npos ? queries : number(text.substr(colon + 1))};
}

}  // namespace

AttentionCommandOptions add_attention_options(CLI::App& command, AttentionArguments& a) {
  const auto dtypes = one_of({"f32", "bf16", "f16", "f64"});
  const auto count = between(1, kMostHeads), tokens = between(1, kMostTokens), dim = between(1, 768),
             block = between(1, 4096);
  command.add_option("--dtype", a.dtype, "Type of query and output: f32, bf16, f16, f64")
      ->check(dtypes)
      ->capture_default_str();
  std::vector<std::string> formats = {"f32", "bf16", "f16", "f64", "fp8"};
  formats.insert(formats.end(), std::begin(kByteFormats), std::end(kByteFormats));
  command
      .add_option("--kv-dtype", a.kv_dtype,
                  "Type of keys and values (default: as --dtype): f32, bf16, f16, f64; in pages f8_e4m3 (or fp8), "
                  "f8_e5m2, int8, int8_offset, int4, int4_offset")
      ->check(one_of(formats));
  command
      .add_option("--pages", a.pages,
                  "Keys and values in pages of 64 tokens: norm or panel32 (default: dense; of eight or four bits norm)")
      ->check(one_of({"norm", "panel32"}));
  CLI::Option* batch = command.add_option("--batch", a.batch, "Sequences")->check(count)->capture_default_str();
  command.add_option("--heads", a.heads, "Query heads")->check(count)->capture_default_str();
  command.add_option("--kv-heads", a.kv_heads, "Key/value heads (default: as --heads)")->check(count);
  CLI::Option* seq =
      add_list(command, "--seq", a.seq, "Lengths of the keys, separated by commas", tokens)->type_name("INT");
  command.add_option("--query-len", a.query_len, "Queries (default: as many as keys)")->check(tokens);
  command.add_option("--head-dim", a.head_dim, "Size of a query and a key, 1 to 768")
      ->check(dim)
      ->capture_default_str();
  command.add_option("--value-head-dim", a.value_head_dim, "Size of a value (default: as --head-dim)")->check(dim);
  command.add_flag("--causal", a.causal, "A query sees no later keys; the last query sees all");
  command.add_flag("--top-left", a.top_left, "With --causal, --window or --alibi: query i is at key i instead");
  command.add_option("--window", a.window,
                     "LEFT,RIGHT: a query sees so many keys before and after its own; all: no limit; negative: a band "
                     "away from its own, as in --window=-3,5");
  CLI::Option* prefix =
      command.add_option("--prefix", a.prefix, "Keys at the front that every query sees, at most --seq")
          ->check(between(0, kMostTokens));
  CLI::Option* sparse = command.add_option("--sparse", a.sparse, kSparseHelp);
  CLI::Option* indices = command.add_option("--sparse-indices", a.sparse_indices, kSparseIndicesHelp)->excludes(sparse);
  CLI::Option* shared =
      command
          .add_option(
              "--shared-prefix", a.shared_prefix,
              "Keys at the front that all sequences of --batch hold in the same pages (--pages norm if not given)")
          ->check(between(1, kMostTokens))
          ->excludes(sparse)
          ->excludes(indices);
  CLI::Option* tree =
      command.add_flag("--tree", a.tree, kTreeHelp)->excludes(sparse)->excludes(indices)->excludes(prefix);
  add_list(command, "--varlen", a.varlen,
           "Lengths of sequences in one call, separated by commas: N, or Q:K queries and keys (for --seq, --batch)",
           CLI::Validator(""))
      ->excludes(seq)
      ->excludes(batch)
      ->excludes(shared)
      ->excludes(tree);
  command.add_option("--mask", a.mask, "A random mask [1, 1, queries, keys]: bool or additive")
      ->check(one_of({"bool", "additive"}));
  command.add_flag("--alibi", a.alibi, "Linear position biases");
  command.add_option("--softcap", a.softcap, "Bound of the scores, by tanh; 0: none")->check(number_between(0, 1e6));
  command.add_option("--dropout", a.dropout, "Share of the weights that is dropped, 0 to 0.999")
      ->check(number_between(0, 0.999));
  command.add_option("--block-q", a.block_q, "Query rows of a task, 1 to 4096 (default: the plan's choice)")
      ->check(block);
  command.add_option("--block-kv", a.block_kv, "Keys of a tile, 1 to 4096 (default: the plan's choice)")->check(block);
  add_threads_option(command, a.num_threads);
  command.add_flag("--json", a.json, "Print one JSON object");
  return {sparse, shared, tree};
}

// For keys of length kv_len (varlen: of the given lengths).
static AttentionSetup attention_setup(const AttentionArguments& a, int64_t kv_len) {
  AttentionSetup setup;
  AttentionProblem& p = setup.problem;
  p.query_dtype = parse_dtype(a.dtype);
  setup.kv_format = a.kv_dtype.empty() ? a.dtype : a.kv_dtype;
  if (const model::KvType* const type = model::find_kv_type(setup.kv_format)) setup.kv_format = type->format;
  const bool bytes = is_byte_format(setup.kv_format), paged = bytes || !a.pages.empty() || a.shared_prefix > 0;
  p.kv_dtype = bytes ? DType::f32 : parse_dtype(setup.kv_format);
  if ((p.query_dtype == DType::f64) != (p.kv_dtype == DType::f64)) {
    usage_error("--kv-dtype: " + a.kv_dtype + " does not go with --dtype " + a.dtype +
                ": f64 goes with f64 only, f32, bf16 and f16 with one another");
  }
  p.batch = a.batch;
  p.num_heads = a.heads;
  p.num_kv_heads = a.kv_heads > 0 ? a.kv_heads : a.heads;
  if (p.num_heads % p.num_kv_heads != 0) {
    usage_error("--heads " + std::to_string(p.num_heads) + " is not a multiple of --kv-heads " +
                std::to_string(p.num_kv_heads));
  }
  p.kv_len = kv_len;
  p.query_len = a.query_len > 0 ? a.query_len : kv_len;
  if (!a.varlen.empty()) {
    if (a.query_len > 0) usage_error("--query-len does not go with --varlen: give QUERIES:KEYS");
    if (!a.sparse.empty() || !a.sparse_indices.empty()) {
      usage_error((a.sparse.empty() ? std::string("--sparse-indices") : std::string("--sparse")) +
                  " does not go with --varlen: blocks are drawn for sequences of one length");
    }
    p.varlen_q = true, p.varlen_k = !paged;
    p.batch = static_cast<int64_t>(a.varlen.size());
    p.query_len = p.kv_len = 0;
    for (const std::string& text : a.varlen) {
      setup.sequences.push_back(parse_sequence(text));
      p.query_len = std::max(p.query_len, setup.sequences.back().query_len);
      p.kv_len = std::max(p.kv_len, setup.sequences.back().kv_len);
    }
  }
  p.head_dim = a.head_dim;
  p.value_head_dim = a.value_head_dim > 0 ? a.value_head_dim : a.head_dim;
  p.heads_side_by_side_kv = p.varlen_k;  // [tokens, heads, dim]; of pages set_pages tells
  if (paged && p.query_dtype == DType::f64) {
    usage_error("keys and values in pages (--pages, --kv-dtype) do not go with --dtype f64, which no cache holds");
  }
  if (a.top_left && !a.causal && a.window.empty() && !a.alibi) {
    usage_error("--top-left says where the diagonal of --causal, --window or --alibi lies, but none of them is given");
  }
  p.options.causal = a.causal;
  p.options.alignment = a.top_left ? CausalAlignment::top_left : CausalAlignment::bottom_right;
  p.options.path = parse_path(a.path);
  p.options.block_q = a.block_q;
  p.options.block_kv = a.block_kv;
  if (!a.window.empty()) parse_window(a.window, p.options);
  p.options.softcap = a.softcap;
  p.options.dropout = {.keep_prob = 1 - a.dropout, .seed = 1};
  p.has_mask = a.mask == "bool";
  p.has_bias = a.mask == "additive";
  p.has_alibi = a.alibi;
  p.has_prefix = a.prefix > 0;
  setup.prefix = a.prefix;
  int64_t shortest = p.kv_len;
  for (const AttentionSetup::Sequence& s : setup.sequences) shortest = std::min(shortest, s.kv_len);
  if (a.prefix > shortest) {
    usage_error("--prefix: " + std::to_string(a.prefix) + " is more than the " + std::to_string(shortest) +
                " keys of " + (setup.sequences.empty() ? "--seq" : "a sequence of --varlen"));
  }
  if (!a.sparse.empty()) {
    if (a.prefix > 0) usage_error("--prefix does not go with --sparse: global=N is like it");
    setup.block_mask = make_sparse(a.sparse, p);
  }
  if (!a.sparse_indices.empty()) {
    setup.selected = std::make_shared<const std::vector<int32_t>>(make_sparse_indices(a.sparse_indices, p));
  }
  if (a.tree) setup.tree = make_tree(p);
  if (paged) set_pages(a.pages, setup.kv_format, p);
  if (a.shared_prefix > 0) share_prefix(a.shared_prefix, p);
  return setup;
}

std::vector<AttentionSetup> attention_setups(const AttentionArguments& a) {
  std::vector<AttentionSetup> setups;
  if (!a.varlen.empty()) return {attention_setup(a, 0)};
  for (const int64_t kv_len : a.seq) setups.push_back(attention_setup(a, kv_len));
  return setups;
}

std::string options_text(const AttentionArguments& a) {
  std::string text;
  char number[64];
  if (!a.window.empty()) {
    text += ", window " + a.window;
  }
  if (a.prefix > 0) text += ", prefix " + std::to_string(a.prefix);
  if (!a.sparse.empty()) text += ", sparse " + a.sparse;
  if (!a.sparse_indices.empty()) text += ", sparse indices " + a.sparse_indices;
  if (a.tree) text += ", a tree";
  if (a.shared_prefix > 0) text += ", shared prefix " + std::to_string(a.shared_prefix);
  if (!a.kv_dtype.empty()) text += ", keys " + a.kv_dtype;
  if (!a.pages.empty()) text += ", " + a.pages + " pages";
  if (!a.varlen.empty()) text += ", " + std::to_string(a.varlen.size()) + " sequences";
  if (!a.mask.empty()) text += ", " + a.mask + " mask";
  if (a.alibi) text += ", ALiBi";
  std::snprintf(number, sizeof(number), ", softcap %g", a.softcap);
  if (a.softcap > 0) text += number;
  std::snprintf(number, sizeof(number), ", dropout %g", a.dropout);
  if (a.dropout > 0) text += number;
  return text;
}

bool AttentionSetup::has_options() const {
  const AttentionOptions& o = problem.options;
  return !sequences.empty() || block_mask != nullptr || selected != nullptr || problem.options.shared_prefix > 0 ||
         tree != nullptr || problem.has_mask || problem.has_bias || problem.has_alibi || problem.has_prefix ||
         o.softcap > 0 || o.dropout.keep_prob < 1 || o.window_left != kUnbounded || o.window_right != kUnbounded;
}

std::vector<AttentionSetup> AttentionSetup::baseline() const {
  AttentionSetup plain = *this;
  if (!sequences.empty()) {
    std::vector<AttentionSetup> parts;
    plain.problem.varlen_q = plain.problem.varlen_k = false;  // in pages, where they were
    plain.problem.batch = 1;
    if (!plain.problem.paged) plain.problem.heads_side_by_side_kv = false;  // head after head
    plain.sequences.clear();
    for (const Sequence& s : sequences) {
      plain.problem.query_len = s.query_len, plain.problem.kv_len = s.kv_len;
      parts.push_back(plain);
    }
    return parts;
  }
  AttentionProblem& p = plain.problem;
  if (p.options.shared_prefix > 0) {
    p.options.shared_prefix = 0;
    p.shared_prefix = {};
    return {plain};
  }
  p.has_mask = p.has_bias = p.has_alibi = p.has_prefix = false;
  plain.prefix = 0;
  plain.block_mask = nullptr;
  p.block_mask = {};
  plain.selected = nullptr;
  p.sparse_indices = {};
  plain.tree = nullptr;
  p.has_tree_mask = false;
  p.options.softcap = 0;
  p.options.dropout = {};
  p.options.window_left = p.options.window_right = kUnbounded;
  return {plain};
}

double visible_pairs(const AttentionSetup& setup) {
  const auto pairs_of = [&](int64_t query_len, int64_t kv_len) {
    return count_visible(setup.problem.options, query_len, kv_len, setup.prefix).pairs;
  };
  if (setup.block_mask != nullptr) {
    return visible_pairs(setup.block_mask->mask, setup.problem) * static_cast<double>(setup.problem.batch);
  }
  if (setup.selected != nullptr) return visible_pairs(*setup.selected, setup.problem);
  if (setup.tree != nullptr) return visible_pairs_of_tree(*setup.tree, setup.problem);
  if (setup.sequences.empty()) {
    return pairs_of(setup.problem.query_len, setup.problem.kv_len) * static_cast<double>(setup.problem.batch);
  }
  double pairs = 0;
  for (const AttentionSetup::Sequence& s : setup.sequences) pairs += pairs_of(s.query_len, s.kv_len);
  return pairs;
}

double attention_flops(const AttentionSetup& setup) {
  const AttentionProblem& p = setup.problem;
  return 2.0 * static_cast<double>(p.head_dim + p.value_head_dim) * visible_pairs(setup) *
         static_cast<double>(p.num_heads);
}

}  // namespace opst::tools
