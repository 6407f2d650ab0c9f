#include "table/table.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "ops/initial.h"
#include "table/length.h"

namespace penstock::table {
namespace {

// Ids that a pull reads under one holding of all locks: enough that 2 x 64 lock operations do not count, few enough
// that a push waits for some 50 us at most.
constexpr uint64_t kPart = 2048;

constexpr auto no_operand = [](uint64_t) { return nullptr; };

}  // namespace

struct Table::AllShared {
  explicit AllShared(const std::vector<std::unique_ptr<Shard>>& shards) : shards_(shards) {
    for (const auto& shard : shards_) shard->lock.lock_shared();
  }
  AllShared(const AllShared&) = delete;
  AllShared& operator=(const AllShared&) = delete;
  ~AllShared() {
    for (const auto& shard : shards_) shard->lock.unlock_shared();
  }

 private:
  const std::vector<std::unique_ptr<Shard>>& shards_;
};

Layout Table::layout_of(const Settings& settings) {
  if (settings.width == 0) throw std::invalid_argument("a table has rows of at least one value");
  return {settings.width + (settings.keeps_last_use ? 1 : 0), settings.width * settings.num_states};
}

Table::Table(Settings settings)
    : settings_(std::move(settings)), layout_(layout_of(settings_)), buckets_(0), pieces_(layout_.beside_bytes()) {
  stride_ = settings_.width * (1 + settings_.num_states);
  if (settings_.first_states.size() != settings_.num_states) {
    throw std::invalid_argument("a table needs one first value for each of its states");
  }
  if (settings_.admit_after > Sketch::kMost) throw std::invalid_argument("sightings are counted up to 255");
  while ((uint32_t{1} << shard_bits_) < settings_.num_shards) ++shard_bits_;
  if (settings_.num_shards != uint32_t{1} << shard_bits_ || shard_bits_ > 16) {
    throw std::invalid_argument("the number of shards is a power of two up to 65536");
  }
  for (uint32_t s = 0; s < settings_.num_shards; ++s) {
    shards_.push_back(std::make_unique<Shard>(buckets_, pieces_, layout_, shard_bits_, s));
    if (settings_.admit_after > 0) shards_.back()->sketch.emplace(settings_.sketch_bytes >> shard_bits_);
  }
}

void Table::sort(Batch& batch, const int64_t* ids, uint64_t count) const {
  const auto num_shards = static_cast<uint32_t>(shards_.size());
  batch.sort(
      ids, count, num_shards, [this](int64_t id) { return key_of(id); },
      [this](uint64_t key) { return shard_of(key); });
}

void Table::for_each_shard(uint32_t num_threads, Scratch& mine,
                           const std::function<void(uint32_t shard, Scratch& scratch)>& update) {
  std::atomic<uint32_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_lock;
  const auto num_shards = static_cast<uint32_t>(shards_.size());
  const auto take_shards = [&](Scratch& scratch) {
    for (uint32_t s = next.fetch_add(1); s < num_shards; s = next.fetch_add(1)) update(s, scratch);
  };
  const auto work = [&](Scratch* scratch) {
    try {
      scratch != nullptr ? take_shards(*scratch) : take_shards(*scratches_.lend());
    } catch (...) {
      next.store(num_shards);  // the others end too
      const std::lock_guard guard(failure_lock);
      if (!failure) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    others.reserve(num_threads);
    try {
      for (uint32_t t = 1; t < std::min(num_threads, num_shards); ++t) others.emplace_back([&] { work(nullptr); });
    } catch (const std::system_error&) {  // no more threads to be had: those there are do it
    }
    work(&mine);
  }
  if (failure) std::rethrow_exception(failure);
}

void Table::first_values(int64_t id, float* out) const {
  const FirstValues& first = settings_.first_values;
  const auto seed = static_cast<int64_t>(mix(settings_.seed ^ mix(static_cast<uint64_t>(id))));
  switch (first.kind) {
    case FirstValues::Kind::kConstant:
      std::fill_n(out, settings_.width, static_cast<float>(first.a));
      return;
    case FirstValues::Kind::kUniform:
      ops::fill(out, ops::Uniform{first.a, first.b}, seed, 0, settings_.width);
      return;
    case FirstValues::Kind::kNormal:
      ops::fill(out, ops::Normal{first.a, first.b}, seed, 0, settings_.width);
      return;
    case FirstValues::Kind::kTruncatedNormal:
      ops::fill(out, ops::TruncatedNormal{first.a, first.b}, seed, 0, settings_.width);
      return;
  }
}

float* Table::make_row(Shard& shard, uint64_t key) {
  const int64_t id = id_of(key);
  if (size_.fetch_add(1, std::memory_order_relaxed) >= settings_.capacity) {
    size_.fetch_sub(1, std::memory_order_relaxed);
    throw CapacityError("the table is full: it has " + std::to_string(settings_.capacity) +
                        " rows, one for each different id so far, and id " + std::to_string(id) + " is new");
  }
  const uint64_t number = shard.rows.take();
  float* row = shard.rows.values(number);
  first_values(id, row);
  float* states = layout_.states(row);
  for (uint32_t k = 0; k < settings_.num_states; ++k) {
    std::fill_n(states + settings_.width * k, settings_.width, settings_.first_states[k]);
  }
  shard.index.insert(key, number);
  return row;
}

float* Table::row_of(Shard& shard, uint64_t key) {
  const uint64_t number = shard.index.find(key);
  return number == Index::kNone ? make_row(shard, key) : shard.rows.values(number);
}

void Table::note_use(float* row, uint32_t now) const {
  if (!settings_.keeps_last_use) return;
  // Pulls share the lock and may write the same word.
  std::atomic_ref<uint32_t>(*reinterpret_cast<uint32_t*>(row + settings_.width)).store(now, std::memory_order_relaxed);
}

void Table::copy_row(const float* row, float* out) const {
  std::memcpy(out, row, settings_.width * sizeof(float));
  std::memcpy(out + settings_.width, layout_.states(const_cast<float*>(row)), layout_.state_floats() * sizeof(float));
}

template <bool kStates, typename Copy>
uint64_t Table::read(const int64_t* ids, uint64_t count, uint32_t stride, Copy copy, float* out, bool create,
                     uint32_t now) {
  thread_local std::vector<uint64_t> missing;
  uint64_t num_missing = 0;
  const auto index_of = [&](uint64_t key) -> const Index& { return shards_[shard_of(key)]->index; };
  for (uint64_t first = 0; first < count; first += kPart) {
    const uint64_t part = std::min(kPart, count - first);
    missing.clear();
    {
      const AllShared held(shards_);
      const auto key_at = [&](uint64_t i) { return key_of(ids[first + i]); };
      walk_rows<kStates>(part, key_at, index_of, no_operand, [&](uint64_t i, float* row) {
        if (row == nullptr) {
          missing.push_back(first + i);
          return;
        }
        copy(row, out + (first + i) * stride);
        note_use(row, now);
      });
    }
    num_missing += missing.size();
    for (const uint64_t i : missing) {
      if (!create) {
        first_values(ids[i], out + i * stride);
        continue;
      }
      const uint64_t key = key_of(ids[i]);
      Shard& shard = *shards_[shard_of(key)];
      const std::lock_guard guard(shard.lock);
      float* row = row_of(shard, key);  // another thread, or a duplicate, may have made it since
      copy(row, out + i * stride);
      note_use(row, now);
    }
  }
  return num_missing;
}

void Table::pull(const int64_t* ids, uint64_t count, float* out, bool create, uint32_t now) {
  const bool makes = create && settings_.admit_after == 0;
  pulled_.fetch_add(count, std::memory_order_relaxed);  // before those that are absent: never fewer
  with_length(settings_.width, [&](auto length) {
    const auto copy = [=](const float* row, float* to) { std::memcpy(to, row, length * sizeof(float)); };
    absent_.fetch_add(read<false>(ids, count, length, copy, out, makes, now), std::memory_order_release);
  });
}

void Table::note_push(const int64_t* ids, uint64_t count) {
  const auto scratch = scratches_.lend();
  sort(scratch->batch, ids, count);
  pushed_.fetch_add(count, std::memory_order_relaxed);
  hot_.push(scratch->batch.keys.data(), count);
}

HotKeys::Found Table::hot(std::size_t most) const {
  HotKeys::Found found = hot_.top(most);
  for (HotKeys::Hot& one : found.hot) one.key = static_cast<uint64_t>(id_of(one.key));
  return found;
}

void Table::gather(const int64_t* ids, uint64_t count, float* out, uint32_t now) {
  read<true>(ids, count, stride_, [this](const float* row, float* to) { copy_row(row, to); }, out, true, now);
}

float* Table::admitted_row(Shard& shard, uint64_t key) {
  if (shard.sketch && shard.sketch->seen(key) < settings_.admit_after) return nullptr;
  return make_row(shard, key);
}

void Table::scatter(const int64_t* ids, uint64_t count, const float* rows, uint32_t now) {
  const auto scratch = scratches_.lend();
  Batch& batch = scratch->batch;
  sort(batch, ids, count);
  for (uint32_t s = 0; s < shards_.size(); ++s) {
    const uint64_t begin = batch.starts[s], length = batch.starts[s + 1] - begin;
    if (length == 0) continue;
    const std::lock_guard guard(shards_[s]->lock);
    const auto key_at = [&](uint64_t i) { return batch.keys[begin + i]; };
    const auto index_of = [&](uint64_t) -> const Index& { return shards_[s]->index; };
    walk_rows<true>(length, key_at, index_of, no_operand, [&](uint64_t i, float* row) { batch.rows[begin + i] = row; });
    for (uint64_t i = begin; i < begin + length; ++i) {
      float* row = batch.rows[i] == nullptr ? row_of(*shards_[s], batch.keys[i]) : batch.rows[i];
      const float* from = rows + uint64_t{batch.order[i]} * stride_;
      std::memcpy(row, from, settings_.width * sizeof(float));
      std::memcpy(layout_.states(row), from + settings_.width, layout_.state_floats() * sizeof(float));
      note_use(row, now);
    }
  }
}

void Table::admit(const int64_t* ids, uint64_t count, bool* out) {
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t key = key_of(ids[i]);
    Shard& shard = *shards_[shard_of(key)];
    const std::lock_guard guard(shard.lock);
    out[i] = !shard.sketch || shard.index.find(key) != Index::kNone || shard.sketch->seen(key) >= settings_.admit_after;
  }
}

// keys = of those ids that have no row, in the order of the ids.
void Table::find_missing(const int64_t* ids, uint64_t count, std::vector<uint64_t>& keys) const {
  const auto index_of = [&](uint64_t key) -> const Index& { return shards_[shard_of(key)]->index; };
  for (uint64_t first = 0; first < count; first += kPart) {
    const AllShared held(shards_);
    const auto key_at = [&](uint64_t i) { return key_of(ids[first + i]); };
    walk_rows<false>(std::min(kPart, count - first), key_at, index_of, no_operand, [&](uint64_t i, const float* row) {
      if (row == nullptr) keys.push_back(key_of(ids[first + i]));
    });
  }
}

uint64_t Table::rows_to_make(const int64_t* ids, uint64_t count) const {
  std::vector<uint64_t> missing;
  find_missing(ids, count, missing);
  std::unordered_set<uint64_t> met;
  std::unordered_map<uint32_t, Sketch> sketches;  // copies: a sighting may also raise the counts of others
  uint64_t to_make = 0;
  for (const uint64_t key : missing) {
    if (!met.insert(key).second) continue;
    const uint32_t number = shard_of(key);
    if (settings_.admit_after > 0 && !sketches.contains(number)) {
      const std::shared_lock guard(shards_[number]->lock);
      sketches.emplace(number, *shards_[number]->sketch);
    }
    if (settings_.admit_after == 0 || sketches.at(number).seen(key) >= settings_.admit_after) ++to_make;
  }
  return to_make;
}

std::vector<uint8_t> Table::copy_counts() const {
  std::vector<uint8_t> out;
  if (settings_.admit_after == 0) return out;
  out.resize(shards_.size() * shards_.front()->sketch->num_copied());
  uint8_t* to = out.data();
  for (const auto& shard : shards_) {
    const std::shared_lock guard(shard->lock);
    shard->sketch->copy(to);
    to += shard->sketch->num_copied();
  }
  return out;
}

bool Table::restore_counts(const uint8_t* counts, uint64_t num_bytes) {
  if (settings_.admit_after == 0 || num_bytes != shards_.size() * shards_.front()->sketch->num_copied()) return false;
  for (const auto& shard : shards_) {
    const std::lock_guard guard(shard->lock);
    shard->sketch->restore(counts);
    counts += shard->sketch->num_copied();
  }
  return true;
}

uint64_t Table::expire(uint32_t oldest) {
  if (!settings_.keeps_last_use) throw std::invalid_argument("the table does not keep when its rows were last used");
  uint64_t dropped = 0;
  for (const auto& shard : shards_) {
    const std::lock_guard guard(shard->lock);
    std::vector<uint64_t> old;
    shard->index.each([&](uint64_t key, uint64_t number) {
      uint32_t used = 0;
      std::memcpy(&used, shard->rows.values(number) + settings_.width, sizeof used);
      if (used < oldest) old.push_back(key);
    });
    for (const uint64_t key : old) shard->rows.give_back(shard->index.erase(key));
    dropped += old.size();
  }
  size_.fetch_sub(dropped, std::memory_order_relaxed);
  return dropped;
}

void Table::copy_shard(uint32_t number, std::vector<int64_t>& ids, std::vector<float>& rows) const {
  const Shard& shard = *shards_.at(number);
  const std::shared_lock guard(shard.lock);
  ids.clear();
  ids.reserve(shard.index.size());
  rows.resize(shard.index.size() * stride_);
  shard.index.each([&](uint64_t key, uint64_t number) {
    copy_row(shard.rows.values(number), rows.data() + ids.size() * stride_);
    ids.push_back(id_of(key));
  });
}

uint64_t Table::index_bytes() const {
  uint64_t total = 0;
  for (const auto& shard : shards_) {
    const std::shared_lock guard(shard->lock);
    total += shard->index.num_bytes() + (shard->sketch ? shard->sketch->num_bytes() : 0);
  }
  return total;
}

uint64_t Table::row_bytes() const {
  uint64_t total = 0;
  for (const auto& shard : shards_) {
    const std::shared_lock guard(shard->lock);
    total += shard->rows.num_bytes();
  }
  return total;
}

}  // namespace penstock::table
