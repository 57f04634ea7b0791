#include "time_model.h"

#include <algorithm>

namespace opst::tools {

namespace {

// A kind of call, and how many times of each unit it takes.
struct Costs {
  const char* kind;
  double matrix, vector, keys, rows, start;
};
constexpr Costs kPackedF32 = {"attention f32", 1, 0.704, 6.91, 0, 1.21e+03};
constexpr Costs kPackedBf16 = {"attention bf16", 0.92, 0.813, 0, 18.5, 573};
constexpr Costs kInPlaceF32 = {"in place f32", 1.43, 0, 1.4, 0, 0};
constexpr Costs kInPlaceBf16 = {"in place bf16", 0, 6.71, 1.07, 0, 1.7e+03};
constexpr Costs kManyRowsF32 = {"many rows f32", 1.02, 0, 0.743, 10.3, 1.42e+03};
constexpr Costs kManyRowsBf16 = {"many rows bf16", 0.983, 0, 1.57, 23.2, 309};
constexpr Costs kFewRowsF32 = {"few rows f32", 0.044, 0, 0.992, 285, 0};
constexpr Costs kFewRowsBf16 = {"few rows bf16", 0.716, 0, 1.04, 0, 0};

TimePrediction priced(const TimeParts& units, const Costs& c) {
  return {c.kind,
          units,
          {units.matrix * c.matrix, units.vector * c.vector, units.keys * c.keys, units.rows * c.rows,
           units.start * c.start}};
}

// Columns of a panel: two vectors of f32.
double panel_of(Isa isa) {
  if (includes(isa, Isa::avx512)) return 32;
  return includes(isa, Isa::avx2) ? 16 : 8;
}

bool known(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; }

}  // namespace

std::optional<TimePrediction> predict_attention(const AttentionProblem& p, double pairs,
                                                const MachineProfile& machine) {
  if (!known(p.query_dtype) || p.kv_dtype != p.query_dtype) return {};
  const AttentionPlan plan = plan_attention(p, machine.machine());
  const bool bf16 = p.query_dtype == DType::bf16, in_place = plan.kv_access == KvAccess::in_place;
  const auto heads = static_cast<double>(p.num_heads), batch = static_cast<double>(p.batch);
  const double dims = static_cast<double>(p.head_dim + p.value_head_dim), element = bf16 ? 2 : 4;
  const double queries = batch * heads * static_cast<double>(p.query_len);
  // Of a causal mask a register tile of rows computes whole panels, up to what its last row sees.
  const double panel = panel_of(machine.isa),
               ragged = pairs < batch * static_cast<double>(p.query_len) * static_cast<double>(p.kv_len);
  const double computed = heads * pairs + (ragged > 0 && !in_place ? queries * panel / 2 : 0);
  const double key_bytes = batch * static_cast<double>(p.num_kv_heads * p.kv_len) * dims * element;
  const double row_bytes = queries * dims * element;
  const double per_byte = machine.seconds_per_byte(key_bytes + row_bytes);
  // In place, bf16 is widened and multiplied as f32.
  const double rate = bf16 && !in_place ? machine.matrix_bf16.value : machine.matrix_f32.value;
  const TimeParts units = {.matrix = 2 * dims * computed / rate,
                           .vector = computed / machine.exponentials.value,
                           .keys = key_bytes * per_byte,
                           .rows = row_bytes * per_byte,
                           .start = machine.start.value};
  if (in_place) return priced(units, bf16 ? kInPlaceBf16 : kInPlaceF32);
  return priced(units, bf16 ? kPackedBf16 : kPackedF32);
}

std::optional<TimePrediction> predict_matmul(const MatmulProblem& p, const MachineProfile& machine,
                                             double working_set) {
  const bool f32 = p.format == QuantFormat::f32, bf16 = p.format == QuantFormat::bf16;
  if (p.weight != MatmulWeight::packed || !(f32 || bf16)) return {};
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const MatmulPlan plan = plan_matmul(p, machine.machine(), static_cast<int>(machine.cores.value));
  const bool few = plan.path == MatmulPath::few_rows;
  const double weight_bytes = n * k * (bf16 ? 2 : 4), row_bytes = m * (k + n) * (bf16 ? 2 : 4);
  if (working_set == 0) working_set = weight_bytes + row_bytes;
  const double rate = plan.product == MatmulProduct::bf16_dot ? machine.matrix_bf16.value : machine.matrix_f32.value;
  const TimeParts units = {.matrix = 2 * m * n * k / rate,
                           .vector = 0,
                           .keys = weight_bytes * machine.seconds_per_byte(working_set),
                           .rows = row_bytes * machine.seconds_per_byte(row_bytes),
                           .start = machine.start.value};
  if (few) return priced(units, bf16 ? kFewRowsBf16 : kFewRowsF32);
  return priced(units, bf16 ? kManyRowsBf16 : kManyRowsF32);
}

void add_to_json(nlohmann::ordered_json& row, const TimePrediction& prediction, double measured_seconds) {
  const TimeParts& units = prediction.units;
  row["predicted_ms"] = prediction.seconds() * 1e3;
  row["predicted_over_measured"] = prediction.seconds() / measured_seconds;
  row["predicted_kind"] = prediction.kind;
  row["predicted_units_ms"] = {{"matrix", units.matrix * 1e3},
                               {"vector", units.vector * 1e3},
                               {"keys", units.keys * 1e3},
                               {"rows", units.rows * 1e3},
                               {"start", units.start * 1e3}};
}

}  // namespace opst::tools
