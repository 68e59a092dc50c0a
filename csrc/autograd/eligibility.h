// Who takes a gradient: the cases that a hook can meet, as fusedacc/autograd/eligibility.py has them.
#pragma once

#include <array>

namespace fusedacc::autograd {

enum class Case { kFrozen, kPostAccumulateHook, kAbsent, kNotPlain, kOdd, kOtherLane, kOrdinary };

inline constexpr std::array kCaseNames{"frozen", "post_accumulate_hook", "absent",  "not_plain",
                                       "odd",    "other_lane",           "ordinary"};

}  // namespace fusedacc::autograd
