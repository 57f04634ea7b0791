// Splits, the product of a tile, signatures, division of weights over ranks.
#include "mc2/call.h"

#include <vector>

#include "core/guarded.h"
#include "quant/matrices.h"

namespace opst {

namespace mc2 {

void Split::add(int64_t size) {
  const auto i = static_cast<size_t>(parts++);
  sizes[i] = size;
  offsets[i + 1] = (Size(offsets[i]) + size).value();
}

Split given_split(std::span<const int64_t> sizes) {
  Split split;
  for (const int64_t size : sizes) split.add(size);
  return split;
}

Split equal_split(int parts, int64_t each) {
  Split split;
  for (int i = 0; i < parts; ++i) split.add(each);
  return split;
}

Split divided(int parts, int64_t total) {
  Split split;
  for (int i = 0; i < parts; ++i) split.add(share_of(total, parts, i));
  return split;
}

Split split_of(ShapeCheck& check, const char* what, std::span<const int64_t> given, int ranks, const Split& otherwise) {
  if (given.empty()) return otherwise;
  check.require(given.size() == static_cast<size_t>(ranks), what, " has ", given.size(), " sizes, but there are ",
                ranks, " ranks");
  for (size_t i = 0; i < given.size(); ++i) {
    check.require(given[i] >= 0 && given[i] < kMaxBytes, what, "[", i, "] is ", given[i],
                  ", but must be from 0 to 2^56");
  }
  return check.ok() ? given_split(given) : otherwise;
}

void agree(ShapeCheck& check, const char* what, int64_t size, const char* why, int64_t expected) {
  check.require(size == expected, what, " is ", size, ", but ", why, " ", expected);
}

void check_tile_rows(ShapeCheck& check, int64_t tile_rows) {
  check.require(tile_rows >= 0 && tile_rows < kMaxBytes, "tile_rows is ", tile_rows, ", but must be from 0 to 2^56");
}

Mc2Plan plan_tiles(ShapeCheck& check, Communicator::Impl& communicator, Mc2Operator op, int64_t rows, int64_t row_bytes,
                   int64_t tile_rows) {
  const int ranks = communicator.transport->world_size();
  const int64_t staging = communicator.options.staging_bytes, slot = staging / (kSlots * ranks);
  const Mc2Plan plan = plan_mc2({.op = op,
                                 .world_size = ranks,
                                 .rows = rows,
                                 .row_bytes = row_bytes,
                                 .slot_bytes = slot,
                                 .tile_rows = tile_rows});
  check.require(plan.tile_rows > 0, "a row of a tile has ", row_bytes,
                " bytes, but a slot of staging_bytes = ", staging, " has ", slot);
  if (check.ok()) communicator.stats.tile_bytes = plan.tile_bytes;
  return plan;
}

int64_t TileProduct::n(int64_t index) const {
  const auto i = static_cast<size_t>(index);
  return weight_.kind() == MatmulWeight::integers ? weight_.integers()[i].n() : weight_.packed()[i].n();
}

int64_t TileProduct::k(int64_t index) const {
  const auto i = static_cast<size_t>(index);
  return weight_.kind() == MatmulWeight::integers ? weight_.integers()[i].k() : weight_.packed()[i].k();
}

const char* TileProduct::format() const {
  if (weight_.kind() != MatmulWeight::integers) return to_string(weight_.packed()[0].format());
  return weight_.integers()[0].bits() == 4 ? "int4" : "int8";
}

// batch_invariant: the bits of a row do not depend on the tile that it lies in.
Status TileProduct::operator()(const ConstTensor& x, const ConstTensor& x_scales, int64_t index,
                               const ConstTensor& bias, const Tensor& out) const {
  const auto i = static_cast<size_t>(index);
  if (weight_.kind() == MatmulWeight::integers) {
    return matmul(context_, x, weight_.integers()[i], out, {.x_scales = x_scales, .bias = bias});
  }
  return matmul(context_, x, weight_.packed()[i], out,
                {.bias = bias, .activations = options_.activations, .batch_invariant = true});
}

void SignatureText::add(std::string_view part) {
  for (const char c : part) {  // FNV-1a: the same in every process
    entry_.signature_hash = (entry_.signature_hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
    if (length_ < kSignatureBytes - 1) entry_.signature[length_++] = c;
  }
}
void SignatureText::add(const Split& split) {
  add("[");
  for (int i = 0; i < split.parts; ++i) write(i == 0 ? "" : ", ", split.size(i));
  add("]");
}

namespace {

void write_signature(const Call& call, SignatureText& text) {
  const Mc2Options& o = call.options;
  text.write(call.name(), "(x ", to_string(call.x.dtype), ", rows ", call.rows);
  const bool sums = call.op == Mc2Operator::matmul_reduce_scatter || call.op == Mc2Operator::matmul_all_reduce;
  if (!sums) text.write(", k ", call.product.k());
  if (call.inputs.parts > 0) text.write(" = ", call.inputs);
  text.write(", weight ", call.product.format(), ", n ");
  if (call.op == Mc2Operator::matmul_all_to_all) {
    Split columns;
    for (int d = 0; d < call.ranks(); ++d) columns.add(call.product.n(d));
    text.add(columns);
  } else {
    text.add(call.product.n());
  }
  text.write(", out ", to_string(call.out.dtype), is_given(o.bias) ? ", bias" : "",
             is_given(o.x_scales) ? ", x_scales" : "", is_given(o.residual) ? ", residual" : "",
             o.activations == ActivationType::int8 ? ", int8 activations" : "", ", tile ", call.plan.tile_rows,
             " rows)");
}

}  // namespace

Entry make_entry(const Call& call, bool shares_out) {
  Entry entry;
  SignatureText text(entry);
  write_signature(call, text);
  if (shares_out) share_out(entry, call.communicator, call.out, call.out.strides[0], call.out.strides[1]);
  return entry;
}

void share_out(Entry& entry, const Communicator::Impl& communicator, const Tensor& out, int64_t row_stride,
               int64_t column_stride) {
  if (!communicator.options.direct_stores) return;
  entry.out = communicator.transport->address_for_others(out.data);
  entry.row_stride = row_stride;
  entry.column_stride = column_stride;
}

void copy_rows(const ConstTensor& from, const Tensor& to) {
  const int64_t bytes = size_bytes(to.dtype);
  for (int64_t i = 0; i < to.shape[0]; ++i) {
    copy_elements(static_cast<const char*>(from.data) + i * from.strides[0] * bytes, from.strides[1],
                  static_cast<char*>(to.data) + i * to.strides[0] * bytes, to.strides[1], to.shape[1], bytes);
  }
}

namespace {

// part(first, count) of each rank.
template <class Weight, class Part>
Result<std::vector<Weight>> pack_parts(Context& context, int64_t n, int parts, const Part& part) {
  return guarded([&]() -> Result<std::vector<Weight>> {
    if (parts < 1 || parts > kMaxRanks) {
      return Status::invalid_argument(text("pack_columns: parts is ", parts, ", but must be from 1 to ", kMaxRanks));
    }
    std::vector<Weight> weights;
    int64_t first = 0;
    for (int i = 0; i < parts; ++i) {
      const int64_t count = share_of(n, parts, i);
      Result<Weight> packed = Weight::pack(context, part(first, count));
      if (!packed.ok()) return packed.status();
      weights.push_back(std::move(packed.value()));
      first += count;
    }
    return weights;
  });
}

// The whole, before parts of it are looked at: a part of a tensor with fewer rows lies outside of it.
Status check_whole(const ConstTensor& weight) {
  return checked("pack_columns", [&](ShapeCheck& check) { check.tensor("weight", weight).dims({"n", "k"}); });
}
Status check_whole(const IntMatrix& weight) {
  return checked("pack_columns", [&](ShapeCheck& check) { check_int_matrix(check, weight); });
}

}  // namespace

}  // namespace mc2

Result<std::vector<PackedWeight>> pack_columns(Context& context, const ConstTensor& weight, int parts) {
  Status status = mc2::check_whole(weight);
  if (!status.ok()) return status;
  return mc2::pack_parts<PackedWeight>(context, weight.shape[0], parts,
                                       [&](int64_t first, int64_t count) { return weight.narrowed(0, first, count); });
}

Result<std::vector<PackedWeight>> pack_columns(Context& context, const QuantMatrix& weight, int parts) {
  Status status = checked("pack_columns", [&](ShapeCheck& check) { check_quant_matrix(check, "weight", weight); });
  if (!status.ok()) return status;
  const int64_t row = row_bytes(weight.format, weight.cols).value();
  return mc2::pack_parts<PackedWeight>(context, weight.rows, parts, [&](int64_t first, int64_t count) {
    const auto* const data = static_cast<const char*>(weight.data) + first * row;
    return QuantMatrix{weight.format, count, weight.cols, data, count * row};
  });
}

Result<std::vector<PackedIntWeight>> pack_columns(Context& context, const IntMatrix& weight, int parts) {
  Status status = mc2::check_whole(weight);
  if (!status.ok()) return status;
  return mc2::pack_parts<PackedIntWeight>(context, weight.q.shape[0], parts, [&](int64_t first, int64_t count) {
    IntMatrix part{weight.q.narrowed(0, first, count), weight.scales.narrowed(0, first, count)};
    if (is_given(weight.zeros)) part.zeros = weight.zeros.narrowed(0, first, count);
    return part;
  });
}

}  // namespace opst
