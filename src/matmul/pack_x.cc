// Packing: rows of x in the form that the plan's kernel multiplies.
#include <algorithm>
#include <cstring>

#include "matmul/call.h"

namespace opst::gemm {

WorkerScratch::WorkerScratch(const Plan& plan, char* memory) {
  Arena own(memory, plan.scratch_bytes_per_worker);
  const auto floats = [&](int64_t bytes) { return reinterpret_cast<float*>(own.take<char>(bytes)); };
  decoded = own.take<char>(plan.decoded_bytes_per_worker);
  sums = floats(plan.sums_bytes_per_worker);
  second = floats(plan.second_bytes_per_worker);
  widened = floats(plan.widened_bytes_per_worker);
  tile = floats(plan.tile_bytes_per_worker);
}

namespace {

// Words [k0, k0 + words) of at most kMostRows rows of bf16 pairs -> [rows][out_stride]; elements from k on are 0.
constexpr int64_t kMostRows = 32;
void pack_pairs(const ConstTensor& x, int64_t row, int64_t rows, int64_t k0, int64_t words, uint32_t* out,
                int64_t out_stride) {
  const int64_t k = x.shape[1], stride = x.strides[1], row_stride = x.strides[0];
  const bf16* const first = static_cast<const bf16*>(x.data) + row * row_stride;
  const int64_t whole = std::min(words, k / 2 - k0);
  if (stride == 1) {
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(out + i * out_stride, first + i * row_stride + 2 * k0, static_cast<size_t>(whole) * sizeof(uint32_t));
    }
  } else {
    // Down the columns, which may be contiguous, into a square that stays in L1.
    constexpr int64_t kWords = 16;
    uint32_t square[kWords][kMostRows];
    for (int64_t w0 = 0; w0 < whole; w0 += kWords) {
      const int64_t count = std::min(kWords, whole - w0);
      for (int64_t w = 0; w < count; ++w) {
        const bf16* const low = first + 2 * (k0 + w0 + w) * stride;
        const bf16* const high = low + stride;
        if (row_stride == 1) {
          for (int64_t i = 0; i < rows; ++i) square[w][i] = low[i].bits | static_cast<uint32_t>(high[i].bits) << 16;
          continue;
        }
        for (int64_t i = 0; i < rows; ++i) {
          square[w][i] = low[i * row_stride].bits | static_cast<uint32_t>(high[i * row_stride].bits) << 16;
        }
      }
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t w = 0; w < count; ++w) out[i * out_stride + w0 + w] = square[w][i];
      }
    }
  }
  for (int64_t i = 0; whole < words && i < rows; ++i) {
    out[i * out_stride + whole] = first[i * row_stride + (k - 1) * stride].bits;
  }
}

// What the tasks that pack rows of x share.
struct Packing {
  const Plan& plan;
  const ConstTensor& x;
  const int64_t* row_of_x;
  const IntWeightPart& ints;
  const FloatKernels& floats;
  const ByteKernels& bytes;

  int64_t source(int64_t i) const { return row_of_x == nullptr ? i : row_of_x[i]; }
  const char* row(int64_t i, int64_t t = 0) const {
    i = source(i);
    return static_cast<const char*>(x.data) + (i * x.strides[0] + t * x.strides[1]) * size_bytes(x.dtype);
  }
  void widen(int64_t first, int64_t rows, int64_t k0, int64_t count, float* out, int64_t out_stride) const {
    floats.widen_rows[float_index(x.dtype)](row(first, k0), x.strides[0], x.strides[1], rows, count, out, out_stride);
  }
  // Rows that are read together: one where a row is contiguous, so that it is read as one stream, or lies anywhere.
  int64_t at_once(int64_t rows) const { return x.strides[1] == 1 || row_of_x != nullptr ? 1 : rows; }

  // -> [runs of k][m][x_stride].
  void words(int64_t begin, int64_t end, float* out) const {
    const int64_t k = x.shape[1], step = at_once(end - begin);
    for (int64_t i = begin; i < end; i += step) {
      for (int64_t k0 = 0; k0 < plan.words; k0 += plan.run_words) {
        const int64_t count = std::min(plan.run_words, plan.words - k0);
        float* const to = out + (k0 / plan.run_words * plan.m + i) * plan.x_stride;
        if (plan.product == MatmulProduct::bf16_dot) {
          pack_pairs(x, source(i), step, k0, count, reinterpret_cast<uint32_t*>(to), plan.x_stride);
          continue;
        }
        widen(i, step, k0, std::min(count, k - k0), to, plan.x_stride);
        if (k0 + count > k) {
          for (int64_t j = 0; j < step; ++j) to[j * plan.x_stride + count - 1] = 0;
        }
      }
    }
  }

  // -> [m][x_stride] by fill(x, stride, k, blocks); false where fill says so.
  template <class Block, class Fill>
  bool blocks(int64_t begin, int64_t end, float* widened, Block* out, const Fill& fill) const {
    const int64_t k = x.shape[1];
    const bool in_place = x.dtype == DType::f32;
    const int64_t step = in_place ? 1 : at_once(end - begin);
    for (int64_t i = begin; i < end; i += step) {
      if (!in_place) widen(i, step, 0, k, widened, k);
      for (int64_t j = 0; j < step; ++j) {
        const float* const from = in_place ? reinterpret_cast<const float*>(row(i)) : widened + j * k;
        if (!fill(from, in_place ? x.strides[1] : 1, k, out + (i + j) * plan.x_stride)) return false;
      }
    }
    return true;
  }

  // Rows [begin, end) in the plan's form. False where the form cannot hold one of them.
  bool rows(int64_t begin, int64_t end, float* widened, void* out, int32_t* sums) const {
    switch (plan.x) {
      case XForm::in_place:
        return true;
      case XForm::words:
        words(begin, end, static_cast<float*>(out));
        return true;
      case XForm::int8_blocks:
        return blocks(begin, end, widened, static_cast<ActivationBlock*>(out),
                      [quantise = bytes.quantise_row](auto... of) {
                        quantise(of...);
                        return true;
                      });
      case XForm::fixed_blocks:
        return blocks(begin, end, widened, static_cast<FixedBlock*>(out), bytes.fix_row);
      case XForm::bytes:
        for (int64_t i = begin; i < end; ++i) {
          bytes.pack_int_row(reinterpret_cast<const int8_t*>(row(i)), x.strides[1], ints, plan.group_bytes,
                             static_cast<int8_t*>(out) + i * plan.x_stride, sums + i * ints.groups);
        }
        return true;
    }
    return false;
  }
};

}  // namespace

void pack_x(Context& context, std::span<SingleProduct> products, Arena& arena, char* scratch, int64_t worker_bytes) {
  const Isa isa = context.machine().isa;
  const FloatKernels& floats = float_kernels(isa);
  const ByteKernels& bytes = byte_kernels(isa);
  int64_t tasks = 0;
  for (SingleProduct& product : products) {
    const Plan& plan = product.plan;
    const ConstTensor& x = product.operands->x;
    product.pack_tasks_before = tasks;
    if (plan.num_tasks() == 0 || plan.x == XForm::in_place) {
      product.x = {static_cast<const char*>(x.data), x.strides[0]};
      continue;
    }
    product.x = {arena.take<char>(plan.x_bytes), plan.x_stride};
    if (plan.x_sums_bytes > 0) product.x.sums = reinterpret_cast<int32_t*>(arena.take<char>(plan.x_sums_bytes));
    tasks += ceil_div(plan.m, plan.pack_rows);
  }
  if (tasks == 0) return;
  context.impl().pool.parallel_for(tasks, [&](int64_t task, int worker) {
    SingleProduct& product = product_of(products, task, &SingleProduct::pack_tasks_before);
    const Plan& plan = product.plan;
    const Operands& operands = *product.operands;
    const Packing packing{plan, operands.x, operands.row_of_x, operands.ints, floats, bytes};
    const int64_t begin = (task - product.pack_tasks_before) * plan.pack_rows;
    const bool held = packing.rows(begin, std::min(plan.m, begin + plan.pack_rows),
                                   WorkerScratch(plan, scratch + worker * worker_bytes).widened,
                                   const_cast<char*>(product.x.data), const_cast<int32_t*>(product.x.sums));
    if (!held) product.held = false;  // only rows in fixed point may not be held, and a product's are one task
  });
}

}  // namespace opst::gemm
