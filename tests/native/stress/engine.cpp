// A stress test of the torch-free core, for the sanitizers: `make sanitize`.
//
// Random graphs run on engines of one to four workers. The kernel's values are plain memory, so that a missing
// happens-before edge between two instructions is a data race that the thread sanitizer reports, and each value is
// compared with the one computed in order. Failures, host instructions, seeds and a concurrent drain are mixed in.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "engine/engine.h"

namespace {

using penstock::Engine;
using penstock::Schedule;

struct Graph {
  Schedule schedule;
  std::vector<std::vector<std::uint32_t>> predecessors;
  std::vector<std::uint64_t> expected;
  std::vector<std::uint64_t> values;  // plain on purpose
  std::uint32_t failing = penstock::kNone;
  std::atomic<std::uint32_t> running{0};
  std::atomic<std::uint32_t> most_running{0};
};

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

std::uint64_t value_of(const Graph& graph, const std::vector<std::uint64_t>& values, std::uint32_t instruction) {
  std::uint64_t value = instruction + 1;
  for (const std::uint32_t p : graph.predecessors[instruction]) value = value * 6364136223846793005u + values[p];
  return value;
}

void run_kernel(void* context, std::uint32_t instruction, std::uint32_t) {
  Graph& graph = *static_cast<Graph*>(context);
  const bool on_host = graph.schedule.node(instruction).on_host;
  if (!on_host) {
    const std::uint32_t now = graph.running.fetch_add(1) + 1;
    std::uint32_t most = graph.most_running.load();
    while (now > most && !graph.most_running.compare_exchange_weak(most, now)) {
    }
  }
  graph.values[instruction] = value_of(graph, graph.values, instruction);
  if (!on_host) graph.running.fetch_sub(1);
  if (instruction == graph.failing) throw penstock::KernelError("wanted", "none");
}

std::unique_ptr<Graph> make_graph(std::mt19937_64& random) {
  auto graph = std::make_unique<Graph>();
  const auto size = static_cast<std::uint32_t>(1 + random() % 200);
  const std::uint32_t reach = 1 + random() % 20;
  const bool with_host = random() % 3 == 0;
  for (std::uint32_t i = 0; i < size; ++i) {
    const auto affinity = static_cast<std::int32_t>(random() % 4) - 1;
    graph->schedule.add(i, affinity, with_host && random() % 10 == 0);
    graph->predecessors.emplace_back();
    for (std::uint32_t k = random() % 4; k-- > 0 && i > 0;) {
      const std::uint32_t before = i - 1 - static_cast<std::uint32_t>(random() % std::min(i, reach));
      graph->schedule.edge(before, i);
      graph->predecessors[i].push_back(before);
    }
  }
  graph->schedule.seal();
  graph->expected.resize(size);
  for (std::uint32_t i = 0; i < size; ++i) graph->expected[i] = value_of(*graph, graph->expected, i);
  return graph;
}

void run_graph(Engine& engine, Graph& graph, std::mt19937_64& random, std::uint64_t step) {
  graph.values.assign(graph.expected.size(), 0);
  const bool fails = random() % 8 == 0;
  graph.failing = fails ? static_cast<std::uint32_t>(random() % graph.expected.size()) : penstock::kNone;
  const std::uint64_t seed = random() % 2 == 0 ? 0 : random();
  const auto failure = engine.run(graph.schedule, {&graph, &run_kernel}, step, seed);
  check(failure.has_value() == fails, "a run fails if and only if an instruction does");
  if (fails)
    check(failure->instruction == graph.failing && failure->inputs == "none", "the failure is the kernel's");
  else
    check(graph.values == graph.expected, "values are those of the order of adding");
  check(graph.most_running.load() <= engine.workers(), "no more run at once than there are workers");
}

std::uint64_t stress(std::uint32_t workers, double seconds, std::mt19937_64& random) {
  Engine engine({.workers = workers, .ring_capacity = 256, .enter = {}, .interrupted = {}});
  std::atomic<bool> stop{false};
  std::uint64_t drained = 0;
  std::thread drainer([&] {
    while (!stop.load()) {
      const penstock::Trace trace = engine.drain();
      drained += trace.rows.size() + trace.lost;
      for (const auto& row : trace.rows) check(row.op < 200 && row.step != 0, "an event is whole");
    }
  });
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::uint64_t step = 0;
  while (std::chrono::steady_clock::now() < until) {
    const auto graph = make_graph(random);
    for (int repeat = 0; repeat < 5; ++repeat) run_graph(engine, *graph, random, ++step);
    if (step % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds{200});  // let the workers park
  }
  stop.store(true);
  drainer.join();
  const penstock::Trace rest = engine.drain();
  drained += rest.rows.size() + rest.lost;
  const penstock::Statistics statistics = engine.statistics();
  check(drained == statistics.executed + statistics.host_executed, "each event is drained or counted as lost");
  engine.close();
  return step;
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5.0;
  std::mt19937_64 random(20190701);
  for (std::uint32_t workers = 1; workers <= 4; ++workers) {
    const std::uint64_t steps = stress(workers, seconds / 4, random);
    std::printf("%u workers: %llu runs\n", workers, static_cast<unsigned long long>(steps));
  }
  return 0;
}
