// Writes GGUF files for tests, well formed unless asked otherwise.
//
//   GgufWriter writer;
//   writer.string("general.architecture", "llama").u32("llama.block_count", 2);
//   writer.tensor("output_norm.weight", {64}, norm);        // f32, fastest dimension first
//   std::string file = writer.bytes();
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf.h"

namespace opst::model {

class GgufWriter {
 public:
  uint32_t version = 3;
  uint32_t alignment = 32;  // of the data; the key general.alignment is written only if it is not 32

  GgufWriter& u32(std::string_view key, uint32_t value) { return scalar(key, GgufType::u32, value); }
  GgufWriter& i32(std::string_view key, int32_t value) { return scalar(key, GgufType::i32, value); }
  GgufWriter& u64(std::string_view key, uint64_t value) { return scalar(key, GgufType::u64, value); }
  GgufWriter& f32(std::string_view key, float value) { return scalar(key, GgufType::f32, value); }
  GgufWriter& boolean(std::string_view key, bool value) {
    return scalar(key, GgufType::boolean, static_cast<uint8_t>(value));
  }
  GgufWriter& string(std::string_view key, std::string_view value) {
    std::string bytes;
    append_string(bytes, value);
    return raw(key, GgufType::string, bytes);
  }
  GgufWriter& strings(std::string_view key, const std::vector<std::string>& values) {
    std::string bytes = array_header(GgufType::string, values.size());
    for (const std::string& value : values) append_string(bytes, value);
    return raw(key, GgufType::array, bytes);
  }
  GgufWriter& integers(std::string_view key, const std::vector<int32_t>& values) {
    std::string bytes = array_header(GgufType::i32, values.size());
    for (const int32_t value : values) append(bytes, value);
    return raw(key, GgufType::array, bytes);
  }
  // A value in file form, right or wrong.
  GgufWriter& raw(std::string_view key, GgufType type, std::string_view value_bytes) {
    append_string(metadata_, key);
    append(metadata_, static_cast<uint32_t>(type));
    metadata_ += value_bytes;
    ++num_values_;
    return *this;
  }

  GgufWriter& tensor(std::string_view name, const std::vector<int64_t>& dims, const std::vector<float>& values) {
    return tensor(name, dims, 0, {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
  }
  // Any type, its data in file form.
  GgufWriter& tensor(std::string_view name, const std::vector<int64_t>& dims, uint32_t type, std::string_view data) {
    data_.resize((data_.size() + alignment - 1) / alignment * alignment);
    return tensor_at(name, dims, type, data, data_.size());
  }
  GgufWriter& tensor_at(std::string_view name, const std::vector<int64_t>& dims, uint32_t type, std::string_view data,
                        uint64_t offset) {
    append_string(descriptions_, name);
    append(descriptions_, static_cast<uint32_t>(dims.size()));
    for (const int64_t dim : dims) append(descriptions_, static_cast<uint64_t>(dim));
    append(descriptions_, type);
    append(descriptions_, offset);
    data_ += data;
    ++num_tensors_;
    return *this;
  }

  std::string bytes() const {
    std::string file = "GGUF";
    append(file, version);
    append(file, num_tensors_);
    append(file, num_values_ + (alignment != 32 ? 1 : 0));
    if (alignment != 32) {
      append_string(file, "general.alignment");
      append(file, static_cast<uint32_t>(GgufType::u32));
      append(file, alignment);
    }
    file += metadata_ + descriptions_;
    if (num_tensors_ > 0) file.resize((file.size() + alignment - 1) / alignment * alignment);
    return file + data_;
  }

  template <class T>
  static void append(std::string& bytes, T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  static void append_string(std::string& bytes, std::string_view text) {
    append(bytes, static_cast<uint64_t>(text.size()));
    bytes += text;
  }
  static std::string array_header(GgufType element_type, uint64_t count) {
    std::string bytes;
    append(bytes, static_cast<uint32_t>(element_type));
    append(bytes, count);
    return bytes;
  }

 private:
  template <class T>
  GgufWriter& scalar(std::string_view key, GgufType type, T value) {
    return raw(key, type, {reinterpret_cast<const char*>(&value), sizeof value});
  }

  std::string metadata_, descriptions_, data_;
  uint64_t num_values_ = 0, num_tensors_ = 0;
};

inline std::span<const std::byte> as_bytes(const std::string& file) {
  return {reinterpret_cast<const std::byte*>(file.data()), file.size()};
}

}  // namespace opst::model
