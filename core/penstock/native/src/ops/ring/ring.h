// Exchange among the processes of one host, through memory that they share: all-reduce, all-gather, broadcast.
// Torch-free; waits on futexes, takes no lock that another process could die with.
//
// A *stage* is one publication of every rank: a rank writes its slot, counts its stage up, and waits until all have.
// Each message is cut into chunks that fit a slot, of which every rank has four, used by turns. Where every rank sums
// all by itself (two of them) it publishes a chunk before it waits for the one before: a rank that is late for a moment
// delays none. At the stage of chunk k a rank has read all chunks up to k - 2, so that chunk k + 2 may take the
// slot of k - 2 without a message.
//
// A large all-reduce whose arrays lie in shared memory on every rank (memory.h) needs no slots: ranks say where their
// arrays are, each sums its own part of them in place, and takes the other parts from where the others have summed
// them. That is three stages for any size, and no copy in and out.
//
// Invariants
//  * All ranks make the same calls in the same order. Each publication carries the call's kind and size, and a rank
//    that differs is an error that names it, in every process that sees it.
//  * Every rank ends a call with the same bits: sums are made in the order of the ranks.
//  * No call waits for a rank after `fail`: it throws what was given there, at the latest kPollNs later. A ring that
//  has
//    thrown is of no more use: ranks are at different stages.
//  * One call at a time (a second one waits for the first).
// A rank that dies holds nothing up but its own stage: `distributed/failure_detector.py` calls `fail`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops/ring/memory.h"

namespace penstock::ring {

class RingError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Some arrays of equal length, one for each replica of this process: their sum goes out, the result comes into each.
template <typename T>
struct Piece {
  std::vector<T*> replicas;
  std::int64_t size;
};

class Ring {
 public:
  // Maps the memory behind `descriptor` (which stays the caller's), of at least size_bytes(), zero-filled by its maker.
  // Throws RingError.
  Ring(int descriptor, std::uint32_t rank, std::uint32_t num_ranks, std::size_t slot_bytes);
  // In memory that is the caller's, of as many bytes and zero: ranks that are threads of one process, in a test.
  Ring(void* memory, std::uint32_t rank, std::uint32_t num_ranks, std::size_t slot_bytes);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  static std::size_t size_bytes(std::uint32_t num_ranks, std::size_t slot_bytes);

  // Every replica of every piece becomes the sum over ranks r of weights[r] * (sum over its replicas there).
  template <typename T>
  void all_reduce(const std::vector<Piece<T>>& pieces, const std::vector<double>& weights);
  // all[r * count + i] = what rank r gave as mine[i]. `count` of at most 64.
  void meet(const std::int64_t* mine, std::size_t count, std::int64_t* all);
  // Puts what the ranks give one after another into `all`; `sizes[r]` is the bytes of rank r, known to all.
  // `fill(to, begin, end)` writes bytes [begin, end) of this rank's part.
  using Fill = std::function<void(char* to, std::size_t begin, std::size_t end)>;
  void gather(const Fill& fill, const std::vector<std::size_t>& sizes, char* all);
  // Copies `bytes` of rank `root` to all.
  void broadcast(char* bytes, std::size_t size, std::uint32_t root);

  // Ends whatever waits, now and later, with this message. Any thread; the first message stays.
  void fail(const std::string& why);
  std::uint32_t rank() const noexcept { return rank_; }
  std::uint32_t num_ranks() const noexcept { return num_ranks_; }
  // All-reduces whose arrays lay in shared memory on every rank.
  std::uint64_t num_in_place() const noexcept { return num_in_place_.load(std::memory_order_relaxed); }

 private:
  struct Line;
  struct Places;
  enum class Kind : std::uint64_t { kAllReduce = 1, kMeet, kGather, kBroadcast };
  struct Call {
    Kind kind;
    std::uint64_t size;
  };

  Line& line(std::uint32_t rank) const noexcept;
  char* slot(std::uint32_t rank, std::uint32_t chunk) const noexcept;
  void stage(const Call& call);
  void publish(const Call& call);
  void await_all(std::uint32_t stage, const Call& call);
  void await(std::uint32_t rank, std::uint32_t stage, const Call& call);
  void check(std::uint32_t rank, std::uint32_t stage, const Call& call) const;
  void throw_if_failed() const;
  template <typename T>
  void fill(const std::vector<Piece<T>>& pieces, std::int64_t begin, std::int64_t end, double weight);
  template <typename T>
  void sum_whole(const std::vector<Piece<T>>& pieces, std::int64_t begin, std::int64_t end, std::uint32_t chunk);
  // False if some rank's arrays do not lie in shared memory; then nothing is done. All ranks find the same.
  template <typename T>
  bool sum_in_place(const std::vector<Piece<T>>& pieces, const std::vector<double>& weights, const Call& call);
  template <typename T>
  void sum_part(const std::vector<Piece<T>>& pieces, const std::vector<std::vector<const T*>>& arrays,
                const std::vector<double>& weights, std::int64_t begin, std::int64_t end);
  template <typename T>
  void take_parts(const std::vector<Piece<T>>& pieces, const std::vector<std::vector<const T*>>& arrays,
                  std::int64_t begin, std::int64_t end);
  template <typename T>
  void announce(const std::vector<Piece<T>>& pieces);
  template <typename T>
  std::vector<std::vector<const T*>> announced(std::size_t num_pieces);
  template <typename T>
  void sum_by_parts(const std::vector<Piece<T>>& pieces, std::int64_t begin, std::int64_t end, const Call& call);

  const std::uint32_t rank_, num_ranks_;
  const std::size_t slot_bytes_;
  bool is_mapped_ = false;  // by this ring
  char* base_ = nullptr;
  std::uint32_t stage_ = 0;
  std::uint32_t chunk_ = 0;
  Mappings mappings_;
  std::atomic<std::uint64_t> num_in_place_{0};
  std::mutex busy_;
  std::atomic<bool> failed_{false};
  mutable std::mutex why_lock_;
  std::string why_;
};

}  // namespace penstock::ring
