// Tokenizer: byte-level BPE as a GGUF file describes it (tokenizer.ggml.model = gpt2, tokenizer.ggml.pre = smollm).
//
//   text --cut at special tokens--> parts --pre-tokenise--> words --bytes to symbols, merge by rank--> ids
//
// Pre-tokenising: every character of category N is a word; what lies between is split by GPT-2's pattern
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
// whose look-ahead sees no further than the next number. Merging a word of n bytes takes O(n log n).
// Bytes that have no token of their own and were not merged into one are dropped.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "model/gguf.h"

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
  // Ends a text.
  std::optional<int32_t> end_token() const { return end_token_; }

  // `text` must be UTF-8. parse_special: the texts of special tokens ("<|im_end|>") become those tokens; otherwise they
  // are plain text.
  Result<std::vector<int32_t>> encode(std::string_view text, bool parse_special) const;

  // The bytes that a token stands for, which need not be whole characters; of a special token, its name.
  // `id` must be in [0, vocab_size()).
  std::string_view piece(int32_t id) const { return pieces_[static_cast<size_t>(id)]; }
  bool is_special(int32_t id) const { return special_[static_cast<size_t>(id)]; }
  std::optional<int32_t> find_special(std::string_view name) const;

 private:
  struct Merge {
    int32_t rank;
    int32_t result;
  };

  Tokenizer() = default;
  void append_words(std::string_view text, std::vector<int32_t>& ids) const;
  void append_word(std::string_view word, std::vector<int32_t>& ids) const;

  std::vector<std::string> pieces_;
  std::vector<bool> special_;
  std::vector<std::pair<std::string, int32_t>> special_names_;  // the longest first
  int32_t byte_ids_[256] = {};                                  // kNoToken: a byte without a token
  std::unordered_map<uint64_t, Merge> merges_;                  // left id << 32 | right id
  std::optional<int32_t> leading_token_, end_token_;
};

}  // namespace opst::model
