// What `opst bench|check|plan attention` share: the options that pose a problem, and tensors that hold it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "command.h"
#include "opst/attention.h"
#include "paged_keys.h"
#include "sparse_option.h"
#include "tree_option.h"

namespace opst::tools {

struct AttentionArguments {
  std::string dtype = "f32";
  std::string kv_dtype;  // empty: dtype; else of KvFormat, or f64
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t kv_heads = 0;  // 0: heads
  std::vector<int64_t> seq = {1024};
  int64_t query_len = 0;  // 0: seq
  int64_t head_dim = 64;
  int64_t value_head_dim = 0;  // 0: head_dim
  bool causal = false;
  bool top_left = false;
  double dropout = 0;               // share of the weights that is dropped
  std::string window;               // "LEFT,RIGHT"; empty: no limits
  std::vector<std::string> varlen;  // "N", or "Q:K" queries and keys, for each sequence
  std::string mask;                 // bool, additive
  double softcap = 0;
  bool alibi = false;
  int64_t prefix = 0;
  int64_t shared_prefix = 0;
  std::string sparse;          // kSparseHelp
  std::string sparse_indices;  // kSparseIndicesHelp
  bool tree = false;           // kTreeHelp
  std::string pages;           // norm, panel32; empty: dense keys, but for formats that pages alone hold
  std::string path = "automatic";
  int64_t block_q = 0;
  int64_t block_kv = 0;
  int num_threads = 0;
  bool json = false;
};

// Options that a command's own may exclude or need. (By their names CLI11 looks options up in a function that is noexcept
// but takes memory: without any it ends the process.)
struct AttentionCommandOptions {
  CLI::Option* sparse;
  CLI::Option* shared_prefix;
  CLI::Option* tree;
};
AttentionCommandOptions add_attention_options(CLI::App& command, AttentionArguments& arguments);

// A problem with what AttentionProblem leaves to the tensors.
struct AttentionSetup {
  AttentionProblem problem;
  struct Sequence {
    int64_t query_len, kv_len;
  };
  std::vector<Sequence> sequences;  // varlen; empty: all are problem.query_len and problem.kv_len long
  int64_t prefix = 0;
  std::shared_ptr<const BlockMaskBuffer> block_mask;     // of --sparse
  std::shared_ptr<const std::vector<int32_t>> selected;  // of --sparse-indices
  std::shared_ptr<const std::vector<int64_t>> tree;      // of --tree
  std::string kv_format;                                 // paged: what keys and values are stored as

  // Whether some option beyond the causal mask is on.
  bool has_options() const;
  // What the options are compared with, one call after the other: the sequences on their own; without varlen, the same
  // problem without options.
  std::vector<AttentionSetup> baseline() const;
};

// One problem for each length of --seq, or the one of --varlen; a CommandError where the options contradict each other,
// before anything is printed.
std::vector<AttentionSetup> attention_setups(const AttentionArguments& arguments);
// ", dropout 0.1, window 256,0"
std::string options_text(const AttentionArguments& arguments);

// Pairs of a query and a key that the structure and a block mask show, of one head, summed over the sequences.
double visible_pairs(const AttentionSetup& setup);
// 2 (head_dim + value_head_dim) per visible pair and head.
double attention_flops(const AttentionSetup& setup);

// Random normal tensors [batch, heads, seq, dim], contiguous (varlen: [tokens, heads, dim]), and outputs with
// softmax_lse. Paged: key and value of inputs() are what the pages hold that run() reads.
class AttentionCase {
 public:
  explicit AttentionCase(const AttentionSetup& setup);

  const AttentionSetup& setup() const { return setup_; }
  const AttentionProblem& problem() const { return setup_.problem; }
  const AttentionInputs& inputs() const { return inputs_; }
  const AttentionOutputs& outputs() const { return outputs_; }
  // Bytes of inputs and outputs.
  int64_t size_bytes() const;

  // One value of every 256 in inputs() becomes 0, or again what it was: what a kernel would compute that loses them.
  // Pages keep the 0, since only a reference reads inputs() afterwards.
  void spoil_values(bool spoiled);

  // What run() passes: inputs(), or with the pages in the place of keys and values.
  AttentionInputs call_inputs() const;
  // Null: keys and values lie in no pages.
  const PagedKeys* pages() const { return pages_.get(); }

  // Runs the operator by the given path; run(): a CommandError where it is refused.
  Status try_run(Context& context, AttentionPath path) const;
  void run(Context& context, AttentionPath path) const;

  struct RowIndex {
    int64_t batch, head, query;
  };
  // Rows spread over batch, heads and queries, first and last included; all of them where they are no more than `most`.
  std::vector<RowIndex> sampled_rows(int64_t most) const;
  // Of out, or of softmax_lse.
  ConstTensor row_of(const Tensor& output, const RowIndex& row) const;

 private:
  Tensor make(DType dtype, std::initializer_list<int64_t> shape);
  void make_keys();
  ConstTensor make_integers(const std::vector<int64_t>& values);

  AttentionSetup setup_;
  std::vector<Buffer> buffers_;
  AttentionInputs inputs_;
  AttentionOutputs outputs_;
  std::vector<int64_t> query_starts_;  // varlen
  std::vector<double> lost_;           // values that were spoiled
  std::unique_ptr<PagedKeys> pages_;
};

}  // namespace opst::tools
