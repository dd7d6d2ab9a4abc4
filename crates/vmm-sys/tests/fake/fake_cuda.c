// A small libcuda.so for tests of the plumbing between the contract and the driver's ABI. It is no
// simulated device: it does what it is told, keeps a log of every call with the context that was
// current, and shows the bytes of the structs it was given. Built by tests/fake/mod.rs.
//
// -DcuName=lacking_cuName leaves a function out; FAKE_VERSION, FAKE_DEVICES, FAKE_INIT and
// FAKE_VERSION_CODE set what the library answers at the start.
#include "fake.h"

struct CUctx_st contexts[FAKE_DEVICES + 1];
__thread CUcontext current;
__thread unsigned capture_mode;
int pending;
unsigned char peer_refused;

// ---- log and planned failures ----
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 16];
static size_t log_bytes;
static char fail_name[64];
static unsigned fail_code;

unsigned note(const char *name, const char *format, ...) {
  unsigned code = 0;
  char context[16] = "-";
  if (current) snprintf(context, sizeof context, "%d", current->device);
  pthread_mutex_lock(&lock);
  size_t room = sizeof log_text - log_bytes;
  log_bytes += snprintf(log_text + log_bytes, room, "%s %s", context, name);
  va_list list;
  va_start(list, format);
  room = sizeof log_text - log_bytes;
  log_bytes += vsnprintf(log_text + log_bytes, room, format, list);
  va_end(list);
  if (log_bytes > sizeof log_text - 2) abort();  // no test makes that many calls
  log_text[log_bytes++] = '\n';
  log_text[log_bytes] = 0;
  if (!strcmp(fail_name, name)) {
    code = fail_code;
    fail_name[0] = 0;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

// What no test gives back is the library's until the process ends, as it is the driver's: so a checker
// of leaks finds who has it.
static struct Made { struct Made *next; void *what; } *made;
void *fake_make(size_t bytes) {
  struct Made *entry = calloc(1, sizeof *entry);
  entry->what = calloc(1, bytes);
  pthread_mutex_lock(&lock);
  entry->next = made;
  made = entry;
  pthread_mutex_unlock(&lock);
  return entry->what;
}

static const char *hex(const void *bytes, size_t count, char *out) {
  out[0] = 0;
  const unsigned char *byte = bytes;
  for (size_t i = 0; i < count; i++) sprintf(out + 2 * i, "%02x", byte[i]);
  return out;
}

void fake_log(char *out, size_t bytes) {
  pthread_mutex_lock(&lock);
  snprintf(out, bytes, "%s", log_text);
  log_bytes = 0;
  log_text[0] = 0;
  pthread_mutex_unlock(&lock);
}
void fake_fail(const char *name, unsigned code) {
  snprintf(fail_name, sizeof fail_name, "%s", name);
  fail_code = code;
}
void fake_pending(int on) { pending = on; }
void fake_refuse_peers(void) { peer_refused = 1; }
// A context that is nobody's primary one, made current without a trace in the log.
void fake_push_other_context(int device) {
  current = fake_make(sizeof *current);
  current->device = 100 + device;
}

// ---- machine ----
CUresult cuInit(unsigned flags) { NOTE(" %u", flags); return FAKE_INIT; }
CUresult cuDriverGetVersion(int *version) { *version = FAKE_VERSION; return FAKE_VERSION_CODE; }
CUresult cuDeviceGetCount(int *count) { NOTE(""); *count = FAKE_DEVICES; return 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  NOTE(" %d", ordinal);
  if (ordinal < 0 || ordinal >= FAKE_DEVICES) return 101;
  *device = 1000 + ordinal;
  return 0;
}
CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
  NOTE(" %d", device);
  memset(name, 'x', bytes);  // no terminator: what a broken driver would do
  snprintf(name, bytes, "Fake GPU %d", ordinal_of(device));
  return 0;
}
CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
  NOTE(" %d", device);
  for (int i = 0; i < 16; i++) uuid->bytes[i] = (char)(0xf0 + i);
  return 0;
}
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
  NOTE(" %d", device);
  *bytes = 141ull << 30;
  return 0;
}
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
  NOTE(" %d %d", attribute, device);
  *value = attribute;
  return 0;
}
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
  NOTE(" %d %d", device, peer);
  *can = device != peer && !peer_refused;
  return 0;
}
CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice from, CUdevice to) {
  NOTE(" %d %d %d", attribute, from, to);
  *value = attribute;
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  NOTE(" %d", device);
  *context = &contexts[ordinal_of(device)];
  (*context)->device = ordinal_of(device);
  (*context)->references++;
  return 0;
}
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  NOTE(" %d", device);
  contexts[ordinal_of(device)].references--;
  return 0;
}
CUresult cuCtxGetCurrent(CUcontext *context) { NOTE(""); *context = current; return 0; }
CUresult cuCtxSetCurrent(CUcontext context) {
  NOTE(context ? " %d" : " none", context ? context->device : 0);
  current = context;
  return 0;
}
CUresult cuCtxSynchronize(void) { NOTE(""); return current ? 0 : 201; }
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  NOTE("");
  *free_bytes = 5;
  *total = 7;
  return current ? 0 : 201;
}

// ---- virtual memory management ----
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int kind) {
  char text[80];
  NOTE(" %s %d", hex(prop, sizeof *prop, text), kind);
  *bytes = GRANULARITY << kind;
  return 0;
}
CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t align, CUdeviceptr hint,
                             unsigned long long flags) {
  NOTE(" %zu %zu %llu %llu", bytes, align, hint, flags);
  if (!bytes || bytes % GRANULARITY || (align & (align - 1))) return 1;
  char *place = mmap(0, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  *at = ((CUdeviceptr)place + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  return 0;
}
CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  NOTE(" %zu", bytes);
  return at % GRANULARITY || bytes % GRANULARITY;
}
CUresult cuMemCreate(Chunk **handle, size_t bytes, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
  char text[80];
  NOTE(" %zu %s %llu", bytes, hex(prop, sizeof *prop, text), flags);
  if (prop->location.type == 1 && (unsigned)prop->location.id >= FAKE_DEVICES) return 101;
  if (!bytes || bytes % GRANULARITY) return 1;
  if (prop->requestedHandleTypes & 8) return 800;
  Chunk *chunk = fake_make(sizeof *chunk);
  chunk->prop = *prop;
  chunk->size = bytes;
  chunk->fd = memfd_create("chunk", 0);
  if (ftruncate(chunk->fd, bytes)) return 2;
  *handle = chunk;
  return 0;
}
CUresult cuMemRelease(Chunk *handle) { NOTE(""); return handle ? 0 : 1; }
CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, Chunk *chunk,
                  unsigned long long flags) {
  NOTE(" %zu %zu %llu", bytes, offset, flags);
  if (offset || bytes != chunk->size) return 801;
  if (at % GRANULARITY) return 1;
  int flags_of_map = MAP_SHARED | MAP_FIXED;
  return mmap((void *)at, bytes, PROT_READ | PROT_WRITE, flags_of_map, chunk->fd, 0) == MAP_FAILED;
}
CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  NOTE(" %zu", bytes);
  if (at % GRANULARITY || bytes % GRANULARITY) return 1;
  mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  return 0;
}
CUresult cuMemSetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *list, size_t count) {
  char text[1024];
  NOTE(" %zu %zu %s", bytes, count, hex(list, count * sizeof *list, text));
  for (size_t i = 0; i < count; i++)
    if (list[i].location.type == 1 && list[i].location.id != 0 && peer_refused) return 1;
  return !count || at % GRANULARITY;
}
CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at) {
  char text[80];
  NOTE(" %s", hex(location, sizeof *location, text));
  *flags = location->type == 1 ? 3 : 0;
  return at % GRANULARITY != 0;
}
CUresult cuMemRetainAllocationHandle(unsigned long long *handle, void *at) {
  NOTE("");
  *handle = 0xabc;
  return at == 0;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, Chunk *chunk) {
  NOTE("");
  *prop = chunk->prop;
  return 0;
}
CUresult cuMemExportToShareableHandle(void *out, Chunk *chunk, unsigned type,
                                      unsigned long long flags) {
  NOTE(" %u %llu", type, flags);
  if (!(chunk->prop.requestedHandleTypes & type)) return 1;
  *(int *)out = dup(chunk->fd);
  return 0;
}
CUresult cuMemImportFromShareableHandle(Chunk **handle, void *os_handle, unsigned type) {
  NOTE(" %u", type);
  Chunk *chunk = fake_make(sizeof *chunk);
  chunk->fd = dup((int)(intptr_t)os_handle);
  off_t size = lseek(chunk->fd, 0, SEEK_END);
  if (size <= 0) return 999;
  chunk->size = size;
  *handle = chunk;
  return 0;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr at) {
  NOTE("");
  *base = at / GRANULARITY * GRANULARITY;
  *bytes = GRANULARITY;
  return 0;
}
CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **places, CUdeviceptr at) {
  NOTE(" %u", count);
  for (unsigned i = 0; i < count; i++) switch (attributes[i]) {
    case 1: *(CUcontext *)places[i] = 0; break;
    case 2: *(unsigned *)places[i] = 2; break;
    case 9: *(int *)places[i] = at == 16 ? -1 : 0; break;
    case 10: *(unsigned char *)places[i] = at == 16; break;  // a bool, one byte
    default: return 1;
  }
  return 0;
}
CUresult cuMemGetHandleForAddressRange(int *fd, CUdeviceptr at, size_t bytes, int type,
                                       unsigned long long flags) {
  NOTE(" %zu %d %llu", bytes, type, flags);
  if (at % 65536) return 1;
  *fd = memfd_create("dma-buf", 0);
  return 0;
}
CUresult cuIpcGetMemHandle(char *handle, CUdeviceptr at) {
  NOTE("");
  memset(handle, 7, 64);
  return at % GRANULARITY == 0;
}

