// ShapeCheck: contract, check and message of an operator's tensors in one paragraph.
//
//   return checked("flash_attention_forward", [&](ShapeCheck& check) {
//     check.tensor("query", query).dtype({DType::f32}).dims({"batch", "num_heads", "query_len", "head_dim"});
//     check.tensor("key", key).dtype({query.dtype}).dims({"batch", "num_kv_heads", "kv_len", "head_dim"});
//     check.output("out", out).dtype({query.dtype}).dims({"batch", "num_heads", "query_len", "head_dim"});
//     check.require(num_heads % num_kv_heads == 0, "num_heads = ", num_heads, " is not a multiple of ", num_kv_heads);
//     if (!check.ok()) return;
//     ..  // the operator's work
//   });
//
// A dimension's name is bound to its first size; a later tensor with another size fails with
//   flash_attention_forward: key dim 3 (head_dim) is 64, but query set head_dim = 128
// Only the first failure is kept. Names are kept as pointers: they must outlive the check, as literals do. Inputs may
// have any strides >= 0; an output's elements must not share addresses. A check belongs to one call, and to its thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

#include "core/guarded.h"
#include "core/text.h"
#include "opst/tensor.h"

namespace opst {

class ShapeCheck {
 public:
  explicit ShapeCheck(const char* operator_name) : operator_name_(operator_name) {}

  // Of tensors that are declared before they have memory, as a graph's: dtypes and shapes are compared, data and
  // strides are not looked at. A size < 0 stands for a name, which `names` writes into messages.
  class SizeNames {
   public:
    virtual std::string text(int64_t size) const = 0;

   protected:
    ~SizeNames() = default;
  };
  ShapeCheck(const char* operator_name, const SizeNames& names) : operator_name_(operator_name), names_(&names) {}

  // One tensor's part of the paragraph. A name that is a number ("8") demands that size.
  class TensorCheck {
   public:
    TensorCheck& dims(std::span<const char* const> names);
    TensorCheck& dims(std::initializer_list<const char*> names) { return dims({names.begin(), names.size()}); }
    // `num_leading` dimensions dim_0, dim_1, .., at most kMaxRank, and behind them `last`, unless it is null.
    TensorCheck& leading_dims(int num_leading, const char* last);
    TensorCheck& dtype(std::initializer_list<DType> allowed);
    // The last dimension's elements are next to each other.
    TensorCheck& unit_inner_stride();

   private:
    friend class ShapeCheck;
    TensorCheck(ShapeCheck* check, const char* name, const ConstTensor& tensor)
        : check_(check), name_(name), tensor_(tensor) {}
    ShapeCheck* check_;
    const char* name_;
    ConstTensor tensor_;
  };

  // An input: rank, a known dtype, sizes and strides >= 0 and within kMaxBytes; unless it has no elements, data that is
  // not null and a multiple of an element's size.
  TensorCheck tensor(const char* name, const ConstTensor& tensor);
  // An output: the same, its elements at distinct addresses, and none of them in any tensor named before.
  TensorCheck output(const char* name, const ConstTensor& tensor);

  // Any other condition. The parts of the message (core/text.h) follow "operator: "; they are put together only when
  // needed. A part that is costly, or that exists only where the condition fails, is a function that returns it.
  template <class... Parts>
  ShapeCheck& require(bool condition, const Parts&... parts) {
    if (!condition) fail(text(parts...));
    return *this;
  }
  // What another function says of the call: its code is kept, and its message follows "operator: " likewise.
  ShapeCheck& require(const Status& status);

  // A size that a tensor's shape holds without being one of its dimensions: bound, or compared to what is bound.
  //   key_cache holds head_dim = 8, but key set head_dim = 16
  ShapeCheck& holds(const char* tensor, const char* name, int64_t size);

  // A bound size; of a declared tensor it may be < 0. 0 for a name that no tensor has bound.
  int64_t operator[](const char* name) const { return find(name).size; }
  // The tensor that bound a size; null for a name that no tensor has bound.
  const char* setter(const char* name) const { return find(name).tensor; }

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

 private:
  struct Dimension {
    const char* name;
    const char* tensor;
    int64_t size;
  };
  struct Seen {
    const char* name;
    ConstTensor tensor;
    int64_t span_bytes;  // from the first element's start to the last one's end
  };
  void fail(const std::string& message, StatusCode code = StatusCode::invalid_argument);
  std::string shown(int64_t size) const { return names_ != nullptr ? names_->text(size) : std::to_string(size); }
  Dimension find(const char* name) const;  // nulls and 0 for a name that no tensor has bound
  // Binds the name, or compares the size with the bound one. `where` begins the message: "key dim 3 (head_dim) is".
  template <class Where>
  void bind(const char* name, const char* tensor, int64_t size, const Where& where);

  // Room for any operator: a check that succeeds allocates nothing.
  static constexpr int kMaxDimensions = 32;
  static constexpr int kMaxTensors = 32;  // attention's backward call with every option has 26, two of them seen twice

  const char* operator_name_;
  const SizeNames* names_ = nullptr;  // of declared tensors
  Status status_;
  int num_dimensions_ = 0;
  int num_seen_ = 0;
  Dimension dimensions_[kMaxDimensions];
  // Room only: a tensor that a check never sees is not initialised either.
  union Place {
    Place() {}
    Seen seen;
  } seen_[kMaxTensors];
};

// The body of a public operator, guarded (core/guarded.h): body(check) checks the call and does its work. Returns what
// the body returns; after a body that returns nothing, the status of the check.
template <class Body>
auto checked(const char* operator_name, const Body& body) noexcept {
  using Returned = std::invoke_result_t<const Body&, ShapeCheck&>;
  constexpr bool kNothing = std::is_void_v<Returned>;
  return guarded([&]() -> std::conditional_t<kNothing, Status, Returned> {
    ShapeCheck check(operator_name);
    if constexpr (kNothing) {
      body(check);
      return check.status();
    } else {
      return body(check);
    }
  });
}

// Gives a tensor that has been checked other strides where strides mean nothing: in dimensions of one index those of a
// row-major view; in a tensor without elements 0, and 1 in the last dimension.
template <class T>  // Tensor or ConstTensor
void make_strides_normal(T& tensor);
template <class T>
T normal_strides(T tensor) {
  make_strides_normal(tensor);
  return tensor;
}

// The same elements at the same addresses: of any two tensors, checked or not.
bool same_view(const ConstTensor& a, const ConstTensor& b);
// How many indices of `dim` may have elements of their own: the size, or at most 1 where a stride of 0 repeats one
// element. A loop over the values of a tensor ends here: with strides of 0 its size may be 2^55 without any memory.
int64_t distinct(const ConstTensor& tensor, int dim);

// True where some address may belong to an element of both views, which are sound but for their alignment. Exact for
// views that share no bytes and for views interleaved with a common period (the q, k and v parts of one fused buffer);
// otherwise errs towards true.
bool may_overlap(const ConstTensor& a, const ConstTensor& b);
// Bytes from the start of a sound view's first element to the end of its last: what its addresses lie in.
int64_t span_bytes(const ConstTensor& tensor);
// Whether ShapeCheck::tensor() takes it: its rank, dtype, sizes, strides and address, whatever its shape ought to be.
bool is_sound(const ConstTensor& tensor);
// True where two index tuples of a sound view may share an address.
bool may_alias_itself(const ConstTensor& tensor);

}  // namespace opst
