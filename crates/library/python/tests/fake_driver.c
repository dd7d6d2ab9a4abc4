/* A libcuda.so.1 that knows which streams are captured because the test says so. */
#include <stdint.h>

uint64_t fake_captured;      /* bit n: stream n is captured */
int fake_waits;              /* how often a device was waited for */
int fake_wait_answer;        /* what waiting answers */
int fake_device;             /* the device that is waited for */

int cuStreamIsCapturing(void *stream, int *status) {
  uintptr_t number = (uintptr_t)stream;
  if (number == 0 && fake_captured != 0) return 906; /* the legacy stream cannot be asked then */
  *status = (int)((fake_captured >> number) & 1);
  return 0;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 100; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(uintptr_t)device; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return 0; }
int cuCtxPushCurrent_v2(void *context) { fake_device = (int)(uintptr_t)context - 100; return 0; }
int cuCtxPopCurrent_v2(void **context) { (void)context; return 0; }
int cuCtxSynchronize(void) { if (fake_wait_answer == 0) fake_waits += 1; return fake_wait_answer; }
