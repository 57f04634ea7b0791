// text(parts..): the parts of a message, one behind the other; joined(..): a list of parts; name_of(..): the name of an
// enumerator.
//
//   text("dim ", 3, " is ", size, ", but must be ", to_string(dtype))
// Numbers are written as std::to_string writes them; a function without arguments is called for its part.
#pragma once

#include <cstddef>
#include <string>
#include <type_traits>

namespace opst {

template <class Part>
void append_part(std::string& message, const Part& part) {
  if constexpr (std::is_invocable_v<const Part&>) {
    append_part(message, part());
  } else if constexpr (std::is_arithmetic_v<Part>) {
    message += std::to_string(part);
  } else {
    message += part;
  }
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::string message;
  (append_part(message, parts), ...);
  return message;
}

// "a, b or c" where `last` is " or ": part_at(0) to part_at(count - 1).
template <class Count, class PartAt>
std::string joined(Count count, const PartAt& part_at, const char* last = ", ") {
  std::string list;
  for (Count i = 0; i < count; ++i) list += text(i == 0 ? "" : i + 1 == count ? last : ", ", part_at(i));
  return list;
}

// names[i] is the name of enumerator i; "unknown" for a value that is no enumerator.
template <class Enum, size_t kCount>
const char* name_of(Enum value, const char* const (&names)[kCount]) {
  const auto index = static_cast<size_t>(value);
  return index < kCount ? names[index] : "unknown";
}

}  // namespace opst
