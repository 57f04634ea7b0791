#include "graph/new_node.h"

#include <algorithm>

#include "kv_cache/pages.h"

namespace opst::graph {

NewNode::NewNode(GraphImpl& graph, const std::string& node, const char* operator_name)
    : NodeSpec{.name = node, .op = operator_name, .run = {}},
      where_(node + " (" + operator_name + ")"),
      check(where_.c_str(), *this),
      graph_(graph) {}

const char* NewNode::named(const char* role, Value value) {
  return graph_.has(value) ? keep(std::string(role) + " " + quoted(graph_.at(value).name)) : role;
}

ConstTensor NewNode::declared(Value value) const {
  ConstTensor tensor;
  if (!graph_.has(value)) return tensor;
  const GraphImpl::ValueData& data = graph_.at(value);
  tensor.dtype = data.dtype, tensor.rank = data.shape.rank;
  for (int i = 0; i < tensor.rank; ++i) tensor.shape[i] = GraphImpl::number_of(data.shape.dims[i]);
  make_contiguous(tensor);
  return tensor;
}

ShapeCheck::TensorCheck NewNode::input(const char* role, Value value, Counted counted) {
  inputs.push_back(value);
  counted_.push_back(counted);
  const char* const known_as = named(role, value);
  check.require(graph_.has(value), [&] { return std::string(known_as) + " is no tensor of this graph"; });
  if (check.ok() && is_packed(counted) != (graph_.at(value).kind == GraphImpl::Kind::weight)) {
    check.require(false, std::string(known_as) + (is_packed(counted) ? " is a tensor, expected a packed weight"
                                                                     : " is a packed weight, expected a tensor"));
  }
  return check.tensor(known_as, declared(value));
}

ShapeCheck::TensorCheck NewNode::rows(const char* role, Value value, const char* last) {
  ShapeCheck::TensorCheck of_rows = input(role, value);
  if (rank_ == 0) rank_ = declared(value).rank;
  check.require(rank_ > 0, [&] { return std::string(named(role, value)) + " has no dimension " + last; });
  return check.ok() ? of_rows.leading_dims(rank_ - 1, last) : of_rows;
}

void NewNode::pages(PageLayout layout, Value key_cache, Value value_cache, bool written) {
  const auto side = [&](PageSide key_or_value, const char* role, Value cache) {
    const char* const known_as = named(role, cache);
    input(role, cache, Counted::not_all);
    check.require(!check.ok() || !written || graph_.at(cache).kind == GraphImpl::Kind::cache,
                  [&] { return std::string(known_as) + " is written, but is no cache"; });
    ConstTensor tensor = declared(cache);
    // What lies in one piece of a page is counted with: a named size is its bound.
    const PageFormat& format = page_format(layout, tensor.dtype, key_or_value);
    for (int i = format.contiguous_from; i < tensor.rank; ++i) tensor.shape[i] = dim(tensor.shape[i]).bound();
    make_contiguous(tensor);
    return std::pair(known_as, tensor);
  };
  const auto [key_name, key] = side(PageSide::key, "key_cache", key_cache);
  const auto [value_name, value] = side(PageSide::value, "value_cache", value_cache);
  kv_cache::check_pages(check, layout, key_name, key, value_name, value);
}

ShapeCheck::TensorCheck NewNode::result(DType dtype, const Shape& shape, const char* suffix) {
  outputs.push_back({name + suffix, dtype, shape});
  ConstTensor tensor;
  tensor.dtype = dtype, tensor.rank = std::clamp(shape.rank, 0, kMaxRank);
  for (int i = 0; i < tensor.rank; ++i) tensor.shape[i] = GraphImpl::number_of(shape.dims[i]);
  return check.tensor("the result", tensor);
}

void NewNode::at_least_one(std::initializer_list<const char*> names) {
  for (const char* size : names) {
    if (!check.ok()) return;
    check.require(check[size] != 0,
                  [&] { return std::string(check.setter(size)) + " has " + size + " = 0, but must be >= 1"; });
  }
}

void NewNode::half_of_head_dim() {
  const int64_t half = dim("half").bound(), head_dim = dim("head_dim").bound();
  check.require(half <= head_dim / 2,
                [&] { return "cos dim 1 (half) is " + str(half) + ", more than half of head_dim = " + str(head_dim); });
}

std::array<Value, 2> NewNode::add() && {
  std::array<Value, 2> results;
  if (!check.ok()) return graph_.fail(check.status().message()), results;
  cost = [counted = std::move(counted_), num_outputs = static_cast<int>(outputs.size()),
          also = std::move(also_costs)](const NodeTensors& t) {
    NodeCost total = count_bytes(t, static_cast<int>(counted.size()), num_outputs, counted.data());
    if (also) total += also(t);
    return total;
  };
  const std::vector<Value> all = graph_.add_node(std::move(*this));
  std::copy(all.begin(), all.end(), results.begin());
  return results;
}

}  // namespace opst::graph
