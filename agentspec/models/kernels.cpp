// Products of float32 activations with weights that are stored in fewer bytes: y[m, n] = sum over k of x[m, k] w[n, k].
//
// A pass over a few tokens waits for its weights to come from memory. Here they come as they were published (4 bits,
// 8 bits, 16 bits) and are widened to the very same float32 numbers in registers; all arithmetic is float32.
//
// Layout (see panels.py): PANEL rows of w lie together, by blocks of BLOCK columns; within a block first the scales,
// PANEL floats each, then words of 32 bits that hold one or several columns of one row, PANEL rows side by side.
//
// The order of a sum depends on nothing but k: block by block, column by column. So a token's result is the same bit by
// bit, however many others are computed with it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16, MOST = 8;  // MOST: rows of x whose sums fit into the registers
#elif defined(__AVX2__)
constexpr int LANES = 8, MOST = 4;
#else
constexpr int LANES = 4, MOST = 8;
#endif

namespace {

constexpr int VECTORS = 2, PANEL = VECTORS * LANES, BLOCK = 32;
constexpr int DIRECT = 3;          // groups of MOST rows for which widening again is cheaper than keeping it
constexpr int64_t SLAB = 256;      // rows of x that stay in the cache while all of w passes by
constexpr int64_t AHEAD = 8192;    // bytes

using Floats = float __attribute__((vector_size(4 * LANES)));
using Words = int32_t __attribute__((vector_size(4 * LANES)));

template <class Vector>
inline Vector load(const void* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

// The same place; what lies far ahead of it is fetched meanwhile, which the hardware does within a page only.
template <class T>
inline const T* fetched(const T* at) {
    __builtin_prefetch((const uint8_t*)at + AHEAD);
    return at;
}

// The next vector of a stream.
template <class Vector>
inline Vector take(const uint8_t*& stream) {
    const Vector vector = load<Vector>(fetched(stream));
    stream += sizeof vector;
    return vector;
}

// Memory of this thread, which it keeps; one piece for each USE.
template <int USE>
float* scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    constexpr int64_t aligned = 64 / 4;
    if ((int64_t)memory.size() < floats + aligned) memory.resize(floats + aligned);
    return memory.data() + aligned - (uintptr_t)memory.data() % 64 / 4;
}

// A format tells how many scales a row has in a block, how many columns are in a word, and what the i-th of them is.

struct Float32 {
    static constexpr int scales = 0, columns = 1;
    static Floats widen(Words word, int, const Floats*) { return (Floats)word; }
};

struct BFloat16 {
    static constexpr int scales = 0, columns = 2;
    static Floats widen(Words word, int i, const Floats*) {
        return i == 0 ? (Floats)(word << 16) : (Floats)(word & (int32_t)0xffff0000);
    }
};

struct Float16 {
    static constexpr int scales = 0, columns = 2;
    static Floats widen(Words word, int i, const Floats*) {
        const Words half = i == 0 ? word << 16 : word;  // in the upper 16 bits
        const Words magnitude = (half >> 3) & 0x0fffe000, sign = half & (int32_t)0x80000000;
        return (Floats)((Words)((Floats)magnitude * 0x1p112f) | sign);
    }
};

struct Int8 {  // q * step
    static constexpr int scales = 1, columns = 4;
    static Floats widen(Words word, int i, const Floats* scale) {
        return __builtin_convertvector((word << (24 - 8 * i)) >> 24, Floats) * scale[0];
    }
};

struct Int4 {  // q * step + least
    static constexpr int scales = 2, columns = 8;
    static Floats widen(Words word, int i, const Floats* scale) {
        return __builtin_convertvector((word >> (4 * i)) & 15, Floats) * scale[0] + scale[VECTORS];
    }
};

template <class Format>
constexpr int64_t bytes = 4 * PANEL * (Format::scales + BLOCK / Format::columns);  // of a block

// use(k, w[0 .. PANEL, k]) for all columns of a block.
template <class Format, class Use>
inline void visit(const uint8_t* block, Use use) {
    Floats scale[Format::scales * VECTORS + 1];
    for (int i = 0; i < Format::scales * VECTORS; i++) scale[i] = take<Floats>(block);
    for (int k = 0; k < BLOCK; k += Format::columns) {
        Words word[VECTORS];
        for (auto& part : word) part = take<Words>(block);
#pragma GCC unroll 8
        for (int i = 0; i < Format::columns; i++) {
            Floats weight[VECTORS];
            for (int v = 0; v < VECTORS; v++) weight[v] = Format::widen(word[v], i, scale + v);
            use(k + i, weight);
        }
    }
}

// One panel times ROWS rows of x.
template <class Format, int ROWS>
void tile(const uint8_t* panel, const float* x, float* y, int64_t in, int64_t out, int64_t width) {
    Floats total[ROWS][VECTORS] = {};
    for (int64_t begin = 0; begin < in; begin += BLOCK, panel += bytes<Format>) {
        Floats sum[ROWS][VECTORS] = {};
        visit<Format>(panel, [&](int k, const Floats* weight) {
            for (int row = 0; row < ROWS; row++) {
                const float factor = x[row * in + begin + k];
                for (int v = 0; v < VECTORS; v++) sum[row][v] += weight[v] * factor;
            }
        });
        for (int row = 0; row < ROWS; row++)
            for (int v = 0; v < VECTORS; v++) total[row][v] += sum[row][v];
    }
    for (int row = 0; row < ROWS; row++) std::memcpy(y + row * out, total[row], 4 * width);
}

template <class Format, int ROWS = MOST>
inline void tiles(const uint8_t* panel, const float* x, float* y, int64_t rows, int64_t in, int64_t out, int64_t width) {
    if (rows == ROWS) return tile<Format, ROWS>(panel, x, y, in, out, width);
    if constexpr (ROWS > 1) tiles<Format, ROWS - 1>(panel, x, y, rows, in, out, width);
}

template <class Format>
void multiply(const uint8_t* w, const float* x, float* y, int64_t rows, int64_t in, int64_t out, int threads) {
    const int64_t panels = (out + PANEL - 1) / PANEL, blocks = in / BLOCK, groups = (rows + MOST - 1) / MOST;
    const bool widens_once = groups > DIRECT && !std::is_same_v<Format, Float32>;
#pragma omp parallel num_threads(threads)
    {
        uint8_t* const wide = widens_once ? (uint8_t*)scratch<1>(blocks * bytes<Float32> / 4) : nullptr;
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            const uint8_t* panel = w + p * blocks * bytes<Format>;
            const int64_t width = out - p * PANEL < PANEL ? out - p * PANEL : PANEL;
            if (widens_once)
                for (int64_t b = 0; b < blocks; b++)
                    visit<Format>(panel + b * bytes<Format>, [&](int k, const Floats* weight) {
                        std::memcpy(wide + b * bytes<Float32> + 4 * PANEL * k, weight, 4 * PANEL);
                    });
            for (int64_t g = 0; g < groups; g++) {  // of nearly equal size
                const int64_t begin = g * rows / groups, end = (g + 1) * rows / groups;
                float* to = y + begin * out + p * PANEL;
                if (widens_once)
                    tiles<Float32>(wide, x + begin * in, to, end - begin, in, out, width);
                else
                    tiles<Format>(panel, x + begin * in, to, end - begin, in, out, width);
            }
        }
    }
}

// --- Attention: softmax(q k^T + mask) v, over keys in parts of fixed places --------------------------------------------

constexpr int64_t KEYS = 128;     // keys whose scores are computed together
constexpr int64_t PART = 256;     // keys after which the sums begin anew, so that threads can share a row of K and V
constexpr int64_t QUERIES = 64;   // positions whose heads read K and V together
constexpr float HIDDEN = -1e30f;  // what a mask adds to scores that do not count is less

template <int STEP>
constexpr int mixed(int lane, bool upper) {
    return upper ? (lane & STEP ? LANES + lane : lane + STEP) : (lane & STEP ? LANES + lane - STEP : lane);
}

template <int STEP, bool UPPER, int... LANE>
inline Floats shuffle(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, mixed<STEP>(LANE, UPPER)...);
#else
    return __builtin_shuffle(a, b, Words{mixed<STEP>(LANE, UPPER)...});
#endif
}

// LANES x LANES numbers, transposed: halves change places, then quarters, ...
template <int STEP = LANES / 2>
inline void transpose(Floats (&rows)[LANES]) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>();
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & STEP)) {
            const Floats a = rows[i], b = rows[i + STEP];
            rows[i] = shuffle<STEP, false>(a, b, lanes);
            rows[i + STEP] = shuffle<STEP, true>(a, b, lanes);
        }
    if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}

// PANEL keys of dim numbers each as a panel of Float32; what is behind the last key is zero.
inline void panel_of_keys(const float* keys, int64_t stride, int64_t count, int64_t dim, float* panel) {
    for (int64_t first = 0; first < PANEL; first += LANES)
        for (int64_t d = 0; d < dim; d += LANES) {
            Floats rows[LANES];
            for (int i = 0; i < LANES; i++)
                rows[i] = first + i < count ? load<Floats>(fetched(keys + (first + i) * stride + d)) : Floats{};
            transpose(rows);
            for (int i = 0; i < LANES; i++) std::memcpy(panel + (d + i) * PANEL + first, &rows[i], sizeof(Floats));
        }
}

// e^x for x <= 0, within 2 units in the last place; 1 for 0, and 0 for what is far below.
inline Floats exponential(Floats x) {
    const Floats lowest = Floats{} - 87.0f;
    const auto vanishes = x < lowest;
    x = vanishes ? lowest : x;
    const Floats magic = Floats{} + 0x1.8p23f;  // which rounds to a whole number
    const Floats whole = x * 0x1.715476p0f + magic, n = whole - magic;
    const Floats r = (x - n * 0x1.62e4p-1f) - n * 0x1.7f7d1cp-20f;  // ln 2 in two parts
    Floats p = r * (1.0f / 720) + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const Words bits = (Words)p + ((Words)whole << 23);
    return vanishes ? Floats{} : (Floats)bits;
}

template <class Combine>
inline float reduced(Floats vector, Combine combine) {
    float lanes[LANES];
    std::memcpy(lanes, &vector, sizeof vector);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = combine(lanes[i], lanes[i + width]);
    return lanes[0];
}

// sums[row, 0 .. PANEL] = sums * factor[row] + weights[row, 0 .. count] v
template <int ROWS>
void mix(const float* v, int64_t stride, int64_t count, const float* weights, const float* factor, float* sums, int64_t dim) {
    Floats sum[ROWS][VECTORS];
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < VECTORS; i++) sum[row][i] = load<Floats>(sums + row * dim + i * LANES) * factor[row];
    for (int64_t key = 0; key < count; key++, v += stride) {
        Floats value[VECTORS];
        for (int i = 0; i < VECTORS; i++) value[i] = load<Floats>(fetched(v + i * LANES));
        for (int row = 0; row < ROWS; row++)
            for (int i = 0; i < VECTORS; i++) sum[row][i] += value[i] * weights[row * KEYS + key];
    }
    for (int row = 0; row < ROWS; row++) std::memcpy(sums + row * dim, sum[row], sizeof sum[row]);
}

template <int ROWS = MOST>
inline void mixes(int64_t rows, const float* v, int64_t stride, int64_t count, const float* weights, const float* factor,
                  float* sums, int64_t dim) {
    if (rows == ROWS) return mix<ROWS>(v, stride, count, weights, factor, sums, dim);
    if constexpr (ROWS > 1) mixes<ROWS - 1>(rows, v, stride, count, weights, factor, sums, dim);
}

// Sizes and strides (in numbers; the last dimension of each tensor lies together).
struct Attention {
    int64_t batch, heads, kv_heads, width, live, dim;
    int64_t q_batch, q_head, q_width;     // q [batch, heads, width, dim]
    int64_t k_batch, k_head, k_live;      // k [batch, kv_heads, live, dim]
    int64_t v_batch, v_head, v_live;      // v likewise
    int64_t mask_batch, mask_width;       // mask [batch, width, live], added to the scores
};

// Of some rows: the greatest score so far, the sum of weights relative to it, and the weighted sum of v.
struct Sums {
    float *greatest, *weight, *value;
};

// What the keys of one part add for the heads of one K/V head at positions begin .. begin + count.
void attend(const Attention& a, const float* q, const float* k, const float* v, const float* mask, float scale,
            int64_t begin, int64_t count, int64_t first, int64_t last, float* mine, Sums to) {
    const int64_t groups = a.heads / a.kv_heads, rows = groups * count;
    float *queries = mine, *panel = queries + rows * a.dim, *scores = panel + PANEL * a.dim, *factor = scores + rows * KEYS;
    for (int64_t row = 0; row < rows; row++) {
        const float* from = q + row / count * a.q_head + (begin + row % count) * a.q_width;
        for (int64_t d = 0; d < a.dim; d++) queries[row * a.dim + d] = from[d] * scale;
        to.greatest[row] = HIDDEN, to.weight[row] = 0;
        std::fill_n(to.value + row * a.dim, a.dim, 0.0f);
    }
    for (; first < last; first += KEYS) {
        const int64_t keys = std::min(KEYS, last - first);
        bool is_seen = false;
        for (int64_t i = 0; i < count && !is_seen; i++) {
            const float* row = mask + (begin + i) * a.mask_width + first;
            for (int64_t key = 0; key < keys; key++) is_seen |= row[key] > HIDDEN;
        }
        if (!is_seen) continue;
        for (int64_t p = 0; p < keys; p += PANEL) {
            panel_of_keys(k + (first + p) * a.k_live, a.k_live, std::min<int64_t>(PANEL, keys - p), a.dim, panel);
            for (int64_t row = 0; row < rows; row += MOST)
                tiles<Float32>((const uint8_t*)panel, queries + row * a.dim, scores + row * KEYS + p,
                               std::min<int64_t>(MOST, rows - row), a.dim, KEYS, PANEL);
        }
        for (int64_t row = 0; row < rows; row++) {
            const float* added = mask + (begin + row % count) * a.mask_width + first;
            float *score = scores + row * KEYS, before = to.greatest[row];
            for (int64_t key = 0; key < keys; key++) score[key] += added[key];
            std::fill(score + keys, score + KEYS, 2 * HIDDEN);
            Floats most = Floats{} + before, total = {};
            for (int64_t key = 0; key < KEYS; key += LANES) {
                const Floats s = load<Floats>(score + key);
                most = s > most ? s : most;
            }
            const float greatest = reduced(most, [](float x, float y) { return std::max(x, y); });
            for (int64_t key = 0; key < KEYS; key += LANES) {
                const Floats weight = exponential(load<Floats>(score + key) - greatest);
                std::memcpy(score + key, &weight, sizeof weight);
                total += weight;
            }
            factor[row] = exponential(Floats{} + (before - greatest))[0];
            to.greatest[row] = greatest;
            to.weight[row] = to.weight[row] * factor[row] + reduced(total, [](float x, float y) { return x + y; });
        }
        for (int64_t row = 0; row < rows; row += MOST)
            for (int64_t d = 0; d < a.dim; d += PANEL)
                mixes(std::min<int64_t>(MOST, rows - row), v + first * a.v_live + d, a.v_live, keys, scores + row * KEYS,
                      factor + row, to.value + row * a.dim + d, a.dim);
    }
}

}  // namespace

extern "C" int panel_rows() { return PANEL; }

// out [batch, width, heads, dim]; dim is a multiple of BLOCK.
extern "C" void attention(const float* q, const float* k, const float* v, const float* mask, float* out,
                          const Attention* sizes, float scale, int threads) {
    const Attention& a = *sizes;
    const int64_t groups = a.heads / a.kv_heads, parts = (a.live + PART - 1) / PART;
    const int64_t chunks = (a.width + QUERIES - 1) / QUERIES, rows = groups * std::min(QUERIES, a.width);
    const int64_t tasks = a.batch * a.kv_heads * chunks, kept = rows * (2 + a.dim);
    float* const sums = scratch<0>(tasks * parts * kept);
    const auto sums_of = [&](int64_t task, int64_t part) {
        float* at = sums + (task * parts + part) * kept;
        return Sums{at, at + rows, at + 2 * rows};
    };
#pragma omp parallel num_threads(threads)
    {
        float* const mine = scratch<1>(rows * (a.dim + KEYS + 1) + PANEL * a.dim);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tasks * parts; i++) {
            const int64_t task = i / parts, part = i % parts, chunk = task % chunks;
            const int64_t head = task / chunks % a.kv_heads, batch = task / chunks / a.kv_heads;
            const int64_t begin = chunk * QUERIES, count = std::min(QUERIES, a.width - begin);
            attend(a, q + batch * a.q_batch + head * groups * a.q_head, k + batch * a.k_batch + head * a.k_head,
                   v + batch * a.v_batch + head * a.v_head, mask + batch * a.mask_batch, scale, begin, count, part * PART,
                   std::min((part + 1) * PART, a.live), mine, sums_of(task, part));
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t chunk = task % chunks, head = task / chunks % a.kv_heads, batch = task / chunks / a.kv_heads;
            const int64_t begin = chunk * QUERIES, count = std::min(QUERIES, a.width - begin);
            for (int64_t row = 0; row < groups * count; row++) {
                float greatest = HIDDEN, weight = 0;
                for (int64_t part = 0; part < parts; part++)
                    greatest = std::max(greatest, sums_of(task, part).greatest[row]);
                float* to = out + ((batch * a.width + begin + row % count) * a.heads + head * groups + row / count) * a.dim;
                std::fill_n(to, a.dim, 0.0f);
                for (int64_t part = 0; part < parts; part++) {
                    const Sums from = sums_of(task, part);
                    if (from.weight[row] == 0) continue;
                    const float share = exponential(Floats{} + (from.greatest[row] - greatest))[0];
                    weight += from.weight[row] * share;
                    for (int64_t d = 0; d < a.dim; d++) to[d] += from.value[row * a.dim + d] * share;
                }
                for (int64_t d = 0; d < a.dim; d++) to[d] /= weight;
            }
        }
    }
}

#define PRODUCT(name, Format)                                                                                        \
    extern "C" void name(const uint8_t* w, const float* x, float* y, int64_t rows, int64_t in, int64_t out, int threads) { \
        for (int64_t row = 0; row < rows; row += SLAB)                                                               \
            multiply<Format>(w, x + row * in, y + row * out, rows - row < SLAB ? rows - row : SLAB, in, out, threads); \
    }

PRODUCT(float32, Float32)
PRODUCT(bfloat16, BFloat16)
PRODUCT(float16, Float16)
PRODUCT(int8, Int8)
PRODUCT(int4, Int4)
