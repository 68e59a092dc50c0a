// CUDA graphs as recordings. During a capture, operations run as usual and are recorded on a tape. Because a
// real capture runs nothing, the end of the capture restores all memory. A replay runs the recorded
// operations.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "order.h"

namespace emulation {

using Tape = std::vector<std::function<void()>>;

bool is_recording();
// Return whether a stream is part of the capture: it began the capture, or has waited for a stream that is.
bool is_captured(StreamId stream);
void write_down(std::function<void()> operation);
// Report an operation on a stream that is not part of the capture, and note that its stream must join.
void check_captured(const Operation& operation);

void begin_capture(StreamId stream);
Tape* end_capture();
void replay(const Tape& tape, StreamId stream);

}  // namespace emulation
