// flash_attention_backward: check -> plan -> run.
//
// A task is one tile of the keys of a (batch, KV head) pair, against all blocks of query rows that see the tile. The
// task owns dK and dV of its keys. dQ of a block gathers from the tiles of several tasks, in the order of the tiles: a
// task adds its term when the tiles before have added theirs, and does the other four products without waiting. So the
// sum is the same whoever runs the tasks, nothing is stored twice, and the tiles of a single head keep several threads
// busy, each a block behind the other:
//
//   time ->     tile 0 of a head    block 0   block 1   block 2   block 3
//               tile 1                        block 0   block 1   block 2   block 3
//               tile 2                                  block 0   block 1   block 2   block 3
//
// The wave protocol. All of the call is one parallel loop over waves of heads: pack the query rows of wave 0, tiles of
// wave 0, pack wave 1, tiles of wave 1, ... Its indices are handed out in ascending order, so what an index waits for
// is done or being done. Two buffers of shared memory take turns, each with two counters: `packed` blocks and finished
// `tiles`. A wave packs P = heads_per_wave * blocks blocks and runs T = heads_per_wave * tiles tasks (those of heads
// that the last wave lacks do nothing, but count):
//
//   wave   buffer   each block is packed after           each task runs after
//     0      0      -                                    packed[0] >= P         all of wave 0 is packed
//     1      1      -                                    packed[1] >= P         all of wave 1 is packed
//     2      0      tiles[0] >= T    wave 0 is done      packed[0] >= 2 P       all of wave 2 is packed
//     3      1      tiles[1] >= T    wave 1 is done      packed[1] >= 2 P       all of wave 3 is packed
//     w    w % 2    tiles[w % 2] >= (w / 2) T            packed[w % 2] >= (w / 2 + 1) P
//
//   pack_block   tensors -> buffer: Q and dO as words, statistics, delta, visible keys, rules; dQ = 0, tiles_done = 0
//                ++packed                   hands the block to every task of its head
//   run_tile     tensors -> worker's memory: K and V of the tile, packed; dK = dV = 0
//                for each block of the head, in ascending order, that sees the tile (meet)
//                  grad_tile                dV += P^T dO, dK += dS^T Q; leaves dS in the worker's memory
//                  wait for tiles_done      the tiles before this one have added to dQ of the block
//                  grad_query               dQ += dS K in the buffer; the block's last tile writes grad_query
//                  ++tiles_done             hands dQ to the task of the next tile
//                worker's memory -> tensors: dK, dV as grad_key, grad_value
//                ++tiles                    hands the buffer on, when all T have
//
// The gradient of a bias that repeats (BiasOrder) is added up in the order of the tasks, too, and so are the gradients
// of pages that come more than once in the block table (SharedPages).
#include <atomic>
#include <cmath>
#include <cstring>
#include <new>

#include "attention/backward_check.h"
#include "attention/backward_layout.h"
#include "attention/call_rules.h"
#include "attention/check.h"
#include "attention/counter.h"
#include "attention/fill.h"
#include "attention/kv_blocks.h"
#include "attention/kv_rows.h"
#include "attention/sequences.h"
#include "core/guarded.h"
#include "machine/context_impl.h"
#include "machine/interruption.h"
#include "machine/levels.h"
#include "opst/attention_backward.h"

namespace opst {

OPST_KERNELS_BY_LEVEL(OPST_BF16_LEVELS, attention, BackwardKernelTable, kBackwardTable, backward_table)

namespace attention {

namespace {

const BackwardKernels& backward_kernels_for(Isa isa, AttentionProduct product, DType kv_dtype) {
  if (product == AttentionProduct::f64) return backward_table(Isa::generic).f64_product;
  const BackwardKernelTable& table = backward_table(isa);
  if (product == AttentionProduct::bf16_dot) return table.bf16_dot;
  return table.f32_product[float_index(kv_dtype)];
}

// Who adds to an element of the bias's gradient, and so what keeps the order of the additions.
//
// Bias turns. Tasks are numbered as they are handed out: tile 0 of each head of a wave, tile 1 of each head, ... With
// by_block, turns_[i] is the number of the task that may add next to what block i of any head adds to. A task takes the
// turn of every block, in ascending order, also where the block does not see its tile, and sets turns_[i] to its own
// number + 1. Three blocks; + is the addition, whose dS was multiplied before without waiting:
//
//   time ->       |           |           |           |           |
//   task 0        + block 0   + block 1   + block 2
//   task 1                    + block 0   + block 1   + block 2
//   task 2                                + block 0   + block 1   + block 2
//   turns_[0]     0           1           2           3           3           3
//   turns_[1]     0           0           1           2           3           3
//   turns_[2]     0           0           0           1           2           3
//
// Every element becomes ((task 0) + task 1) + task 2 ..., whoever runs the tasks. Where block_q is no multiple of the
// group, the last query of a block has heads in the next ones, which add to the same elements: a task that adds from
// block i waits for the turns of these blocks as well, so that task 0 is done with them before task 1 begins.
//
// With by_task there is one turn, turns_[blocks]: a task sums over all its rows in its worker's memory, and then adds.
enum class BiasOrder : uint8_t {
  none,      // not wanted
  by_tile,   // one block of rows: in the order of its tiles, with dQ
  by_block,  // the same rows of several heads: tasks take turns at each block
  by_task,   // all rows: a task sums over its rows, then tasks take turns
};

class BackwardCall {
 public:
  BackwardCall(const AttentionInputs& inputs, const AttentionSaved& saved, const AttentionGradients& gradients,
               const AttentionBackwardProblem& problem, const AttentionBackwardPlan& plan, const Machine& machine,
               void* scratch, Interruption& interruption)
      : in_(inputs),
        saved_(saved),
        grads_(gradients),
        p_(problem.forward),
        plan_(plan),
        kernels_(backward_kernels_for(machine.isa, plan.product, p_.kv_dtype)),
        layout_(problem, plan.block_q, plan.block_kv, geometry_of(machine.isa, plan.product)),
        sequences_(inputs, p_),
        rules_(inputs, p_),
        group_(p_.num_heads / p_.num_kv_heads),
        heads_(p_.batch * p_.num_kv_heads),
        interruption_(interruption),
        accumulator_bytes_(geometry_of(machine.isa, plan.product).accumulator_bytes),
        shared_(static_cast<char*>(scratch)) {
    Arena arena(shared_ + layout_.wave_bytes(heads_, plan.heads_per_wave), layout_.call_bytes());
    if (problem.grad_sinks) sink_sums_ = static_cast<double*>(arena.take_bytes(layout_.sink_bytes));
    turns_ = static_cast<std::atomic<int64_t>*>(arena.take_bytes(layout_.turn_bytes));
    if (problem.grad_bias) {
      const Tensor& t = grads_.grad_bias;
      for (int d = 0; d < t.rank; ++d) {
        if (t.shape[d] != 1) bias_strides_[4 - t.rank + d] = t.strides[d];
      }
      const auto repeats = [&](int d, int64_t size) {
        return size > 1 && (d < 4 - t.rank || t.shape[d - 4 + t.rank] == 1);
      };
      // The heads of a query stand in consecutive rows, which may belong to several blocks.
      const bool query_in_blocks = repeats(1, group_) && plan_.block_q % group_ != 0;
      bias_order_ = repeats(2, p_.query_len)                                                 ? BiasOrder::by_task
                    : repeats(0, p_.batch) || repeats(1, p_.num_kv_heads) || query_in_blocks ? BiasOrder::by_block
                                                                                             : BiasOrder::by_tile;
      for (int64_t i = 0; i <= layout_.blocks; ++i) new (&turns_[i]) std::atomic<int64_t>(0);
    }
    pages_ = SharedPages(problem, layout_.sizes, accumulator_bytes_, arena.take_bytes(layout_.page_bytes));
    if (pages_.count() > 0) SharedPages::number(in_, p_, problem.num_blocks, pages_.ordinals());
    num_blocks_ = problem.num_blocks;
  }

  void run(ThreadPool& pool) {
    if (bias_order_ != BiasOrder::none) fill(grads_.grad_bias, 0, pool);
    if (p_.paged) fill(grads_.grad_key, 0, pool), fill(grads_.grad_value, 0, pool);
    pool.parallel_for(pages_.count(), [&](int64_t ordinal, int) { pages_.clear(ordinal); });
    const int64_t wave_heads = plan_.heads_per_wave, blocks = layout_.blocks, tiles = layout_.tiles;
    const int64_t packs = wave_heads * blocks, tasks = wave_heads * tiles;
    const int64_t waves = ceil_div(heads_, wave_heads);
    pool.parallel_for(waves * (packs + tasks), [&](int64_t index, int worker) {
      const int64_t wave = index / (packs + tasks), in_wave = index % (packs + tasks);
      Progress& progress = progress_[wave % 2];
      const int64_t turn = wave / 2;  // of the wave's buffer
      if (in_wave < packs) {
        const int64_t head = wave * wave_heads + in_wave / blocks;
        progress.tiles.wait_for(turn * tasks);
        if (head < heads_) pack_block(head, in_wave % blocks, worker);
        progress.packed.add_one();
      } else {
        // Tasks of different heads come next to each other: they do not wait for one another. Of causal masks the first
        // tiles, which most rows see, come first.
        const int64_t task = in_wave - packs, head = wave * wave_heads + task % wave_heads;
        progress.packed.wait_for((turn + 1) * packs);
        const int64_t number = wave * tasks + task;
        if (head < heads_ && interruption_.requested(worker)) {
          pass_tile(head, task / wave_heads, number);
        } else if (head < heads_) {
          run_tile(head, task / wave_heads, number, worker);
        } else {
          pass_turns(number);
        }
        progress.tiles.add_one();
      }
    });
    if (interruption_.happened()) return;
    if (grads_.grad_sinks.data != nullptr) add_up_sinks();
    if (pages_.count() == 0) return;
    pool.parallel_for(num_blocks_, [&](int64_t block, int) {
      if (pages_.ordinal(block) >= 0) finish_shared_page(block);
    });
  }

 private:
  struct Worker {
    void* keys;
    void* values;
    void* key_columns;
    void* grad_key;
    void* grad_value;
    void* probability_columns;
    void* grad_score_columns;
    void* grad_scores;
    void* raw;
    void* cap_slopes;
    void* bias_grads;
    char* bias_sums;
    const void** key_rows;
    const void** value_rows;
    const void** query_rows;
    int64_t* visible_begin;
    int64_t* visible_end;
    void* max;
    void* sum;
  };
  Worker worker(int index) const {
    Arena arena(shared_ + plan_.scratch_bytes_shared + index * plan_.scratch_bytes_per_worker,
                plan_.scratch_bytes_per_worker);
    Worker w;
    w.keys = arena.take_bytes(layout_.key_bytes);
    w.values = arena.take_bytes(layout_.key_value_bytes);
    w.key_columns = arena.take_bytes(layout_.key_column_bytes);
    w.grad_key = arena.take_bytes(layout_.grad_key_bytes);
    w.grad_value = arena.take_bytes(layout_.grad_value_bytes);
    w.probability_columns = arena.take_bytes(layout_.scores_bytes);
    w.grad_score_columns = arena.take_bytes(layout_.scores_bytes);
    w.grad_scores = layout_.score_row_bytes > 0 ? arena.take_bytes(layout_.score_row_bytes) : w.grad_score_columns;
    w.raw = arena.take_bytes(layout_.raw_bytes);
    w.cap_slopes = arena.take_bytes(layout_.cap_bytes);
    w.bias_grads = bias_order_ != BiasOrder::none ? arena.take_bytes(layout_.bias_bytes) : nullptr;
    w.bias_sums = static_cast<char*>(arena.take_bytes(layout_.bias_sum_bytes));
    w.key_rows = arena.take<const void*>(plan_.block_kv);
    w.value_rows = arena.take<const void*>(plan_.block_kv);
    w.query_rows = arena.take<const void*>(plan_.block_q);
    w.visible_begin = arena.take<int64_t>(plan_.block_q);
    w.visible_end = arena.take<int64_t>(plan_.block_q);
    w.max = arena.take_bytes(layout_.statistic_bytes);
    w.sum = arena.take_bytes(layout_.statistic_bytes);
    return w;
  }

  struct Block {
    QueryRows queries;
    int64_t first_row;
    BlockState* state;
    RowRules* row_rules;
    void** bias_targets;
  };
  Block block_of(int64_t head, int64_t block) const {
    char* base = shared_ + head % (2 * plan_.heads_per_wave) * layout_.head_bytes + block * layout_.block_bytes;
    Arena arena(base, layout_.block_bytes);
    Block b;
    b.first_row = block * plan_.block_q;
    b.state = arena.take<BlockState>(1);
    b.row_rules = static_cast<RowRules*>(arena.take_bytes(layout_.rule_bytes));
    b.bias_targets = static_cast<void**>(arena.take_bytes(layout_.target_bytes));
    QueryRows& q = b.queries;
    q.rows = std::min(plan_.block_q, rows(head) - b.first_row);
    q.query = arena.take_bytes(layout_.query_bytes);
    q.grad_out = arena.take_bytes(layout_.value_bytes);
    q.query_columns = arena.take_bytes(layout_.query_column_bytes);
    q.grad_out_columns = arena.take_bytes(layout_.value_column_bytes);
    q.origin = arena.take_bytes(layout_.statistic_bytes);
    q.reference = arena.take_bytes(layout_.statistic_bytes);
    q.weight = arena.take_bytes(layout_.statistic_bytes);
    q.delta = arena.take_bytes(layout_.statistic_bytes);
    q.grad_query = arena.take_bytes(layout_.grad_query_bytes);
    q.finite = &b.state->finite;
    q.far = &b.state->far;
    return b;
  }

  int64_t batch(int64_t head) const { return head / p_.num_kv_heads; }
  int64_t rows(int64_t head) const { return sequences_.query_len(batch(head)) * group_; }

  // Rows of a tensor [batch, num_heads, query_len, ...], the head's group stacked.
  StackedRows query_rows(const ConstTensor& t, int64_t head) const {
    if (t.data == nullptr) return {};
    const int64_t b = batch(head), first_head = head % p_.num_kv_heads * group_;
    const int64_t at = b * t.strides[0] + first_head * t.strides[1] + sequences_.query_start(b) * t.strides[2];
    char* data = const_cast<char*>(static_cast<const char*>(t.data)) + at * size_bytes(t.dtype);
    return {data, t.dtype, t.strides[2], t.strides[1], t.strides[3], group_};
  }
  // Rows of a tensor of key's or value's shape.
  KvRows kv_rows(const ConstTensor& t, int64_t head) const {
    return KvRows::of(t, in_, p_, sequences_, batch(head), head % p_.num_kv_heads);
  }
  double number(const void* numbers, int64_t index) const {
    return plan_.product == AttentionProduct::f64 ? static_cast<const double*>(numbers)[index]
                                                  : static_cast<double>(static_cast<const float*>(numbers)[index]);
  }
  void set_number(void* numbers, int64_t index, double x) const {
    if (plan_.product == AttentionProduct::f64)
      static_cast<double*>(numbers)[index] = x;
    else
      static_cast<float*>(numbers)[index] = static_cast<float>(x);
  }
  double statistic(const StackedRows& t, int64_t row) const {
    return number(t.data, row / group_ * t.seq_stride + row % group_ * t.head_stride);
  }

  // The intervals of keys that a block's rows see.
  void find_visible(int64_t head, const Block& b, const Worker& w) const {
    const int64_t s = batch(head);
    const Visibility v =
        Visibility::of(p_.options, sequences_.query_len(s), sequences_.kv_len(s), sequences_.prefix(s));
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      const KeyInterval keys = v.keys_of_query((b.first_row + r) / group_);
      w.visible_begin[r] = keys.begin;
      w.visible_end[r] = keys.end;
    }
  }
  // Empties the intervals of rows of weight 0.
  void hide_absent_rows(const Block& b, const Worker& w) const {
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      if (number(b.queries.weight, r) == 0) w.visible_end[r] = w.visible_begin[r];
    }
  }

  void pack_block(int64_t head, int64_t index, int worker_index) const {
    if (index * plan_.block_q >= rows(head)) {  // a shorter sequence of the batch
      for (int64_t g = 0; g < group_ && sink_sums_ != nullptr; ++g) *sink_sum(head, index, g) = 0;
      return;
    }
    const Worker w = worker(worker_index);
    const Block b = block_of(head, index);
    BlockState& s = *new (b.state) BlockState;
    find_visible(head, b, w);
    PackQueries pack;
    pack.query = query_rows(in_.query, head);
    pack.out = query_rows(saved_.out, head);
    pack.grad_out = query_rows(saved_.grad_out, head);
    pack.lse = query_rows(saved_.softmax_lse, head);
    pack.max = query_rows(saved_.softmax_max, head);
    pack.sum = query_rows(saved_.softmax_sum, head);
    pack.grad_lse = query_rows(saved_.grad_lse, head);
    pack.first_row = b.first_row;
    pack.visible_begin = w.visible_begin;
    pack.visible_end = w.visible_end;
    pack.query_factor = rules_.scale().of_query;
    pack.score_scale = rules_.score_scale();
    pack.exponent_scale = rules_.exponent_scale();
    pack.pointers = w.query_rows;
    kernels_.pack_queries(pack, layout_.sizes, b.queries);

    hide_absent_rows(b, w);
    s.some_begin = p_.kv_len, s.some_end = 0;
    s.all_begin = 0, s.all_end = p_.kv_len;
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      s.all_begin = std::max(s.all_begin, w.visible_begin[r]);
      s.all_end = std::min(s.all_end, w.visible_end[r]);
      if (w.visible_begin[r] >= w.visible_end[r]) continue;
      s.some_begin = std::min(s.some_begin, w.visible_begin[r]);
      s.some_end = std::max(s.some_end, w.visible_end[r]);
    }
    s.has_rules = rules_.any(batch(head));
    if (s.has_rules) {
      s.rules = rules_.of_block(batch(head), head % p_.num_kv_heads, b.first_row, b.queries.rows, b.row_rules);
    }
    // Rows that see a key see the prefix too, which may lie before their intervals.
    if (s.some_begin < s.some_end && s.has_rules && s.rules.prefix > 0) s.some_begin = 0;
    s.tiles_done.store(0, std::memory_order_relaxed);
    if (bias_order_ == BiasOrder::by_tile || bias_order_ == BiasOrder::by_block) {
      for (int64_t r = 0; r < b.queries.rows; ++r) b.bias_targets[r] = bias_row(head, b.first_row + r);
    }
    if (grads_.grad_sinks.data != nullptr) sum_sinks(head, index, b, w, pack);
    if (s.some_begin >= s.some_end)
      finish_query(head, b);
    else if (s.far)
      recompute_statistics(head, index, b, w);
  }

  // The first and the last tile that add to the block, in ascending order; some between may hold no key that it sees.
  int64_t first_tile(const BlockState& s) const { return s.some_begin / plan_.block_kv; }
  int64_t last_tile(const BlockState& s) const { return (s.some_end - 1) / plan_.block_kv; }

  // Tile `index` of a head's keys, not packed yet.
  GradTile tile_of(int64_t head, int64_t index, const Worker& w) const {
    GradTile tile = {};
    tile.first_key = index * plan_.block_kv;
    tile.count = std::clamp<int64_t>(sequences_.kv_len(batch(head)) - tile.first_key, 0, plan_.block_kv);
    tile.keys = w.keys;
    tile.values = w.values;
    tile.key_columns = w.key_columns;
    return tile;
  }

  bool sees_tile(const BlockState& s, int64_t tile_index) const {
    return s.some_begin < s.some_end && first_tile(s) <= tile_index && tile_index <= last_tile(s);
  }

  // Maxima and sums of a block's rows once more.
  void recompute_statistics(int64_t head, int64_t index, const Block& b, const Worker& w) const {
    const BlockState& s = *b.state;
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      double sink = -HUGE_VAL;
      if (in_.sinks.data != nullptr) {
        const int64_t query_head = head % p_.num_kv_heads * group_ + (b.first_row + r) % group_;
        sink = number(in_.sinks.data, query_head * in_.sinks.strides[0]) / rules_.score_scale();
      }
      set_number(w.max, r, sink);
      set_number(w.sum, r, sink == -HUGE_VAL ? 0 : 1);
    }
    for (int64_t i = first_tile(s); i <= last_tile(s); ++i) {
      GradTile tile = tile_of(head, i, w);
      pack_tile(head, w, tile);
      kernels_.add_statistics(block_against(head, index, b, w, tile), tile, w.max, w.sum);
    }
    kernels_.keep_statistics(b.queries, w.max, w.sum);
  }

  void pass_turns(int64_t number) const {
    for (int64_t i = 0; i <= layout_.blocks; ++i) pass_turn(i, number);
    pass_page_turn(number);
  }
  // Runs in place of run_tile once the call is interrupted: tasks that have begun may wait for this one's turns.
  void pass_tile(int64_t head, int64_t tile_index, int64_t number) const {
    for (int64_t i = 0; i < layout_.blocks && i * plan_.block_q < rows(head); ++i) {
      BlockState& s = *block_of(head, i).state;
      if (!sees_tile(s, tile_index)) continue;
      wait_for(s.tiles_done, tile_index - first_tile(s));
      s.tiles_done.store(tile_index - first_tile(s) + 1, std::memory_order_release);
    }
    pass_turns(number);
  }

  void run_tile(int64_t head, int64_t tile_index, int64_t number, int worker_index) const {
    const Worker w = worker(worker_index);
    const int64_t first = tile_index * plan_.block_kv;
    const int64_t keys = std::clamp<int64_t>(key_rows_of(batch(head)) - first, 0, plan_.block_kv);  // of the tensors
    GradTile tile = tile_of(head, tile_index, w);
    tile.grad_key = grads_.grad_key.data != nullptr ? w.grad_key : nullptr;
    tile.grad_value = grads_.grad_value.data != nullptr ? w.grad_value : nullptr;
    const auto clear = [](void* piece, int64_t size) {
      if (piece != nullptr) std::memset(piece, 0, static_cast<size_t>(Arena::writable(size)));
    };
    clear(tile.grad_key, layout_.grad_key_bytes);
    clear(tile.grad_value, layout_.grad_value_bytes);
    clear(w.bias_sums, layout_.bias_sum_bytes);
    if (tile.count > 0) pack_tile(head, w, tile);
    for (int64_t i = 0; i < layout_.blocks; ++i) {
      if (tile.count > 0 && i * plan_.block_q < rows(head)) meet(head, i, w, tile, number);
      pass_turn(i, number);
    }
    if (bias_order_ == BiasOrder::by_task) add_bias_sums(head, w, tile, number);
    pass_turn(layout_.blocks, number);
    if (pages_.count() > 0) wait_for(page_turn_, number);
    if (tile.grad_key != nullptr) put(of_keys(), w.grad_key, first, keys, head);
    if (tile.grad_value != nullptr) put(of_values(), w.grad_value, first, keys, head);
    pass_page_turn(number);
  }

  // ---- The gradients of keys and values

  struct KeyGradient {
    const Tensor& to;
    int64_t length, acc_stride;
    double factor;
    int64_t page_offset;  // in the sums of a shared page, in accumulators
  };
  KeyGradient of_keys() const {
    return {grads_.grad_key, p_.head_dim, layout_.sizes.acc_stride, rules_.scale().of_score, 0};
  }
  KeyGradient of_values() const {
    return {grads_.grad_value, p_.value_head_dim, layout_.sizes.value_acc_stride, 1 / rules_.keep_prob(),
            p_.block_size * layout_.sizes.acc_stride};
  }

  // A task's sums for keys [first, first + count): rounded to the gradient, or added to the sums of shared pages.
  void put(const KeyGradient& g, const void* acc, int64_t first, int64_t count, int64_t head) const {
    const KvRows rows = kv_rows(g.to, head);
    const char* from = static_cast<const char*>(acc);
    for (int64_t key = first; key < first + count;) {
      const int64_t run = rows.run(key, first + count - key);
      const int64_t page = p_.paged ? pages_.ordinal(rows.page_of(key)) : -1;
      if (page >= 0) {
        const int64_t at = g.page_offset + key % p_.block_size * g.acc_stride;
        add(from, run * g.acc_stride, pages_.sums(page, head % p_.num_kv_heads), at);
      } else {
        finish_keys(g, from, run, const_cast<char*>(rows.row(key)));
      }
      key += run;
      from += run * g.acc_stride * accumulator_bytes_;
    }
  }
  void finish_keys(const KeyGradient& g, const void* acc, int64_t count, void* to) const {
    const StackedRows out = {to, g.to.dtype, g.to.strides[p_.paged ? 1 : 2], 0, g.to.strides[3], 1};
    finish(acc, g.acc_stride, count, g.length, g.factor, 0, out);
  }
  // to[at + i] += from[i]
  void add(const void* from, int64_t count, void* to, int64_t at) const {
    const auto add_numbers = [&](const auto* terms, auto* sums) {
      for (int64_t i = 0; i < count; ++i) sums[at + i] += terms[i];
    };
    if (plan_.product == AttentionProduct::f64)
      add_numbers(static_cast<const double*>(from), static_cast<double*>(to));
    else
      add_numbers(static_cast<const float*>(from), static_cast<float*>(to));
  }

  // Lets the task after `number` add to shared pages.
  void pass_page_turn(int64_t number) const {
    if (pages_.count() == 0) return;
    wait_for(page_turn_, number);
    page_turn_.store(number + 1, std::memory_order_release);
  }
  void finish_shared_page(int64_t block) const {
    for (const KeyGradient& g : {of_keys(), of_values()}) {
      for (int64_t h = 0; h < p_.num_kv_heads && g.to.data != nullptr; ++h) {
        const char* sums = static_cast<const char*>(pages_.sums(pages_.ordinal(block), h));
        char* to =
            static_cast<char*>(g.to.data) + (block * g.to.strides[0] + h * g.to.strides[2]) * size_bytes(g.to.dtype);
        finish_keys(g, sums + g.page_offset * accumulator_bytes_, p_.block_size, to);
      }
    }
  }

  // ---- One tile against its blocks

  void pack_tile(int64_t head, const Worker& w, GradTile& tile) const {
    kv_rows(in_.key, head).locate(tile.first_key, tile.count, w.key_rows);
    kv_rows(in_.value, head).locate(tile.first_key, tile.count, w.value_rows);
    PackKeys pack;
    pack.key_rows = w.key_rows;
    pack.value_rows = w.value_rows;
    pack.key_dim_stride = in_.key.strides[3];
    pack.value_dim_stride = in_.value.strides[3];
    pack.count = tile.count;
    pack.keys = w.keys;
    pack.values = w.values;
    pack.key_columns = w.key_columns;
    tile.keys_finite = kernels_.pack_keys(pack, layout_.sizes);
  }

  GradBlock block_against(int64_t head, int64_t index, const Block& b, const Worker& w, const GradTile& tile) const {
    const BlockState& s = *b.state;
    const int64_t end = tile.first_key + tile.count, prefix = s.has_rules ? s.rules.prefix : 0;
    GradBlock g;
    g.sizes = layout_.sizes;
    g.queries = b.queries;
    g.exponent_scale = rules_.exponent_scale();
    g.keep_prob = rules_.keep_prob();
    g.rules = s.has_rules ? &s.rules : nullptr;
    g.partial = (tile.first_key < s.all_begin || end > s.all_end) && end > prefix;
    g.visible_begin = w.visible_begin;
    g.visible_end = w.visible_end;
    g.grad_scores = w.grad_scores;
    g.probability_columns = w.probability_columns;
    g.grad_score_columns = w.grad_score_columns;
    g.scores_stride = layout_.scores_stride;
    g.raw = w.raw;
    g.cap_slopes = w.cap_slopes;
    g.bias_grads = w.bias_grads;
    g.prefetch = static_cast<const char*>(block_of(head, index + 1 < layout_.blocks ? index + 1 : index).queries.query);
    if (g.partial) {
      find_visible(head, b, w);
      hide_absent_rows(b, w);
    }
    return g;
  }

  // One block of query rows against the tile, if it sees any of it.
  void meet(int64_t head, int64_t index, const Worker& w, const GradTile& tile, int64_t number) const {
    const Block b = block_of(head, index);
    BlockState& s = *b.state;
    const int64_t tile_index = tile.first_key / plan_.block_kv;
    if (!sees_tile(s, tile_index)) return;
    const GradBlock g = block_against(head, index, b, w, tile);
    kernels_.grad_tile(g, tile);

    if (bias_order_ == BiasOrder::by_task) {
      void** targets = const_cast<void**>(w.query_rows);
      const int64_t row_bytes = layout_.bias_sum_row_bytes;
      for (int64_t r = 0; r < b.queries.rows; ++r) targets[r] = w.bias_sums + (b.first_row + r) % group_ * row_bytes;
      kernels_.add_grad_bias(g, tile, targets, tile.first_key, 1, bias_scale());
    }
    const int64_t before = tile_index - first_tile(s);
    wait_for(s.tiles_done, before);
    if (bias_order_ == BiasOrder::by_block) {
      // Heads of the last query may be rows of later blocks, from which tasks before this one add to the same bias.
      const int64_t last_query = (b.first_row + b.queries.rows - 1) / group_;
      const int64_t last_block = std::min(((last_query + 1) * group_ - 1) / plan_.block_q, layout_.blocks - 1);
      for (int64_t i = index; i <= last_block; ++i) wait_for(turns_[i], number);
    }
    if (bias_order_ == BiasOrder::by_tile || bias_order_ == BiasOrder::by_block) {
      kernels_.add_grad_bias(g, tile, b.bias_targets, 0, bias_strides_[3], bias_scale());
    }
    if (grads_.grad_query.data != nullptr) kernels_.grad_query(g, tile);
    if (tile_index == last_tile(s)) finish_query(head, b);
    s.tiles_done.store(before + 1, std::memory_order_release);
  }

  void finish_query(int64_t head, const Block& b) const {
    if (grads_.grad_query.data == nullptr) return;
    finish(b.queries.grad_query, layout_.sizes.acc_stride, b.queries.rows, p_.head_dim,
           rules_.scale().of_query * rules_.scale().of_score, b.first_row, query_rows(grads_.grad_query, head));
  }
  void finish(const void* acc, int64_t acc_stride, int64_t rows, int64_t length, double factor, int64_t first_row,
              const StackedRows& out) const {
    kernels_.finish_rows({acc, rows, length, acc_stride, factor, first_row, out});
  }

  // ---- The bias's gradient

  double bias_scale() const { return static_cast<double>(p_.options.bias_scale); }
  // Where key 0 of a stacked row has its sum.
  void* bias_row(int64_t head, int64_t row) const {
    const int64_t query_head = head % p_.num_kv_heads * group_ + row % group_;
    const int64_t at = batch(head) * bias_strides_[0] + query_head * bias_strides_[1] + row / group_ * bias_strides_[2];
    return static_cast<char*>(grads_.grad_bias.data) + at * size_bytes(grads_.grad_bias.dtype);
  }
  // Waits for turn i and passes it on to the task after `number`. Turns 0 to blocks - 1 are those of by_block, turn
  // `blocks` is that of by_task; nothing in other orders.
  void pass_turn(int64_t i, int64_t number) const {
    const bool sums = i == layout_.blocks;
    if (bias_order_ != (sums ? BiasOrder::by_task : BiasOrder::by_block)) return;
    wait_for(turns_[i], number);
    turns_[i].store(number + 1, std::memory_order_release);
  }
  void add_bias_sums(int64_t head, const Worker& w, const GradTile& tile, int64_t number) const {
    wait_for(turns_[layout_.blocks], number);
    const int64_t row_bytes = layout_.bias_sum_row_bytes, stride = bias_strides_[3];
    for (int64_t g = 0; g < group_; ++g) {
      void* to = bias_row(head, g);
      for (int64_t j = 0; j < tile.count; ++j) {
        const char* from = w.bias_sums + g * row_bytes;
        const int64_t at = (tile.first_key + j) * stride;
        if (plan_.product == AttentionProduct::f64)
          static_cast<double*>(to)[at] += reinterpret_cast<const double*>(from)[j];
        else
          static_cast<float*>(to)[at] += reinterpret_cast<const float*>(from)[j];
      }
    }
  }

  // ---- The sinks' gradient

  double* sink_sum(int64_t head, int64_t block, int64_t g) const {
    return sink_sums_ + (head * layout_.blocks + block) * group_ + g;
  }
  void sum_sinks(int64_t head, int64_t index, const Block& b, const Worker& w, const PackQueries& pack) const {
    for (int64_t g = 0; g < group_; ++g) *sink_sum(head, index, g) = 0;
    for (int64_t r = 0; r < b.queries.rows; ++r) {
      const int64_t row = b.first_row + r, g = row % group_;
      const double sink = number(in_.sinks.data, (head % p_.num_kv_heads * group_ + g) * in_.sinks.strides[0]);
      const double top = statistic(pack.max.data != nullptr ? pack.max : pack.lse, row);
      const double sum = pack.max.data != nullptr ? statistic(pack.sum, row) : 1;
      if (std::isinf(sink) || std::isinf(top)) continue;
      double delta = number(b.queries.delta, r);
      // dO of a row that sees no key does not matter. O is 0 there, so a finite delta has nothing of dO.
      const auto sees_key = [&] {
        return !b.state->has_rules || kernels_.sees_key(b.state->rules, r, w.visible_begin[r], w.visible_end[r]);
      };
      if (number(b.queries.weight, r) == 0 || (!std::isfinite(delta) && !sees_key())) {
        delta = pack.grad_lse.data != nullptr ? -statistic(pack.grad_lse, row) : 0;
      }
      *sink_sum(head, index, g) -= std::exp(sink - top) / sum * delta;
    }
  }
  void add_up_sinks() const {
    const Tensor& t = grads_.grad_sinks;
    for (int64_t h = 0; h < p_.num_heads; ++h) {
      double sum = 0;
      for (int64_t b = 0; b < p_.batch; ++b) {
        for (int64_t i = 0; i < layout_.blocks; ++i) sum += *sink_sum(b * p_.num_kv_heads + h / group_, i, h % group_);
      }
      if (t.dtype == DType::f64)
        static_cast<double*>(t.data)[h * t.strides[0]] = sum;
      else
        static_cast<float*>(t.data)[h * t.strides[0]] = static_cast<float>(sum);
    }
  }

  // Keys of a sequence that have a gradient.
  int64_t key_rows_of(int64_t b) const {
    if (p_.paged) return sequences_.kv_len(b);
    return p_.varlen_k ? attention::key_rows_of(in_, b) : p_.kv_len;
  }

  const AttentionInputs& in_;
  const AttentionSaved& saved_;
  const AttentionGradients& grads_;
  const AttentionProblem& p_;
  const AttentionBackwardPlan& plan_;
  const BackwardKernels& kernels_;
  const BackwardLayout layout_;
  const Sequences sequences_;
  const CallRules rules_;
  const int64_t group_;  // query heads per KV head
  const int64_t heads_;  // (batch, KV head) pairs; `head` counts them throughout
  Interruption& interruption_;
  const int64_t accumulator_bytes_;
  char* const shared_;
  double* sink_sums_ = nullptr;            // [head][block][group]
  std::atomic<int64_t>* turns_ = nullptr;  // of each block, and of the tasks' sums: the task that may add next
  SharedPages pages_;
  int64_t num_blocks_ = 0;                      // paged: of the cache
  mutable std::atomic<int64_t> page_turn_ = 0;  // the task that may add to shared pages next
  BiasOrder bias_order_ = BiasOrder::none;
  int64_t bias_strides_[4] = {};  // of grad_bias; 0 where it repeats
  struct Progress {
    Counter packed, tiles;
  };
  Progress progress_[2];  // of the waves that use buffer 0 and buffer 1
};

Status too_many_tasks(const AttentionProblem& p) {
  return Status::invalid_argument("flash_attention_backward: " + std::to_string(p.batch) + " sequences, " +
                                  std::to_string(p.num_kv_heads) + " KV heads and " + std::to_string(p.kv_len) +
                                  " keys are more than 2^56 tiles");
}

}  // namespace
}  // namespace attention

Status flash_attention_backward(Context& context, const AttentionInputs& inputs, const AttentionSaved& saved,
                                const AttentionGradients& gradients, const AttentionOptions& options) {
  return guarded([&]() -> Status {
    Result<AttentionBackwardProblem> checked = attention::check_backward(inputs, saved, gradients, options);
    if (!checked.ok()) return checked.status();
    AttentionBackwardProblem problem = checked.value();
    const AttentionProblem& p = problem.forward;

    using attention::uniform_if_there;
    const AttentionInputs in = attention::uniform_shapes(inputs, p);
    AttentionSaved from = saved;
    AttentionGradients to = gradients;
    for (ConstTensor* t :
         {&from.out, &from.grad_out, &from.softmax_lse, &from.softmax_max, &from.softmax_sum, &from.grad_lse}) {
      *t = uniform_if_there(*t, p.varlen_q);
    }
    to.grad_query = uniform_if_there(to.grad_query, p.varlen_q);
    to.grad_key = uniform_if_there(to.grad_key, p.varlen_k);
    to.grad_value = uniform_if_there(to.grad_value, p.varlen_k);

    Context::Impl& impl = context.impl();
    const bool wanted = to.grad_query.data != nullptr || to.grad_key.data != nullptr || to.grad_value.data != nullptr ||
                        to.grad_bias.data != nullptr || to.grad_sinks.data != nullptr;
    if (!wanted) return {};
    const bool no_rows = p.batch == 0 || p.num_heads == 0 || p.query_len == 0;
    if (p.paged && !no_rows && (to.grad_key.data != nullptr || to.grad_value.data != nullptr)) {
      Result<WorkspaceLease> lease = impl.workspaces.lease(attention::SharedPages::ordinal_bytes(problem));
      if (!lease.ok()) return lease.status();
      problem.shared_blocks =
          attention::SharedPages::number(in, p, problem.num_blocks, static_cast<int64_t*>(lease.value().data()));
    }
    if (no_rows) {
      for (const Tensor& t : {to.grad_query, to.grad_key, to.grad_value, to.grad_bias, to.grad_sinks}) {
        attention::fill(t, 0, impl.pool);
      }
      return {};
    }
    const AttentionBackwardPlan plan = plan_attention_backward(problem, impl.machine);
    if (!Size(plan.num_tasks).within_limit()) return attention::too_many_tasks(p);
    Result<WorkspaceLease> lease = impl.workspaces.lease(plan.scratch_bytes(impl.pool.num_threads()));
    if (!lease.ok()) return lease.status();
    Interruption interruption(impl.interrupted, attention::multiply_adds(p));
    attention::BackwardCall(in, from, to, problem, plan, impl.machine, lease.value().data(), interruption)
        .run(impl.pool);
    if (interruption.happened()) return interruption.status("flash_attention_backward");
    const auto end_of = [&](const ConstTensor& offsets) { return index_at(offsets, p.batch); };
    if (p.varlen_q) attention::fill_rows(to.grad_query, end_of(inputs.cu_seqlens_q), 0, impl.pool);
    if (p.varlen_k) {
      attention::fill_rows(to.grad_key, end_of(inputs.cu_seqlens_k), 0, impl.pool);
      attention::fill_rows(to.grad_value, end_of(inputs.cu_seqlens_k), 0, impl.pool);
    }
    return {};
  });
}

}  // namespace opst
