// Layers of a decoder: attention and a gated feed-forward block, each behind a norm, added to the hidden states.
#pragma once

#include <cmath>

#include "attention.h"
#include "best.h"

namespace {

struct Layer {
    const uint8_t* weights[4];  // of queries, keys and values; of what they are mixed to; of gate and up; of down
    const float* biases[4];     // or null
    int64_t formats[4];         // places in MULTIPLY
    const float *first_norm, *second_norm, *head_norm;  // the last [heads + kv_heads, dim], or null
    double first_eps, second_eps, head_eps;
    float *keys, *values;  // [rows, kv_heads, capacity, dim]
};

enum Part { QKV, OUT, GATE_UP, DOWN };

constexpr int64_t FEW = 16;  // tokens for which it is not worth waking other threads

// Root mean square norm; y may be x.
inline void norm(const float* x, const float* weight, double eps, float* y, int64_t dim) {
    Floats squares = {};
    for (int64_t d = 0; d < dim; d += LANES) {
        const Floats part = load<Floats>(x + d);
        squares += part * part;
    }
    const float sum = reduced(squares, [](float a, float b) { return a + b; });
    const float scale = 1 / std::sqrt(sum / dim + (float)eps);
    for (int64_t d = 0; d < dim; d++) y[d] = x[d] * scale * weight[d];
}

// Rotary positions, in place: the halves of x are the two coordinates.
inline void rotate(float* x, const float* cosines, const float* sines, int64_t dim) {
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d++) {
        const float left = x[d], right = x[d + half];
        x[d] = left * cosines[d] - right * sines[d];
        x[d + half] = right * cosines[d + half] + left * sines[d + half];
    }
}

// silu(gate) * up
inline void gate(const float* gates, const float* ups, float* y, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats x = load<Floats>(gates + i), up = load<Floats>(ups + i);
        const Floats e = exponential(x > 0 ? -x : x);
        const Floats active = x * (x > 0 ? Floats{} + 1.0f : e) / (e + 1.0f) * up;
        std::memcpy(y + i, &active, sizeof active);
    }
}

void project(const Layer& layer, Part part, const float* x, float* y, int64_t tokens, int64_t in, int64_t out,
             bool adds, int threads) {
    MULTIPLY[layer.formats[part]](layer.weights[part], x, y, tokens, in, out, adds, threads);
    if (const float* bias = layer.biases[part])
        for (int64_t token = 0; token < tokens; token++)
            for (int64_t i = 0; i < out; i++) y[token * out + i] += bias[i];
}

// hidden [tokens, dim] goes through count layers in place. The tokens of a row, at most a.width of them, lie together;
// starts [batch + 1] are the places of rows among them. rows [batch] and slots [tokens] tell where K and V are written;
// cosines and sines are [tokens, a.dim]. Without a mask a position sees the slots up to its own, and cosines and sines
// are [slots, a.dim].
void layers(const Layer* layer, int64_t count, const Attention& a, int64_t dim, int64_t inner, float* hidden,
            const float* cosines, const float* sines, const float* mask, const int64_t* rows, const int64_t* starts,
            const int64_t* slots, float scale, int threads) {
    const int64_t tokens = starts[a.batch], rotating = a.heads + a.kv_heads, all = rotating + a.kv_heads;
    float *const normed = scratch<2>(tokens * dim), *const states = scratch<3>(tokens * all * a.dim);
    float *const mixed = scratch<4>(tokens * a.heads * a.dim), *const wide = scratch<5>(tokens * 2 * inner);
    float* const active = scratch<6>(tokens * inner);
    for (const Layer* end = layer + count; layer < end; layer++) {
#pragma omp parallel for num_threads(threads) if (tokens >= FEW)
        for (int64_t t = 0; t < tokens; t++)
            norm(hidden + t * dim, layer->first_norm, layer->first_eps, normed + t * dim, dim);
        project(*layer, QKV, normed, states, tokens, dim, all * a.dim, false, threads);
#pragma omp parallel for num_threads(threads) if (tokens >= FEW)
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t slot = slots[t], angle = (mask ? t : slot) * a.dim;
            const int64_t row = rows[std::upper_bound(starts, starts + a.batch, t) - starts - 1];
            for (int64_t head = 0; head < all; head++) {
                float* x = states + (t * all + head) * a.dim;
                if (head < rotating) {
                    if (layer->head_norm) norm(x, layer->head_norm + head * a.dim, layer->head_eps, x, a.dim);
                    rotate(x, cosines + angle, sines + angle, a.dim);
                }
                if (head >= rotating)
                    std::memcpy(layer->values + row * a.v_batch + (head - rotating) * a.v_head + slot * a.v_live, x,
                                4 * a.dim);
                else if (head >= a.heads)
                    std::memcpy(layer->keys + row * a.k_batch + (head - a.heads) * a.k_head + slot * a.k_live, x,
                                4 * a.dim);
            }
        }
        attention(a, states, layer->keys, layer->values, {mask, slots}, rows, starts, mixed, scale, threads);
        project(*layer, OUT, mixed, hidden, tokens, a.heads * a.dim, dim, true, threads);
#pragma omp parallel for num_threads(threads) if (tokens >= FEW)
        for (int64_t t = 0; t < tokens; t++)
            norm(hidden + t * dim, layer->second_norm, layer->second_eps, normed + t * dim, dim);
        project(*layer, GATE_UP, normed, wide, tokens, dim, 2 * inner, false, threads);
#pragma omp parallel for num_threads(threads) if (tokens >= FEW)
        for (int64_t t = 0; t < tokens; t++)
            gate(wide + t * 2 * inner, wide + t * 2 * inner + inner, active + t * inner, inner);
        project(*layer, DOWN, active, hidden, tokens, inner, dim, true, threads);
    }
}

// What is around the layers of a model. Angles are [slots, a.dim].
struct Around {
    const float *embeddings, *cosines, *sines, *norm, *bias;  // bias may be null
    const uint8_t* head;
    int64_t format, outputs, known;  // the first outputs are of tokens
    double eps;
};

// ids [tokens] to the scores [sum of asked, outputs] behind the last asked[row] tokens of each row, and the best known
// token of each; for the rest see layers.
void pass(const Around& around, const Layer* layer, int64_t count, const Attention& a, int64_t dim, int64_t inner,
          const int64_t* ids, const int64_t* rows, const int64_t* starts, const int64_t* slots, const int64_t* asked,
          float* scores, int64_t* best, float scale, int threads) {
    const int64_t tokens = starts[a.batch];
    float *const hidden = scratch<7>(tokens * dim), *normed = scratch<8>(tokens * dim);
    for (int64_t t = 0; t < tokens; t++) std::memcpy(hidden + t * dim, around.embeddings + ids[t] * dim, 4 * dim);
    layers(layer, count, a, dim, inner, hidden, around.cosines, around.sines, nullptr, rows, starts, slots, scale,
           threads);
    int64_t wanted = 0;
    for (int64_t row = 0; row < a.batch; row++)
        for (int64_t t = starts[row + 1] - asked[row]; t < starts[row + 1]; t++)
            norm(hidden + t * dim, around.norm, around.eps, normed + wanted++ * dim, dim);
    MULTIPLY[around.format](around.head, normed, scores, wanted, dim, around.outputs, false, threads);
    if (around.bias)
        for (int64_t i = 0; i < wanted * around.outputs; i++) scores[i] += around.bias[i % around.outputs];
    best_tokens(scores, wanted, around.known, around.outputs, best, threads);
}

}  // namespace
