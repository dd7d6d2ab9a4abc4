/* The pool behind a C ABI: libvmm_pool.so.
 *
 * The first two functions are what torch.cuda.memory.CUDAPluggableAllocator takes. All can be
 * called from any thread, throw nothing, and leave the calling thread's current CUDA context as it
 * is. `stream` is a CUstream or cudaStream_t of the device's primary context; NULL is the legacy
 * default stream, 2 the calling thread's own.
 *
 * VMM_POOL_DRIVER = auto (default, the GPU), cuda (the same), sim (simulated devices). The pool's
 * other VMM_POOL_ variables count too.
 */
#ifndef VMM_POOL_TORCH_H
#define VMM_POOL_TORCH_H

#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* `size` bytes of the device's memory, aligned to 512, for work enqueued on `stream` from now on.
 * NULL for no bytes, and on failure: vmm_pool_torch_last_error says why. In a forked child always
 * NULL. */
void *vmm_pool_torch_alloc(ssize_t size, int device, void *stream);

/* Gives memory back; `size` as it was asked for. Work enqueued before, on `stream` and on the
 * stream of the allocation, may still use it. NULL is ignored; what is no block of that size is
 * ignored too, with an error kept. */
void vmm_pool_torch_free(void *ptr, ssize_t size, int device, void *stream);

/* Work on `stream`, one of the block's own device, uses the block that starts at `ptr`: once freed,
 * it is not reused before that work is done. */
void vmm_pool_torch_record_stream(void *ptr, void *stream);

/* Gives everything idle back to the driver; waits for work that may still use it. */
void vmm_pool_torch_empty_cache(void);

/* To be called before a stream that was used here is destroyed, and not while another call for the
 * same stream runs: handles are given out again by CUDA. While the stream is being captured it must
 * not be destroyed; vmm_pool_torch_last_error says so, and this is to be called again afterwards. */
void vmm_pool_torch_stream_destroyed(int device, void *stream);

/* Stream captures. No function here harms one. But a graph uses the addresses that were given out
 * while it was captured whenever it is launched, and nobody tells this library that a capture begins:
 * the program has to. Memory of a capture that it was not told of is ordinary, and reused as soon as
 * it is freed.
 *
 * Opens a capture, before cuStreamBeginCapture: what is asked for on `stream` from now on is kept for
 * the graph, freed or not. `shared` is 0, or the number of a graph that never runs at the same time:
 * then both have the same memory. Returns the graph's number, 0 on failure. */
uint64_t vmm_pool_torch_capture_begin(int device, void *stream, uint64_t shared);

/* The open capture spreads to `stream`, too; to be called before its first request. 0, or -1 on
 * failure, as those below. */
int vmm_pool_torch_capture_join(uint64_t graph, int device, void *stream);

/* After cuStreamEndCapture: the streams ask for ordinary memory again. */
int vmm_pool_torch_capture_end(uint64_t graph);

/* The graph is launched on `stream`, other than those captured. The stream lives as long as it. */
int vmm_pool_torch_graph_launched_on(uint64_t graph, int device, void *stream);

/* The graph is not launched any more: its memory goes back behind its launches. Also for a capture
 * that failed, in place of its end. */
int vmm_pool_torch_graph_destroyed(uint64_t graph);

/* The calling thread's last failure in words, or NULL. Valid until its next failure. */
const char *vmm_pool_torch_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
