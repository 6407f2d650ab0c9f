// A stress test of meetings, for the sanitizers: `make sanitize`.
//
// Threads train in step: each brings a gradient of a block and rows of a table, waits with a short limit, and sometimes
// takes back, leaves for a while, or ends for good while the main thread begins anew. Every gradient that was pushed is
// in exactly one round: the merged means times the number of threads, summed over all rounds, are what was brought. Of
// one that was taken back it is open.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "ps/meeting.h"

namespace {

using namespace penstock::ps;  // NOLINT: this is no header

constexpr std::int64_t kIds = 5, kHeight = 4;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

const Placement block{{"w"}, {0}, {}, false};
const Placement table{{"t"}, {0}, {}, true};

// Whole numbers, so that sums are exact: of blocks and of rows, in 64 bits.
struct Totals {
  std::atomic<std::int64_t> blocks{0}, rows{0};

  // One of `gradients`.
  void add(std::int64_t value) {
    blocks += 60 * value * 2 * kHeight;
    rows += 60 * value * 2 * kIds;
  }
};

std::int64_t sum_of(const at::Tensor& values) {
  double sum = 0;
  for (std::int64_t i = 0; i < values.numel(); ++i) sum += static_cast<double>(values.const_data_ptr<float>()[i]);
  return static_cast<std::int64_t>(sum + 0.5);
}

// Values are multiples of 60, which any number of threads here divides.
std::vector<Push> gradients(std::int64_t value) {
  const auto filled = [&](std::int64_t rows) { return at::full({rows, 2}, 60 * value, at::kFloat); };
  at::Tensor ids = at::empty({kIds}, at::kLong);
  for (std::int64_t i = 0; i < kIds; ++i) ids.mutable_data_ptr<std::int64_t>()[i] = i % 3;
  return {{&block, {filled(kHeight)}, {}}, {&table, {}, {{ids, filled(kIds), 0, 2}}}};
}

void push(Meeting& meeting, const std::vector<Push>& own, Totals& pushed, std::mt19937_64& random) {
  try {
    const std::vector<Push> merged = meeting.merged(own);
    const auto num = static_cast<std::int64_t>(meeting.num_merged());
    pushed.blocks += num * sum_of(merged[0].values[0]);
    pushed.rows += num * sum_of(merged[1].rows[0].matrix);
    if (random() % 4 == 0) std::this_thread::yield();
  } catch (...) {
    meeting.failed();
    throw;
  }
  meeting.pushed();
}

// Steps until it has made all, or the meeting has failed.
void train(Meeting& meeting, std::uint64_t seed, Totals& brought, Totals& maybe, Totals& pushed) {
  std::mt19937_64 random(seed);
  for (int step = 0; step < 40; ++step) {
    if (random() % 8 == 0) meeting.leave();  // a thread that brings again takes part again
    const auto value = static_cast<std::int64_t>(1 + random() % 5);
    const std::vector<Push> own = gradients(value);
    const std::int64_t round = meeting.bring(own);
    Meeting::Outcome outcome{};
    while ((outcome = meeting.wait(round, 1e-4)) == Meeting::Outcome::kLate) {
      if (random() % 16 == 0) {  // as where the check of the others raises
        maybe.add(value);        // it may have been pushed just before
        meeting.take_back(round);
        return;
      }
      static_cast<void>(meeting.num_came());  // none, where the exchange has just begun anew
      meeting.waiting();
    }
    if (outcome == Meeting::Outcome::kDropped) return;
    brought.add(value);
    if (outcome == Meeting::Outcome::kPush) push(meeting, own, pushed, random);
  }
}

// Returns the rounds.
std::int64_t run(std::mt19937_64& random) {
  const auto meeting = std::make_shared<Meeting>();
  Totals brought, maybe, pushed;
  for (int beginning = 0; beginning < 3; ++beginning) {
    const std::size_t num = 2 + random() % 4;
    meeting->begin(num);
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < num; ++i) {
      threads.emplace_back([&, seed = random()] { train(*meeting, seed, brought, maybe, pushed); });
    }
    if (random() % 4 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      meeting->fail();
    } else if (random() % 2 == 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
      meeting->begin(0);  // what was brought is pushed as it is
      meeting->begin(num);
    }
    for (std::thread& one : threads) one.join();
  }
  const auto is_once = [](std::int64_t sure, std::int64_t also, std::int64_t found) {
    return sure <= found && found <= sure + also;
  };
  check(is_once(brought.blocks, maybe.blocks, pushed.blocks), "each gradient of a block is in one round");
  check(is_once(brought.rows, maybe.rows, pushed.rows), "each gradient of rows is in one round");
  return meeting->num_pushed();
}

}  // namespace

int main(int count, char** arguments) {
  const double seconds = count > 1 ? std::atof(arguments[1]) : 2;
  std::mt19937_64 random(7);
  std::int64_t rounds = 0;
  for (const double until = now_s() + seconds; now_s() < until;) rounds += run(random);
  std::printf("meeting: %lld rounds\n", static_cast<long long>(rounds));
  return 0;
}
