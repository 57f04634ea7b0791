// Numbers: a std::vector with signed indices, as all sizes are signed here.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace opst::test {

template <class T>
class Numbers : public std::vector<T> {
 public:
  using std::vector<T>::vector;
  Numbers(std::vector<T> numbers) : std::vector<T>(std::move(numbers)) {}
  T& operator[](int64_t i) { return this->data()[i]; }
  const T& operator[](int64_t i) const { return this->data()[i]; }
};

}  // namespace opst::test
