// Tokenizer: byte-level BPE as a GGUF file describes it (tokenizer.ggml.model = gpt2, tokenizer.ggml.pre = smollm).
//
//   text --cut at tokens that it names--> parts --pre-tokenise--> words --bytes to symbols, merge by rank--> ids
//
// Pre-tokenising: every character of category N is a word; what lies between is split by GPT-2's pattern
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// whose look-ahead sees no further than the next number. Merging a word of n bytes takes O(n log n).
// Bytes that have no token of their own and were not merged into one are dropped.
//
// A file gives each token a type, which answers two questions:
//
//   type             its name in a text becomes the token      in an answer
//   normal, byte     no: merges make it                        shown
//   user-defined     always                                    shown
//   control, unknown where parse_special is set                hidden
//   unused           never                                     shown
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/gguf.h"
#include "model/token_names.h"

namespace opst::model {

class Tokenizer {
 public:
  // Copies what it needs. Any other tokenizer model or pre-tokeniser is refused by name.
  static Result<Tokenizer> from_gguf(const GgufFile& file);

  Tokenizer(Tokenizer&&) = default;
  Tokenizer& operator=(Tokenizer&&) = default;

  int32_t vocab_size() const { return static_cast<int32_t>(pieces_.size()); }
  // Put in front of a text; none where the file does not ask for it.
  std::optional<int32_t> leading_token() const { return leading_token_; }
  // Whether the token ends an answer: the file's end of text, of turn and of message, and the mark that ends a turn in
  // its chat template.
  bool is_end(int32_t id) const { return std::find(ends_.begin(), ends_.end(), id) != ends_.end(); }

  // `text` must be UTF-8. parse_special: the names of control tokens ("<|im_end|>") become those tokens; otherwise they
  // are plain text.
  Result<std::vector<int32_t>> encode(std::string_view text, bool parse_special) const;

  // The bytes that a token stands for, which need not be whole characters; of a token with a name, its name.
  // `id` must be in [0, vocab_size()).
  std::string_view piece(int32_t id) const { return pieces_[static_cast<size_t>(id)]; }
  // Not part of an answer's text: a control token.
  bool is_hidden(int32_t id) const { return hidden_[static_cast<size_t>(id)]; }
  // The control or user-defined token of that name.
  std::optional<int32_t> find_named(std::string_view name) const { return all_names_.find(name); }

 private:
  struct Merge {
    int32_t rank;
    int32_t result;
  };
  // Of left id << 32 | right id. Mixed, as the standard's hash of an integer is the integer, and a file's pairs could
  // fall into one bucket.
  struct PairHash {
    size_t operator()(uint64_t pair) const {
      pair = (pair ^ pair >> 31) * 0x9E3779B97F4A7C15u;
      pair = (pair ^ pair >> 29) * 0xBF58476D1CE4E5B9u;
      return pair ^ pair >> 32;
    }
  };

  using Ids = std::unordered_map<std::string_view, int32_t>;

  Tokenizer() = default;
  Status read_tokens(const GgufFile& file, Ids& ids);
  Status read_merges(const GgufFile& file, const Ids& ids);
  Status read_marks(const GgufFile& file);
  void append_words(std::string_view text, std::vector<int32_t>& ids) const;
  void append_word(std::string_view word, std::vector<int32_t>& ids) const;

  std::vector<std::string> pieces_;
  std::vector<bool> hidden_;
  TokenNames all_names_, user_defined_names_;
  int32_t byte_ids_[256] = {};  // kNoToken: a byte without a token
  std::unordered_map<uint64_t, Merge, PairHash> merges_;
  std::optional<int32_t> leading_token_;
  std::vector<int32_t> ends_;
};

}  // namespace opst::model
