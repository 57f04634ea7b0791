// What the files of nodes share: the check of a node's inputs.
#pragma once

#include <algorithm>

#include "graph/graph_impl.h"

namespace opst::graph {

using Kind = GraphImpl::Kind;
using ValueData = GraphImpl::ValueData;

inline constexpr std::initializer_list<DType> kFloats = {DType::f32, DType::bf16, DType::f16};

// One operator's inputs, as ShapeCheck does it for tensors: a dimension's name is bound to its first size.
class NodeCheck {
 public:
  NodeCheck(GraphImpl& graph, const std::string& node, const char* op)
      : graph_(graph), where_(node + " (" + op + "): ") {}

  bool ok() const { return ok_; }
  void fail(const std::string& message) {
    if (ok_) graph_.fail(where_ + message);
    ok_ = false;
  }

  void tensor(const char* role, Value value, std::initializer_list<DType> dtypes,
              std::initializer_list<const char*> names) {
    if (const ValueData* const data = find_tensor(role, value, dtypes)) dims(role, *data, names);
  }

  // Any rank from 1; the last dimension has a name.
  void last_dim(const char* role, Value value, std::initializer_list<DType> dtypes, const char* name) {
    const ValueData* const data = find_tensor(role, value, dtypes);
    if (data == nullptr) return;
    if (data->shape.rank == 0) return fail(named(role, *data) + " has no dimension " + name);
    dim(role, *data, data->shape.rank - 1, name);
  }

  // A packed weight, [n, k].
  void weight(const char* role, Value value, std::initializer_list<const char*> names) {
    const ValueData* const data = find(role, value);
    if (data == nullptr) return;
    if (data->kind != Kind::weight) return fail(named(role, *data) + " is a tensor, expected a packed weight");
    dims(role, *data, names);
  }

  // Shape and dtype of `value` are those of `other`.
  void same(const char* role, Value value, const char* other_role, Value other) {
    const ValueData* const a = find(role, value);
    const ValueData* const b = find(other_role, other);
    if (a == nullptr || b == nullptr) return;
    if (a->dtype != b->dtype || a->shape != b->shape) {
      fail(named(role, *a) + " is " + to_string(a->dtype) + " " + graph_.text(a->shape) + ", but " +
           named(other_role, *b) + " is " + to_string(b->dtype) + " " + graph_.text(b->shape));
    }
  }

  void shaped(const char* role, Value value, const Shape& shape) {
    const ValueData* const data = find_tensor(role, value, kFloats);
    if (data == nullptr || data->shape == shape) return;
    fail(named(role, *data) + " is " + graph_.text(data->shape) + ", but the result is " + graph_.text(shape));
  }

  void written(const char* role, Value value) {
    const ValueData* const data = find(role, value);
    if (data != nullptr && data->kind != Kind::cache) fail(named(role, *data) + " is written, but is no cache");
  }

  // The tensors of a cache. Binds num_blocks, block_size, num_kv_heads, head_dim and value_head_dim.
  void pages(PageLayout layout, Value key_cache, Value value_cache) {
    const ValueData* const key = find_tensor("key_cache", key_cache, kFloats);
    if (key == nullptr) return;
    const DType dtype = key->dtype;
    if (layout == PageLayout::norm) {
      tensor("key_cache", key_cache, {dtype}, {"num_blocks", "block_size", "num_kv_heads", "head_dim"});
      tensor("value_cache", value_cache, {dtype}, {"num_blocks", "block_size", "num_kv_heads", "value_head_dim"});
      return;
    }
    if (const Status status = supports(layout, dtype, kPanelRows); !status.ok()) return fail(status.message());
    int64_t step = 1;
    if (dtype == DType::bf16) {
      step = 2;
      tensor("key_cache", key_cache, {dtype}, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim / 2", "64"});
      tensor("value_cache", value_cache, {dtype},
             {"num_blocks", "num_kv_heads", "block_size / 2", "2 * value_head_dim"});
    } else {
      tensor("key_cache", key_cache, {dtype}, {"num_blocks", "num_kv_heads", "block_size / 32", "head_dim", "32"});
      tensor("value_cache", value_cache, {dtype}, {"num_blocks", "num_kv_heads", "block_size", "value_head_dim"});
    }
    if (!ok_) return;
    const Dim* const k = key->shape.dims;
    const Dim* const v = graph_.at(value_cache).shape.dims;
    if (k[4].bound() != kPanelRows * step) {
      return fail(named("key_cache", *key) + " dim 4 is " + graph_.text(k[4]) + ", but a panel has " +
                  std::to_string(kPanelRows * step) + " elements");
    }
    holds("key_cache", key_cache, "head_dim", k[3].bound() * step);
    holds("key_cache", key_cache, "block_size", k[2].bound() * kPanelRows);
    holds("value_cache", value_cache, "block_size", v[2].bound() * step);
    holds("value_cache", value_cache, "value_head_dim", v[3].bound() / step);
  }

  // Sizes of which an operator has at least one.
  void positive(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      const Bound* const known = ok_ ? find_bound(name) : nullptr;
      if (known != nullptr && known->dim.bound() < 1) {
        fail(known->by + " has " + name + " = " + graph_.text(known->dim) + ", but must be >= 1");
      }
    }
  }

  // A size that follows from a shape.
  void holds(const char* role, Value value, const char* name, Dim size) {
    const ValueData* const data = find(role, value);
    if (data == nullptr) return;
    const Bound* const known = find_bound(name);
    if (known == nullptr) {
      bound_.push_back({name, size, named(role, *data)});
    } else if (known->dim != size) {
      fail(named(role, *data) + " holds " + name + " = " + graph_.text(size) + ", but " + known->by + " has " + name +
           " = " + graph_.text(known->dim));
    }
  }

  // A bound size.
  Dim operator[](std::string_view name) const {
    const Bound* const known = find_bound(name);
    return known != nullptr ? known->dim : Dim();
  }

 private:
  struct Bound {
    std::string_view name;
    Dim dim;
    std::string by;
  };

  static std::string named(const char* role, const ValueData& data) {
    return std::string(role) + " '" + data.name + "'";
  }

  const Bound* find_bound(std::string_view name) const {
    const auto known = std::find_if(bound_.begin(), bound_.end(), [name](const Bound& b) { return b.name == name; });
    return known == bound_.end() ? nullptr : &*known;
  }

  const ValueData* find(const char* role, Value value) {
    if (!ok_) return nullptr;
    if (graph_.has(value)) return &graph_.at(value);
    fail(std::string(role) + " is no tensor of this graph");
    return nullptr;
  }

  const ValueData* find_tensor(const char* role, Value value, std::initializer_list<DType> dtypes) {
    const ValueData* const data = find(role, value);
    if (data == nullptr) return nullptr;
    if (data->kind == Kind::weight) {
      return fail(named(role, *data) + " is a packed weight, expected a tensor"), nullptr;
    }
    if (std::find(dtypes.begin(), dtypes.end(), data->dtype) == dtypes.end()) {
      std::string expected;
      for (const DType dtype : dtypes) expected += (expected.empty() ? "" : " or ") + std::string(to_string(dtype));
      return fail(named(role, *data) + " is " + to_string(data->dtype) + ", expected " + expected), nullptr;
    }
    return data;
  }

  void dims(const char* role, const ValueData& data, std::initializer_list<const char*> names) {
    if (data.shape.rank != static_cast<int>(names.size())) {
      std::string expected;
      for (const char* name : names) expected += (expected.empty() ? "" : ", ") + std::string(name);
      return fail(named(role, data) + " is " + graph_.text(data.shape) + ", expected [" + expected + "]");
    }
    int i = 0;
    for (const char* name : names) dim(role, data, i++, name);
  }

  void dim(const char* role, const ValueData& data, int i, const char* name) {
    const Dim size = data.shape.dims[i];
    const Bound* const known = find_bound(name);
    if (known == nullptr) {
      bound_.push_back({name, size, named(role, data)});
    } else if (known->dim != size) {
      fail(named(role, data) + " dim " + std::to_string(i) + " (" + name + ") is " + graph_.text(size) + ", but " +
           known->by + " has " + name + " = " + graph_.text(known->dim));
    }
  }

  GraphImpl& graph_;
  std::string where_;
  bool ok_ = true;
  std::vector<Bound> bound_;
};

inline Value only(const std::vector<Value>& outputs) { return outputs.empty() ? Value() : outputs[0]; }

}  // namespace opst::graph
