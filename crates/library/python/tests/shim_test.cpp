// What shim.cpp asks of the pool, in which order: the order of PyTorch's calls is as in its sources
// (CUDAGraph.cpp, CUDAPluggableAllocator.cpp of 2.11).
#include "../vmm_pool/shim.cpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

std::string log_; // what the pool was asked
uint64_t last_number = 0;
bool out = false;
bool refuse_capture = false;
int32_t status = 0;
uint64_t* captured = nullptr;
int* waits = nullptr;
int* wait_answer = nullptr;
int* waited_for = nullptr;
int failures = 0;

std::string text(uint64_t number) { return std::to_string(number); }
std::string text(void* stream) { return std::to_string(reinterpret_cast<uintptr_t>(stream)); }

void* fake_alloc(ptrdiff_t bytes, int, void* stream) {
  log_ += "alloc " + text(uint64_t(bytes)) + "@" + text(stream) + ";";
  return out ? nullptr : reinterpret_cast<void*>(0x1000);
}
void fake_free(void*, ptrdiff_t bytes, int, void* stream) {
  log_ += "free " + text(uint64_t(bytes)) + "@" + text(stream) + ";";
}
uint64_t fake_begin(int, void* stream, uint64_t shared) {
  if (refuse_capture) return 0;
  log_ += "begin @" + text(stream) + " with " + text(shared) + ";";
  return ++last_number;
}
int fake_join(uint64_t number, int, void* stream) {
  log_ += "join " + text(number) + "@" + text(stream) + ";";
  return 0;
}
int fake_end(uint64_t number) { log_ += "end " + text(number) + ";"; return 0; }
int fake_destroyed(uint64_t number) { log_ += "destroyed " + text(number) + ";"; return 0; }
int fake_fraction(double, int) { return 0; }
void fake_empty() { log_ += "empty;"; }
const char* fake_error() { return "the pool's report"; }
int32_t fake_status() { return status; }

Stream stream(uintptr_t number) { return reinterpret_cast<Stream>(number); }

void expect(const char* name, const std::string& got, const std::string& wanted) {
  bool same = got == wanted;
  std::printf("%s %s\n", same ? "ok" : "FAILED", name);
  if (!same) {
    std::printf("  got    %s\n  wanted %s\n", got.c_str(), wanted.c_str());
    ++failures;
  }
}

void asked(const char* name, const std::string& wanted) {
  expect(name, log_, wanted);
  log_.clear();
  if (!state().open.empty() == (open_count.load() == 0)) {
    expect("the count of what is open", text(uint64_t(open_count.load())), text(uint64_t(state().open.size())));
  }
}

void start() {
  *captured = 0, *waits = 0, *wait_answer = 0, last_number = 0;
  log_.clear();
  expect("nothing is left", text(uint64_t(
      state().open.size() + state().lost.size() + state().kept.size() + state().dying.size() +
      state().segments.size())), "0");
}

// A graph's filter: its capture's streams, as PyTorch tells them.
Filter captures_of(uint64_t streams) {
  return [streams](Stream it) { return (*captured & streams) >> reinterpret_cast<uintptr_t>(it) & 1; };
}

void plain() {
  start();
  vmm_pool_shim_alloc(0, 0, stream(0));
  vmm_pool_shim_alloc(5, 0, stream(0));
  vmm_pool_shim_free(nullptr, 5, 0, stream(3));
  asked("no capture", "alloc 5@0;free 5@3;");
}

void one_graph() {
  start();
  vmm_pool_shim_begin(0, {7, 0}, captures_of(1 << 4));
  vmm_pool_shim_alloc(1, 0, stream(4)); // not yet captured
  *captured = 1 << 4;
  vmm_pool_shim_alloc(2, 0, stream(4));
  vmm_pool_shim_alloc(3, 0, stream(4));
  vmm_pool_shim_alloc(4, 0, stream(5)); // other work
  vmm_pool_shim_alloc(5, 0, stream(0));
  vmm_pool_shim_alloc(6, 1, stream(4)); // another device's stream of the same handle
  *captured = 0;
  vmm_pool_shim_end(0, {7, 0});
  vmm_pool_shim_alloc(7, 0, stream(4));
  asked("one graph", "alloc 1@4;begin @4 with 0;alloc 2@4;alloc 3@4;alloc 4@5;alloc 5@0;alloc 6@4;end 1;alloc 7@4;");
  vmm_pool_shim_release(0, {7, 0});
  asked("released", "destroyed 1;");
  expect("behind its launches", text(uint64_t(*waits)) + " on " + text(uint64_t(*waited_for)), "1 on 0");
}

void spreads() {
  start();
  vmm_pool_shim_begin(2, {8, 0}, captures_of(1 << 4 | 1 << 5));
  *captured = 1 << 4 | 1 << 5 | 1 << 6;
  vmm_pool_shim_alloc(1, 2, stream(4));
  vmm_pool_shim_alloc(2, 2, stream(5));
  vmm_pool_shim_alloc(3, 2, stream(5));
  vmm_pool_shim_alloc(4, 2, stream(6)); // captured by somebody else
  *captured = 0;
  vmm_pool_shim_end(2, {8, 0});
  vmm_pool_shim_release(2, {8, 0});
  asked("two streams", "begin @4 with 0;alloc 1@4;join 1@5;alloc 2@5;alloc 3@5;alloc 4@6;end 1;destroyed 1;");
  expect("the device is the graph's", text(uint64_t(*waited_for)), "2");
}

void shared_pool() {
  start();
  for (int graph = 0; graph < 2; ++graph) {
    vmm_pool_shim_begin(0, {9, 0}, captures_of(1 << 4));
    *captured = 1 << 4;
    vmm_pool_shim_alloc(1, 0, stream(4));
    *captured = 0;
    vmm_pool_shim_end(0, {9, 0});
  }
  asked("two graphs of one pool", "begin @4 with 0;alloc 1@4;end 1;begin @4 with 1;alloc 1@4;end 2;");
  vmm_pool_shim_release(0, {9, 0});
  asked("one goes", "");
  vmm_pool_shim_release(0, {9, 0});
  asked("the other goes", "destroyed 1;destroyed 2;");
  vmm_pool_shim_release(0, {9, 0});
  asked("a release too many", "");
}

// A graph that is released while another is captured: the device cannot be waited for then.
void released_in_a_capture() {
  start();
  vmm_pool_shim_begin(0, {10, 0}, captures_of(1 << 4));
  *captured = 1 << 4;
  vmm_pool_shim_alloc(1, 0, stream(4));
  *captured = 0;
  vmm_pool_shim_end(0, {10, 0});
  vmm_pool_shim_begin(0, {11, 0}, captures_of(1 << 5));
  *captured = 1 << 5;
  vmm_pool_shim_release(0, {10, 0});
  vmm_pool_shim_alloc(2, 0, stream(5));
  asked("not in a capture", "begin @4 with 0;alloc 1@4;end 1;begin @5 with 0;alloc 2@5;");
  expect("nothing was waited for", text(uint64_t(*waits)), "0");
  *captured = 0;
  vmm_pool_shim_end(0, {11, 0});
  asked("but behind it", "end 2;destroyed 1;");
  *wait_answer = 900; // something else is captured
  vmm_pool_shim_release(0, {11, 0});
  asked("nor in a foreign one", "");
  *wait_answer = 0;
  vmm_pool_shim_begin(0, {12, 0}, captures_of(0));
  vmm_pool_shim_end(0, {12, 0});
  vmm_pool_shim_release(0, {12, 0});
  asked("but later", "destroyed 2;");
}

// PyTorch says nothing when a capture fails.
void failed_capture() {
  start();
  vmm_pool_shim_begin(0, {13, 0}, captures_of(1 << 4));
  *captured = 1 << 4;
  vmm_pool_shim_alloc(1, 0, stream(4));
  *captured = 0;
  vmm_pool_shim_alloc(2, 0, stream(4));
  asked("ended by the next request", "begin @4 with 0;alloc 1@4;end 1;alloc 2@4;");
  vmm_pool_shim_begin(0, {14, 0}, captures_of(1 << 4));
  asked("given up by the next capture of the thread", "destroyed 1;");
  *captured = 1 << 4;
  vmm_pool_shim_alloc(3, 0, stream(4));
  *captured = 0;
  std::thread([] { vmm_pool_shim_alloc(4, 0, stream(9)); }).join();
  asked("found over by another thread", "begin @4 with 0;alloc 3@4;end 2;alloc 4@9;");
  vmm_pool_shim_end(0, {14, 0}); // it was only about to be told
  vmm_pool_shim_begin(0, {15, 0}, captures_of(0));
  vmm_pool_shim_end(0, {15, 0});
  vmm_pool_shim_release(0, {15, 0});
  asked("its memory is kept", "");
  vmm_pool_shim_release(0, {14, 0});
  asked("until its release", "destroyed 2;");
}

// torch.cuda.use_mem_pool: a thread's requests, and no capture.
void thread_pool() {
  start();
  vmm_pool_shim_begin(0, {0, 3}, [](Stream) { return true; });
  vmm_pool_shim_alloc(1, 0, stream(4));
  vmm_pool_shim_end(0, {0, 3});
  vmm_pool_shim_release(0, {0, 3});
  asked("memory pools are ordinary memory", "alloc 1@4;");
}

// A memory pool under PyTorch's own allocator: its segments go back behind all of the device's work.
void segments() {
  start();
  void* block = vmm_pool_shim_alloc_segment(2, 1, stream(4));
  vmm_pool_shim_free_segment(block, 2, 1, stream(4));
  asked("a segment", "alloc 2@4;free 2@4;empty;");
  expect("behind the device", text(uint64_t(*waits)) + " on " + text(uint64_t(*waited_for)), "1 on 1");
  *wait_answer = 900; // something is captured
  vmm_pool_shim_free_segment(block, 3, 1, stream(4));
  asked("not in a capture", "");
  *wait_answer = 0;
  vmm_pool_shim_free_segment(block, 4, 1, stream(5));
  asked("but with the next", "free 3@4;free 4@5;empty;");
  *wait_answer = 900;
  vmm_pool_shim_free_segment(block, 5, 1, stream(4));
  *wait_answer = 0, out = true, status = 2;
  try {
    vmm_pool_shim_alloc_segment(6, 1, stream(4));
    expect("memory is short", "nothing", "an error");
  } catch (const c10::OutOfMemoryError&) {
  }
  out = false;
  asked("or when memory is short", "alloc 6@4;free 5@4;empty;alloc 6@4;");
  vmm_pool_shim_free_segment(nullptr, 0, 1, stream(4));
  log_.clear();
}

template <typename Wanted>
std::string thrown(size_t bytes, Stream where) {
  try {
    vmm_pool_shim_alloc(bytes, 3, where);
  } catch (const Wanted& error) {
    return error.what();
  } catch (...) {
    return "something else";
  }
  return "nothing";
}

void contains(const char* name, const std::string& words, const char* part) {
  expect(name, words.find(part) == std::string::npos ? words : part, part);
}

void errors() {
  start();
  out = true, status = 2;
  contains("out of memory", thrown<c10::OutOfMemoryError>(77, stream(0)), "CUDA out of memory. Tried to allocate 77 bytes on GPU 3. vmm-pool: the pool's report");
  status = 8;
  contains("another failure", thrown<c10::Error>(77, stream(0)), "vmm-pool: no memory could be had on GPU 3: the pool's report");
  expect("which is not out of memory", thrown<c10::OutOfMemoryError>(77, stream(0)), "something else");
  expect("no bytes", thrown<c10::Error>(0, stream(0)), "nothing");
  out = false, refuse_capture = true;
  vmm_pool_shim_begin(3, {16, 0}, captures_of(1 << 4));
  *captured = 1 << 4;
  contains("a capture that cannot be opened", thrown<c10::Error>(1, stream(4)), "a graph capture could not be opened");
  refuse_capture = false, *captured = 0;
  vmm_pool_shim_end(3, {16, 0});
  vmm_pool_shim_release(3, {16, 0});
}

} // namespace

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) {
    std::printf("FAILED no driver: %s\n", dlerror());
    return 1;
  }
  captured = static_cast<uint64_t*>(dlsym(library, "fake_captured"));
  waits = static_cast<int*>(dlsym(library, "fake_waits"));
  wait_answer = static_cast<int*>(dlsym(library, "fake_wait_answer"));
  waited_for = static_cast<int*>(dlsym(library, "fake_device"));
  Functions functions{
      sizeof(Functions), fake_alloc, fake_free, fake_begin, fake_join, fake_end, fake_destroyed,
      fake_fraction, fake_empty, fake_error, fake_status, 2};
  Functions other = functions;
  other.struct_bytes -= 8;
  expect("another table is refused", text(uint64_t(vmm_pool_shim_bind(&other) == -1)), "1");
  expect("the table is taken", text(uint64_t(vmm_pool_shim_bind(&functions))), "0");
  plain();
  one_graph();
  spreads();
  shared_pool();
  released_in_a_capture();
  failed_capture();
  thread_pool();
  segments();
  errors();
  start();
  return failures == 0 ? 0 : 1;
}
