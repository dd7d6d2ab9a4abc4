// What a decode step does with a KV cache, without a model: new tokens' keys and values are written,
// then every sequence's are read as attention reads them. Compiled at run time for one shape of the
// cache; words are 32 bits, two 16-bit elements each.
//
// Defined by the compiler's options: LAYERS, HEADS (on this device), FIRST_HEAD, MODEL_HEADS, HEAD_WORDS
// (words of one head of one token).

typedef unsigned int u32;
typedef unsigned long long u64;

#define LANE_WORDS ((HEAD_WORDS + 31) / 32)
#define TOKEN_WORDS (LAYERS * 2 * HEADS * HEAD_WORDS)
#define WARPS 4
#define UNROLL 4

// Where a sequence's tokens lie: at one address with a stride, or in blocks that a table names.
struct Place {
    u64 base;            // contiguous: of the sequence; paged: of the cache
    const int *table;    // paged: the sequence's blocks, else null
};

struct Layout {
    u64 token_stride;    // bytes from token to token, within a layer (paged: within a block)
    u64 layer_stride;    // bytes from one layer's keys to the next layer's
    u64 value_offset;    // bytes from a layer's keys to its values
    u64 block_bytes;     // paged: from block to block
    u32 block_tokens;    // paged: tokens of a block, else 0
};

// The same mixing as in pattern.rs.
__device__ __forceinline__ u32 mix(u32 x) {
    x ^= x >> 16; x *= 0x7feb352du;
    x ^= x >> 15; x *= 0x846ca68bu;
    return x ^ (x >> 16);
}
__device__ __forceinline__ u32 token_base(u32 id, u32 position) {
    return mix(id * 0x9e3779b9u ^ mix(position + 0x85ebca6bu));
}
__device__ __forceinline__ u32 word_base(u32 word) { return mix(word ^ 0x5bd1e995u); }
__device__ __forceinline__ u32 position_factor(u32 position) {
    return mix(position + 0xc2b2ae35u) | 1u;
}

__device__ __forceinline__ u64 token_address(const Place &place, const Layout &at, u32 position) {
    if (!place.table) return place.base + position * at.token_stride;
    u32 block = position / at.block_tokens;
    return place.base + (u64)place.table[block] * at.block_bytes
        + (position - block * at.block_tokens) * at.token_stride;
}

// One block of threads for each new token.
extern "C" __global__ void write_tokens(const Place *places, const u32 *sequences,
                                        const u32 *positions, const u32 *tokens, Layout at) {
    u32 position = positions[blockIdx.x];
    u64 start = token_address(places[sequences[blockIdx.x]], at, position);
    u32 base = token_base(tokens[blockIdx.x], position);
    for (u32 word = threadIdx.x; word < TOKEN_WORDS; word += blockDim.x) {
        u32 row = word / (HEADS * HEAD_WORDS), in_row = word % (HEADS * HEAD_WORDS);
        u64 row_start = start + (row / 2) * at.layer_stride + (row & 1) * at.value_offset;
        u32 number = (row * MODEL_HEADS + FIRST_HEAD) * HEAD_WORDS + in_row;
        ((u32 *)row_start)[in_row] = base + word_base(number);
    }
}

__device__ __forceinline__ float element(u32 word, int half) {
    return (float)(short)(half ? word >> 16 : word & 0xffffu) * (1.0f / 32768.0f);
}

// One layer. Grid: (heads, sequences, parts of a sequence); WARPS warps, a token a warp at a time. The
// soft maximum is taken online; `checks` gets the sum of the words that were read, weighted by
// position, and `outputs` what attention gives, a part of it each.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
attend(const Place *places, const u32 *lengths, u32 part_tokens, u32 layer, Layout at,
       u32 *checks, float *outputs) {
    u32 head = blockIdx.x, sequence = blockIdx.y, length = lengths[sequence];
    u32 begin = blockIdx.z * part_tokens;
    if (begin >= length) return;
    u32 end = min(length, begin + part_tokens);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Place place = places[sequence];
    u64 in_token = layer * at.layer_stride + head * (HEAD_WORDS * 4ull);

    float query[LANE_WORDS][2], sum[LANE_WORDS][2] = {};
    for (int i = 0; i < LANE_WORDS; i++) {
        u32 q = mix(sequence * 31u + head * 7u + layer + lane + 32u * i);
        query[i][0] = element(q, 0); query[i][1] = element(q, 1);
    }
    float most = -1e30f, weights = 0.0f;
    u32 check = 0;
    for (u32 first = begin + warp * UNROLL; first < end; first += WARPS * UNROLL) {
        u32 key[UNROLL][LANE_WORDS], value[UNROLL][LANE_WORDS];
        // These tokens lie in one block if blocks are a multiple of so many: one look at the table.
        u64 start = token_address(place, at, first) + in_token;
        bool in_row = !place.table || at.block_tokens % UNROLL == 0;
        #pragma unroll
        for (int t = 0; t < UNROLL; t++) {
            if (first + t >= end) break;
            const u32 *keys = (const u32 *)(in_row
                ? start + t * at.token_stride
                : token_address(place, at, first + t) + in_token);
            const u32 *values = (const u32 *)((u64)keys + at.value_offset);
            #pragma unroll
            for (int i = 0; i < LANE_WORDS; i++) {
                u32 w = lane * LANE_WORDS + i;
                bool is = w < HEAD_WORDS;
                key[t][i] = is ? keys[w] : 0; value[t][i] = is ? values[w] : 0;
            }
        }
        #pragma unroll
        for (int t = 0; t < UNROLL; t++) {
            if (first + t >= end) break;
            float dot = 0.0f;
            u32 words = 0;
            #pragma unroll
            for (int i = 0; i < LANE_WORDS; i++) {
                dot += query[i][0] * element(key[t][i], 0) + query[i][1] * element(key[t][i], 1);
                words += key[t][i] + value[t][i];
            }
            check += words * position_factor(first + t);
            #pragma unroll
            for (int step = 16; step; step >>= 1) dot += __shfl_xor_sync(~0u, dot, step);
            float next = fmaxf(most, dot), old = __expf(most - next), now = __expf(dot - next);
            weights = weights * old + now;
            #pragma unroll
            for (int i = 0; i < LANE_WORDS; i++) {
                sum[i][0] = sum[i][0] * old + now * element(value[t][i], 0);
                sum[i][1] = sum[i][1] * old + now * element(value[t][i], 1);
            }
            most = next;
        }
    }
    // The warps' parts together.
    __shared__ float shared_most[WARPS], shared_weights[WARPS], shared_sum[WARPS][LANE_WORDS * 2][32];
    for (int step = 16; step; step >>= 1) check += __shfl_xor_sync(~0u, check, step);
    if (lane == 0) {
        atomicAdd(&checks[sequence], check);
        shared_most[warp] = most; shared_weights[warp] = weights;
    }
    for (int i = 0; i < LANE_WORDS * 2; i++) shared_sum[warp][i][lane] = sum[i / 2][i % 2];
    __syncthreads();
    if (warp == 0) {
        float all = shared_most[0], total = 0.0f;
        for (int w = 1; w < WARPS; w++) all = fmaxf(all, shared_most[w]);
        for (int w = 0; w < WARPS; w++) total += shared_weights[w] * __expf(shared_most[w] - all);
        u64 row = ((u64)sequence * gridDim.z + blockIdx.z) * HEADS + head;
        for (int i = 0; i < LANE_WORDS * 2; i++) {
            float value = 0.0f;
            for (int w = 0; w < WARPS; w++)
                value += shared_sum[w][i][lane] * __expf(shared_most[w] - all);
            outputs[(row * 32 + lane) * LANE_WORDS * 2 + i] = value / total;
        }
    }
}

// A model's weights, as a step streams them: `sum` gets the sum of all their words.
extern "C" __global__ void read_weights(const uint4 *weights, u64 count, u32 *sum) {
    u32 words = 0;
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        uint4 it = weights[i];
        words += it.x + it.y + it.z + it.w;
    }
    for (int step = 16; step; step >>= 1) words += __shfl_xor_sync(~0u, words, step);
    if (threadIdx.x % 32 == 0) atomicAdd(sum, words);
}

// Word i of the weights is mix(i + salt), so that each model's have a sum of its own.
extern "C" __global__ void fill_weights(uint4 *weights, u64 count, u32 salt) {
    u64 stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
        u32 w = (u32)i * 4u + salt;
        weights[i] = make_uint4(mix(w), mix(w + 1), mix(w + 2), mix(w + 3));
    }
}
