#include "model/token_names.h"

#include <algorithm>

namespace opst::model {

namespace {

unsigned char byte_at(std::string_view text, size_t i) { return static_cast<unsigned char>(text[i]); }

}  // namespace

TokenNames::TokenNames(std::vector<std::pair<std::string, int32_t>> names) : names_(std::move(names)) {
  std::sort(names_.begin(), names_.end());
  for (const auto& [name, id] : names_) ++begin_[byte_at(name, 0) + 1];
  for (size_t byte = 0; byte < 256; ++byte) begin_[byte + 1] += begin_[byte];
}

TokenNames::Match TokenNames::longest(std::string_view text, int64_t* steps) const {
  Match match;
  const unsigned char begin = byte_at(text, 0);
  // The names that begin with the first `depth` bytes of the text; a name of just these is the first.
  size_t first = begin_[begin], last = begin_[begin + 1];
  for (size_t depth = 1; first < last; ++depth) {
    if (names_[first].first.size() == depth) match = {depth, names_[first++].second};
    if (depth == text.size()) break;
    if (steps != nullptr) ++*steps;
    const unsigned char next = byte_at(text, depth);
    const auto range = [&](size_t i) { return names_.begin() + static_cast<std::ptrdiff_t>(i); };
    const auto lower = std::partition_point(range(first), range(last),
                                            [&](const auto& name) { return byte_at(name.first, depth) < next; });
    const auto upper =
        std::partition_point(lower, range(last), [&](const auto& name) { return byte_at(name.first, depth) == next; });
    first = static_cast<size_t>(lower - names_.begin());
    last = static_cast<size_t>(upper - names_.begin());
  }
  return match;
}

std::optional<int32_t> TokenNames::find(std::string_view name) const {
  const auto found = std::lower_bound(names_.begin(), names_.end(), name,
                                      [](const auto& entry, std::string_view text) { return entry.first < text; });
  if (found == names_.end() || found->first != name) return {};
  return found->second;
}

}  // namespace opst::model
