// Tokens drawn from laws (see dice.py): float32 [size], not negative. A law that is NaN, or has no mass, gives token 0.
#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace {

constexpr int64_t LONGS = 8;  // numbers of 64 bits side by side
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

using Longs = uint64_t __attribute__((vector_size(8 * LONGS)));
using Doubles = double __attribute__((vector_size(8 * LONGS)));

inline double mass(const float* law, int64_t size) {
    double lanes[LONGS] = {};
    int64_t i = 0;
    for (; i + LONGS <= size; i += LONGS)
        for (int64_t lane = 0; lane < LONGS; lane++) lanes[lane] += law[i + lane];
    for (; i < size; i++) lanes[0] += law[i];
    double sum = 0;
    for (const double lane : lanes) sum += lane;
    return sum;
}

// The first token whose cumulative mass is above u times the whole.
int64_t drawn(const float* law, int64_t size, double u) {
    const int64_t runs = (size + RUN - 1) / RUN;
    double* const masses = (double*)scratch<9>(2 * runs);
    double total = 0;
    for (int64_t run = 0; run < runs; run++)
        total += masses[run] = mass(law + run * RUN, std::min(RUN, size - run * RUN));
    const double wanted = u * total;
    double before = 0;
    for (int64_t run = 0; run < runs; before += masses[run++]) {
        if (!(before + masses[run] > wanted)) continue;
        int64_t token = 0;
        for (int64_t i = run * RUN; i < std::min(size, (run + 1) * RUN); i++) {
            if (!(law[i] > 0)) continue;
            token = i;  // the last one, where the sum of the run was rounded up
            if ((before += law[i]) > wanted) break;
        }
        return token;
    }
    return 0;  // NaN, or no mass
}

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
template <class Numbers>
inline Numbers mixed(Numbers x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// 2^52 times the noise of a token, less 1/2: its upper 52 bits.
inline double noise(uint64_t key, int64_t token) { return (double)(mixed(key + (token + 1) * GOLDEN) >> 12); }

// The first token with the least -log(noise) / law. As -log x is at least 1 - x, few logarithms are needed.
int64_t winner(const float* law, int64_t size, uint64_t key) {
    constexpr double scale = 0x1p-52, margin = 1 - 1e-9;
    int64_t first = 0;
    double best = INFINITY;
    const auto run = [&](int64_t token) {
        const double time = -std::log((noise(key, token) + 0.5) * scale) / law[token];
        if (time < best) best = time, first = token;
    };
    Longs numbers;
    for (int64_t lane = 0; lane < LONGS; lane++) numbers[lane] = key + (lane + 1) * GOLDEN;
    int64_t token = 0;
    for (; token + LONGS <= size; token += LONGS, numbers += LONGS * GOLDEN) {
        const Longs bits = (mixed(numbers) >> 12) | 0x4330000000000000;  // a double of 2^52 and the noise
        const Doubles rest = (0x1p52 - 0.5) - ((Doubles)bits - 0x1p52);  // 2^52 (1 - noise)
        float masses[LONGS];
        std::memcpy(masses, law + token, sizeof masses);
        Doubles reach;
        for (int64_t lane = 0; lane < LONGS; lane++) reach[lane] = masses[lane] * (best / scale);
        const auto is_near = rest * margin < reach;
        int64_t near[LONGS], any = 0;
        std::memcpy(near, &is_near, sizeof near);
        for (const int64_t lane : near) any |= lane;
        for (int64_t lane = 0; any && lane < LONGS; lane++)
            if (near[lane]) run(token + lane);
    }
    for (; token < size; token++) run(token);
    return first;
}

}  // namespace
