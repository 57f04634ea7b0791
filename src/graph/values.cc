// What a graph knows of its values: their shapes, their tensors at the sizes of the moment, and whether they fit.
#include <algorithm>
#include <atomic>

#include "core/shape_check.h"
#include "graph/graph_impl.h"

namespace opst {

using graph::make_contiguous;
using graph::quoted;
using graph::str;
using Kind = GraphImpl::Kind;
using ValueData = GraphImpl::ValueData;

namespace {

template <class T>
void cut_to(std::vector<T>& all, size_t count) noexcept {
  while (all.size() > count) all.pop_back();
}

// Elements of a row behind its first dimension.
int64_t width(const Tensor& rows) {
  int64_t elements = 1;
  for (int i = 1; i < rows.rank; ++i) elements *= rows.shape[i];
  return elements;
}

}  // namespace

uint32_t GraphImpl::next_number() {
  static std::atomic<uint32_t> last{0};
  return ++last;
}

std::string GraphImpl::text(const Dim& dim) const {
  const int i = symbol(dim);
  return i < 0 ? str(dim.bound()) : symbols[static_cast<size_t>(i)].name;
}

std::string GraphImpl::text(const Shape& shape) const {
  std::string s = "[";
  for (int i = 0; i < std::min(shape.rank, kMaxRank); ++i) s += (i > 0 ? ", " : "") + text(shape.dims[i]);
  return s + "]";
}

std::string GraphImpl::text(int i) const {
  const ValueData& value = values[static_cast<size_t>(i)];
  if (value.kind == Kind::weight) {
    const char* const format = value.is_bound ? to_string(weights[static_cast<size_t>(i)]->format()) : "weight";
    return value.name + " " + format + " " + text(value.shape);
  }
  return value.name + " " + to_string(value.dtype) + " " + text(value.shape);
}

bool GraphImpl::check_shape(const std::string& value_name, DType dtype, const Shape& shape) {
  const auto refuse = [&](const std::string& message) { return fail(quoted(value_name) + message), false; };
  if (shape.rank < 0 || shape.rank > kMaxRank) {
    return refuse(" has " + str(shape.rank) + " dimensions, 0 to " + str(kMaxRank) + " are possible");
  }
  if (size_bytes(dtype) == 0) return refuse(" has dtype " + str(static_cast<int>(dtype)) + ", which is no DType");
  // The sizes of a tensor without elements are bounded as well: operators multiply some of them.
  Size bytes = size_bytes(dtype);
  for (int i = 0; i < shape.rank; ++i) {
    if (!has(shape.dims[i])) return refuse(" dim " + str(i) + " is a size of another graph");
    const int64_t size = shape.dims[i].bound();
    if (size < 0) return refuse(" dim " + str(i) + " is " + str(size) + ", must be >= 0");
    bytes *= std::max<int64_t>(size, 1);
    if (!bytes.within_limit()) {
      return refuse(" dim " + str(i) + " is " + str(size) + ", too large: more than 2^56 bytes");
    }
  }
  return true;
}

int GraphImpl::add_value(std::string value_name, Kind kind, DType dtype, const Shape& shape) {
  ready = false;
  if (!check_shape(value_name, dtype, shape)) return -1;
  // Views go by their base's name.
  const auto i = static_cast<int>(values.size());
  if (kind != Kind::view) {
    if (value_name.empty()) return fail("a tensor needs a name"), -1;
    if (!by_name.emplace(value_name, i).second) return fail("two tensors are named " + quoted(value_name)), -1;
  }
  ValueData& value = values.emplace_back();
  tensors.emplace_back();
  weights.push_back(&NodeTensors::no_weight());
  value.name = std::move(value_name);
  value.kind = kind;
  value.dtype = dtype;
  value.shape = shape;
  for (int d = 0; d < shape.rank; ++d) {
    if (const int s = symbol(shape.dims[d]); s >= 0) {
      std::vector<int>& users = symbols[static_cast<size_t>(s)].values;
      if (users.empty() || users.back() != i) users.push_back(i);
    }
  }
  ++num_unfit;
  if (kind != Kind::view) refresh(i);
  return i;
}

void GraphImpl::roll_back(const Counts& before) noexcept {
  const auto added = [&](int value) { return value >= static_cast<int>(before.values); };
  for (auto entry = by_name.begin(); entry != by_name.end();) {
    entry = added(entry->second) ? by_name.erase(entry) : std::next(entry);
  }
  cut_to(symbols, before.symbols);
  for (Symbol& known : symbols) {
    while (!known.values.empty() && added(known.values.back())) known.values.pop_back();
  }
  cut_to(values, before.values);
  cut_to(tensors, before.values);
  cut_to(weights, before.values);
  num_unfit = 0;
  for (ValueData& value : values) {
    while (!value.views.empty() && added(value.views.back())) value.views.pop_back();
    num_unfit += value.fits ? 0 : 1;
  }
  cut_to(nodes, before.nodes);
  cut_to(steps, before.nodes);
  cut_to(arguments, before.arguments);
}

void GraphImpl::refresh(int index) noexcept {
  ValueData& value = values[static_cast<size_t>(index)];
  Tensor& t = tensors[static_cast<size_t>(index)];
  t.dtype = value.dtype;
  t.rank = value.shape.rank;
  for (int i = 0; i < t.rank; ++i) t.shape[i] = size_of(value.shape.dims[i]);
  bool fits = true;
  void* data = nullptr;
  switch (value.kind) {
    case Kind::weight:
      fits = value.is_bound;
      make_contiguous(t);
      break;
    case Kind::intermediate:
      make_contiguous(t);
      fits = value.offset >= 0;
      if (workspace.data() != nullptr && fits) data = static_cast<char*>(workspace.data()) + value.offset;
      break;
    case Kind::view: {
      const Tensor& base = tensors[static_cast<size_t>(value.base)];
      make_contiguous(t);
      fits = values[static_cast<size_t>(value.base)].fits && base.is_contiguous();
      data = base.data;
      if (value.of_columns) {
        fits = fits && t.shape[0] <= base.shape[0] && width(t) <= base.shape[1] - value.first_column;
        t.strides[0] = base.strides[0];
        if (fits && data != nullptr) data = static_cast<char*>(data) + value.first_column * size_bytes(t.dtype);
      } else {
        fits = fits && t.num_elements() <= base.num_elements();
      }
      break;
    }
    case Kind::input:
    case Kind::cache:
    case Kind::output:
      fits = value.is_bound;
      for (int i = 0; i < t.rank; ++i) {
        t.strides[i] = value.bound.strides[i];
        fits = fits && t.shape[i] <= value.bound.shape[i];
      }
      data = value.bound.data;
      t.data = data;
      // Asked here, for a node that refuses a tensor comes after others have written theirs.
      fits = fits && is_sound(t) && (value.kind == Kind::input || !may_alias_itself(t));
      break;
  }
  t.data = fits ? data : nullptr;
  num_unfit += static_cast<int>(value.fits) - static_cast<int>(fits);
  value.fits = fits;
  for (const int view : value.views) refresh(view);
}

std::string GraphImpl::unfit_reason(int index) const {
  const ValueData& value = values[static_cast<size_t>(index)];
  const Tensor& tensor = tensors[static_cast<size_t>(index)];
  const std::string what = "tensor " + quoted(value.name);
  switch (value.kind) {
    case Kind::weight:
      return "weight " + quoted(value.name) + " is not bound";
    case Kind::intermediate:
      return what + " is in no workspace";
    case Kind::view: {
      const Tensor& base = tensors[static_cast<size_t>(value.base)];
      if (!values[static_cast<size_t>(value.base)].fits) return unfit_reason(value.base);
      if (!base.is_contiguous()) return what + " is viewed in another shape, but is not contiguous";
      if (value.of_columns) {
        return what + " has " + str(base.shape[0]) + " rows of " + str(base.shape[1]) + " columns, but its columns " +
               text(value.shape) + " are " + str(tensor.shape[0]) + " rows of " + str(value.first_column) + " to " +
               str(value.first_column + width(tensor));
      }
      return what + " has " + str(base.num_elements()) + " elements, but its view " + text(value.shape) + " has " +
             str(tensor.num_elements());
    }
    default:
      if (!value.is_bound) return what + " is not bound";
      for (int i = 0; i < tensor.rank; ++i) {
        if (tensor.shape[i] > value.bound.shape[i]) {
          return what + " dim " + str(i) + " is " + str(value.bound.shape[i]) + ", but " + text(value.shape.dims[i]) +
                 " is " + str(tensor.shape[i]);
        }
      }
      ShapeCheck check("a bound tensor");
      Tensor bound = tensor;
      bound.data = value.bound.data;
      value.kind == Kind::input ? check.tensor(what.c_str(), bound) : check.output(what.c_str(), bound);
      return check.status().message();
  }
}

int GraphImpl::storage(int value) const {
  while (values[static_cast<size_t>(value)].base >= 0) value = values[static_cast<size_t>(value)].base;
  return value;
}

}  // namespace opst
