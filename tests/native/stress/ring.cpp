// A stress test of the ring, for the sanitizers: `make sanitize`.
//
// Ranks are threads over one piece of memory, so that a slot that is written before all have read it is a data
// race that the thread sanitizer reports.  They make the same calls, drawn at random, some of them late; every result
// is compared with what it has to be.  Some rings are made to fail in the middle: every rank then ends with that
// message.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ops/ring/ring.h"

namespace {

using penstock::ring::Piece;
using penstock::ring::Ring;
using penstock::ring::RingError;

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "stress: %s does not hold\n", what);
  std::abort();
}

struct Aligned {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Aligned>;

Memory zeros(std::size_t bytes) {
  const std::size_t whole = (bytes + 4095) / 4096 * 4096;
  Memory memory(std::aligned_alloc(4096, whole));
  check(memory != nullptr, "there is memory");
  std::fill_n(static_cast<char*>(memory.get()), whole, '\0');
  return memory;
}

using Random = std::mt19937_64;

// What rank `rank` gives as element i of call `call`: small whole numbers, so that sums are exact.
double given(std::uint64_t call, std::uint32_t rank, std::size_t i) {
  return static_cast<double>((call * 7 + rank * 131 + i * 3) % 1000);
}

template <typename T>
void reduce(Ring& ring, Random& same, std::uint64_t call) {
  const std::size_t replicas = 1 + same() % 2;
  std::vector<std::vector<std::vector<T>>> arrays(1 + same() % 3);
  std::vector<Piece<T>> pieces;
  for (auto& piece : arrays) {
    const std::size_t size = same() % (same() % 4 == 0 ? 9000 : 300);
    piece.resize(replicas);
    pieces.push_back({{}, static_cast<std::int64_t>(size)});
    for (auto& array : piece) {
      for (std::size_t i = 0; i < size; ++i) array.push_back(static_cast<T>(given(call, ring.rank(), i)));
      pieces.back().replicas.push_back(array.data());
    }
  }
  ring.all_reduce(pieces, std::vector<double>(ring.num_ranks(), 1.0));
  for (const auto& piece : arrays) {
    for (const auto& array : piece) {
      for (std::size_t i = 0; i < array.size(); ++i) {
        double sum = 0;
        for (std::uint32_t rank = 0; rank < ring.num_ranks(); ++rank) sum += given(call, rank, i);
        check(array[i] == static_cast<T>(sum * static_cast<double>(replicas)), "a sum is that of all ranks");
      }
    }
  }
}

void meet(Ring& ring, Random& same, std::uint64_t call) {
  const std::size_t count = 1 + same() % 64;
  std::vector<std::int64_t> mine(count), all(count * ring.num_ranks());
  for (std::size_t i = 0; i < count; ++i) mine[i] = static_cast<std::int64_t>(given(call, ring.rank(), i));
  ring.meet(mine.data(), count, all.data());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto rank = static_cast<std::uint32_t>(i / count);
    check(all[i] == static_cast<std::int64_t>(given(call, rank, i % count)), "a meeting brings all numbers");
  }
}

char byte_of(std::uint64_t call, std::uint32_t rank, std::size_t i) {
  return static_cast<char>(call + rank * 17 + i);
}

void gather(Ring& ring, Random& same, std::uint64_t call) {
  std::vector<std::size_t> sizes;
  std::size_t total = 0;
  for (std::uint32_t rank = 0; rank < ring.num_ranks(); ++rank) total += sizes.emplace_back(same() % 9000);
  std::vector<char> all(total);
  const auto fill = [&](char* to, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) to[i - begin] = byte_of(call, ring.rank(), i);
  };
  ring.gather(fill, sizes, all.data());
  std::size_t at = 0;
  for (std::uint32_t rank = 0; rank < ring.num_ranks(); ++rank) {
    for (std::size_t i = 0; i < sizes[rank]; ++i) check(all[at++] == byte_of(call, rank, i), "a part is its rank's");
  }
}

void broadcast(Ring& ring, Random& same, std::uint64_t call) {
  const auto root = static_cast<std::uint32_t>(same() % ring.num_ranks());
  std::vector<char> bytes(1 + same() % 9000);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_of(call, ring.rank(), i);
  ring.broadcast(bytes.data(), bytes.size(), root);
  for (std::size_t i = 0; i < bytes.size(); ++i) check(bytes[i] == byte_of(call, root, i), "all have the root's bytes");
}

void make_call(Ring& ring, Random& same, std::uint64_t call) {
  switch (same() % 6) {
    case 0:
      return reduce<float>(ring, same, call);
    case 1:
      return reduce<double>(ring, same, call);
    case 2:
      return reduce<std::int64_t>(ring, same, call);
    case 3:
      return meet(ring, same, call);
    case 4:
      return gather(ring, same, call);
    default:
      return broadcast(ring, same, call);
  }
}

// `fails`: the last rank goes away before its last call, and the others are notified.
void run(std::uint32_t num_ranks, Random& random, std::uint64_t num_calls, bool fails) {
  const std::size_t slot_bytes = 512 << (random() % 4);
  const Memory memory = zeros(Ring::size_bytes(num_ranks, slot_bytes));
  std::vector<std::unique_ptr<Ring>> rings;
  for (std::uint32_t rank = 0; rank < num_ranks; ++rank) {
    rings.push_back(std::make_unique<Ring>(memory.get(), rank, num_ranks, slot_bytes));
  }
  std::vector<std::thread> threads;
  const std::uint64_t seed = random();
  for (const auto& ring : rings) {
    threads.emplace_back([&ring = *ring, &rings, seed, num_ranks, num_calls, fails] {
      Random same(seed), own(seed + 1 + ring.rank());
      const bool goes = fails && ring.rank() + 1 == num_ranks;
      try {
        for (std::uint64_t call = 0; call + (goes ? 1 : 0) < num_calls; ++call) {
          if (own() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds{own() % 300});
          make_call(ring, same, call);
        }
      } catch (const RingError& error) {
        check(fails && std::string(error.what()) == "rank gone", "a ring ends with the given error");
      }
      if (!goes) return;
      for (const auto& one : rings) one->fail("rank gone");
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5.0;
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  Random random(20190701);
  std::uint64_t runs = 0;
  do {
    for (std::uint32_t num_ranks = 1; num_ranks <= 4; ++num_ranks) run(num_ranks, random, 40, runs % 2 == 1);
    ++runs;
  } while (std::chrono::steady_clock::now() < until);
  std::printf("ring: %llu runs of 1 to 4 ranks\n", static_cast<unsigned long long>(runs));
  return 0;
}
