#include "ops/pool.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "ops/target.h"

namespace penstock::ops {
namespace {

template <typename T>
using PlaceOf = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

template <typename T, int kPoolLanes>
struct PoolVector {
  typedef T type __attribute__((vector_size(kPoolLanes * sizeof(T))));
};

// Wider ones are taken apart where the processor lacks them, and rows of images are short.
constexpr int kPoolLanes = 4;
constexpr int64_t kPooledAtOnce = 1024;  // elements of the scratch, which stays in the L1 cache, for short rows

// The larger of each two neighbours, and which one it is.
template <typename T, bool kRelu>
static inline __attribute__((always_inline)) void pool_row(const T* __restrict x, T* __restrict largest,
                                                           PlaceOf<T>* __restrict which, int64_t count) {
  PENSTOCK_INDEPENDENT
  for (int64_t j = 0; j < count; ++j) {
    T left = x[2 * j], right = x[2 * j + 1];
    if (kRelu) {
      left = left < T(0) ? T(0) : left;
      right = right < T(0) ? T(0) : right;
    }
    const bool second = (right > left) | (right != right);
    largest[j] = second ? right : left;
    which[j] = second ? 1 : 0;
  }
}

// The largest of the windows j to j + kPoolLanes, of what `pool_row` made of their two rows.
template <typename T, bool kRelu>
static inline __attribute__((always_inline)) void pool_lanes(const T* largest, const PlaceOf<T>* which, int64_t half,
                                                             int64_t j, T* y, uint8_t* places) {
  using Values = typename PoolVector<T, kPoolLanes>::type;
  using Places = typename PoolVector<PlaceOf<T>, kPoolLanes>::type;
  Values top, bottom;
  Places first, second;
  std::memcpy(&top, largest + j, sizeof top);
  std::memcpy(&bottom, largest + half + j, sizeof bottom);
  std::memcpy(&first, which + j, sizeof first);
  std::memcpy(&second, which + half + j, sizeof second);
  const Places below = (bottom > top) | (bottom != bottom);
  const Values found = below ? bottom : top;
  Places place = below ? second + 2 : first;
  if (kRelu) place = found <= Values{} ? Places{} + kNowhere : place;
  const auto narrow = __builtin_convertvector(place, typename PoolVector<uint8_t, kPoolLanes>::type);
  std::memcpy(y + j, &found, sizeof found);
  std::memcpy(places + j, &narrow, sizeof narrow);
}

template <typename T, bool kRelu>
static inline __attribute__((always_inline)) void pool_window(const T* largest, const PlaceOf<T>* which, int64_t half,
                                                              int64_t j, T* y, uint8_t* places) {
  const T top = largest[j], bottom = largest[half + j];
  const bool below = (bottom > top) | (bottom != bottom);
  y[j] = below ? bottom : top;
  const auto place = static_cast<uint8_t>(below ? which[half + j] + 2 : which[j]);
  places[j] = kRelu && y[j] <= T(0) ? kNowhere : place;
}

template <typename T, bool kRelu>
static inline __attribute__((always_inline)) void pool_pairs(const T* x, T* y, uint8_t* places, int64_t pairs,
                                                             int64_t width) {
  T largest[kWidestPool];
  PlaceOf<T> which[kWidestPool];
  const int64_t half = width / 2;
  const int64_t together = std::max<int64_t>(1, kPooledAtOnce / width);
  for (int64_t begin = 0; begin < pairs; begin += together) {
    const int64_t end = std::min(pairs, begin + together);
    pool_row<T, kRelu>(x + begin * 2 * width, largest, which, (end - begin) * width);
    for (int64_t pair = begin; pair < end; ++pair) {
      const T* rows = largest + (pair - begin) * width;
      const PlaceOf<T>* ones = which + (pair - begin) * width;
      int64_t j = 0;
      for (; j + kPoolLanes <= half; j += kPoolLanes)
        pool_lanes<T, kRelu>(rows, ones, half, j, y + pair * half, places + pair * half);
      if (j < half && half >= kPoolLanes) {  // again what the last lanes share with those before
        pool_lanes<T, kRelu>(rows, ones, half, half - kPoolLanes, y + pair * half, places + pair * half);
        j = half;
      }
      for (; j < half; ++j) pool_window<T, kRelu>(rows, ones, half, j, y + pair * half, places + pair * half);
    }
  }
}

PENSTOCK_BODY void pool_body(const T* x, T* y, uint8_t* places, int64_t pairs, int64_t width, bool relu) {
  if (relu) {
    pool_pairs<T, true>(x, y, places, pairs, width);
  } else {
    pool_pairs<T, false>(x, y, places, pairs, width);
  }
}

// The gradient where the place is this one, else zero, by its bits: a branch could not be predicted.
PENSTOCK_BODY T gradient_at(PlaceOf<T> bits, uint8_t place, uint8_t wanted) {
  return std::bit_cast<T>(bits & -static_cast<PlaceOf<T>>(place == wanted));
}

// Torch adds gradients to zeros: -0.0 becomes 0.0.
PENSTOCK_BODY void spread_row(T* __restrict x, const T* y, const uint8_t* places, int64_t half, uint8_t first) {
  PENSTOCK_INDEPENDENT
  for (int64_t j = 0; j < half; ++j) {
    const auto bits = std::bit_cast<PlaceOf<T>>(y[j] + T(0));
    x[2 * j] = gradient_at<T>(bits, places[j], first);
    x[2 * j + 1] = gradient_at<T>(bits, places[j], first + 1);
  }
}

// The same of kPoolLanes windows and both of their rows, by lanes.
PENSTOCK_BODY void spread_lanes(T* top, T* bottom, const T* y, const uint8_t* places) {
  using Values = typename PoolVector<T, kPoolLanes>::type;
  using Places = typename PoolVector<PlaceOf<T>, kPoolLanes>::type;
  Values gradient;
  typename PoolVector<uint8_t, kPoolLanes>::type narrow;
  std::memcpy(&gradient, y, sizeof gradient);
  std::memcpy(&narrow, places, sizeof narrow);
  const Values sum = gradient + Values{};
  const Places place = __builtin_convertvector(narrow, Places);
  Places bits;
  std::memcpy(&bits, &sum, sizeof bits);
  T* rows[2] = {top, bottom};
  for (int row = 0; row < 2; ++row) {
    const Places left = bits & (place == 2 * row), right = bits & (place == 2 * row + 1);
#if defined(__clang__)
    const Places low = __builtin_shufflevector(left, right, 0, 4, 1, 5);
    const Places high = __builtin_shufflevector(left, right, 2, 6, 3, 7);
#else
    const Places low = __builtin_shuffle(left, right, Places{0, 4, 1, 5});
    const Places high = __builtin_shuffle(left, right, Places{2, 6, 3, 7});
#endif
    std::memcpy(rows[row], &low, sizeof low);
    std::memcpy(rows[row] + kPoolLanes, &high, sizeof high);
  }
}

PENSTOCK_BODY void gradient_body(T* x, const T* y, const uint8_t* places, int64_t pairs, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    T* top = x + 2 * pair * width;
    const T* from = y + pair * half;
    const uint8_t* place = places + pair * half;
    int64_t j = 0;
    for (; j + kPoolLanes <= half; j += kPoolLanes) {
      spread_lanes<T>(top + 2 * j, top + width + 2 * j, from + j, place + j);
    }
    if (j == half) continue;
    spread_row<T>(top + 2 * j, from + j, place + j, half - j, 0);
    spread_row<T>(top + width + 2 * j, from + j, place + j, half - j, 2);
  }
}

}  // namespace

PENSTOCK_CLONES void max_pool(const float* x, float* y, uint8_t* places, int64_t pairs, int64_t width, bool relu) {
  pool_body<float>(x, y, places, pairs, width, relu);
}
PENSTOCK_CLONES void max_pool(const double* x, double* y, uint8_t* places, int64_t pairs, int64_t width, bool relu) {
  pool_body<double>(x, y, places, pairs, width, relu);
}
PENSTOCK_CLONES void max_pool_gradient(float* x, const float* y, const uint8_t* places, int64_t pairs, int64_t width) {
  gradient_body<float>(x, y, places, pairs, width);
}
PENSTOCK_CLONES void max_pool_gradient(double* x, const double* y, const uint8_t* places, int64_t pairs,
                                       int64_t width) {
  gradient_body<double>(x, y, places, pairs, width);
}

}  // namespace penstock::ops
