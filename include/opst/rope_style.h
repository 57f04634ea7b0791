// Which two elements of a head turn together in a rotary embedding (rowwise.h, kv_cache.h).
#pragma once

#include <cstdint>

namespace opst {

enum class RopeStyle : uint8_t {
  pairs,   // 2i and 2i + 1 (GGUF's llama files)
  halves,  // i and i + half (GPT-NeoX, Hugging Face)
};
const char* to_string(RopeStyle style);

}  // namespace opst
