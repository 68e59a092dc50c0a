// Streams, events and the host as vector clocks: which operation is known to come after which other one.
//
// An operation on a stream gets the next time of that stream. A clock says, for each stream, up to which time
// its operations are known to be finished. A stream that waits for an event takes over the event's clock, and
// a host that waits for a stream takes over the stream's. So one operation is ordered before another exactly
// if the clock of the later one contains it, however the operations happened to run.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace emulation {

constexpr int kDevices = 2;

// The default stream of device d is number d, so that all streams have different numbers. Its raw handle is
// 0, as CUDA has it.
using StreamId = int64_t;
using Clock = std::map<StreamId, uint64_t>;

struct Operation {
  StreamId stream;
  uint64_t time;
  std::string name;
};

struct Event {
  Clock clock;
  StreamId stream = -1;   // on which it was recorded; -1: not yet
  bool captured = false;  // recorded inside a capture
};

// Protects all state of the emulated device.
std::recursive_mutex& state_mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

// What is wrong with the program that runs: written to stderr and kept.
void report(const std::string& text);
// All reports since the last call, one a line.
std::string take_reports();

StreamId new_stream(int device);
int64_t raw_handle(StreamId stream);
StreamId stream_of_handle(int64_t raw, int device);
// The current stream of a device in this thread, and the current device.
StreamId& current_stream(int device);
int& current_device();

// Start an operation: takes the stream's next time.
Operation start(StreamId stream, const std::string& name);
bool is_before(const Operation& operation, const Clock& clock);
Clock& clock_of(StreamId stream);

void record(Event& event, StreamId stream);
void wait(StreamId stream, const Event& event);

// The host waits. What was copied to the host by then arrives.
void host_waits_for(StreamId stream);
void host_waits_for(const Event& event);
void host_waits_for_all();
// What the host has to see only after it has waited for `operation`.
void arrive_after(const Operation& operation, std::function<void()> arrive);

// How set_sync_debug_mode() wants implicit waits: 2 raises.
void set_sync_mode(int mode);
// To be called where torch would wait for the device by itself.
void implicit_wait(StreamId stream, const std::string& name);

}  // namespace emulation
