// TokenNames: tokens that a text names as a whole ("<|im_end|>"), found without a look at each of them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace opst::model {

class TokenNames {
 public:
  // Longer names are refused by the tokenizer: this bounds the work at each byte of a text.
  static constexpr size_t kLongest = 256;

  // Names with their ids; none is empty, longer than kLongest, or there twice.
  explicit TokenNames(std::vector<std::pair<std::string, int32_t>> names = {});

  struct Match {
    size_t length = 0;  // 0: no name begins here
    int32_t id = -1;
  };
  // The longest name at the beginning of `text`, which is not empty. Takes one binary search among the names for each
  // byte that some name shares with the text; `steps`, where it is not null, grows by one for each search.
  Match longest(std::string_view text, int64_t* steps = nullptr) const;

  std::optional<int32_t> find(std::string_view name) const;

 private:
  std::vector<std::pair<std::string, int32_t>> names_;  // sorted by their bytes
  size_t begin_[257] = {};                              // where the names with each first byte begin
};

}  // namespace opst::model
