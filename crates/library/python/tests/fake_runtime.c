/* As much of CUDA's runtime as PyTorch asks before it calls its allocator: one device, and no errors. Loaded before
 * the real one, so that the real PyTorch can be put on the simulated device. */
#include <string.h>

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)attribute, (void)device;
  *value = 0;
  return 0;
}
int cudaGetDeviceProperties_v2(void *properties, int device) {
  (void)device;
  memset(properties, 0, 64);
  return 0;
}
int cudaGetLastError(void) { return 0; }
