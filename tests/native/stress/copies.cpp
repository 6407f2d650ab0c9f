// A stress test of copies on two cores, for the sanitizers: `make sanitize`.
//
// Threads copy blocks and strided rows of random sizes at the same time, around the size from which the shared thread
// helps; each finds every byte where it belongs, and nothing beside it touched.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "ps/copies.h"

namespace {

using namespace penstock::ps;  // NOLINT: this is no header

constexpr std::size_t kThreads = 3, kMost = 300'000;
constexpr char kUntouched = 0x55;

struct Piece {
  Runs runs;
  std::size_t at;
};

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

std::vector<Piece> pieces_of(const std::vector<char>& from, std::mt19937& random) {
  const auto up_to = [&random](std::size_t most) {
    return std::uniform_int_distribution<std::size_t>(0, most)(random);
  };
  std::vector<Piece> out;
  std::size_t at = 0;
  for (std::size_t i = 0, count = 1 + up_to(5); i < count; ++i) {
    const std::size_t bytes = up_to(120), stride = bytes + up_to(9);
    const std::size_t rows = up_to(1) == 0 ? 1 : (stride == 0 ? 0 : up_to(kMost / stride));
    const Runs runs = rows == 1 ? Runs{from.data(), 1, up_to(kMost), 0} : Runs{from.data(), rows, bytes, stride};
    out.push_back({runs, at});
    at += runs.count * runs.bytes + up_to(64);
  }
  return out;
}

void copy_for(std::chrono::duration<double> time, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> from(kMost + 200);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 31 + seed);
  const auto end = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < end) {
    const std::vector<Piece> pieces = pieces_of(from, random);
    std::vector<char> to(pieces.back().at + pieces.back().runs.count * pieces.back().runs.bytes + 64, kUntouched);
    std::vector<char> expected = to;
    std::vector<Copy> copies;
    for (const Piece& one : pieces) {
      copies.push_back({one.runs, to.data() + one.at});
      for (std::size_t i = 0; i < one.runs.count * one.runs.bytes; ++i) {
        expected[one.at + i] = from[i / one.runs.bytes * one.runs.stride + i % one.runs.bytes];
      }
    }
    copy_all(std::move(copies));
    check(to == expected, "every byte is where it belongs");
  }
}

}  // namespace

int main(int, char** arguments) {
  const std::chrono::duration<double> time(std::strtod(arguments[1], nullptr));
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < kThreads; ++i) threads.emplace_back(copy_for, time, i + 1);
  for (std::thread& thread : threads) thread.join();
  std::printf("stress: all bytes are where they belong\n");
}
