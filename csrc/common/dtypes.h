// The allowed (gradient, accumulator) dtypes, and the way from their run-time number to C++ types.
// Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>

#include "functors.h"

namespace fusedacc {

enum class Dtype : int32_t { kFloat32, kBFloat16, kFloat16, kFloat64, kStochasticBFloat16, kOther };

// What it is called outside, where a dtype says nothing of how sums are rounded to it.
constexpr Dtype stored_as(Dtype dtype) {
  return dtype == Dtype::kStochasticBFloat16 ? Dtype::kBFloat16 : dtype;
}

constexpr int64_t element_size(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

constexpr const char* dtype_name(Dtype dtype) {
  constexpr const char* names[] = {
      "float32", "bfloat16", "float16", "float64", "bfloat16, rounded stochastically", "another dtype"};
  return names[static_cast<int32_t>(dtype)];
}

struct DtypePair {
  Dtype gradient, accumulator;
};

constexpr DtypePair kPairs[] = {
    {Dtype::kFloat32, Dtype::kFloat32},
    {Dtype::kBFloat16, Dtype::kFloat32},
    {Dtype::kFloat16, Dtype::kFloat32},
    {Dtype::kFloat64, Dtype::kFloat64},
    {Dtype::kBFloat16, Dtype::kBFloat16},
    {Dtype::kFloat16, Dtype::kFloat16},
    {Dtype::kFloat32, Dtype::kBFloat16},
    {Dtype::kFloat32, Dtype::kFloat16},
    {Dtype::kBFloat16, Dtype::kStochasticBFloat16},
    {Dtype::kFloat32, Dtype::kStochasticBFloat16},
};
constexpr int32_t kPairCount = sizeof(kPairs) / sizeof(kPairs[0]);
constexpr const char* kAllowedPairs =
    "float32, bfloat16 or float16 into float32; float64, bfloat16 and float16 into their own; "
    "float32 into bfloat16 and float16";

// The index in kPairs, or -1.
constexpr int32_t find_pair(Dtype gradient, Dtype accumulator) {
  for (int32_t i = 0; i < kPairCount; ++i) {
    if (kPairs[i].gradient == gradient && kPairs[i].accumulator == accumulator) return i;
  }
  return -1;
}

// The pair that adds like this one and rounds stochastically, or -1.
constexpr int32_t stochastic(int32_t pair) {
  if (pair < 0 || kPairs[pair].accumulator != Dtype::kBFloat16) return -1;
  return find_pair(kPairs[pair].gradient, Dtype::kStochasticBFloat16);
}

template <Dtype dtype>
using ElementOf = std::tuple_element_t<static_cast<size_t>(dtype),
                                       std::tuple<float, BFloat16, Float16, double, StochasticBFloat16>>;
template <int32_t pair>
using GradientOf = ElementOf<kPairs[pair].gradient>;
template <int32_t pair>
using AccumulatorOf = ElementOf<kPairs[pair].accumulator>;

}  // namespace fusedacc
