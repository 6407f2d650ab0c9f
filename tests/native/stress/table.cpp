// A stress test of the sparse table, for the sanitizers: `make sanitize`.
//
// First several threads push ones, pull, copy and ask at the same time, and every id must end with as many as were
// pushed.  Then rows are made, written, admitted, expired and copied at random, and the table's own counts must agree.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "table/length.h"
#include "table/rules.h"
#include "table/table.h"

namespace {

using namespace penstock::table;  // NOLINT: this is no header

constexpr uint32_t kThreads = 4;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

struct Draws {
  std::mt19937_64 random;

  uint64_t below(uint64_t bound) { return random() % bound; }
  // Ids that meet often, and a few from the whole range.
  std::vector<int64_t> ids(uint64_t most, uint64_t universe) {
    std::vector<int64_t> found(below(most + 1));
    for (int64_t& id : found) id = static_cast<int64_t>(below(universe)) * 0x10001 - 1000;
    return found;
  }
};

Settings made(Draws& draws, uint32_t width) {
  Settings settings;
  settings.width = width;
  settings.num_states = width > 1000 ? 0 : static_cast<uint32_t>(draws.below(3));
  settings.first_states.assign(settings.num_states, 0.5F);
  settings.seed = draws.random();
  settings.capacity = uint64_t{1} << 40;
  settings.num_shards = uint32_t{1} << draws.below(5);
  return settings;
}

uint64_t copied_rows(const Table& table, uint32_t num_shards) {
  std::vector<int64_t> ids;
  std::vector<float> rows;
  uint64_t count = 0;
  for (uint32_t shard = 0; shard < num_shards; ++shard) {
    table.copy_shard(shard, ids, rows);
    check(rows.size() == ids.size() * table.stride(), "a copy has a row for each id");
    count += ids.size();
  }
  return count;
}

template <typename Body>
void in_threads(Draws& draws, Body body) {
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([body, seed = draws.random()] {
      Draws own{std::mt19937_64(seed)};
      body(own);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void count_pushes(Draws& draws, uint32_t width) {
  const uint64_t universe = width > 1000 ? 60 : 3000;
  const Settings settings = made(draws, width);
  Table table(settings);
  std::vector<std::atomic<uint32_t>> pushed(universe);
  in_threads(draws, [&](Draws& own) {
    for (int step = 0; step < 12; ++step) {
      const std::vector<int64_t> ids = own.ids(universe, universe);
      std::vector<float> values(ids.size() * width, 1.0F);
      const auto num_threads = static_cast<uint32_t>(1 + own.below(3));
      table.push(ids.data(), ids.size(), values.data(), 0, Add<AnyLength>{{width}}, num_threads);
      for (const int64_t id : ids) pushed[static_cast<uint64_t>((id + 1000) / 0x10001)].fetch_add(1);
      table.pull(ids.data(), ids.size(), values.data(), own.below(2) == 0, 0);
      for (const float value : values) check(value >= 1.0F, "a pull sees the pushes of its own thread");
      check(table.rows_to_make(ids.data(), ids.size()) == 0, "what was pushed has rows");
      copied_rows(table, settings.num_shards);
      check(table.index_bytes() + table.row_bytes() <= table.held_bytes() + (uint64_t{1} << 20), "bytes are accounted");
    }
  });
  std::vector<float> row(width);
  for (uint64_t k = 0; k < universe; ++k) {
    const auto id = static_cast<int64_t>(k) * 0x10001 - 1000;
    table.pull(&id, 1, row.data(), false, 0);
    for (const float value : row) check(value == static_cast<float>(pushed[k].load()), "no push is lost or doubled");
  }
}

void act(Table& table, const Settings& settings, Draws& own, std::atomic<uint32_t>& now) {
  const std::vector<int64_t> ids = own.ids(settings.width > 1000 ? 10 : 500, 4000);
  const uint64_t count = ids.size();
  const uint32_t time = now.fetch_add(1);
  std::vector<float> rows(count * table.stride(), 0.25F);
  const auto allowed = std::make_unique<bool[]>(count + 1);
  switch (own.below(9)) {
    case 0:
      return table.pull(ids.data(), count, rows.data(), true, time);
    case 1:
      return table.push(ids.data(), count, rows.data(), time, Sgd<AnyLength>{{settings.width}, 0.1F}, 2);
    case 2:
      return table.gather(ids.data(), count, rows.data(), time);
    case 3:
      return table.scatter(ids.data(), count, rows.data(), time);
    case 4:
      return table.admit(ids.data(), count, allowed.get());
    case 5:
      static_cast<void>(table.rows_to_make(ids.data(), count));
      return;
    case 6:
      if (settings.keeps_last_use) static_cast<void>(table.expire(time < 20 ? 0 : time - 20));
      return;
    case 7: {
      const std::vector<uint8_t> counts = table.copy_counts();
      check(table.restore_counts(counts.data(), counts.size()) == (settings.admit_after > 0), "counts come back");
      return;
    }
    default:
      copied_rows(table, settings.num_shards);
  }
}

void do_anything(Draws& draws, uint32_t width) {
  Settings settings = made(draws, width);
  settings.capacity = 1 + draws.below(5000);
  settings.keeps_last_use = width <= 1000 && draws.below(2) == 0;
  settings.admit_after = static_cast<uint32_t>(draws.below(3));
  settings.sketch_bytes = 4096;
  settings.first_values = {static_cast<FirstValues::Kind>(draws.below(4)), -0.5, 0.5};
  Table table(settings);
  std::atomic<uint32_t> now{1};
  in_threads(draws, [&](Draws& own) {
    for (int step = 0; step < 40; ++step) {
      try {
        act(table, settings, own, now);
      } catch (const CapacityError&) {
        check(table.size() > 0, "a table that is full has rows");
      }
    }
  });
  check(table.size() <= settings.capacity, "there are no more rows than there may be");
  check(copied_rows(table, settings.num_shards) == table.size(), "the table counts its rows");
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5.0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Draws draws{std::mt19937_64(20190701)};
  uint64_t rounds = 0;
  do {
    for (const uint32_t width : {1U, 3U, 8U, 16U, 8192U}) {
      count_pushes(draws, width);
      do_anything(draws, width);
    }
    ++rounds;
  } while (std::chrono::steady_clock::now() < until);
  std::printf("table: %llu rounds of %u threads\n", static_cast<unsigned long long>(rounds), kThreads);
  return 0;
}
