#include "graph/new_node.h"

#include "kv_cache/pages.h"

namespace opst::graph {

namespace {

// What ShapeCheck sees of a tensor that has no memory yet.
ConstTensor declared(DType dtype, const Shape& shape) {
  ConstTensor tensor;
  tensor.dtype = dtype, tensor.rank = std::clamp(shape.rank, 0, kMaxRank);
  for (int i = 0; i < tensor.rank; ++i) tensor.shape[i] = GraphImpl::number_of(shape.dims[i]);
  return tensor;
}

}  // namespace

NewNode::NewNode(GraphImpl& graph, const std::string& node, const char* operator_name)
    : NodeSpec{.name = node, .op = operator_name, .run = {}},
      where_(node + " (" + operator_name + ")"),
      check(where_.c_str(), *this),
      graph_(graph) {}

const char* NewNode::named(const char* role, Value value) {
  if (!graph_.has(value)) return role;
  return names_.emplace_back(opst::text(role, " ", quoted(graph_.at(value).name))).c_str();
}

ShapeCheck::TensorCheck NewNode::input(const char* role, Value value, Counted counted) {
  inputs.push_back(value);
  counted_.push_back(counted);
  const char* const known_as = named(role, value);
  check.require(graph_.has(value), known_as, " is no tensor of this graph");
  if (!check.ok()) return check.tensor(known_as, {});
  const ValueData& data = graph_.at(value);
  const bool packed = data.kind == Kind::weight;
  check.require(packed == (counted == Counted::packed || counted == Counted::not_all_packed), known_as,
                packed ? " is a packed weight, expected a tensor" : " is a tensor, expected a packed weight");
  return check.tensor(known_as, declared(data.dtype, data.shape));
}

ShapeCheck::TensorCheck NewNode::rows(const char* role, Value value, const char* last) {
  ShapeCheck::TensorCheck of_rows = input(role, value);
  if (!check.ok()) return of_rows;
  if (rank_ == 0) rank_ = graph_.at(value).shape.rank;
  check.require(rank_ > 0, named(role, value), " has no dimension ", last);
  return check.ok() ? of_rows.leading_dims(rank_ - 1, last) : of_rows;
}

void NewNode::pages(PageLayout layout, Value key_cache, Value value_cache, bool written) {
  const auto side = [&](PageSide key_or_value, const char* role, Value cache) {
    input(role, cache, Counted::not_all);
    const char* const known_as = named(role, cache);
    if (!check.ok()) return std::pair(known_as, ConstTensor());
    const ValueData& data = graph_.at(cache);
    check.require(!written || data.kind == Kind::cache, known_as, " is written, but is no cache");
    ConstTensor tensor = declared(data.dtype, data.shape);
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
  return check.tensor("the result", declared(dtype, shape));
}

std::array<Value, 2> NewNode::add() && {
  std::array<Value, 2> results;
  if (!check.ok()) return graph_.fail(check.status().message()), results;
  cost = [counted = std::move(counted_), also = std::move(also_costs)](const NodeTensors& t) {
    NodeCost total = GraphImpl::count_bytes(t, counted.data());
    if (also) total += also(t);
    return total;
  };
  const std::vector<Value> all = graph_.add_node(std::move(*this));
  std::copy(all.begin(), all.end(), results.begin());
  return results;
}

}  // namespace opst::graph
