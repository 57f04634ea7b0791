// What a graph knows of its values: their shapes, their tensors at the sizes of the moment, and whether they fit.
#include "core/shape_check.h"
#include "graph/graph_impl.h"

namespace opst {

namespace {

// Elements of a row behind its first dimension.
int64_t width(const Tensor& rows) {
  int64_t elements = 1;
  for (int i = 1; i < rows.rank; ++i) elements *= rows.shape[i];
  return elements;
}

}  // namespace

std::string GraphImpl::text(const Shape& shape) const {
  return opst::text("[", joined(std::min(shape.rank, kMaxRank), [&](int i) { return text(shape.dims[i]); }), "]");
}

std::string GraphImpl::text(size_t i) const {
  const ValueData& value = values[i];
  const char* const type = value.kind != Kind::weight ? to_string(value.dtype)
                           : value.is_bound           ? to_string(weights[i]->format())
                                                      : "weight";
  return value.name + " " + type + " " + text(value.shape);
}

Value GraphImpl::add_value(std::string value_name, Kind kind, DType dtype, const Shape& shape) {
  const auto refuse = [&](const auto&... why) { return fail(quoted(value_name), why...); };
  if (shape.rank < 0 || shape.rank > kMaxRank) {
    return refuse(" has ", shape.rank, " dimensions, 0 to ", kMaxRank, " are possible");
  }
  if (size_bytes(dtype) == 0) return refuse(" has dtype ", static_cast<int>(dtype), ", which is no DType");
  // The sizes of a tensor without elements are bounded as well: operators multiply some of them.
  Size bytes = size_bytes(dtype);
  for (int i = 0; i < shape.rank; ++i) {
    if (!has(shape.dims[i])) return refuse(" dim ", i, " is a size of another graph");
    const int64_t size = shape.dims[i].bound();
    if (size < 0) return refuse(" dim ", i, " is ", size, ", must be >= 0");
    bytes *= std::max<int64_t>(size, 1);
    if (!bytes.within_limit()) return refuse(" dim ", i, " is ", size, ", too large: more than 2^56 bytes");
  }
  // Views go by their base's name.
  const size_t i = values.size();
  if (kind != Kind::view) {
    if (value_name.empty()) return fail("a tensor needs a name");
    if (!by_name.emplace(value_name, i).second) return fail("two tensors are named ", quoted(value_name));
  }
  tensors.emplace_back();
  weights.push_back(&NodeTensors::kNoWeight);
  values.push_back({.name = std::move(value_name), .kind = kind, .dtype = dtype, .shape = shape, .base = i});
  for (int d = 0; d < shape.rank; ++d) {
    if (has_name(shape.dims[d])) symbol(shape.dims[d]).values.push_back(i);
  }
  ++num_unfit;
  if (kind != Kind::view) refresh(i);
  return value_at(i);
}

void GraphImpl::roll_back(const Counts& before) noexcept {
  const auto forget = [&](std::vector<size_t>& added) {
    while (!added.empty() && added.back() >= before.values) added.pop_back();
  };
  std::erase_if(by_name, [&](const auto& entry) { return entry.second >= before.values; });
  symbols.resize(before.symbols);
  for (Symbol& known : symbols) forget(known.values);
  values.resize(before.values);
  tensors.resize(before.values);
  weights.resize(before.values);
  num_unfit = 0;
  for (ValueData& value : values) {
    forget(value.views);
    num_unfit += value.fits ? 0 : 1;
  }
  nodes.resize(before.nodes);
  steps.resize(before.nodes);
  arguments.resize(before.arguments);
}

void GraphImpl::refresh(size_t index) noexcept {
  ValueData& value = values[index];
  Tensor& t = tensors[index];
  t.dtype = value.dtype;
  t.rank = value.shape.rank;
  for (int i = 0; i < t.rank; ++i) t.shape[i] = size_of(value.shape.dims[i]);
  if (value.kind < Kind::input) make_contiguous(t);
  bool fits = value.is_bound;
  void* data = nullptr;
  if (value.kind == Kind::intermediate) {
    fits = value.offset >= 0;
    if (workspace.data() != nullptr && fits) data = static_cast<char*>(workspace.data()) + value.offset;
  } else if (value.kind == Kind::view) {
    const Tensor& base = tensors[value.base];
    fits = values[value.base].fits && base.is_contiguous();
    data = base.data;
    if (value.of_columns) {
      fits = fits && t.shape[0] <= base.shape[0] && width(t) <= base.shape[1] - value.first_column;
      t.strides[0] = base.strides[0];
      if (fits && data != nullptr) data = static_cast<char*>(data) + value.first_column * size_bytes(t.dtype);
    } else {
      fits = fits && t.num_elements() <= base.num_elements();
    }
  } else if (value.kind != Kind::weight) {
    for (int i = 0; i < t.rank; ++i) {
      t.strides[i] = value.bound.strides[i];
      fits = fits && t.shape[i] <= value.bound.shape[i];
    }
    data = t.data = value.bound.data;
    // Asked here, for a node that refuses a tensor comes after others have written theirs.
    fits = fits && is_sound(t) && (value.kind == Kind::input || !may_alias_itself(t));
  }
  t.data = fits ? data : nullptr;
  num_unfit += static_cast<int>(value.fits) - static_cast<int>(fits);
  value.fits = fits;
  for (const size_t view : value.views) refresh(view);
}

std::string GraphImpl::unfit_reason(size_t index) const {
  const ValueData& value = values[index];
  const Tensor& tensor = tensors[index];
  const std::string what = (value.kind == Kind::weight ? "weight " : "tensor ") + quoted(value.name);
  if (value.kind == Kind::intermediate) return what + " is in no workspace";
  if (value.kind == Kind::view) {
    const Tensor& base = tensors[value.base];
    if (!values[value.base].fits) return unfit_reason(value.base);
    if (!base.is_contiguous()) return what + " is viewed in another shape, but is not contiguous";
    if (value.of_columns) {
      return opst::text(what, " has ", base.shape[0], " rows of ", base.shape[1], " columns, but its columns ",
                        text(value.shape), " are ", tensor.shape[0], " rows of ", value.first_column, " to ",
                        value.first_column + width(tensor));
    }
    return opst::text(what, " has ", base.num_elements(), " elements, but its view ", text(value.shape), " has ",
                      tensor.num_elements());
  }
  if (!value.is_bound) return what + " is not bound";
  for (int i = 0; i < tensor.rank; ++i) {
    if (const int64_t room = value.bound.shape[i]; tensor.shape[i] > room) {
      return opst::text(what, " dim ", i, " is ", room, ", but ", text(value.shape.dims[i]), " is ", tensor.shape[i]);
    }
  }
  ShapeCheck check("a bound tensor");
  Tensor bound = tensor;
  bound.data = value.bound.data;
  value.kind == Kind::input ? check.tensor(what.c_str(), bound) : check.output(what.c_str(), bound);
  return check.status().message();
}

}  // namespace opst
