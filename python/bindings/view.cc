#include "view.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>

namespace opst::python {

namespace {

std::optional<DType> dtype_of(nb::dlpack::dtype type) {
  using Code = nb::dlpack::dtype_code;
  if (type.lanes != 1) return std::nullopt;
  switch (static_cast<Code>(type.code)) {
    case Code::Float:
      if (type.bits == 32) return DType::f32;
      if (type.bits == 64) return DType::f64;
      if (type.bits == 16) return DType::f16;
      break;
    case Code::Bfloat:
      if (type.bits == 16) return DType::bf16;
      break;
    case Code::Int:
      if (type.bits == 8) return DType::i8;
      if (type.bits == 32) return DType::i32;
      if (type.bits == 64) return DType::i64;
      break;
    case Code::UInt:
      if (type.bits == 8) return DType::u8;
      break;
    case Code::Bool:
      if (type.bits == 8) return DType::boolean;
      break;
    default:
      break;
  }
  return std::nullopt;
}

std::string name_of(nb::dlpack::dtype type) {
  using Code = nb::dlpack::dtype_code;
  const char* kind = "elements of an unknown kind, ";
  switch (static_cast<Code>(type.code)) {
    case Code::Float:
      kind = "float";
      break;
    case Code::Int:
      kind = "int";
      break;
    case Code::UInt:
      kind = "uint";
      break;
    case Code::Complex:
      kind = "complex";
      break;
    default:
      break;
  }
  return kind + std::to_string(type.bits);
}

}  // namespace

void raise(PyObject* type, const std::string& message) {
  PyErr_SetString(type, message.c_str());
  throw nb::python_error();
}

void raise_if_failed(const Status& status) {
  // A call that a signal ended: its handler has raised KeyboardInterrupt, or what it likes.
  if (!status.ok() && PyErr_Occurred() != nullptr) throw nb::python_error();
  switch (status.code()) {
    case StatusCode::ok:
      return;
    case StatusCode::invalid_argument:
      raise(PyExc_ValueError, status.message());
    case StatusCode::out_of_memory:
      raise(PyExc_MemoryError, status.message());
    default:
      raise(PyExc_RuntimeError, status.message());
  }
}

std::optional<Tensor> tensor_of_capsule(nb::handle capsule) {
  const auto* source = static_cast<const nb::dlpack::dltensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (source == nullptr) throw nb::python_error();
  const std::optional<DType> type = dtype_of(source->dtype);
  if (!type || source->device.device_type != nb::device::cpu::value || source->ndim > kMaxRank ||
      source->data == nullptr) {
    return std::nullopt;
  }
  Tensor tensor = Tensor::contiguous(*type, {}, static_cast<char*>(source->data) + source->byte_offset);
  if (!tensor.is_aligned()) return std::nullopt;
  tensor.rank = source->ndim;
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.shape[i] = source->shape[i];
    tensor.strides[i] = source->strides != nullptr ? source->strides[i] : stride;
    stride *= tensor.shape[i];
  }
  return tensor;
}

View::View(nb::handle object, const std::optional<std::string>& dtype) {
  // A memoryview has the strides that some exporters (ctypes) leave out of their buffer.
  nb::object with_strides;
  if (PyObject_CheckBuffer(object.ptr()) && !nb::hasattr(object, "__dlpack__")) {
    with_strides = nb::steal(PyMemoryView_FromObject(object.ptr()));
    if (!with_strides.is_valid()) throw nb::python_error();
    object = with_strides;
  }
  // Producers refuse a writable view of read-only memory.
  nb::ndarray<> writable;
  if (nb::try_cast(object, writable, false)) {
    owner_ = nb::ndarray<nb::ro>(writable);
  } else {
    read_only_ = true;
    if (!nb::try_cast(object, owner_, false)) {
      raise(PyExc_TypeError, std::string("an array is needed (NumPy, torch, or another with DLPack or the buffer "
                                         "protocol), not ") +
                                 nb::cast<std::string>(nb::str(object.type())));
    }
  }
  if (owner_.device_type() != nb::device::cpu::value) {
    raise(PyExc_TypeError, "the array is not in the host's memory");
  }
  if (owner_.ndim() > static_cast<size_t>(kMaxRank)) {
    raise(PyExc_ValueError,
          "the array has rank " + std::to_string(owner_.ndim()) + ", must be at most " + std::to_string(kMaxRank));
  }

  std::optional<DType> type = dtype_of(owner_.dtype());
  if (dtype) {
    const auto is_unsigned = [&](int bits) {
      return owner_.dtype().bits == bits && owner_.dtype().code != static_cast<uint8_t>(nb::dlpack::dtype_code::Float);
    };
    if (*dtype == "bf16" && is_unsigned(16)) {
      type = DType::bf16;
    } else if (*dtype == "f16" && is_unsigned(16)) {
      type = DType::f16;
    } else if (*dtype == "bool" && is_unsigned(8)) {
      type = DType::boolean;
    } else if (*dtype == "f8_e4m3" && is_unsigned(8)) {
      type = DType::f8_e4m3;
    } else if (*dtype == "f8_e5m2" && is_unsigned(8)) {
      type = DType::f8_e5m2;
    } else if (!type || *dtype != to_string(*type)) {
      raise(PyExc_ValueError,
            "an array of " + (type ? to_string(*type) : name_of(owner_.dtype())) + " cannot be read as " + *dtype);
    }
  }
  if (!type) {
    raise(PyExc_ValueError, "the dtype " + name_of(owner_.dtype()) +
                                " is not supported (f32, f64, bf16, f16, i8, u8, i32, i64 and bool are)");
  }
  tensor_.dtype = *type;
  tensor_.rank = static_cast<int>(owner_.ndim());
  for (int i = 0; i < tensor_.rank; ++i) {
    tensor_.shape[i] = static_cast<int64_t>(owner_.shape(static_cast<size_t>(i)));
    tensor_.strides[i] = owner_.stride(static_cast<size_t>(i));
  }
  tensor_.data = const_cast<void*>(static_cast<const void*>(owner_.data()));
  if (!tensor_.is_aligned() && tensor_.num_elements() > 0) {
    raise(PyExc_ValueError, "the array lies at an address that is no multiple of its elements' " +
                                std::to_string(size_bytes(*type)) + " bytes; a copy has such an address");
  }
  // Operators take a null pointer for a tensor that is not there; one without elements may have any other.
  alignas(64) static char nothing[64];
  if (tensor_.data == nullptr) {
    if (tensor_.num_elements() > 0) raise(PyExc_ValueError, "the array has no memory");
    tensor_.data = nothing;
  }
}

Tensor View::output(const char* name) const {
  if (read_only_) raise(PyExc_ValueError, std::string(name) + " is read-only");
  return tensor_;
}

int View::checked_dim(int dim) const {
  if (dim < 0 || dim >= tensor_.rank) {
    raise(PyExc_ValueError,
          "a tensor of rank " + std::to_string(tensor_.rank) + " has no dimension " + std::to_string(dim));
  }
  return dim;
}

View View::transposed(int a, int b) const {
  View view = *this;
  view.tensor_ = tensor_.transposed(checked_dim(a), checked_dim(b));
  return view;
}

View View::split(int dim, int64_t n) const {
  checked_dim(dim);
  if (tensor_.rank == kMaxRank || n < 1 || tensor_.shape[dim] % n != 0) {
    raise(PyExc_ValueError, "dimension " + std::to_string(dim) + " of " + to_string(tensor_) + " is not " +
                                std::to_string(n) + " equal parts");
  }
  View view = *this;
  Tensor& t = view.tensor_;
  for (int i = t.rank; i > dim; --i) t.shape[i] = t.shape[i - 1], t.strides[i] = t.strides[i - 1];
  t.rank += 1;
  t.shape[dim] = n;
  t.shape[dim + 1] /= n;
  t.strides[dim] = t.shape[dim + 1] * t.strides[dim + 1];
  return view;
}

View View::unsqueezed() const {
  if (tensor_.rank == kMaxRank) raise(PyExc_ValueError, "rank 5 is the most");
  View view = *this;
  Tensor& t = view.tensor_;
  for (int i = t.rank; i > 0; --i) t.shape[i] = t.shape[i - 1], t.strides[i] = t.strides[i - 1];
  t.rank += 1;
  t.shape[0] = 1;
  t.strides[0] = 0;
  return view;
}

void bind_view(nb::module_& module) {
  const auto sizes = [](const Tensor& t, const int64_t* from) {
    nb::list list;
    for (int i = 0; i < t.rank; ++i) list.append(from[i]);
    return nb::typed<nb::tuple, int64_t, nb::ellipsis>(nb::tuple(list));
  };
  nb::class_<View>(module, "View", "A tensor that lives in Python, as the library sees it; nothing is copied.")
      .def(nb::init<nb::handle, const std::optional<std::string>&>(), nb::arg("array"), nb::arg("dtype") = nb::none())
      .def_prop_ro("dtype", [](const View& v) { return to_string(v.tensor().dtype); })
      .def_prop_ro("shape", [sizes](const View& v) { return sizes(v.tensor(), v.tensor().shape); })
      .def_prop_ro("strides", [sizes](const View& v) { return sizes(v.tensor(), v.tensor().strides); })
      .def_prop_ro("read_only", &View::read_only)
      .def("transposed", &View::transposed, nb::arg("a"), nb::arg("b"))
      .def("split", &View::split, nb::arg("dim"), nb::arg("n"))
      .def("unsqueezed", &View::unsqueezed);
}

}  // namespace opst::python
