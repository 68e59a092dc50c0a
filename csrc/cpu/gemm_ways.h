// The ways to multiply, and which of them may be chosen for how many tokens. Torch-free.
#pragma once

#include <cstdint>

namespace fusedacc::cpu {

// As in fusedacc/kernels/constants.py, which says what the ways are.
enum class Way : int64_t { kWhole, kSplit, kRounded };
constexpr int64_t kTokenClasses[] = {16, 47, 100};
constexpr int kClasses = sizeof(kTokenClasses) / sizeof(*kTokenClasses) + 1;

constexpr int class_of(int64_t tokens) {
  int number = 0;
  while (number < kClasses - 1 && tokens > kTokenClasses[number]) ++number;
  return number;
}

}  // namespace fusedacc::cpu
