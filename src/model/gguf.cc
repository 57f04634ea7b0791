#include "model/gguf.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "core/guarded.h"
#include "model/foreign_file.h"
#include "model/gguf_cursor.h"

namespace opst::model {

static_assert(std::endian::native == std::endian::little, "the reader takes values from the file as they are");

namespace {

constexpr uint32_t kDefaultAlignment = 32;
constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kMostKeys = 1 << 16, kMostTensors = 1 << 17;

constexpr TensorType kTensorTypes[] = {
    {0, "F32", 1, 4},         {1, "F16", 1, 2},         {2, "Q4_0", 32, 18},      {3, "Q4_1", 32, 20},
    {6, "Q5_0", 32, 22},      {7, "Q5_1", 32, 24},      {8, "Q8_0", 32, 34},      {9, "Q8_1", 32, 40},
    {10, "Q2_K", 256, 84},    {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},   {13, "Q5_K", 256, 176},
    {14, "Q6_K", 256, 210},   {15, "Q8_K", 256, 292},   {16, "IQ2_XXS", 256, 66}, {17, "IQ2_XS", 256, 74},
    {18, "IQ3_XXS", 256, 98}, {19, "IQ1_S", 256, 50},   {20, "IQ4_NL", 32, 18},   {21, "IQ3_S", 256, 110},
    {22, "IQ2_S", 256, 82},   {23, "IQ4_XS", 256, 136}, {24, "I8", 1, 1},         {25, "I16", 1, 2},
    {26, "I32", 1, 4},        {27, "I64", 1, 8},        {28, "F64", 1, 8},        {29, "IQ1_M", 256, 56},
    {30, "BF16", 1, 2},       {34, "TQ1_0", 256, 54},   {35, "TQ2_0", 256, 66},   {39, "MXFP4", 32, 17},
    {40, "NVFP4", 64, 36},    {41, "Q1_0", 128, 18},
};

std::string str(uint64_t value) { return std::to_string(value); }

bool is_integer(GgufType type) {
  return fixed_size(type) > 0 && type != GgufType::f32 && type != GgufType::f64 && type != GgufType::boolean;
}

// False where a u64 does not fit.
bool load_integer(GgufType type, const std::byte* bytes, int64_t& value) {
  switch (type) {
    case GgufType::u8:
      value = load<uint8_t>(bytes);
      return true;
    case GgufType::i8:
      value = load<int8_t>(bytes);
      return true;
    case GgufType::u16:
      value = load<uint16_t>(bytes);
      return true;
    case GgufType::i16:
      value = load<int16_t>(bytes);
      return true;
    case GgufType::u32:
      value = load<uint32_t>(bytes);
      return true;
    case GgufType::i32:
      value = load<int32_t>(bytes);
      return true;
    case GgufType::i64:
      value = load<int64_t>(bytes);
      return true;
    case GgufType::u64: {
      const auto wide = load<uint64_t>(bytes);
      if (wide > static_cast<uint64_t>(INT64_MAX)) return false;
      value = static_cast<int64_t>(wide);
      return true;
    }
    default:
      return false;
  }
}

std::string describe(const GgufValue& value) {
  if (value.type != GgufType::array) return to_string(value.type);
  return std::string("array of ") + to_string(value.element_type);
}

}  // namespace

const char* to_string(GgufType type) {
  constexpr const char* kNames[] = {"uint8", "int8",   "uint16", "int16",  "uint32", "int32",  "float32",
                                    "bool",  "string", "array",  "uint64", "int64",  "float64"};
  return kNames[static_cast<uint32_t>(type)];
}

const TensorType* find_tensor_type(uint32_t id) {
  for (const TensorType& type : kTensorTypes) {
    if (type.id == id) return &type;
  }
  return nullptr;
}

std::string to_string(const GgufTensor& tensor) {
  std::string text = std::string(tensor.type->name) + " [";
  for (int i = 0; i < tensor.num_dims; ++i) text += (i > 0 ? ", " : "") + std::to_string(tensor.dims[i]);
  return text + "]";
}

std::string quoted(std::string_view text) {
  constexpr size_t kLongest = 64;
  std::string shown = "'";
  for (const char c : text.substr(0, kLongest)) shown += c >= ' ' && c <= '~' ? c : '?';
  return shown + (text.size() > kLongest ? "...'" : "'");
}

Status GgufFile::error(const std::string& problem) const { return Status::invalid_argument(name_ + ": " + problem); }

GgufFile::~GgufFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

GgufFile::GgufFile(GgufFile&& other) noexcept { *this = std::move(other); }

GgufFile& GgufFile::operator=(GgufFile&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(size_, other.size_);
  std::swap(bytes_, other.bytes_);
  std::swap(head_, other.head_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(version_, other.version_);
  std::swap(metadata_, other.metadata_);
  std::swap(tensors_, other.tensors_);
  std::swap(tensor_index_, other.tensor_index_);
  return *this;
}

Result<GgufFile> GgufFile::open(const std::string& path) try {
  GgufFile file;
  file.name_ = path;
  if (path.find('\0') != std::string::npos) return file.error("the path has a NUL in it");
  // O_NONBLOCK: opening a named pipe must not wait for a writer.
  file.descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.descriptor_ < 0) return file.error(std::string("cannot open: ") + std::strerror(errno));
  struct stat info {};
  if (fstat(file.descriptor_, &info) != 0) return file.error(std::string("cannot read: ") + std::strerror(errno));
  if (S_ISDIR(info.st_mode)) return file.error("is a folder; the model is a .gguf file, perhaps one in it");
  if (!S_ISREG(info.st_mode)) return file.error("is not a regular file");
  if (info.st_size == 0) return file.error("is empty");
  file.size_ = static_cast<uint64_t>(info.st_size);
  // Memory comes as it is touched.
  file.head_.reset(new (std::nothrow) std::byte[std::min(file.size_, kLongestHead)]);
  if (file.head_ == nullptr) return Status::out_of_memory();
  if (Status status = file.read_head(); !status.ok()) return status;
  return file;
} catch (...) {
  return status_of_exception();
}

Result<GgufFile> GgufFile::parse(std::string name, std::span<const std::byte> bytes) try {
  GgufFile file;
  file.name_ = std::move(name);
  file.size_ = bytes.size();
  file.bytes_ = bytes;
  if (Status status = file.read_head(); !status.ok()) return status;
  return file;
} catch (...) {
  return status_of_exception();
}

bool GgufFile::has_data(const GgufTensor& tensor) const {
  if (descriptor_ < 0) return true;
  const off_t data = lseek(descriptor_, static_cast<off_t>(tensor.offset), SEEK_DATA);
  // ENXIO: none behind that. A file system without holes gives the position itself, or another error.
  return data < 0 ? errno != ENXIO : static_cast<uint64_t>(data) < tensor.offset + tensor.size_bytes;
}

Status GgufFile::read(const GgufTensor& tensor, std::span<std::byte> out) const try {
  if (out.size() != tensor.size_bytes) {
    return error("tensor " + quoted(tensor.name) + ": " + str(tensor.size_bytes) + " bytes of data, but room for " +
                 str(out.size()));
  }
  return read_part(tensor, 0, out);
} catch (...) {
  return status_of_exception();
}

Status GgufFile::read_part(const GgufTensor& tensor, uint64_t first, std::span<std::byte> out) const try {
  if (first > tensor.size_bytes || out.size() > tensor.size_bytes - first) {
    return error("tensor " + quoted(tensor.name) + ": " + str(tensor.size_bytes) + " bytes of data, but " +
                 str(out.size()) + " are asked for from " + str(first) + " on");
  }
  if (descriptor_ < 0) {
    std::copy_n(bytes_.data() + tensor.offset + first, out.size(), out.data());
    return {};
  }
  for (size_t done = 0; done < out.size();) {
    const uint64_t position = tensor.offset + first + done;
    const ssize_t got = pread(descriptor_, out.data() + done, out.size() - done, static_cast<off_t>(position));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return error("tensor " + quoted(tensor.name) + ": cannot read: " + std::strerror(errno));
    if (got == 0) {
      return error("tensor " + quoted(tensor.name) + ": the file ended at " + str(position) +
                   " while it was read, but was " + str(size_) + " long");
    }
    done += static_cast<size_t>(got);
  }
  return {};
} catch (...) {
  return status_of_exception();
}

Status GgufFile::read_head() {
  GgufCursor cursor = descriptor_ < 0 ? GgufCursor(bytes_) : GgufCursor(descriptor_, head_.get(), size_);
  const auto fail = [&](const std::string& field) { return error(field + ": " + cursor.problem()); };

  uint32_t magic = 0;
  if (!cursor.take(magic)) return fail("magic");
  constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
  if (magic == 0x47475546) return error("magic is that of a big-endian GGUF file, which is not supported");
  if (magic != kMagic) {
    const std::byte* begin = descriptor_ < 0 ? bytes_.data() : head_.get();
    return error("is not a GGUF file" + what_it_is({reinterpret_cast<const char*>(begin), cursor.held()}));
  }
  if (!cursor.take(version_)) return fail("version");
  if (version_ != 0 && (version_ & 0xffff) == 0) {
    return error("version " + str(version_) + " is that of a big-endian GGUF file, which is not supported");
  }
  if (version_ != 2 && version_ != 3) return error("version is " + str(version_) + ", but only 2 and 3 are supported");

  uint64_t num_tensors = 0, num_values = 0;
  if (!cursor.take(num_tensors)) return fail("tensor count");
  if (!cursor.take(num_values)) return fail("metadata count");
  constexpr uint64_t kSmallestValue = 8 + 4 + 1, kSmallestTensor = 8 + 4 + 8 + 4 + 8;
  if (num_values > cursor.left() / kSmallestValue) {
    return error("metadata count is " + str(num_values) + ", more than a file of " + str(size_) + " bytes can hold");
  }
  if (num_tensors > cursor.left() / kSmallestTensor) {
    return error("tensor count is " + str(num_tensors) + ", more than a file of " + str(size_) + " bytes can hold");
  }
  if (num_values > kMostKeys) return error("metadata count is " + str(num_values) + ", at most " + str(kMostKeys));
  if (num_tensors > kMostTensors)
    return error("tensor count is " + str(num_tensors) + ", at most " + str(kMostTensors));

  for (uint64_t i = 0; i < num_values; ++i) {
    std::string_view key;
    if (!cursor.take_string(key)) return fail("name of metadata key " + str(i));
    GgufValue value;
    if (!cursor.take_value(value)) return fail("key " + quoted(key));
    if (!metadata_.emplace(key, value).second) return error("key " + quoted(key) + " appears twice");
  }

  uint64_t alignment = kDefaultAlignment;
  if (const GgufValue* value = find("general.alignment"); value != nullptr) {
    if (value->type != GgufType::u32) {
      return error("key 'general.alignment' is of type " + describe(*value) + ", expected uint32");
    }
    alignment = load<uint32_t>(value->bytes.data());
    if (alignment < 8 || !std::has_single_bit(alignment)) {
      return error("key 'general.alignment' is " + str(alignment) + ", expected a power of two from 8 on");
    }
  }

  Status status = read_tensors(cursor, num_tensors, alignment);
  if (descriptor_ >= 0) bytes_ = {head_.get(), cursor.held()};
  return status;
}

Status GgufFile::read_tensors(GgufCursor& cursor, uint64_t num_tensors, uint64_t alignment) {
  const auto fail = [&](const std::string& field) { return error(field + ": " + cursor.problem()); };
  for (uint64_t i = 0; i < num_tensors; ++i) {
    GgufTensor tensor;
    if (!cursor.take_string(tensor.name)) return fail("name of tensor " + str(i));
    const std::string label = "tensor " + quoted(tensor.name);
    uint32_t num_dims = 0;
    if (!cursor.take(num_dims)) return fail(label + ": dimension count");
    if (num_dims < 1 || num_dims > kMaxDims) {
      return error(label + " has " + str(num_dims) + " dimensions, expected 1 to " + str(kMaxDims));
    }
    tensor.num_dims = static_cast<int>(num_dims);
    int64_t num_elements = 1;
    for (uint32_t d = 0; d < num_dims; ++d) {
      uint64_t size = 0;
      if (!cursor.take(size)) return fail(label + ": dimension " + str(d));
      if (size == 0) return error(label + ": dimension " + str(d) + " is 0");
      if (size > static_cast<uint64_t>(INT64_MAX) ||
          __builtin_mul_overflow(num_elements, static_cast<int64_t>(size), &num_elements)) {
        return error(label + ": dimension " + str(d) + " is " + str(size) + ": the number of elements overflows");
      }
      tensor.dims[d] = static_cast<int64_t>(size);
    }
    uint32_t type_id = 0;
    if (!cursor.take(type_id)) return fail(label + ": type");
    tensor.type = find_tensor_type(type_id);
    if (tensor.type == nullptr) return error(label + ": type " + str(type_id) + " is not known");
    if (tensor.dims[0] % tensor.type->block_elements != 0) {
      return error(label + ": dimension 0 is " + std::to_string(tensor.dims[0]) + ", not a multiple of the " +
                   std::to_string(tensor.type->block_elements) + " elements of a " + tensor.type->name + " block");
    }
    int64_t size_bytes = 0;
    if (__builtin_mul_overflow(num_elements / tensor.type->block_elements, tensor.type->block_bytes, &size_bytes)) {
      return error(label + ": the number of bytes overflows");
    }
    if (!cursor.take(tensor.offset)) return fail(label + ": offset");
    if (tensor.offset % alignment != 0) {
      return error(label + ": offset " + str(tensor.offset) + " is not a multiple of the alignment " + str(alignment));
    }
    tensor.size_bytes = static_cast<uint64_t>(size_bytes);
    if (tensor.size_bytes > size_) {
      return error(label + ": " + std::to_string(size_bytes) + " bytes of data in a file of " + str(size_));
    }
    if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) return error(label + " appears twice");
    tensors_.push_back(tensor);
  }

  // No overflow: the position is within the file, the alignment below 2^32.
  const uint64_t data_begin = (cursor.position() + alignment - 1) / alignment * alignment;
  for (GgufTensor& tensor : tensors_) {
    if (data_begin > size_ || tensor.offset > size_ - data_begin ||
        tensor.size_bytes > size_ - data_begin - tensor.offset) {
      return error("tensor " + quoted(tensor.name) + ": " + str(tensor.size_bytes) + " bytes at offset " +
                   str(tensor.offset) + " of the data, which begin at " + str(data_begin) + ", but the file ends at " +
                   str(size_));
    }
    tensor.offset += data_begin;
  }

  std::vector<const GgufTensor*> by_offset;
  for (const GgufTensor& tensor : tensors_) by_offset.push_back(&tensor);
  std::sort(by_offset.begin(), by_offset.end(),
            [](const GgufTensor* a, const GgufTensor* b) { return a->offset < b->offset; });
  for (size_t i = 1; i < by_offset.size(); ++i) {
    const GgufTensor &before = *by_offset[i - 1], &after = *by_offset[i];
    if (before.offset + before.size_bytes > after.offset) {
      return error("tensors " + quoted(before.name) + " and " + quoted(after.name) + " overlap");
    }
  }
  return {};
}

std::vector<std::string_view> GgufFile::keys() const {
  std::vector<std::string_view> keys;
  for (const auto& [key, value] : metadata_) keys.push_back(key);
  std::sort(keys.begin(), keys.end());
  return keys;
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto found = metadata_.find(key);
  return found == metadata_.end() ? nullptr : &found->second;
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

namespace {

// The value of `key` if `accept`s it; the errors that all typed accessors share.
template <class Accept>
Result<const GgufValue*> typed(const GgufFile& file, std::string_view key, const char* expected, Accept accept) {
  const GgufValue* value = file.find(key);
  if (value == nullptr) return file.error("key " + quoted(key) + " is missing");
  if (!accept(*value)) {
    return file.error("key " + quoted(key) + " is of type " + describe(*value) + ", expected " + expected);
  }
  return value;
}

}  // namespace

Result<int64_t> GgufFile::integer(std::string_view key) const try {
  const auto value = typed(*this, key, "an integer", [](const GgufValue& v) { return is_integer(v.type); });
  if (!value.ok()) return value.status();
  int64_t number = 0;
  if (!load_integer(value.value()->type, value.value()->bytes.data(), number)) {
    return error("key " + quoted(key) + " does not fit 63 bits");
  }
  return number;
} catch (...) {
  return status_of_exception();
}

Result<double> GgufFile::real(std::string_view key) const try {
  const auto value = typed(*this, key, "a number", [](const GgufValue& v) {
    return v.type == GgufType::f32 || v.type == GgufType::f64 || is_integer(v.type);
  });
  if (!value.ok()) return value.status();
  const std::byte* bytes = value.value()->bytes.data();
  if (value.value()->type == GgufType::f32) return static_cast<double>(load<float>(bytes));
  if (value.value()->type == GgufType::f64) return load<double>(bytes);
  const Result<int64_t> number = integer(key);
  if (!number.ok()) return number.status();
  return static_cast<double>(number.value());
} catch (...) {
  return status_of_exception();
}

Result<bool> GgufFile::boolean(std::string_view key) const try {
  const auto value = typed(*this, key, "bool", [](const GgufValue& v) { return v.type == GgufType::boolean; });
  if (!value.ok()) return value.status();
  return load<uint8_t>(value.value()->bytes.data()) != 0;
} catch (...) {
  return status_of_exception();
}

Result<std::string_view> GgufFile::string(std::string_view key) const try {
  const auto value = typed(*this, key, "string", [](const GgufValue& v) { return v.type == GgufType::string; });
  if (!value.ok()) return value.status();
  const auto bytes = value.value()->bytes.subspan(8);
  return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
} catch (...) {
  return status_of_exception();
}

Result<std::vector<std::string_view>> GgufFile::strings(std::string_view key) const try {
  const auto value = typed(*this, key, "array of string", [](const GgufValue& v) {
    return v.type == GgufType::array && v.element_type == GgufType::string;
  });
  if (!value.ok()) return value.status();
  GgufCursor cursor(value.value()->bytes);
  std::vector<std::string_view> texts(value.value()->count);
  for (std::string_view& text : texts) {
    if (!cursor.take_string(text)) return error("key " + quoted(key) + ": " + cursor.problem());
  }
  return texts;
} catch (...) {
  return status_of_exception();
}

Result<std::vector<int32_t>> GgufFile::integers(std::string_view key) const try {
  const auto value = typed(*this, key, "array of integers",
                           [](const GgufValue& v) { return v.type == GgufType::array && is_integer(v.element_type); });
  if (!value.ok()) return value.status();
  const GgufType type = value.value()->element_type;
  std::vector<int32_t> numbers(value.value()->count);
  for (size_t i = 0; i < numbers.size(); ++i) {
    int64_t number = 0;
    if (!load_integer(type, value.value()->bytes.data() + i * fixed_size(type), number) ||
        number != static_cast<int32_t>(number)) {
      return error("key " + quoted(key) + ": element " + str(i) + " does not fit 32 bits");
    }
    numbers[i] = static_cast<int32_t>(number);
  }
  return numbers;
} catch (...) {
  return status_of_exception();
}

}  // namespace opst::model
