// What shim.cpp asks the driver, without its headers: the machine may have none.
#pragma once

#include <dlfcn.h>

struct CUstream_st;

namespace {

using Stream = CUstream_st*;

// The driver's functions, from the library that PyTorch has loaded.
struct Driver {
  int (*is_capturing)(Stream, int*) = nullptr;
  int (*device_get)(int*, int) = nullptr;
  int (*primary_retain)(void**, int) = nullptr;
  int (*primary_release)(int) = nullptr;
  int (*push)(void*) = nullptr;
  int (*pop)(void**) = nullptr;
  int (*synchronize)() = nullptr;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) {
      return;
    }
    find(library, "cuStreamIsCapturing", is_capturing);
    find(library, "cuDeviceGet", device_get);
    find(library, "cuDevicePrimaryCtxRetain", primary_retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", primary_release);
    find(library, "cuCtxPushCurrent_v2", push);
    find(library, "cuCtxPopCurrent_v2", pop);
    find(library, "cuCtxSynchronize", synchronize);
  }

  template <typename Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }

  // The legacy stream cannot be asked while another is captured; it is not captured then.
  bool captures(Stream stream) const {
    int status = 0;
    return is_capturing != nullptr && is_capturing(stream, &status) == 0 && status == 1;
  }

  // Waits for all work of a device. False if that cannot be had now.
  bool wait_for(int ordinal) const {
    int device = 0;
    void* context = nullptr;
    if (synchronize == nullptr || device_get == nullptr || primary_retain == nullptr ||
        primary_release == nullptr || push == nullptr || pop == nullptr ||
        device_get(&device, ordinal) != 0 || primary_retain(&context, device) != 0) {
      return false;
    }
    bool done = false;
    if (push(context) == 0) {
      done = synchronize() == 0;
      pop(&context);
    }
    primary_release(device);
    return done;
  }
};

const Driver& driver() {
  static const Driver* found = new Driver;
  return *found;
}

} // namespace
