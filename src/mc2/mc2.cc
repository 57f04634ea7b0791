// The public functions: each checks its call, plans it, runs it. A call that fails in any way ends the communicator.
#include "opst/mc2.h"

#include <algorithm>

#include "core/guarded.h"
#include "matmul/call.h"
#include "mc2/call.h"

namespace opst {

using namespace mc2;

namespace {

constexpr std::initializer_list<DType> kX = {DType::f32, DType::bf16, DType::f16, DType::i8};

bool sums(Mc2Operator op) { return op == Mc2Operator::matmul_reduce_scatter || op == Mc2Operator::matmul_all_reduce; }

// As many weights as the operator takes, each packed.
void check_weights(ShapeCheck& check, const Call& call) {
  const bool ints = call.weight.kind() == MatmulWeight::integers;
  const int64_t expected = call.op == Mc2Operator::matmul_all_to_all ? call.ranks() : 1;
  check.require(call.weight.kind() != MatmulWeight::unpacked, "the weight is not packed");
  if (!check.ok()) return;
  const size_t count = ints ? call.weight.integers().size() : call.weight.packed().size();
  check.require(static_cast<int64_t>(count) == expected, "the weight has ", count, " matrices, but must have ",
                expected, expected == 1 ? "" : ", one for each rank");
}

// The product of no rows that the tiles are like: dtypes, n and k. Its own check, since the check of a call has room for
// so many tensors.
Status check_product(const Call& call, int64_t index, const ConstTensor& bias, int64_t k, const Tensor& out) {
  return checked("product", [&](ShapeCheck& check) -> Status {
    ConstTensor x = call.x;
    x.shape[0] = 0, x.shape[1] = k, x.data = nullptr;
    Tensor none = out;
    none.shape[0] = 0, none.data = nullptr;
    ConstTensor scales = call.options.x_scales;
    if (scales.rank == 1) scales.shape[0] = 0;
    const MatmulOptions options{.bias = bias, .activations = call.options.activations};
    const gemm::CallTensors tensors{x, none, options, scales};
    const bool ints = call.weight.kind() == MatmulWeight::integers;
    const auto i = static_cast<size_t>(index);
    return (ints ? gemm::check_call(check, call.weight.integers()[i], tensors)
                 : gemm::check_call(check, call.weight.packed()[i], tensors))
        .status();
  });
}

void check_products(ShapeCheck& check, const Call& call) {
  const ConstTensor& bias = call.options.bias;
  if (call.op == Mc2Operator::matmul_all_to_all) {
    agree(check, "out dim 1 (n)", call.out.shape[1], "this rank's weight has n =", call.product.n(call.rank()));
    int64_t columns = 0;
    for (int d = 0; d < call.ranks(); ++d) columns += call.product.n(d);
    if (is_given(bias)) agree(check, "bias dim 0 (n)", bias.shape[0], "the weights have in all", columns);
    if (!check.ok()) return;
    Tensor out = call.out;
    for (int64_t d = 0, first = 0; d < call.ranks(); first += call.product.n(d++)) {
      out.shape[1] = call.product.n(d);
      const ConstTensor part = bias ? bias.narrowed(0, first, call.product.n(d)) : bias;
      const Status status = check_product(call, d, part, call.x.shape[1], out);
      check.require(status.ok(), "weight ", d, ": ", status.message());
    }
    return;
  }
  Tensor out = call.out;
  if (sums(call.op)) out.dtype = DType::f32;  // partials
  const int64_t k = call.op == Mc2Operator::all_to_all_matmul ? call.inputs.total() : call.x.shape[1];
  const Status status = check_product(call, 0, bias, k, out);
  check.require(status.ok(), status.message());
}

// Sizes of each rank, and of x and out beside them.
void check_splits(ShapeCheck& check, Call& call) {
  const Mc2Options& o = call.options;
  const int ranks = call.ranks();
  const int64_t m = call.x.shape[0], out_rows = call.out.shape[0];
  const bool own_rows = call.op == Mc2Operator::matmul_all_to_all || call.op == Mc2Operator::all_gather_matmul;
  if (call.op == Mc2Operator::matmul_all_reduce) {
    check.require(o.rows.empty(), "rows are given, but every rank has all rows");
    call.rows = equal_split(1, m);
    agree(check, "out dim 0 (rows)", out_rows, "x has m =", m);
  } else {
    call.rows = split_of(check, "rows", o.rows, ranks, own_rows ? equal_split(ranks, m) : divided(ranks, m));
    if (!check.ok()) return;
    const int64_t mine = call.rows.size(call.rank()), all = call.rows.total();
    agree(check, "x dim 0 (m)", m, own_rows ? "rows has for this rank" : "the ranks' rows are in all",
          own_rows ? mine : all);
    agree(check, "out dim 0 (rows)", out_rows, own_rows ? "the ranks' rows are in all" : "this rank's rows are",
          own_rows ? all : mine);
  }
  check.require(o.inputs.empty() || call.op == Mc2Operator::all_to_all_matmul,
                "inputs are given, but x is not split by columns");
  if (call.op != Mc2Operator::all_to_all_matmul || !check.ok()) return;
  call.inputs = split_of(check, "inputs", o.inputs, ranks, equal_split(ranks, call.x.shape[1]));
  if (!check.ok()) return;
  agree(check, "x dim 1 (k)", call.x.shape[1], "inputs has for this rank", call.inputs.size(call.rank()));
  agree(check, "the inputs of all ranks", call.inputs.total(), "the weight has k =", call.product.k());
}

void check_options(ShapeCheck& check, const Call& call) {
  const Mc2Options& o = call.options;
  const bool gathers = call.op == Mc2Operator::all_gather_matmul || call.op == Mc2Operator::all_to_all_matmul;
  check_tile_rows(check, o.tile_rows);
  check.require(gathers || !is_given(o.exchanged), "exchanged is given, but x is not exchanged");
  check.require(sums(call.op) || !is_given(o.residual), "residual is given, but nothing is summed over ranks");
  check.require(call.op != Mc2Operator::all_to_all_matmul || !is_given(o.x_scales),
                "x_scales is given, but a row comes from several ranks");
  check.require(call.x.dtype == DType::i8 || !is_given(o.x_scales), "x_scales belong to an x of i8, but x is ",
                to_string(call.x.dtype));
}

// What a row of a tile has at most, of what any rank sends another.
int64_t row_bytes_of(const Call& call) {
  const int64_t x_bytes = size_bytes(call.x.dtype), out_bytes = size_bytes(call.out.dtype);
  Size bytes = 0;
  if (call.op == Mc2Operator::matmul_all_to_all) {
    for (int d = 0; d < call.ranks(); ++d) bytes = std::max(bytes, Size(call.product.n(d)) * out_bytes);
  } else if (call.op == Mc2Operator::all_to_all_matmul) {
    bytes = Size(call.inputs.most()) * x_bytes;
  } else if (call.op == Mc2Operator::all_gather_matmul) {
    bytes = Size(call.x.shape[1]) * x_bytes +
            (is_given(call.options.x_scales) ? 8 : 0);  // 8: its own, and up to 4 to align
  } else {
    bytes = Size(call.product.n()) * 4;
  }
  return bytes.value();
}

void check_tensors(ShapeCheck& check, const Call& call) {
  const Mc2Options& o = call.options;
  check.tensor("x", call.x).dtype(kX).dims({"m", "k"});
  if (is_given(o.x_scales)) check.tensor("x_scales", o.x_scales).dtype({DType::f32}).dims({"m"});
  if (is_given(o.bias)) {
    auto bias = check.tensor("bias", o.bias).dims({"bias_n"});
    if (sums(call.op)) bias.dtype({DType::f32, DType::bf16, DType::f16});
  }
  if (is_given(o.residual) && !same_view(o.residual, call.out)) {
    check.tensor("residual", o.residual).dtype({DType::f32, DType::bf16, DType::f16}).dims({"rows", "n"});
  }
  auto out = check.output("out", call.out).dims({"rows", "n"});
  if (sums(call.op)) out.dtype({DType::f32, DType::bf16, DType::f16});
  if (!is_given(o.exchanged)) return;
  check.output("exchanged", o.exchanged).dtype({call.x.dtype}).dims({"rows", "exchanged_k"});
}

Status run(Call& call, ShapeCheck& check) {
  check_weights(check, call);
  check_options(check, call);
  if (check.ok()) check_tensors(check, call);
  if (check.ok()) check_splits(check, call);
  if (check.ok()) check_products(check, call);
  if (check.ok() && is_given(call.options.exchanged)) {
    agree(check, "exchanged dim 1 (k)", call.options.exchanged.shape[1], "the weight has k =", call.product.k());
  }
  if (!check.ok()) return check.status();
  make_strides_normal(call.x);
  make_strides_normal(call.out);
  // Where all rows are summed, each rank sums some of them.
  const bool all = call.op == Mc2Operator::matmul_all_reduce;
  const int64_t op_rows = all ? ceil_div(call.x.shape[0], call.ranks()) : call.rows.most();
  call.plan = plan_tiles(check, call.communicator, call.op, op_rows, row_bytes_of(call), call.options.tile_rows);
  if (!check.ok()) return check.status();
  switch (call.op) {
    case Mc2Operator::matmul_all_to_all:
      return run_matmul_all_to_all(call);
    case Mc2Operator::all_to_all_matmul:
      return run_all_to_all_matmul(call);
    case Mc2Operator::all_gather_matmul:
      return run_all_gather_matmul(call);
    case Mc2Operator::matmul_reduce_scatter:
      return run_matmul_reduce_scatter(call);
    default:
      return run_matmul_all_reduce(call);
  }
}

Status call_operator(Mc2Operator op, Context& context, Communicator& communicator, const ConstTensor& x,
                     const GroupedWeight& weight, const Tensor& out, const Mc2Options& options) {
  return alone(to_string(op), communicator, [&](ShapeCheck& check, Communicator::Impl& own) {
    Call call{.context = context,
              .communicator = own,
              .op = op,
              .x = x,
              .weight = weight,
              .out = out,
              .options = options,
              .product = TileProduct(context, weight, options)};
    return run(call, check);
  });
}

}  // namespace

Status matmul_all_to_all(Context& context, Communicator& communicator, const ConstTensor& x,
                         const GroupedWeight& weights, const Tensor& out, const Mc2Options& options) {
  return call_operator(Mc2Operator::matmul_all_to_all, context, communicator, x, weights, out, options);
}

Status all_to_all_matmul(Context& context, Communicator& communicator, const ConstTensor& x,
                         const GroupedWeight& weight, const Tensor& out, const Mc2Options& options) {
  return call_operator(Mc2Operator::all_to_all_matmul, context, communicator, x, weight, out, options);
}

Status all_gather_matmul(Context& context, Communicator& communicator, const ConstTensor& x,
                         const GroupedWeight& weight, const Tensor& out, const Mc2Options& options) {
  return call_operator(Mc2Operator::all_gather_matmul, context, communicator, x, weight, out, options);
}

Status matmul_reduce_scatter(Context& context, Communicator& communicator, const ConstTensor& x,
                             const GroupedWeight& weight, const Tensor& out, const Mc2Options& options) {
  return call_operator(Mc2Operator::matmul_reduce_scatter, context, communicator, x, weight, out, options);
}

Status matmul_all_reduce(Context& context, Communicator& communicator, const ConstTensor& x,
                         const GroupedWeight& weight, const Tensor& out, const Mc2Options& options) {
  return call_operator(Mc2Operator::matmul_all_reduce, context, communicator, x, weight, out, options);
}

}  // namespace opst
