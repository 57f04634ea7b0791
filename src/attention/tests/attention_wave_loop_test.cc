// WaveLoop: what has been done when a piece is packed and when a task runs, for any number of threads.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "attention/wave_loop.h"
#include "testing/random.h"

namespace opst::attention {
namespace {

struct Counts {
  std::atomic<int64_t> packed{0}, done{0};  // of a head
};

TEST(WaveLoop, BuffersAreReusedWhenTheirWaveIsDone) {
  test::Random random(test::seed());
  for (int round = 0; round < 60; ++round) {
    const WaveLoop loop = {.heads = random.integer(1, 12),
                           .heads_per_wave = random.integer(1, 4),
                           .packs_per_head = random.integer(0, 3),
                           .tasks_per_head = random.integer(0, 5),
                           .order = random.pick({WaveLoop::Order::by_head, WaveLoop::Order::heads_in_turn})};
    ThreadPool pool(static_cast<int>(random.integer(1, 5)));
    const auto counts = std::make_unique<Counts[]>(static_cast<size_t>(loop.heads));
    Counts* const of = counts.get();
    const int64_t wave = loop.heads_per_wave, all_tasks = ceil_div(loop.heads, wave) * wave * loop.tasks_per_head;
    std::vector<std::atomic<int>> runs(static_cast<size_t>(all_tasks));
    std::atomic<int> wrong{0};
    loop.run(
        pool,
        [&](int64_t head, int64_t index, int) {
          // The wave that used the buffer before has left it.
          for (int64_t h = head - head % wave - 2 * wave; h >= 0 && h < head - head % wave - wave; ++h) {
            if (of[h].packed != loop.packs_per_head || of[h].done != loop.tasks_per_head) ++wrong;
          }
          if (index < 0 || index >= loop.packs_per_head) ++wrong;
          ++of[head].packed;
        },
        [&](int64_t head, int64_t index, int64_t number, int) {
          for (int64_t h = head - head % wave; h < head - head % wave + wave && h < loop.heads; ++h) {
            if (of[h].packed != loop.packs_per_head) ++wrong;
          }
          const int64_t in_wave = loop.order == WaveLoop::Order::by_head ? head % wave * loop.tasks_per_head + index
                                                                         : index * wave + head % wave;
          if (number != head / wave * wave * loop.tasks_per_head + in_wave) ++wrong;
          ++runs[static_cast<size_t>(number)];
          if (head < loop.heads) ++of[head].done;
        });
    EXPECT_EQ(wrong, 0);
    for (const std::atomic<int>& n : runs) EXPECT_EQ(n, 1);
    for (int64_t h = 0; h < loop.heads; ++h) {
      EXPECT_EQ(of[h].packed, loop.packs_per_head);
      EXPECT_EQ(of[h].done, loop.tasks_per_head);
    }
  }
}

}  // namespace
}  // namespace opst::attention
