// CUDA graphs as tapes: while a capture runs, operations run as usual and are written down; at its end memory
// is put back as it was, because a capture runs nothing. A replay runs the tape.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "order.h"

namespace emulation {

using Tape = std::vector<std::function<void()>>;

bool is_recording();
// Whether a stream takes part in the capture: the one that began it, and those that have waited for it.
bool is_captured(StreamId stream);
void write_down(std::function<void()> operation);
// Report an operation on a stream that is no part of the capture, and remember that its stream has to join.
void check_captured(const Operation& operation);

void begin_capture(StreamId stream);
Tape* end_capture();
void replay(const Tape& tape, StreamId stream);

}  // namespace emulation
