// plan_matmul: from a problem and a machine to a path, tasks and memory. Beside each number, the limit that sets it.
#include <algorithm>
#include <string>

#include "core/text.h"
#include "matmul/call.h"

namespace opst {

const char* to_string(MatmulPath path) {
  return name_of(path, {"few_rows", "many_rows", "many_rows_in_place", "activations_fixed", "activations_int8_few_rows",
                        "activations_int8_many_rows", "weights_int_few_rows", "weights_int_many_rows",
                        "weights_int_floats_few_rows", "weights_int_floats_many_rows", "f64"});
}

const char* to_string(MatmulProduct product) { return name_of(product, {"f32", "bf16_dot", "int8_dot", "f64"}); }

namespace gemm {
namespace {

bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16; }

// Why no call may pose such a problem; null where one may.
const char* without_plan(const MatmulProblem& p) {
  for (const int64_t size : {p.m, p.n, p.k, p.groups}) {
    if (size < 0) return "a size is negative";
    if (size > kMaxBytes) return "a size is beyond 2^56";
  }
  if (p.weight > MatmulWeight::integers || p.activation > Activation::swiglu_swapped ||
      p.activations > ActivationType::int8 || block_values(p.format) == 0 || size_bytes(p.x_dtype) == 0) {
    return "an enumerator is unknown";
  }
  if (takes_two_halves(p.activation) && p.n % 2 != 0) return "swiglu needs two halves, but n is odd";
  if (p.weight == MatmulWeight::integers) {
    if (p.bits != 8 && p.bits != 4) return "integers have 8 or 4 bits";
    if (p.groups == 0 || p.k % p.groups != 0) return "k is not whole groups";
    if (p.x_dtype != DType::i8 && !is_float(p.x_dtype)) return "x is neither i8 nor of floats";
    return nullptr;
  }
  if (p.k % block_values(p.format) != 0) return "k is not whole blocks";
  if (p.weight == MatmulWeight::unpacked && block_values(p.format) > 1) return "an unpacked weight has no blocks";
  if (p.x_dtype == DType::f64) return p.weight == MatmulWeight::unpacked ? nullptr : "a packed weight has no f64";
  return is_float(p.x_dtype) ? nullptr : "x is not of floats";
}

// ---- How it is cut

// many_rows: a run of x, 256 x 512 words = 512 KB, sums 128 KB and decoded weights 64 KB stay in a 1 MB L2. Decoding
// costs as much as three rows.
constexpr int64_t kManyRows = 256, kMaxKBlock = 512;
// Columns of a task: x is read once per task. Below a width of kWideEnough fewer columns, or too few tasks would leave
// threads waiting.
constexpr int64_t kManyColumns = 128, kFewerColumns = 64, kWideEnough = 1024;
// Rows of packed x do not lie a multiple of 4 KB apart, or a register tile's rows would share a set of L1.
constexpr int64_t kPadding = 16;  // words
// Rows of x per packing task: columns that lie next to each other are read in runs of so many.
constexpr int64_t kPackRows = 32, kQuantiseRows = 16;
// A piece is the weight's share of a task of few rows. Small products give each worker one piece. Products in blocks read
// ahead within their own piece: where two cores fetch the same lines, the lines wander between the cores. q4_1 of 1536 x
// 576, two threads, microseconds: tasks of 32 KB 22 with reading ahead into the next task, 17 without; one task each 14.
constexpr int64_t kMinPieceBytes = 16 << 10, kMaxPieceBytes = 1 << 20, kMaxLonePieceBytes = 2 << 20;
// Columns of a piece: what the products in blocks and with integers take at once, and the most, so that sums of 8 rows
// are 128 KB.
constexpr int64_t kPieceColumns = 2 * kPanelColumns, kMostPieceColumns = 4096;
// activations_int8_many_rows: unpacking 64 columns costs as much as multiplying them with two or three rows.
constexpr int64_t kInt8Rows = 192, kInt8Columns = 64;
// Values of k unpacked at once: bytes and scales of two vectors of columns stay in L1.
constexpr int64_t kInt8KBlock = 512;
// weights_int_many_rows: the activations of a task's rows, at most kIntTaskRowBytes, stay in about half of a 1 MB L2.
constexpr int64_t kIntTaskRows = 256, kLeastIntTaskRows = 12, kIntTaskRowBytes = 560 << 10, kIntTaskColumns = 64;

// Whole rows of out as f32, before they are quantised: written and read once each, so that they may take all of L2.
// Fewer rows than a register tile's would decode the weight too often.
constexpr int64_t kTileBytes = 1 << 20, kLeastTileRows = 12;
// Of products with a group's rows each, so many tasks for a thread leave it waiting at the end for a quarter of a
// share at most, even where a product is one task.
constexpr int64_t kGroupTasks = 4;

// `size` in the fewest equal shares of at most `most`: the size of one, rounded up to a multiple of `unit`.
int64_t balanced(int64_t size, int64_t most, int64_t unit) {
  return size == 0 ? unit : round_up(ceil_div(size, ceil_div(size, most)), unit);
}

constexpr int64_t float_bytes(Size count) { return (count * static_cast<int64_t>(sizeof(float))).value(); }

// x is packed in `form`: [runs][m][stride] elements, `rows` rows per task.
void pack_as(const MatmulProblem& p, XForm form, int64_t runs, int64_t stride, int64_t rows, Plan& plan) {
  plan.x = form;
  plan.x_stride = stride;
  plan.pack_rows = rows;
  plan.x_bytes = (Size(runs) * p.m * stride * element_bytes(form)).value();
}

using enum MatmulPath;

// Each function decides tasks, the form of x, and the scratch that the kernel decodes into, of a plan that takes all
// rows and all inputs at once; where it decides no columns, they are cut in pieces. It returns the columns that the
// kernel takes at once; rows of sums are multiples.
using Cut = int64_t(const MatmulProblem& p, const Machine& machine, Plan& plan);

// Whole rows of x as words: in place, or packed.
void use_words(const MatmulProblem& p, Plan& plan) {
  plan.run_words = plan.k_block = std::max<int64_t>(1, plan.words);
  const bool floats = p.x_dtype == DType::f32 && packed_inputs(p.format, p.k) == p.k;
  if (floats && (p.unit_stride_x || p.k <= 1) && !p.gathers_rows) return;
  pack_as(p, XForm::words, 1, plan.k_block, kPackRows, plan);
}

int64_t cut_few_rows(const MatmulProblem& p, const Machine& machine, Plan& plan) {
  use_words(p, plan);
  return float_kernels(machine.isa).few_columns;
}

int64_t cut_many_rows(const MatmulProblem& p, const Machine& machine, Plan& plan) {
  const int many_columns = float_kernels(machine.isa).many_columns;
  const int64_t block = std::max<int64_t>(32, block_values(p.format));
  plan.rows_per_task = balanced(p.m, kManyRows, 1);
  plan.columns_per_task = plan.width >= kWideEnough ? kManyColumns : kFewerColumns;
  plan.run_words = plan.k_block = balanced(plan.words, kMaxKBlock / block * block, block);
  pack_as(p, XForm::words, ceil_div(plan.words, plan.k_block), plan.k_block + kPadding, kPackRows, plan);
  plan.decoded_bytes_per_worker = float_bytes(plan.k_block * many_columns);
  return many_columns;
}

// Rows of x in blocks of 32 values; rows of bf16 and f16 are widened first, one by one where they are contiguous.
void use_blocks(const MatmulProblem& p, XForm form, Plan& plan) {
  pack_as(p, form, 1, p.k / kActivationBlock, kQuantiseRows, plan);
  if (p.x_dtype == DType::f32) return;
  const int64_t rows = p.unit_stride_x || p.gathers_rows ? 1 : std::min(p.m, kQuantiseRows);
  plan.widened_bytes_per_worker = float_bytes(Size(rows) * p.k);
}

int64_t cut_few_blocks(const MatmulProblem& p, const Machine&, Plan& plan) {
  use_blocks(p, plan.path == activations_fixed ? XForm::fixed_blocks : XForm::int8_blocks, plan);
  return kPieceColumns;
}

int64_t cut_int8_many_rows(const MatmulProblem& p, const Machine& machine, Plan& plan) {
  const int64_t columns = byte_kernels(machine.isa).many_columns;
  plan.rows_per_task = balanced(p.m, kInt8Rows, 1);
  plan.columns_per_task = kInt8Columns;
  plan.k_block = std::min(kInt8KBlock, std::max<int64_t>(p.k, kActivationBlock));
  use_blocks(p, XForm::int8_blocks, plan);
  const int64_t four_bytes = plan.k_block / 4 + plan.k_block / 16 + plan.k_block / kActivationBlock;
  plan.decoded_bytes_per_worker = float_bytes(four_bytes * columns);
  return columns;
}

int64_t cut_integers(const MatmulProblem& p, const Machine& machine, Plan& plan) {
  const int64_t columns = byte_kernels(machine.isa).many_columns;
  plan.group_bytes = int_group_words(p.k / p.groups, p.bits) * (32 / p.bits);
  const Size stride = Size(round_up((Size(p.groups) * plan.group_bytes).value(), 64)) + 4 * kPadding;
  pack_as(p, XForm::bytes, 1, stride.value(), kQuantiseRows, plan);
  plan.x_sums_bytes = (Size(p.m) * p.groups * int64_t{sizeof(int32_t)}).value();
  if (plan.path == weights_int_few_rows) return kPieceColumns;
  plan.rows_per_task = balanced(p.m, std::clamp(kIntTaskRowBytes / plan.x_stride, kLeastIntTaskRows, kIntTaskRows), 1);
  plan.columns_per_task = kIntTaskColumns;
  plan.k_block = p.groups == 1 ? std::min(p.k, 4 * kIntFours) : p.k / p.groups;
  const int64_t fours = p.groups == 1 ? kIntFours : plan.group_bytes / 4;
  plan.decoded_bytes_per_worker = p.bits == 8 ? 0 : (Size(fours) * columns * 4).value();
  return columns;
}

int64_t cut_int_floats_many_rows(const MatmulProblem& p, const Machine& machine, Plan& plan) {
  const int64_t columns = byte_kernels(machine.isa).many_columns;
  plan.rows_per_task = balanced(p.m, kIntTaskRows, 1);
  plan.columns_per_task = kIntTaskColumns;
  plan.k_block = std::min(p.k / p.groups, kIntDecoded);
  plan.run_words = std::max<int64_t>(1, p.k);
  pack_as(p, XForm::words, 1, p.k + kPadding, kQuantiseRows, plan);
  plan.decoded_bytes_per_worker = float_bytes(kIntDecoded * columns);
  return columns;
}

// ---- Which kernel multiplies

// From three rows on, decoding weights to floats costs less than three planes of bytes.
constexpr int64_t kMaxFixedRows = 2;
// Unpacking the weight costs more than it saves.
constexpr int64_t kMaxInt8FewRows = 4;

struct Choice {
  MatmulPath path;
  MatmulProduct product;
  Product kernel;
  Cut* cut;
  const char* reason;
};

Choice choose_integers(const MatmulProblem& p, const ByteKernels& bytes) {
  const int i = p.bits == 8 ? 0 : 1;
  const bool few = p.m <= kMaxFewRows;
  if (p.x_dtype != DType::i8) {
    if (few) {
      return {weights_int_floats_few_rows, MatmulProduct::f32, bytes.weights_int_floats_few_rows[i], cut_few_rows,
              "floats, up to 8 rows: weights are decoded in registers"};
    }
    return {weights_int_floats_many_rows, MatmulProduct::f32, bytes.weights_int_floats_many_rows[i],
            cut_int_floats_many_rows, "floats, more than 8 rows: weights are decoded once per task"};
  }
  if (few) {
    return {weights_int_few_rows, MatmulProduct::int8_dot, bytes.weights_int_few_rows[i], cut_integers,
            "up to 8 rows: reading the weight is the time"};
  }
  return {weights_int_many_rows, MatmulProduct::int8_dot, bytes.weights_int_many_rows[i], cut_integers,
          "more than 8 rows: multiplying is the time"};
}

// x rounded to int8 in blocks, a quantised weight.
Choice choose_int8_blocks(const MatmulProblem& p, const ByteKernels& bytes) {
  const auto format = static_cast<size_t>(p.format);
  const Product few = bytes.activations_int8_few_rows[format];
  if (p.m <= kMaxInt8FewRows && few != nullptr) {
    return {activations_int8_few_rows, MatmulProduct::int8_dot, few, cut_few_blocks,
            "int8 activations, up to 4 rows: unpacking the weight would cost more than it saves"};
  }
  return {activations_int8_many_rows, MatmulProduct::int8_dot, bytes.activations_int8_many_rows[format],
          cut_int8_many_rows,
          p.m > kMaxInt8FewRows
              ? "int8 activations, more than 4 rows: the weight is unpacked once for all of a task"
              : "int8 activations, up to 4 rows, but the level has no quick product of this format's bytes"};
}

// A packed or unpacked weight of `format`, x of f32, bf16 or f16.
Choice choose_floats(const MatmulProblem& p, const Machine& machine) {
  const FloatKernels& floats = float_kernels(machine.isa);
  const ByteKernels& bytes = byte_kernels(machine.isa);
  const auto format = static_cast<size_t>(p.format);
  const bool quantised = block_values(p.format) > 1;
  if (quantised && p.activations == ActivationType::int8) return choose_int8_blocks(p, bytes);
  const char* reason = "up to 8 rows: reading the weight is the time";
  if (quantised && p.m <= kMaxFixedRows) {
    const Product fixed = bytes.activations_fixed[format];
    if (fixed != nullptr && !p.batch_invariant) {
      return {activations_fixed, MatmulProduct::int8_dot, fixed, cut_few_blocks,
              "1 or 2 rows: reading the weight is the time, and decoding it to floats would take longer"};
    }
    reason =
        p.batch_invariant
            ? "1 or 2 rows with the bits of more rows, as asked for"
            : "1 or 2 rows: reading the weight is the time, and the level has no quick product of this format's bytes";
  }
  const bool dot = p.x_dtype == DType::bf16 && p.format == QuantFormat::bf16 && floats.few_rows_dot != nullptr &&
                   machine.bf16_product == Bf16Product::dot;
  const MatmulProduct product = dot ? MatmulProduct::bf16_dot : MatmulProduct::f32;
  if (p.weight == MatmulWeight::unpacked && p.unit_stride_outputs) {
    const int type = p.format == QuantFormat::f32 ? 0 : p.format == QuantFormat::bf16 ? 1 : 2;
    return {many_rows_in_place, product, dot ? floats.many_rows_dot_in_place : floats.many_rows_in_place[type],
            cut_many_rows, "the weight lies [k, n]: packing would copy what a task can copy"};
  }
  if (p.m <= kMaxFewRows) {
    return {few_rows, product, dot ? floats.few_rows_dot : floats.few_rows[format], cut_few_rows, reason};
  }
  return {many_rows, product, dot ? floats.many_rows_dot : floats.many_rows[format], cut_many_rows,
          "more than 8 rows: multiplying is the time"};
}

Choice choose(const MatmulProblem& p, const Machine& machine) {
  if (p.x_dtype == DType::f64) {
    return {f64, MatmulProduct::f64, nullptr, nullptr, "f64 is for gradient checks: plain loops"};
  }
  return p.weight == MatmulWeight::integers ? choose_integers(p, byte_kernels(machine.isa)) : choose_floats(p, machine);
}

// Columns per task of few rows, a multiple of `unit`.
int64_t columns_per_piece(const Plan& plan, int64_t unit, int num_threads) {
  const int64_t bytes = std::max<int64_t>(1, (Size(plan.two_halves ? 2 : 1) * plan.column_bytes).value());
  const int64_t units = ceil_div(plan.width, unit), limit = kMostPieceColumns / unit;
  const int64_t least = std::min(ceil_div(kMinPieceBytes / bytes, unit), limit);
  if (units <= least) return units * unit;
  const Size most = Size(num_threads) * (num_threads > 1 ? kMaxPieceBytes : kMaxLonePieceBytes);
  const int64_t rounds = std::max(ceil_div((Size(plan.width) * bytes).value(), most.value()),
                                  ceil_div(units, (Size(num_threads) * limit).value()));
  // The fewest rounds, or up to three more where the busiest thread then has fewer columns.
  int64_t best = 0, fewest = INT64_MAX;
  for (int64_t r = rounds; r < rounds + (num_threads > 1 ? 4 : 1); ++r) {
    const int64_t share = std::max(ceil_div(units, (Size(r) * num_threads).value()), least);
    const Size busiest = Size(ceil_div(ceil_div(units, share), num_threads)) * share;
    if (busiest < fewest) best = share, fewest = busiest.value();
  }
  return best * unit;
}

// Rows that are quantised: a task has whole ones where that leaves a task for each thread, and enough rows for one.
void use_whole_rows(Plan& plan, int num_threads) {
  const int64_t most = kTileBytes / float_bytes(plan.width);
  const int64_t share = std::max(ceil_div(plan.m, num_threads), kLeastTileRows);
  const int64_t rows = balanced(plan.m, std::max<int64_t>(1, std::min({plan.rows_per_task, most, share})), 1);
  if (most < std::min(plan.m, kLeastTileRows) || ceil_div(plan.m, rows) < num_threads) {
    plan.wide_out_bytes = float_bytes(Size(plan.m) * plan.width);
    return;
  }
  plan.whole_rows = true;
  plan.rows_per_task = rows;
  plan.columns_per_task = plan.width;
  plan.tile_bytes_per_worker = float_bytes(Size(rows) * plan.width);
}

// The bytes that such pieces of an Arena use up.
int64_t sum_of(std::initializer_list<int64_t> pieces) {
  Size sum = 0;
  for (const int64_t piece : pieces) sum += Arena::round_up(piece);
  return sum.value();
}

}  // namespace

bool takes_two_halves(Activation activation) {
  return activation == Activation::swiglu || activation == Activation::swiglu_swapped;
}

Plan make_plan(const MatmulProblem& p, const Machine& machine, int num_threads) {
  Plan plan;
  plan.reason = without_plan(p);
  if (plan.reason != nullptr) return plan;
  const auto [path, product, kernel, cut, reason] = choose(p, machine);
  plan.path = path, plan.product = product, plan.kernel = kernel, plan.reason = reason;
  plan.two_halves = takes_two_halves(p.activation);
  plan.m = p.m;
  plan.width = plan.two_halves ? p.n / 2 : p.n;
  if (plan.m == 0 || plan.width == 0) {
    plan.reason = "no outputs";
    return plan;
  }
  plan.rows_per_task = p.m;
  const bool in_place = path == many_rows_in_place;
  plan.words = product == MatmulProduct::bf16_dot ? ceil_div(p.k, 2) : in_place ? p.k : packed_inputs(p.format, p.k);
  plan.k_block = p.k;
  plan.column_bytes = p.weight == MatmulWeight::integers
                          ? (Size(4) * int_group_words(p.k / p.groups, p.bits) * p.groups).value()
                      : in_place ? block_bytes(p.format)
                                 : packed_column_bytes(p.format, p.k);
  const int64_t unit = cut == nullptr ? 1 : cut(p, machine, plan);
  if (plan.path == f64) plan.rows_per_task = 1, plan.columns_per_task = plan.width;
  num_threads = std::max(1, num_threads);
  if (plan.columns_per_task == 0) plan.columns_per_task = columns_per_piece(plan, unit, num_threads);
  plan.chunk_columns = plan.columns_per_task;
  if (p.has_out_scales) use_whole_rows(plan, num_threads);
  plan.row_tasks = ceil_div(plan.m, plan.rows_per_task);
  plan.column_tasks = ceil_div(plan.width, plan.columns_per_task);
  if (plan.path == f64) return plan;

  plan.columns_at_once = unit;
  plan.sums_stride = round_up(plan.chunk_columns, unit);
  plan.sums_bytes_per_worker = float_bytes(Size(plan.rows_per_task) * plan.sums_stride);
  if (plan.two_halves) {
    // The second half begins anywhere in a panel.
    plan.second_stride = round_up(plan.chunk_columns + kPanelColumns - 1, unit);
    plan.second_bytes_per_worker = float_bytes(Size(plan.rows_per_task) * plan.second_stride);
  }
  if (p.weight == MatmulWeight::unpacked && !in_place) plan.weight_bytes = packed_bytes(p.format, p.n, p.k).value();
  if (p.has_bias) plan.bias_bytes = float_bytes(round_up(p.n, kPanelColumns));
  if (p.has_x_scales) plan.x_scales_bytes = float_bytes(p.m);
  plan.scratch_bytes_shared = sum_of(
      {plan.weight_bytes, plan.wide_out_bytes, plan.bias_bytes, plan.x_scales_bytes, plan.x_bytes, plan.x_sums_bytes});
  plan.scratch_bytes_per_worker =
      sum_of({plan.decoded_bytes_per_worker, plan.sums_bytes_per_worker, plan.second_bytes_per_worker,
              plan.widened_bytes_per_worker, plan.tile_bytes_per_worker});
  return plan;
}

int threads_per_group(int64_t groups, int num_threads) {
  const int64_t tasks = (Size(kGroupTasks) * num_threads).value();
  return static_cast<int>(std::min<int64_t>(num_threads, ceil_div(tasks, std::max<int64_t>(1, groups))));
}

int64_t packed_inputs(QuantFormat format, int64_t k) { return format == QuantFormat::bf16 ? round_up(k, 2) : k; }

int64_t packed_column_bytes(QuantFormat format, int64_t k) {
  return (Size(packed_inputs(format, k) / block_values(format)) * block_bytes(format)).value();
}

Size packed_bytes(QuantFormat format, int64_t n, int64_t k) {
  return Size(packed_column_bytes(format, k)) * round_up(n, kPanelColumns);
}

}  // namespace gemm

int64_t MatmulPlan::num_tasks() const { return (Size(row_tasks) * column_tasks).value(); }

int64_t MatmulPlan::scratch_bytes(int num_threads) const {
  return (Size(scratch_bytes_per_worker) * num_threads + scratch_bytes_shared).value();
}

MatmulPlan plan_matmul(const MatmulProblem& problem, const Machine& machine, int num_threads) {
  return gemm::make_plan(problem, machine, num_threads);
}

std::string to_string(const MatmulPlan& plan) {
  return text(to_string(plan.path), " ", to_string(plan.product), ", tasks of ", plan.rows_per_task, " x ",
              plan.columns_per_task, ", k block ", plan.k_block, ", ", plan.num_tasks(), " tasks, scratch ",
              plan.scratch_bytes_shared, " + ", plan.scratch_bytes_per_worker, " bytes per thread");
}

}  // namespace opst
