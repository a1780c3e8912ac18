// What Python calls (see kernels.py and compiled.py). Tensors are float32 and lie on a CPU.

#include "layers.h"

extern "C" int panel_rows() { return PANEL; }

// format: a place in MULTIPLY.
extern "C" void product(int64_t format, const uint8_t* w, const float* x, float* y, int64_t rows, int64_t in,
                        int64_t out, int threads) {
    MULTIPLY[format](w, x, y, rows, in, out, false, threads);
}

extern "C" void attention(const float* q, const float* k, const float* v, const float* mask, float* out,
                          const Attention* sizes, float scale, int threads) {
    attention(*sizes, q, k, v, mask, nullptr, out, scale, threads);
}

extern "C" void layers(const Layer* layer, int64_t count, const Attention* sizes, int64_t dim, int64_t inner,
                       float* hidden, const float* cosines, const float* sines, int64_t angle_batch, const float* mask,
                       const int64_t* rows, const int64_t* slots, float scale, int threads) {
    layers(layer, count, *sizes, dim, inner, hidden, cosines, sines, angle_batch, mask, rows, slots, scale, threads);
}
