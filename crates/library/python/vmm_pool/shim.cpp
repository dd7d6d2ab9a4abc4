// The part of the pool that PyTorch can only be given in C++: exceptions, and the hooks of CUDA graphs.
//
// A C function has no way to say why there is no memory: PyTorch takes a NULL as an address. So here a
// failure is thrown as PyTorch's own. And PyTorch names the streams of a capture by a std::function.
//
// Compiled on the user's machine by torch.py, against the headers of the PyTorch at hand; links to nothing
// of the pool, whose functions are handed over by `vmm_pool_shim_bind`.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "shim_driver.hpp"

namespace {

using Filter = std::function<bool(Stream)>;
using PoolId = c10::MempoolId_t;
static_assert(
    std::is_same_v<PoolId, std::pair<unsigned long long, unsigned long long>>,
    "this PyTorch passes other numbers for its memory pools");

// The functions of the library, as torch.py fills them in.
struct Functions {
  uint64_t struct_bytes;
  void* (*alloc)(ptrdiff_t, int, void*);
  void (*free)(void*, ptrdiff_t, int, void*);
  uint64_t (*capture_begin)(int, void*, uint64_t);
  int (*capture_join)(uint64_t, int, void*);
  int (*capture_end)(uint64_t);
  int (*graph_destroyed)(uint64_t);
  int (*memory_fraction)(double, int);
  void (*empty_cache)();
  const char* (*last_error)();
  int32_t (*last_status)();
  int64_t out_of_memory;
};

Functions pool{};

// Between PyTorch's begin and end for a pool of its own. `number` is the pool's capture, opened by the
// first request in it: a begin is told of no stream, and of no capture if there is none.
struct Open {
  int device;
  PoolId id;
  Filter filter;
  std::thread::id thread;
  uint64_t number = 0;
  std::vector<Stream> streams = {};
};

// A capture that is over, though PyTorch did not say so.
struct Lost {
  int device;
  PoolId id;
  std::thread::id thread;
  uint64_t number;
};

// The captures that share a pool of PyTorch's, and how many of its releases are to come.
struct Kept {
  int device;
  PoolId id;
  int uses = 0;
  std::vector<uint64_t> numbers = {};
};

// Captures that are released, and may still run.
struct Dying {
  int device;
  uint64_t number;
};

// A segment of PyTorch's caching allocator that it gave back.
struct Segment {
  void* block;
  size_t bytes;
  int device;
  Stream stream;
};

struct State {
  std::mutex mutex;
  std::vector<Open> open;
  std::vector<Lost> lost;
  std::vector<Kept> kept;
  std::vector<Dying> dying;
  std::vector<Segment> segments;
};

// Never torn down: tensors are freed while the process exits.
State& state() {
  static State* made = new State;
  return *made;
}

// How many are open: what every request looks at.
std::atomic<size_t> open_count{0};

[[noreturn]] void fail(const char* doing, size_t bytes, int device) {
  const char* said = pool.last_error();
  const char* words = said != nullptr ? said : "no reason was given";
  TORCH_CHECK_WITH(
      OutOfMemoryError, pool.last_status() != pool.out_of_memory,
      "CUDA out of memory. Tried to allocate ", bytes, " bytes on GPU ", device, ". vmm-pool: ", words);
  TORCH_CHECK(false, "vmm-pool: ", doing, " on GPU ", device, ": ", words);
}

template <typename Entries, typename Condition>
void drop_if(Entries& entries, Condition condition) {
  entries.erase(std::remove_if(entries.begin(), entries.end(), condition), entries.end());
}

template <typename Entries>
bool has(const Entries& entries, uint64_t number) {
  return std::any_of(entries.begin(), entries.end(), [number](const auto& it) { return it.number == number; });
}

template <typename Entry>
auto is_of(int device, const PoolId& id) {
  return [device, id](const Entry& entry) { return entry.device == device && entry.id == id; };
}

Kept& kept_of(State& all, int device, const PoolId& id) {
  auto known = std::find_if(all.kept.begin(), all.kept.end(), is_of<Kept>(device, id));
  if (known != all.kept.end()) {
    return *known;
  }
  all.kept.push_back(Kept{device, id});
  return all.kept.back();
}

void forget_if_empty(State& all, int device, const PoolId& id) {
  auto known = std::find_if(all.kept.begin(), all.kept.end(), is_of<Kept>(device, id));
  if (known != all.kept.end() && known->uses <= 0 && known->numbers.empty()) {
    all.kept.erase(known);
  }
}

// Gives up the memory of released graphs, behind their launches. PyTorch launches them in any stream and
// tells nobody, so all of the device is waited for: which must not be while anything is captured.
void reap(State& all) {
  if (all.dying.empty() || !all.open.empty()) {
    return;
  }
  auto gone = [](const Dying& it) {
    return driver().wait_for(it.device) && pool.graph_destroyed(it.number) == 0;
  };
  drop_if(all.dying, gone);
}

// Frees segments of PyTorch's memory pools. It takes for granted that whoever frees waits for the whole
// device, as cudaFree does: a graph's launch in another stream may still use one. And that the memory is the
// driver's then, for it keeps itself what it may use again. Whether any was freed.
bool free_segments(State& all) {
  auto freed = [](const Segment& it) {
    if (!driver().wait_for(it.device)) {
      return false;
    }
    pool.free(it.block, static_cast<ptrdiff_t>(it.bytes), it.device, it.stream);
    return true;
  };
  size_t before = all.segments.size();
  drop_if(all.segments, freed);
  if (all.segments.size() == before) {
    return false;
  }
  pool.empty_cache();
  return true;
}

// A capture that fails has no end in PyTorch: its streams ask for ordinary memory again. What it has stays
// until its own thread begins another capture, for this one may be about to be told of after all.
void sweep(State& all) {
  auto over = [&all](const Open& it) {
    if (it.number == 0 || driver().captures(it.streams.front())) {
      return false;
    }
    pool.capture_end(it.number);
    all.lost.push_back(Lost{it.device, it.id, it.thread, it.number});
    return true;
  };
  drop_if(all.open, over);
  open_count.store(all.open.size(), std::memory_order_relaxed);
}

// Gives up what this thread's failed captures have. There is no graph that could use it.
void bury(State& all) {
  auto failed = [&all](const Lost& it) {
    if (it.thread != std::this_thread::get_id()) {
      return false;
    }
    auto& numbers = kept_of(all, it.device, it.id).numbers;
    drop_if(numbers, [&it](uint64_t number) { return number == it.number; });
    pool.graph_destroyed(it.number);
    forget_if_empty(all, it.device, it.id);
    return true;
  };
  drop_if(all.lost, failed);
}

// Lets a stream take part in the capture that it belongs to. A thread's memory pool without a capture
// (torch.cuda.use_mem_pool) needs nothing: its memory is as ordinary as all.
void take_part(int device, Stream stream) {
  State& all = state();
  std::lock_guard<std::mutex> guard(all.mutex);
  if (!driver().captures(stream)) {
    sweep(all);
    return;
  }
  for (auto it = all.open.rbegin(); it != all.open.rend(); ++it) {
    if (it->device != device) {
      continue;
    }
    if (std::find(it->streams.begin(), it->streams.end(), stream) != it->streams.end()) {
      return;
    }
    if (!it->filter(stream)) {
      continue;
    }
    if (it->number != 0) {
      if (pool.capture_join(it->number, device, stream) != 0) {
        fail("a stream could not join a graph capture", 0, device);
      }
    } else {
      auto& numbers = kept_of(all, device, it->id).numbers;
      uint64_t number = pool.capture_begin(device, stream, numbers.empty() ? 0 : numbers.back());
      if (number == 0) {
        forget_if_empty(all, device, it->id);
        fail("a graph capture could not be opened", 0, device);
      }
      it->number = number;
      numbers.push_back(number);
    }
    it->streams.push_back(stream);
    return;
  }
}

} // namespace

extern "C" {

// 0, or -1 if the caller was made for another shim.
int vmm_pool_shim_bind(const Functions* functions) {
  if (functions == nullptr || functions->struct_bytes != sizeof(Functions)) {
    return -1;
  }
  pool = *functions;
  return 0;
}

void* vmm_pool_shim_alloc(size_t bytes, int device, Stream stream) {
  if (bytes == 0) {
    return nullptr;
  }
  if (C10_UNLIKELY(open_count.load(std::memory_order_relaxed) != 0)) {
    take_part(device, stream);
  }
  void* block = pool.alloc(static_cast<ptrdiff_t>(bytes), device, stream);
  if (C10_UNLIKELY(block == nullptr)) {
    fail("no memory could be had", bytes, device);
  }
  return block;
}

void vmm_pool_shim_free(void* block, size_t bytes, int device, Stream stream) {
  pool.free(block, static_cast<ptrdiff_t>(bytes), device, stream);
}

// The pair for a torch.cuda.MemPool, which asks for segments and has captures of its own.
void* vmm_pool_shim_alloc_segment(size_t bytes, int device, Stream stream) {
  void* block = pool.alloc(static_cast<ptrdiff_t>(bytes), device, stream);
  if (C10_UNLIKELY(block == nullptr && bytes != 0)) {
    {
      State& all = state();
      std::lock_guard<std::mutex> guard(all.mutex);
      if (free_segments(all)) {
        block = pool.alloc(static_cast<ptrdiff_t>(bytes), device, stream);
      }
    }
    if (block == nullptr) {
      fail("no memory could be had", bytes, device);
    }
  }
  return block;
}

void vmm_pool_shim_free_segment(void* block, size_t bytes, int device, Stream stream) {
  if (block == nullptr) {
    return;
  }
  State& all = state();
  std::lock_guard<std::mutex> guard(all.mutex);
  all.segments.push_back(Segment{block, bytes, device, stream});
  free_segments(all);
}

void vmm_pool_shim_memory_fraction(double fraction, int device) {
  if (pool.memory_fraction(fraction, device) != 0) {
    fail("the fraction of memory was not set", 0, device);
  }
}

void vmm_pool_shim_begin(int device, PoolId id, Filter filter) {
  State& all = state();
  std::lock_guard<std::mutex> guard(all.mutex);
  sweep(all);
  bury(all);
  all.open.push_back(Open{device, id, std::move(filter), std::this_thread::get_id()});
  open_count.store(all.open.size(), std::memory_order_relaxed);
}

void vmm_pool_shim_end(int device, PoolId id) {
  State& all = state();
  std::lock_guard<std::mutex> guard(all.mutex);
  auto found = std::find_if(all.open.rbegin(), all.open.rend(), is_of<Open>(device, id));
  if (found != all.open.rend()) {
    if (found->number != 0) {
      pool.capture_end(found->number);
    }
    all.open.erase(std::next(found).base());
    open_count.store(all.open.size(), std::memory_order_relaxed);
  } else {
    auto lost = std::find_if(all.lost.begin(), all.lost.end(), is_of<Lost>(device, id));
    if (lost == all.lost.end()) {
      return;
    }
    all.lost.erase(lost);
  }
  // PyTorch releases a pool once for each end.
  kept_of(all, device, id).uses += 1;
  reap(all);
}

void vmm_pool_shim_release(int device, PoolId id) {
  State& all = state();
  std::lock_guard<std::mutex> guard(all.mutex);
  auto known = std::find_if(all.kept.begin(), all.kept.end(), is_of<Kept>(device, id));
  if (known == all.kept.end() || --known->uses > 0) {
    return;
  }
  auto dies = [&all, device](uint64_t number) {
    if (has(all.lost, number) || has(all.open, number)) {
      return false;
    }
    all.dying.push_back(Dying{device, number});
    return true;
  };
  known->uses = 0;
  drop_if(known->numbers, dies);
  forget_if_empty(all, device, id);
  reap(all);
}

} // extern "C"
