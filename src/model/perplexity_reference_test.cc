// The real model's perplexity on two texts against a trusted engine's: see src/testing/data/reference/README.md. The
// first two windows of each; with OPST_EXHAUSTIVE=1 both texts to their ends, and with rounded caches too.
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

#include "model/perplexity.h"
#include "model/reference_data.h"
#include "model/tokenizer.h"
#include "testing/effort.h"

namespace opst::model {
namespace {

constexpr size_t kWindow = 1024;
constexpr size_t kWindows = test::kSanitized ? 1 : 2;  // of each text

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  return content.str();
}

const std::string kData = std::string(OPST_SOURCE_DIR) + "/src/testing/data/reference/";

nlohmann::json expected_of(const std::string& name) {
  const nlohmann::json data = nlohmann::json::parse(read_file(kData + "perplexity.json"));
  for (const auto& text : data["texts"]) {
    if (text["name"] == name) return text;
  }
  ADD_FAILURE() << "perplexity.json has no text " << name;
  return {};
}

class PerplexityReference : public ReferenceModelTest {
 protected:
  void check(const std::string& name, const std::string& text) {
    // A sanitizer makes a window a matter of minutes: one of the two texts, by the seed.
    if (test::kSanitized && (name == "gpl3") != (test::drawn_case("text", 2) == 1)) {
      GTEST_SKIP() << "under a sanitizer the seed chose the other text";
    }
    const nlohmann::json expected = expected_of(name);
    ASSERT_EQ(text.size(), expected["bytes"].get<size_t>());
    Context context = std::move(Context::create().value());
    const GgufFile file = std::move(GgufFile::open(reference_model_path()).value());
    const Tokenizer tokenizer = std::move(Tokenizer::from_gguf(file).value());
    const LlamaModel model = std::move(LlamaModel::load(context, file).value());
    const std::vector<int32_t> ids = tokenizer.encode(text, false).value();
    ASSERT_EQ(ids.size(), expected["n_tokens"].get<size_t>());

    struct Mode {
      DType kv_dtype;
      ActivationType activations;
      // How far the mean NLL may be off: of one window, of a whole text. (0.001 is 0.1 % of the perplexity.)
      double window = 0.02, text = 0.004;
    };
    std::vector<Mode> modes = {{DType::f32, ActivationType::exact}, {DType::f32, ActivationType::int8}};
    if (test::exhaustive()) {
      modes.insert(modes.end(), {{DType::bf16, ActivationType::exact},
                                 {DType::f16, ActivationType::exact},
                                 {DType::bf16, ActivationType::int8},
                                 {DType::i8, ActivationType::exact, 0.02, 0.001},
                                 {DType::u8, ActivationType::exact, 1.0, 0.3},
                                 {DType::f8_e4m3, ActivationType::exact, 0.1, 0.02}});
    }
    if (test::kSanitized) modes = {modes[static_cast<size_t>(test::drawn_case("mode", std::ssize(modes)))]};
    for (const auto& [dtype, activations, most_of_window, most_of_text] : modes) {
      const bool exact = dtype == DType::f32 && activations == ActivationType::exact;
      SCOPED_TRACE(std::string(to_string(dtype)) + " cache, " + to_string(activations) + " activations");
      LlamaSession session = std::move(
          LlamaSession::create(context, model,
                               {.context = kWindow, .kv_dtype = dtype, .activations = activations, .logit_rows = 32})
              .value());
      size_t windows = 0;
      const double most_for_window = most_of_window;  // a lambda captures no structured binding
      const auto result =
          measure_perplexity(session, test::exhaustive() ? std::span(ids) : std::span(ids).first(kWindows * kWindow),
                             [&](const WindowScore& window) {
                               const nlohmann::json& reference = expected["windows"][windows++];
                               EXPECT_EQ(window.begin, reference["start"].get<int64_t>());
                               EXPECT_EQ(window.tokens - 1, reference["counted"].get<int64_t>());
                               // One window of a rounded mode may be farther off than a whole text.
                               EXPECT_NEAR(window.nll_sum / static_cast<double>(window.tokens - 1),
                                           reference["nll_mean"].get<double>(), exact ? 1e-5 : most_for_window);
                             });
      ASSERT_TRUE(result.ok()) << result.status().message();
      if (!test::exhaustive()) continue;
      EXPECT_EQ(windows, expected["windows"].size());
      EXPECT_EQ(result.value().counted, expected["n_counted"].get<int64_t>());
      const double difference = result.value().mean_nll() - expected["mean_nll"].get<double>();
      EXPECT_LE(std::fabs(difference), exact ? 1e-5 : most_of_text);
      std::printf("%s, %s cache, %s activations: mean NLL %.7f (%+.7f), perplexity %.5f\n", name.c_str(),
                  to_string(dtype), to_string(activations), result.value().mean_nll(), difference,
                  result.value().perplexity());
    }
  }
};

TEST_F(PerplexityReference, DevilsDictionary) {
  check("devils_dictionary_excerpt", read_file(kData + "devils_dictionary_excerpt.txt"));
}

std::string sha256(const std::string& path) {
  std::FILE* sum = popen(("sha256sum " + path).c_str(), "r");
  char hex[65] = {};
  (void)!std::fread(hex, 1, 64, sum);
  pclose(sum);
  return hex;
}

// A text that Debian's base-files installs.
TEST_F(PerplexityReference, GnuGeneralPublicLicense) {
  const std::string path = "/usr/share/common-licenses/GPL-3", text = read_file(path);
  if (text.empty() || sha256(path) != expected_of("gpl3")["sha256"]) {
    GTEST_SKIP() << path << " is not the text that the reference was made from";
  }
  check("gpl3", text);
}

}  // namespace
}  // namespace opst::model
