// softmax(scale q k^T + mask) v, over keys in parts of fixed places: a position's result does not depend on how many
// others are computed with it, on threads, or on keys that are hidden.
#pragma once

#include "products.h"

namespace {

constexpr int64_t KEYS = 128;     // keys whose scores are computed together
constexpr int64_t PART = 256;     // keys after which the sums begin anew, so that threads can share a row of K and V
constexpr int64_t QUERIES = 64;   // positions whose heads read K and V together
constexpr float HIDDEN = -1e30f;  // what a mask adds to scores that do not count is less

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

// sums[row, 0 .. PANEL] = sums * factor[row] + weights[row, 0 .. count] v
template <int ROWS>
void mix(const float* v, int64_t stride, int64_t count, const float* weights, const float* factor, float* sums,
         int64_t dim) {
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
inline void mixes(int64_t rows, const float* v, int64_t stride, int64_t count, const float* weights,
                  const float* factor, float* sums, int64_t dim) {
    if (rows == ROWS) return mix<ROWS>(v, stride, count, weights, factor, sums, dim);
    if constexpr (ROWS > 1) mixes<ROWS - 1>(rows, v, stride, count, weights, factor, sums, dim);
}

// Sizes and strides (in numbers; the last dimension of each tensor lies together).
struct Attention {
    int64_t batch, heads, kv_heads, width, live, dim;
    int64_t q_batch, q_head, q_width;  // q [batch, heads, width, dim]
    int64_t k_batch, k_head, k_live;   // k [batch, kv_heads, live, dim]
    int64_t v_batch, v_head, v_live;   // v likewise
    int64_t mask_batch, mask_width;    // mask [batch, width, live], added to the scores
    int64_t window;                    // without a mask: keys that a position sees, its own the last; 0 for all
};

// What positions see: a mask, or (null) the keys up to their own slots.
struct Sight {
    const float* mask;
    const int64_t* slots;
};

// Of some keys those that a position sees.
struct Range {
    int64_t begin, end;
};

inline Range seen(const Attention& a, int64_t slot, int64_t first, int64_t keys) {
    const auto within = [&](int64_t key) { return std::min(std::max<int64_t>(key - first, 0), keys); };
    return {a.window ? within(slot + 1 - a.window) : 0, within(slot + 1)};
}

// Of some rows: the greatest score so far, the sum of weights relative to it, and the weighted sum of v.
struct Sums {
    float *greatest, *weight, *value;
};

// What the keys of one part add for the heads of one K/V head at positions begin .. begin + count.
void attend(const Attention& a, const float* q, const float* k, const float* v, Sight sight, float scale, int64_t begin,
            int64_t count, int64_t first, int64_t last, float* mine, Sums to) {
    const int64_t groups = a.heads / a.kv_heads, rows = groups * count;
    float *queries = mine, *panel = queries + rows * a.dim, *scores = panel + PANEL * a.dim,
          *factor = scores + rows * KEYS;
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
            if (!sight.mask) {
                const Range range = seen(a, sight.slots[begin + i], first, keys);
                is_seen = range.begin < range.end;
                continue;
            }
            const float* row = sight.mask + (begin + i) * a.mask_width + first;
            for (int64_t key = 0; key < keys; key++) is_seen |= row[key] > HIDDEN;
        }
        if (!is_seen) continue;
        for (int64_t p = 0; p < keys; p += PANEL) {
            panel_of_keys(k + (first + p) * a.k_live, a.k_live, std::min<int64_t>(PANEL, keys - p), a.dim, panel);
            for (int64_t row = 0; row < rows; row += MOST)
                tiles<Float32>((const uint8_t*)panel, queries + row * a.dim, scores + row * KEYS + p,
                               std::min<int64_t>(MOST, rows - row), a.dim, KEYS, PANEL, false);
        }
        for (int64_t row = 0; row < rows; row++) {
            const int64_t position = begin + row % count;
            float *score = scores + row * KEYS, before = to.greatest[row];
            Range range = {0, keys};
            if (sight.mask) {
                const float* added = sight.mask + position * a.mask_width + first;
                for (int64_t key = 0; key < keys; key++) score[key] += added[key];
            } else {
                range = seen(a, sight.slots[position], first, keys);
            }
            std::fill(score, score + range.begin, 2 * HIDDEN);
            std::fill(score + range.end, score + KEYS, 2 * HIDDEN);
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
                mixes(std::min<int64_t>(MOST, rows - row), v + first * a.v_live + d, a.v_live, keys,
                      scores + row * KEYS, factor + row, to.value + row * a.dim + d, a.dim);
    }
}

// Adds the sums of further keys to those of some rows.
inline void absorb(const Sums& total, const Sums& part, int64_t rows, int64_t dim) {
    for (int64_t row = 0; row < rows; row++) {
        if (part.weight[row] == 0) continue;
        const float greatest = std::max(total.greatest[row], part.greatest[row]);
        const float before = exponential(Floats{} + (total.greatest[row] - greatest))[0];
        const float now = exponential(Floats{} + (part.greatest[row] - greatest))[0];
        float *sum = total.value + row * dim, *added = part.value + row * dim;
        for (int64_t d = 0; d < dim; d++) sum[d] = sum[d] * before + added[d] * now;
        total.greatest[row] = greatest;
        total.weight[row] = total.weight[row] * before + part.weight[row] * now;
    }
}

// out [batch, width, heads, dim]; dim is a multiple of BLOCK. kv_rows tells which row of k and v a row of q reads; null
// for the same. starts [batch + 1] are the places of rows of different widths, which lie one behind the other in q and
// out, as slots [tokens] do; null where all have the same. A position that sees no key gets zeros.
//
// The parts of a task are computed one after the other, and where there are too few tasks, by all threads: either way
// they are added up in order.
void attention(const Attention& a, const float* q, const float* k, const float* v, Sight sight, const int64_t* kv_rows,
               const int64_t* starts, float* out, float scale, int threads) {
    const int64_t groups = a.heads / a.kv_heads, parts = (a.live + PART - 1) / PART;
    const int64_t chunks = (a.width + QUERIES - 1) / QUERIES, rows = groups * std::min(QUERIES, a.width);
    const int64_t tasks = a.batch * a.kv_heads * chunks, kept = rows * (2 + a.dim);
    const bool shares = chunks == 1 && tasks < 4 * threads && parts > 1;
    float* const shared = shares ? scratch<0>(tasks * parts * kept) : nullptr;
    const auto sums_at = [&](float* at) { return Sums{at, at + rows, at + 2 * rows}; };
    const auto start_of = [&](int64_t batch) { return starts ? starts[batch] : batch * a.width; };
    const auto count_from = [&](int64_t batch, int64_t begin) {
        return std::min(QUERIES, start_of(batch + 1) - start_of(batch) - begin);
    };
    const auto compute = [&](int64_t task, int64_t part, float* mine, Sums to) {
        const int64_t head = task / chunks % a.kv_heads, batch = task / chunks / a.kv_heads;
        const int64_t begin = task % chunks * QUERIES, count = count_from(batch, begin);
        const int64_t row = kv_rows ? kv_rows[batch] : batch;
        const float* queries = q + (starts ? starts[batch] * a.q_width : batch * a.q_batch);
        if (count <= 0) return;
        const Sight sees = {sight.mask ? sight.mask + batch * a.mask_batch : nullptr,
                            sight.slots ? sight.slots + start_of(batch) : nullptr};
        attend(a, queries + head * groups * a.q_head, k + row * a.k_batch + head * a.k_head,
               v + row * a.v_batch + head * a.v_head, sees, scale, begin, count, part * PART,
               std::min((part + 1) * PART, a.live), mine, to);
    };
#pragma omp parallel num_threads(threads)
    {
        float* const mine = scratch<1>(2 * kept + rows * (a.dim + KEYS + 1) + PANEL * a.dim);
        const Sums total = sums_at(mine), next = sums_at(mine + kept);
        if (shares) {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < tasks * parts; i++)
                compute(i / parts, i % parts, mine + 2 * kept, sums_at(shared + i * kept));
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t head = task / chunks % a.kv_heads, batch = task / chunks / a.kv_heads;
            const int64_t begin = task % chunks * QUERIES, count = count_from(batch, begin);
            if (count <= 0) continue;
            std::fill_n(total.greatest, rows, HIDDEN);
            std::fill_n(total.weight, rows, 0.0f);
            std::fill_n(total.value, rows * a.dim, 0.0f);
            for (int64_t part = 0; part < parts; part++) {
                if (!shares) compute(task, part, mine + 2 * kept, next);
                absorb(total, shares ? sums_at(shared + (task * parts + part) * kept) : next, groups * count, a.dim);
            }
            for (int64_t row = 0; row < groups * count; row++) {
                const int64_t position = start_of(batch) + begin + row % count;
                float* const to = out + (position * a.heads + head * groups + row / count) * a.dim;
                const float weight = total.weight[row] == 0 ? 1.0f : total.weight[row];
                for (int64_t d = 0; d < a.dim; d++) to[d] = total.value[row * a.dim + d] / weight;
            }
        }
    }
}

}  // namespace
