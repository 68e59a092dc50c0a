// The state of an accumulation window that decides how a backward pass is handled.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "number.h"

namespace fusedacc::autograd {

// Python's `WindowCounts` extends this class, and says what the fields mean.
struct WindowState {
  int64_t micro_step = 0;
  int64_t usual_backwards = 0;
  bool has_updated = false;
  bool ignoring = false;
  bool in_context = false;
  bool unsynchronised = false;
  bool withheld = false;
  std::optional<std::string> tainted;
  Number sum_scale;
  // Of the current micro-batch.
  bool ran = false;
  int64_t num_backwards = 0;
  bool deferred = false;
  bool in_schedule = false;

  int64_t number = 0;  // of windows before this one

  void begin_window() {
    ++number;
    micro_step = 0;
    in_context = false;
    unsynchronised = false;
    withheld = false;
    tainted.reset();
    sum_scale = Number();
    begin_micro_batch();
  }
  void begin_micro_batch() {
    ran = false;
    num_backwards = 0;
    deferred = false;
    in_schedule = false;
  }
  // Counts the current micro-batch, and begins the next.
  void count_micro_batch() {
    ++micro_step;
    usual_backwards = num_backwards;
    begin_micro_batch();
  }
  void note_interruption() { tainted = "an exception has interrupted a backward"; }
};

}  // namespace fusedacc::autograd
