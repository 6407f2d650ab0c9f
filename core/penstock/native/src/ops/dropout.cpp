#include "ops/dropout.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/target.h"

namespace penstock::ops {
namespace {

constexpr int64_t kGroup = 4 * kPhiloxLanes;  // positions that one philox_block serves
constexpr int64_t kScratch = 8 * kGroup;

// The mask of the positions of one group.
inline __attribute__((always_inline)) void group_mask(const DropoutRule& rule, int64_t group, uint8_t* mask) {
  uint32_t words[4][kPhiloxLanes];
  philox_block(rule.stream, static_cast<uint64_t>(group) * kPhiloxLanes, words);
  const auto threshold = static_cast<uint32_t>(rule.threshold);
  for (int w = 0; w < 4; ++w) {
    for (int lane = 0; lane < kPhiloxLanes; ++lane) {
      mask[w * kPhiloxLanes + lane] = words[w][lane] >= threshold ? 1 : 0;
    }
  }
}

// The mask of positions [first, first + count), of which the first and the last group may be needed in part only.
inline __attribute__((always_inline)) void range_mask(const DropoutRule& rule, int64_t first, int64_t count,
                                                      uint8_t* mask) {
  const int64_t end = first + count;
  uint8_t part[kGroup];
  for (int64_t group = first / kGroup; group * kGroup < end; ++group) {
    const int64_t from = std::max(first, group * kGroup);
    const int64_t to = std::min(end, (group + 1) * kGroup);
    if (to - from == kGroup) {
      group_mask(rule, group, mask + (from - first));
    } else {
      group_mask(rule, group, part);
      std::memcpy(mask + (from - first), part + (from - group * kGroup), static_cast<size_t>(to - from));
    }
  }
}

// One batch coordinate is a run of outer * inner positions, which lie in memory as `outer` pieces, a batch apart.
inline __attribute__((always_inline)) void scatter_run(const DropoutRule& rule, const DropoutLayout& layout,
                                                       uint8_t* mask, int64_t batch) {
  const int64_t run = layout.outer * layout.inner;
  const int64_t first = (layout.first_batch + batch) * run;
  uint8_t scratch[kScratch];
  for (int64_t at = 0; at < run; at += kScratch) {
    const int64_t count = std::min(kScratch, run - at);
    range_mask(rule, first + at, count, scratch);
    int64_t outer = at / layout.inner;
    int64_t inner = at % layout.inner;
    for (int64_t done = 0; done < count; ++outer, inner = 0) {
      const int64_t piece = std::min(count - done, layout.inner - inner);
      uint8_t* to = mask + (outer * layout.batch + batch) * layout.inner + inner;
      if (piece == 1) {  // a call of memcpy for every byte would cost more than the bits
        *to = scratch[done];
      } else {
        std::memcpy(to, scratch + done, static_cast<size_t>(piece));
      }
      done += piece;
    }
  }
}

PENSTOCK_BODY void apply_body(T* __restrict y, const T* __restrict x, const uint8_t* __restrict mask, double scale,
                              int64_t begin, int64_t end) {
  const T factor = static_cast<T>(scale);
  for (int64_t i = begin; i < end; ++i) {
    const T scaled = x[i] * factor;
    y[i] = mask[i] != 0 ? scaled : T(0);
  }
}

}  // namespace

DropoutRule dropout_rule(const PhiloxStream& stream, double p) {
  return {stream, static_cast<uint64_t>(std::llround(p * 4294967296.0))};
}

PENSTOCK_CLONES void dropout_mask(const DropoutRule& rule, const DropoutLayout& layout, uint8_t* mask, int64_t begin,
                                  int64_t end) {
  if (rule.threshold > 0xFFFFFFFFULL) {
    const int64_t span = (end - begin) * layout.inner;
    for (int64_t outer = 0; outer < layout.outer; ++outer) {
      std::memset(mask + (outer * layout.batch + begin) * layout.inner, 0, static_cast<size_t>(span));
    }
  } else if (layout.outer == 1) {
    range_mask(rule, (layout.first_batch + begin) * layout.inner, (end - begin) * layout.inner,
               mask + begin * layout.inner);
  } else {
    for (int64_t batch = begin; batch < end; ++batch) {
      scatter_run(rule, layout, mask, batch);
    }
  }
}

PENSTOCK_CLONES void apply_mask(float* y, const float* x, const uint8_t* mask, double scale, int64_t begin,
                                int64_t end) {
  apply_body<float>(y, x, mask, scale, begin, end);
}
PENSTOCK_CLONES void apply_mask(double* y, const double* x, const uint8_t* mask, double scale, int64_t begin,
                                int64_t end) {
  apply_body<double>(y, x, mask, scale, begin, end);
}

}  // namespace penstock::ops
