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
#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace {

constexpr int DIRECT = 3;      // groups of MOST rows for which widening again is cheaper than keeping it
constexpr int64_t SLAB = 256;  // rows of x that stay in the cache while all of w passes by

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

// One panel times ROWS rows of x; added to what is in y, or in its place.
template <class Format, int ROWS>
void tile(const uint8_t* panel, const float* x, float* y, int64_t in, int64_t out, int64_t width, bool adds) {
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
    for (int row = 0; row < ROWS; row++) {
        if (adds) {
            Floats before[VECTORS] = {};
            std::memcpy(before, y + row * out, 4 * width);
            for (int v = 0; v < VECTORS; v++) total[row][v] += before[v];
        }
        std::memcpy(y + row * out, total[row], 4 * width);
    }
}

template <class Format, int ROWS = MOST>
inline void tiles(const uint8_t* panel, const float* x, float* y, int64_t rows, int64_t in, int64_t out, int64_t width,
                  bool adds) {
    if (rows == ROWS) return tile<Format, ROWS>(panel, x, y, in, out, width, adds);
    if constexpr (ROWS > 1) tiles<Format, ROWS - 1>(panel, x, y, rows, in, out, width, adds);
}

template <class Format>
void slab(const uint8_t* w, const float* x, float* y, int64_t rows, int64_t in, int64_t out, bool adds, int threads) {
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
                    tiles<Float32>(wide, x + begin * in, to, end - begin, in, out, width, adds);
                else
                    tiles<Format>(panel, x + begin * in, to, end - begin, in, out, width, adds);
            }
        }
    }
}

template <class Format>
void multiply(const uint8_t* w, const float* x, float* y, int64_t rows, int64_t in, int64_t out, bool adds,
              int threads) {
    for (int64_t row = 0; row < rows; row += SLAB)
        slab<Format>(w, x + row * in, y + row * out, std::min(SLAB, rows - row), in, out, adds, threads);
}

using Multiply = void (*)(const uint8_t*, const float*, float*, int64_t, int64_t, int64_t, bool, int);
constexpr Multiply MULTIPLY[] = {multiply<Int4>, multiply<Int8>, multiply<BFloat16>, multiply<Float16>,
                                 multiply<Float32>};

}  // namespace
