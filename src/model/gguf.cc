#include "model/gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "core/guarded.h"

namespace opst::model {

static_assert(std::endian::native == std::endian::little, "the reader takes values from the mapping as they are");

namespace {

constexpr uint32_t kDefaultAlignment = 32;
constexpr uint32_t kMaxDims = 4;
// Arrays of arrays of ...: no known file has more than one level; a limit keeps the recursion off the stack's end.
constexpr int kMaxArrayDepth = 8;

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

// Bytes of one value; 0 for strings and arrays, whose size stands in the file.
constexpr uint64_t fixed_size(GgufType type) {
  switch (type) {
    case GgufType::u8:
    case GgufType::i8:
    case GgufType::boolean:
      return 1;
    case GgufType::u16:
    case GgufType::i16:
      return 2;
    case GgufType::u32:
    case GgufType::i32:
    case GgufType::f32:
      return 4;
    case GgufType::u64:
    case GgufType::i64:
    case GgufType::f64:
      return 8;
    case GgufType::string:
    case GgufType::array:
      break;
  }
  return 0;
}

// The fewest bytes that a value of this type takes.
constexpr uint64_t smallest_size(GgufType type) {
  if (type == GgufType::string) return 8;
  if (type == GgufType::array) return 12;
  return fixed_size(type);
}

template <class T>
T load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

std::string str(uint64_t value) { return std::to_string(value); }

// A position in the file. Every take_ checks what is left first; `problem` says why one failed.
class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> bytes) : bytes_(bytes) {}

  uint64_t position() const { return position_; }
  uint64_t left() const { return bytes_.size() - position_; }
  const std::string& problem() const { return problem_; }

  template <class T>
  bool take(T& value) {
    if (left() < sizeof(T)) return fail(ends(sizeof(T)));
    value = load<T>(bytes_.data() + position_);
    position_ += sizeof(T);
    return true;
  }

  bool take_string(std::string_view& value) {
    uint64_t length = 0;
    if (!take(length)) return false;
    if (length > left()) return fail("a string of " + str(length) + " bytes: " + ends(length));
    value = {reinterpret_cast<const char*>(bytes_.data() + position_), length};
    position_ += length;
    return true;
  }

  bool take_type(GgufType& type) {
    uint32_t id = 0;
    if (!take(id)) return false;
    if (id > static_cast<uint32_t>(GgufType::f64)) return fail("value type " + str(id) + " is not known");
    type = static_cast<GgufType>(id);
    return true;
  }

  bool take_value(GgufValue& value) {
    if (!take_type(value.type)) return false;
    if (value.type == GgufType::array && !take_array_header(value.element_type, value.count)) return false;
    const uint64_t begin = position_;
    const bool taken = value.type == GgufType::array ? skip_elements(value.element_type, value.count, 1)
                                                     : skip_elements(value.type, 1, 0);
    value.bytes = bytes_.subspan(begin, position_ - begin);
    return taken;
  }

 private:
  bool fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  std::string ends(uint64_t wanted) const {
    return str(wanted) + " bytes wanted at offset " + str(position_) + ", but the file ends at " + str(bytes_.size());
  }

  bool take_array_header(GgufType& element_type, uint64_t& count) { return take_type(element_type) && take(count); }

  bool skip_elements(GgufType type, uint64_t count, int depth) {
    // Before any loop or product: a count that the rest of the file cannot hold.
    if (count > left() / smallest_size(type)) {
      return fail(str(count) + " values of type " + to_string(type) + " at offset " + str(position_) +
                  ", but the file ends at " + str(bytes_.size()));
    }
    if (type == GgufType::string) {
      std::string_view text;
      for (uint64_t i = 0; i < count; ++i) {
        if (!take_string(text)) return false;
      }
      return true;
    }
    if (type == GgufType::array) {
      if (depth >= kMaxArrayDepth) return fail("arrays nested deeper than " + str(kMaxArrayDepth));
      for (uint64_t i = 0; i < count; ++i) {
        GgufType inner_type{};
        uint64_t inner_count = 0;
        if (!take_array_header(inner_type, inner_count) || !skip_elements(inner_type, inner_count, depth + 1)) {
          return false;
        }
      }
      return true;
    }
    if (type == GgufType::boolean) {
      for (uint64_t i = 0; i < count; ++i) {
        if (load<uint8_t>(bytes_.data() + position_ + i) > 1) return fail("a bool that is neither 0 nor 1");
      }
    }
    position_ += count * fixed_size(type);
    return true;
  }

  std::span<const std::byte> bytes_;
  uint64_t position_ = 0;
  std::string problem_;
};

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
  if (mapping_ != nullptr) munmap(mapping_, bytes_.size());
}

GgufFile::GgufFile(GgufFile&& other) noexcept { *this = std::move(other); }

GgufFile& GgufFile::operator=(GgufFile&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(version_, other.version_);
  std::swap(metadata_, other.metadata_);
  std::swap(tensors_, other.tensors_);
  std::swap(tensor_index_, other.tensor_index_);
  return *this;
}

Result<GgufFile> GgufFile::open(const std::string& path) try {
  GgufFile file;
  file.name_ = path;
  // O_NONBLOCK: opening a named pipe must not wait for a writer.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  const auto close_file = [](const int* d) { ::close(*d); };
  const std::unique_ptr<const int, decltype(close_file)> open_file(descriptor < 0 ? nullptr : &descriptor, close_file);
  if (descriptor < 0) return file.error(std::string("cannot open: ") + std::strerror(errno));
  struct stat info {};
  Status status;
  if (fstat(descriptor, &info) != 0) {
    status = file.error(std::string("cannot read: ") + std::strerror(errno));
  } else if (!S_ISREG(info.st_mode)) {
    status = file.error("is not a regular file");
  } else if (info.st_size == 0) {
    status = file.error("is empty");
  } else {
    const auto size = static_cast<size_t>(info.st_size);
    void* mapping = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (mapping == MAP_FAILED) {
      if (errno == ENOMEM) return Status::out_of_memory();
      status = file.error(std::string("cannot map: ") + std::strerror(errno));
    } else {
      file.mapping_ = mapping;
      file.bytes_ = {static_cast<const std::byte*>(mapping), size};
    }
  }
  if (!status.ok()) return status;
  if (Status read = file.read(); !read.ok()) return read;
  return file;
} catch (...) {
  return status_of_exception();
}

Result<GgufFile> GgufFile::parse(std::string name, std::span<const std::byte> bytes) try {
  GgufFile file;
  file.name_ = std::move(name);
  file.bytes_ = bytes;
  if (Status read = file.read(); !read.ok()) return read;
  return file;
} catch (...) {
  return status_of_exception();
}

Status GgufFile::read() {
  Cursor cursor(bytes_);
  const auto fail = [&](const std::string& field) { return error(field + ": " + cursor.problem()); };

  uint32_t magic = 0;
  if (!cursor.take(magic)) return fail("magic");
  constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
  if (magic == 0x47475546) return error("magic is that of a big-endian GGUF file, which is not supported");
  if (magic != kMagic) return error("is not a GGUF file (the magic is missing)");
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
    return error("metadata count is " + str(num_values) + ", more than a file of " + str(bytes_.size()) +
                 " bytes can hold");
  }
  if (num_tensors > cursor.left() / kSmallestTensor) {
    return error("tensor count is " + str(num_tensors) + ", more than a file of " + str(bytes_.size()) +
                 " bytes can hold");
  }

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

  std::vector<uint64_t> offsets;
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
    uint64_t offset = 0;
    if (!cursor.take(offset)) return fail(label + ": offset");
    if (offset % alignment != 0) {
      return error(label + ": offset " + str(offset) + " is not a multiple of the alignment " + str(alignment));
    }
    offsets.push_back(offset);
    if (static_cast<uint64_t>(size_bytes) > bytes_.size()) {
      return error(label + ": " + std::to_string(size_bytes) + " bytes of data in a file of " + str(bytes_.size()));
    }
    // The length only: where the data begin is known after the last tensor's description.
    tensor.data = bytes_.first(static_cast<size_t>(size_bytes));
    if (!tensor_index_.emplace(tensor.name, tensors_.size()).second) return error(label + " appears twice");
    tensors_.push_back(tensor);
  }

  // No overflow: the position is within the file, the alignment below 2^32.
  const uint64_t data_begin = (cursor.position() + alignment - 1) / alignment * alignment;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    GgufTensor& tensor = tensors_[i];
    if (data_begin > bytes_.size() || offsets[i] > bytes_.size() - data_begin ||
        tensor.data.size() > bytes_.size() - data_begin - offsets[i]) {
      return error("tensor " + quoted(tensor.name) + ": " + str(tensor.data.size()) + " bytes at offset " +
                   str(offsets[i]) + " of the data, which begin at " + str(data_begin) + ", but the file ends at " +
                   str(bytes_.size()));
    }
    tensor.data = bytes_.subspan(data_begin + offsets[i], tensor.data.size());
  }

  std::vector<const GgufTensor*> by_address;
  for (const GgufTensor& tensor : tensors_) by_address.push_back(&tensor);
  std::sort(by_address.begin(), by_address.end(),
            [](const GgufTensor* a, const GgufTensor* b) { return a->data.data() < b->data.data(); });
  for (size_t i = 1; i < by_address.size(); ++i) {
    const GgufTensor &before = *by_address[i - 1], &after = *by_address[i];
    if (before.data.data() + before.data.size() > after.data.data()) {
      return error("tensors " + quoted(before.name) + " and " + quoted(after.name) + " overlap");
    }
  }
  return {};
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
  Cursor cursor(value.value()->bytes);
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

void GgufFile::release(const GgufTensor& tensor) const {
  if (mapping_ == nullptr) return;
  // Whole pages only; the neighbours' parts of the first and last page stay.
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(tensor.data.data()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(tensor.data.data()) + tensor.data.size()) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace opst::model
