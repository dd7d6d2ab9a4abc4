/* The pool for CuPy: libvmm_pool.so.
 *
 * Both functions can be called from any thread, throw nothing, and leave the calling thread's current
 * CUDA context as it is. VMM_POOL_DRIVER and the pool's other VMM_POOL_ variables count. The memory is
 * that of vmm_pool_default (vmm_pool.h).
 *
 * Made from the Rust sources by cbindgen. */

#ifndef VMM_POOL_CUPY_H
#define VMM_POOL_CUPY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Memory of a device, aligned to 512, that is ordered with nothing: usable on any stream at once. NULL for
 * no bytes, and on failure: vmm_pool_last_error says why. `param` is ignored.
 *
 * May wait for all work of the device, if memory was freed that some of it may still use.
 */
void *vmm_pool_cupy_malloc(void *param,
                           size_t size,
                           int device);

/**
 * Gives memory back. Work enqueued before, on any stream of any device that was used with it, may still
 * use it. NULL is ignored; what is no block is ignored too, and vmm_pool_last_error says so. `param` is
 * ignored.
 */
void vmm_pool_cupy_free(void *param,
                        void *ptr,
                        int device);

/**
 * Waits for all work of a device, and gives what was freed before to the pool: then vmm_pool_trim can
 * give it back to the driver. Does nothing while a stream is being captured. Answers with a status of
 * vmm_pool.h.
 */
int vmm_pool_cupy_synchronize(int device);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VMM_POOL_CUPY_H */
