// GgufFile: a model file in the GGUF format (versions 2 and 3, little endian).
//
//   Result<GgufFile> file = GgufFile::open("model.gguf");
//   Result<int64_t> layers = file.value().integer("llama.block_count");
//   const GgufTensor* norm = file.value().find_tensor("output_norm.weight");
//   Status status = file.value().read(*norm, bytes);
//
// A file is: magic, version, counts; then key/value metadata; then the tensors' names, shapes, types and offsets; then,
// from a multiple of general.alignment on, their data. Nothing that the file says is trusted: opening checks every
// count, length, type, offset and alignment against the file's size. All errors are one line: file, field, what is
// wrong.
//
// What open() needs, the file's head up to the tensors' data, is copied into memory; read() copies one tensor's data.
// Nothing is mapped: a file that others shorten or delete meanwhile gives an error from read(), and no signal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "opst/status.h"

namespace opst::model {

enum class GgufType : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };
const char* to_string(GgufType type);

// One metadata value, still in file form.
struct GgufValue {
  GgufType type = GgufType::u8;
  GgufType element_type = GgufType::u8;  // of an array
  uint64_t count = 1;                    // elements of an array
  std::span<const std::byte> bytes;      // without an array's type and count
};

// How a tensor's elements are stored: GGUF's id of the type, its name, elements and bytes of one quant block.
struct TensorType {
  uint32_t id;
  const char* name;
  int64_t block_elements;
  int64_t block_bytes;
};
// Null for an id that is not in use.
const TensorType* find_tensor_type(uint32_t id);

struct GgufTensor {
  std::string_view name;
  const TensorType* type = nullptr;
  int num_dims = 0;
  int64_t dims[4] = {1, 1, 1, 1};  // the fastest first: dims[0] elements lie next to each other
  uint64_t offset = 0;             // of its data, from the file's beginning
  uint64_t size_bytes = 0;
};
// "Q4_1 [576, 1536]", fastest dimension first
std::string to_string(const GgufTensor& tensor);

class GgufFile {
 public:
  static Result<GgufFile> open(const std::string& path);
  // A file that is already in memory, which must outlive the result. `name` appears in errors.
  static Result<GgufFile> parse(std::string name, std::span<const std::byte> bytes);

  ~GgufFile();
  GgufFile(GgufFile&& other) noexcept;
  GgufFile& operator=(GgufFile&& other) noexcept;

  const std::string& name() const { return name_; }
  uint32_t version() const { return version_; }
  int64_t size_bytes() const { return static_cast<int64_t>(size_); }

  // Null where the key is missing.
  const GgufValue* find(std::string_view key) const;
  bool has(std::string_view key) const { return find(key) != nullptr; }
  // All keys, sorted.
  std::vector<std::string_view> keys() const;
  // The value of a key, or why not: missing, another type, out of range. integer() takes any integer type.
  Result<int64_t> integer(std::string_view key) const;
  Result<double> real(std::string_view key) const;
  Result<bool> boolean(std::string_view key) const;
  Result<std::string_view> string(std::string_view key) const;
  Result<std::vector<std::string_view>> strings(std::string_view key) const;
  Result<std::vector<int32_t>> integers(std::string_view key) const;

  const std::vector<GgufTensor>& tensors() const { return tensors_; }
  // Null where there is none.
  const GgufTensor* find_tensor(std::string_view name) const;

  // False where the file has a hole in place of a tensor's data, as a download that has not come to it.
  bool has_data(const GgufTensor& tensor) const;
  // Copies a tensor's data into `out`, which has size_bytes of it. Fails where the file has become shorter or cannot be
  // read.
  Status read(const GgufTensor& tensor, std::span<std::byte> out) const;
  // The same of the bytes [first, first + out.size()) of them: one expert of a stack.
  Status read_part(const GgufTensor& tensor, uint64_t first, std::span<std::byte> out) const;

  // "file: problem"
  Status error(const std::string& problem) const;

 private:
  GgufFile() = default;
  Status read_head();
  Status read_tensors(class GgufCursor& cursor, uint64_t num_tensors, uint64_t alignment);

  std::string name_;
  uint64_t size_ = 0;  // of the file
  // The file's head; of a file in memory all of it. Only what has been read is there.
  std::span<const std::byte> bytes_;
  std::unique_ptr<std::byte[]> head_;  // bytes_, where open() read them
  int descriptor_ = -1;                // -1: in memory
  uint32_t version_ = 0;
  std::unordered_map<std::string_view, GgufValue> metadata_;
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, size_t> tensor_index_;
};

// Text from a file as it may stand in an error message: one line, printable ASCII, quoted, cut after 64 bytes.
std::string quoted(std::string_view text);

}  // namespace opst::model
