// A fuzz target without libFuzzer: the inputs of its corpus (OPST_CORPUS), each as it is, cut short, and with bytes
// changed.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "testing/random.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace opst {
namespace {

void run(const std::vector<char>& bytes) {
  // Memory of its exact size, so that a sanitizer sees a step beyond it.
  const std::vector<uint8_t> input(bytes.begin(), bytes.end());
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

TEST(Corpus, EveryInputIsTaken) {
  const char* const folder = std::getenv("OPST_CORPUS");
  ASSERT_NE(folder, nullptr);
  test::Random random(test::seed());
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    SCOPED_TRACE(entry.path());
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
    ++files;
    run(bytes);
    const auto size = static_cast<int64_t>(bytes.size());
    for (int i = 0; i < 100 && size > 0; ++i) {
      std::vector<char> other = bytes;
      if (i % 2 == 0) other.resize(static_cast<size_t>(random.integer(0, size)));
      for (int64_t change = random.integer(0, 3); change > 0 && !other.empty(); --change) {
        const int64_t at = random.integer(0, static_cast<int64_t>(other.size()) - 1);
        other[static_cast<size_t>(at)] = static_cast<char>(random.integer(0, 255));
      }
      run(other);
    }
  }
  EXPECT_GT(files, 0) << folder;
}

}  // namespace
}  // namespace opst
