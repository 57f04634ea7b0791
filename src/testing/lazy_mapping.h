// Gigabytes of address space of which only the touched pages take memory, to test offsets beyond 32 bits. Reads as
// zeros.
#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace opst::test {

class LazyMapping {
 public:
  explicit LazyMapping(int64_t size_bytes) : size_bytes_(size_bytes) {
    void* mapped = mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = mapped == MAP_FAILED ? nullptr : mapped;
    // A huge page for each touched byte would defeat the purpose.
    if (data_ != nullptr) madvise(data_, static_cast<size_t>(size_bytes), MADV_NOHUGEPAGE);
  }
  ~LazyMapping() {
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_bytes_));
  }
  LazyMapping(const LazyMapping&) = delete;
  LazyMapping& operator=(const LazyMapping&) = delete;

  void* data() const { return data_; }  // null where the system refuses: skip the test visibly
  int64_t size_bytes() const { return size_bytes_; }

 private:
  void* data_;
  int64_t size_bytes_;
};

}  // namespace opst::test
