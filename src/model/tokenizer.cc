#include "model/tokenizer.h"

#include <algorithm>
#include <queue>

#include "core/guarded.h"
#include "model/utf8.h"

namespace opst::model {

namespace {

constexpr int32_t kNoToken = -1;
constexpr int32_t kNormalType = 1, kUnknownType = 2, kControlType = 3, kUserDefinedType = 4, kUnusedType = 5;
// The largest known vocabularies have 262,144 tokens.
constexpr size_t kMostTokens = size_t{1} << 21;
// What ends a turn in the chat templates that are around.
constexpr const char* kTurnEnds[] = {"<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>"};

// GPT-2 writes each byte as a printable character: itself where that is printable Latin-1, else the next free one from
// U+0100 on.
struct ByteAlphabet {
  char32_t of_byte[256];
  int to_byte[512];

  ByteAlphabet() {
    std::fill(std::begin(to_byte), std::end(to_byte), -1);
    char32_t next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      of_byte[byte] = printable ? byte : next++;
      to_byte[of_byte[byte]] = static_cast<int>(byte);
    }
  }

  // The bytes that a token's text stands for; false for a character outside the alphabet.
  bool decode(std::string_view text, std::string& bytes) const {
    while (!text.empty()) {
      const Utf8Char next = first_char(text);
      if (next.state != Utf8Char::State::complete || next.value >= std::size(to_byte) || to_byte[next.value] < 0) {
        return false;
      }
      bytes += static_cast<char>(to_byte[next.value]);
      text.remove_prefix(static_cast<size_t>(next.length));
    }
    return true;
  }
};

uint64_t pair_key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

std::string str(size_t value) { return std::to_string(value); }

// An optional token id, checked against the vocabulary.
Result<std::optional<int32_t>> token_id(const GgufFile& file, const char* key, size_t vocab_size) {
  if (!file.has(key)) return std::optional<int32_t>();
  const Result<int64_t> id = file.integer(key);
  if (!id.ok()) return id.status();
  if (id.value() < 0 || static_cast<uint64_t>(id.value()) >= vocab_size) {
    return file.error("key '" + std::string(key) + "' is " + std::to_string(id.value()) + ", but there are " +
                      str(vocab_size) + " tokens");
  }
  return std::optional<int32_t>(static_cast<int32_t>(id.value()));
}

Result<bool> flag(const GgufFile& file, const char* key) {
  if (!file.has(key)) return false;
  return file.boolean(key);
}

}  // namespace

Result<Tokenizer> Tokenizer::from_gguf(const GgufFile& file) try {
  const Result<std::string_view> model = file.string("tokenizer.ggml.model");
  if (!model.ok()) return model.status();
  if (model.value() != "gpt2") {
    return file.error("tokenizer.ggml.model is " + quoted(model.value()) + ", but only 'gpt2' is supported");
  }
  const Result<std::string_view> pre = file.string("tokenizer.ggml.pre");
  if (!pre.ok()) return pre.status();
  if (pre.value() != "smollm") {
    return file.error("tokenizer.ggml.pre (pre-tokeniser) is " + quoted(pre.value()) +
                      ", but only 'smollm' is supported");
  }
  for (const char* key : {"tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_eos_token",
                          "tokenizer.ggml.add_sep_token", "tokenizer.ggml.remove_extra_whitespaces"}) {
    const Result<bool> value = flag(file, key);
    if (!value.ok()) return value.status();
    if (value.value()) return file.error("key '" + std::string(key) + "' is true, which is not supported");
  }
  Tokenizer tokenizer;
  Ids ids;
  if (Status status = tokenizer.read_tokens(file, ids); !status.ok()) return status;
  if (Status status = tokenizer.read_merges(file, ids); !status.ok()) return status;
  if (Status status = tokenizer.read_marks(file); !status.ok()) return status;
  return tokenizer;
} catch (...) {
  return status_of_exception();
}

Status Tokenizer::read_tokens(const GgufFile& file, Ids& ids) {
  const auto texts = file.strings("tokenizer.ggml.tokens");
  if (!texts.ok()) return texts.status();
  const auto types = file.integers("tokenizer.ggml.token_type");
  if (!types.ok()) return types.status();
  const size_t vocab_size = texts.value().size();
  if (vocab_size == 0) return file.error("key 'tokenizer.ggml.tokens' is empty");
  if (vocab_size > kMostTokens) {
    return file.error("key 'tokenizer.ggml.tokens' has " + str(vocab_size) + " elements, at most " + str(kMostTokens) +
                      " are supported");
  }
  if (types.value().size() != vocab_size) {
    return file.error("key 'tokenizer.ggml.token_type' has " + str(types.value().size()) + " elements, but there are " +
                      str(vocab_size) + " tokens");
  }
  const ByteAlphabet alphabet;
  std::vector<std::pair<std::string, int32_t>> all_names, user_defined_names;
  ids.reserve(vocab_size);
  pieces_.resize(vocab_size);
  hidden_.resize(vocab_size);
  for (size_t i = 0; i < vocab_size; ++i) {
    const std::string_view text = texts.value()[i];
    const int32_t type = types.value()[i];
    const auto id = static_cast<int32_t>(i);
    const auto [known, is_new] = ids.emplace(text, id);
    if (!is_new && type != kUnusedType) {
      // An unused token never stands for its text, so the text is free for another.
      if (types.value()[static_cast<size_t>(known->second)] != kUnusedType) {
        return file.error("token " + str(i) + " " + quoted(text) + " appears twice");
      }
      known->second = id;
    }
    hidden_[i] = type == kControlType || type == kUnknownType;
    if (hidden_[i] || type == kUserDefinedType) {
      if (text.empty()) return file.error("special token " + str(i) + " has no text");
      if (text.size() > TokenNames::kLongest) {
        return file.error("special token " + str(i) + " " + quoted(text) + " has " + str(text.size()) +
                          " bytes, at most " + str(TokenNames::kLongest) + " are supported");
      }
      pieces_[i] = text;
      all_names.emplace_back(text, id);
      if (type == kUserDefinedType) user_defined_names.emplace_back(text, id);
    } else if (!alphabet.decode(text, pieces_[i])) {
      // Unused entries may hold anything; no text is ever encoded to them.
      if (type == kNormalType) {
        return file.error("token " + str(i) + " " + quoted(text) + " has a character outside the byte alphabet");
      }
      pieces_[i] = text;
    }
  }
  all_names_ = TokenNames(std::move(all_names));
  user_defined_names_ = TokenNames(std::move(user_defined_names));
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::string symbol;
    append_utf8(symbol, alphabet.of_byte[byte]);
    const auto found = ids.find(symbol);
    byte_ids_[byte] = found == ids.end() ? kNoToken : found->second;
  }
  return {};
}

Status Tokenizer::read_merges(const GgufFile& file, const Ids& ids) {
  const auto merges = file.strings("tokenizer.ggml.merges");
  if (!merges.ok()) return merges.status();
  merges_.reserve(merges.value().size());
  for (size_t rank = 0; rank < merges.value().size(); ++rank) {
    const std::string_view merge = merges.value()[rank];
    const size_t space = merge.find(' ');
    const std::string where = "tokenizer.ggml.merges: element " + str(rank) + " " + quoted(merge);
    if (space == std::string_view::npos || merge.find(' ', space + 1) != std::string_view::npos) {
      return file.error(where + " is not two symbols");
    }
    const std::string joined = std::string(merge.substr(0, space)) + std::string(merge.substr(space + 1));
    const auto left = ids.find(merge.substr(0, space)), right = ids.find(merge.substr(space + 1));
    const auto result = ids.find(joined);
    if (left == ids.end() || right == ids.end() || result == ids.end()) {
      return file.error(where + " has a part or a result that is no token");
    }
    // The first of equal merges has the rank.
    merges_.emplace(pair_key(left->second, right->second), Merge{static_cast<int32_t>(rank), result->second});
  }
  return {};
}

Status Tokenizer::read_marks(const GgufFile& file) {
  for (const char* key :
       {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"}) {
    const auto end = token_id(file, key, pieces_.size());
    if (!end.ok()) return end.status();
    if (end.value()) ends_.push_back(*end.value());
  }
  if (file.has("tokenizer.chat_template")) {
    const Result<std::string_view> chat_template = file.string("tokenizer.chat_template");
    if (!chat_template.ok()) return chat_template.status();
    for (const char* mark : kTurnEnds) {
      const std::optional<int32_t> id = find_named(mark);
      if (id && chat_template.value().find(mark) != std::string_view::npos) ends_.push_back(*id);
    }
  }
  const Result<bool> add_bos = flag(file, "tokenizer.ggml.add_bos_token");
  if (!add_bos.ok()) return add_bos.status();
  if (add_bos.value()) {
    const auto bos = token_id(file, "tokenizer.ggml.bos_token_id", pieces_.size());
    if (!bos.ok()) return bos.status();
    if (!bos.value()) return file.error("add_bos_token is true, but key 'tokenizer.ggml.bos_token_id' is missing");
    leading_token_ = bos.value();
  }
  return {};
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, bool parse_special) const try {
  if (!is_valid_utf8(text)) return Status::invalid_argument("text is not valid UTF-8");
  const TokenNames& names = parse_special ? all_names_ : user_defined_names_;
  std::vector<int32_t> ids;
  size_t plain_begin = 0;
  for (size_t i = 0; i < text.size();) {
    const TokenNames::Match match = names.longest(text.substr(i));
    if (match.length == 0) {
      ++i;
      continue;
    }
    append_words(text.substr(plain_begin, i - plain_begin), ids);
    ids.push_back(match.id);
    i += match.length;
    plain_begin = i;
  }
  append_words(text.substr(plain_begin), ids);
  return ids;
} catch (...) {
  return status_of_exception();
}

void Tokenizer::append_words(std::string_view text, std::vector<int32_t>& ids) const {
  struct Char {
    size_t begin;
    char32_t value;
    CharClass kind;
  };
  // One stretch between numbers (or around one), with a sentinel for its end.
  std::vector<Char> chars;
  const auto split_stretch = [&](size_t end) {
    chars.push_back({end, 0, CharClass::other});
    const size_t n = chars.size() - 1;
    const auto run_end = [&](size_t i, CharClass kind) {
      while (i < n && chars[i].kind == kind) ++i;
      return i;
    };
    for (size_t i = 0; i < n;) {
      size_t j = i;
      if (chars[i].value == U'\'') {
        for (const std::string_view suffix : {"s", "t", "re", "ve", "m", "ll", "d"}) {
          if (text.substr(chars[i].begin + 1, std::min(suffix.size(), end - chars[i].begin - 1)) == suffix) {
            j = i + 1 + suffix.size();
            break;
          }
        }
      }
      if (j == i) {
        const size_t word = chars[i].value == U' ' && i + 1 < n && chars[i + 1].kind != CharClass::space ? i + 1 : i;
        if (chars[word].kind != CharClass::space) {
          j = run_end(word, chars[word].kind);
        } else {
          j = run_end(i, CharClass::space);
          // The last space belongs to what follows, if anything does.
          if (j < n && j - i > 1) --j;
        }
      }
      append_word(text.substr(chars[i].begin, chars[j].begin - chars[i].begin), ids);
      i = j;
    }
    chars.clear();
  };

  for (size_t i = 0; i < text.size();) {
    const Utf8Char next = first_char(text.substr(i));
    const auto length = static_cast<size_t>(next.length);
    const CharClass kind = char_class(next.value);
    if (kind == CharClass::number) {
      split_stretch(i);
      append_word(text.substr(i, length), ids);
    } else {
      chars.push_back({i, next.value, kind});
    }
    i += length;
  }
  split_stretch(text.size());
}

void Tokenizer::append_word(std::string_view word, std::vector<int32_t>& ids) const {
  struct Symbol {
    int32_t id;  // kNoToken: dropped byte, or merged into the one before
    int64_t previous, next;
  };
  struct Candidate {
    int32_t rank;
    int64_t left, right;
    int32_t left_id, right_id, result;
    // For a queue with the largest on top: the lowest rank, then the leftmost.
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }
  };
  const auto n = static_cast<int64_t>(word.size());
  std::vector<Symbol> symbols(word.size());
  const auto at = [&](int64_t i) -> Symbol& { return symbols[static_cast<size_t>(i)]; };
  for (int64_t i = 0; i < n; ++i) {
    at(i) = {byte_ids_[static_cast<unsigned char>(word[static_cast<size_t>(i)])], i - 1, i + 1};
  }
  std::priority_queue<Candidate> queue;
  const auto consider = [&](int64_t left, int64_t right) {
    if (left < 0 || right >= n || at(left).id == kNoToken || at(right).id == kNoToken) return;
    const auto merge = merges_.find(pair_key(at(left).id, at(right).id));
    if (merge == merges_.end()) return;
    queue.push({merge->second.rank, left, right, at(left).id, at(right).id, merge->second.result});
  };
  for (int64_t i = 0; i + 1 < n; ++i) consider(i, i + 1);
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    // Stale: one of the two has been merged meanwhile.
    if (at(best.left).id != best.left_id || at(best.right).id != best.right_id) continue;
    Symbol &left = at(best.left), &right = at(best.right);
    left.id = best.result;
    left.next = right.next;
    right.id = kNoToken;
    if (left.next < n) at(left.next).previous = best.left;
    consider(left.previous, best.left);
    consider(best.left, left.next);
  }
  for (int64_t i = 0; i < n; i = at(i).next) {
    if (at(i).id != kNoToken) ids.push_back(at(i).id);
  }
}

}  // namespace opst::model
