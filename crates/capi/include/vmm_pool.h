/* A pool of GPU memory with stable addresses: libvmm_pool.so.
 *
 * Functions answer with a status (vmm_pool_status), 0 if all went well; vmm_pool_last_error then says
 * in words what was wrong. All can be called from any thread, throw nothing, and leave the calling
 * thread's current CUDA context as it is. Handles are numbers: one that is stale or of another kind is
 * refused. After a fork the child gets VMM_POOL_FORKED; when the process exits nothing is torn down.
 * docs/integrations/c.md says more.
 *
 * Made from the Rust sources by cbindgen. */

#ifndef VMM_POOL_H
#define VMM_POOL_H

#include <stddef.h>
#include <stdint.h>

/**
 * The version of this header. A library of another one has another name (its soname).
 */
#define VMM_POOL_ABI_VERSION 1

/**
 * vmm_pool_sleep: what the buffers hold is kept, in the host's memory.
 */
#define VMM_POOL_KEEP 0

/**
 * vmm_pool_sleep: what the buffers hold is lost.
 */
#define VMM_POOL_DROP 1

/**
 * vmm_elastic_migrate: the memory of a device; the index is its ordinal.
 */
#define VMM_PLACE_DEVICE 0

/**
 * vmm_elastic_migrate: the memory of a NUMA node of the host; the index is its number.
 */
#define VMM_PLACE_HOST_NODE 1

/**
 * vmm_elastic_grant: no access. The values are those of CUDA.
 */
#define VMM_ACCESS_NONE 0

/**
 * vmm_elastic_grant: the device may read.
 */
#define VMM_ACCESS_READ 1

/**
 * vmm_elastic_grant: the device may read and write.
 */
#define VMM_ACCESS_READ_WRITE 3

/**
 * vmm_import_check: the memory is the owner's.
 */
#define VMM_IMPORT_CURRENT 0

/**
 * vmm_import_check: the owner is changing the memory; look again.
 */
#define VMM_IMPORT_CHANGING 1

/**
 * vmm_import_check: the owner has changed the memory; vmm_import_refresh follows.
 */
#define VMM_IMPORT_LAGGING 2

/**
 * vmm_import_check: the owner has taken the buffer back. What is mapped stays until vmm_import_close.
 */
#define VMM_IMPORT_WITHDRAWN 3

/**
 * vmm_import_check: the owner's process has ended. What is mapped stays, with its bytes.
 */
#define VMM_IMPORT_OWNER_GONE 4

/**
 * The VMM_POOL_ variables of the environment count, in place of what the options say.
 */
#define VMM_POOL_USE_ENVIRONMENT 1

/**
 * Chunks of elastic buffers can be exported to other processes.
 */
#define VMM_POOL_EXPORTABLE 2

/**
 * No thread of the pool's own: its work is done by requests when they come.
 */
#define VMM_POOL_NO_BACKGROUND 4

/**
 * Guard mode: stray writes of kernels fault. Slow.
 */
#define VMM_POOL_GUARD 8

/**
 * The buffer is moved by the pool to make room, while nobody uses it.
 */
#define VMM_ELASTIC_MOVABLE 1

/**
 * Its chunks can be exported to other processes, whatever the pool's options say.
 */
#define VMM_ELASTIC_EXPORTABLE 2

/**
 * All of the capacity is one physical piece.
 */
#define VMM_ELASTIC_SINGLE_PIECE 4

/**
 * What the functions of this header answer. Everything but VMM_POOL_OK leaves things as they were,
 * and vmm_pool_last_error says more in words.
 */
typedef enum vmm_pool_status {
    /**
     * It is done.
     */
    VMM_POOL_OK = 0,
    /**
     * An argument is wrong: the words say which, and what was expected.
     */
    VMM_POOL_INVALID = 1,
    /**
     * Physical memory is short, of the device, of a limit or of a quota.
     */
    VMM_POOL_OUT_OF_MEMORY = 2,
    /**
     * Addresses are short, which is not memory.
     */
    VMM_POOL_OUT_OF_ADDRESSES = 3,
    /**
     * No block that somebody holds starts at the address: it was freed before, or is none.
     */
    VMM_POOL_NOT_A_BLOCK = 4,
    /**
     * There is no driver: no GPU, or a wrong VMM_POOL_DRIVER.
     */
    VMM_POOL_NO_DRIVER = 5,
    /**
     * The device, the driver or the buffer cannot do that.
     */
    VMM_POOL_NOT_SUPPORTED = 6,
    /**
     * Somebody uses it: try again when that has ended.
     */
    VMM_POOL_BUSY = 7,
    /**
     * This process was forked after the driver was opened, or it is exiting: the driver is gone.
     */
    VMM_POOL_FORKED = 8,
    /**
     * Any other answer of the driver.
     */
    VMM_POOL_DRIVER = 9,
    /**
     * The text was cut, since the buffer is too short for it.
     */
    VMM_POOL_TRUNCATED = 10,
    /**
     * A bug in the pool; what it printed to stderr says where.
     */
    VMM_POOL_PANICKED = 11,
    /**
     * The process that owns a shared buffer is not there, refuses, or has taken the buffer back.
     */
    VMM_POOL_OWNER = 12,
} vmm_pool_status;

/**
 * An elastic buffer: addresses of its own, whose memory comes and goes. The pointer is a number: it
 * is valid until vmm_elastic_release.
 */
typedef struct vmm_elastic vmm_elastic;

/**
 * A buffer of another process, mapped here. The pointer is a number: it is valid until
 * vmm_import_close.
 */
typedef struct vmm_import vmm_import;

/**
 * A connection to a process that offers buffers. The pointer is a number: it is valid until
 * vmm_import_disconnect.
 */
typedef struct vmm_importer vmm_importer;

/**
 * A pool. The pointer is a number: it is valid until vmm_pool_destroy.
 */
typedef struct vmm_pool vmm_pool;

/**
 * A use of an elastic buffer by a stream. The pointer is a number: it is valid until vmm_use_end.
 */
typedef struct vmm_use vmm_use;

/**
 * How a pool is made. Set all of it to 0, then struct_bytes to sizeof, then what differs.
 */
typedef struct vmm_pool_options {
    /**
     * sizeof(vmm_pool_options).
     */
    uint32_t struct_bytes;
    /**
     * VMM_POOL_USE_ENVIRONMENT, VMM_POOL_EXPORTABLE, VMM_POOL_NO_BACKGROUND, VMM_POOL_GUARD; or 0.
     */
    uint32_t flags;
    /**
     * The ordinals of its devices, or NULL for all of the machine's.
     */
    const int32_t *devices;
    /**
     * How many there are in devices.
     */
    uint64_t device_count;
    /**
     * The length of chunks that streams' memory grows by: a power of two from the driver's granularity
     * (2 MiB) to 16 GiB; 0 lets the pool choose.
     */
    uint64_t chunk_bytes;
    /**
     * The most physical memory that it owns on each device; 0 is no limit.
     */
    uint64_t limit_bytes;
    /**
     * Chunks are made ahead of need until so much of each device lies ready.
     */
    uint64_t stock_low_bytes;
    /**
     * Chunks that come back while so much lies ready go back to the driver; 0 is no such mark.
     */
    uint64_t stock_high_bytes;
    /**
     * What elastic buffers may have of the host's memory, for vmm_pool_sleep and vmm_elastic_migrate;
     * 0 is none.
     */
    uint64_t host_bytes;
    /**
     * Which NUMA node of the host gives it.
     */
    uint32_t host_node;
    /**
     * 0.
     */
    uint32_t reserved;
} vmm_pool_options;

/**
 * How an elastic buffer is made. Set all of it to 0, then struct_bytes to sizeof, then what differs.
 */
typedef struct vmm_elastic_options {
    /**
     * sizeof(vmm_elastic_options).
     */
    uint32_t struct_bytes;
    /**
     * Its home: a device of the pool.
     */
    int32_t device;
    /**
     * The addresses to reserve, which cost no memory; 0 are as many as the device has memory.
     */
    uint64_t capacity_bytes;
    /**
     * The length of its chunks, a multiple of the driver's granularity; 0 lets the pool choose.
     */
    uint64_t chunk_bytes;
    /**
     * A name in UTF-8, of at most 255 bytes, for statistics and vmm_pool_sleep; or NULL.
     */
    const char *tag;
    /**
     * What may be committed at most; 0 is no limit but the capacity.
     */
    uint64_t quota_bytes;
    /**
     * VMM_ELASTIC_MOVABLE, VMM_ELASTIC_EXPORTABLE, VMM_ELASTIC_SINGLE_PIECE; or 0.
     */
    uint32_t flags;
    /**
     * 0.
     */
    uint32_t reserved;
} vmm_elastic_options;

/**
 * What is known of an elastic buffer.
 */
typedef struct vmm_elastic_state {
    /**
     * sizeof(vmm_elastic_state), set before the call.
     */
    uint32_t struct_bytes;
    /**
     * Its home, which a migration changes.
     */
    int32_t device;
    /**
     * Its address, which never changes.
     */
    uint64_t address;
    /**
     * What can be committed.
     */
    uint64_t capacity_bytes;
    /**
     * Its addresses with memory behind them.
     */
    uint64_t committed_bytes;
    /**
     * The length of its chunks.
     */
    uint64_t chunk_bytes;
    /**
     * Counts the changes of the memory behind the addresses.
     */
    uint64_t generation;
    /**
     * Uses that have begun and not ended.
     */
    uint64_t open_uses;
    /**
     * Of the committed bytes, those that lie on devices.
     */
    uint64_t device_bytes;
    /**
     * Of the committed bytes, those that lie in the host's memory.
     */
    uint64_t host_bytes;
    /**
     * 0 awake; 1 asleep, its contents kept; 2 asleep, its contents lost.
     */
    int32_t asleep;
    /**
     * 0.
     */
    uint32_t reserved;
} vmm_elastic_state;

/**
 * What is known of an import.
 */
typedef struct vmm_import_facts {
    /**
     * sizeof(vmm_import_facts), set before the call.
     */
    uint32_t struct_bytes;
    /**
     * The first device that has access: that on which the memory lay at the opening.
     */
    int32_t device;
    /**
     * Its address here, which never changes.
     */
    uint64_t address;
    /**
     * Where its last memory ends.
     */
    uint64_t bytes;
    /**
     * The length of its chunks.
     */
    uint64_t chunk_bytes;
    /**
     * Counts the changes of the owner's memory: that which is mapped.
     */
    uint64_t generation;
    /**
     * VMM_ACCESS_READ or VMM_ACCESS_READ_WRITE.
     */
    int32_t access;
    /**
     * As vmm_import_check says it.
     */
    int32_t state;
} vmm_import_facts;

/**
 * What is known of a block.
 */
typedef struct vmm_pool_block_info {
    /**
     * sizeof(vmm_pool_block_info), set before the call.
     */
    uint32_t struct_bytes;
    /**
     * The device whose memory it is.
     */
    int32_t device;
    /**
     * Its first address.
     */
    uint64_t address;
    /**
     * Its length: what was asked for, rounded up to 512.
     */
    uint64_t bytes;
} vmm_pool_block_info;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * VMM_POOL_ABI_VERSION of the library.
 */
uint32_t vmm_pool_abi_version(void);

/**
 * The version of the library in words, as "0.1.0". Valid for ever.
 */
const char *vmm_pool_version(void);

/**
 * The calling thread's last failure in words, or NULL if there was none. Valid until the thread's
 * next failure. A call that succeeds does not change it.
 */
const char *vmm_pool_last_error(void);

/**
 * The status of the calling thread's last failure, VMM_POOL_OK if there was none: for functions that
 * answer with an address. A call that succeeds does not change it.
 */
int32_t vmm_pool_last_status(void);

/**
 * Makes a pool. The driver is chosen by VMM_POOL_DRIVER when it is first needed: auto (default) and
 * cuda are the GPU, sim is simulated devices. *out is NULL on failure.
 *
 * With options of NULL it has all devices, and its settings from the VMM_POOL_ variables.
 *
 * options is NULL, or as many readable bytes as it says, devices included; out is writable.
 */
int32_t vmm_pool_create(const struct vmm_pool_options *options, struct vmm_pool **out);

/**
 * Ends a pool, and waits for work that still uses what it frees by that. Blocks that are alive stay
 * valid until they are freed. Refused while elastic buffers of the pool are alive or a stream that uses
 * it is being captured (VMM_POOL_BUSY), and for a pool of vmm_pool_default.
 */
int32_t vmm_pool_destroy(struct vmm_pool *pool);

/**
 * The process's own pool of one device, made now if it was not used before, with its settings from the
 * VMM_POOL_ variables. The entry points for PyTorch and CuPy take their memory from it. It is never
 * destroyed.
 *
 * out is writable.
 */
int32_t vmm_pool_default(int32_t device,
                         struct vmm_pool **out);

/**
 * The pool's figures, as one JSON object: "devices", "hosts" and "elastic", a list each. Fields may be
 * added; null stands for no limit.
 *
 * The text is given in the manner of snprintf: as much as fits into capacity, always with a 0 behind
 * it, and VMM_POOL_TRUNCATED if it was cut. *needed, unless that is NULL, becomes its whole length
 * without the 0. With a capacity of 0, buffer may be NULL.
 *
 * buffer has capacity writable bytes; needed is NULL or writable.
 */
int32_t vmm_pool_stats_json(struct vmm_pool *pool,
                            char *buffer,
                            size_t capacity,
                            size_t *needed);

/**
 * How a device's memory is used, in lines for people. The text is given as by vmm_pool_stats_json.
 *
 * As vmm_pool_stats_json.
 */
int32_t vmm_pool_report(struct vmm_pool *pool,
                        int32_t device,
                        char *buffer,
                        size_t capacity,
                        size_t *needed);

/**
 * Gives everything idle on a device back to the driver. Waits for work that may still use it.
 * *freed_bytes, unless that is NULL, becomes the bytes given back.
 *
 * freed_bytes is NULL or writable.
 */
int32_t vmm_pool_trim(struct vmm_pool *pool, int32_t device, uint64_t *freed_bytes);

/**
 * Puts the elastic buffers with a tag to sleep: their memory goes back to the driver, their addresses
 * stay. contents is VMM_POOL_KEEP, for which the pool needs host_bytes, or VMM_POOL_DROP. Uses that are
 * open are waited for, patience_us microseconds at most. *bytes, unless that is NULL, becomes what
 * devices gave back. Stops at the first buffer that cannot; ask again.
 *
 * tag ends with a 0 within 256 bytes; bytes is NULL or writable.
 */
int32_t vmm_pool_sleep(struct vmm_pool *pool,
                       const char *tag,
                       int32_t contents,
                       uint64_t patience_us,
                       uint64_t *bytes);

/**
 * Wakes the elastic buffers with a tag: their memory comes back to where it lay. *bytes, unless that is
 * NULL, becomes what devices gave. Stops at the first that cannot wake, which sleeps on; ask again.
 *
 * As vmm_pool_sleep.
 */
int32_t vmm_pool_wake(struct vmm_pool *pool,
                      const char *tag,
                      uint64_t *bytes);

/**
 * Reserves addresses for an elastic buffer. Nothing is committed. *out is NULL on failure.
 *
 * options has as many readable bytes as it says, its tag ends with a 0 within 256 bytes; out is
 * writable.
 */
int32_t vmm_elastic_reserve(struct vmm_pool *pool,
                            const struct vmm_elastic_options *options,
                            struct vmm_elastic **out);

/**
 * Gives an elastic buffer back. Its memory goes once the work of its uses is done; nobody waits. A call
 * of another thread that is under way ends first.
 */
int32_t vmm_elastic_release(struct vmm_elastic *elastic);

/**
 * Commits what is missing below bytes, in whole chunks; all or nothing. What the memory holds is
 * undefined. *committed_bytes, unless that is NULL, becomes the bytes committed anew.
 *
 * committed_bytes is NULL or writable.
 */
int32_t vmm_elastic_grow(struct vmm_elastic *elastic, uint64_t bytes, uint64_t *committed_bytes);

/**
 * Takes the memory beyond bytes away, in whole chunks; it goes once the work of its uses is done, and
 * nobody waits. *freed_bytes, unless that is NULL, becomes the bytes taken away.
 *
 * freed_bytes is NULL or writable.
 */
int32_t vmm_elastic_shrink(struct vmm_elastic *elastic,
                           uint64_t bytes,
                           uint64_t *freed_bytes);

/**
 * Moves all of the memory to another place, contents and all, at the same addresses. place_kind is
 * VMM_PLACE_DEVICE or VMM_PLACE_HOST_NODE; a device becomes its home. Uses that are open are waited for,
 * patience_us microseconds at most. *moved_bytes, unless that is NULL, becomes the bytes moved.
 *
 * moved_bytes is NULL or writable.
 */
int32_t vmm_elastic_migrate(struct vmm_elastic *elastic,
                            int32_t place_kind,
                            uint32_t place_index,
                            uint64_t patience_us,
                            uint64_t *moved_bytes);

/**
 * Lets another device of the pool use the buffer, memory that is committed later included. access is
 * VMM_ACCESS_NONE, VMM_ACCESS_READ or VMM_ACCESS_READ_WRITE.
 */
int32_t vmm_elastic_grant(struct vmm_elastic *elastic,
                          int32_t device,
                          int32_t access);

/**
 * Takes a device's access away: the same as VMM_ACCESS_NONE. Work of that device that still uses the
 * buffer faults, so wait for it first.
 */
int32_t vmm_elastic_revoke(struct vmm_elastic *elastic,
                           int32_t device);

/**
 * What is known of the buffer now.
 *
 * out has as many writable bytes as its first field says.
 */
int32_t vmm_elastic_info(struct vmm_elastic *elastic, struct vmm_elastic_state *out);

/**
 * Says that work of stream, one of that device, is going to use the buffer. Call vmm_use_end once all
 * of that work is enqueued: the memory stays until it is done, however the buffer shrinks, moves or ends
 * meanwhile. *out is NULL on failure.
 *
 * stream is live until vmm_use_end at least, and vmm_pool_stream_destroyed is called before it is
 * destroyed; out is writable.
 */
int32_t vmm_elastic_use_on(struct vmm_elastic *elastic,
                           int32_t device,
                           void *stream,
                           struct vmm_use **out);

/**
 * Says that all work of the use is enqueued. In any thread.
 */
int32_t vmm_use_end(struct vmm_use *begun);

/**
 * Connects to a process that offers buffers: one with an exporter, or `vmm-pool serve`. The address is
 * the path of its socket, or @ and a name. Each step of that process may take timeout_us microseconds.
 * *out is NULL on failure.
 *
 * address is NULL, or a text that ends with 0; out is writable.
 */
int32_t vmm_import_connect(const char *address,
                           uint64_t timeout_us,
                           struct vmm_importer **out);

/**
 * Ends a connection, once the imports that came by it are closed. `vmm-pool serve` holds what was opened
 * until then.
 */
int32_t vmm_import_disconnect(struct vmm_importer *importer);

/**
 * Maps the buffer of that name at an address of its own, for the devices on which its memory lies. access
 * is VMM_ACCESS_READ or VMM_ACCESS_READ_WRITE. *out is NULL on failure.
 *
 * name is NULL, or a text that ends with 0; out is writable.
 */
int32_t vmm_import_open(struct vmm_importer *importer,
                        const char *name,
                        int32_t access,
                        struct vmm_import **out);

/**
 * Whether the memory that is mapped is the owner's: *out becomes VMM_IMPORT_CURRENT or another of them.
 * Costs no call of the system.
 *
 * out is writable.
 */
int32_t vmm_import_check(struct vmm_import *import,
                         int32_t *out);

/**
 * Maps what the owner has now, at the same address. Work that uses memory which leaves must have ended.
 * VMM_POOL_OUT_OF_ADDRESSES: the buffer has outgrown the addresses; open it anew.
 */
int32_t vmm_import_refresh(struct vmm_import *import,
                           uint64_t patience_us);

/**
 * What is known of the import now.
 *
 * out has as many writable bytes as its first field says.
 */
int32_t vmm_import_info(struct vmm_import *import, struct vmm_import_facts *out);

/**
 * Unmaps an import. Work that uses it must have ended.
 */
int32_t vmm_import_close(struct vmm_import *import);

/**
 * Memory of a device for work that is enqueued on stream from now on; *out becomes its address, aligned
 * to 512, and NULL for no bytes and on failure.
 *
 * stream is a CUstream or cudaStream_t of the device's primary context: NULL and 1 are the legacy
 * default stream, 2 the calling thread's own. Before it is destroyed, vmm_pool_stream_destroyed is to
 * be called.
 *
 * stream is live; out is writable.
 */
int32_t vmm_pool_alloc(struct vmm_pool *pool,
                       int32_t device,
                       uint64_t bytes,
                       void *stream,
                       void **out);

/**
 * Gives a block back, whichever pool it came from. bytes is what was asked for. Work enqueued before, on
 * stream and on the stream of the allocation, may still use it. NULL is ignored. A block that was freed
 * before, or is none, is VMM_POOL_NOT_A_BLOCK, another length VMM_POOL_INVALID; then nothing is
 * changed.
 *
 * stream is live; if it is the stream of the allocation, it may be gone. The block is not used by work
 * that is enqueued later.
 */
int32_t vmm_pool_free(void *ptr,
                      uint64_t bytes,
                      void *stream);

/**
 * Says that work on stream, one of the block's own device, uses the block that starts at ptr: once
 * freed, it is not reused before the work enqueued on stream until then is done.
 *
 * stream is live, and vmm_pool_stream_destroyed is called before it is destroyed.
 */
int32_t vmm_pool_record_stream(void *ptr, void *stream);

/**
 * Says that stream is about to be destroyed, to all pools of the process: its memory goes back with its
 * last block. On failure the stream must not be destroyed: say this again, after the capture if it is being
 * captured (VMM_POOL_BUSY).
 *
 * stream is live, and no other function is called for it meanwhile.
 */
int32_t vmm_pool_stream_destroyed(int32_t device,
                                  void *stream);

/**
 * What is known of the block that starts at ptr, of any pool of the process. An address inside of a
 * block is VMM_POOL_NOT_A_BLOCK.
 *
 * out has as many writable bytes as its first field says.
 */
int32_t vmm_pool_block(const void *ptr, struct vmm_pool_block_info *out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VMM_POOL_H */
