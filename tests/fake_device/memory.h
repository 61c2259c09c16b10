/* The device's memory, and memory of the host that is pinned.
 *
 * An address of the device is one that the host can neither read nor write: who tries dies by SIGSEGV. What is stored
 * there lies elsewhere in host memory, and only the device's operators ask where: bytes_of(address).
 *
 * Where streams run late, memory that is freed is given to others as early as CUDA's allocator may do it: when memory is
 * next allocated on the stream that it was allocated on. That stream overwrites it then, behind all that the stream was
 * given, and behind streams that the memory was kept for. Who else still reads it reads NaN, and who writes it is found
 * out, as nobody gets the memory here.
 */
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

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

/* Addresses that nothing is behind. One that was given back is the next one of its size, as CUDA's allocator has it. */
class Addresses {
 public:
  char* take(size_t nbytes) {
    const std::lock_guard<std::mutex> held(lock_);
    auto& free = free_[rounded(nbytes)];
    if (!free.empty()) {
      auto* address = free.back();
      free.pop_back();
      return address;
    }
    if (next_ == nullptr) reserve();
    TORCH_CHECK(rounded(nbytes) <= static_cast<size_t>(end_ - next_), "the device has no addresses left");
    return std::exchange(next_, next_ + rounded(nbytes));
  }

  void give_back(void* address, size_t nbytes) {
    const std::lock_guard<std::mutex> held(lock_);
    free_[rounded(nbytes)].push_back(static_cast<char*>(address));
  }

 private:
  static constexpr size_t ALIGNMENT = 512, RESERVED = size_t{1} << 36;

  static size_t rounded(size_t nbytes) { return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

  void reserve() {
    void* start = mmap(nullptr, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "the device finds no address space of ", RESERVED, " bytes");
    next_ = static_cast<char*>(start);
    end_ = next_ + RESERVED;
  }

  std::mutex lock_;
  char *next_ = nullptr, *end_ = nullptr;
  std::map<size_t, std::vector<char*>> free_;
};

inline Addresses& addresses = *new Addresses;

struct Block {
  void* bytes;  // where they are kept
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

  /* Return where the bytes at an address are kept. */
  char* bytes_of(const void* data) {
    const std::lock_guard<std::mutex> held(lock_);
    const auto found = find(data);
    TORCH_CHECK(found != blocks_.end(), "no memory of the device is at ", data);
    return static_cast<char*>(found->second.bytes) + (static_cast<const char*>(data) - found->first);
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

inline char* bytes_of(const void* address) { return device.bytes_of(address); }

inline void* allocate(size_t nbytes, late::Place home) {
  void* bytes = zeros(nbytes);
  if (bytes == nullptr) return nullptr;
  void* address = addresses.take(nbytes);
  device.add(address, {bytes, nbytes, home, {}});
  return address;
}

struct Freed {
  void* address;
  void* bytes;
  size_t nbytes;
  std::vector<late::Point> behind;

  void give_back() const {
    std::free(bytes);
    addresses.give_back(address, nbytes);
  }
};

/* Memory that was overwritten. */
inline std::vector<Freed>& overwritten = *new std::vector<Freed>;

/* Free what was overwritten. Returns how much of it somebody has written since. No work may be left. */
inline size_t free_overwritten() {
  size_t written = 0;
  for (const auto& one : overwritten) {
    const auto* bytes = static_cast<unsigned char*>(one.bytes);
    written += !std::all_of(bytes, bytes + one.nbytes, [](unsigned char byte) { return byte == OVERWRITTEN; });
    one.give_back();
  }
  overwritten.clear();
  return written;
}

inline std::mutex freed_lock;
inline std::map<late::Place, std::vector<Freed>>& freed = *new std::map<late::Place, std::vector<Freed>>;

inline void give_back_to_device(void* address) {
  if (address == nullptr) return;
  const auto block = device.take(address);
  Freed one{address, block.bytes, block.nbytes, {}};
  if (!late::streams.are_late()) return one.give_back();
  for (const auto& stream : block.kept_for) one.behind.push_back(late::streams.now(stream));
  const std::lock_guard<std::mutex> held(freed_lock);
  freed[block.home].push_back(std::move(one));
}

/* Let a stream overwrite what was allocated on it and is free. */
inline void reuse(late::Place home) {
  std::vector<Freed> taken;
  {
    const std::lock_guard<std::mutex> held(freed_lock);
    taken = std::move(freed[home]);
    freed[home].clear();
  }
  for (auto& one : taken) {
    auto behind = std::move(one.behind);
    late::streams.give(
        home,
        [one] {
          std::memset(one.bytes, OVERWRITTEN, one.nbytes);
          overwritten.push_back(one);
        },
        std::move(behind));
  }
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
