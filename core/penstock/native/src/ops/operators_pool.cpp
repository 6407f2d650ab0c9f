#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "ops/checks.h"
#include "ops/operators.h"
#include "ops/operators_fused.h"
#include "ops/pool.h"

namespace penstock::ops {

using at::Tensor;

namespace {

void check_images(const Check& check, const char* name, const Tensor& images) {
  check.floating(name, images);
  check.dim(name, images, 4, "[n, c, h, w]");
}

}  // namespace

std::tuple<Tensor, Tensor> max_pool_2x2(const Tensor& x, bool relu) {
  const Check check("penstock.max_pool_2x2");
  check_images(check, "x", x);
  const int64_t height = x.size(2), width = x.size(3);
  TORCH_CHECK_VALUE(height % 2 == 0 && width % 2 == 0 && height > 0 && width > 0 && width <= kWidestPool, check.op(),
                    ": x has shape ", x.sizes(), "; expected an even height and an even width of at most ",
                    kWidestPool);
  const auto dense = x.expect_contiguous();
  Tensor y = at::empty({x.size(0), x.size(1), height / 2, width / 2}, x.options());
  Tensor places = at::empty(y.sizes(), x.options().dtype(at::kByte));
  with_floating(x, [&](auto type) {
    using T = decltype(type);
    const T* from = dense->const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    uint8_t* where = places.mutable_data_ptr<uint8_t>();
    at::parallel_for(0, x.numel() / (2 * width), grain_of_rows(2 * width), [&](int64_t begin, int64_t end) {
      const int64_t made = begin * width / 2;
      max_pool(from + begin * 2 * width, to + made, where + made, end - begin, width, relu);
    });
  });
  return {y, places};
}

Tensor max_pool_2x2_backward(const Tensor& grad, const Tensor& places) {
  const Check check("penstock.max_pool_2x2_backward");
  check_images(check, "grad", grad);
  check.dtype("places", places, at::kByte);
  TORCH_CHECK_VALUE(places.sizes() == grad.sizes() && grad.size(3) > 0, check.op(), ": places has shape ",
                    places.sizes(), "; expected ", grad.sizes(), ", the shape of grad, and a width above 0");
  const auto dense = grad.expect_contiguous();
  const auto where = places.expect_contiguous();
  const int64_t width = 2 * grad.size(3);
  Tensor x = at::empty({grad.size(0), grad.size(1), 2 * grad.size(2), width}, grad.options());
  with_floating(grad, [&](auto type) {
    using T = decltype(type);
    const T* from = dense->const_data_ptr<T>();
    T* to = x.mutable_data_ptr<T>();
    const uint8_t* place = where->const_data_ptr<uint8_t>();
    at::parallel_for(0, x.numel() / (2 * width), grain_of_rows(2 * width), [&](int64_t begin, int64_t end) {
      const int64_t read = begin * width / 2;
      max_pool_gradient(to + begin * 2 * width, from + read, place + read, end - begin, width);
    });
  });
  return x;
}

}  // namespace penstock::ops
