// A position in the head of a GGUF file, and how values are stored there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "model/gguf.h"

namespace opst::model {

// The head of a file, which is copied into memory: keys, values, descriptions. The largest known ones, with
// vocabularies of 262,144 tokens, take 20 MB; a file that claims more costs no more than this.
constexpr uint64_t kLongestHead = uint64_t{128} << 20;

// Bytes of one value; 0 for strings and arrays, whose size stands in the file.
constexpr uint64_t fixed_size(GgufType type) {
  switch (type) {
    case GgufType::u8:
    case GgufType::i8:
    case GgufType::boolean:
      return 1;
    case GgufType::u16:
    case GgufType::i16:
      return 2;
    case GgufType::u32:
    case GgufType::i32:
    case GgufType::f32:
      return 4;
    case GgufType::u64:
    case GgufType::i64:
    case GgufType::f64:
      return 8;
    case GgufType::string:
    case GgufType::array:
      break;
  }
  return 0;
}

// The fewest bytes that a value of this type takes.
constexpr uint64_t smallest_size(GgufType type) {
  if (type == GgufType::string) return 8;
  if (type == GgufType::array) return 12;
  return fixed_size(type);
}

template <class T>
T load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// A position in the file. Every take_ checks what is left of the file first and has it in memory then; `problem` says
// why one failed.
class GgufCursor {
 public:
  // Bytes that are all in memory.
  explicit GgufCursor(std::span<const std::byte> bytes) : bytes_(bytes.data()), size_(bytes.size()), held_(size_) {}
  // A file of `size` bytes; `head` has room for kLongestHead of them, or for all. They are read as they are asked for.
  GgufCursor(int descriptor, std::byte* head, uint64_t size)
      : bytes_(head), size_(size), head_(head), descriptor_(descriptor) {}

  uint64_t position() const { return position_; }
  uint64_t left() const { return size_ - position_; }
  // Bytes of the file's beginning that are in memory.
  uint64_t held() const { return held_; }
  const std::string& problem() const { return problem_; }

  template <class T>
  bool take(T& value) {
    if (left() < sizeof(T)) return fail(ends(sizeof(T)));
    if (!hold(sizeof(T))) return false;
    value = load<T>(bytes_ + position_);
    position_ += sizeof(T);
    return true;
  }
  bool take_string(std::string_view& value);
  bool take_type(GgufType& type);
  bool take_value(GgufValue& value);

 private:
  bool fail(std::string problem);
  std::string ends(uint64_t wanted) const;
  bool take_array_header(GgufType& element_type, uint64_t& count) { return take_type(element_type) && take(count); }
  bool skip_elements(GgufType type, uint64_t count, int depth);
  // Has the next `count` bytes, which the file holds by its size, in memory.
  bool hold(uint64_t count);

  const std::byte* bytes_;
  uint64_t size_;              // of the file
  uint64_t held_ = 0;          // bytes of its beginning that are in memory
  std::byte* head_ = nullptr;  // bytes_, where there is more to read
  int descriptor_ = -1;
  uint64_t position_ = 0;
  std::string problem_;
};

}  // namespace opst::model
