// What people write instead of a table: a std::unordered_map from id to a row on the heap, and a loop over a batch.
// And the ceiling of any table: rows of a plain array, gathered and updated by their number, each asked for in time.
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>

namespace {

struct Map {
  uint64_t width;
  std::unordered_map<int64_t, std::unique_ptr<float[]>> rows;
  float* row(int64_t id) {
    std::unique_ptr<float[]>& row = rows[id];
    if (!row) row = std::make_unique<float[]>(2 * width);  // values, then Adagrad's sums
    return row.get();
  }
};

constexpr uint64_t kAhead = 32;  // measured: beyond 24 nothing changes
constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t array_bytes(uint64_t rows, uint64_t width) {
  return (rows * width * sizeof(float) + kHugePage - 1) / kHugePage * kHugePage;
}

}  // namespace

extern "C" {

void* map_new(uint64_t width) {
  return new Map{width, {}};
}
void map_delete(void* map) {
  delete static_cast<Map*>(map);
}

void map_pull(void* map, const int64_t* ids, uint64_t count, float* out) {
  Map& table = *static_cast<Map*>(map);
  for (uint64_t i = 0; i < count; ++i)
    std::memcpy(out + i * table.width, table.row(ids[i]), table.width * sizeof(float));
}

void map_push_sgd(void* map, const int64_t* ids, uint64_t count, const float* gradients, float lr) {
  Map& table = *static_cast<Map*>(map);
  for (uint64_t i = 0; i < count; ++i) {
    float* row = table.row(ids[i]);
    for (uint64_t k = 0; k < table.width; ++k) row[k] -= lr * gradients[i * table.width + k];
  }
}

void map_push_adagrad(void* map, const int64_t* ids, uint64_t count, const float* gradients, float lr) {
  Map& table = *static_cast<Map*>(map);
  for (uint64_t i = 0; i < count; ++i) {
    float* row = table.row(ids[i]);
    float* sum = row + table.width;
    for (uint64_t k = 0; k < table.width; ++k) {
      const float gradient = gradients[i * table.width + k];
      sum[k] += gradient * gradient;
      row[k] -= lr * gradient / (std::sqrt(sum[k]) + 1e-6F);
    }
  }
}

// `rows` rows of `width` floats on huge pages, all written; nullptr if memory is short.  Straight from the system, as
// our table's: malloc hands out memory that was used before, on small pages.
float* array_new(uint64_t rows, uint64_t width) {
  const std::size_t size = array_bytes(rows, width);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  madvise(memory, size, MADV_HUGEPAGE);
  std::memset(memory, 0, size);
  return static_cast<float*>(memory);
}
void array_delete(float* array, uint64_t rows, uint64_t width) {
  munmap(array, array_bytes(rows, width));
}

void array_gather(const float* array, const int64_t* numbers, uint64_t count, uint64_t width, float* out) {
  for (uint64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const float* later = array + numbers[i + kAhead] * width;
      for (uint64_t k = 0; k < width; k += 16) __builtin_prefetch(later + k);
    }
    if (width == 16) {
      std::memcpy(out + i * 16, array + numbers[i] * 16, 64);
    } else {
      std::memcpy(out + i * width, array + numbers[i] * width, width * sizeof(float));
    }
  }
}

// Reads of `count` lines by number, each asked for in time and used for a sum: the rate of memory alone.
uint64_t array_lines(const float* array, const int64_t* lines, uint64_t count) {
  constexpr uint64_t kLineFloats = 16, kLinesAhead = 64;  // measured: 24 to 48 are slower
  uint64_t sum = 0;
  for (uint64_t i = 0; i < count; ++i) {
    if (i + kLinesAhead < count) __builtin_prefetch(array + lines[i + kLinesAhead] * kLineFloats);
    uint64_t word = 0;
    std::memcpy(&word, array + lines[i] * kLineFloats, sizeof word);
    sum += word;
  }
  return sum;
}
}
