// The dtypes, the allowed (gradient, accumulator) pairs, and the conversion from their run-time numbers to
// C++ types. All other files use these; tests compare them with fusedacc/kernels/dtypes.py. Torch-free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "functors.h"

namespace fusedacc {

// A row per dtype: ROW(name in Python, enumerator, type of one element, at::ScalarType's name). The order is
// part of prepared plans, and of the interface between csrc/autograd/ and libfusedacc.so.
#define FUSEDACC_DTYPES(ROW)                   \
  ROW(float32, kFloat32, float, Float)         \
  ROW(bfloat16, kBFloat16, BFloat16, BFloat16) \
  ROW(float16, kFloat16, Float16, Half)        \
  ROW(float64, kFloat64, double, Double)

enum class Dtype : int32_t {
#define FUSEDACC_ENUMERATOR(name, enumerator, ...) enumerator,
  FUSEDACC_DTYPES(FUSEDACC_ENUMERATOR)
#undef FUSEDACC_ENUMERATOR
  // An accumulator of bfloat16 that is rounded stochastically. Its number is out of the range of real dtypes,
  // so that no new dtype can take it.
  kStochasticBFloat16 = 64,
  kOther = 65,
};

// The dtype of the stored elements, without the kind of rounding.
constexpr Dtype stored_as(Dtype dtype) {
  return dtype == Dtype::kStochasticBFloat16 ? Dtype::kBFloat16 : dtype;
}

struct DtypeFacts {
  const char* name;
  int64_t size;  // of an element, in bytes
};
constexpr DtypeFacts kDtypes[] = {
#define FUSEDACC_FACTS(name, enumerator, Element, ...) {#name, sizeof(Element)},
    FUSEDACC_DTYPES(FUSEDACC_FACTS)
#undef FUSEDACC_FACTS
};
constexpr int32_t kDtypeCount = sizeof(kDtypes) / sizeof(*kDtypes);
static_assert(kDtypeCount < static_cast<int32_t>(Dtype::kStochasticBFloat16), "numbers must not meet");

// Element size in bytes. dtype: any but kOther.
constexpr int64_t element_size(Dtype dtype) { return kDtypes[static_cast<int32_t>(stored_as(dtype))].size; }

constexpr const char* dtype_name(Dtype dtype) {
  if (dtype == Dtype::kStochasticBFloat16) return "bfloat16, rounded stochastically";
  return dtype == Dtype::kOther ? "another dtype" : kDtypes[static_cast<int32_t>(dtype)].name;
}

// The type of one element; kOther has none.
template <Dtype dtype>
struct ElementFor;
#define FUSEDACC_ELEMENT(name, enumerator, Element, ...) \
  template <>                                            \
  struct ElementFor<Dtype::enumerator> {                 \
    using Type = Element;                                \
  };
FUSEDACC_DTYPES(FUSEDACC_ELEMENT)
FUSEDACC_ELEMENT(, kStochasticBFloat16, StochasticBFloat16)
#undef FUSEDACC_ELEMENT
template <Dtype dtype>
using ElementOf = typename ElementFor<dtype>::Type;

struct DtypePair {
  Dtype gradient, accumulator;
};

// Pairs that round to nearest come first.
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

// Returns how many pairs round to nearest: those of products and of rows.
constexpr int32_t count_nearest_pairs() {
  int32_t count = 0;
  while (count < kPairCount && kPairs[count].accumulator != Dtype::kStochasticBFloat16) ++count;
  return count;
}
constexpr int32_t kNearestPairCount = count_nearest_pairs();

// Returns the index in kPairs, or -1.
constexpr int32_t find_pair(Dtype gradient, Dtype accumulator) {
  for (int32_t i = 0; i < kPairCount; ++i) {
    if (kPairs[i].gradient == gradient && kPairs[i].accumulator == accumulator) return i;
  }
  return -1;
}

// Returns the stochastically rounding counterpart of a pair, or -1.
constexpr int32_t stochastic(int32_t pair) {
  if (pair < 0 || kPairs[pair].accumulator != Dtype::kBFloat16) return -1;
  return find_pair(kPairs[pair].gradient, Dtype::kStochasticBFloat16);
}

template <int32_t pair>
using GradientOf = ElementOf<kPairs[pair].gradient>;
template <int32_t pair>
using AccumulatorOf = ElementOf<kPairs[pair].accumulator>;

}  // namespace fusedacc
