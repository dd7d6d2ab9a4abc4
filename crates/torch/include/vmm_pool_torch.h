/* The pool for PyTorch: libvmm_pool.so.
 *
 * torch.cuda.memory.CUDAPluggableAllocator takes vmm_pool_torch_alloc and vmm_pool_torch_free, its setters
 * others. All can be called from any thread, throw nothing, and leave the calling thread's
 * current CUDA context as it is. `stream` is a CUstream or cudaStream_t of the device's primary context;
 * NULL is the legacy default stream, 2 the calling thread's own.
 *
 * VMM_POOL_DRIVER = auto (default, the GPU), cuda (the same), sim (simulated devices). The pool's other
 * VMM_POOL_ variables count too. The memory is that of vmm_pool_default (vmm_pool.h).
 *
 * Made from the Rust sources by cbindgen. */

#ifndef VMM_POOL_TORCH_H
#define VMM_POOL_TORCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * `size` bytes of `device`'s memory, aligned to 512, for work enqueued on `stream` from now on.
 * NULL for no bytes, and on failure.
 *
 * `stream` is 0 or 1 (the legacy stream), 2 (the calling thread's own), or a live stream of
 * `device`'s primary context. Before it is destroyed, vmm_pool_torch_stream_destroyed is
 * called for it.
 */
void *vmm_pool_torch_alloc(ptrdiff_t size, int device, void *stream);

/**
 * Gives memory back. Work enqueued before, on `stream` and on the stream of the allocation, may
 * still use it.
 *
 * NULL is ignored. So is what is no block of this process's pools, was freed before, or has
 * another length; the failure says which.
 *
 * As vmm_pool_torch_alloc for `stream`; if it is the stream of the allocation, it may be gone.
 * The block is not used by work that is enqueued later.
 */
void vmm_pool_torch_free(void *pointer, ptrdiff_t size, int device, void *stream);

/**
 * Says that work on `stream` uses the block that starts at `pointer`: once freed, it is not reused
 * before the work enqueued on `stream` until then is done.
 *
 * The stream is taken for one of the block's own device. For any other the driver refuses the
 * gate, and the block is not reused at all.
 *
 * As vmm_pool_torch_alloc for `stream`.
 */
void vmm_pool_torch_record_stream(void *pointer, void *stream);

/**
 * Gives everything idle back to the driver, of all devices used so far. Waits for the work that
 * may still use it.
 */
void vmm_pool_torch_empty_cache(void);

/**
 * Says that `stream` is about to be destroyed: its memory goes back with its last block. While it is
 * being captured it must not be, and the failure says so: then say this again after the capture. The same
 * if the driver refuses, which the failure says too.
 *
 * The stream is live, and no other function is called for it meanwhile.
 */
void vmm_pool_torch_stream_destroyed(int device,
                                     void *stream);

/**
 * Opens a stream capture: memory that is asked for on `stream` from now on is kept for the graph
 * that it makes. To be called before the capture begins.
 *
 * `shared` is 0, or the number of a graph that never runs at the same time and needs nothing of
 * what the other left in its memory: then both have the same. Returns the graph's number, or 0 on
 * failure.
 *
 * As vmm_pool_torch_alloc.
 */
uint64_t vmm_pool_torch_capture_begin(int device, void *stream, uint64_t shared);

/**
 * Says that the open capture spreads to `stream`, before its first request in it. 0, or -1 on
 * failure.
 *
 * As vmm_pool_torch_alloc.
 */
int vmm_pool_torch_capture_join(uint64_t graph, int device, void *stream);

/**
 * Ends an open capture, after it has ended in the driver: its streams ask for ordinary memory
 * again. 0, or -1 on failure.
 */
int vmm_pool_torch_capture_end(uint64_t graph);

/**
 * Says that the graph is launched on `stream`, other than those that were captured. 0, or -1 on
 * failure.
 *
 * As vmm_pool_torch_alloc; the stream lives as long as the graph.
 */
int vmm_pool_torch_graph_launched_on(uint64_t graph, int device, void *stream);

/**
 * Says that the graph is not launched any more: its memory goes back once the launches that were
 * enqueued are done. Also for a capture that failed, in place of its end. 0, or -1 on failure.
 */
int vmm_pool_torch_graph_destroyed(uint64_t graph);

/**
 * The calling thread's last failure in words, or NULL if there was none. Valid until the thread's
 * next failure.
 */
const char *vmm_pool_torch_last_error(void);

/**
 * Chooses the driver, so that what is wrong is said before memory is asked for. For set_init_fn.
 */
void vmm_pool_torch_init(int device_count);

/**
 * Gives everything idle back to the driver, as vmm_pool_torch_empty_cache does. For set_reset_fn.
 */
void vmm_pool_torch_reset(void);

/**
 * Lets the process's own pool of a device hold at most this part of the device's memory, 0 to 1, from
 * now on. What it holds beyond stays until it is freed and given back. Answers with a status of
 * vmm_pool.h. For set_memory_fraction_fn, which does not look at it.
 */
int vmm_pool_torch_memory_fraction(double fraction,
                                   int device);

/**
 * The block that starts at `ptr`: its address, and its length in *size unless that is NULL. NULL for what
 * is no block. For set_base_alloc_fn.
 *
 * `size` is NULL or writable.
 */
void *vmm_pool_torch_base_alloc(void *ptr,
                                size_t *size);

/**
 * The figures of a device's pool as JSON: the object of vmm_pool_stats_json. Valid until the calling
 * thread's next call of this function or vmm_pool_torch_report. NULL on failure.
 */
const char *vmm_pool_torch_stats_json(int device);

/**
 * How a device's memory is used, in lines for people. Valid until the calling thread's next call of this
 * function or vmm_pool_torch_stats_json. NULL on failure.
 *
 * After a request that failed, vmm_pool_torch_last_error says what was tried to be allocated and what
 * may help; this says what holds the memory.
 */
const char *vmm_pool_torch_report(int device);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VMM_POOL_TORCH_H */
