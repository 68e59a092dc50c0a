#include "order.h"

#include <cstdio>
#include <stdexcept>
#include <utility>
#include <vector>

#include "graph.h"

namespace emulation {
namespace {

std::map<StreamId, Clock> clocks;
// The work that the host has waited for. All work that starts later comes after it.
Clock host;
StreamId last_stream = 0xfff;
std::string reports;
int sync_mode = 0;

struct Arrival {
  Operation operation;
  std::function<void()> arrive;
};
std::vector<Arrival> arrivals;

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, time] : from) {
    uint64_t& known = into[stream];
    if (known < time) known = time;
  }
}

void let_arrive() {
  std::vector<std::function<void()>> ready;
  {
    const Lock lock(state_mutex());
    std::vector<Arrival> later;
    for (Arrival& arrival : arrivals) {
      if (is_before(arrival.operation, host)) {
        ready.push_back(std::move(arrival.arrive));
      } else {
        later.push_back(std::move(arrival));
      }
    }
    arrivals = std::move(later);
  }
  // Call these without the lock, because a finished copy releases tensors.
  for (const auto& arrive : ready) arrive();
}

void host_takes(const Clock& clock) {
  {
    const Lock lock(state_mutex());
    if (is_recording()) report("CAPTURE: the host waits for the device");
    merge(host, clock);
  }
  let_arrive();
}

}  // namespace

std::recursive_mutex& state_mutex() {
  static std::recursive_mutex mutex;
  return mutex;
}

void report(const std::string& text) {
  const Lock lock(state_mutex());
  reports += text + "\n";
  std::fprintf(stderr, "EMULATION: %s\n", text.c_str());
}

std::string take_reports() {
  const Lock lock(state_mutex());
  return std::exchange(reports, {});
}

StreamId new_stream(int device) {
  const Lock lock(state_mutex());
  last_stream += kDevices;
  // The remainder of the number is the device.
  return last_stream - last_stream % kDevices + device;
}

int64_t raw_handle(StreamId stream) { return stream < kDevices ? 0 : stream; }

StreamId stream_of_handle(int64_t raw, int device) { return raw == 0 ? device : raw; }

StreamId& current_stream(int device) {
  thread_local StreamId streams[kDevices] = {0, 1};
  return streams[device];
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

Clock& clock_of(StreamId stream) { return clocks[stream]; }

Operation start(StreamId stream, const std::string& name) {
  const Lock lock(state_mutex());
  Clock& clock = clock_of(stream);
  merge(clock, host);
  return {stream, ++clock[stream], name};
}

bool is_before(const Operation& operation, const Clock& clock) {
  const auto found = clock.find(operation.stream);
  return found != clock.end() && found->second >= operation.time;
}

void record(Event& event, StreamId stream) {
  const Lock lock(state_mutex());
  merge(clock_of(stream), host);
  event.clock = clock_of(stream);
  event.stream = stream;
  event.captured = is_captured(stream);
}

void wait(StreamId stream, const Event& event) {
  const Lock lock(state_mutex());
  if (is_captured(stream) && !event.captured && event.stream >= 0) {
    report("CAPTURE: stream " + std::to_string(stream) + " waits for an event of stream " +
           std::to_string(event.stream) + " that is no part of the capture");
  }
  merge(clock_of(stream), event.clock);
}

void host_waits_for(StreamId stream) { host_takes(Clock(clock_of(stream))); }
void host_waits_for(const Event& event) { host_takes(event.clock); }

void host_waits_for_all() {
  Clock all;
  {
    const Lock lock(state_mutex());
    for (const auto& [stream, clock] : clocks) merge(all, clock);
  }
  host_takes(all);
}

void arrive_after(const Operation& operation, std::function<void()> arrive) {
  const Lock lock(state_mutex());
  arrivals.push_back({operation, std::move(arrive)});
}

void set_sync_mode(int mode) { sync_mode = mode; }

void implicit_wait(StreamId stream, const std::string& name) {
  if (sync_mode == 2) throw std::runtime_error("called a synchronizing CUDA operation: " + name);
  host_waits_for(stream);
}

}  // namespace emulation
