#include "graph.h"

#include <exception>
#include <map>
#include <utility>

#include "memory.h"

namespace emulation {
namespace {

bool recording = false;
StreamId origin = 0;  // the stream that began the capture
uint64_t began = 0;   // the time of that stream when the capture began
Tape tape;
std::map<StreamId, uint64_t> last_captured;  // for each stream, the time of its last captured operation

}  // namespace

bool is_recording() { return recording; }

bool is_captured(StreamId stream) {
  if (!recording) return false;
  if (stream == origin) return true;
  const Clock& clock = clock_of(stream);
  const auto found = clock.find(origin);
  return found != clock.end() && found->second >= began;
}

void write_down(std::function<void()> operation) { tape.push_back(std::move(operation)); }

void check_captured(const Operation& operation) {
  if (!recording) return;
  if (!is_captured(operation.stream)) {
    report("CAPTURE: " + operation.name + " on stream " + std::to_string(operation.stream) +
           ", which is no part of the capture");
  }
  last_captured[operation.stream] = operation.time;
}

void begin_capture(StreamId stream) {
  host_waits_for_all();
  const Lock lock(state_mutex());
  save_memory();
  tape.clear();
  last_captured.clear();
  origin = stream;
  began = start(stream, "capture").time;
  recording = true;
}

Tape* end_capture() {
  const Lock lock(state_mutex());
  recording = false;
  for (const auto& [stream, time] : last_captured) {
    if (stream != origin && clock_of(origin)[stream] < time) {
      report("CAPTURE: it ends while stream " + std::to_string(stream) + " has not joined");
    }
  }
  restore_memory();
  return new Tape(std::move(tape));
}

void replay(const Tape& tape, StreamId stream) {
  StreamId& current = current_stream(current_device());
  const StreamId before = std::exchange(current, stream);
  const bool checked = is_checking();
  set_checking(false);
  for (const auto& operation : tape) {
    try {
      operation();
    } catch (const std::exception& error) {
      report(std::string("REPLAY: ") + error.what());
    }
  }
  set_checking(checked);
  current = before;
}

}  // namespace emulation
