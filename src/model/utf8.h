// UTF-8 and the Unicode classes that the tokenizer needs.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace opst::model {

struct Utf8Char {
  enum class State : uint8_t { complete, invalid, cut_short };
  State state;
  // In bytes. complete: of the character; invalid: of its longest well-formed beginning, at least 1; cut_short: of all
  // that is there.
  int length;
  char32_t value;  // of a complete character
};
// The character at the start of `text`, which is not empty. Surrogates, overlong forms and values over U+10FFFF are
// invalid. cut_short: `text` ends inside a character that more bytes may still complete.
Utf8Char first_char(std::string_view text);

bool is_valid_utf8(std::string_view text);
void append_utf8(std::string& text, char32_t value);

enum class CharClass : uint8_t { letter, number, space, other };
// letter: categories L*; number: N*; space: the property White_Space.
CharClass char_class(char32_t value);

// Columns that a terminal shows the character in: 0, 1 or 2.
int display_columns(char32_t value);

// Bytes in, whole characters out: what is invalid becomes U+FFFD, a character that is not complete yet waits.
class Utf8Stream {
 public:
  // The characters that `bytes` completes.
  std::string push(std::string_view bytes);
  // The end of the text: U+FFFD for a character that was never completed.
  std::string finish();

 private:
  std::string waiting_;  // at most 3 bytes
};

}  // namespace opst::model
