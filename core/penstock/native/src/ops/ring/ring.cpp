#include "ops/ring/ring.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "ops/ring/sums.h"

namespace penstock::ring {
namespace {

constexpr long kPollNs = 50'000'000;
// Longer than a hand-over between two cores, shorter than a wake-up in a virtual machine: where ranks share cores, a
// spinning one keeps the one that it waits for from running.
constexpr int kSpins = 400;
constexpr std::size_t kMostMet = 64;
constexpr std::uint32_t kSlots = 4;
// Below this, a chunk is summed whole by every rank: a second stage costs more than the sums.
constexpr std::int64_t kSmallBytes = 16 << 10;
// From here on it pays to say where arrays lie, which is a stage more.
constexpr std::int64_t kLargeBytes = 128 << 10;
// Summed in place at a time: what one rank has summed is still in a cache when the others take it. Beyond what caches
// hold that is no use, and one copy of all, which goes past them, is faster.
constexpr std::int64_t kWindowBytes = 1 << 20;
constexpr std::int64_t kCachedBytes = 16 << 20;
constexpr std::size_t kAlign = 64;

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::uint32_t* word_of(std::atomic<std::uint32_t>& value) noexcept {
  return reinterpret_cast<std::uint32_t*>(&value);
}

std::string said(std::uint64_t tag) {
  static const char* const kNames[] = {"nothing", "an all-reduce", "a meeting", "a gathering", "a broadcast"};
  const std::uint64_t kind = std::min<std::uint64_t>(tag >> 56, 4);
  return std::string(kNames[kind]) + " of " + std::to_string(tag & ((std::uint64_t{1} << 56) - 1)) + " bytes";
}

}  // namespace

// What a rank says to the others. `tags` by turns: a rank is never more than three stages ahead of another.
struct alignas(128) Ring::Line {
  std::atomic<std::uint32_t> stage;
  std::atomic<std::uint32_t> waiters;
  std::atomic<std::uint64_t> tags[kSlots];
  std::atomic<pid_t> pid;
};

// What stands in a slot before arrays are summed in place. `count` of 0: this rank's do not lie in shared memory.
struct Ring::Places {
  std::uint64_t count;
  Place places[];
};

std::size_t Ring::size_bytes(std::uint32_t num_ranks, std::size_t slot_bytes) {
  return num_ranks * (sizeof(Line) + kSlots * slot_bytes);
}

Ring::Ring(void* memory, std::uint32_t rank, std::uint32_t num_ranks, std::size_t slot_bytes)
    : rank_(rank),
      num_ranks_(num_ranks),
      slot_bytes_(slot_bytes),
      base_(static_cast<char*>(memory)),
      mappings_(num_ranks) {
  static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);
  if (rank >= num_ranks || slot_bytes < kMostMet * sizeof(std::int64_t) || slot_bytes % kAlign != 0) {
    throw RingError("a ring needs a rank below the number of ranks, and slots of a multiple of 64 bytes, from 512 on");
  }
  if (base_ != nullptr) line(rank_).pid.store(getpid());
}

Ring::Ring(int descriptor, std::uint32_t rank, std::uint32_t num_ranks, std::size_t slot_bytes)
    : Ring(static_cast<void*>(nullptr), rank, num_ranks, slot_bytes) {
  const std::size_t size = size_bytes(num_ranks, slot_bytes);
  struct stat found{};
  if (fstat(descriptor, &found) != 0 || static_cast<std::size_t>(found.st_size) < size) {
    throw RingError("the shared memory has " + std::to_string(found.st_size) + " bytes; expected " +
                    std::to_string(size));
  }
  void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) throw RingError(std::string("the shared memory cannot be mapped: ") + strerror(errno));
  base_ = static_cast<char*>(mapped);
  is_mapped_ = true;
  line(rank_).pid.store(getpid());
}

Ring::~Ring() {
  if (is_mapped_) munmap(base_, size_bytes(num_ranks_, slot_bytes_));
}

Ring::Line& Ring::line(std::uint32_t rank) const noexcept {
  return reinterpret_cast<Line*>(base_)[rank];
}

char* Ring::slot(std::uint32_t rank, std::uint32_t chunk) const noexcept {
  return base_ + num_ranks_ * sizeof(Line) + (kSlots * std::size_t{rank} + chunk % kSlots) * slot_bytes_;
}

void Ring::fail(const std::string& why) {
  {
    const std::lock_guard guard(why_lock_);
    if (why_.empty()) why_ = why;
  }
  failed_.store(true);
}

void Ring::throw_if_failed() const {
  if (!failed_.load(std::memory_order_relaxed)) return;
  const std::lock_guard guard(why_lock_);
  throw RingError(why_);
}

void Ring::publish(const Call& call) {
  Line& mine = line(rank_);
  ++stage_;
  mine.tags[stage_ % kSlots].store(static_cast<std::uint64_t>(call.kind) << 56 | call.size, std::memory_order_relaxed);
  mine.stage.store(stage_);  // sequentially consistent, as `waiters` is: either sees the other
  if (mine.waiters.load() != 0) {
    syscall(SYS_futex, word_of(mine.stage), FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
  }
}

void Ring::await(std::uint32_t rank, std::uint32_t stage, const Call& call) {
  Line& other = line(rank);
  const auto reached = [&] { return static_cast<std::int32_t>(other.stage.load() - stage) >= 0; };
  for (int i = 0; i < kSpins && !reached(); ++i) pause();
  while (!reached()) {
    throw_if_failed();
    other.waiters.fetch_add(1);
    const std::uint32_t seen = other.stage.load();
    if (static_cast<std::int32_t>(seen - stage) < 0) {
      const timespec limit{0, kPollNs};
      syscall(SYS_futex, word_of(other.stage), FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    other.waiters.fetch_sub(1);
  }
  check(rank, stage, call);
}

void Ring::await_all(std::uint32_t stage, const Call& call) {
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) {
    if (rank != rank_) await(rank, stage, call);
  }
}

void Ring::check(std::uint32_t rank, std::uint32_t stage, const Call& call) const {
  const std::uint64_t mine = static_cast<std::uint64_t>(call.kind) << 56 | call.size;
  const std::uint64_t theirs = line(rank).tags[stage % kSlots].load(std::memory_order_relaxed);
  if (theirs != mine) {
    throw RingError("rank " + std::to_string(rank) + " takes part in " + said(theirs) + " where rank " +
                    std::to_string(rank_) + " takes part in " + said(mine) + ": the ranks run different programs");
  }
}

void Ring::stage(const Call& call) {
  throw_if_failed();
  publish(call);
  await_all(stage_, call);
}

namespace {

// Calls body(piece, first, count, at): elements [first, first + count) of a piece are [at, at + count) of the chunk.
template <typename T, typename Body>
void each_piece(const std::vector<Piece<T>>& pieces, std::int64_t begin, std::int64_t end, const Body& body) {
  std::int64_t start = 0;
  for (const Piece<T>& piece : pieces) {
    const std::int64_t low = std::max(begin, start), high = std::min(end, start + piece.size);
    if (low < high) body(piece, low - start, high - low, low - begin);
    start += piece.size;
  }
}

template <typename T>
std::vector<const T*> at_offset(const std::vector<T*>& arrays, std::int64_t offset) {
  std::vector<const T*> moved;
  for (const T* array : arrays) moved.push_back(array + offset);
  return moved;
}

}  // namespace

template <typename T>
void Ring::fill(const std::vector<Piece<T>>& pieces, std::int64_t begin, std::int64_t end, double weight) {
  auto* own = reinterpret_cast<T*>(slot(rank_, chunk_));
  each_piece(pieces, begin, end, [&](const Piece<T>& piece, std::int64_t first, std::int64_t n, std::int64_t at) {
    const std::vector<const T*> sources = at_offset(piece.replicas, first);
    weigh(own + at, sources.data(), static_cast<std::int64_t>(sources.size()), weight, n);
  });
}

namespace {

// Hands the result of the first replica to the others.
template <typename T>
void spread(const Piece<T>& piece, std::int64_t first, std::int64_t count) {
  for (std::size_t k = 1; k < piece.replicas.size(); ++k) {
    std::memcpy(piece.replicas[k] + first, piece.replicas[0] + first, static_cast<std::size_t>(count) * sizeof(T));
  }
}

}  // namespace

template <typename T>
void Ring::sum_whole(const std::vector<Piece<T>>& pieces, std::int64_t begin, std::int64_t end, std::uint32_t chunk) {
  std::vector<T*> slots;
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) slots.push_back(reinterpret_cast<T*>(slot(rank, chunk)));
  each_piece(pieces, begin, end, [&](const Piece<T>& piece, std::int64_t first, std::int64_t count, std::int64_t at) {
    const std::vector<const T*> sources = at_offset(slots, at);
    sum(piece.replicas[0] + first, sources.data(), num_ranks_, count);
    spread(piece, first, count);
  });
}

// Each rank sums its own part, in its own slot, and takes the others' from theirs.
template <typename T>
void Ring::sum_by_parts(const std::vector<Piece<T>>& pieces, std::int64_t begin, std::int64_t end, const Call& call) {
  std::vector<T*> slots;
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) slots.push_back(reinterpret_cast<T*>(slot(rank, chunk_)));
  const std::int64_t n = end - begin, line_elements = static_cast<std::int64_t>(kAlign / sizeof(T));
  const std::int64_t share = (n / num_ranks_ / line_elements + 1) * line_elements;
  const std::int64_t low = std::min<std::int64_t>(n, rank_ * share), high = std::min<std::int64_t>(n, low + share);
  const std::vector<const T*> parts = at_offset(slots, low);
  sum(slots[rank_] + low, parts.data(), num_ranks_, high - low);
  stage(call);
  each_piece(pieces, begin, end, [&](const Piece<T>& piece, std::int64_t first, std::int64_t count, std::int64_t at) {
    T* out = piece.replicas[0] + first;
    for (std::int64_t i = at; i < at + count;) {
      const std::int64_t owner = i / share, stop = std::min(at + count, (owner + 1) * share);
      std::memcpy(out + (i - at), slots[static_cast<std::size_t>(owner)] + i,
                  static_cast<std::size_t>(stop - i) * sizeof(T));
      i = stop;
    }
    spread(piece, first, count);
  });
}

template <typename T>
void Ring::announce(const std::vector<Piece<T>>& pieces) {
  auto* mine = reinterpret_cast<Places*>(slot(rank_, chunk_));
  mine->count = 0;
  if (sizeof(Places) + pieces.size() * sizeof(Place) > slot_bytes_) return;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece<T>& piece = pieces[i];
    if (piece.replicas.size() != 1) return;
    const auto place = place_of(piece.replicas[0], static_cast<std::size_t>(piece.size) * sizeof(T));
    if (!place) return;
    mine->places[i] = *place;
  }
  mine->count = pieces.size();
}

// By rank and piece; nothing if some rank has said that its arrays do not lie in shared memory.
template <typename T>
std::vector<std::vector<const T*>> Ring::announced(std::size_t num_pieces) {
  std::vector<std::vector<const T*>> all;
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) {
    if (reinterpret_cast<const Places*>(slot(rank, chunk_))->count != num_pieces) return {};
  }
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) {
    const auto* said = reinterpret_cast<const Places*>(slot(rank, chunk_));
    std::vector<const T*>& of_rank = all.emplace_back();
    for (std::size_t i = 0; i < num_pieces && rank != rank_; ++i) {
      of_rank.push_back(reinterpret_cast<const T*>(mappings_.at(rank, line(rank).pid.load(), said->places[i])));
    }
  }
  return all;
}

// All have said where their arrays are, and made them; then, window by window, each sums its part and takes the others'
// once they are there, a window later; at the end all have taken all, so that a finished rank may write to its arrays.
template <typename T>
bool Ring::sum_in_place(const std::vector<Piece<T>>& pieces, const std::vector<double>& weights, const Call& call) {
  announce(pieces);
  stage(call);
  std::vector<std::vector<const T*>> arrays = announced<T>(pieces.size());
  ++chunk_;
  if (arrays.empty()) return false;
  for (const Piece<T>& piece : pieces) arrays[rank_].push_back(piece.replicas[0]);
  const auto total = static_cast<std::int64_t>(call.size / sizeof(T));
  const bool cached = static_cast<std::int64_t>(call.size) <= kCachedBytes;
  const std::int64_t room = cached ? static_cast<std::int64_t>(kWindowBytes / sizeof(T)) : total;
  for (std::int64_t begin = 0; begin < total + room; begin += room) {  // one window ahead of what is taken
    const bool more = begin < total;
    if (more) {
      sum_part(pieces, arrays, weights, begin, std::min(total, begin + room));
      publish(call);
    }
    if (begin == 0) continue;
    throw_if_failed();
    await_all(stage_ - (more ? 1 : 0), call);
    take_parts(pieces, arrays, begin - room, std::min(total, begin));
  }
  stage(call);
  num_in_place_.fetch_add(1, std::memory_order_relaxed);
  return true;
}

namespace {

// The elements of a window that rank `owner` sums: calls body(piece, first, count) for each piece.
template <typename T, typename Body>
void each_in_part(const std::vector<Piece<T>>& pieces, std::int64_t begin, std::int64_t end, std::uint32_t num_ranks,
                  std::uint32_t owner, const Body& body) {
  const std::int64_t line_elements = static_cast<std::int64_t>(kAlign / sizeof(T));
  const std::int64_t share = ((end - begin) / num_ranks / line_elements + 1) * line_elements;
  const std::int64_t low = std::min(end, begin + owner * share), high = std::min(end, low + share);
  each_piece(pieces, low, high, [&](const Piece<T>& piece, std::int64_t first, std::int64_t count, std::int64_t) {
    body(static_cast<std::size_t>(&piece - pieces.data()), first, count);
  });
}

}  // namespace

template <typename T>
void Ring::sum_part(const std::vector<Piece<T>>& pieces, const std::vector<std::vector<const T*>>& arrays,
                    const std::vector<double>& weights, std::int64_t begin, std::int64_t end) {
  std::vector<const T*> sources(num_ranks_);
  each_in_part(pieces, begin, end, num_ranks_, rank_, [&](std::size_t i, std::int64_t first, std::int64_t count) {
    for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) sources[rank] = arrays[rank][i] + first;
    weighted_sum(pieces[i].replicas[0] + first, sources.data(), weights.data(), num_ranks_, count);
  });
}

template <typename T>
void Ring::take_parts(const std::vector<Piece<T>>& pieces, const std::vector<std::vector<const T*>>& arrays,
                      std::int64_t begin, std::int64_t end) {
  for (std::uint32_t step = 1; step < num_ranks_; ++step) {  // not all from the same one at once
    const std::uint32_t owner = (rank_ + step) % num_ranks_;
    each_in_part(pieces, begin, end, num_ranks_, owner, [&](std::size_t i, std::int64_t first, std::int64_t count) {
      std::memcpy(pieces[i].replicas[0] + first, arrays[owner][i] + first, static_cast<std::size_t>(count) * sizeof(T));
    });
  }
}

template <typename T>
void Ring::all_reduce(const std::vector<Piece<T>>& pieces, const std::vector<double>& weights) {
  const std::lock_guard guard(busy_);
  std::int64_t total = 0;
  for (const Piece<T>& piece : pieces) total += piece.size;
  const Call call{Kind::kAllReduce, static_cast<std::uint64_t>(total) * sizeof(T)};
  if (total * static_cast<std::int64_t>(sizeof(T)) >= kLargeBytes && sum_in_place(pieces, weights, call)) return;
  const double weight = weights[rank_];
  const auto room = static_cast<std::int64_t>(slot_bytes_ / sizeof(T));
  if (num_ranks_ > 2 && total * static_cast<std::int64_t>(sizeof(T)) > kSmallBytes) {
    for (std::int64_t begin = 0; begin < total; begin += room) {
      const std::int64_t end = std::min(total, begin + room);
      fill(pieces, begin, end, weight);
      stage(call);
      sum_by_parts(pieces, begin, end, call);
      ++chunk_;
    }
    return;
  }
  for (std::int64_t begin = 0; begin < total + room; begin += room) {  // one chunk ahead of the sums
    throw_if_failed();
    const bool more = begin < total;
    if (more) {
      fill(pieces, begin, std::min(total, begin + room), weight);
      publish(call);
      ++chunk_;
    }
    if (begin == 0) continue;
    const std::uint32_t ahead = more ? 1 : 0;
    await_all(stage_ - ahead, call);
    sum_whole(pieces, begin - room, std::min(total, begin), chunk_ - 1 - ahead);
  }
}

template void Ring::all_reduce(const std::vector<Piece<float>>&, const std::vector<double>&);
template void Ring::all_reduce(const std::vector<Piece<double>>&, const std::vector<double>&);
template void Ring::all_reduce(const std::vector<Piece<std::int32_t>>&, const std::vector<double>&);
template void Ring::all_reduce(const std::vector<Piece<std::int64_t>>&, const std::vector<double>&);

void Ring::meet(const std::int64_t* mine, std::size_t count, std::int64_t* all) {
  if (count > kMostMet) throw RingError("a meeting exchanges at most 64 numbers");
  const std::lock_guard guard(busy_);
  const std::size_t size = count * sizeof(std::int64_t);
  std::memcpy(slot(rank_, chunk_), mine, size);
  stage(Call{Kind::kMeet, size});
  for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) std::memcpy(all + rank * count, slot(rank, chunk_), size);
  ++chunk_;
}

void Ring::gather(const Fill& fill, const std::vector<std::size_t>& sizes, char* all) {
  const std::lock_guard guard(busy_);
  const std::size_t most = *std::max_element(sizes.begin(), sizes.end());
  for (std::size_t begin = 0; begin < most; begin += slot_bytes_) {
    const std::size_t mine = std::min(sizes[rank_], begin + slot_bytes_);
    if (begin < mine) fill(slot(rank_, chunk_), begin, mine);
    stage(Call{Kind::kGather, most});
    std::size_t start = 0;
    for (std::uint32_t rank = 0; rank < num_ranks_; ++rank) {
      const std::size_t end = std::min(sizes[rank], begin + slot_bytes_);
      if (begin < end) std::memcpy(all + start + begin, slot(rank, chunk_), end - begin);
      start += sizes[rank];
    }
    ++chunk_;
  }
}

void Ring::broadcast(char* bytes, std::size_t size, std::uint32_t root) {
  const std::lock_guard guard(busy_);
  for (std::size_t begin = 0; begin < size; begin += slot_bytes_) {
    const std::size_t count = std::min(slot_bytes_, size - begin);
    if (rank_ == root) std::memcpy(slot(rank_, chunk_), bytes + begin, count);
    stage(Call{Kind::kBroadcast, size});
    if (rank_ != root) std::memcpy(bytes + begin, slot(root, chunk_), count);
    ++chunk_;
  }
}

}  // namespace penstock::ring
