/* The device's memory, which is the host's, and memory of the host that is pinned.
 *
 * Where streams run late, memory that is freed is given to others as early as CUDA's allocator may do it: when memory is
 * next allocated on the stream that it was allocated on. That stream overwrites it then, behind all that the stream was
 * given, and behind streams that the memory was kept for. Who else still reads it reads NaN, and who writes it is found
 * out, as nobody gets the memory here.
 */
#pragma once

#include <c10/core/Allocator.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <set>
#include <utility>
#include <vector>

#include "late_streams.h"

namespace memory {

constexpr int OVERWRITTEN = 0xff;  // NaN, or -1

inline void* zeros(size_t nbytes) {
  void* data = nullptr;
  if (nbytes == 0 || posix_memalign(&data, 512, nbytes) != 0) return nullptr;  // as CUDA's allocator aligns
  return std::memset(data, 0, nbytes);
}

struct Block {
  size_t nbytes;
  late::Place home;  // allocated there
  std::set<late::Place> kept_for;
};

/* All blocks of one kind, by address, and their bytes. */
class Blocks {
 public:
  void add(void* data, Block block) {
    const std::lock_guard<std::mutex> held(lock_);
    if (data == nullptr) return;
    nbytes_ += block.nbytes;
    most_ = std::max(most_, nbytes_);
    blocks_[static_cast<char*>(data)] = std::move(block);
  }

  Block take(void* data) {
    const std::lock_guard<std::mutex> held(lock_);
    auto found = blocks_.extract(static_cast<char*>(data));
    nbytes_ -= found.mapped().nbytes;
    return std::move(found.mapped());
  }

  void keep(const void* data, late::Place stream) {
    const std::lock_guard<std::mutex> held(lock_);
    if (const auto found = find(data); found != blocks_.end()) found->second.kept_for.insert(stream);
  }

  bool holds(const void* data) {
    const std::lock_guard<std::mutex> held(lock_);
    return find(data) != blocks_.end();
  }

  /* Return the most bytes that there were since the call before, and count anew. */
  size_t take_most() {
    const std::lock_guard<std::mutex> held(lock_);
    return std::exchange(most_, nbytes_);
  }

 private:
  using Map = std::map<char*, Block>;

  Map::iterator find(const void* data) {
    auto* address = static_cast<char*>(const_cast<void*>(data));
    const auto after = blocks_.upper_bound(address);
    if (after == blocks_.begin()) return blocks_.end();
    const auto found = std::prev(after);
    return address < found->first + found->second.nbytes ? found : blocks_.end();
  }

  std::mutex lock_;
  Map blocks_;
  size_t nbytes_ = 0, most_ = 0;
};

inline Blocks &device = *new Blocks, &pinned = *new Blocks;

/* Memory that was overwritten: its address, its bytes. */
inline std::vector<std::pair<void*, size_t>>& overwritten = *new std::vector<std::pair<void*, size_t>>;

/* Free what was overwritten. Returns how much of it somebody has written since. No work may be left. */
inline size_t free_overwritten() {
  size_t written = 0;
  for (const auto& [data, nbytes] : overwritten) {
    const auto* bytes = static_cast<unsigned char*>(data);
    written += !std::all_of(bytes, bytes + nbytes, [](unsigned char one) { return one == OVERWRITTEN; });
    std::free(data);
  }
  overwritten.clear();
  return written;
}

struct Freed {
  void* data;
  size_t nbytes;
  std::vector<late::Point> behind;
};

inline std::mutex freed_lock;
inline std::map<late::Place, std::vector<Freed>>& freed = *new std::map<late::Place, std::vector<Freed>>;

inline void give_back_to_device(void* data) {
  if (data == nullptr) return;
  const auto block = device.take(data);
  if (!late::streams.are_late()) return std::free(data);
  std::vector<late::Point> behind;
  for (const auto& stream : block.kept_for) behind.push_back(late::streams.now(stream));
  const std::lock_guard<std::mutex> held(freed_lock);
  freed[block.home].push_back({data, block.nbytes, std::move(behind)});
}

/* Let a stream overwrite what was allocated on it and is free. */
inline void reuse(late::Place home) {
  std::vector<Freed> taken;
  {
    const std::lock_guard<std::mutex> held(freed_lock);
    taken = std::move(freed[home]);
    freed[home].clear();
  }
  for (auto& one : taken)
    late::streams.give(
        home,
        [data = one.data, nbytes = one.nbytes] {
          std::memset(data, OVERWRITTEN, nbytes);
          overwritten.emplace_back(data, nbytes);
        },
        std::move(one.behind));
}

inline void reuse_all() {
  std::vector<late::Place> homes;
  {
    const std::lock_guard<std::mutex> held(freed_lock);
    for (const auto& [home, blocks] : freed) homes.push_back(home);
  }
  for (const auto& home : homes) reuse(home);
}

inline void give_back_pinned(void* data) {
  if (data == nullptr) return;
  pinned.take(data);
  // Torch gives it to others once the streams that use it are done with it. Here nobody gets it.
  if (!late::streams.are_late()) std::free(data);
}

}  // namespace memory
