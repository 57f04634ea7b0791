// The reference outputs in src/testing/data/reference and the model that they belong to, for tests.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

namespace opst::model {

inline std::vector<nlohmann::json> reference_lines(const std::string& name) {
  const std::string path = std::string(OPST_SOURCE_DIR) + "/src/testing/data/reference/" + name;
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

inline nlohmann::json reference_line(const std::string& name, const std::string& id) {
  for (const nlohmann::json& line : reference_lines(name)) {
    if (line["id"] == id) return line;
  }
  ADD_FAILURE() << name << " has no case " << id;
  return {};
}

inline std::string reference_model_path() {
  const char* path = std::getenv("OPST_MODEL");
  return path != nullptr ? path : std::string(OPST_SOURCE_DIR) + "/.cache/models/SmolLM2-135M-Instruct.Q4_1.gguf";
}

// Tests that need the model's file: a visible skip where it is missing, a failure where OPST_REQUIRE lists "model".
class ReferenceModelTest : public testing::Test {
 protected:
  void SetUp() override {
    if (access(reference_model_path().c_str(), R_OK) == 0) return;
    const char* required = std::getenv("OPST_REQUIRE");
    std::istringstream names(required != nullptr ? required : "");
    for (std::string name; std::getline(names, name, ',');) {
      if (name == "model") FAIL() << "the model is missing: " << reference_model_path();
    }
    GTEST_SKIP() << "the model is missing: " << reference_model_path();
  }
};

}  // namespace opst::model
