// Runs the arithmetic of one element on the host. Prints what fails and exits with 1.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "common/norm_functors.h"

#include "check.h"

using namespace fusedacc;

namespace {

// float16 and bfloat16: every value survives, and narrowing picks the nearest, ties to even.
template <typename T>
void check_narrowing(uint32_t infinity) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = widen(T{static_cast<uint16_t>(bits)});
    const uint32_t back = narrow<T, float>(value).bits;
    const bool is_nan = (bits & 0x7fff) > infinity;
    CHECK(is_nan == std::isnan(value));
    CHECK(is_nan ? (back & 0x7fff) > infinity : back == bits);
    if ((bits & 0x7fff) >= infinity) continue;
    // Towards the next larger magnitude: below, at and above the middle. Beyond the largest value stands
    // infinity, as far away as if one more value stood there.
    const auto value_of = [](uint32_t b) { return static_cast<double>(widen(T{static_cast<uint16_t>(b)})); };
    const bool largest = (bits & 0x7fff) + 1 == infinity;
    const double next = largest ? 2 * value_of(bits) - value_of(bits - 1) : value_of(bits + 1);
    const float middle = static_cast<float>((value_of(bits) + next) / 2);
    CHECK((narrow<T, float>(middle).bits) == ((bits & 1) ? bits + 1 : bits));
    const float below = std::nextafter(middle, 0.0f);
    const float above = std::nextafter(middle, middle < 0 ? -INFINITY : INFINITY);
    CHECK((narrow<T, float>(below).bits) == bits);
    CHECK((narrow<T, float>(above).bits) == bits + 1);
  }
  CHECK((narrow<T, float>(INFINITY).bits) == infinity);
  CHECK((narrow<T, float>(3e38f).bits) <= infinity);
  CHECK(((narrow<T, float>(-NAN).bits) & 0x7fff) > infinity);
}

// What stands in for a missing instruction rounds as that would, from subnormals to what overflows.
void check_multiply_add() {
  for (int round = 0; round < 500000; ++round) {
    uint32_t bits[3];
    for (uint32_t& word : bits) word = static_cast<uint32_t>(generator());
    // Every second time of exponents that meet, and every fourth of few digits: sums halfway between two.
    const uint32_t exponent = static_cast<uint32_t>(generator() % 200);
    for (uint32_t& word : bits) {
      if (round % 2) word = (word & 0x807fffff) | (exponent + static_cast<uint32_t>(generator() % 28)) << 23;
      if (round % 4 == 3) word &= 0xfffff000;
    }
    const float a = bits_as<float>(bits[0]), b = bits_as<float>(bits[1]), c = bits_as<float>(bits[2]);
    const float wanted = std::fma(a, b, c), found = multiply_add_by_doubles(a, b, c);
    CHECK(std::isnan(wanted) ? std::isnan(found) : bits_as<uint32_t>(wanted) == bits_as<uint32_t>(found));
  }
}

// Of all random bits, as many round away from zero as are cut off.
void check_stochastic_narrowing() {
  for (int32_t round = 0; round < 40; ++round) {
    const uint32_t bits = static_cast<uint32_t>(generator()) & (round % 8 ? ~0u : 0xffff0000u);
    const float value = bits_as<float>(bits);
    if (!(std::fabs(value) < 3.38e38f)) continue;
    uint32_t away = 0;
    for (uint32_t noise = 0; noise < 0x10000; ++noise) {
      const uint32_t found = narrow<StochasticBFloat16, float>(value, noise).bits;
      CHECK(found == bits >> 16 || found == (bits >> 16) + 1);
      away += found != bits >> 16;
    }
    CHECK(away == (bits & 0xffff));
  }
  const auto most = [](float value) { return widen(narrow<StochasticBFloat16, float>(value, 0xffff)); };
  CHECK(most(3.4e38f) < INFINITY && most(-3.4e38f) > -INFINITY && most(-INFINITY) == -INFINITY);
  CHECK(std::isnan(most(NAN)) && std::isnan(most(bits_as<float>(0x7f800001))));
}

// A sum that waits for its multiplication has the bits of one that was multiplied in a pass of its own, and a
// beta of 1 changes nothing.
template <typename T>
void check_beta() {
  using Functor = ScaleAccumulate<T, T>;
  for (int round = 0; round < 10000; ++round) {
    const double beta = 1.0 / static_cast<double>(1 + random_below(1000)), scale = 0.3;
    const T raw = static_cast<T>(random_below(2000000) - 1000000) / 777;
    const T fresh = static_cast<T>(random_below(2000000) - 1000000) / 999;
    const T scaled = Functor({beta, 0}).overwrite(raw);
    const T want = Functor({scale, 1}).add(fresh, scaled);
    CHECK(same_bits(Functor({scale, beta}).add(fresh, raw), want));
    CHECK(same_bits(want, fused_multiply_add(static_cast<T>(scale), fresh, scaled)));
  }
}

// A norm of numbers whose squares leave the range of their dtype, and of what is not finite.
template <NormKind kind, typename T>
void check_norms(const std::vector<double>& magnitudes) {
  const auto norm_over = [](const std::vector<T>& values) {
    const auto reduce = [&](auto functor) {
      typename decltype(functor)::State state = 0;
      for (const T value : values) state = functor.add(state, value);
      return state;
    };
    return norm_of<kind, T>(reduce);
  };
  for (const double magnitude : magnitudes) {
    const T value = static_cast<T>(magnitude);
    const double wanted = static_cast<double>(value) * (kind == NormKind::kTwo ? 5 : 4);
    CHECK(std::fabs(norm_over({3 * value, 0, -4 * value}) - wanted) <= wanted * 0x1p-20);
    CHECK(norm_over({value, -INFINITY, value}) == INFINITY && std::isnan(norm_over({value, NAN, INFINITY})));
  }
  CHECK(norm_over({}) == 0 && norm_over({0, 0}) == 0);
}

}  // namespace

int main() {
  check_narrowing<Float16>(0x7c00);
  check_narrowing<BFloat16>(0x7f80);
  check_stochastic_narrowing();
  check_multiply_add();
  check_beta<float>();
  check_beta<double>();
  check_norms<NormKind::kTwo, float>({1, 1e-30, 1e-19, 1e19, 1e30});
  check_norms<NormKind::kTwo, double>({1, 1e-290, 1e290});
  check_norms<NormKind::kInfinity, float>({1, 1e-30, 1e30});
  std::printf("rounded once\n");
  return 0;
}
