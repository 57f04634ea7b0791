#include "model/gguf_cursor.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace opst::model {

namespace {

// Arrays of arrays of ...: no known file has more than one level; a limit keeps the recursion off the stack's end.
constexpr int kMaxArrayDepth = 8;
// The head is read in pieces of this size.
constexpr uint64_t kPiece = 1 << 20;

std::string str(uint64_t value) { return std::to_string(value); }

}  // namespace

bool GgufCursor::fail(std::string problem) {
  problem_ = std::move(problem);
  return false;
}

std::string GgufCursor::ends(uint64_t wanted) const {
  return str(wanted) + " bytes wanted at offset " + str(position_) + ", but the file ends at " + str(size_);
}

bool GgufCursor::hold(uint64_t count) {
  if (count <= held_ - position_) return true;
  if (count > kLongestHead - position_) {
    return fail("the keys and descriptions before the tensors' data are longer than " + str(kLongestHead) + " bytes");
  }
  const uint64_t wanted = std::min({size_, kLongestHead, (position_ + count + kPiece - 1) / kPiece * kPiece});
  while (held_ < wanted) {
    const ssize_t got = pread(descriptor_, head_ + held_, wanted - held_, static_cast<off_t>(held_));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail(std::string("cannot read: ") + std::strerror(errno));
    if (got == 0)
      return fail("the file ended at " + str(held_) + " while it was read, but was " + str(size_) + " long");
    held_ += static_cast<uint64_t>(got);
  }
  return true;
}

bool GgufCursor::take_string(std::string_view& value) {
  uint64_t length = 0;
  if (!take(length)) return false;
  if (length > left()) return fail("a string of " + str(length) + " bytes: " + ends(length));
  if (!hold(length)) return false;
  value = {reinterpret_cast<const char*>(bytes_ + position_), length};
  position_ += length;
  return true;
}

bool GgufCursor::take_type(GgufType& type) {
  uint32_t id = 0;
  if (!take(id)) return false;
  if (id > static_cast<uint32_t>(GgufType::f64)) return fail("value type " + str(id) + " is not known");
  type = static_cast<GgufType>(id);
  return true;
}

bool GgufCursor::take_value(GgufValue& value) {
  if (!take_type(value.type)) return false;
  if (value.type == GgufType::array && !take_array_header(value.element_type, value.count)) return false;
  const uint64_t begin = position_;
  const bool taken = value.type == GgufType::array ? skip_elements(value.element_type, value.count, 1)
                                                   : skip_elements(value.type, 1, 0);
  value.bytes = {bytes_ + begin, position_ - begin};
  return taken;
}

bool GgufCursor::skip_elements(GgufType type, uint64_t count, int depth) {
  // Before any loop or product: a count that the rest of the file cannot hold.
  if (count > left() / smallest_size(type)) {
    return fail(str(count) + " values of type " + to_string(type) + " at offset " + str(position_) +
                ", but the file ends at " + str(size_));
  }
  if (type == GgufType::string) {
    std::string_view text;
    for (uint64_t i = 0; i < count; ++i) {
      if (!take_string(text)) return false;
    }
    return true;
  }
  if (type == GgufType::array) {
    if (depth >= kMaxArrayDepth) return fail("arrays nested deeper than " + str(kMaxArrayDepth));
    for (uint64_t i = 0; i < count; ++i) {
      GgufType inner_type{};
      uint64_t inner_count = 0;
      if (!take_array_header(inner_type, inner_count) || !skip_elements(inner_type, inner_count, depth + 1)) {
        return false;
      }
    }
    return true;
  }
  if (!hold(count * fixed_size(type))) return false;
  if (type == GgufType::boolean) {
    for (uint64_t i = 0; i < count; ++i) {
      if (load<uint8_t>(bytes_ + position_ + i) > 1) return fail("a bool that is neither 0 nor 1");
    }
  }
  position_ += count * fixed_size(type);
  return true;
}

}  // namespace opst::model
