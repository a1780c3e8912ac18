// Vectors of float32, as long as the processor has them: GCC's vector types, no intrinsics.
#pragma once

#include <cstdint>
#include <cstring>
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
constexpr int64_t AHEAD = 8192;  // bytes
constexpr int64_t RUN = 64;      // numbers of a long row that are looked at together

using Floats = float __attribute__((vector_size(4 * LANES)));
using Words = int32_t __attribute__((vector_size(4 * LANES)));
using Bits = uint32_t __attribute__((vector_size(4 * LANES)));  // which may overflow

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
    if ((int64_t)memory.size() < floats + aligned) {
        memory = {};  // before it grows: nothing in it is needed
        memory.resize(floats + aligned);
    }
    return memory.data() + aligned - (uintptr_t)memory.data() % 64 / 4;
}

template <int STEP>
constexpr int mixed(int lane, bool upper) {
    return upper ? (lane & STEP ? LANES + lane : lane + STEP) : (lane & STEP ? LANES + lane - STEP : lane);
}

template <int STEP, bool UPPER, int... LANE>
inline Floats shuffle(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
    return __builtin_shuffle(a, b, Words{mixed<STEP>(LANE, UPPER)...});
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

// e^x for x <= 0, within 3 units in the last place; 1 for 0, 0 for what is far below, and NaN for NaN.
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
    const Bits bits = (Bits)p + ((Bits)whole << 23);
    return vanishes ? Floats{} : x != x ? x : (Floats)bits;
}

template <class Combine>
inline float reduced(Floats vector, Combine combine) {
    float lanes[LANES];
    std::memcpy(lanes, &vector, sizeof vector);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = combine(lanes[i], lanes[i + width]);
    return lanes[0];
}

// What is found of each row of size numbers, and its option.
template <class Option, class Found, class Find>
void each(const float* from, int64_t rows, int64_t size, const Option* options, Found* found, int threads, Find find) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++) found[row] = find(from + row * size, size, options[row]);
}

}  // namespace
