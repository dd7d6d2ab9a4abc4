// The fake driver's work: memory of its own, copies, streams, events, kernels, graphs.
#include "fake.h"

static unsigned long long next_id = 10;

// ---- memory of the driver's own, copies ----
static CUresult need_context(void) { return current && current->device < 100 ? 0 : 201; }
CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) {
  NOTE(" %zu", bytes);
  *at = (CUdeviceptr)fake_make(bytes);
  return need_context();
}
CUresult cuMemFree_v2(CUdeviceptr at) { NOTE(""); free((void *)at); return need_context(); }
CUresult cuMemAllocAsync(CUdeviceptr *at, size_t bytes, CUstream stream) {
  NOTE(" %zu stream %llu", bytes, stream->id);
  *at = (CUdeviceptr)fake_make(bytes);
  return need_context();
}
CUresult cuMemFreeAsync(CUdeviceptr at, CUstream stream) {
  NOTE(" stream %llu", stream->id);
  free((void *)at);
  return need_context();
}
CUresult cuDeviceGetDefaultMemPool(void **pool, CUdevice device) {
  NOTE(" %d", device);
  *pool = &contexts[ordinal_of(device)];
  return 0;
}
CUresult cuMemPoolSetAttribute(void *pool, int attribute, void *value) {
  NOTE(" pool of %d: %d %llu", (int)((CUcontext)pool - contexts), attribute,
       *(unsigned long long *)value);
  return 0;
}
CUresult cuMemHostAlloc(void **place, size_t bytes, unsigned flags) {
  NOTE(" %zu %u", bytes, flags);
  *place = fake_make(bytes);
  memset(*place, 0xee, bytes);
  return need_context();
}
CUresult cuMemFreeHost(void *place) { NOTE(""); free(place); return need_context(); }
CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
  NOTE(" %zu", bytes);
  memcpy((void *)to, from, bytes);
  return need_context();
}
CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
  NOTE(" %zu", bytes);
  memcpy(to, (void *)from, bytes);
  return need_context();
}
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  NOTE(" %zu", bytes);
  memcpy((void *)to, (void *)from, bytes);
  return need_context();
}
CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                      CUcontext from_context, size_t bytes) {
  NOTE(" %zu %d from %d", bytes, to_context->device, from_context->device);
  memcpy((void *)to, (void *)from, bytes);
  return need_context();
}
CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
  NOTE(" %u %zu", value, bytes);
  memset((void *)to, value, bytes);
  return need_context();
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
  NOTE(" %zu stream %llu", bytes, stream->id);
  memcpy((void *)to, from, bytes);
  return need_context();
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
  NOTE(" %zu stream %llu", bytes, stream->id);
  memcpy(to, (void *)from, bytes);
  return need_context();
}
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  NOTE(" %zu stream %llu", bytes, stream->id);
  memcpy((void *)to, (void *)from, bytes);
  return need_context();
}
CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                           CUcontext from_context, size_t bytes, CUstream stream) {
  NOTE(" %zu %d from %d stream %llu", bytes, to_context->device, from_context->device, stream->id);
  memcpy((void *)to, (void *)from, bytes);
  return need_context();
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
  NOTE(" %u %zu stream %llu", value, bytes, stream->id);
  memset((void *)to, value, bytes);
  return need_context();
}

// ---- streams and events ----
CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
  NOTE(" %u", flags);
  if (need_context()) return 201;
  *stream = fake_make(sizeof **stream);
  (*stream)->device = current->device;
  (*stream)->id = next_id++;
  return 0;
}
CUresult cuStreamDestroy_v2(CUstream stream) { NOTE(" %llu", stream->id); free(stream); return 0; }
CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
  NOTE("");
  // 2 is the calling thread's own stream: a small number, not a place.
  *id = stream == (CUstream)2 ? 2 : stream->id;
  return need_context();
}
CUresult cuStreamQuery(CUstream stream) { NOTE(" %llu", stream->id); return pending ? 600 : 0; }
CUresult cuStreamSynchronize(CUstream stream) {
  // 1 is the legacy stream: a small number, not a place.
  NOTE(" %llu", stream == (CUstream)1 ? 1ULL : stream->id);
  return 0;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  NOTE(" %llu event of %d, %u", stream->id, event->device, flags);
  return 0;
}
CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr at, unsigned value, unsigned flags) {
  NOTE(" %llu value %u, %u", stream->id, value, flags);
  return at == 0;
}
CUresult cuEventCreate(CUevent *event, unsigned flags) {
  NOTE(" %u", flags);
  if (need_context()) return 201;
  *event = fake_make(sizeof **event);
  (*event)->device = current->device;
  return 0;
}
typedef struct { char reserved[64]; } CUipcEventHandle;
CUresult cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event) {
  NOTE(" of %d", event->device);
  for (int i = 0; i < 64; i++) handle->reserved[i] = (char)(i + event->device);
  return 0;
}
CUresult cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle) {
  NOTE(" %d %d", handle.reserved[0], handle.reserved[63]);
  *event = fake_make(sizeof **event);
  (*event)->device = current->device;
  return need_context();
}
CUresult cuEventDestroy_v2(CUevent event) { NOTE(""); free(event); return 0; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
  NOTE(" stream %llu", stream->id);
  if (event->device != stream->device) return 400;
  event->recorded = 1;
  return 0;
}
CUresult cuEventQuery(CUevent event) { NOTE(""); return event->recorded && pending ? 600 : 0; }
CUresult cuEventSynchronize(CUevent event) { NOTE(" of %d", event->device); return 0; }

// ---- kernels and host functions ----
typedef struct { unsigned long long magic; } Module;
static Module module = {0x5eed};
static const char *kernels[] = {"fill_words", "copy_words", "check_words", "spin", "copy_quads"};
CUresult cuModuleLoadData(Module **out, const char *image) {
  NOTE(" %s, capture mode %u", strstr(image, ".version") ? "ptx" : "?", capture_mode);
  *out = &module;
  return need_context();
}
CUresult cuModuleGetFunction(const char **function, Module *from, const char *name) {
  NOTE(" %s", name);
  for (int i = 0; i < 5; i++) if (!strcmp(name, kernels[i])) {
    *function = kernels[i];
    return from->magic == 0x5eed ? 0 : 400;
  }
  return 500;
}
CUresult cuModuleUnload(Module *from) { NOTE(""); return from == &module ? 0 : 400; }
CUresult cuLaunchKernel(const char *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                        unsigned by, unsigned bz, unsigned shared, CUstream stream, void **p,
                        void **extra) {
  NOTE(" %s grid %u %u %u block %u %u %u shared %u stream %llu%s", function, gx, gy, gz, bx, by, bz,
       shared, stream->id, extra ? " extra" : "");
#define U64(i) (*(uint64_t *)p[i])
#define U32(i) (*(uint32_t *)p[i])
  if (!strcmp(function, "fill_words"))
    for (uint64_t i = 0; i < U64(1); i++) ((uint32_t *)U64(0))[i] = U32(2) + (uint32_t)i;
  if (!strcmp(function, "copy_words")) memcpy((void *)U64(0), (void *)U64(1), 4 * U64(2));
  if (!strcmp(function, "copy_quads")) memcpy((void *)U64(0), (void *)U64(1), 16 * U64(2));
  if (!strcmp(function, "check_words"))
    for (uint64_t i = 0; i < U64(1); i++)
      *(uint32_t *)U64(3) += ((uint32_t *)U64(0))[i] != U32(2) + (uint32_t)i;
  if (!strcmp(function, "spin") && U64(1)) *(uint32_t *)U64(1) = 1;
  return need_context();
}
CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *argument) {
  NOTE(" stream %llu", stream->id);
  function(argument);
  function(argument);  // as a graph that is launched twice would
  return 0;
}

// ---- capture and graphs ----
CUresult cuThreadExchangeStreamCaptureMode(unsigned *mode) {
  NOTE(" %u", *mode);
  unsigned old = capture_mode;
  capture_mode = *mode;
  *mode = old;
  return 0;
}
CUresult cuStreamBeginCapture_v2(CUstream stream, unsigned mode) {
  NOTE(" %llu mode %u", stream->id, mode);
  stream->capturing = 1;
  return 0;
}
CUresult cuStreamEndCapture(CUstream stream, unsigned long long *graph) {
  NOTE(" %llu", stream->id);
  if (!stream->capturing) return 903;
  stream->capturing = 0;
  *graph = 0x9a;
  return 0;
}
CUresult cuStreamGetCaptureInfo_v2(CUstream stream, unsigned *status, unsigned long long *id,
                                   void *graph, void *list, void *count) {
  NOTE(" %llu%s", stream->id, graph || list || count ? " lists" : "");
  *status = stream->capturing;
  *id = 77;  // not only while it captures
  return 0;
}
CUresult cuGraphInstantiateWithFlags(unsigned long long *exec, unsigned long long graph,
                                     unsigned long long flags) {
  NOTE(" %llx %llu", graph, flags);
  *exec = graph + 1;
  return 0;
}
CUresult cuGraphLaunch(unsigned long long exec, CUstream stream) {
  NOTE(" %llx stream %llu", exec, stream->id);
  return 0;
}
CUresult cuGraphDestroy(unsigned long long graph) { NOTE(" %llx", graph); return 0; }
CUresult cuGraphExecDestroy(unsigned long long exec) { NOTE(" %llx", exec); return 0; }
