// What the operators' files share: a call's checks, its product, its signature.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <string_view>
#include <type_traits>

#include "core/elements.h"
#include "core/int_math.h"
#include "core/shape_check.h"
#include "core/text.h"
#include "machine/context_impl.h"
#include "mc2/exchange.h"
#include "opst/mc2.h"

namespace opst::mc2 {

// Of each rank. Arrays, since a call allocates nothing.
struct Split {
  std::array<int64_t, kMaxRanks> sizes = {};
  std::array<int64_t, kMaxRanks + 1> offsets = {};
  int parts = 0;
  void add(int64_t size);
  int64_t total() const { return offset(parts); }
  int64_t size(int rank) const { return sizes[static_cast<size_t>(rank)]; }
  int64_t offset(int rank) const { return offsets[static_cast<size_t>(rank)]; }
  int64_t most() const { return *std::max_element(sizes.begin(), sizes.begin() + parts); }
};
Split equal_split(int parts, int64_t each);
Split divided(int parts, int64_t total);
Split given_split(std::span<const int64_t> sizes);
// Given sizes of each rank, or the default.
Split split_of(ShapeCheck& check, const char* what, std::span<const int64_t> given, int ranks, const Split& otherwise);
void agree(ShapeCheck& check, const char* what, int64_t size, const char* why, int64_t expected);
void check_tile_rows(ShapeCheck& check, int64_t tile_rows);

// The tiles of a call, where one row of them fits into a slot.
Mc2Plan plan_tiles(ShapeCheck& check, Communicator::Impl& communicator, Mc2Operator op, int64_t rows, int64_t row_bytes,
                   int64_t tile_rows);

// body(check, communicator.impl()), which no other thread's call enters meanwhile. Its failure ends the communicator.
template <class Body>
Status alone(const char* name, Communicator& communicator, const Body& body) {
  Communicator::Impl& own = communicator.impl();
  Status status = own.enter(name);
  if (!status.ok()) return status;
  status = own.status;
  if (status.ok()) {
    status = checked(name, [&](ShapeCheck& check) -> Status { return body(check, own); });
    if (!status.ok()) status = own.poison(std::move(status));
  }
  own.busy.store(false, std::memory_order_release);
  return status;
}

// The text of an entry's signature as it grows: all of it is hashed, and its beginning kept.
class SignatureText {
 public:
  explicit SignatureText(Entry& entry) : entry_(entry) {}
  void add(std::string_view part);
  template <class Number>
  requires std::is_arithmetic_v<Number>
  void add(Number number) {
    char digits[32];
    add(std::string_view(digits,
                         static_cast<size_t>(std::to_chars(digits, digits + sizeof(digits), number).ptr - digits)));
  }
  void add(const Split& split);
  template <class... Parts>
  void write(const Parts&... parts) {
    (add(parts), ...);
  }

 private:
  Entry& entry_;
  int length_ = 0;
};

// Rows of x times weight `index`.
class TileProduct {
 public:
  TileProduct(Context& context, const GroupedWeight& weight, const Mc2Options& options)
      : context_(context), weight_(weight), options_(options) {}
  int64_t n(int64_t index = 0) const;
  int64_t k(int64_t index = 0) const;
  const char* format() const;
  // x_scales: of these rows.
  Status operator()(const ConstTensor& x, const ConstTensor& x_scales, int64_t index, const ConstTensor& bias,
                    const Tensor& out) const;
  Context& context() const { return context_; }

 private:
  Context& context_;
  const GroupedWeight& weight_;
  const Mc2Options& options_;
};

// A call whose tensors were checked, with what all operators need.
struct Call {
  Context& context;
  Communicator::Impl& communicator;
  Mc2Operator op;
  ConstTensor x;
  const GroupedWeight& weight;
  Tensor out;
  const Mc2Options& options;
  TileProduct product;
  Split rows = {}, inputs = {};
  Mc2Plan plan = {};

  int rank() const { return communicator.transport->rank(); }
  int ranks() const { return communicator.transport->world_size(); }
  const char* name() const { return to_string(op); }
  int64_t tiles(int64_t count) const { return ceil_div(count, plan.tile_rows); }
  // Rows of tile i of a rank with `count` rows.
  int64_t tile_size(int64_t count, int64_t i) const { return std::min(plan.tile_rows, count - i * plan.tile_rows); }
  ConstTensor scales(int64_t first, int64_t count) const {
    return is_given(options.x_scales) ? options.x_scales.narrowed(0, first, count) : ConstTensor();
  }
};

// Each runs a call that was checked and planned.
Status run_matmul_all_to_all(Call& call);
Status run_all_to_all_matmul(Call& call);
Status run_all_gather_matmul(Call& call);
Status run_matmul_reduce_scatter(Call& call);
Status run_matmul_all_reduce(Call& call);

// The entry of a call: the signature of what all ranks must agree on, and where `out` lies if others may store into it.
Entry make_entry(const Call& call, bool shares_out);

// `out` lies where others may store into it, if the transport can and the options allow.
void share_out(Entry& entry, const Communicator::Impl& communicator, const Tensor& out, int64_t row_stride,
               int64_t column_stride);

// Rows of one [rows, columns] view become those of another of the same dtype.
void copy_rows(const ConstTensor& from, const Tensor& to);

}  // namespace opst::mc2
