// The best tokens of scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "vectors.h"

namespace {

struct Best {
    float score = -INFINITY;
    int64_t token = -1;
    bool is_nan = false;  // whether one of the scores is

    void meet(const Best& later) {
        const bool any = is_nan || later.is_nan;
        if (later.score > score) *this = later;
        is_nan = any;
    }
};

// The first token with the greatest of the scores [begin, end).
Best best_within(const float* scores, int64_t begin, int64_t end) {
    Best best;
    for (int64_t run = begin; run < end; run += 16 * RUN) {
        const int64_t last = std::min(end, run + 16 * RUN);
        Floats nearest = Floats{} - INFINITY;
        Words unordered = {};
        int64_t i = run;
        for (; i + LANES <= last; i += LANES) {
            const Floats some = load<Floats>(scores + i);
            nearest = some > nearest ? some : nearest;
            unordered |= some != some;
        }
        float greatest = reduced(nearest, [](float x, float y) { return std::max(x, y); });
        for (int lane = 0; lane < LANES; lane++) best.is_nan |= unordered[lane] != 0;
        for (; i < last; i++) best.is_nan |= std::isnan(scores[i]), greatest = std::max(greatest, scores[i]);
        if (greatest > best.score) best.score = greatest, best.token = run;  // where the run begins, until it is known
    }
    while (best.token >= 0 && best.token < end - 1 && scores[best.token] != best.score) best.token++;
    return best;
}

// Of each row of scores, size of them, step apart, the first token with the greatest; -1 where none is above -inf, or
// one is NaN. Threads share the columns nearly as in a product: what they computed there they find in their own caches.
void best_tokens(const float* scores, int64_t rows, int64_t size, int64_t step, int64_t* tokens, int threads) {
    std::vector<Best> parts(rows * threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > 0)
    for (int part = 0; part < threads; part++)
        for (int64_t row = 0; row < rows; row++)
            parts[row * threads + part] =
                best_within(scores + row * step, size * part / threads, size * (part + 1) / threads);
    for (int64_t row = 0; row < rows; row++) {
        Best best;
        for (int part = 0; part < threads; part++) best.meet(parts[row * threads + part]);
        tokens[row] = best.is_nan ? -1 : best.token;
    }
}

}  // namespace
