// libFuzzer target of what --json prints: whatever bytes a model's tokens are made of, cut anywhere, the output is JSON
// that holds the same characters. The first byte is the length of a token.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "model/utf8.h"

using opst::model::is_valid_utf8;
using opst::model::Utf8Stream;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t step = data[0] % 7 + size_t{1};
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  Utf8Stream stream, whole;
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += step) text += stream.push(bytes.substr(i, step));
  text += stream.finish();
  std::string at_once = whole.push(bytes);
  at_once += whole.finish();
  if (text != at_once || !is_valid_utf8(text) || (is_valid_utf8(bytes) && text != bytes)) std::abort();
  const nlohmann::ordered_json json = {{"text", text}, {"key " + text, bytes.size()}};
  if (nlohmann::ordered_json::parse(json.dump()) != json) std::abort();
  return 0;
}
