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

// The type of one element, in the order of Dtype. kOther has none.
using Elements = std::tuple<float, BFloat16, Float16, double, StochasticBFloat16>;
static_assert(std::tuple_size_v<Elements> == static_cast<size_t>(Dtype::kOther),
              "Elements needs one type for each Dtype before kOther");

// How many dtypes a tensor of ours can have: all before kStochasticBFloat16, which is stored as kBFloat16.
constexpr int32_t kDtypeCount = static_cast<int32_t>(Dtype::kStochasticBFloat16);

template <typename>
struct SizesOf;
template <typename... Element>
struct SizesOf<std::tuple<Element...>> {
  static constexpr int64_t values[] = {sizeof(Element)...};
};

// In bytes. dtype: any but kOther.
constexpr int64_t element_size(Dtype dtype) { return SizesOf<Elements>::values[static_cast<int32_t>(dtype)]; }

constexpr const char* dtype_name(Dtype dtype) {
  constexpr const char* names[] = {
      "float32", "bfloat16", "float16", "float64", "bfloat16, rounded stochastically", "another dtype"};
  static_assert(sizeof(names) / sizeof(*names) == static_cast<size_t>(Dtype::kOther) + 1,
                "each Dtype needs a name");
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
using ElementOf = std::tuple_element_t<static_cast<size_t>(dtype), Elements>;
template <int32_t pair>
using GradientOf = ElementOf<kPairs[pair].gradient>;
template <int32_t pair>
using AccumulatorOf = ElementOf<kPairs[pair].accumulator>;

}  // namespace fusedacc
