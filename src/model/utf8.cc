#include "model/utf8.h"

#include <utf8proc.h>

namespace opst::model {

namespace {
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
}

Utf8Char first_char(std::string_view text) {
  using State = Utf8Char::State;
  const auto byte = [&](int i) { return static_cast<unsigned char>(text[static_cast<size_t>(i)]); };
  const unsigned lead = byte(0);
  if (lead < 0x80) return {State::complete, 1, lead};
  if (lead < 0xC2 || lead > 0xF4) return {State::invalid, 1, 0};
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range keeps out overlong forms, surrogates and what is over U+10FFFF.
  unsigned low = 0x80, high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  char32_t value = lead & (0x7Fu >> length);
  for (int i = 1; i < length; ++i) {
    if (static_cast<size_t>(i) == text.size()) return {State::cut_short, i, 0};
    if (byte(i) < low || byte(i) > high) return {State::invalid, i, 0};
    value = value << 6 | (byte(i) & 0x3Fu);
    low = 0x80, high = 0xBF;
  }
  return {State::complete, length, value};
}

bool is_valid_utf8(std::string_view text) {
  while (!text.empty()) {
    const Utf8Char next = first_char(text);
    if (next.state != Utf8Char::State::complete) return false;
    text.remove_prefix(static_cast<size_t>(next.length));
  }
  return true;
}

void append_utf8(std::string& text, char32_t value) {
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(value), bytes);
  text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(length));
}

CharClass char_class(char32_t value) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(value))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharClass::letter;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharClass::number;
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return CharClass::space;
    default:
      break;
  }
  // White_Space is Z* and these controls.
  if ((value >= 0x09 && value <= 0x0D) || value == 0x85) return CharClass::space;
  return CharClass::other;
}

int display_columns(char32_t value) { return utf8proc_charwidth(static_cast<utf8proc_int32_t>(value)); }

std::string Utf8Stream::push(std::string_view bytes) {
  waiting_ += bytes;
  std::string text;
  std::string_view rest = waiting_;
  while (!rest.empty()) {
    const Utf8Char next = first_char(rest);
    if (next.state == Utf8Char::State::cut_short) break;
    const auto length = static_cast<size_t>(next.length);
    text += next.state == Utf8Char::State::complete ? rest.substr(0, length) : kReplacement;
    rest.remove_prefix(length);
  }
  waiting_.erase(0, waiting_.size() - rest.size());
  return text;
}

std::string Utf8Stream::finish() {
  std::string text;
  if (!waiting_.empty()) text = kReplacement;
  waiting_.clear();
  return text;
}

}  // namespace opst::model
