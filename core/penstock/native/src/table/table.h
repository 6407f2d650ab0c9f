// A sparse table: int64 ids, any value, to rows of floats with the optimizer's state beside them.
//
// row            [width values | num_states x width state], as copied out; table/arena.h says where they lie
// Shards by hash, each with its own lock, index and arena.  Pulls share the locks of all shards for a piece of the
// batch and go through it in its own order, so that rows are written one after another.  Pushes sort the batch by
// shard, sum what belongs together and hold one shard's lock at a time, alone.
//
// The result of a push depends on the order of ids within it, never on threads or on the order of shards: duplicates
// are summed in order of appearance and each touched row is updated once.  First values of a row are a function of
// (seed, id) alone.  Batches of several threads interleave shard by shard.
//
// With `admit_after` = k, only the k-th push that has an id makes its row, and uses its gradient; the ones before are
// counted, approximately (table/sketch.h), and pulls read first values.
//
// Errors: CapacityError if more than `capacity` different ids would have rows; rows made before it stay.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "table/arena.h"
#include "table/batch.h"
#include "table/hot.h"
#include "table/index.h"
#include "table/key.h"
#include "table/lock.h"
#include "table/sketch.h"
#include "table/walk.h"

namespace penstock::table {

struct CapacityError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct FirstValues {
  enum class Kind : uint8_t { kConstant, kUniform, kNormal, kTruncatedNormal } kind = Kind::kConstant;
  double a = 0.0;  // the constant; low; mean
  double b = 0.0;  // high; standard deviation
};

struct Settings {
  uint32_t width = 0;
  uint32_t num_states = 0;
  std::vector<float> first_states{};  // one value a state
  FirstValues first_values{};
  uint64_t seed = 0;
  uint64_t capacity = 0;
  uint32_t num_shards = 64;  // a power of two
  bool keeps_last_use = false;
  uint32_t admit_after = 0;         // pushes until an id gets its row; 0: the first touch, be it a pull
  uint64_t sketch_bytes = 8 << 20;  // for counting them, all shards together
};

// What was asked of a table so far, in ids, duplicates included.
struct Traffic {
  uint64_t pulled = 0;
  uint64_t absent = 0;  // of the pulled: they had no row yet
  uint64_t pushed = 0;
};

class Table {
 public:
  explicit Table(Settings settings);

  // out[i] = values of ids[i].  A missing row is made (`create`, without admission), or read as it would begin.
  void pull(const int64_t* ids, uint64_t count, float* out, bool create, uint32_t now);

  // Sum the gradients of equal ids, then rule(row, gradient) once a row.  Missing rows are made, if they are admitted.
  // Shards are updated by up to `num_threads` threads, this one included: the result is the same.
  template <typename Rule>
  void push(const int64_t* ids, uint64_t count, const float* gradients, uint32_t now, const Rule& rule,
            uint32_t num_threads = 1);

  // Whole rows (values and states), made if missing; and back.  For rules that are not written in C++.
  void gather(const int64_t* ids, uint64_t count, float* out, uint32_t now);
  void scatter(const int64_t* ids, uint64_t count, const float* rows, uint32_t now);

  // For the same: note a push of ids, each once; out[i] says if ids[i] has a row or is to have one now.
  void admit(const int64_t* ids, uint64_t count, bool* out);

  // How many rows a push of these ids would make now.  Exact, if nothing else touches the table before that push.
  uint64_t rows_to_make(const int64_t* ids, uint64_t count) const;

  // What is known of ids without a row (admission by count), to go on from: bytes, as many for every table of the same
  // number of shards.  None without admission.  False for bytes of another table.
  std::vector<uint8_t> copy_counts() const;
  bool restore_counts(const uint8_t* counts, uint64_t num_bytes);

  // Count a push that was made by `gather` and `scatter`.
  void note_push(const int64_t* ids, uint64_t count);
  Traffic traffic() const {
    const uint64_t absent = absent_.load(std::memory_order_acquire);  // first: each of them was counted as pulled
    return {pulled_.load(std::memory_order_relaxed), absent, pushed_.load(std::memory_order_relaxed)};
  }
  // The ids that are pushed most; their keys are ids here.
  HotKeys::Found hot(std::size_t most) const;

  // Drop the rows last used before `oldest`; return how many.  Needs keeps_last_use.
  uint64_t expire(uint32_t oldest);

  // A shard as it is at this moment: its ids and whole rows.  Other shards go on meanwhile.
  void copy_shard(uint32_t shard, std::vector<int64_t>& ids, std::vector<float>& rows) const;

  uint64_t size() const { return size_.load(std::memory_order_relaxed); }
  uint64_t index_bytes() const;  // keys, and the sketch
  uint64_t row_bytes() const;
  // From the system: both, and pieces that wait for use.
  uint64_t held_bytes() const { return buckets_.held_bytes() + pieces_.held_bytes(); }
  uint32_t stride() const { return stride_; }  // floats of a whole row, the word of its last use not counted
  const Settings& settings() const { return settings_; }

 private:
  struct alignas(64) Shard {
    Shard(Pool& buckets, Pool& pieces, const Layout& layout, uint32_t shared_bits, uint64_t number)
        : index(buckets, shared_bits, number), rows(pieces, layout) {}
    Index index;
    Arena rows;
    std::optional<Sketch> sketch;
    mutable SharedLock lock;
  };
  struct AllShared;  // holds the locks of all shards

  static Layout layout_of(const Settings& settings);
  uint64_t key_of(int64_t id) const { return mix(static_cast<uint64_t>(id) ^ settings_.seed); }
  int64_t id_of(uint64_t key) const { return static_cast<int64_t>(unmix(key) ^ settings_.seed); }
  uint32_t shard_of(uint64_t key) const { return static_cast<uint32_t>((key >> 1) >> (63 - shard_bits_)); }
  void sort(Batch& batch, const int64_t* ids, uint64_t count) const;

  // use(i, values) for the keys key_at(0), key_at(1), …, each in index_of(key).  The caller holds the locks.
  template <bool kStates, typename KeyAt, typename IndexOf, typename OperandOf, typename Use>
  void walk_rows(uint64_t count, KeyAt key_at, IndexOf index_of, OperandOf operand_of, Use use) const;

  // copy(out + i * stride, row) for the row of each of ids[i]; `stride` floats of `out` are an id's.  Returns how many
  // had no row.
  template <bool kStates, typename Copy>
  uint64_t read(const int64_t* ids, uint64_t count, uint32_t stride, Copy copy, float* out, bool create, uint32_t now);
  void find_missing(const int64_t* ids, uint64_t count, std::vector<uint64_t>& keys) const;
  void note_use(float* row, uint32_t now) const;
  void copy_row(const float* row, float* out) const;  // whole

  // update(shard, scratch) once for each shard, by this thread with `mine` and by others with theirs.  Throws what the
  // first to fail threw, after all have ended.
  void for_each_shard(uint32_t num_threads, Scratch& mine,
                      const std::function<void(uint32_t shard, Scratch& scratch)>& update);
  template <typename Rule>
  void push_shard(Shard& shard, const Batch& batch, uint32_t number, const float* gradients, uint32_t now,
                  const Rule& rule, Scratch& scratch);

  // Make the row of a key that a push has; nullptr if it is not admitted yet.
  float* admitted_row(Shard& shard, uint64_t key);
  float* row_of(Shard& shard, uint64_t key);  // found or made
  float* make_row(Shard& shard, uint64_t key);
  void first_values(int64_t id, float* out) const;

  Settings settings_;
  uint32_t stride_;
  uint32_t shard_bits_ = 0;
  Layout layout_;
  Pool buckets_;  // of the indexes
  Pool pieces_;   // of rows
  std::vector<std::unique_ptr<Shard>> shards_;
  std::atomic<uint64_t> size_{0};
  std::atomic<uint64_t> pulled_{0}, absent_{0}, pushed_{0};
  HotKeys hot_;
  Scratches scratches_;
};

// What a walk over keys of one shard, or of all, needs (table/walk.h).
template <bool kStates, typename KeyAt, typename IndexOf, typename OperandOf>
struct Sought {
  KeyAt key;
  IndexOf index;
  OperandOf operand;  // operand(i): what the use of a row reads besides, nullptr for nothing
  const Layout& layout;
  Regions regions;
  uint32_t value_floats;

  float* row(uint64_t number) const { return layout.values(regions, number); }
  [[gnu::always_inline]] void prefetch(float* values) const {
    prefetch_floats(values, value_floats);
    if constexpr (kStates) prefetch_floats(layout.states(values), layout.state_floats());
  }
  [[gnu::always_inline]] void prefetch_operand(uint64_t i) const {
    if constexpr (!std::is_null_pointer_v<decltype(operand(i))>) prefetch_floats(operand(i), value_floats);
  }
};

template <bool kStates, typename KeyAt, typename IndexOf, typename OperandOf, typename Use>
void Table::walk_rows(uint64_t count, KeyAt key_at, IndexOf index_of, OperandOf operand_of, Use use) const {
  const Sought<kStates, KeyAt, IndexOf, OperandOf> sought{key_at,  index_of,          operand_of,
                                                          layout_, pieces_.regions(), settings_.width};
  constexpr bool kOperands = !std::is_null_pointer_v<decltype(operand_of(uint64_t{0}))>;
  walk<kOperands ? kBlockWithOperands : kPlainBlock>(sought, buckets_.regions(), count, use);
}

template <typename Rule>
void Table::push(const int64_t* ids, uint64_t count, const float* gradients, uint32_t now, const Rule& rule,
                 uint32_t num_threads) {
  const auto scratch = scratches_.lend();
  sort(scratch->batch, ids, count);
  pushed_.fetch_add(count, std::memory_order_relaxed);
  hot_.push(scratch->batch.keys.data(), count);
  for_each_shard(num_threads, *scratch, [&](uint32_t shard, Scratch& own) {
    push_shard(*shards_[shard], scratch->batch, shard, gradients, now, rule, own);
  });
}

template <typename Rule>
void Table::push_shard(Shard& shard, const Batch& batch, uint32_t number, const float* gradients, uint32_t now,
                       const Rule& rule, Scratch& scratch) {
  if (batch.starts[number] == batch.starts[number + 1]) return;
  auto& [unused, merged, missing] = scratch;
  merged.merge(batch, batch.starts[number], batch.starts[number + 1], gradients, settings_.width);
  missing.clear();
  const auto key_at = [&](uint64_t i) { return merged.key(i); };
  const auto gradient_of = [&](uint64_t i) { return merged.gradient(i); };
  const auto index_of = [&](uint64_t) -> const Index& { return shard.index; };
  const auto update = [&](uint64_t i, float* row) {
    rule(row, layout_.states(row), merged.gradient(i));
    note_use(row, now);
  };
  const std::lock_guard guard(shard.lock);
  walk_rows<Rule::kHasStates>(merged.size(), key_at, index_of, gradient_of, [&](uint64_t i, float* row) {
    if (row == nullptr) {
      missing.push_back(i);
    } else {
      update(i, row);
    }
  });
  for (const uint64_t i : missing) {
    float* row = admitted_row(shard, merged.key(i));
    if (row != nullptr) update(i, row);
  }
}

}  // namespace penstock::table
