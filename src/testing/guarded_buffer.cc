#include "testing/guarded_buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/int_math.h"

namespace opst::test {
namespace {

constexpr unsigned char kSlackByte = 0xa5;

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

}  // namespace

GuardedBuffer::GuardedBuffer(int64_t size_bytes, Guard guard, Prefill prefill) : size_bytes_(size_bytes) {
  const int64_t page = page_bytes();
  pages_bytes_ = round_up(std::max<int64_t>(size_bytes, 1), page);
  void* const base =
      mmap(nullptr, static_cast<size_t>(pages_bytes_ + 2 * page), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    std::perror("GuardedBuffer: mmap");
    std::abort();
  }
  pages_ = static_cast<char*>(base) + page;
  if (mprotect(pages_, static_cast<size_t>(pages_bytes_), PROT_READ | PROT_WRITE) != 0) {
    std::perror("GuardedBuffer: mprotect");
    std::abort();
  }
  std::memset(pages_, kSlackByte, static_cast<size_t>(pages_bytes_));
  data_ = guard == Guard::after ? pages_ + (pages_bytes_ - size_bytes) : pages_;
  std::memset(data_, prefill == Prefill::nan ? 0xff : 0x7f, static_cast<size_t>(size_bytes));
}

GuardedBuffer::GuardedBuffer(GuardedBuffer&& other) noexcept
    : pages_(std::exchange(other.pages_, nullptr)),
      pages_bytes_(other.pages_bytes_),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

GuardedBuffer::~GuardedBuffer() {
  const int64_t page = page_bytes();
  if (pages_ != nullptr) munmap(pages_ - page, static_cast<size_t>(pages_bytes_ + 2 * page));
}

bool GuardedBuffer::slack_intact() const {
  const auto is_slack = [](char c) { return static_cast<unsigned char>(c) == kSlackByte; };
  return std::all_of(pages_, data_, is_slack) && std::all_of(data_ + size_bytes_, pages_ + pages_bytes_, is_slack);
}

void GuardedBuffer::make_read_only() { mprotect(pages_, static_cast<size_t>(pages_bytes_), PROT_READ); }

}  // namespace opst::test
