#include "model/gguf.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <span>

#include "model/gguf_writer.h"
#include "opst/quant.h"

namespace opst::model {
namespace {

GgufWriter small_writer() {
  GgufWriter writer;
  writer.string("general.architecture", "llama").u32("a.u32", 7).i32("a.i32", -7).u64("a.u64", 1ull << 40);
  writer.f32("a.f32", 0.5f).boolean("a.bool", true).strings("a.strings", {"x", "", "three"});
  writer.integers("a.integers", {1, -2, 3});
  writer.tensor("one", {3}, {1.0f, 2.0f, 3.0f});
  writer.tensor("two", {32, 2}, 3, std::string(40, '\1'));
  return writer;
}

std::string message_of(const std::string& file) {
  const Result<GgufFile> result = GgufFile::parse("f.gguf", as_bytes(file));
  return result.ok() ? "" : result.status().message();
}

TEST(Gguf, ReadsWhatWasWritten) {
  for (const uint32_t version : {2u, 3u}) {
    for (const uint32_t alignment : {8u, 32u, 4096u}) {
      GgufWriter writer;
      writer.version = version;
      writer.alignment = alignment;
      writer.u32("a.u32", 7).i32("a.i32", -7).u64("a.u64", 1ull << 40).f32("a.f32", 0.5f).boolean("a.bool", true);
      writer.string("a.string", "text").strings("a.strings", {"x", "", "three"}).integers("a.integers", {1, -2, 3});
      writer.tensor("one", {3}, {1.0f, 2.0f, 3.0f}).tensor("two", {32, 2}, 3, std::string(40, '\1'));
      const std::string bytes = writer.bytes();
      const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes));
      ASSERT_TRUE(file.ok()) << file.status().message();
      const GgufFile& f = file.value();
      EXPECT_EQ(f.version(), version);
      EXPECT_EQ(f.integer("a.u32").value(), 7);
      EXPECT_EQ(f.integer("a.i32").value(), -7);
      EXPECT_EQ(f.integer("a.u64").value(), int64_t{1} << 40);
      EXPECT_EQ(f.real("a.f32").value(), 0.5);
      EXPECT_EQ(f.real("a.i32").value(), -7.0);
      EXPECT_TRUE(f.boolean("a.bool").value());
      EXPECT_EQ(f.string("a.string").value(), "text");
      EXPECT_EQ(f.strings("a.strings").value(), (std::vector<std::string_view>{"x", "", "three"}));
      EXPECT_EQ(f.integers("a.integers").value(), (std::vector<int32_t>{1, -2, 3}));
      ASSERT_EQ(f.tensors().size(), 2u);
      const GgufTensor* one = f.find_tensor("one");
      ASSERT_NE(one, nullptr);
      float values[3];
      ASSERT_TRUE(f.read(*one, std::as_writable_bytes(std::span(values))).ok());
      EXPECT_EQ(values[2], 3.0f);
      EXPECT_EQ(to_string(*f.find_tensor("two")), "Q4_1 [32, 2]");
      EXPECT_EQ(f.find_tensor("two")->size_bytes, 40u);
      std::byte two[40];
      EXPECT_EQ(f.read(*f.find_tensor("two"), std::span(two).first(39)).message(),
                "f.gguf: tensor 'two': 40 bytes of data, but room for 39");
      ASSERT_TRUE(f.read(*f.find_tensor("two"), two).ok());
      EXPECT_EQ(two[39], std::byte{1});
      EXPECT_EQ(f.find_tensor("three"), nullptr);
    }
  }
}

TEST(Gguf, TypedAccessNamesFileKeyAndTypes) {
  const std::string bytes = small_writer().bytes();
  const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(file.value().integer("none").status().message(), "f.gguf: key 'none' is missing");
  EXPECT_EQ(file.value().integer("a.f32").status().message(),
            "f.gguf: key 'a.f32' is of type float32, expected an integer");
  EXPECT_EQ(file.value().strings("a.integers").status().message(),
            "f.gguf: key 'a.integers' is of type array of int32, expected array of string");
  EXPECT_FALSE(file.value().boolean("a.u32").ok());
  EXPECT_FALSE(file.value().string("a.bool").ok());
  EXPECT_FALSE(file.value().integers("a.strings").ok());
  EXPECT_FALSE(file.value().real("a.bool").ok());

  GgufWriter wide;
  wide.u64("big", UINT64_MAX);
  const std::string wide_bytes = wide.bytes();
  EXPECT_EQ(GgufFile::parse("f.gguf", as_bytes(wide_bytes)).value().integer("big").status().message(),
            "f.gguf: key 'big' does not fit 63 bits");
}

TEST(Gguf, NestedArraysAreReadOverButNotForever) {
  const auto nested = [](int depth) {
    std::string value;
    for (int i = 0; i < depth; ++i) value += GgufWriter::array_header(GgufType::array, 1);
    value += GgufWriter::array_header(GgufType::u8, 2) + "ab";
    GgufWriter writer;
    writer.raw("deep", GgufType::array, value).u32("after", 5);
    return writer.bytes();
  };
  const std::string bytes = nested(3);
  const Result<GgufFile> file = GgufFile::parse("f.gguf", as_bytes(bytes));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file.value().integer("after").value(), 5);
  EXPECT_EQ(message_of(nested(100000)), "f.gguf: key 'deep': arrays nested deeper than 8");
}

TEST(Gguf, RefusesWhatIsNotGguf) {
  EXPECT_EQ(message_of("hello, world"), "f.gguf: is not a GGUF file (the magic is missing)");
  EXPECT_EQ(message_of("GG"), "f.gguf: magic: 4 bytes wanted at offset 0, but the file ends at 2");
  std::string file = small_writer().bytes();
  std::swap(file[4], file[7]);
  EXPECT_EQ(message_of(file), "f.gguf: version 50331648 is that of a big-endian GGUF file, which is not supported");
  file = small_writer().bytes();
  std::swap(file[0], file[3]), std::swap(file[1], file[2]);
  EXPECT_EQ(message_of(file), "f.gguf: magic is that of a big-endian GGUF file, which is not supported");
  for (const uint32_t version : {0u, 1u, 4u}) {
    GgufWriter writer = small_writer();
    writer.version = version;
    EXPECT_EQ(message_of(writer.bytes()),
              "f.gguf: version is " + std::to_string(version) + ", but only 2 and 3 are supported");
  }
}

TEST(Gguf, RefusesCountsLargerThanTheFile) {
  std::string file = small_writer().bytes();
  const auto with_u64 = [&](size_t position, uint64_t value) {
    std::string changed = file;
    std::memcpy(changed.data() + position, &value, sizeof value);
    return changed;
  };
  for (const uint64_t count : {uint64_t{1} << 20, uint64_t{1} << 63, UINT64_MAX}) {
    EXPECT_NE(message_of(with_u64(8, count)).find("tensor count is"), std::string::npos);
    EXPECT_NE(message_of(with_u64(16, count)).find("metadata count is"), std::string::npos);
    EXPECT_NE(message_of(with_u64(24, count)).find("name of metadata key 0: a string of"), std::string::npos);
    GgufWriter writer;
    writer.raw("key", GgufType::array, GgufWriter::array_header(GgufType::string, count));
    EXPECT_NE(message_of(writer.bytes()).find("key 'key': " + std::to_string(count) + " values of type string"),
              std::string::npos);
  }
}

TEST(Gguf, RefusesBadValues) {
  GgufWriter unknown_type;
  unknown_type.raw("key", static_cast<GgufType>(13), "xxxxxxxx");
  EXPECT_EQ(message_of(unknown_type.bytes()), "f.gguf: key 'key': value type 13 is not known");
  GgufWriter bad_bool;
  bad_bool.raw("key", GgufType::boolean, "\2");
  EXPECT_EQ(message_of(bad_bool.bytes()), "f.gguf: key 'key': a bool that is neither 0 nor 1");
  GgufWriter twice;
  twice.u32("key\n", 1).u32("key\n", 1);
  EXPECT_EQ(message_of(twice.bytes()), "f.gguf: key 'key?' appears twice");
}

TEST(Gguf, RefusesBadAlignment) {
  for (const uint32_t alignment : {0u, 1u, 3u, 48u}) {
    GgufWriter writer;
    writer.u32("general.alignment", alignment);
    EXPECT_EQ(message_of(writer.bytes()), "f.gguf: key 'general.alignment' is " + std::to_string(alignment) +
                                              ", expected a power of two from 8 on");
  }
  GgufWriter writer;
  writer.i32("general.alignment", 32);
  EXPECT_EQ(message_of(writer.bytes()), "f.gguf: key 'general.alignment' is of type int32, expected uint32");
}

TEST(Gguf, RefusesBadTensors) {
  const auto one = [](const std::vector<int64_t>& dims, uint32_t type, uint64_t offset) {
    GgufWriter writer;
    writer.tensor_at("t", dims, type, std::string(64, '\0'), offset);
    return message_of(writer.bytes());
  };
  EXPECT_EQ(one({16}, 0, 0), "");
  EXPECT_EQ(one({1, 0}, 0, 0), "f.gguf: tensor 't': dimension 1 is 0");
  EXPECT_EQ(one({}, 0, 0), "f.gguf: tensor 't' has 0 dimensions, expected 1 to 4");
  EXPECT_EQ(one({1, 1, 1, 1, 1}, 0, 0), "f.gguf: tensor 't' has 5 dimensions, expected 1 to 4");
  EXPECT_EQ(one({16}, 77, 0), "f.gguf: tensor 't': type 77 is not known");
  EXPECT_EQ(one({16}, 3, 0),
            "f.gguf: tensor 't': dimension 0 is 16, not a multiple of the 32 elements of a Q4_1 block");
  EXPECT_EQ(one({16}, 0, 4), "f.gguf: tensor 't': offset 4 is not a multiple of the alignment 32");
  EXPECT_EQ(one({17}, 0, 0),
            "f.gguf: tensor 't': 68 bytes at offset 0 of the data, which begin at 64, but the file ends at 128");
  EXPECT_EQ(one({16}, 0, 32),
            "f.gguf: tensor 't': 64 bytes at offset 32 of the data, which begin at 64, but the file ends at 128");
  EXPECT_NE(one({16}, 0, UINT64_MAX - 31).find("offset 18446744073709551584 of the data"), std::string::npos);
  EXPECT_NE(one({int64_t{1} << 40, int64_t{1} << 40}, 0, 0).find("the number of elements overflows"),
            std::string::npos);
  EXPECT_NE(one({INT64_MAX}, 28, 0).find("the number of bytes overflows"), std::string::npos);
  EXPECT_NE(one({-1}, 0, 0).find("the number of elements overflows"), std::string::npos);

  GgufWriter twice;
  twice.tensor("t", {1}, {1.0f}).tensor("t", {1}, {1.0f});
  EXPECT_EQ(message_of(twice.bytes()), "f.gguf: tensor 't' appears twice");
  GgufWriter overlapping;
  overlapping.tensor_at("t", {16}, 0, std::string(64, '\0'), 0).tensor_at("u", {8}, 0, "", 32);
  EXPECT_EQ(message_of(overlapping.bytes()), "f.gguf: tensors 't' and 'u' overlap");
}

// The file of a public report: a tensor of dimensions [1, 0].
TEST(Gguf, ReportedZeroDimension) {
  std::string file = "GGUF";
  GgufWriter::append(file, uint32_t{3});
  GgufWriter::append(file, uint64_t{1});
  GgufWriter::append(file, uint64_t{0});
  GgufWriter::append_string(file, "t");
  GgufWriter::append(file, uint32_t{2});
  GgufWriter::append(file, uint64_t{1});
  GgufWriter::append(file, uint64_t{0});
  GgufWriter::append(file, uint32_t{0});
  GgufWriter::append(file, uint64_t{0});
  file.resize(68);
  EXPECT_EQ(message_of(file), "f.gguf: tensor 't': dimension 1 is 0");
}

// The copy has exactly the file's size, so that a sanitizer sees any read behind its end. Whatever is accepted must be
// readable in full.
void try_file(const std::string& file) {
  const auto copy = std::make_unique<std::byte[]>(file.size());
  std::memcpy(copy.get(), file.data(), file.size());
  const Result<GgufFile> result = GgufFile::parse("f.gguf", {copy.get(), file.size()});
  if (!result.ok()) {
    const std::string message = result.status().message();
    EXPECT_EQ(message.rfind("f.gguf: ", 0), 0u) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return;
  }
  unsigned sum = 0;
  for (const GgufTensor& tensor : result.value().tensors()) {
    std::vector<std::byte> data(tensor.size_bytes);
    EXPECT_TRUE(result.value().read(tensor, data).ok());
    for (const std::byte byte : data) sum += static_cast<unsigned>(byte);
  }
  for (const char* key : {"a.strings", "a.integers", "general.architecture", "a.u64", "a.f32"}) {
    const Result<std::vector<std::string_view>> strings = result.value().strings(key);
    if (strings.ok()) {
      for (const std::string_view text : strings.value()) {
        for (const char c : text) sum += static_cast<unsigned char>(c);
      }
    }
    (void)result.value().integers(key);
    (void)result.value().integer(key);
    (void)result.value().real(key);
    (void)result.value().string(key);
  }
  volatile unsigned keep = sum;
  (void)keep;
}

TEST(Gguf, SurvivesEveryTruncation) {
  const std::string file = small_writer().bytes();
  for (size_t size = 0; size < file.size(); ++size) {
    EXPECT_NE(message_of(file.substr(0, size)), "") << size;
    try_file(file.substr(0, size));
  }
}

TEST(Gguf, SurvivesMutations) {
  const std::string file = small_writer().bytes();
  for (uint32_t seed = 0; seed < 20000; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    std::string changed = file;
    const unsigned changes = 1 + random() % 4;
    for (unsigned i = 0; i < changes; ++i) {
      const size_t position = random() % changed.size();
      const unsigned kind = random() % 4;
      if (kind == 0) changed[position] = static_cast<char>(changed[position] ^ (1 << (random() % 8)));
      if (kind == 1) changed[position] = static_cast<char>(random());
      if (kind == 2) changed[position] = static_cast<char>(random() % 2 == 0 ? 0xff : 0);
      if (kind == 3 && position + 8 <= changed.size()) {
        const uint64_t edge[] = {0, 1, UINT64_MAX, uint64_t{1} << 63, uint64_t{1} << 32, (uint64_t{1} << 62) + 1};
        std::memcpy(changed.data() + position, &edge[random() % 6], 8);
      }
    }
    if (random() % 8 == 0) changed.resize(random() % changed.size());
    try_file(changed);
  }
}

class GgufOpen : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/opst_gguf_XXXXXX";
    ASSERT_NE(mkdtemp(pattern), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    unlink((folder_ + "/f.gguf").c_str());
    rmdir(folder_.c_str());
  }
  std::string folder_;
};

TEST_F(GgufOpen, ReadsAFileAndRefusesWhatIsNone) {
  const std::string path = folder_ + "/f.gguf";
  EXPECT_EQ(GgufFile::open(path).status().message(), path + ": cannot open: No such file or directory");
  EXPECT_EQ(GgufFile::open(folder_).status().message(),
            folder_ + ": is a folder; the model is a .gguf file, perhaps one in it");
  std::ofstream(path).close();
  EXPECT_EQ(GgufFile::open(path).status().message(), path + ": is empty");
  std::ofstream(path) << small_writer().bytes();
  Result<GgufFile> file = GgufFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  GgufFile moved = std::move(file.value());
  ASSERT_EQ(moved.tensors().size(), 2u);
  float first[3];
  ASSERT_TRUE(moved.read(moved.tensors()[0], std::as_writable_bytes(std::span(first))).ok());
  EXPECT_EQ(first[0], 1.0f);
  EXPECT_EQ(GgufFile::open(path + std::string("\0.txt", 5)).status().message().rfind(path, 0), 0u);
  EXPECT_NE(GgufFile::open(path + std::string("\0.txt", 5)).status().message().find("NUL"), std::string::npos);
  unlink(path.c_str());
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_EQ(GgufFile::open(path).status().message(), path + ": is not a regular file");
}

TEST(Gguf, WhatIsTakenForAModelIsNamed) {
  const auto named = [](const std::string& file, const std::string& words) {
    EXPECT_EQ(message_of(file).rfind("f.gguf: is not a GGUF file", 0), 0u) << message_of(file);
    EXPECT_NE(message_of(file).find(words), std::string::npos) << message_of(file);
  };
  named("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 98362432\n", "a pointer of git-lfs");
  named("<!DOCTYPE html><html><head></head>", "an HTML page");
  named("\xEF\xBB\xBF \n<HTML lang=en>", "an HTML page");
  named(std::string("PK\x03\x04") + "data", "a zip archive");
  named("\x1F\x8B\x08 data", "compressed by gzip");
  named(std::string("\x40\0\0\0\0\0\0\0{\"t\": 1}", 17), "safetensors");
  named("tjgg and so on", "a format that GGUF replaced");
  named("hello, world", "the magic is missing");
}

// What has been read stays, what has not gives an error; there is no mapping that could raise a signal.
TEST_F(GgufOpen, AFileThatIsShortenedMeanwhile) {
  const std::string path = folder_ + "/f.gguf";
  GgufWriter writer = small_writer();
  writer.tensor("long", {1 << 20}, std::vector<float>(1 << 20, 2.0f));
  std::ofstream(path) << writer.bytes();
  const Result<GgufFile> file = GgufFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const GgufTensor& tensor = *file.value().find_tensor("long");
  std::vector<std::byte> data(tensor.size_bytes);
  ASSERT_TRUE(file.value().read(tensor, data).ok());
  ASSERT_EQ(truncate(path.c_str(), 4096), 0);
  EXPECT_EQ(file.value().string("general.architecture").value(), "llama");
  EXPECT_EQ(file.value().strings("a.strings").value().size(), 3u);
  EXPECT_NE(file.value().read(tensor, data).message().find("tensor 'long': the file ended at 4096 while it was read"),
            std::string::npos);
}

// A file costs what is read of it, not what its numbers or its length claim.
TEST_F(GgufOpen, HugeClaimsInASparseFile) {
  const std::string path = folder_ + "/f.gguf";
  const auto open_with = [&](uint64_t claimed, GgufType type) {
    GgufWriter writer;
    writer.raw("key", GgufType::array, GgufWriter::array_header(type, claimed));
    std::ofstream(path) << writer.bytes();
    EXPECT_EQ(truncate(path.c_str(), off_t{7} << 30), 0);
    return GgufFile::open(path).status().message();
  };
  const std::string refused = "key 'key': the keys and descriptions before the tensors' data are longer than 134217728";
  EXPECT_NE(open_with(uint64_t{6} << 30, GgufType::u8).find(refused), std::string::npos);
  EXPECT_NE(open_with(uint64_t{1} << 27, GgufType::string).find(refused), std::string::npos);

  std::string file = small_writer().bytes();
  const uint64_t many = uint64_t{1} << 24;
  std::memcpy(file.data() + 16, &many, sizeof many);
  std::ofstream(path) << file;
  ASSERT_EQ(truncate(path.c_str(), off_t{7} << 30), 0);
  EXPECT_NE(GgufFile::open(path).status().message().find("metadata count is 16777216, at most"), std::string::npos);
}

// The reader's table has a row for every format that operators take, with the same blocks.
TEST(Gguf, TypesHaveTheBlocksOfTheirFormats) {
  int found = 0;
  for (uint32_t id = 0; id < 256; ++id) {
    const TensorType* const type = find_tensor_type(id);
    const std::optional<QuantFormat> format = type != nullptr ? parse_quant_format(type->name) : std::nullopt;
    if (!format) continue;
    ++found;
    EXPECT_EQ(type->block_elements, block_values(*format)) << type->name;
    EXPECT_EQ(type->block_bytes, block_bytes(*format)) << type->name;
  }
  EXPECT_EQ(found, kNumQuantFormats);
}

}  // namespace
}  // namespace opst::model
