// The emulated device's memory: blocks of host memory. Each block records which operations read and wrote it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "order.h"

namespace emulation {

// Allocate a block for the current stream of the current device. As in the caching allocator, its address and
// size are multiples of 512 bytes. It is filled with a pattern, so that reads before the first write give
// wrong results.
void* allocate(size_t bytes);
void release(void* data);
// Return whether an address is in an allocated block.
bool is_allocated(const void* data);
// Implements tensor.record_stream().
void record_use(const void* data, StreamId stream);

// Record that an operation reads or writes the block that contains an address. Report the operation if it is
// not ordered after the block's earlier writes, or, for a write, after its earlier reads.
void access(const void* data, bool writes, const Operation& operation);
// The same for a single access of a running kernel. Return whether all its bytes are in one block.
bool access_exactly(const void* data, size_t bytes, bool writes, const Operation& operation);
// Record the operation that wrote the initial content of a new block. No other operation can conflict with
// it.
void first_write(const void* data, const Operation& operation);

size_t allocated_bytes();
size_t peak_bytes();
void reset_peak();
// Set how many bytes may be allocated at once, and return whether so many more bytes may be.
void set_limit(size_t bytes);
bool has_room(size_t bytes);

// Checks are off while a graph is replayed: its operations were checked when they were captured.
void set_checking(bool on);
bool is_checking();

// For captures: save and restore the contents and accesses of all blocks. Memory that is released in between
// is freed by restore_memory().
void save_memory();
void restore_memory();

}  // namespace emulation
